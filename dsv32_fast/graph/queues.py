"""Queues of one device and its host: work that runs later than it is launched, and which work is ordered before which.

A launched operation stays pending until something waits for it, so an asynchronous copy reads its source when it is
drained, not when it is launched. Independently of that schedule, every access is ordered by vector clocks: an operation
comes after the earlier ones of its own queue, after all that the host had done when it was launched, and after the
events that its queue waited for. Two accesses to one byte, of which one writes, without an order between them are a
fault even if they happened to run in the right order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from dsv32_fast.graph.faults import FaultLog, Span, span_of

HOST = "host"
R = TypeVar("R")
Clock = dict[str, int]


@dataclass(frozen=True, kw_only=True)
class Event:
    """A point in a queue: everything launched on it before."""

    queue: str
    position: int
    clock: Clock


@dataclass(frozen=True, kw_only=True)
class _Access:
    queue: str
    tick: int
    what: str
    span: Span
    writes: bool


class Queues:
    """All queues of a device, made at first use, and the host, which is the queue `host`."""

    def __init__(self, log: FaultLog) -> None:
        self.log = log
        self._clocks: dict[str, Clock] = {}
        self._pending: dict[str, deque[Callable[[], object]]] = {}
        self._done: dict[str, int] = {}
        self._accesses: list[_Access] = []

    def launch(
        self,
        queue: str,
        what: str,
        run: Callable[[], object],
        *,
        reads: Sequence[torch.Tensor] = (),
        writes: Sequence[torch.Tensor] = (),
    ) -> None:
        """Put an operation at the end of a queue; it stays pending until somebody waits for it.

        Raises:
            GraphFaultError: the log is strict, and an earlier access to the same memory is not ordered before this.
        """
        self._touch(queue, what, reads, writes)
        self._enqueue(queue, run)

    def run_now(
        self,
        queue: str,
        what: str,
        run: Callable[[], R],
        *,
        reads: Sequence[torch.Tensor] = (),
        writes: Sequence[torch.Tensor] = (),
    ) -> R:
        """Launch an operation on a queue that happens to be fast: it and all before it on that queue run at once."""
        self._drain(queue)
        self._touch(queue, what, reads, writes)
        return run()

    def copy(self, queue: str, target: torch.Tensor, source: torch.Tensor) -> None:
        """An asynchronous copy: `source` is read when the queue gets there."""
        torch.autograd.graph.increment_version(target)  # the write counts when it is launched, not when it is done
        alias = torch.empty(0, dtype=target.dtype, device=target.device)
        alias.set_(target.untyped_storage(), target.storage_offset(), target.shape, target.stride())
        self.launch(queue, "asynchronous copy", lambda: alias.copy_(source), reads=(source,), writes=(target,))

    def host_write(self, what: str, tensor: torch.Tensor) -> None:
        """Say that the host is about to write `tensor`."""
        self._touch(HOST, what, (), (tensor,))

    def host_read(self, what: str, tensor: torch.Tensor) -> None:
        """Say that the host is about to read `tensor`."""
        self._touch(HOST, what, (tensor,), ())

    def record(self, queue: str) -> Event:
        """The point that a queue has reached."""
        position = self._done.get(queue, 0) + len(self._pending.get(queue, ()))
        return Event(queue=queue, position=position, clock=dict(self._clock(queue)))

    def wait(self, queue: str, event: Event) -> None:
        """What is launched on `queue` from now on comes after `event`; the host waits by draining the other queue."""
        _join(self._clock(queue), event.clock)
        if queue == HOST:
            self._drain(event.queue, event.position)
            self._forget()
        else:
            self._enqueue(queue, lambda: self._drain(event.queue, event.position))

    def synchronize(self, queue: str) -> None:
        """The host waits for everything on `queue`."""
        self.wait(HOST, self.record(queue))

    def synchronize_all(self) -> None:
        """The host waits for everything."""
        for queue in [name for name in self._clocks if name != HOST]:
            self.synchronize(queue)

    def _clock(self, queue: str) -> Clock:
        return self._clocks.setdefault(queue, {})

    def _enqueue(self, queue: str, run: Callable[[], object]) -> None:
        self._pending.setdefault(queue, deque()).append(run)

    def _drain(self, queue: str, position: int | None = None) -> None:
        pending = self._pending.get(queue, deque())
        while pending and (position is None or self._done.get(queue, 0) < position):
            run = pending.popleft()
            self._done[queue] = self._done.get(queue, 0) + 1
            run()

    def _touch(self, queue: str, what: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> None:
        clock = self._clock(queue)
        _join(clock, self._clock(HOST))
        clock[queue] = clock.get(queue, 0) + 1
        for writing, tensors in ((False, reads), (True, writes)):
            for span in {span_of(tensor) for tensor in tensors}:
                self._access(_Access(queue=queue, tick=clock[queue], what=what, span=span, writes=writing), clock)

    def _access(self, access: _Access, clock: Clock) -> None:
        for earlier in self._accesses:
            conflict = (earlier.writes or access.writes) and earlier.span.overlaps(access.span)
            if conflict and clock.get(earlier.queue, 0) < earlier.tick:
                self._report(earlier, access)
                break
        self._accesses.append(access)

    def _report(self, earlier: _Access, later: _Access) -> None:
        if later.queue == HOST and not earlier.writes:
            detail = f"written while the {earlier.what} that reads it may be pending; wait for its event first"
            self.log.report("staging reused", later.what, detail)
        else:
            detail = f"not ordered after {earlier.what} on {earlier.queue}; let {later.queue} wait for an event of it"
            self.log.report("unordered", f"{later.what} on {later.queue}", detail)

    def _forget(self) -> None:
        """Drop what the host waited for: everything from now on comes after it."""
        host = self._clock(HOST)
        self._accesses = [a for a in self._accesses if host.get(a.queue, 0) < a.tick]


def _join(clock: Clock, other: Clock) -> None:
    for queue, tick in other.items():
        clock[queue] = max(clock.get(queue, 0), tick)


class Staging:
    """Host buffers that feed one device tensor by asynchronous copies, used in turn.

    Args:
        target: [rows, ...], the tensor that a graph reads.
        queues: where the copies run, on `main`.
        depth: how many buffers there are.
        wait: whether a buffer is written only after its last copy is done; without, this is the bug of several engines
            (vLLM #36013, TensorRT-LLM #15546).
    """

    def __init__(self, target: torch.Tensor, queues: Queues, *, depth: int = 2, wait: bool = True) -> None:
        if depth < 1:
            raise ValueError(f"depth is {depth}; give at least one staging buffer")
        self.target, self._queues, self._wait = target, queues, wait
        self._buffers = [torch.zeros_like(target, device="cpu") for _ in range(depth)]
        self._events: list[Event | None] = [None] * depth
        self._turn = 0

    def put(self, name: str, rows: torch.Tensor) -> None:
        """Write `rows` to the next buffer and launch the copy of them to the first rows of the target."""
        turn, self._turn = self._turn, (self._turn + 1) % len(self._buffers)
        event, buffer = self._events[turn], self._buffers[turn][: rows.shape[0]]
        if self._wait and event is not None:
            self._queues.wait(HOST, event)
        self._queues.host_write(f"staging of {name}", buffer)
        buffer.copy_(rows)
        self._queues.copy("main", self.target[: rows.shape[0]], buffer)
        self._events[turn] = self._queues.record("main")


class QueuedPlanner:
    """Kernels whose planner runs on the queue `planner`, after all that was launched on `main`.

    Which queue AITER's planner uses inside an engine is not known; vLLM #47404 synchronises after each recompute, which
    is what `synchronise` models. Without it nothing orders the plan before a replay on `main`.
    """

    def __init__(self, kernels: Any, queues: Queues, *, synchronise: bool) -> None:
        self._kernels, self._queues, self._synchronise = kernels, queues, synchronise
        self.synchronisations = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def get_mla_metadata_v1(self, *args: Any, **kwargs: Any) -> None:
        """Launch the planner; returns before it has run unless it synchronises."""
        self._queues.wait("planner", self._queues.record("main"))
        run = lambda: self._kernels.get_mla_metadata_v1(*args, **kwargs)  # noqa: E731
        self._queues.launch("planner", "plan", run, reads=args[:3], writes=args[6:12])
        if self._synchronise:
            self._queues.synchronize("planner")
            self.synchronisations += 1
