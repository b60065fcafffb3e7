"""Property-based search for a failing step sequence in one traffic class, and its shrinking by Hypothesis."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec
from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings

from dsv32_fuzz.case import Case
from dsv32_fuzz.checks import Check, merge, run_case
from dsv32_fuzz.events import CounterexampleFound, Event, Progress, VerdictReached
from dsv32_fuzz.shrink import reduce_steps
from dsv32_fuzz.strategies import SCOPES, Steps, World, dims_for, worlds
from dsv32_fuzz.targets import Target
from dsv32_fuzz.verdict import Status, Verdict

EXAMPLES_PER_ROUND = 100
SHRINK_SECONDS = 15.0


class _FalsifiedError(Exception):
    """Raised inside the property so that Hypothesis shrinks."""


@dataclass
class _Round:
    """One Hypothesis run: its totals, and after a failure the check that is being shrunk and the smallest case."""

    target: Target
    scope: str
    checks: Sequence[type[Check]]
    deadline: float
    at_least: int
    """Examples that are tried whatever the time."""
    totals: dict[str, Verdict] = field(default_factory=dict)
    failing: str = ""
    smallest: Case | None = None
    executed: int = 0
    _outcomes: dict[Case, str] = field(default_factory=dict)

    def test(self, steps: Steps, world: World) -> None:
        """The property: no check fails. Fails for one check only, so that shrinking stays on one cause."""
        case = case_of(self.target, self.scope, self.failing, steps, world)
        if self.failing:
            self._shrink(case)
        elif self.executed < self.at_least or time.monotonic() < self.deadline:
            self._try(case)

    def _try(self, case: Case) -> None:
        self.executed += 1
        verdicts = run_case(case, self.target, self.checks)
        for verdict in verdicts:
            known = self.totals.get(verdict.check)
            self.totals[verdict.check] = merge([known, verdict]) if known else verdict
        failed = next((v for v in verdicts if v.status is Status.FAILED), None)
        if failed:
            self.failing = failed.check
            self.deadline = time.monotonic() + SHRINK_SECONDS
            case = msgspec.structs.replace(case, check=failed.check)
            self._outcomes[case] = failed.summary
            self._fail(case)

    def _shrink(self, case: Case) -> None:
        if case not in self._outcomes:
            # Past the deadline nothing new is tried, but a known failure must go on failing, else it would look flaky.
            self._outcomes[case] = self._run_failing(case) if time.monotonic() < self.deadline else ""
        if self._outcomes[case]:
            self._fail(case)

    def _run_failing(self, case: Case) -> str:
        checks = [check for check in self.checks if check.name == self.failing]
        (verdict,) = run_case(case, self.target, checks)
        return verdict.summary if verdict.status is Status.FAILED else ""

    def _fail(self, case: Case) -> None:
        self.smallest = case
        raise _FalsifiedError(self._outcomes[case])


def case_of(target: Target, scope: str, check: str, steps: Steps, world: World) -> Case:
    """The replayable case of a step sequence at the true constants."""
    dims = dims_for(steps, world)
    return Case(check=check, scope=scope, target=target.name, options=target.options, dims=dims, steps=steps)


def counterexample(case: Case, target: Target, checks: Sequence[type[Check]]) -> CounterexampleFound:
    """Shrink a failing case further by dropping steps and requests, and ask every check about what is left."""

    def fails(steps: Steps) -> bool:
        smaller = msgspec.structs.replace(case, steps=steps)
        (verdict,) = run_case(smaller, target, [check for check in checks if check.name == case.check])
        return verdict.status is Status.FAILED

    case = msgspec.structs.replace(case, steps=reduce_steps(case.steps, fails))
    verdicts = run_case(case, target, checks)
    (own,) = [verdict for verdict in verdicts if verdict.check == case.check]
    return CounterexampleFound(case=case, summary=own.summary, verdicts=verdicts)


def explore(
    target: Target, scope: str, checks: Sequence[type[Check]], *, run_seed: int, seconds: float, examples: int = 0
) -> Iterator[Event]:
    """Search one traffic class for `seconds` and for at least `examples`, so that a slow machine still searches.

    Every failing check is shrunk once and then set aside.

    Yields progress, a counterexample per failing check, and at the end one verdict per check.
    """
    phase = f"fuzz:{scope}"
    started = time.monotonic()
    active, totals, executed, round_number = list(checks), dict[str, Verdict](), 0, 0
    while active and (executed < examples or time.monotonic() < started + seconds):
        current = _Round(
            target=target, scope=scope, checks=active, deadline=started + seconds, at_least=examples - executed
        )
        _run_round(current, run_seed + round_number)
        round_number += 1
        executed += current.executed
        for name, verdict in current.totals.items():
            totals[name] = merge([totals[name], verdict]) if name in totals else verdict
        if current.smallest is not None:
            yield counterexample(current.smallest, target, checks)
            active = [check for check in active if totals[check.name].status is not Status.FAILED]
        done = min((time.monotonic() - started) / seconds, executed / examples if examples else 1.0, 1.0)
        yield Progress(phase=phase, done=done, text=f"{executed} step sequences")
    for check in checks:
        if check.name in totals:
            yield VerdictReached(phase=phase, scope=scope, verdict=totals[check.name])


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
    @given(SCOPES[current.scope](), worlds())
    def falsify(steps: Steps, world: World) -> None:
        current.test(steps, world)

    with suppress(_FalsifiedError):
        falsify()
