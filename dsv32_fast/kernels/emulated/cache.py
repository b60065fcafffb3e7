"""Writers and gatherers of the two KV caches, behind AITER's signatures (ROCm/aiter e404860).

The latent cache holds one row of latent and RoPE key per slot. The indexer cache is page-planar: a page of S slots
holds first the fp8 keys of all its slots, then their fp32 scales, so a slot's key and scale are not neighbours. With
`preshuffle` the keys of a page are stored in tiles of 16 slots by 16 dims, row-major within the tile.

Legend: T tokens, P pages, S slots of a page, D key dim, Q scales per slot.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dsv32_fast.kernels.emulated.device import current_device
from dsv32_fast.kernels.emulated.memory import host, require_inside

_TILE = 16


def concat_and_cache_mla(
    kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor, kv_cache_dtype: str, scale: Tensor
) -> None:
    """Store [latent | RoPE key] of each token in its slot; negative slots are skipped.

    Args:
        kv_c: bf16, fp16 or fp32 [T, latent].
        k_pe: the same [T, rope].
        kv_cache: [P, S, latent + rope]; bf16 for "auto", fp8 or uint8 for "fp8" and "fp8_e4m3".
        slot_mapping: int64; only its own length of tokens is stored.
        kv_cache_dtype: "auto", "fp8" or "fp8_e4m3".
        scale: fp32 [1]; fp8 values are x * (1 / scale), saturated.

    Raises:
        ValueError: another `kv_cache_dtype`, or shapes that do not fit.
        OutOfBoundsError: a slot beyond the cache.
    """
    if kv_cache.shape[-1] != kv_c.shape[-1] + k_pe.shape[-1]:
        raise ValueError(f"kv_cache has rows of {kv_cache.shape[-1]}, not {kv_c.shape[-1]} + {k_pe.shape[-1]}")
    tokens, page, slot = _destinations(slot_mapping, kv_cache, len(kv_c))
    rows = torch.cat([kv_c[tokens], k_pe[tokens]], dim=-1)
    if kv_cache_dtype == "auto":
        kv_cache[page, slot] = rows.to(kv_cache.dtype)
    elif kv_cache_dtype in ("fp8", "fp8_e4m3"):
        largest = torch.finfo(current_device().fp8).max
        scaled = (rows.float() * (1 / scale.float())).clamp(-largest, largest)
        kv_cache.view(torch.uint8)[page, slot] = scaled.to(current_device().fp8).view(torch.uint8)
    else:
        raise ValueError(f"kv_cache_dtype {kv_cache_dtype!r} is not emulated; choose auto, fp8 or fp8_e4m3")


def indexer_k_quant_and_cache(
    k: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    quant_block_size: int,
    scale_fmt: str,
    preshuffle: bool = False,
) -> None:
    """Quantise indexer keys per block of dims and store keys and scales page-planar; negative slots are skipped.

    scale = max(amax, 1e-4) / largest fp8 value, raised to a power of two for scale_fmt "ue8m0"; the stored value is
    k * (1 / scale), with the reciprocal rounded to fp32.

    Args:
        k: bf16, fp16 or fp32 [T, D].
        kv_cache: fp8 or uint8 [P, S, D + 4 Q], contiguous.
        slot_mapping: int64; only its own length of tokens is stored.
        quant_block_size: D / Q.
        scale_fmt: "ue8m0", or anything else for fp32 scales.
        preshuffle: store keys in 16 x 16 tiles.

    Raises:
        ValueError: shapes that do not fit.
        OutOfBoundsError: a slot beyond the cache.
    """
    dims = k.shape[1]
    if dims % quant_block_size:
        raise ValueError(f"quant_block_size={quant_block_size} does not divide the {dims} dims of k")
    keys_PX, scales_PSQ = _planes(kv_cache, dims, dims // quant_block_size)
    tokens, page, slot = _destinations(slot_mapping, kv_cache, len(k))
    blocks_TQB = k[tokens].float().unflatten(1, (-1, quant_block_size))  # type: ignore[no-untyped-call]
    largest = torch.finfo(current_device().fp8).max
    scales_TQ = blocks_TQB.abs().amax(2).clamp(min=1e-4) / largest
    if scale_fmt == "ue8m0":
        scales_TQ = power_of_two_above(scales_TQ)
    stored_TQB = (blocks_TQB * (1 / scales_TQ)[..., None]).clamp(-largest, largest).to(current_device().fp8)
    at_TD = _key_offsets(slot, kv_cache.shape[1], dims, preshuffle)
    keys_PX[page[:, None], at_TD] = stored_TQB.flatten(1).view(torch.uint8)
    scales_PSQ[page, slot] = scales_TQ


def cp_gather_indexer_k_quant_cache(
    kv_cache: Tensor,
    dst_k: Tensor,
    dst_scale: Tensor,
    block_table: Tensor,
    cu_seq_lens: Tensor,
    preshuffle: bool = False,
) -> None:
    """Copy the indexer keys and scales of all requests out of the cache, request after request.

    Args:
        kv_cache: fp8 or uint8 [P, S, D + 4 Q], contiguous.
        dst_k: fp8 or uint8 [T, D], written in place.
        dst_scale: fp32 [T, Q], or the same bytes as uint8 [T, 4 Q], written in place.
        block_table: int32 [requests, pages].
        cu_seq_lens: int32 [requests + 1]; request b owns tokens [b] .. [b + 1].
        preshuffle: how the cache was written.

    Raises:
        OutOfBoundsError: a page beyond the cache or the block table.
    """
    ends = host(cu_seq_lens)
    counts = np.diff(ends)
    request = np.repeat(np.arange(len(counts)), counts)
    position = np.arange(ends[0], ends[-1]) - np.repeat(ends[:-1], counts)
    require_inside("block_table", position // kv_cache.shape[1], block_table.shape[1])
    page = block_table.cpu().long()[request, position // kv_cache.shape[1]]
    require_inside("kv_cache", page.numpy(), kv_cache.shape[0])
    slot = torch.from_numpy(position % kv_cache.shape[1])
    keys_TD, scales_TQ = read_keys(kv_cache, page, slot, dst_k.shape[1], preshuffle)
    rows = slice(int(ends[0]), int(ends[-1]))
    dst_k.view(torch.uint8)[rows] = keys_TD.to(dst_k.device)
    dst_scale.view(torch.float32)[rows] = scales_TQ.to(dst_scale.device)


def read_keys(kv_cache: Tensor, page: Tensor, slot: Tensor, dims: int, preshuffle: bool) -> tuple[Tensor, Tensor]:
    """Key bytes [T, D] and fp32 scales [T, Q] of the given slots of an indexer cache."""
    keys_PX, scales_PSQ = _planes(kv_cache, dims, (kv_cache.shape[-1] - dims) // 4)
    page, slot = page.to(kv_cache.device), slot.to(kv_cache.device)
    return keys_PX[page[:, None], _key_offsets(slot, kv_cache.shape[1], dims, preshuffle)], scales_PSQ[page, slot]


def power_of_two_above(scales: Tensor) -> Tensor:
    """2 ** ceil(log2(x)) of positive fp32 values, exactly."""
    mantissa, exponent = torch.frexp(scales)
    return torch.ldexp(torch.ones_like(scales), exponent - (mantissa == 0.5).int())


def _planes(kv_cache: Tensor, dims: int, scales: int) -> tuple[Tensor, Tensor]:
    """The key bytes [P, S * D] and fp32 scales [P, S, Q] of a page-planar cache, as views."""
    pages, slots = kv_cache.shape[:2]
    if kv_cache.shape[-1] != dims + 4 * scales or not kv_cache.is_contiguous() or kv_cache.element_size() != 1:
        raise ValueError(f"kv_cache must be contiguous bytes [pages, slots, {dims} + {4 * scales}]")
    raw_PX = kv_cache.view(torch.uint8).view(pages, -1)
    return raw_PX[:, : slots * dims], raw_PX[:, slots * dims :].view(torch.float32).view(pages, slots, scales)


def _key_offsets(slot: Tensor, slots: int, dims: int, preshuffle: bool) -> Tensor:
    """[T, D]: where in its page the bytes of a slot's key lie."""
    dim = torch.arange(dims, device=slot.device)
    if not preshuffle:
        return slot[:, None] * dims + dim
    if slots % _TILE or dims % _TILE:
        raise ValueError(f"preshuffle needs pages and keys of whole {_TILE}s, not {slots} slots of {dims} dims")
    tile = slot[:, None] // _TILE * (dims // _TILE) + dim // _TILE
    return tile * _TILE**2 + slot[:, None] % _TILE * _TILE + dim % _TILE


def _destinations(slot_mapping: Tensor, kv_cache: Tensor, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Which tokens are stored, and their page and slot."""
    if len(slot_mapping) > tokens:
        raise ValueError(f"slot_mapping names {len(slot_mapping)} tokens, but there are {tokens}")
    kept = (slot_mapping >= 0).nonzero().squeeze(1)
    slots = slot_mapping[kept].long()
    require_inside("kv_cache", host(slots), kv_cache.shape[0] * kv_cache.shape[1])
    return kept, slots // kv_cache.shape[1], slots % kv_cache.shape[1]
