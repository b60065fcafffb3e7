"""`mla_reduce_v1`: merge the partial outputs of split tiles as AITER's reduce kernel does (ROCm/aiter e404860).

The kernel trusts its inputs. It does nothing for tiles with fewer than two partials, does not check bounds, and lets a
NaN output poison its row even when its weight is zero. Fewer than four partials are merged online, more in two passes;
the two differ in rounding and in what an all-empty row becomes (NaN online, 0 in two passes).

Legend: M rows to merge, S partials of a row, H heads, C latent dim, P rows of the partial buffers.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from dsv32_fast.kernels.emulated.memory import IntArray, beyond_view, host, require_inside

ONLINE_LIMIT = 4
"""Tiles with at least this many partials take the two-pass path."""


def mla_reduce_v1(
    partial_output: Tensor,
    partial_lse: Tensor,
    reduce_indptr: Tensor,
    reduce_final_map: Tensor | None,
    reduce_partial_map: Tensor,
    max_seqlen_q: int,  # noqa: ARG001 - launch geometry only
    num_kv_splits: int,  # noqa: ARG001 - sizes the reducer's LDS only
    final_output: Tensor,
    final_lse: Tensor | None = None,
) -> None:
    """Merge partials into `final_output` (and `final_lse`) in place; rows of unsplit tiles are left alone.

    Args:
        partial_output: fp32 [P, (1,) H, C], normalised per partial.
        partial_lse: fp32 [P, (1,) H, (1)], natural logarithm.
        reduce_indptr: int32 [tiles + 1]; tile t owns entries [t] .. [t + 1] of `reduce_partial_map`.
        reduce_final_map: int32 [tiles, 2]; first and end row of the tile in `final_output`.
        reduce_partial_map: int32; first row of each partial.
        max_seqlen_q: unused, as its value is not observable.
        num_kv_splits: unused, as its value is not observable.
        final_output: bf16 or fp16 [rows, H, C].
        final_lse: fp32 [rows, H].

    Raises:
        TypeError: a partial is not fp32.
        ValueError: `reduce_final_map` is None, which is not emulated.
        OutOfBoundsError: the maps lead outside a buffer.
    """
    for name, tensor in (("partial_output", partial_output), ("partial_lse", partial_lse)):
        if tensor.dtype != torch.float32:
            raise TypeError(f"{name} must be torch.float32, not {tensor.dtype}")
    if reduce_final_map is None:
        raise ValueError("reduce_final_map=None is not emulated; pass the map that get_mla_metadata_v1 wrote")
    rows_M, partials = _split_rows(host(reduce_indptr), host(reduce_final_map), host(reduce_partial_map))
    heads, latent = final_output.shape[-2:]
    output_PHC, lse_PH = partial_output.reshape(-1, heads, latent), partial_lse.reshape(-1, heads)
    merged = [(rows_M[group], *_merge(output_PHC, lse_PH, index_MS)) for group, index_MS in partials]
    final_RHC = beyond_view(final_output)
    for rows, output_MHC, lse_MH in merged:
        require_inside("final_output", rows, final_RHC.shape[0])
        target = torch.from_numpy(rows).to(final_output.device)
        final_RHC[target] = output_MHC.to(final_output.dtype)
        if final_lse is not None:
            beyond_view(final_lse)[target] = lse_MH


def merge_online(outputs_MSHC: Tensor, lses_MSH: Tensor) -> tuple[Tensor, Tensor]:
    """Running maximum and sum over S, fp32; an all -inf row gives NaN, and +inf as its LSE."""
    acc_MHC, max_MH, sum_MH = outputs_MSHC[:, 0], lses_MSH[:, 0], torch.ones_like(lses_MSH[:, 0])
    for piece in range(1, lses_MSH.shape[1]):
        lse_MH = lses_MSH[:, piece]
        new_MH = torch.fmax(max_MH, lse_MH)
        old, new = torch.exp(max_MH - new_MH), torch.exp(lse_MH - new_MH)
        acc_MHC = old[..., None] * acc_MHC + new[..., None] * outputs_MSHC[:, piece]
        max_MH, sum_MH = new_MH, sum_MH * old + new
    return acc_MHC / sum_MH[..., None], _total_lse(max_MH, sum_MH)


def merge_two_pass(outputs_MSHC: Tensor, lses_MSH: Tensor) -> tuple[Tensor, Tensor]:
    """First the LSE of all S partials, then the weighted sum, fp32; an all -inf row of finite partials gives 0."""
    max_MH = lses_MSH[:, 0]
    for piece in range(1, lses_MSH.shape[1]):
        max_MH = torch.fmax(max_MH, lses_MSH[:, piece])
    total_MH = _total_lse(max_MH, torch.exp(lses_MSH - max_MH[:, None]).sum(1))
    acc_MHC = torch.zeros_like(outputs_MSHC[:, 0])
    for piece in range(lses_MSH.shape[1]):
        acc_MHC = acc_MHC + torch.exp(lses_MSH[:, piece] - total_MH)[..., None] * outputs_MSHC[:, piece]
    return acc_MHC, total_MH


def _merge(output_PHC: Tensor, lse_PH: Tensor, index_MS: IntArray) -> tuple[Tensor, Tensor]:
    require_inside("partial_output", index_MS, output_PHC.shape[0])
    index = torch.from_numpy(index_MS).to(output_PHC.device)
    merge = merge_online if index_MS.shape[1] < ONLINE_LIMIT else merge_two_pass
    return merge(output_PHC[index], lse_PH[index])


def _total_lse(max_MH: Tensor, sum_MH: Tensor) -> Tensor:
    broken = (sum_MH == 0) | sum_MH.isnan()
    return torch.where(broken, math.inf, max_MH + torch.log(sum_MH))


def _split_rows(
    indptr: IntArray, final_map: IntArray, partial_map: IntArray
) -> tuple[IntArray, list[tuple[IntArray, IntArray]]]:
    """Target rows of all split tiles, and per partial count (positions in those rows, their partial rows [M, S])."""
    counts = np.diff(indptr)
    tiles = np.flatnonzero(counts > 1)
    require_inside("reduce_final_map", tiles, len(final_map))
    spans = np.maximum(final_map[tiles, 1] - final_map[tiles, 0], 0)
    rows = np.repeat(tiles, spans)
    offset = np.arange(len(rows)) - np.repeat(np.cumsum(spans) - spans, spans)
    groups = []
    for count in np.unique(counts[rows]):
        group = np.flatnonzero(counts[rows] == count)
        entries = indptr[rows[group], None] + np.arange(count)
        require_inside("reduce_partial_map", entries, len(partial_map))
        groups.append((group, partial_map[entries] + offset[group, None]))
    return final_map[rows, 0] + offset, groups
