"""The sparse-MLA metadata builder of the optimised path: persistent buffers, a plan cache, and two clear policies.

What it builds each step is what vLLM's ROCm sparse backend builds (vLLM 0.22 to 0.27): one planner row per query token,
with the KV length L(r, j) = min(seq_r - q_r + j + 1, topk), zero for padding. PR #42982 changed two things here: the
plan is reused while a key is unchanged, and only the part of a buffer that a shrinking step leaves behind is cleared.
The key policies are that PR's key and the longer one of PR #47766.

Legend: N max_num_batched_tokens, T rows of the step (padding included), B requests, K topk.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import numpy as np
import torch

from dsv32_fast.batch import StepBatch
from dsv32_fast.kernels.protocol import PlannerKernels
from dsv32_fast.offsets import INT32_MAX
from dsv32_fast.options import KeyPolicy, Options, SplitCap
from dsv32_fast.plan import PlanBuffers

MIN_HEADS = 16  # AITER's decode kernels take 16 heads or more; vLLM pads up to that


@dataclass(frozen=True, kw_only=True)
class BuilderConfig:
    """Sizes that a builder is made for; lengths and counts in tokens."""

    num_heads: int = 32
    """Attention heads on this rank (128 / TP); padded up to 16."""
    topk: int = 2048
    """Keys that the indexer leaves per query token (index_topk)."""
    max_num_batched_tokens: int = 8192
    compute_units: int = 256
    """Upper limit of the split cap; the planner itself asks the device."""
    q_dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype = torch.bfloat16
    host_lens: bool = True
    """Whether the runner keeps a host copy of the sequence lengths; without one a key costs a device read (#54369)."""


@dataclass
class BuildCounts:
    """What a builder has done since it was made."""

    builds: int = 0
    plan_launches: int = 0
    bytes_cleared: int = 0
    host_device_reads: int = 0


@dataclass(frozen=True, kw_only=True)
class SparseMlaMetadata:
    """Views of the persistent buffers for one step, as the attention layers receive them."""

    num_tokens: int
    max_query_len: int
    req_id_per_token_T: torch.Tensor
    qo_indptr_T1: torch.Tensor
    paged_kv_indptr_T1: torch.Tensor
    paged_kv_last_page_len_T: torch.Tensor
    paged_kv_indices: torch.Tensor
    plan: PlanBuffers


def metadata_key(step: StepBatch, policy: KeyPolicy, topk: int, num_heads: int) -> Hashable:
    """What is compared with the last planned step; None never matches (policy `none`).

    pr42982: rows, largest query length, heads, min(seq, topk) of each request (vLLM #42982). pr47766 adds
    min(context, topk) and the query length of each request (vLLM #47766).
    """
    if policy == "none":
        return None
    seq_B = np.asarray(step.seq_lens, dtype=np.int32)
    key = (step.num_tokens, step.max_query_len, num_heads, np.minimum(seq_B, topk).tobytes())
    if policy == "pr42982":
        return key
    query_B = np.asarray(step.query_lens, dtype=np.int32)
    return (*key, np.minimum(seq_B - query_B, topk).tobytes(), query_B.tobytes())


def max_split_per_batch(step: StepBatch, split_cap: SplitCap, config: BuilderConfig) -> int:
    """The split cap that reaches the planner: -1 for none, else next_pow2(min(max_seq_len, topk) / 128) (vLLM 0.26)."""
    if split_cap == "unlimited":
        return -1
    blocks = max(1, min(step.max_seq_len, config.topk) // 128)
    return min(1 << (blocks - 1).bit_length(), config.compute_units)


@dataclass
class _Extents:
    """How far the last step wrote, in elements."""

    req_ids: int = 0
    indices: int = 0


@dataclass
class MetadataBuilder:
    """Builds `SparseMlaMetadata`; one instance lives as long as the engine.

    Attributes:
        counts: launches, cleared bytes and device reads so far.
        last_key: the key of the last planned step, None before the first and under key policy `none`.
    """

    config: BuilderConfig
    options: Options
    kernels: PlannerKernels
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    counts: BuildCounts = field(default_factory=BuildCounts)
    last_key: Hashable = None

    def __post_init__(self) -> None:
        """Allocate every buffer once, with vLLM's sizes, types and initial values.

        Raises:
            ValueError: more index entries than an int32 row pointer can count.
        """
        config, N = self.config, self.config.max_num_batched_tokens
        if config.topk * N > INT32_MAX:
            raise ValueError(f"max_num_batched_tokens {N} * topk {config.topk} exceeds paged_kv_indptr's int32")
        self.num_heads = max(MIN_HEADS, config.num_heads)

        def zeros(size: int) -> torch.Tensor:
            # Through NumPy: on the CPU its zeros cost no memory and no time until a step reaches them.
            return torch.from_numpy(np.zeros(size, np.int32)).to(self.device)

        # Zeros, not empty: with tail-only clears nothing else ever writes the part beyond the first steps' extent.
        self.req_id_per_token_N = zeros(N)
        self.paged_kv_indices_NK = zeros(N * config.topk)
        self.paged_kv_indptr_N1 = zeros(N + 1)
        self.qo_indptr_N1 = torch.arange(N + 1, dtype=torch.int32, device=self.device)
        self.paged_kv_last_page_len_N = torch.ones(N, dtype=torch.int32, device=self.device)
        info = self.kernels.get_mla_metadata_info_v1(
            N, 1, self.num_heads, config.q_dtype, config.kv_dtype, is_sparse=True, fast_mode=True
        )
        self.plan = PlanBuffers(*(torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in info))
        self._extents = _Extents()

    def build(self, step: StepBatch) -> SparseMlaMetadata:
        """Metadata of one step; launches the planner unless the key says that the plan still holds.

        Raises:
            ValueError: more rows than max_num_batched_tokens.
        """
        T, config = step.num_tokens, self.config
        if config.max_num_batched_tokens < T:
            raise ValueError(f"step has {T} rows, above max_num_batched_tokens={config.max_num_batched_tokens}")
        self.counts.builds += 1
        self._clear(step)
        req_ids, lens = self._rows(step)
        self.req_id_per_token_N[: len(req_ids)] = req_ids
        torch.cumsum(lens, 0, dtype=torch.int32, out=self.paged_kv_indptr_N1[1 : T + 1])
        tail = self.paged_kv_indptr_N1[T + 1 :]
        tail.copy_(self.paged_kv_indptr_N1[T].expand_as(tail))
        self.counts.bytes_cleared += tail.nbytes
        metadata = SparseMlaMetadata(
            num_tokens=T,
            max_query_len=step.max_query_len,
            req_id_per_token_T=self.req_id_per_token_N[:T],
            qo_indptr_T1=self.qo_indptr_N1[: T + 1],
            paged_kv_indptr_T1=self.paged_kv_indptr_N1[: T + 1],
            paged_kv_last_page_len_T=self.paged_kv_last_page_len_N[:T],
            paged_kv_indices=self.paged_kv_indices_NK[: T * config.topk],
            plan=self.plan,
        )
        if self.options.key != "none" and not config.host_lens:
            self.counts.host_device_reads += 1
        key = self._key(step)
        if key is None or key != self.last_key:
            self._launch(step, metadata)
            self.last_key = key
        return metadata

    def _key(self, step: StepBatch) -> Hashable:
        return metadata_key(step, self.options.key, self.config.topk, self.num_heads)

    def _rows(self, step: StepBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Request id of each live row, and the KV length of every row, padding included; int32."""
        lens_2B = torch.tensor((step.query_lens, step.seq_lens), dtype=torch.int32, device=self.device)
        query_B, seq_B = lens_2B[0], lens_2B[1]
        # With the count given, repeat_interleave does not read it back from the device.
        req_ids = torch.repeat_interleave(
            torch.arange(len(step.query_lens), dtype=torch.int32, device=self.device),
            query_B,
            output_size=step.num_query_tokens,
        )
        # Row t of request r sees seq_r tokens less those that come after it: last_r - t of them.
        last_B = torch.cumsum(query_B, 0, dtype=torch.int32) - 1
        rows = self.qo_indptr_N1[: len(req_ids)]
        seen = (seq_B - last_B)[req_ids] + rows
        lens = torch.zeros(step.num_tokens, dtype=torch.int32, device=self.device)
        lens[: len(req_ids)] = seen.clamp_max_(self.config.topk)
        return req_ids, lens

    def _clear(self, step: StepBatch) -> None:
        """Zero what an earlier step may have left: everything, or [new extent, previous extent)."""
        new = _Extents(req_ids=step.num_query_tokens, indices=step.num_tokens * self.config.topk)
        if self.options.clear == "full":
            stale = [self.req_id_per_token_N, self.paged_kv_indices_NK, self.paged_kv_indptr_N1]
        else:
            stale = [
                self.req_id_per_token_N[new.req_ids : self._extents.req_ids],
                self.paged_kv_indices_NK[new.indices : self._extents.indices],
            ]
        for part in stale:
            part.zero_()
            self.counts.bytes_cleared += part.nbytes
        self._extents = new

    def _launch(self, step: StepBatch, metadata: SparseMlaMetadata) -> None:
        plan = self.plan
        self.counts.plan_launches += 1
        self.kernels.get_mla_metadata_v1(
            metadata.qo_indptr_T1,
            metadata.paged_kv_indptr_T1,
            metadata.paged_kv_last_page_len_T,
            self.num_heads,
            1,
            True,
            plan.work_metadata_ptrs,
            plan.work_info_set,
            plan.work_indptr,
            plan.reduce_indptr,
            plan.reduce_final_map,
            plan.reduce_partial_map,
            page_size=1,
            kv_granularity=16,
            max_seqlen_qo=1,
            uni_seqlen_qo=1,
            fast_mode=True,
            max_split_per_batch=max_split_per_batch(step, self.options.split_cap, self.config),
            dtype_q=self.config.q_dtype,
            dtype_kv=self.config.kv_dtype,
        )
