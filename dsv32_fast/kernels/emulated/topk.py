"""`top_k_per_row_decode` and `top_k_per_row_prefill` behind AITER's signatures (ROCm/aiter e404860).

The kernels return the exact top-k set in an order that depends on which thread arrives first; entries that tie at the
cut are taken by arrival too. Here the arrival order is explicit and seeded, so that a test can ask for another race and
still repeat it: `with arrival_order(seed): ...`. `stable=True` removes the race. NaN is not special: by its bits a
positive NaN is above +inf and a negative one below -inf, and -0.0 is below 0.0.

Legend: M rows, N columns of the widest row, K entries per row.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from dsv32_fast.kernels.emulated.memory import OutOfBoundsError

_seed: ContextVar[int] = ContextVar("arrival_seed", default=0)


@contextmanager
def arrival_order(seed: int) -> Iterator[None]:
    """Inside the block, threads arrive in the order that `seed` gives: a permutation of the columns of every call."""
    token = _seed.set(seed)
    try:
        yield
    finally:
        _seed.reset(token)


def top_k_per_row_decode(
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
    """Indices of the k largest of the first len(r) columns of each row, written to `indices` in place.

    len(r) = seqLens[r // next_n] - next_n + r % next_n + 1. If len(r) <= k they are 0 .. len(r)-1, then -1.

    Args:
        logits: fp32; row r starts `r * stride0` elements after the first. `stride1` is ignored (taken as 1).
        next_n: query rows per request.
        seqLens: int32 [requests].
        indices: int32 [numRows, k], contiguous.
        numRows: rows to do.
        stride0: row stride of `logits`, in elements.
        stride1: ignored.
        k: entries per row.
        stable: ascending order, and the smallest index wins a tie.

    Raises:
        TypeError, ValueError: a tensor of another dtype or shape; the message names it.
        OutOfBoundsError: a row ends outside the allocation of `logits`.
    """
    del stride1
    rows = torch.arange(numRows)
    lengths_M = seqLens.cpu().long()[rows // next_n] - next_n + rows % next_n + 1
    _check(logits, indices, numRows, k)
    _select(logits, torch.zeros_like(lengths_M), lengths_M, indices, None, stride0, k, stable)


def top_k_per_row_prefill(
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
    """As `top_k_per_row_decode`, over columns [rowStarts[r], rowEnds[r]) of row r; indices are columns of the row.

    `values`, if given, receives the logits of the indices, fp32 [numRows, k], and 0 where the index is -1.
    """
    del stride1
    _check(logits, indices, numRows, k)
    starts_M, ends_M = rowStarts.cpu().long()[:numRows], rowEnds.cpu().long()[:numRows]
    _select(logits, starts_M, ends_M, indices, values, stride0, k, stable)


def _select(
    logits: Tensor,
    starts_M: Tensor,
    ends_M: Tensor,
    indices: Tensor,
    values: Tensor | None,
    stride0: int,
    k: int,
    stable: bool,
) -> None:
    lengths_M = (ends_M - starts_M).clamp(min=0)
    width = int(lengths_M.max()) if len(lengths_M) else 0
    slots_MK = torch.arange(k).expand(len(lengths_M), k)
    chosen_MK = torch.where(slots_MK < lengths_M[:, None], slots_MK, -1)
    rows_MN = _rows(logits, starts_M, lengths_M, stride0, width)
    long = (lengths_M > k).nonzero().squeeze(1)
    if len(long):
        keys = _ordered_bits(rows_MN[long])
        inside = torch.arange(width) < lengths_M[long, None]
        chosen_MK[long] = _top(keys.masked_fill(~inside, torch.iinfo(torch.int64).min), k, stable)
    padding_MK = chosen_MK < 0
    indices[: len(lengths_M)] = (chosen_MK + starts_M[:, None]).masked_fill(padding_MK, -1).to(indices)
    if values is not None:
        picked_MK = rows_MN.gather(1, chosen_MK.clamp(min=0)) if width else torch.zeros(chosen_MK.shape)
        values[: len(lengths_M)] = picked_MK.masked_fill(padding_MK, 0.0).to(values)


def _top(keys_MN: Tensor, k: int, stable: bool) -> Tensor:
    """Columns above the k-th key, then those equal to it, both by arrival; or by column if `stable`."""
    width = keys_MN.shape[1]
    arrival = torch.arange(width) if stable else _arrival(width)
    arrived_MN = keys_MN[:, arrival]
    pivot_M1 = arrived_MN.topk(k, dim=1).values[:, -1:]
    rank_MN = (arrived_MN == pivot_M1).int() + 2 * (arrived_MN < pivot_M1).int()
    chosen_MK = arrival[rank_MN.argsort(dim=1, stable=True)[:, :k]]
    return chosen_MK.sort(dim=1).values if stable else chosen_MK


def _arrival(width: int) -> Tensor:
    return torch.randperm(width, generator=torch.Generator().manual_seed(_seed.get()))


def _ordered_bits(values: Tensor) -> Tensor:
    """int64 keys in the order of the fp32 bit patterns: -NaN < -inf < .. < -0 < 0 < .. < inf < NaN."""
    bits = values.contiguous().view(torch.int32)
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()


def _rows(logits: Tensor, starts_M: Tensor, lengths_M: Tensor, stride0: int, width: int) -> Tensor:
    """Columns start .. start + width of every row, on the host; what lies beyond a row's own length is arbitrary."""
    stored = int(logits.untyped_storage().nbytes() // logits.element_size() - logits.storage_offset())
    first_M = torch.arange(len(starts_M)) * stride0 + starts_M
    for row in ((first_M + lengths_M > stored) & (lengths_M > 0)).nonzero().flatten().tolist()[:1]:
        raise OutOfBoundsError(f"logits: row {row} ends at element {int(first_M[row] + lengths_M[row])} of {stored}")
    flat = logits.as_strided((stored,), (1,))
    at_MN = (first_M[:, None] + torch.arange(width)).clamp(max=max(stored - 1, 0))
    return flat[at_MN.to(flat.device)].cpu()


def _check(logits: Tensor, indices: Tensor, rows: int, k: int) -> None:
    if logits.dtype != torch.float32 or indices.dtype != torch.int32:
        raise TypeError(f"logits and indices must be fp32 and int32, not {logits.dtype} and {indices.dtype}")
    if indices.ndim != 2 or indices.shape[0] < rows or indices.shape[1] != k or not indices.is_contiguous():
        raise ValueError(f"indices must be contiguous [numRows={rows}, k={k}], not {tuple(indices.shape)}")
