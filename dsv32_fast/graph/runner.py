"""One interface to captured decode steps, whatever captures them: padded sizes, and the checks before every replay.

A graph replays its operations on fixed addresses with the scalars of its capture. The runner therefore compares, before
each replay, what the caller is about to use with what was captured, and reports a `Fault` for every difference. These
checks need no GPU and cost a few comparisons, so they hold for real graphs and for the model alike.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import torch

from dsv32_fast.graph.faults import FaultLog

K = TypeVar("K")


class Address(NamedTuple):
    """Where a tensor lies and how it is read."""

    data_ptr: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


def address_of(tensor: torch.Tensor) -> Address:
    """The address that a graph would capture."""
    return Address(tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)


@dataclass(frozen=True, kw_only=True)
class StepCall:
    """Everything outside a body that it depends on."""

    rows: int
    """Rows that the step's metadata describes, padding included."""
    tensors: Mapping[str, torch.Tensor]
    """Every tensor that outlives the body and that it reads or writes, by name."""
    outputs: tuple[str, ...] = ()
    """Tensors of which the body writes one row per padded row."""
    renewed: tuple[str, ...] = ()
    """Tensors that must be written anew before each replay: what belongs to one step only. Writes that torch does not
    see (through a raw pointer) do not count."""
    scalars: Mapping[str, Hashable] = field(default_factory=dict)
    """Python numbers that a capture bakes in."""

    def __post_init__(self) -> None:
        for name in (*self.outputs, *self.renewed):
            if name not in self.tensors:
                raise ValueError(f"{name!r} is not among the tensors of the call; add it there")
        for name in self.renewed:
            if self.tensors[name].is_inference():
                raise ValueError(f"{name} was made in inference mode, where torch counts no writes; use no_grad")


@dataclass(frozen=True, kw_only=True)
class _Captured:
    call: StepCall
    addresses: dict[str, Address]
    replay: Callable[[], None]


class GraphRunner(ABC):
    """Captured bodies by padded size and baked scalars.

    Args:
        sizes: padded row counts for which graphs are captured.
        log: where faults go; a strict one of its own if None.

    Raises:
        ValueError: no sizes, or one that is not positive.
    """

    def __init__(self, sizes: Sequence[int], log: FaultLog | None = None) -> None:
        if not sizes or min(sizes) < 1:
            raise ValueError(f"sizes are {list(sizes)}; give at least one, all positive")
        self.sizes = tuple(sorted(set(sizes)))
        self.log = log or FaultLog()
        self._graphs: dict[int, dict[frozenset[tuple[str, Hashable]], _Captured]] = {}
        self._versions: dict[int, int] = {}
        """Version counter of each renewed tensor, by address, after the capture or replay that last used it."""

    def padded_rows(self, rows: int) -> int:
        """The smallest captured size that holds `rows` rows.

        Raises:
            ValueError: none does; such a step runs without a graph.
        """
        for size in self.sizes:
            if size >= rows:
                return size
        raise ValueError(f"{rows} rows exceed the largest captured size {self.sizes[-1]}; run the step without a graph")

    def capture(self, size: int, body: Callable[[], None], call: StepCall) -> None:
        """Capture `body` for `size` rows.

        Raises:
            ValueError: `size` is not one of the runner's.
            GraphFaultError: the log is strict, and the call does not describe `size` rows or an output is too short.
        """
        if size not in self.sizes:
            raise ValueError(f"size {size} is not one of the sizes {list(self.sizes)}; capture one of those")
        self._check_rows(size, call)
        captured = _Captured(
            call=call,
            addresses={name: address_of(tensor) for name, tensor in call.tensors.items()},
            replay=self._record(body, call),
        )
        self._graphs.setdefault(size, {})[frozenset(call.scalars.items())] = captured
        self._remember(call)

    def replay(self, size: int, call: StepCall) -> None:
        """Run the graph of `size` rows on the current contents of the captured addresses.

        Raises:
            ValueError: nothing was captured for `size`.
            GraphFaultError: the log is strict and the graph would not do what `call` asks for.
        """
        captured = self._choose(size, call)
        self._check_rows(size, call)
        self._check_addresses(captured, call)
        self._check_renewed(call)
        captured.replay()
        self._remember(call)

    @abstractmethod
    def _record(self, body: Callable[[], None], call: StepCall) -> Callable[[], None]:
        """Capture `body`; the result replays it."""

    def recording(self, kernels: K) -> K:
        """The kernels that a body must call to be captured: `kernels` itself, unless a runner has to look on."""
        return kernels

    def _choose(self, size: int, call: StepCall) -> _Captured:
        graphs = self._graphs.get(size)
        if not graphs:
            raise ValueError(f"no graph was captured for {size} rows; capture it first")
        found = graphs.get(frozenset(call.scalars.items()))
        if found is not None:
            return found
        found = next(iter(graphs.values()))
        for name, baked in found.call.scalars.items():
            if call.scalars.get(name) != baked:
                detail = f"captured as {baked}, now {call.scalars.get(name)}; capture one graph for each value"
                self.log.report("baked scalar", name, detail)
        return found

    def _check_rows(self, size: int, call: StepCall) -> None:
        if call.rows != size:
            detail = f"describes {call.rows} rows, the graph runs {size}; build it for the padded step"
            self.log.report("row count", "metadata", detail)
        for name in call.outputs:
            if call.tensors[name].shape[0] < size:
                detail = f"has {call.tensors[name].shape[0]} rows, the graph writes {size}; pass the padded view"
                self.log.report("short view", name, detail)

    def _check_addresses(self, captured: _Captured, call: StepCall) -> None:
        for name, address in captured.addresses.items():
            if name not in call.tensors:
                self.log.report("moved", name, "was captured and is not passed; pass the captured tensor")
            elif address_of(call.tensors[name]) != address:
                detail = f"captured as {_text(address)}, now {_text(address_of(call.tensors[name]))}; copy into it"
                self.log.report("moved", name, detail)

    def _check_renewed(self, call: StepCall) -> None:
        for name in call.renewed:
            tensor = call.tensors[name]
            if self._versions.get(tensor.data_ptr()) == tensor._version:
                self.log.report("not renewed", name, "holds what an earlier step left; write it before every replay")

    def _remember(self, call: StepCall) -> None:
        self._versions.update({call.tensors[n].data_ptr(): call.tensors[n]._version for n in call.renewed})


def _text(address: Address) -> str:
    return f"{list(address.shape)} at {address.data_ptr:#x}"
