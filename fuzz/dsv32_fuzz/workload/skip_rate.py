"""How often a metadata key skips the rebuild of the plan on a serving workload, and how often it is wrong to.

Black box: the cache holds one entry. A step whose key equals that of the last launch is skipped, any other launches and
becomes the entry. A skip is rightful iff the planner input (`planner_lens` and the scalars) equals that of the launch
whose plan is reused; otherwise it is wrongful: the kernel would run with a plan for other lengths. The key is an
argument, so that the rules of several releases are counted by one and the same code.

Capture builds go through the cache, as they do in vLLM, but are not counted: rates are over served steps. Idle steps
build nothing, so they neither count nor touch the cache.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import NamedTuple

import msgspec
from msgspec import structs

from dsv32_fast.batch import StepBatch
from dsv32_fuzz.oracle import TOPK, planner_lens
from dsv32_fuzz.workload import PR42982_WORKLOAD, PURE_DECODE, ScheduledStep, Traffic, Workload, steps

Key = Callable[[StepBatch], Hashable]
"""The metadata key of a step; None means that this step must launch and leaves no entry to reuse."""
Scalars = Callable[[StepBatch], tuple[int, ...]]
"""The scalars of the planner input that vary from step to step, e.g. the split cap of vLLM 0.26."""

BUDGETS = (2048, 8192, 16384, 32768)
SPREADS = (0.0, 0.10)
CLAIMED_RATE = 0.94
"""The share of skipped steps announced for PR #42982; how it was counted is not published. Shown beside, never used."""


class SkipCount(msgspec.Struct, frozen=True, kw_only=True):
    """Skips of one key on one workload; a rate is None when there was no such step."""

    workload: Workload
    seed: int
    topk: int
    steps: int
    """Served steps that reach the builder (neither capture nor idle)."""
    decode_steps: int
    """Those of them in which every request is past its prompt (`decode` and `mtp_decode`)."""
    skipped: int
    skipped_decode: int
    wrongful: int
    """Skipped steps whose planner input differs from that of the launch they reuse; the rest is rightful."""
    wrongful_decode: int
    wrongful_by_class: dict[str, int]
    first_wrongful: tuple[StepBatch, StepBatch] | None
    """The launched step and the first step that wrongly reused its plan."""
    claimed: float = CLAIMED_RATE

    @property
    def rate(self) -> float | None:
        """Share of the served steps that were skipped, rightfully or not."""
        return self.skipped / self.steps if self.steps else None

    @property
    def rate_decode(self) -> float | None:
        """Share of the pure-decode steps that were skipped, rightfully or not."""
        return self.skipped_decode / self.decode_steps if self.decode_steps else None

    @property
    def rightful_rate(self) -> float | None:
        """Share of the served steps that were skipped rightfully."""
        return (self.skipped - self.wrongful) / self.steps if self.steps else None


class MissCauses(msgspec.Struct, frozen=True, kw_only=True):
    """Why a right key must launch: each served step's planner input against that of the step built before it.

    `steps` = `unchanged` + `rows_changed` + `lengths_changed`; `unchanged` / `steps` is the highest skip rate that any
    key without wrongful skips can reach with one entry.
    """

    workload: Workload
    seed: int
    topk: int
    steps: int
    unchanged: int
    rows_changed: int
    """Another number of rows."""
    lengths_changed: int
    """As many rows, and some row has another clamped length (or a scalar has another value)."""
    below_topk: int
    """Steps with a live row below topk; in plain decode such a row grows by one each step."""
    lengths_changed_below_topk: int
    """Steps counted in `lengths_changed` that have a live row below topk."""

    @property
    def ceiling(self) -> float | None:
        """The highest skip rate without a wrongful skip."""
        return self.unchanged / self.steps if self.steps else None


class Outcome(NamedTuple):
    """What the cache does with one built step."""

    step: ScheduledStep
    reused: StepBatch | None
    """The launched step whose plan is reused; None if this step launches."""
    rightful: bool
    """False iff a plan is reused that was made for another planner input."""


def no_scalars(step: StepBatch) -> tuple[int, ...]:  # noqa: ARG001
    """The planner input up to vLLM 0.25: nothing beside the lengths varies."""
    return ()


def planner_input(step: StepBatch, topk: int, scalars: Scalars) -> tuple[bytes, tuple[int, ...]]:
    """Every value of the planner call that varies: the lengths (as many as there are rows) and the scalars."""
    return planner_lens(step, topk).tobytes(), scalars(step)


def outcomes(
    schedule: Iterable[ScheduledStep], key: Key, *, topk: int = TOPK, scalars: Scalars = no_scalars
) -> Iterator[Outcome]:
    """What a one-entry cache with this key does with every step of `schedule` that is built, captures included."""
    entry: Hashable = None
    launched: StepBatch | None = None
    for step in schedule:
        if step.traffic is Traffic.IDLE:
            continue
        new = key(step.batch)
        if launched is None or new is None or new != entry:
            entry, launched = new, step.batch
            yield Outcome(step, None, True)
        else:
            same = planner_input(launched, topk, scalars) == planner_input(step.batch, topk, scalars)
            yield Outcome(step, launched, same)


def skip_rate(
    workload: Workload, key: Key, *, seed: int = 0, topk: int = TOPK, scalars: Scalars = no_scalars
) -> SkipCount:
    """Count the skips of `key` over all steps of `workload`.

    Args:
        workload: the request stream and engine settings.
        key: the metadata key of a step batch, or None for a step that must launch.
        seed: the seed of the workload's steps.
        topk: tokens that a query attends to, at most.
        scalars: the varying scalars of the planner input; by default there are none.

    Raises:
        ValueError: topk below 1.
    """
    built, skipped, wrongful = Counter[Traffic](), Counter[Traffic](), Counter[Traffic]()
    first: tuple[StepBatch, StepBatch] | None = None
    for step, reused, rightful in outcomes(steps(workload, seed), key, topk=topk, scalars=scalars):
        if step.traffic is Traffic.CAPTURE:
            continue
        built[step.traffic] += 1
        if reused is not None:
            skipped[step.traffic] += 1
            if not rightful:
                wrongful[step.traffic] += 1
                first = first or (reused, step.batch)
    return SkipCount(
        workload=workload,
        seed=seed,
        topk=topk,
        steps=built.total(),
        decode_steps=_decodes(built),
        skipped=skipped.total(),
        skipped_decode=_decodes(skipped),
        wrongful=wrongful.total(),
        wrongful_decode=_decodes(wrongful),
        wrongful_by_class={traffic.value: count for traffic, count in wrongful.items()},
        first_wrongful=first,
    )


def _decodes(counts: Counter[Traffic]) -> int:
    return sum(counts[traffic] for traffic in PURE_DECODE)


def skip_table(
    key: Key,
    *,
    workload: Workload = PR42982_WORKLOAD,
    seed: int = 0,
    budgets: Iterable[int] = BUDGETS,
    spreads: Iterable[float] = SPREADS,
    scalars: Scalars = no_scalars,
) -> list[SkipCount]:
    """The report's workload table: one row per length spread and token budget, in this order."""
    budgets = tuple(budgets)
    return [
        skip_rate(
            structs.replace(workload, max_num_batched_tokens=budget, length_spread=spread),
            key,
            seed=seed,
            scalars=scalars,
        )
        for spread in spreads
        for budget in budgets
    ]


def sweep(
    key: Key,
    *,
    workload: Workload = PR42982_WORKLOAD,
    input_lens: Iterable[int],
    concurrencies: Iterable[int],
    mtp_depths: Iterable[int] = (0,),
    seed: int = 0,
    scalars: Scalars = no_scalars,
) -> list[SkipCount]:
    """Skip counts over input length x concurrency x MTP depth, the last one fastest.

    Every point serves as many waves of its concurrency as `workload` does, so that start-up weighs the same.
    """
    waves = workload.num_requests / workload.concurrency
    concurrencies, mtp_depths = tuple(concurrencies), tuple(mtp_depths)
    points = [(i, c, m) for i in input_lens for c in concurrencies for m in mtp_depths]
    return [
        skip_rate(
            structs.replace(workload, input_len=i, concurrency=c, mtp_depth=m, num_requests=max(1, round(waves * c))),
            key,
            seed=seed,
            scalars=scalars,
        )
        for i, c, m in points
    ]


def explain_misses(workload: Workload, *, seed: int = 0, topk: int = TOPK, scalars: Scalars = no_scalars) -> MissCauses:
    """Measure what changes in the planner input from one built step to the next, whatever the key.

    Run it with an input and output length that stay below topk to see why such a workload cannot skip at all.
    """
    counts = {"steps": 0, "unchanged": 0, "rows_changed": 0, "lengths_changed": 0}
    below = changed_below = 0
    previous: tuple[bytes, tuple[int, ...]] | None = None
    for step in steps(workload, seed):
        if step.traffic is Traffic.IDLE:
            continue
        current = planner_input(step.batch, topk, scalars)
        if step.traffic is not Traffic.CAPTURE:
            cause = _cause(previous, current)
            is_below = _has_row_below(step.batch, topk)
            counts["steps"] += 1
            counts[cause] += 1
            below += is_below
            changed_below += is_below and cause == "lengths_changed"
        previous = current
    return MissCauses(
        workload=workload, seed=seed, topk=topk, below_topk=below, lengths_changed_below_topk=changed_below, **counts
    )


def _cause(previous: tuple[bytes, tuple[int, ...]] | None, current: tuple[bytes, tuple[int, ...]]) -> str:
    if previous == current:
        return "unchanged"
    if previous is None or len(previous[0]) != len(current[0]):
        return "rows_changed"
    return "lengths_changed"


def _has_row_below(step: StepBatch, topk: int) -> bool:
    """Whether some live row has fewer than topk tokens; the first row of a request is its shortest."""
    return any(q and s - q + 1 < topk for q, s in zip(step.query_lens, step.seq_lens, strict=True))
