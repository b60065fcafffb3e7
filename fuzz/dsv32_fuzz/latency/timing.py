"""Blocks of pairs: two subjects run back to back in random order, every raw sample kept.

A subject prepares fresh inputs outside the timed region, then runs once inside it. The clock is the thread's CPU time
(host work on a shared machine), wall time, or device events on ROCm and CUDA. Python's garbage collector rests while
pairs are timed. A cold-cache run overwrites twice the last-level cache before each timed run, outside the timed region
too. A time below the roofline floor of the work is an error, not a record: it was not done, or not timed.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, Protocol

import msgspec
import numpy as np
import torch

from dsv32_fuzz.latency.statistics import Floats

SHORTEST_BLOCK = 0.005
"""Seconds: a block holds as many runs of a subject as last this long."""
WARM_UP = 0.1
"""Seconds of runs, and `FEWEST_PAIRS` of them, that count nothing."""
FEWEST_PAIRS = 5
"""Of a block, however long a run lasts: a median of fewer drops no hiccup."""
HOST_FLUSH = 1 << 27
"""Bytes: 128 MiB, twice the last-level cache of common server processors."""
DEVICE_FLUSH = 1 << 29
"""Bytes: 512 MiB, twice the Infinity Cache of an MI355X."""


Blocks = tuple[tuple[float, ...], ...]
"""Seconds [blocks, pairs] of one side."""


class ImpossibleTimeError(ValueError):
    """A time below what the hardware can do at all; the message names both."""


class Clock(Protocol):
    """Times one call."""

    def __call__(self, run: Callable[[], None]) -> float:
        """Seconds that `run` took."""
        ...


def cpu_clock(run: Callable[[], None]) -> float:
    """CPU time of this thread: other processes of a shared machine take none of it, and waiting counts nothing."""
    begin = time.thread_time_ns()
    run()
    return (time.thread_time_ns() - begin) / 1e9


def wall_clock(run: Callable[[], None]) -> float:
    """Wall time on the host."""
    begin = time.perf_counter_ns()
    run()
    return (time.perf_counter_ns() - begin) / 1e9


def device_clock(run: Callable[[], None]) -> float:
    """Time between two events on the current stream of the device; not yet run on a GPU.

    Raises:
        RuntimeError: torch sees no GPU.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("torch sees no GPU, so there are no device events; use cpu_clock or wall_clock")
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


ClockName = Literal["cpu", "wall", "device"]
CLOCKS: dict[ClockName, Clock] = {"cpu": cpu_clock, "wall": wall_clock, "device": device_clock}


def torch_device(clock: Clock) -> str:
    """Where the work of a clock lies: "cuda" (on ROCm too) for device events."""
    return "cuda" if clock is device_clock else "cpu"


def flush(device: str = "cpu") -> Callable[[], None]:
    """A function that overwrites twice the last-level cache."""
    size = HOST_FLUSH if device == "cpu" else DEVICE_FLUSH
    buffer = torch.zeros(size // 8, dtype=torch.int64, device=device)

    def overwrite() -> None:
        buffer.add_(1)

    return overwrite


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is timed: `prepare(i)` makes the inputs of run i, `run` is the timed region."""

    name: str
    prepare: Callable[[int], None]
    run: Callable[[], None]
    floor: float = 0.0
    """Seconds that the work takes at least on any hardware of the kind."""


class Samples(msgspec.Struct, frozen=True, kw_only=True):
    """Raw samples of one process, in seconds: run k of block i is a pair of blocks_a[i][k] and blocks_b[i][k]."""

    a: str
    b: str
    blocks_a: tuple[tuple[float, ...], ...]
    blocks_b: tuple[tuple[float, ...], ...]
    a_first: tuple[tuple[bool, ...], ...]
    cold: bool
    seed: int

    def log_ratios(self) -> Floats:
        """The median of log(B / A) over the pairs of each block, [blocks]."""
        return log_ratios(self.blocks_a, self.blocks_b)

    def medians(self) -> tuple[float, float]:
        """The median time of A and of B over all runs, in seconds."""
        return float(np.median(np.concatenate(self.blocks_a))), float(np.median(np.concatenate(self.blocks_b)))


def log_ratios(blocks_a: Blocks, blocks_b: Blocks) -> Floats:
    """The median of log(B / A) over the pairs of each block, [blocks], from the seconds of each side.

    Raises:
        ValueError: a run without its partner, or a time that is not positive.
    """
    sides = [[len(block) for block in blocks] for blocks in (blocks_a, blocks_b)]
    if sides[0] != sides[1] or not all(min(block, default=0) > 0 for block in (*blocks_a, *blocks_b)):
        raise ValueError("samples: give as many runs of A as of B in every block, all of a positive time")
    return np.array([np.median(np.log(np.divide(b, a))) for a, b in zip(blocks_a, blocks_b, strict=True)])


def joined(samples: Sequence[Samples]) -> Floats:
    """The log ratios of all blocks of several samples, [blocks]."""
    return np.concatenate([one.log_ratios() for one in samples])


def pairs_per_block(subject: Subject, clock: Clock = cpu_clock) -> int:
    """How many runs last `SHORTEST_BLOCK`, at least `FEWEST_PAIRS`; warms the subject up for `WARM_UP` seconds.

    Raises:
        ImpossibleTimeError: a run took no time.
    """
    times: list[float] = []
    while len(times) < FEWEST_PAIRS or sum(times) < WARM_UP:
        times.append(_timed(subject, -1 - len(times), clock, None))
    return max(FEWEST_PAIRS, math.ceil(SHORTEST_BLOCK / float(np.median(times))))


def time_blocks(
    a: Subject, b: Subject, blocks: int, pairs: int, *, clock: Clock = cpu_clock, cold: bool = False, seed: int = 0
) -> Samples:
    """Time `blocks` blocks of `pairs` pairs each, A or B first by the toss of a coin for every pair.

    Raises:
        ValueError: no block or an empty one.
        ImpossibleTimeError: a run took less than its subject's floor.
    """
    if blocks < 1 or pairs < 1:
        raise ValueError(f"blocks {blocks} and pairs {pairs} must be positive")
    before = flush(torch_device(clock)) if cold else None
    a_first = np.random.default_rng(seed).random((blocks, pairs)) < 0.5
    times = np.empty((2, blocks, pairs))
    with _without_collector():
        for number, (i, k) in enumerate(np.ndindex(blocks, pairs)):
            for side in (0, 1) if a_first[i, k] else (1, 0):
                times[side, i, k] = _timed((a, b)[side], number, clock, before)
    return Samples(
        a=a.name,
        b=b.name,
        blocks_a=_rows(times[0]),
        blocks_b=_rows(times[1]),
        a_first=tuple(tuple(row) for row in a_first.tolist()),
        cold=cold,
        seed=seed,
    )


def _rows(times: Floats) -> Blocks:
    return tuple(tuple(row) for row in times.tolist())


@contextmanager
def _without_collector() -> Iterator[None]:
    """As `timeit` does: a collection belongs to no run in particular."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _timed(subject: Subject, number: int, clock: Clock, before: Callable[[], None] | None) -> float:
    subject.prepare(number)
    if before is not None:
        before()
    seconds = clock(subject.run)
    if seconds <= subject.floor or seconds <= 0:
        raise ImpossibleTimeError(
            f"{subject.name} took {seconds:.3g} s, at or below its roofline floor of {subject.floor:.3g} s: "
            "the work was not done, or the clock does not see it"
        )
    return seconds
