"""Faulty targets for checks that draw their own input, and the search that must find them."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings

from dsv32_fast.kernels.mounted import EMULATION
from dsv32_fast.options import PRESETS
from dsv32_fuzz.case import AnyCase
from dsv32_fuzz.checks.own_input import InputCheck
from dsv32_fuzz.search.properties import OwnInput
from dsv32_fuzz.targets.intree import InTreeTarget
from dsv32_fuzz.verdict import Status, Verdict


class FaultyKernels:
    """The emulation with some functions replaced."""

    def __init__(self, **replaced: Any) -> None:
        self._replaced = replaced

    def __getattr__(self, name: str) -> Any:
        return self._replaced[name] if name in self._replaced else getattr(EMULATION, name)


def faulty(**replaced: Any) -> InTreeTarget:
    """The repaired path on faulty kernels."""
    return InTreeTarget(PRESETS["pr47766"], kernels=FaultyKernels(**replaced))  # type: ignore[arg-type]


class _FoundError(Exception):
    pass


def verdicts(check: type[InputCheck[Any]], target: InTreeTarget, run_seed: int, examples: int) -> list[Verdict]:
    """Verdicts of generated inputs, up to the first failure."""
    searched, found = OwnInput(target, check), list[Verdict]()

    @seed(run_seed)
    @settings(
        max_examples=examples,
        database=None,
        deadline=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(searched.cases())
    def look(case: AnyCase) -> None:
        found.extend(searched.judge(case, [check.name]))
        if found[-1].status is Status.FAILED:
            raise _FoundError

    with suppress(_FoundError):
        look()
    return found


def failure(check: type[InputCheck[Any]], target: InTreeTarget, run_seed: int = 0, examples: int = 60) -> str:
    """What the first failing input says.

    Raises:
        AssertionError: none fails.
    """
    last = verdicts(check, target, run_seed, examples)[-1]
    assert last.status is Status.FAILED, f"{check.name} does not see it in {examples} examples"
    return last.summary


def assert_faultless(check: type[InputCheck[Any]], target: InTreeTarget, run_seed: int, examples: int) -> None:
    """Nothing fails, and most inputs test something."""
    seen = verdicts(check, target, run_seed, examples)
    statuses = Counter(verdict.status for verdict in seen)
    assert statuses[Status.FAILED] == 0, seen[-1].summary
    assert statuses[Status.PASSED] >= 0.7 * len(seen), statuses
