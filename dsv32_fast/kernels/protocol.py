"""What a set of kernels offers: AITER's functions, with AITER's argument order, in-place semantics and dtypes.

The module `dsv32_fast.kernels.emulated.api` and the object that `dsv32_fast.kernels.aiter.load` returns both satisfy
`Kernels`; code that needs a part of it asks for that part. Shapes and units are documented at the emulated functions.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor


class PlannerKernels(Protocol):
    """The planner of absorbed MLA decode."""

    def get_mla_metadata_info_v1(
        self,
        batch_size: int,
        max_seqlen_qo: int,
        num_head_qo: int,
        q_dtype: torch.dtype | None,
        kv_dtype: torch.dtype | None,
        is_sparse: bool,
        fast_mode: bool = True,
        num_kv_splits: int = 32,
        intra_batch_mode: bool = False,
        max_split_per_batch: int = -1,
    ) -> tuple[tuple[Any, torch.dtype], ...]:
        """Shape and dtype of the six plan buffers, work_indptr before work_info_set."""
        ...

    def get_mla_metadata_v1(
        self,
        seqlens_qo_indptr: Tensor,
        seqlens_kv_indptr: Tensor,
        kv_last_page_lens: Tensor,
        num_heads_per_head_k: int,
        num_heads_k: int,
        is_causal: bool,
        work_metadata_ptrs: Tensor,
        work_info_set: Tensor,
        work_indptr: Tensor,
        reduce_indptr: Tensor,
        reduce_final_map: Tensor,
        reduce_partial_map: Tensor,
        page_size: int = 1,
        kv_granularity: int = 16,
        max_seqlen_qo: int = -1,
        uni_seqlen_qo: int = -1,
        fast_mode: bool = True,
        topk: int = -1,
        max_split_per_batch: int = -1,
        intra_batch_mode: bool = False,
        is_cp_round_robin: bool = False,
        mla_version: Any = ...,
        dtype_q_nope: torch.dtype | None = None,
        dtype_q_rope: torch.dtype | None = None,
        dtype_kv_nope: torch.dtype | None = None,
        dtype_kv_rope: torch.dtype | None = None,
        dtype_q: torch.dtype | None = None,
        dtype_kv: torch.dtype | None = None,
    ) -> None:
        """Write a plan into the six buffers, work_info_set before work_indptr."""
        ...


class MlaKernels(PlannerKernels, Protocol):
    """Planner and attention of absorbed MLA decode."""

    def mla_decode_fwd(
        self,
        q: Tensor,
        kv_buffer: Tensor,
        o: Tensor,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        kv_last_page_lens: Tensor,
        max_seqlen_q: int,
        page_size: int = 1,
        nhead_kv: int = 1,
        sm_scale: float | None = None,
        logit_cap: float = 0.0,
        num_kv_splits: int | None = None,
        num_kv_splits_indptr: Tensor | None = None,
        work_meta_data: Tensor | None = None,
        work_indptr: Tensor | None = None,
        work_info_set: Tensor | None = None,
        reduce_indptr: Tensor | None = None,
        reduce_final_map: Tensor | None = None,
        reduce_partial_map: Tensor | None = None,
        q_scale: Tensor | None = None,
        kv_scale: Tensor | None = None,
        intra_batch_mode: bool = False,
        return_logits: bool = False,
        return_lse: bool = False,
        g_kv_indptr: Tensor | None = None,
        cp_world_size: int = 1,
        cp_rank: int = 0,
        causal: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend, write `o`, return the fp32 partials and the LSE."""
        ...

    def mla_reduce_v1(
        self,
        partial_output: Tensor,
        partial_lse: Tensor,
        reduce_indptr: Tensor,
        reduce_final_map: Tensor | None,
        reduce_partial_map: Tensor,
        max_seqlen_q: int,
        num_kv_splits: int,
        final_output: Tensor,
        final_lse: Tensor | None = None,
    ) -> None:
        """Merge the partials of split rows."""
        ...


class RouterKernels(Protocol):
    """Choice of experts."""

    def biased_grouped_topk(
        self,
        gating_output: Tensor,
        correction_bias: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        num_expert_group: int,
        topk_group: int,
        need_renorm: bool,
        routed_scaling_factor: float = 1.0,
    ) -> None:
        """Route; which kernel runs depends on the number of tokens."""
        ...

    def biased_grouped_topk_hip(
        self,
        gating_output: Tensor,
        correction_bias: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        num_expert_group: int,
        topk_grp: int,
        need_renorm: bool,
        routed_scaling_factor: float = 1.0,
    ) -> None:
        """Route with the HIP kernels, whatever the number of tokens."""
        ...

    def moe_fused_gate(
        self,
        input: Tensor,  # noqa: A002 - AITER's name
        bias: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        num_expert_group: int,
        topk_group: int,
        topk: int,
        n_share_experts_fusion: int,
        routed_scaling_factor: float = 1.0,
    ) -> tuple[Tensor, Tensor]:
        """Route with the kernel for large batches."""
        ...


class IndexerKernels(Protocol):
    """Lightning indexer: its cache, its logits, its top-k."""

    def indexer_k_quant_and_cache(
        self,
        k: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        quant_block_size: int,
        scale_fmt: str,
        preshuffle: bool = False,
    ) -> None:
        """Quantise keys and store them page-planar."""
        ...

    def cp_gather_indexer_k_quant_cache(
        self,
        kv_cache: Tensor,
        dst_k: Tensor,
        dst_scale: Tensor,
        block_table: Tensor,
        cu_seq_lens: Tensor,
        preshuffle: bool = False,
    ) -> None:
        """Copy keys and scales out of the cache."""
        ...

    def deepgemm_fp8_paged_mqa_logits(
        self,
        q_fp8: Tensor,
        kv_cache: Tensor,
        weights: Tensor,
        out_logits: Tensor,
        context_lens: Tensor,
        kv_indices: Tensor,
        max_model_len: int,
        Preshuffle: bool = False,
        KVBlockSize: int = 1,
        ChunkK: int = 256,
        TotalCuCount: int | None = None,
        WavePerEU: int = 2,
        VarCtxSchedule: Tensor | None = None,
    ) -> None:
        """Logits of decode rows over paged keys."""
        ...

    def fp8_mqa_logits(
        self,
        Q: Tensor,
        KV: Tensor,
        kv_scales: Tensor,
        weights: Tensor,
        cu_starts: Tensor,
        cu_ends: Tensor,
        clean_logits: bool = True,
    ) -> Tensor:
        """Logits of ragged prefill rows."""
        ...

    def top_k_per_row_decode(
        self,
        logits: Tensor,
        next_n: int,
        seqLens: Tensor,
        indices: Tensor,
        numRows: int,
        stride0: int,
        stride1: int,
        k: int = 2048,
        stable: bool = False,
    ) -> None:
        """Indices of the k largest of each decode row."""
        ...

    def top_k_per_row_prefill(
        self,
        logits: Tensor,
        rowStarts: Tensor,
        rowEnds: Tensor,
        indices: Tensor,
        values: Tensor | None,
        numRows: int,
        stride0: int,
        stride1: int,
        k: int = 2048,
        stable: bool = False,
    ) -> None:
        """Columns of the k largest of each prefill row; AITER's first releases counted from the row's start."""
        ...


class CacheKernels(Protocol):
    """Writer of the latent cache, and quantisers."""

    def concat_and_cache_mla(
        self, kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor, kv_cache_dtype: str, scale: Tensor
    ) -> None:
        """Store latent and RoPE key of each token in its slot."""
        ...

    def per_token_quant_hip(
        self,
        x: Tensor,
        scale: Tensor | None = None,
        quant_dtype: torch.dtype = ...,
        num_rows: Tensor | None = None,
        num_rows_factor: int = 1,
    ) -> tuple[Tensor, Tensor]:
        """Quantise with one scale per row."""
        ...

    def per_group_quant_hip(
        self,
        x: Tensor,
        scale: Tensor | None = None,
        quant_dtype: torch.dtype = ...,
        group_size: int = 128,
        transpose_scale: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Quantise with one scale per group of columns."""
        ...


class MoeKernels(Protocol):
    """The routed experts."""

    def fused_moe(
        self,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weight: Tensor,
        topk_ids: Tensor,
        expert_mask: Tensor | None = None,
        activation: Any = ...,
        quant_type: Any = ...,
        doweight_stage1: bool = False,
        w1_scale: Tensor | None = None,
        w2_scale: Tensor | None = None,
        a1_scale: Tensor | None = None,
        a2_scale: Tensor | None = None,
        block_size_M: int | None = None,
        num_local_tokens: Tensor | None = None,
        moe_sorting_dispatch_policy: int = 0,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Weighted sum of each token's experts."""
        ...


class Kernels(MlaKernels, RouterKernels, IndexerKernels, CacheKernels, MoeKernels, Protocol):
    """All kernels of the decode path."""
