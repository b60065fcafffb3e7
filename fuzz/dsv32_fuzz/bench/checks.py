"""How many step batches a second the step checks judge, all together, and how the time is shared.

Decode at the true constants: 256 compute units, topk 2048, max_num_batched_tokens 8192, sequences from below topk to
far beyond, so that plans are made and reused, and batches that shrink now and then. A step is built by the target and
by its always-rebuild twin, and every check of `STEP_CHECKS` looks at both; buffers are scanned up to what was written
each step, and whole at the end of each sequence. One thread; what counts is its processor time, so a rate is that of a
core which nobody else uses.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

from dsv32_fast.batch import StepBatch
from dsv32_fuzz.case import Case, Dims
from dsv32_fuzz.checks import Check, Observation, run_case
from dsv32_fuzz.checks.catalogue import STEP_CHECKS
from dsv32_fuzz.targets import Target
from dsv32_fuzz.verdict import Status

SHRINK_EVERY = 16
"""Steps after which a batch loses a request for a step, so that a shrink is there to be judged."""
REPETITIONS = 5

Progress = Callable[[int, int], None]


class CheckRate(msgspec.Struct, frozen=True, kw_only=True):
    """Speed of one core at one batch size, the median over the repetitions; shares add up to 1."""

    batch: int
    steps: int
    """Steps of a sequence."""
    steps_per_second: float
    lowest: float
    highest: float
    shares: dict[str, float]
    """By check, and `build`: both builds of a step, the oracle and the rest."""


def bench_checks(
    target: Target, batches: tuple[int, ...] = (1, 64, 256), steps: int = 400, progress: Progress | None = None
) -> list[CheckRate]:
    """Measure each batch size.

    Raises:
        ValueError: a batch or step count that is not positive, or a batch that does not fit max_num_batched_tokens.
        RuntimeError: a check fails, so its time means nothing.
    """
    limit = Dims().max_num_batched_tokens
    if not batches or min(batches) < 1 or max(batches) > limit or steps < SHRINK_EVERY:
        raise ValueError(f"batches {batches} must be in 1..{limit} and steps {steps} at least {SHRINK_EVERY}")
    rates = []
    for done, size in enumerate(batches, 1):
        case = Case(check="", scope="decode", target=target.name, options=target.options, steps=sequence(size, steps))
        _judged(case, target)  # compiles, and fills the caches
        rates.append(_rate(case, target, size))
        if progress is not None:
            progress(done, len(batches))
    return rates


def sequence(batch: int, steps: int) -> tuple[StepBatch, ...]:
    """Decode of `batch` requests: most beyond topk, one that crosses it, the last one away every now and then."""
    made = []
    for i in range(steps):
        live = batch - (batch > 1 and i % SHRINK_EVERY == SHRINK_EVERY - 1)
        seqs = tuple([1900 + i if r == batch - 1 and batch > 1 else 4096 + 17 * r + i for r in range(live)])
        made.append(StepBatch(query_lens=(1,) * live, seq_lens=seqs))
    return tuple(made)


def _judged(case: Case, target: Target) -> float:
    started = time.process_time()
    verdicts = run_case(case, target, STEP_CHECKS)
    elapsed = time.process_time() - started
    failed = [verdict for verdict in verdicts if verdict.status is Status.FAILED]
    if failed:
        raise RuntimeError(f"{failed[0].check} fails on the benchmark: {failed[0].summary}")
    return elapsed


def _rate(case: Case, target: Target, batch: int) -> CheckRate:
    rates = sorted(len(case.steps) / _judged(case, target) for _ in range(REPETITIONS))
    with _timed(STEP_CHECKS) as seconds:
        whole = _judged(case, target)
    shares = {name: spent / whole for name, spent in seconds.items()}
    return CheckRate(
        batch=batch,
        steps=len(case.steps),
        steps_per_second=rates[len(rates) // 2],
        lowest=rates[0],
        highest=rates[-1],
        shares={**shares, "build": 1 - sum(shares.values())},
    )


@contextmanager
def _timed(kinds: tuple[type[Check], ...]) -> Iterator[dict[str, float]]:
    """Time spent in each check while it is entered, by name."""
    seconds = {kind.name: 0.0 for kind in kinds}
    before = {kind: (kind.observe, kind.finish) for kind in kinds}

    def clocked(name: str, method: Callable[..., None]) -> Callable[..., None]:
        def call(self: Check, *seen: Observation) -> None:
            started = time.process_time()
            method(self, *seen)
            seconds[name] += time.process_time() - started

        return call

    try:
        for kind, (observe, finish) in before.items():
            kind.observe = clocked(kind.name, observe)  # type: ignore[method-assign]
            kind.finish = clocked(kind.name, finish)  # type: ignore[method-assign]
        yield seconds
    finally:
        for kind, (observe, finish) in before.items():
            kind.observe, kind.finish = observe, finish  # type: ignore[method-assign]
