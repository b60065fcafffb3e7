"""Faults of graph replay, as data: what was wrong at which address, raised or collected.

A `FaultLog` that is strict raises the first fault; otherwise it collects them and the run goes on, so that the wrong
numbers which a GPU would produce can be looked at.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch

FaultKind = Literal[
    "moved",
    "freed",
    "short view",
    "write outside view",
    "baked scalar",
    "row count",
    "not renewed",
    "unordered",
    "staging reused",
]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One violation of what a captured graph relies on."""

    kind: FaultKind
    what: str
    """The tensor, scalar or operation concerned."""
    detail: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.what}: {self.detail}"


class GraphFaultError(RuntimeError):
    """A strict log was told of a fault; `fault` is it."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(str(fault))
        self.fault = fault


@dataclass(kw_only=True)
class FaultLog:
    """Where runner and queues report to; one log for all parts of a decode step."""

    strict: bool = True
    faults: list[Fault] = field(default_factory=list)

    def report(self, kind: FaultKind, what: str, detail: str) -> None:
        """Keep a fault.

        Raises:
            GraphFaultError: the log is strict.
        """
        fault = Fault(kind=kind, what=what, detail=detail)
        self.faults.append(fault)
        if self.strict:
            raise GraphFaultError(fault)

    @property
    def kinds(self) -> tuple[FaultKind, ...]:
        """The kinds reported so far, in order."""
        return tuple(fault.kind for fault in self.faults)


@dataclass(frozen=True)
class Span:
    """The bytes [start, stop) that a tensor reaches, gaps of its strides included."""

    start: int
    stop: int

    def overlaps(self, other: Span) -> bool:
        """Whether they share a byte."""
        return max(self.start, other.start) < min(self.stop, other.stop)


def span_of(tensor: torch.Tensor) -> Span:
    """The bytes of `tensor` in memory."""
    start = tensor.data_ptr()
    if tensor.numel() == 0:
        return Span(start, start)
    reach = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return Span(start, start + (reach + 1) * tensor.element_size())
