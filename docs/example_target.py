"""An example of a target of one's own: an engine that plans every step, put under the suite's checks.

Copy it, replace `TinyEngine` by what drives your engine, and register `open_tiny` under the entry-point group
`dsv32.targets` (docs/targets.md). It needs three things: what reached the planner in a step, what the attention layers
receive, and the buffers behind both.

Legend: T rows, N most rows, K topk.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from dsv32_fast.batch import StepBatch
from dsv32_fast.kernels import emulated
from dsv32_fast.metadata import SparseMlaMetadata
from dsv32_fast.plan import allocate
from dsv32_fuzz.case import Dims
from dsv32_fuzz.targets import PlannerInput, StepRecord


class TinyEngine:
    """The engine under test: plain buffers, cleared and planned anew in every step."""

    def __init__(self, dims: Dims, poison: int) -> None:
        n, self.dims = dims.max_num_batched_tokens, dims
        self.heads = max(16, dims.num_heads)
        self.req_ids_N = torch.zeros(n, dtype=torch.int32)
        self.indptr_N1 = torch.zeros(n + 1, dtype=torch.int32)
        self.indices_NK = torch.zeros(n * dims.topk, dtype=torch.int32)
        self.qo_N1 = torch.arange(n + 1, dtype=torch.int32)
        self.ones_N = torch.ones(n, dtype=torch.int32)
        bf16 = torch.bfloat16
        info = emulated.get_mla_metadata_info_v1(n, 1, self.heads, bf16, bf16, is_sparse=True, fast_mode=True)
        self.plan = allocate(info, fill=poison)

    def step(self, step: StepBatch) -> torch.Tensor:
        """Fill the buffers and plan; returns the KV length of each row, int32 [T]."""
        rows, live = step.num_tokens, step.num_query_tokens
        for buffer in (self.req_ids_N, self.indices_NK):
            buffer.zero_()
        lens_T = torch.zeros(rows, dtype=torch.int32)
        row = 0
        for request, (q, seq) in enumerate(zip(step.query_lens, step.seq_lens, strict=True)):
            self.req_ids_N[row : row + q] = request
            lens_T[row : row + q] = torch.arange(seq - q + 1, seq + 1).clamp_max(self.dims.topk)
            row += q
        assert row == live
        self.indptr_N1[1 : rows + 1] = torch.cumsum(lens_T, 0)
        self.indptr_N1[rows + 1 :] = int(self.indptr_N1[rows])
        emulated.get_mla_metadata_v1(
            self.qo_N1[: rows + 1],
            self.indptr_N1[: rows + 1],
            self.ones_N[:rows],
            self.heads,
            1,
            True,
            *self.plan.call_order(),
            max_seqlen_qo=1,
            uni_seqlen_qo=1,
        )
        return lens_T


@dataclass
class TinySession:
    """One engine's lifetime, told in the suite's words."""

    engine: TinyEngine

    def build(self, step: StepBatch) -> StepRecord:
        """Run a step and say what it did; the arrays are the engine's own buffers."""
        engine, rows = self.engine, step.num_tokens
        lens_T = engine.step(step).numpy()
        ones_T = np.ones(rows, np.int32)
        return StepRecord(
            launched=True,
            planner_input=PlannerInput(lens_T, ones_T, ones_T, (("heads", engine.heads),)),
            metadata=SparseMlaMetadata(
                num_tokens=rows,
                max_query_len=step.max_query_len,
                req_id_per_token_T=engine.req_ids_N[:rows],
                qo_indptr_T1=engine.qo_N1[: rows + 1],
                paged_kv_indptr_T1=engine.indptr_N1[: rows + 1],
                paged_kv_last_page_len_T=engine.ones_N[:rows],
                paged_kv_indices=engine.indices_NK[: rows * engine.dims.topk],
                plan=engine.plan,
            ),
            key=None,
            req_ids_N=engine.req_ids_N.numpy(),
            kv_indptr_N1=engine.indptr_N1.numpy(),
            kv_indices_NK=engine.indices_NK.numpy(),
            plan=engine.plan,
        )


@dataclass(frozen=True)
class TinyTarget:
    """What the entry point returns."""

    name: str = "tiny"
    evidence: str = "emulated"
    caches: bool = False
    options: None = None
    kernels: None = None

    def open(self, dims: Dims, *, rebuild: bool = False, poison: int = 0) -> TinySession:
        """An engine; it plans every step anyway, so the twin is another one."""
        del rebuild
        return TinySession(TinyEngine(dims, poison))


def open_tiny() -> TinyTarget:
    """The value of the entry point."""
    return TinyTarget()
