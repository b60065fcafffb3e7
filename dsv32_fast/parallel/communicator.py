"""How ranks exchange tensors: torch.distributed between processes, or a barrier between threads of one process.

One operation suffices, an all-gather of bytes; sums are formed from it in rank order on every rank, so that all ranks
hold the same bits. That is what a one-shot all-reduce does (fp32 accumulation, one rounding); a ring rounds more often.
"""

from __future__ import annotations

import threading
from collections.abc import MutableSequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class PeerLostError(RuntimeError):
    """An exchange failed, most likely since another rank is gone."""


class Communicator(Protocol):
    """One rank's end."""

    @property
    def rank(self) -> int:
        """Number of this rank, from 0."""
        ...

    @property
    def world(self) -> int:
        """How many ranks there are."""
        ...

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all ranks, in rank order; shapes and dtypes must be the same everywhere."""
        ...


def all_sum(tensor: Tensor, communicator: Communicator) -> Tensor:
    """The sum over all ranks, accumulated in fp32 in rank order and rounded once."""
    if communicator.world == 1:
        return tensor
    parts = communicator.all_gather(tensor)
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(tensor.dtype)


@dataclass(frozen=True)
class ProcessCommunicator:
    """The default process group: gloo on a CPU, RCCL on ROCm."""

    rank: int
    world: int
    progress: MutableSequence[int]
    """By rank, how many exchanges it has entered; shared by all, so that a silent rank is told from those it stops."""

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """See `Communicator`; sent as bytes, since backends differ in the dtypes that they know."""
        self.progress[self.rank] += 1
        sent = tensor.contiguous().flatten().view(torch.uint8)
        received = [torch.empty_like(sent) for _ in range(self.world)]
        try:
            dist.all_gather(received, sent)
        except RuntimeError as error:
            raise PeerLostError(str(error)) from error
        return [part.view(tensor.dtype).view(tensor.shape) for part in received]


@dataclass
class Threads:
    """The meeting point of ranks that are threads of this process."""

    world: int
    timeout_s: float
    places: list[Tensor | None] = field(default_factory=list)
    progress: list[int] = field(default_factory=list)
    """As in `ProcessCommunicator`."""

    def __post_init__(self) -> None:
        self.places, self.progress = [None] * self.world, [0] * self.world
        self.barrier = threading.Barrier(self.world, timeout=self.timeout_s)


@dataclass(frozen=True)
class ThreadCommunicator:
    """One thread's end of `Threads`."""

    rank: int
    threads: Threads

    @property
    def world(self) -> int:
        """How many threads there are."""
        return self.threads.world

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """See `Communicator`."""
        self.threads.progress[self.rank] += 1
        self.threads.places[self.rank] = tensor.clone()
        self.threads.barrier.wait()
        gathered = [part for part in self.threads.places if part is not None]
        self.threads.barrier.wait()  # nobody may put the next tensor down before all have taken this one
        return gathered
