"""Absorbed multi-head latent attention on the planned kernel: projections, cache write, gather list, decode, output.

Prefill chunks, verified drafts and plain decode take the same way: every query token is one row of multi-query
attention over the tokens that the indexer chose (vLLM's ROCm sparse backend). All layers of a step share its plan;
each writes its own `paged_kv_indices`. Everything here has static shapes and reads no value on the host, so that a
graph can hold it.

The cache is bf16, or e4m3 with one scale for all of it (vLLM's layer._k_scale); then the queries are e4m3 too, with one
scale of their own (layer._q_scale), and the kernel rounds P to e4m3.

Legend: T rows, M model width, L query latent, H heads, N nope, R rope, C latent, D = C + R, V value width, K top-k,
B requests, P pages of a block table, U entries of the gather list.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv32_fast.kernels.protocol import CacheKernels, MlaKernels
from dsv32_fast.layers import Table, linear, quantise_static, rms_norm, rope_interleaved
from dsv32_fast.metadata import MIN_HEADS, SparseMlaMetadata
from dsv32_fast.packing import Attention
from dsv32_ref.config import Config


@dataclass(frozen=True, kw_only=True)
class Fp8Scales:
    """Scales of an fp8 cache and of the queries that meet it, fp32 [1] each: a value is scale x e4m3."""

    q: Tensor
    kv: Tensor


def query_latent(a_TM: Tensor, w: Attention, config: Config, kernels: CacheKernels) -> Tensor:
    """The normed query latent [T, L], shared by attention and indexer."""
    return rms_norm(linear(a_TM, w.q_a, kernels), w.q_norm, config.norm_eps)


def latents(a_TM: Tensor, w: Attention, table: Table, config: Config, kernels: CacheKernels) -> Tensor:
    """What is cached of each token [T, D]: normed latent, then the turned RoPE key."""
    c_TC, pe_TR = linear(a_TM, w.kv_a, kernels).split([config.kv_lora_rank, config.qk_rope_head_dim], -1)  # type: ignore[no-untyped-call]
    return torch.cat([rms_norm(c_TC, w.kv_norm, config.norm_eps), rope_interleaved(pe_TR, table)], -1)


def write_latents(
    kv_TD: Tensor,
    cache_PSD: Tensor,
    slots_T: Tensor,
    config: Config,
    kernels: CacheKernels,
    scales: Fp8Scales | None = None,
) -> None:
    """Stores the latents at their slots, in bf16 or with `scales` in fp8; rows with slot -1 are skipped."""
    c_TC, pe_TR = kv_TD[:, : config.kv_lora_rank], kv_TD[:, config.kv_lora_rank :]
    kind, scale = ("auto", torch.ones(1, device=kv_TD.device)) if scales is None else ("fp8", scales.kv)
    kernels.concat_and_cache_mla(c_TC, pe_TR, cache_PSD, slots_T, kind, scale)


def absorbed_queries(qr_TL: Tensor, w: Attention, table: Table, config: Config, kernels: CacheKernels) -> Tensor:
    """What the kernel receives per head [T, H, D]: UK^T q_nope, then the turned rope part."""
    q_THX = linear(qr_TL, w.q_b, kernels).view(len(qr_TL), config.n_heads, config.qk_head_dim)
    q_THN, pe_THR = q_THX[..., : config.qk_nope_head_dim], q_THX[..., config.qk_nope_head_dim :]
    qa_THC = per_head(q_THN, w.uk.transpose(1, 2))
    return torch.cat([qa_THC, rope_interleaved(pe_THR, table)], -1)


def received_queries(q_THD: Tensor, scales: Fp8Scales | None) -> Tensor:
    """The values that the decode kernel sees: bf16, or fp32 multiples of `scales.q` by an e4m3 number."""
    if scales is None:
        return q_THD.to(torch.bfloat16)
    return quantise_static(q_THD, scales.q).float() * scales.q


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
    slots_TK = physical_slots(topk_TK, metadata.req_id_per_token_T, block_table_BP, page_size)
    gather_indices(slots_TK, metadata.paged_kv_indptr_T1, metadata.paged_kv_indices)


def physical_slots(topk_TK: Tensor, owner_T: Tensor, block_table_BP: Tensor, page_size: int) -> Tensor:
    """The slots [T, K] int32 of positions within their requests; -1 for what names no cached token."""
    if block_table_BP.numel() == 0:
        return torch.full_like(topk_TK, -1)
    position_TK, pages = topk_TK.long(), block_table_BP.shape[1]
    page_TK = position_TK.clamp_min(0) // page_size
    first_TK = block_table_BP[owner_T.long()[:, None], page_TK.clamp_max(pages - 1)].long() * page_size
    known_TK = (position_TK >= 0) & (page_TK < pages) & (first_TK >= 0)
    return torch.where(known_TK, first_TK + position_TK % page_size, -1).int()


def gather_indices(slots_TK: Tensor, indptr_T1: Tensor, paged_U: Tensor) -> None:
    """Packs the first indptr[t + 1] - indptr[t] slots of each row at `paged_U[indptr[t]:]`; nothing else changes.

    Args:
        paged_U: K entries for each row, or more, so that there is a spare one wherever a row has fewer than K slots.
    """
    if slots_TK.numel() == 0:
        return
    ends_T1 = indptr_T1.long()
    place_TK = ends_T1[:-1, None] + torch.arange(slots_TK.shape[1], device=slots_TK.device)
    counted_TK = place_TK < ends_T1[1:, None]
    # A mask would make the number of writes a matter of data, which no graph can hold; so what is not counted writes
    # the first entry behind the list, with its own value.
    spare_1 = ends_T1[-1:].clamp_max(len(paged_U) - 1)
    paged_U[torch.where(counted_TK, place_TK, spare_1)] = torch.where(counted_TK, slots_TK, paged_U[spare_1])


def decode(
    q_THD: Tensor,
    cache_PSD: Tensor,
    metadata: SparseMlaMetadata,
    config: Config,
    kernels: MlaKernels,
    scales: Fp8Scales | None = None,
) -> Tensor:
    """Attention of every row over its part of the gather list, [T, H, C]; rows that the plan leaves out are NaN.

    vLLM leaves such rows uninitialised. The kernel wants 16 heads or more: fewer are repeated, as in vLLM.

    Raises:
        ValueError: fewer than 16 heads that do not divide 16.
    """
    heads = config.n_heads
    if heads < MIN_HEADS and MIN_HEADS % heads:
        raise ValueError(f"n_heads {heads} does not divide {MIN_HEADS}; the decode kernel needs 16 heads or more")
    copies = max(1, MIN_HEADS // heads)
    q_THD = q_THD.repeat_interleave(copies, 1)
    q_THD = q_THD.to(torch.bfloat16) if scales is None else quantise_static(q_THD, scales.q)
    shape = (*q_THD.shape[:2], config.kv_lora_rank)
    out_THC = torch.full(shape, torch.nan, dtype=torch.bfloat16, device=q_THD.device)
    if len(q_THD):  # the emulation takes no rows, other kernels need not
        kv = cache_PSD.view(-1, 1, 1, config.latent_dim)
        attend_planned(q_THD.contiguous(), kv, out_THC, metadata, config.softmax_scale, kernels, scales)
    return out_THC[:, ::copies]


def attend_planned(
    q_THD: Tensor,
    kv: Tensor,
    out_THC: Tensor,
    metadata: SparseMlaMetadata,
    sm_scale: float,
    kernels: MlaKernels,
    scales: Fp8Scales | None = None,
) -> None:
    """The decode kernel on the step's plan and gather list; writes `out_THC`. `kv` is [slots, 1, 1, D]."""
    plan = metadata.plan
    kernels.mla_decode_fwd(
        q_THD,
        kv,
        out_THC,
        metadata.qo_indptr_T1,
        metadata.paged_kv_indptr_T1,
        metadata.paged_kv_indices,
        metadata.paged_kv_last_page_len_T,
        1,
        sm_scale=sm_scale,
        work_meta_data=plan.work_metadata_ptrs,
        work_indptr=plan.work_indptr,
        work_info_set=plan.work_info_set,
        reduce_indptr=plan.reduce_indptr,
        reduce_final_map=plan.reduce_final_map,
        reduce_partial_map=plan.reduce_partial_map,
        q_scale=None if scales is None else scales.q,
        kv_scale=None if scales is None else scales.kv,
    )


def output(z_THC: Tensor, w: Attention, dtype: torch.dtype, kernels: CacheKernels) -> Tensor:
    """Head outputs UV z and their projection, [T, M]."""
    return linear(per_head(z_THC.to(dtype), w.uv).flatten(1), w.o, kernels)
