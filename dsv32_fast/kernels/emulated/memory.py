"""How the emulated kernels address memory: without bounds checks, like the GPU kernels that they stand for.

A kernel gets a pointer and strides, never the length of a view. So a stale plan may read or write rows outside the view
it was given: what lies there in the same allocation is read or overwritten, as on a GPU. Only an access outside the
allocation itself, which on a GPU is a fault or foreign data, raises `OutOfBoundsError`.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

IntArray = NDArray[np.int64]


class OutOfBoundsError(IndexError):
    """An emulated kernel addressed memory outside an allocation; the message names the tensor."""


def beyond_view(rows: Tensor) -> Tensor:
    """`rows` with dimension 0 extended to the end of its storage; strides are kept."""
    inner = math.prod(rows.shape[1:])
    stride = rows.stride(0)
    if inner == 0 or stride == 0:
        return rows
    stored = rows.untyped_storage().nbytes() // rows.element_size() - rows.storage_offset()
    span = 1 + sum((size - 1) * step for size, step in zip(rows.shape[1:], rows.stride()[1:], strict=True))
    count = max(0, (stored - span) // stride + 1)
    return rows.as_strided((max(count, rows.shape[0]), *rows.shape[1:]), rows.stride())


def require_inside(name: str, index: IntArray, size: int) -> None:
    """Raise `OutOfBoundsError` if an element of `index` is not in [0, size)."""
    if index.size and (index.min() < 0 or index.max() >= size):
        first = index[(index < 0) | (index >= size)].flat[0]
        raise OutOfBoundsError(f"{name}: access to row {first} of {size}; a GPU would fault or use foreign memory here")


def host(tensor: Tensor) -> IntArray:
    """An integer tensor as an int64 array on the host."""
    array: IntArray = tensor.detach().cpu().numpy().astype(np.int64)
    return array


def ranges(start: IntArray, stop: IntArray) -> IntArray:
    """All integers of [start[0], stop[0]), then of [start[1], stop[1]), and so on."""
    counts = np.maximum(stop - start, 0)
    ends = np.cumsum(counts)
    total = int(ends[-1]) if ends.size else 0
    shift: IntArray = np.repeat(start - (ends - counts), counts)
    return np.arange(total) + shift


def poison(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """An fp32 allocation whose content stands for uninitialised memory: NaN, so that reading it cannot go unnoticed."""
    return torch.full(shape, math.nan, dtype=torch.float32, device=device)
