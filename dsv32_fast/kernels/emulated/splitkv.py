"""The non-persistent split-KV form of MLA decode: no plan, a fixed number of splits per row (ROCm/aiter e404860).

AITER falls back to it without notice for large batches (see `attention.uses_persistent_kernel`), so that the same call
ignores its plan buffers. How stage 1 cuts a row is not public; equal page-aligned parts are assumed, which only moves
fp32 roundings.

Legend: as in `pieces`; B rows of the batch.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from dsv32_fast.kernels.emulated.device import current_device
from dsv32_fast.kernels.emulated.memory import IntArray, host, poison, require_inside
from dsv32_fast.kernels.emulated.pieces import Operands, Pieces, attend
from dsv32_fast.kernels.emulated.reduce import merge_online

_OVERHEAD = 84.1
_FP8_BLOCK = {8: 64, 16: 128, 24: 128, 32: 128, 48: 64, 64: 64, 128: 32, 256: 32, 384: 32, 512: 32}
"""Smallest KV block of the fp8 kernels by heads * query length."""


def get_meta_param(
    num_kv_splits: int | None, bs: int, total_kv: int, nhead: int, max_seqlen_q: int, dtype: torch.dtype
) -> tuple[int, Tensor]:
    """How many splits the non-persistent kernel uses, and the prefix sums of them over the batch, int32 [bs + 1].

    The number, unless given, follows from the average KV length total_kv / bs only: the best trade of occupancy against
    a fixed overhead per split, the smaller number on ties. With an fp8 query, given numbers too are capped by the
    blocks; a product of heads and query length that AITER has no block size for is not capped here.

    Raises:
        ValueError: no rows, over which AITER would take the average.
    """
    if bs == 0:
        raise ValueError("qo_indptr: no rows, and the split-KV kernel has no split count for none; skip the call")
    average = total_kv / bs
    if num_kv_splits is None:
        units = current_device().compute_units

        def merit(splits: int) -> float:
            work = bs * splits
            return work / (-(-work // units) * units) * average / (average + _OVERHEAD * splits)

        num_kv_splits = max(range(1, 17), key=merit)
    block = _FP8_BLOCK.get(nhead * max_seqlen_q)
    if dtype.itemsize == 1 and block is not None:
        num_kv_splits = max(1, min(num_kv_splits, -(-total_kv // (bs * block))))
        num_kv_splits = min(num_kv_splits, int(abs(average - max_seqlen_q) // block) + 1)
    return num_kv_splits, torch.arange(bs + 1, dtype=torch.int32) * num_kv_splits


def split_kv_decode(
    operands: Operands,
    o_RHC: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_last_page_lens: Tensor,
    splits: int,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """Attend every row over its own KV range and write `o_RHC`; a row without KV becomes NaN with LSE -inf.

    Returns:
        The partials, fp32 [total_q, splits, H, C], and the fp32 LSE [total_q, H].
    """
    pieces, split_of_piece = _cut(operands, qo_indptr, kv_indptr, kv_last_page_lens, splits, causal)
    rows, heads, device = o_RHC.shape[0], o_RHC.shape[1], o_RHC.device
    outputs_RSHC = poison((rows, splits, heads, operands.latent), device)
    lses_RSH = poison((rows, splits, heads), device)
    for batch, output_WJHC, lse_WJH in attend(pieces, operands):
        row_WJ = pieces.q_start[batch, None] + np.arange(output_WJHC.shape[1])
        require_inside("o", row_WJ, rows)
        at = torch.from_numpy(row_WJ).to(device), torch.from_numpy(split_of_piece[batch]).to(device)[:, None]
        outputs_RSHC[at], lses_RSH[at] = output_WJHC, lse_WJH
    lse_RH = _merge_rows(o_RHC, outputs_RSHC, lses_RSH, _splits_per_row(pieces, split_of_piece, rows))
    return outputs_RSHC, lse_RH


def writes_output_directly(
    splits: int, heads: int, max_seqlen_q: int, q_dtype: torch.dtype, kv_dtype: torch.dtype
) -> bool:
    """True where stage 1 alone computes the result: `mla_decode_fwd` then returns the output for the partials."""
    both_bf16 = q_dtype == kv_dtype == torch.bfloat16
    return splits == 1 and (
        q_dtype.itemsize == 1 or (q_dtype == torch.bfloat16 and max_seqlen_q == 4) or (both_bf16 and heads in (8, 32))
    )


def _merge_rows(o_RHC: Tensor, outputs_RSHC: Tensor, lses_RSH: Tensor, used_R: IntArray) -> Tensor:
    lse_RH = torch.full_like(lses_RSH[:, 0], -math.inf)
    for used in np.unique(used_R):
        rows = torch.from_numpy(np.flatnonzero(used_R == used)).to(o_RHC.device)
        if used == 0:
            o_RHC[rows] = math.nan
        else:
            merged, lse_RH[rows] = merge_online(outputs_RSHC[rows, :used], lses_RSH[rows, :used])
            o_RHC[rows] = merged.to(o_RHC.dtype)
    return lse_RH


def _splits_per_row(pieces: Pieces, split_of_piece: IntArray, rows: int) -> IntArray:
    used_R = np.zeros(rows, dtype=np.int64)
    for piece in range(len(pieces)):
        first, last = pieces.q_start[piece], pieces.q_start[piece] + pieces.q_count[piece]
        used_R[first:last] = np.maximum(used_R[first:last], split_of_piece[piece] + 1)
    return used_R


def _cut(
    operands: Operands, qo_indptr: Tensor, kv_indptr: Tensor, last_page_lens: Tensor, splits: int, causal: bool
) -> tuple[Pieces, IntArray]:
    """The non-empty parts of every row, in row order, and which part each is."""
    qo_B, kv_B, page = host(qo_indptr), host(kv_indptr), operands.page_size
    pages_B = np.diff(kv_B)
    length_B = np.where(pages_B > 0, (pages_B - 1) * page + host(last_page_lens)[: len(pages_B)], 0)
    parts_B = np.minimum(splits, -(-length_B // _smallest_part(operands, int(np.diff(qo_B).max(initial=1)))))
    step_B = -(-pages_B // np.maximum(parts_B, 1))
    row = np.repeat(np.arange(len(pages_B)), parts_B)
    part = np.arange(len(row)) - np.repeat(np.cumsum(parts_B) - parts_B, parts_B)
    begin = part * step_B[row] * page
    end = np.minimum((part + 1) * step_B[row] * page, length_B[row])
    kept = end > begin
    row, part, begin, end = row[kept], part[kept], begin[kept], end[kept]
    q_count = np.diff(qo_B)[row]
    slack = length_B[row] - end - (q_count - 1) if causal else np.zeros_like(end)
    pieces = Pieces(
        q_start=qo_B[row], q_count=q_count, kv_start=kv_B[row] + begin // page, tokens=end - begin, slack=slack
    )
    return pieces, part


def _smallest_part(operands: Operands, max_seqlen_q: int) -> int:
    """Tokens of a part below which a row is not cut further."""
    heads, q_fp8, kv_fp8 = operands.q.shape[1], operands.q.element_size() == 1, operands.kv.element_size() == 1
    if (heads == 128 and q_fp8 and kv_fp8) or (heads == 64 and not q_fp8 and not kv_fp8 and max_seqlen_q == 1):
        return 32
    return 64 if (heads in (8, 16) and max_seqlen_q == 1) or (heads == 8 and max_seqlen_q == 2) else 16
