"""Absorbed multi-head latent attention on the planned kernel: projections, cache write, gather list, decode, output.

Prefill chunks, verified drafts and plain decode take the same way: every query token is one row of multi-query
attention over the tokens that the indexer chose (vLLM's ROCm sparse backend). All layers of a step share its plan;
each writes its own `paged_kv_indices`.

Legend: T rows, M model width, L query latent, H heads, N nope, R rope, C latent, D = C + R, V value width, K top-k.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv32_fast.kernels.protocol import CacheKernels, MlaKernels
from dsv32_fast.layers import Table, linear, rms_norm, rope_interleaved
from dsv32_fast.metadata import MIN_HEADS, SparseMlaMetadata
from dsv32_fast.packing import Attention
from dsv32_ref.config import Config


def query_latent(a_TM: Tensor, w: Attention, config: Config, kernels: CacheKernels) -> Tensor:
    """The normed query latent [T, L], shared by attention and indexer."""
    return rms_norm(linear(a_TM, w.q_a, kernels), w.q_norm, config.norm_eps)


def latents(a_TM: Tensor, w: Attention, table: Table, config: Config, kernels: CacheKernels) -> Tensor:
    """What is cached of each token [T, D]: normed latent, then the turned RoPE key."""
    c_TC, pe_TR = linear(a_TM, w.kv_a, kernels).split([config.kv_lora_rank, config.qk_rope_head_dim], -1)  # type: ignore[no-untyped-call]
    return torch.cat([rms_norm(c_TC, w.kv_norm, config.norm_eps), rope_interleaved(pe_TR, table)], -1)


def write_latents(kv_TD: Tensor, cache_PSD: Tensor, slots_T: Tensor, config: Config, kernels: CacheKernels) -> None:
    """Stores the latents at their slots; rows with slot -1 are skipped."""
    c_TC, pe_TR = kv_TD[:, : config.kv_lora_rank], kv_TD[:, config.kv_lora_rank :]
    kernels.concat_and_cache_mla(c_TC, pe_TR, cache_PSD, slots_T, "auto", torch.ones(1, device=kv_TD.device))


def absorbed_queries(qr_TL: Tensor, w: Attention, table: Table, config: Config, kernels: CacheKernels) -> Tensor:
    """What the kernel receives per head [T, H, D]: UK^T q_nope, then the turned rope part."""
    q_THX = linear(qr_TL, w.q_b, kernels).view(len(qr_TL), config.n_heads, config.qk_head_dim)
    q_THN, pe_THR = q_THX[..., : config.qk_nope_head_dim], q_THX[..., config.qk_nope_head_dim :]
    qa_THC = per_head(q_THN, w.uk.transpose(1, 2))
    return torch.cat([qa_THC, rope_interleaved(pe_THR, table)], -1)


def per_head(x_THX: Tensor, weight_HYX: Tensor) -> Tensor:
    """One matrix per head, x_h W_h^T, accumulated in fp32 and rounded once: [T, H, Y]."""
    if x_THX.device.type != "cpu":
        return torch.bmm(x_THX.transpose(0, 1), weight_HYX.mT).transpose(0, 1)
    return torch.einsum("thx,hyx->thy", x_THX.float(), weight_HYX.float()).to(x_THX.dtype)


def fill_gather_list(topk_TK: Tensor, metadata: SparseMlaMetadata, block_table_BP: Tensor, page_size: int) -> None:
    """Writes the slots of the chosen tokens to paged_kv_indices[indptr[t] : indptr[t + 1]], request-local to physical.

    An entry that names no cached token (-1, or a position without a page) becomes -1. vLLM writes 0 there, and a kernel
    that reads it attends the first slot of the cache.
    """
    indptr_T1 = metadata.paged_kv_indptr_T1.long()
    rank_K = torch.arange(topk_TK.shape[1], device=topk_TK.device)
    counted_TK = rank_K < (indptr_T1[1:] - indptr_T1[:-1])[:, None]
    page_TK = topk_TK.long().clamp_min(0) // page_size
    known_TK = counted_TK & (topk_TK >= 0) & (page_TK < block_table_BP.shape[1])
    owner_T1 = metadata.req_id_per_token_T.long()[:, None]
    slots_TK = torch.full_like(page_TK, -1)
    pages = block_table_BP[owner_T1.expand_as(page_TK)[known_TK], page_TK[known_TK]].long()
    offset = topk_TK.long()[known_TK] % page_size
    slots_TK[known_TK] = torch.where(pages >= 0, pages * page_size + offset, -1)
    place_TK = indptr_T1[:-1, None] + rank_K
    metadata.paged_kv_indices[place_TK[counted_TK]] = slots_TK[counted_TK].int()


def decode(
    q_THD: Tensor, cache_PSD: Tensor, metadata: SparseMlaMetadata, config: Config, kernels: MlaKernels
) -> Tensor:
    """Attention of every row over its part of the gather list, [T, H, C]; rows that the plan leaves out are NaN.

    vLLM leaves such rows uninitialised. The kernel wants bf16, and 16 heads or more: fewer are repeated, as in vLLM.

    Raises:
        ValueError: fewer than 16 heads that do not divide 16.
    """
    heads = config.n_heads
    if heads < MIN_HEADS and MIN_HEADS % heads:
        raise ValueError(f"n_heads {heads} does not divide {MIN_HEADS}; the decode kernel needs 16 heads or more")
    copies = max(1, MIN_HEADS // heads)
    q_THD = q_THD.to(torch.bfloat16).repeat_interleave(copies, 1).contiguous()
    shape = (*q_THD.shape[:2], config.kv_lora_rank)
    out_THC = torch.full(shape, torch.nan, dtype=torch.bfloat16, device=q_THD.device)
    if len(q_THD) == 0:
        return out_THC[:, ::copies]
    plan = metadata.plan
    kernels.mla_decode_fwd(
        q_THD,
        cache_PSD.view(-1, 1, 1, config.latent_dim),
        out_THC,
        metadata.qo_indptr_T1,
        metadata.paged_kv_indptr_T1,
        metadata.paged_kv_indices,
        metadata.paged_kv_last_page_len_T,
        1,
        sm_scale=config.softmax_scale,
        work_meta_data=plan.work_metadata_ptrs,
        work_indptr=plan.work_indptr,
        work_info_set=plan.work_info_set,
        reduce_indptr=plan.reduce_indptr,
        reduce_final_map=plan.reduce_final_map,
        reduce_partial_map=plan.reduce_partial_map,
    )
    return out_THC[:, ::copies]


def output(z_THC: Tensor, w: Attention, dtype: torch.dtype, kernels: CacheKernels) -> Tensor:
    """Head outputs UV z and their projection, [T, M]."""
    return linear(per_head(z_THC.to(dtype), w.uv).flatten(1), w.o, kernels)
