"""Shared memory between the suite and its worker: the target's own buffers, seen by both without a copy.

The worker moves a builder's buffers into an arena (`Arena.adopt`), so that a check reads what the target's next step
will read, and what a check writes (as an attention layer would) is there for the target. Backed by an anonymous memory
file (Linux), which no limit on /dev/shm applies to; the suite maps it through the worker's file descriptor.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

ALIGNMENT = 64  # bytes; a multiple of every dtype's size


@dataclass(frozen=True, kw_only=True)
class Placed:
    """A buffer inside an arena, in plain numbers."""

    offset: int
    """Bytes."""
    shape: tuple[int, ...]
    dtype: str
    """numpy's name of it."""
    nbytes: int


@dataclass
class Arena:
    """The worker's side: one memory file, laid out once for the given tensors."""

    fd: int
    memory: torch.Tensor
    placed: dict[str, Placed] = field(default_factory=dict)

    @classmethod
    def adopt(cls, tensors: dict[str, torch.Tensor]) -> Arena:
        """Move the storage of every tensor into a new arena, in place: whoever holds the tensor sees the new storage.

        Raises:
            ValueError: a tensor that is not a contiguous CPU tensor.
        """
        placed, size = _layout(tensors)
        fd = os.memfd_create("dsv32-target")
        os.ftruncate(fd, max(size, ALIGNMENT))
        memory = torch.from_file(
            f"/proc/self/fd/{fd}", shared=True, size=max(size, ALIGNMENT), dtype=torch.uint8, device="cpu"
        )
        arena = cls(fd, memory, placed)
        for name, tensor in tensors.items():
            inside = arena.view(name, tensor.dtype)
            if tensor.numel() and bool(tensor.view(_SIGNED[tensor.itemsize]).any()):  # else it is zero already
                inside.copy_(tensor)
            tensor.set_(inside)  # type: ignore[call-overload]
        return arena

    def view(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """The tensor at a place of the arena."""
        place = self.placed[name]
        return self.memory[place.offset : place.offset + place.nbytes].view(dtype).view(place.shape)

    def locate(self, address: int) -> str | None:
        """Name of the buffer that holds an address of this process, None if no buffer does."""
        start = address - self.memory.data_ptr()
        for name, place in self.placed.items():
            if place.offset <= start < place.offset + max(place.nbytes, 1):
                return name
        return None

    def close(self) -> None:
        """Give the descriptor back; the mapping lives as long as its tensors."""
        os.close(self.fd)

    def describe(self) -> dict[str, Any]:
        """What the suite needs to map it."""
        layout = {name: vars(place) for name, place in self.placed.items()}
        return {"path": f"/proc/{os.getpid()}/fd/{self.fd}", "base": self.memory.data_ptr(), "layout": layout}


_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _layout(tensors: dict[str, torch.Tensor]) -> tuple[dict[str, Placed], int]:
    placed: dict[str, Placed] = {}
    offset = 0
    for name, tensor in tensors.items():
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise ValueError(f"{name} is no contiguous CPU tensor, so it cannot be shared with the suite")
        dtype = str(tensor.dtype).removeprefix("torch.")
        place = Placed(offset=offset, shape=tuple(tensor.shape), dtype=dtype, nbytes=tensor.nbytes)
        placed[name] = place
        offset += -(-place.nbytes // ALIGNMENT) * ALIGNMENT
    return placed, offset


@dataclass
class MappedArena:
    """The suite's side of an arena."""

    memory: npt.NDArray[np.uint8]
    worker_base: int
    placed: dict[str, Placed]

    @classmethod
    def map(cls, described: dict[str, Any]) -> MappedArena:
        """Map what `Arena.describe` describes."""
        placed = {
            name: Placed(**{**place, "shape": tuple(place["shape"])}) for name, place in described["layout"].items()
        }
        return cls(np.memmap(described["path"], dtype=np.uint8, mode="r+"), described["base"], placed)

    def array(self, name: str) -> npt.NDArray[Any]:
        """A buffer as a live array."""
        place = self.placed[name]
        return self.memory[place.offset : place.offset + place.nbytes].view(place.dtype).reshape(place.shape)

    def here(self, address: int) -> int:
        """The address at which this process sees what the worker has at `address`; unchanged if outside the arena."""
        inside = address - self.worker_base
        return int(self.memory.ctypes.data) + inside if 0 <= inside < self.memory.size else address
