"""An allocator that hands freed memory out again, as a GPU's caching allocator does.

A graph that captured an address in freed memory reads whatever the next owner wrote there (AITER #5193). Tensors of an
arena have an owner number by address, so that a runner can tell. The arena never clears memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

ALIGNMENT = 256  # bytes; as GPU allocators align, and enough for every dtype


class Arena:
    """First-fit allocation from one block of `nbytes` bytes.

    Raises:
        ValueError: `nbytes` is not positive.
    """

    def __init__(self, nbytes: int) -> None:
        if nbytes <= 0:
            raise ValueError(f"nbytes is {nbytes}; give a positive number of bytes")
        self._bytes = torch.zeros(nbytes + ALIGNMENT, dtype=torch.uint8)
        self._base = -(-self._bytes.data_ptr() // ALIGNMENT) * ALIGNMENT
        self._end = self._base + nbytes
        self._live: dict[int, tuple[int, int]] = {}
        """Of each live allocation, by address: where it ends, and its owner number."""
        self._count = 0

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor with whatever the memory held before.

        Raises:
            ValueError: the tensor would be empty, and so have no address.
            MemoryError: no gap is large enough.
        """
        size = math.prod(shape) * dtype.itemsize
        if size == 0:
            raise ValueError(f"shape {list(shape)} is empty; allocate at least one element")
        address = self._first_fit(-(-size // ALIGNMENT) * ALIGNMENT)
        self._count += 1
        self._live[address] = (address + size, self._count)
        offset = (address - self._bytes.data_ptr()) // dtype.itemsize
        # Not a view: views would share one version counter, and writing one would seem to renew all.
        strides = torch.empty(tuple(shape), device="meta").stride()
        return torch.empty(0, dtype=dtype).set_(self._bytes.untyped_storage(), offset, tuple(shape), strides)

    def free(self, tensor: torch.Tensor) -> None:
        """Hand the memory of `tensor` back; it may be handed out again at once.

        Raises:
            ValueError: not a live allocation of this arena (freed twice, or a view of one).
        """
        if self._live.pop(tensor.data_ptr(), None) is None:
            raise ValueError("tensor is no live allocation of this arena; free each allocation once, by its first byte")

    def owns(self, address: int) -> bool:
        """Whether an address lies in the arena, live or free."""
        return self._base <= address < self._end

    def owner(self, address: int) -> int | None:
        """The number of the allocation at `address`, counted from 1; None where nothing is allocated."""
        for start, (stop, number) in self._live.items():
            if start <= address < stop:
                return number
        return None

    def _first_fit(self, size: int) -> int:
        gap = self._base
        for start, (stop, _) in sorted(self._live.items()):
            if start - gap >= size:
                break
            gap = -(-stop // ALIGNMENT) * ALIGNMENT
        if self._end - gap < size:
            raise MemoryError(f"the arena has no gap of {size} bytes; free something or make the arena larger")
        return gap
