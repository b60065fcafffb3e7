"""Trials of a check that draws its own input: many generated inputs on one target, until one fails or all are done."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, cast

from hypothesis import HealthCheck, Phase, given, seed, settings

from dsv32_fast.kernels.emulated import api
from dsv32_fast.kernels.protocol import Kernels
from dsv32_fast.options import PRESETS
from dsv32_fuzz.case import AnyCase
from dsv32_fuzz.checks.own_input import InputCheck
from dsv32_fuzz.search.properties import OwnInput
from dsv32_fuzz.targets.intree import InTreeTarget
from dsv32_fuzz.verdict import Status

SEEDS = (0, 1, 2)
Check = type[InputCheck[Any]]


class _FoundError(Exception):
    """Ends a trial at its first failure."""


@dataclass
class Trial:
    """How many inputs had each status, the counts of all of them, and the first failure's summary."""

    statuses: Counter[Status] = field(default_factory=Counter)
    measured: Counter[str] = field(default_factory=Counter)
    worst_budget_used: float = 0.0
    summary: str = ""

    @property
    def inputs(self) -> int:
        return sum(self.statuses.values())


def trial(check: Check, target: InTreeTarget, *, run_seed: int = 0, examples: int = 50) -> Trial:
    """Draw inputs, judge each, stop at the first failure."""
    searched, found = OwnInput(target, check), Trial()

    @seed(run_seed)
    @settings(
        max_examples=examples,
        database=None,
        deadline=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(searched.cases())
    def judged(case: AnyCase) -> None:
        (verdict,) = searched.judge(case, [check.name])
        found.statuses[verdict.status] += 1
        found.measured.update({name: value for name, value in verdict.measured.items() if isinstance(value, int)})
        found.worst_budget_used = max(found.worst_budget_used, float(verdict.measured.get("worst_budget_used", 0)))
        if verdict.status is Status.FAILED:
            found.summary = verdict.summary
            raise _FoundError

    with suppress(_FoundError):
        judged()
    return found


def faultless(check: Check, preset: str = "pr47766", *, examples: int = 17) -> Trial:
    """No input of three seeds fails on the faultless target; all three trials in one."""
    whole = Trial()
    for run_seed in SEEDS:
        found = trial(check, InTreeTarget(PRESETS[preset]), run_seed=run_seed, examples=examples)
        assert found.statuses[Status.FAILED] == 0, found.summary
        assert found.statuses[Status.PASSED] > examples // 2
        whole.statuses += found.statuses
        whole.measured += found.measured
        whole.worst_budget_used = max(whole.worst_budget_used, found.worst_budget_used)
    assert whole.inputs == len(SEEDS) * examples
    return whole


@dataclass
class _Replaced:
    functions: dict[str, Callable[..., Any]]

    def __getattr__(self, name: str) -> Any:
        return self.functions.get(name) or getattr(api, name)


def faulty(preset: str = "pr47766", **functions: Callable[..., Any]) -> InTreeTarget:
    """The in-tree target with some of AITER's functions replaced."""
    return InTreeTarget(PRESETS[preset], kernels=cast(Kernels, _Replaced(functions)))


def killed(check: Check, target: InTreeTarget, *, examples: int = 60, raises: bool = False) -> str:
    """The check fails on the target in each of three seeds, by an exception only if `raises`; the last summary."""
    summary = ""
    for run_seed in SEEDS:
        found = trial(check, target, run_seed=run_seed, examples=examples)
        assert found.statuses[Status.FAILED], f"seed {run_seed}: {dict(found.statuses)}"
        summary = found.summary
        assert raises or not summary.startswith("the target raised"), summary
    return summary
