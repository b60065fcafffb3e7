"""Property-based search for failing cases of one property, and their shrinking by Hypothesis.

A `Search` goes on from slice to slice: the same property is searched for a few seconds now and a few seconds later, and
every round of examples has a seed of its own. `explore` is one slice from beginning to end.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec
from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings
from hypothesis.database import ExampleDatabase

from dsv32_fuzz.campaigns.causes import cause_of
from dsv32_fuzz.case import AnyCase, Case
from dsv32_fuzz.checks import merge
from dsv32_fuzz.events import CounterexampleFound, Event, InputSpaceCovered, Progress, VerdictReached
from dsv32_fuzz.search.coverage import Coverage
from dsv32_fuzz.search.properties import Property
from dsv32_fuzz.verdict import Status, Verdict

EXAMPLES_PER_ROUND = 100
SHRINK_SECONDS = 15.0


class _FalsifiedError(Exception):
    """Raised inside the property so that Hypothesis shrinks."""


class _TimeUp(BaseException):  # no error; not an Exception, so that Hypothesis lets it through
    """Raised inside the property to leave a Hypothesis run."""


@dataclass
class _Round:
    """One Hypothesis run: its totals, and after a failure the check that is being shrunk and the smallest case."""

    searched: Property
    checks: Sequence[str]
    deadline: float
    at_least: int
    """Examples that are tried even past the deadline, if `latest` is not past too."""
    latest: float = math.inf
    shrink_seconds: float = SHRINK_SECONDS
    known: Container[tuple[str, str]] = ()
    """Checks and causes that are known: a failure for one of them is counted, and no round is spent on it."""
    coverage: Coverage = field(default_factory=Coverage)
    """What the search has visited so far; every judged step sequence is added."""
    totals: dict[str, Verdict] = field(default_factory=dict)
    failing: str = ""
    smallest: AnyCase | None = None
    executed: int = 0
    in_time: bool = True
    """Whether the round ended by itself."""
    _outcomes: dict[bytes, str] = field(default_factory=dict)

    def test(self, case: AnyCase) -> None:
        """The property: no check fails. Fails for one check only, so that shrinking stays on one cause."""
        if self.failing:
            self._shrink(msgspec.structs.replace(case, check=self.failing))
        elif time.monotonic() < (self.latest if self.executed < self.at_least else self.deadline):
            self._try(case)
        else:
            self.in_time = False
            raise _TimeUp

    def _try(self, case: AnyCase) -> None:
        self.executed += 1
        if isinstance(case, Case):
            self.coverage.add(case)
        verdicts = self.searched.judge(case, self.checks)
        for verdict in verdicts:
            known = self.totals.get(verdict.check)
            self.totals[verdict.check] = merge([known, verdict]) if known else verdict
        failed = next((verdict for verdict in verdicts if _is_news(verdict, self.known)), None)
        if failed:
            self.failing = failed.check
            self.deadline = time.monotonic() + self.shrink_seconds
            case = msgspec.structs.replace(case, check=failed.check)
            self._outcomes[msgspec.json.encode(case)] = failed.summary
            self._fail(case)

    def _shrink(self, case: AnyCase) -> None:
        document = msgspec.json.encode(case)
        if document not in self._outcomes:
            if time.monotonic() >= self.deadline:
                raise _TimeUp
            self._outcomes[document] = self._run_failing(case)
        if self._outcomes[document]:
            self._fail(case)

    def _run_failing(self, case: AnyCase) -> str:
        (verdict,) = self.searched.judge(case, [self.failing])
        return verdict.summary if _is_news(verdict, self.known) else ""  # so it cannot shrink to a known cause

    def _fail(self, case: AnyCase) -> None:
        self.smallest = case
        raise _FalsifiedError(self._outcomes[msgspec.json.encode(case)])


def _is_news(verdict: Verdict, known: Container[tuple[str, str]]) -> bool:
    """Whether a check failed, for a cause that is not known."""
    return verdict.status is Status.FAILED and (verdict.check, cause_of(verdict.summary)) not in known


def counterexample(
    searched: Property,
    case: AnyCase,
    seconds: float = SHRINK_SECONDS,
    known: Container[tuple[str, str]] = (),
) -> CounterexampleFound:
    """Shrink a failing case further by other means than drawing, for so long, and ask every check about the rest."""
    deadline = time.monotonic() + seconds

    def fails(smaller: AnyCase) -> bool:
        if time.monotonic() >= deadline:
            return False
        (verdict,) = searched.judge(smaller, [case.check])
        return _is_news(verdict, known)

    case = searched.smaller(case, fails)
    verdicts = searched.judge(case, searched.checks)
    (own,) = [verdict for verdict in verdicts if verdict.check == case.check]
    return CounterexampleFound(case=case, summary=own.summary, verdicts=verdicts)


@dataclass
class Search:
    """The search of one property, slice by slice.

    A failure for a known cause is counted and not shrunk again, so that a known defect does not hide a second one. A
    check that `repeats` times more shrank to a cause that was known is set aside; so is, at once, one that does not
    apply.
    """

    searched: Property
    seed_of: Callable[[int], int]
    """Seed of a round, by its number."""
    repeats: int = 0
    database: ExampleDatabase | None = None
    shrink_seconds: float = SHRINK_SECONDS
    """For Hypothesis, and as much again for dropping steps and requests."""
    rounds: int = 0
    executed: int = 0
    """Examples drawn and judged; those that shrinking tries are not counted."""
    totals: dict[str, Verdict] = field(default_factory=dict)
    set_aside: set[str] = field(default_factory=set)
    causes: Counter[tuple[str, str]] = field(default_factory=Counter)
    coverage: Coverage = field(default_factory=Coverage)

    @property
    def active(self) -> list[str]:
        """Checks that are still searched for a failure."""
        return [name for name in self.searched.checks if name not in self.set_aside]

    def slice(self, seconds: float, examples: int = 0, *, at_most: float = math.inf) -> Iterator[Event]:
        """Search for `seconds` and until `examples` are executed in all, but no longer than `at_most` seconds.

        Yields counterexamples, and progress after each round. Ends early where Hypothesis has nothing left to draw.
        """
        started = time.monotonic()
        end, latest = started + seconds, started + at_most
        while self.active and time.monotonic() < (latest if self.executed < examples else end):
            current = _Round(
                searched=self.searched,
                checks=self.active,
                deadline=min(end, latest),
                at_least=examples - self.executed,
                latest=latest,
                shrink_seconds=self.shrink_seconds,
                known=self.causes,
                coverage=self.coverage,
            )
            _run_round(current, self.seed_of(self.rounds), self.database)
            self.rounds += 1
            self.executed += current.executed
            for name, verdict in current.totals.items():
                self.totals[name] = merge([self.totals[name], verdict]) if name in self.totals else verdict
                if verdict.status is Status.SKIPPED:
                    self.set_aside.add(name)
            if current.smallest is not None:
                yield self._found(current.smallest)
            passed = (time.monotonic() - started) / seconds if seconds else 1.0
            done = min(passed, self.executed / examples if examples else 1.0, 1.0)
            yield Progress(phase=f"fuzz:{self.searched.scope}", done=done, text=f"{self.executed} cases")
            drained = current.in_time and current.smallest is None and current.executed < EXAMPLES_PER_ROUND
            if drained and self.executed >= examples:
                return  # Hypothesis gave up drawing: there is nothing new, or too little that is not filtered out

    def _found(self, case: AnyCase) -> CounterexampleFound:
        found = counterexample(self.searched, case, self.shrink_seconds, self.causes)
        if self.causes[case.check, cause_of(found.summary)] >= self.repeats:
            self.set_aside.add(case.check)
        self.learn(found.verdicts)
        return found

    def learn(self, verdicts: Sequence[Verdict]) -> None:
        """The causes of a counterexample are known from now on, for every check that fails on it."""
        failed = (verdict for verdict in verdicts if verdict.status is Status.FAILED)
        self.causes.update((verdict.check, cause_of(verdict.summary)) for verdict in failed)


def explore(
    searched: Property, *, run_seed: int, seconds: float, examples: int = 0, shrink_seconds: float = SHRINK_SECONDS
) -> Iterator[Event]:
    """Search one property for `seconds` and for at least `examples`, so that a slow machine still searches.

    Every failing check is shrunk once, for `shrink_seconds` by Hypothesis and as long by dropping, and then set aside.

    Yields progress, a counterexample per failing check, and at the end what step sequences have covered and one verdict
    per check.
    """
    search = Search(searched, lambda number: run_seed + number, shrink_seconds=shrink_seconds)
    yield from search.slice(seconds, examples)
    if search.coverage.cases:
        yield InputSpaceCovered(phase=f"fuzz:{searched.scope}", scope=searched.scope, coverage=search.coverage)
    blind = search.coverage.untested() if search.coverage.cases else ""
    for name in searched.checks:
        if name in search.totals:
            verdict = search.totals[name]
            if blind and verdict.status is Status.PASSED:
                verdict = msgspec.structs.replace(verdict, status=Status.MISTRUSTED, summary=blind)
            yield VerdictReached(phase=f"fuzz:{searched.scope}", scope=searched.scope, verdict=verdict)


def _run_round(current: _Round, number: int, database: ExampleDatabase | None) -> None:
    reuse = (Phase.reuse,) if database is not None else ()

    @settings(
        max_examples=EXAMPLES_PER_ROUND,
        database=database,
        deadline=None,
        derandomize=False,
        phases=(*reuse, Phase.generate, Phase.shrink),
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        verbosity=Verbosity.quiet,
    )
    @seed(number)  # below the settings: it takes the database out of those that are there
    @given(current.searched.cases())
    def falsify(case: AnyCase) -> None:
        current.test(case)

    with suppress(_FalsifiedError, _TimeUp):
        falsify()
