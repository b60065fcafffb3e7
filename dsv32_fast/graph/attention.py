"""The attention of one decode layer under graphs: staged inputs, metadata built outside, gather and decode captured.

A step stages its inputs, builds its metadata (the plan included, unless the builder's cache holds), and replays the
graph of the next captured size, as vLLM's sparse backend does in decode. The same `attend` runs eagerly.

Legend: T rows of the step, S rows of the graph, H heads, D latent + RoPE, C latent, K topk, N largest size.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from dsv32_fast.attention import attend_planned, gather_indices
from dsv32_fast.batch import StepBatch
from dsv32_fast.graph.queues import Queues, Staging
from dsv32_fast.graph.runner import GraphRunner, StepCall
from dsv32_fast.kernels.protocol import MlaKernels
from dsv32_fast.metadata import MetadataBuilder, SparseMlaMetadata


class StepBuffers(NamedTuple):
    """What outlives a step besides the metadata, at the same addresses all the time."""

    q_NHD: torch.Tensor
    """bf16 queries."""
    slots_NK: torch.Tensor
    """int32: the cache slot of each selected token."""
    o_NHC: torch.Tensor
    """bf16 result."""

    def rows(self, size: int) -> StepBuffers:
        """Views of the first `size` rows."""
        return StepBuffers(*(buffer[:size] for buffer in self))


def allocate(
    rows: int, heads: int, dim: int, latent: int, topk: int, device: torch.device | None = None
) -> StepBuffers:
    """Zeroed buffers for the largest captured size."""
    return StepBuffers(
        q_NHD=torch.zeros(rows, heads, dim, dtype=torch.bfloat16, device=device),
        slots_NK=torch.zeros(rows, topk, dtype=torch.int32, device=device),
        o_NHC=torch.zeros(rows, heads, latent, dtype=torch.bfloat16, device=device),
    )


def attend(
    kernels: MlaKernels, buffers: StepBuffers, metadata: SparseMlaMetadata, kv: torch.Tensor, sm_scale: float
) -> None:
    """Gather and decode: writes `buffers.o_NHC` of as many rows as `buffers` has; `kv` is bf16 [slots, 1, 1, D]."""
    gather_indices(buffers.slots_NK, metadata.paged_kv_indptr_T1, metadata.paged_kv_indices)
    attend_planned(buffers.q_NHD, kv, buffers.o_NHC, metadata, sm_scale, kernels)


RENEWED = ("q", "slots", "req_id_per_token", "paged_kv_indptr")
"""What belongs to one step; the plan is not among it, since a cached one is used again on purpose."""


def step_call(
    buffers: StepBuffers, metadata: SparseMlaMetadata, kv: torch.Tensor, sm_scale: float, renewed: tuple[str, ...]
) -> StepCall:
    """What `attend` depends on."""
    tensors = {
        "q": buffers.q_NHD,
        "slots": buffers.slots_NK,
        "o": buffers.o_NHC,
        "kv": kv,
        "req_id_per_token": metadata.req_id_per_token_T,
        "qo_indptr": metadata.qo_indptr_T1,
        "paged_kv_indptr": metadata.paged_kv_indptr_T1,
        "paged_kv_last_page_len": metadata.paged_kv_last_page_len_T,
        "paged_kv_indices": metadata.paged_kv_indices,
        **metadata.plan._asdict(),
    }
    return StepCall(
        rows=metadata.num_tokens, tensors=tensors, outputs=("o",), renewed=renewed, scalars={"sm_scale": sm_scale}
    )


@dataclass(kw_only=True)
class GraphedAttention:
    """Captures the attention of one layer for every size of a runner, and replays it step by step.

    Attributes:
        kv: bf16 [slots, 1, 1, D], the latent cache; every slot that a row selects must hold finite values.
        queues: where builds, copies and replays run (the model); None uses the current stream of a real device.
    """

    builder: MetadataBuilder
    kernels: MlaKernels
    runner: GraphRunner
    buffers: StepBuffers
    kv: torch.Tensor
    sm_scale: float
    queues: Queues | None = None
    staging_depth: int = 2
    staging_waits: bool = True
    _staging: dict[str, Staging] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.queues is not None:
            targets = {"q": self.buffers.q_NHD, "slots": self.buffers.slots_NK}
            self._staging = {
                name: Staging(target, self.queues, depth=self.staging_depth, wait=self.staging_waits)
                for name, target in targets.items()
            }

    def capture(self) -> None:
        """Capture every size, largest first, each after a dummy build as engines do: full rows of topk tokens."""
        kernels = self.runner.recording(self.kernels)
        for size in reversed(self.runner.sizes):
            topk = self.builder.config.topk
            metadata = self.build(StepBatch(query_lens=(1,) * size, seq_lens=(topk,) * size))
            views = self.buffers.rows(size)
            call = step_call(views, metadata, self.kv, self.sm_scale, RENEWED)
            body = functools.partial(attend, kernels, views, metadata, self.kv, self.sm_scale)
            self.runner.capture(size, body, call)

    def step(self, step: StepBatch, q_THD: torch.Tensor, slots_TK: torch.Tensor) -> torch.Tensor:
        """Replay one decode step of T live rows; returns a view of the result [T, H, C], done when `main` is.

        `step` must already be padded: `StepBatch.num_tokens` is a captured size.

        Raises:
            ValueError: nothing was captured for that size, or the inputs do not have one row per query token.
            GraphFaultError: the log is strict and the replay would not compute this step.
        """
        T = step.num_query_tokens
        for name, rows in (("q", q_THD), ("slots", slots_TK)):
            if rows.shape[0] != T:
                raise ValueError(
                    f"{name} has {rows.shape[0]} rows, the step has {T} query tokens; pass one row for each"
                )
        metadata = self.build(step)
        self.put("q", q_THD)
        self.put("slots", slots_TK)
        self.replay(metadata, metadata.num_tokens)
        return self.buffers.o_NHC[:T]

    def put(self, name: str, rows: torch.Tensor) -> None:
        """Bring `rows` to the first rows of the input `name` (q or slots)."""
        if self.queues is not None:
            self._staging[name].put(name, rows)
        else:
            target = self.buffers.q_NHD if name == "q" else self.buffers.slots_NK
            target[: rows.shape[0]].copy_(rows, non_blocking=True)

    def build(self, step: StepBatch) -> SparseMlaMetadata:
        """The metadata of one step."""
        if self.queues is None:
            return self.builder.build(step)
        b = self.builder
        rewritten = (b.req_id_per_token_N, b.paged_kv_indices_NK, b.paged_kv_indptr_N1)
        return self.queues.run_now("main", "metadata build", lambda: self.builder.build(step), writes=rewritten)

    def replay(self, metadata: SparseMlaMetadata, size: int) -> None:
        """Replay the graph of `size` rows."""
        call = step_call(self.buffers.rows(size), metadata, self.kv, self.sm_scale, RENEWED)
        self.runner.replay(size, call)
