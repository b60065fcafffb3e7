"""Which change made the step faster: every change alone, each left out, and all together, with intervals.

Per batch size an A/A run comes first. It sets how many pairs the effect needs, within the seconds allowed, and what
could be detected with those; if it finds a difference between equal sides, no verdict is given for that batch size.
"""

from __future__ import annotations

import msgspec
import numpy as np

from dsv32_fast.options import PRESETS, Options
from dsv32_fuzz.latency.statistics import (
    FEWEST_PAIRS,
    Budget,
    Interval,
    choose_budget,
    ratio_interval,
    verdict,
)
from dsv32_fuzz.latency.step import PairSpec, time_in_fresh_process, time_spec
from dsv32_fuzz.latency.timing import Samples

CHANGES = {"router": ("logits", "bias"), "cache": ("key", "split_cap"), "clear": ("clear",)}
"""The three optimisations of PR #42982 as fields of the options."""


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Two option sets that are timed against each other: B over A."""

    name: str
    a: Options
    b: Options


class Timed(msgspec.Struct, frozen=True, kw_only=True):
    """One comparison at one batch size, with its raw samples by process."""

    comparison: str
    batch: int
    interval: Interval
    verdict: str
    median_a_s: float
    median_b_s: float
    samples: tuple[Samples, ...]


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything at one batch size: the A/A run, the budget that it set, the comparisons."""

    batch: int
    null: Timed
    budget: Budget
    compared: tuple[Timed, ...]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How to time.

    Raises:
        ValueError: an impossible value, named.
    """

    effect: float = 0.03
    margin: float = 0.01
    seconds: float = 20.0
    """Allowed per comparison."""
    processes: int = 1
    """1 times in this process, more in that many fresh ones, the pairs shared among them."""
    layers: int = 61
    cold: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        """Validate."""
        if min(self.effect, self.margin, self.seconds) <= 0 or self.processes < 1 or self.layers < 1:
            raise ValueError("effect, margin, seconds, processes and layers must be positive")


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


def time_batch(options: Options, batch: int, plan: Plan, attribute: bool = False) -> Timings:
    """Time every comparison of `options` at one batch size.

    Raises:
        ValueError: options without changes, or a batch that is too large.
        ImpossibleTimeError: a run below its floor.
    """
    wanted = comparisons(options, attribute)
    null = _timed(Comparison(name="A/A", a=wanted[0].a, b=wanted[0].a), batch, FEWEST_PAIRS, plan)
    pair_s = len(null.samples[0].blocks_a[0]) * (null.median_a_s + null.median_b_s)
    most = max(FEWEST_PAIRS, int(plan.seconds / pair_s))
    logs = [value for samples in null.samples for value in samples.log_ratios()]
    budget = choose_budget(np.array(logs), plan.effect, most)
    compared = [_timed(comparison, batch, budget.pairs, plan) for comparison in wanted]
    if null.interval.differs:
        compared = [msgspec.structs.replace(timed, verdict="cannot tell") for timed in compared]
    return Timings(batch=batch, null=null, budget=budget, compared=tuple(compared))


def _timed(comparison: Comparison, batch: int, pairs: int, plan: Plan) -> Timed:
    share = -(-pairs // plan.processes)
    spec = PairSpec(
        name_a="A",
        name_b="B",
        a=comparison.a,
        b=comparison.b,
        batch=batch,
        layers=plan.layers,
        pairs=share,
        cold=plan.cold,
        seed=plan.seed,
    )
    timer = time_spec if plan.processes == 1 else time_in_fresh_process
    seeds = range(plan.seed, plan.seed + plan.processes)
    samples = tuple(timer(msgspec.structs.replace(spec, seed=seed)) for seed in seeds)
    interval = ratio_interval(np.array([value for one in samples for value in one.log_ratios()]), seed=plan.seed)
    medians = [one.medians() for one in samples]
    return Timed(
        comparison=comparison.name,
        batch=batch,
        interval=interval,
        verdict=verdict(interval, plan.margin),
        median_a_s=sum(a for a, _ in medians) / len(medians),
        median_b_s=sum(b for _, b in medians) / len(medians),
        samples=samples,
    )
