"""Pairs of interleaved blocks: two subjects timed back to back in random order, every raw sample kept.

A subject prepares fresh inputs outside the timed region, then runs once inside it. The clock is the thread's CPU time
(host work on a shared machine), wall time, or device events on ROCm and CUDA. A cold-cache run overwrites twice the
last-level cache before each timed run, outside the timed region too. A time below the roofline floor of the work is an
error, not a record: it was not done, or not timed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np
import torch

from dsv32_fuzz.latency.statistics import Floats

SHORTEST_BLOCK = 0.02
"""Seconds: a block holds as many runs as last this long, so that a clock's resolution and one hiccup do not matter."""
HOST_FLUSH = 1 << 27
"""Bytes: 128 MiB, twice the last-level cache of common server processors."""
DEVICE_FLUSH = 1 << 29
"""Bytes: 512 MiB, twice the Infinity Cache of an MI355X."""


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
    """Raw samples of one process, in seconds; pair i is blocks_a[i] and blocks_b[i]."""

    a: str
    b: str
    blocks_a: tuple[tuple[float, ...], ...]
    blocks_b: tuple[tuple[float, ...], ...]
    a_first: tuple[bool, ...]
    cold: bool
    seed: int

    def log_ratios(self) -> Floats:
        """log(median of B's block / median of A's), [pairs]."""
        a, b = (np.median(np.asarray(blocks), axis=1) for blocks in (self.blocks_a, self.blocks_b))
        ratios: Floats = np.log(b / a)
        return ratios

    def medians(self) -> tuple[float, float]:
        """The median time of A and of B over all runs, in seconds."""
        return float(np.median(self.blocks_a)), float(np.median(self.blocks_b))


def runs_per_block(subject: Subject, clock: Clock = cpu_clock, warm: int = 5) -> int:
    """How many runs last `SHORTEST_BLOCK`; warms the subject up.

    Raises:
        ImpossibleTimeError: a run took no time.
    """
    times = [_timed(subject, -1 - i, clock, None) for i in range(warm)]
    return max(1, math.ceil(SHORTEST_BLOCK / float(np.median(times))))


def time_pairs(
    a: Subject, b: Subject, pairs: int, block: int, *, clock: Clock = cpu_clock, cold: bool = False, seed: int = 0
) -> Samples:
    """Time `pairs` pairs of blocks of `block` runs each, A or B first by the toss of a coin.

    Raises:
        ValueError: no pair or an empty block.
        ImpossibleTimeError: a run took less than its subject's floor.
    """
    if pairs < 1 or block < 1:
        raise ValueError(f"pairs {pairs} and block {block} must be positive")
    before = flush() if cold else None
    a_first = np.random.default_rng(seed).random(pairs) < 0.5
    blocks_a, blocks_b = [], []
    for i in range(pairs):
        both = {}
        for subject in (a, b) if a_first[i] else (b, a):
            times = [_timed(subject, i * block + k, clock, before) for k in range(block)]
            both[subject is b] = tuple(times)
        blocks_a.append(both[False])
        blocks_b.append(both[True])
    return Samples(
        a=a.name,
        b=b.name,
        blocks_a=tuple(blocks_a),
        blocks_b=tuple(blocks_b),
        a_first=tuple(bool(first) for first in a_first),
        cold=cold,
        seed=seed,
    )


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
