"""Which change made the step faster: every change alone, each left out, and all together, with intervals.

Per batch size and part of the step an A/A run comes first. It sets how many blocks the effect needs, within the
seconds allowed, and what could be detected with those. If it finds a difference between equal sides, which one in a
hundred does by chance, it is taken again; if it does so twice, no verdict is given there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from dsv32_fast.options import PRESETS, Options
from dsv32_fuzz.latency.device import device_state
from dsv32_fuzz.latency.statistics import (
    FEWEST_BLOCKS,
    Budget,
    Interval,
    Verdict,
    choose_budget,
    ratio_interval,
    verdict,
)
from dsv32_fuzz.latency.step import Part, Setting, TimingSpec, time_in_fresh_process, time_spec
from dsv32_fuzz.latency.timing import ClockName, Samples, joined

AGAIN, MORE = 10_000, 20_000
"""Added to the seeds of an A/A run that is taken again, and of a comparison's second stage."""
CHANGES = {"router": ("logits", "bias"), "cache": ("key", "split_cap"), "clear": ("clear",)}
"""The three optimisations of PR #42982 as fields of the options."""


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Two option sets that are timed against each other: B over A."""

    name: str
    a: Options
    b: Options


class Timed(msgspec.Struct, frozen=True, kw_only=True):
    """One comparison, with its raw samples by process."""

    comparison: str
    interval: Interval
    verdict: Verdict
    median_a_s: float
    median_b_s: float
    samples: tuple[Samples, ...]


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything of one setting: the A/A run, the budget that it set, the comparisons so far."""

    setting: Setting
    null: Timed
    budget: Budget
    compared: tuple[Timed, ...] = ()
    states: tuple[dict[str, str], ...] = ()
    """Of the device, after the A/A run and after each comparison."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How to time.

    Raises:
        ValueError: an impossible value, named.
    """

    effect: float = 0.03
    margin: float = 0.01
    seconds: float = 20.0
    """Of timed runs allowed per comparison, by the plan's clock."""
    processes: int = 1
    """1 times in this process, more in that many fresh ones, the blocks shared among them."""
    layers: int = 61
    clock: ClockName = "cpu"
    kernels: Literal["hollow", "aiter"] = "hollow"
    cold: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        """Validate."""
        if min(self.effect, self.margin, self.seconds) <= 0 or self.processes < 1 or self.layers < 1:
            raise ValueError("effect, margin, seconds, processes and layers must be positive")

    def setting(self, batch: int, part: Part) -> Setting:
        """Of one batch size and part of the step."""
        return Setting(batch=batch, layers=self.layers, part=part, clock=self.clock, kernels=self.kernels)


def comparisons(options: Options, attribute: bool) -> list[Comparison]:
    """All changes against the baseline; with `attribute`, also each one alone and each one left out.

    Left out: A lacks one change, B has all, so that the ratio is what that change adds on top of the others.

    Raises:
        ValueError: the options are the baseline.
    """
    base = PRESETS["baseline"]
    if options == base:
        raise ValueError("options: they are those of the baseline; choose a preset with changes, like pr47766")
    found = [Comparison(name="all", a=base, b=options)]
    for name, fields in CHANGES.items():
        values = {field: getattr(options, field) for field in fields}
        if not attribute or all(getattr(base, field) == value for field, value in values.items()):
            continue
        undone = {field: getattr(base, field) for field in fields}
        found.append(Comparison(name=f"{name} alone", a=base, b=msgspec.structs.replace(base, **values)))
        found.append(Comparison(name=f"{name} last", a=msgspec.structs.replace(options, **undone), b=options))
    return found


def time_setting(wanted: Sequence[Comparison], setting: Setting, plan: Plan) -> Iterator[Timings]:
    """Time comparisons with one baseline; yields what is known after the A/A run and after each of them.

    Raises:
        ImpossibleTimeError: a run below its floor.
    """
    equal = Comparison(name="A/A", a=wanted[0].a, b=wanted[0].a)
    null = _timed(equal, FEWEST_BLOCKS, setting, plan)
    if null.interval.differs:
        null = _timed(equal, FEWEST_BLOCKS, setting, plan, again=AGAIN)
    block_s = len(null.samples[0].blocks_a[0]) * (null.median_a_s + null.median_b_s)
    most = max(FEWEST_BLOCKS, int(plan.seconds / block_s))
    budget = choose_budget(joined(null.samples), plan.effect, most)
    found = Timings(setting=setting, null=null, budget=budget, states=(device_state(),))
    yield found
    for comparison in wanted:
        timed = _timed(comparison, budget.blocks, setting, plan, most=most)
        if null.interval.differs:
            timed = msgspec.structs.replace(timed, verdict="cannot tell")
        compared, states = (*found.compared, timed), (*found.states, device_state())
        found = msgspec.structs.replace(found, compared=compared, states=states)
        yield found


def _timed(
    comparison: Comparison, blocks: int, setting: Setting, plan: Plan, *, again: int = 0, most: int = 0
) -> Timed:
    """`blocks` blocks, and as many more, up to `most`, as their own spread asks for (Stein's second stage)."""
    spec = TimingSpec(
        name_a="A",
        name_b="B",
        a=comparison.a,
        b=comparison.b,
        setting=setting,
        cold=plan.cold,
    )
    samples = _samples(spec, blocks, plan, plan.seed + again)
    more = choose_budget(joined(samples), plan.effect, most).blocks - blocks if most else 0
    if more > 0:
        samples += _samples(spec, more, plan, plan.seed + MORE)
    interval = ratio_interval(joined(samples), seed=plan.seed)
    medians = [one.medians() for one in samples]
    return Timed(
        comparison=comparison.name,
        interval=interval,
        verdict=verdict(interval, plan.margin),
        median_a_s=sum(a for a, _ in medians) / len(medians),
        median_b_s=sum(b for _, b in medians) / len(medians),
        samples=samples,
    )


def _samples(spec: TimingSpec, blocks: int, plan: Plan, seed: int) -> tuple[Samples, ...]:
    """`blocks` blocks, shared among the plan's processes."""
    timer = time_spec if plan.processes == 1 else time_in_fresh_process
    share = -(-blocks // plan.processes)
    return tuple(timer(msgspec.structs.replace(spec, blocks=share, seed=seed + i)) for i in range(plan.processes))
