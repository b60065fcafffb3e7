"""Runs checks that draw their own input, over many inputs, as a search does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
from hypothesis import HealthCheck, Phase, given, seed, settings

from dsv32_fuzz.checks import TARGET_ERRORS, told
from dsv32_fuzz.checks.own_input import InputCheck
from dsv32_fuzz.targets import Target
from dsv32_fuzz.verdict import Status, Verdict


class Stop(Exception):  # noqa: N818  # ends a search, no error
    pass


def run_one(check: type[InputCheck[Any]], drawn: msgspec.Struct, target: Target) -> Verdict:
    """As `OwnInput` does: through JSON, and what the target raises is a failure."""
    again = msgspec.json.decode(msgspec.json.encode(drawn), type=check.input_type)
    assert again == drawn
    try:
        return check().run(again, target)
    except TARGET_ERRORS as error:
        return Verdict(check=check.name, status=Status.FAILED, summary=told(error))


def search(check: type[InputCheck[Any]], target: Target, number: int, examples: int, stop: Callable[[Verdict], bool]):
    """The statuses seen, and the verdict that `stop` stopped at."""
    seen: Counter[Status] = Counter()
    last: list[Verdict] = []

    @seed(number)
    @settings(
        max_examples=examples,
        database=None,
        deadline=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(check().inputs())
    def each(drawn: msgspec.Struct) -> None:
        verdict = run_one(check, drawn, target)
        seen[verdict.status] += 1
        if stop(verdict):
            last.append(verdict)
            raise Stop

    try:
        each()
    except Stop:
        return seen, last[0]
    return seen, None


def passes(check: type[InputCheck[Any]], target: Target, examples: int = 50, seeds: range = range(3)) -> None:
    """No input fails, and most are trusted."""
    for number in seeds:
        seen, failed = search(check, target, number, examples, lambda verdict: verdict.status is Status.FAILED)
        assert failed is None, failed
        assert seen[Status.PASSED] * 2 > sum(seen.values()), seen


def killed(check: type[InputCheck[Any]], target: Target, examples: int = 60, number: int = 0) -> str:
    """What is said of the first failing input within `examples`."""
    _, failed = search(check, target, number, examples, lambda verdict: verdict.status is Status.FAILED)
    assert failed is not None, f"{check.name} let the fault live"
    return failed.summary
