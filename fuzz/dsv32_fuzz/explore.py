"""Property-based search for a failing case of one property, and its shrinking by Hypothesis."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec
from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings

from dsv32_fuzz.case import AnyCase, Case
from dsv32_fuzz.checks import merge
from dsv32_fuzz.coverage import Coverage
from dsv32_fuzz.events import CounterexampleFound, Event, InputSpaceCovered, Progress, VerdictReached
from dsv32_fuzz.properties import Property
from dsv32_fuzz.verdict import Status, Verdict

EXAMPLES_PER_ROUND = 100
SHRINK_SECONDS = 15.0


class _FalsifiedError(Exception):
    """Raised inside the property so that Hypothesis shrinks."""


@dataclass
class _Round:
    """One Hypothesis run: its totals, and after a failure the check that is being shrunk and the smallest case."""

    property: Property
    checks: Sequence[str]
    deadline: float
    at_least: int
    """Examples that are tried whatever the time."""
    coverage: Coverage
    """What the search has visited so far; every judged case is added."""
    totals: dict[str, Verdict] = field(default_factory=dict)
    failing: str = ""
    smallest: AnyCase | None = None
    executed: int = 0
    _outcomes: dict[bytes, str] = field(default_factory=dict)

    def test(self, case: AnyCase) -> None:
        """The property: no check fails. Fails for one check only, so that shrinking stays on one cause."""
        if self.failing:
            self._shrink(msgspec.structs.replace(case, check=self.failing))
        elif self.executed < self.at_least or time.monotonic() < self.deadline:
            self._try(case)

    def _try(self, case: AnyCase) -> None:
        self.executed += 1
        if isinstance(case, Case):
            self.coverage.add(case)
        verdicts = self.property.judge(case, self.checks)
        for verdict in verdicts:
            known = self.totals.get(verdict.check)
            self.totals[verdict.check] = merge([known, verdict]) if known else verdict
        failed = next((v for v in verdicts if v.status is Status.FAILED), None)
        if failed:
            self.failing = failed.check
            self.deadline = time.monotonic() + SHRINK_SECONDS
            case = msgspec.structs.replace(case, check=failed.check)
            self._outcomes[msgspec.json.encode(case)] = failed.summary
            self._fail(case)

    def _shrink(self, case: AnyCase) -> None:
        document = msgspec.json.encode(case)
        if document not in self._outcomes:
            # Past the deadline nothing new is tried, but a known failure must go on failing, else it would look flaky.
            self._outcomes[document] = self._run_failing(case) if time.monotonic() < self.deadline else ""
        if self._outcomes[document]:
            self._fail(case)

    def _run_failing(self, case: AnyCase) -> str:
        (verdict,) = self.property.judge(case, [self.failing])
        return verdict.summary if verdict.status is Status.FAILED else ""

    def _fail(self, case: AnyCase) -> None:
        self.smallest = case
        raise _FalsifiedError(self._outcomes[msgspec.json.encode(case)])


def counterexample(searched: Property, case: AnyCase) -> CounterexampleFound:
    """Shrink a failing case further by other means than drawing, and ask every check about what is left."""

    def fails(smaller: AnyCase) -> bool:
        (verdict,) = searched.judge(smaller, [case.check])
        return verdict.status is Status.FAILED

    case = searched.smaller(case, fails)
    verdicts = searched.judge(case, searched.checks)
    (own,) = [verdict for verdict in verdicts if verdict.check == case.check]
    return CounterexampleFound(case=case, summary=own.summary, verdicts=verdicts)


def explore(searched: Property, *, run_seed: int, seconds: float, examples: int = 0) -> Iterator[Event]:
    """Search one property for `seconds` and for at least `examples`, so that a slow machine still searches.

    Every failing check is shrunk once and then set aside.

    Yields progress, a counterexample per failing check, and at the end what step sequences have covered and one verdict
    per check.
    """
    phase = f"fuzz:{searched.scope}"
    started = time.monotonic()
    active, totals, executed, round_number = list(searched.checks), dict[str, Verdict](), 0, 0
    coverage = Coverage()
    while active and (executed < examples or time.monotonic() < started + seconds):
        current = _Round(
            property=searched,
            checks=active,
            deadline=started + seconds,
            at_least=examples - executed,
            coverage=coverage,
        )
        _run_round(current, run_seed + round_number)
        round_number += 1
        executed += current.executed
        for name, verdict in current.totals.items():
            totals[name] = merge([totals[name], verdict]) if name in totals else verdict
        if current.smallest is not None:
            yield counterexample(searched, current.smallest)
        active = [name for name in active if totals[name].status not in (Status.FAILED, Status.SKIPPED)]
        done = min((time.monotonic() - started) / seconds, executed / examples if examples else 1.0, 1.0)
        yield Progress(phase=phase, done=done, text=f"{executed} cases")
    if coverage.cases:
        yield InputSpaceCovered(phase=phase, scope=searched.scope, coverage=coverage)
    for name in searched.checks:
        if name in totals:
            yield VerdictReached(phase=phase, scope=searched.scope, verdict=totals[name])


def _run_round(current: _Round, number: int) -> None:
    @seed(number)
    @settings(
        max_examples=EXAMPLES_PER_ROUND,
        database=None,
        deadline=None,
        derandomize=False,
        phases=(Phase.generate, Phase.shrink),
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        verbosity=Verbosity.quiet,
    )
    @given(current.property.cases())
    def falsify(case: AnyCase) -> None:
        current.test(case)

    with suppress(_FalsifiedError):
        falsify()
