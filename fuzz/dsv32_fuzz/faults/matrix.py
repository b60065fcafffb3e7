"""The kill matrix: which check kills which fault, after how many examples and seconds, and with which case.

A fault is killed by a check that fails on the faulty target and does not fail, on the same case, on the faultless one.
Every property of `search.properties` is searched from an empty corpus, those of the area's families first, in passes
that deepen. Harness faults are killed by the probes of `selftest`.
"""

from __future__ import annotations

import math
import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace

import msgspec
import torch
from hypothesis import strategies as st

from dsv32_fast.options import PRESETS
from dsv32_fuzz.case import AnyCase
from dsv32_fuzz.events import CounterexampleFound
from dsv32_fuzz.faults import AREAS, FAULTS, Fault
from dsv32_fuzz.faults.results import CheckInfo, ControlRow, FaultRow, Gate, Kill, KillMatrix
from dsv32_fuzz.faults.selftest import PROBES, complaints
from dsv32_fuzz.search.explore import counterexample, explore
from dsv32_fuzz.search.properties import OwnInput, Property, properties, property_of
from dsv32_fuzz.targets.intree import InTreeTarget
from dsv32_fuzz.verdict import Status, Verdict

TRAFFIC, SELFTEST = "traffic", "selftest"


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How hard a gate searches."""

    passes: tuple[int, ...]
    """Examples per property, pass after pass, until something kills."""
    seconds: float
    """CPU time per fault for the search; the shrinking of what was found comes on top."""
    shrink_seconds: float
    every_cell: bool
    """Go on after the first kill, until every check had its chance."""
    control_examples: int
    """Examples per property on a faultless target."""


GATES: dict[Gate, Effort] = {
    "ci": Effort(passes=(10, 50, 200), seconds=15.0, shrink_seconds=1.0, every_cell=False, control_examples=20),
    "nightly": Effort(passes=(200,), seconds=600.0, shrink_seconds=10.0, every_cell=True, control_examples=500),
}


def family_of(searched: Property) -> str:
    """The family of a property's checks; `traffic` for those of step sequences."""
    return searched.check.family if isinstance(searched, OwnInput) else TRAFFIC


def ordered(found: Sequence[Property], area: str) -> list[Property]:
    """The properties of the area's families first, in the order in which the area names them."""
    hint = AREAS[area].families
    return sorted(found, key=lambda searched: hint.index(f) if (f := family_of(searched)) in hint else len(hint))


def all_checks() -> tuple[CheckInfo, ...]:
    """Every check that can kill, and the probes of the harness."""
    found: dict[str, CheckInfo] = {}
    for searched in properties(InTreeTarget(PRESETS["pr47766"])):
        found |= {name: CheckInfo(name=name, family=family_of(searched)) for name in searched.checks}
    found |= {probe.name: CheckInfo(name=probe.name, family=SELFTEST) for probe in PROBES}
    return tuple(found.values())


@dataclass(kw_only=True)
class _Clock:
    """What the search of one fault has used so far."""

    effort: Effort
    started: float = field(default_factory=time.process_time)
    examples: int = 0

    @property
    def seconds(self) -> float:
        """CPU time of this process, so that neighbours on the machine change no outcome."""
        return time.process_time() - self.started

    @property
    def over(self) -> bool:
        return self.seconds > self.effort.seconds


class _OverError(BaseException):
    """Ends a search from inside a strategy; no `Exception`, so that Hypothesis neither shrinks nor repeats it."""


@dataclass(kw_only=True)
class _Watched:
    """A property that counts, keeps what failed first, and ends the search when its examples or its time are used."""

    inner: Property
    clock: _Clock
    quota: int
    """Examples; when a check has failed, seconds of shrinking count instead."""
    tried: int = 0
    passed: set[str] = field(default_factory=set)
    """Checks that compared something and found nothing, at least once."""
    first: dict[str, Kill] = field(default_factory=dict)
    """The first failure of each check."""
    smallest: dict[str, AnyCase] = field(default_factory=dict)
    """The smallest failing case of each check, by the length of its document."""

    @property
    def scope(self) -> str:
        return self.inner.scope

    @property
    def checks(self) -> tuple[str, ...]:
        return self.inner.checks

    def cases(self) -> st.SearchStrategy[AnyCase]:
        return self.inner.cases().map(self._admitted)

    def _admitted(self, case: AnyCase) -> AnyCase:
        if self.clock.over or (self._late() if self.first else self.tried >= self.quota):
            raise _OverError
        return case

    def _late(self) -> bool:
        """Whether shrinking has had its time; where every cell counts, the search goes on behind it."""
        effort = self.clock.effort
        first = min(kill.seconds for kill in self.first.values())
        return not effort.every_cell and self.clock.seconds > first + effort.shrink_seconds

    def smaller(self, case: AnyCase, fails: Callable[[AnyCase], bool]) -> AnyCase:
        return self.inner.smaller(case, lambda tried: not self._late() and fails(tried))

    def judge(self, case: AnyCase, checks: Sequence[str]) -> list[Verdict]:
        if not self.first:
            self.tried += 1
            self.clock.examples += 1
        verdicts = self.inner.judge(case, checks)
        self.passed.update(verdict.check for verdict in verdicts if verdict.status is Status.PASSED)
        for verdict in verdicts:
            if verdict.status is Status.FAILED:
                self._failed(case, verdict)
        return verdicts

    def _failed(self, case: AnyCase, verdict: Verdict) -> None:
        name, case = verdict.check, msgspec.structs.replace(case, check=verdict.check)
        self.first.setdefault(name, _kill(self, verdict))
        if name not in self.smallest or _length(case) <= _length(self.smallest[name]):
            self.smallest[name] = case


def _length(case: AnyCase) -> int:
    return len(msgspec.json.encode(case))


def _kill(watched: _Watched, verdict: Verdict) -> Kill:
    return Kill(
        check=verdict.check,
        family=family_of(watched.inner),
        examples=watched.clock.examples,
        seconds=round(watched.clock.seconds, 3),
        summary=verdict.summary,
    )


def _search(watched: _Watched, seed: int) -> list[Kill]:
    """The checks that failed, in the order of their first failures; a shrunk case for each that was shrunk."""
    shrunk: dict[str, CounterexampleFound] = {}
    try:
        for event in explore(watched, run_seed=seed, seconds=1e-3, examples=watched.quota):
            if isinstance(event, CounterexampleFound):
                shrunk[event.case.check] = event
                if not watched.clock.effort.every_cell:
                    break
    except _OverError:
        pass
    if watched.first and not shrunk:  # the time for shrinking ended first
        name = next(iter(watched.first))
        shrunk[name] = counterexample(watched, watched.smallest[name])
    return [_with_case(kill, shrunk.get(kill.check)) for kill in watched.first.values()]


def _with_case(kill: Kill, found: CounterexampleFound | None) -> Kill:
    if found is None:
        return kill
    return msgspec.structs.replace(kill, case=msgspec.to_builtins(found.case), summary=found.summary)


def run_fault(fault: Fault, gate: Gate, seed: int) -> FaultRow:
    """Search one fault until a check kills it, or until every check had its chance."""
    effort = GATES[gate]
    clock = _Clock(effort=effort)
    if fault.area == "harness":
        found, compared = _probe(fault, clock), True
    else:
        found, compared = _hunt(fault, clock, seed)
    control = fault.control()
    false_alarms = tuple(kill for kill in found if not _quiet(kill, control))
    wrong = {kill.check for kill in false_alarms}
    return FaultRow(
        fault=fault.name,
        area=fault.area,
        story=fault.story,
        reference=fault.reference,
        seams=fault.seams,
        options=fault.options,
        kills=tuple(kill for kill in found if kill.check not in wrong),
        false_alarms=false_alarms,
        examples=clock.examples,
        compared=compared,
        seconds=round(clock.seconds, 3),
    )


def _hunt(fault: Fault, clock: _Clock, seed: int) -> tuple[list[Kill], bool]:
    found: dict[str, Kill] = {}
    compared = False
    with fault.inject() as target:
        for number, (searched, examples) in enumerate(_agenda(properties(target), fault.area, clock.effort.passes)):
            if clock.over or (found and not clock.effort.every_cell):
                break
            watched = _Watched(inner=searched, clock=clock, quota=examples)
            for kill in _search(watched, seed * 10_000 + number * 10):
                found.setdefault(kill.check, kill)
            compared |= bool(watched.passed or watched.first)
    return list(found.values()), compared


def _agenda(found: Sequence[Property], area: str, passes: Sequence[int]) -> Iterator[tuple[Property, int]]:
    """What is searched, with how many examples; the area's own families are one pass ahead of all others."""
    near = [searched for searched in ordered(found, area) if family_of(searched) in AREAS[area].families]
    far = [searched for searched in found if searched not in near]
    for ahead, behind in zip((*passes, 0), (0, *passes), strict=True):
        yield from ((searched, ahead) for searched in near if ahead)
        yield from ((searched, behind) for searched in far if behind)


def _probe(fault: Fault, clock: _Clock) -> list[Kill]:
    clock.examples = len(PROBES)
    with fault.inject():
        return [
            Kill(
                check=probe.name,
                family=SELFTEST,
                examples=PROBES.index(probe) + 1,
                seconds=round(clock.seconds, 3),
                summary=told,
            )
            for probe, told in complaints()
        ]


def _quiet(kill: Kill, control: InTreeTarget) -> bool:
    """Whether the check is quiet about the kill's case on the faultless target."""
    case = kill.saved()
    if case is None:
        return True
    (verdict,) = property_of(case, control).judge(case, [kill.check])
    return verdict.status is not Status.FAILED


def run_control(options: str, gate: Gate, seed: int) -> ControlRow:
    """Every check on the faultless target of one preset, and the probes of the harness."""
    effort = GATES[gate]
    clock = _Clock(effort=replace(effort, seconds=math.inf))
    alarms: list[Kill] = []
    passed: set[str] = set()
    names: set[str] = set()
    for searched in properties(InTreeTarget(PRESETS[options])):
        watched = _Watched(inner=searched, clock=clock, quota=effort.control_examples)
        names.update(searched.checks)
        alarms += _search(watched, seed * 10_000)
        passed.update(watched.passed)
    told = [
        Kill(check=p.name, family=SELFTEST, examples=0, seconds=0.0, summary=summary) for p, summary in complaints()
    ]
    return ControlRow(
        options=options,
        checks=len(names) + len(PROBES),
        passed=len(passed - {kill.check for kill in alarms}) + len(PROBES) - len(told),
        false_alarms=(*alarms, *told),
        examples=clock.examples,
        seconds=round(clock.seconds, 3),
    )


def _task(kind: str, name: str, gate: Gate, seed: int) -> FaultRow | ControlRow:
    """One row; the form in which a worker process is asked."""
    torch.set_num_threads(1)
    return run_control(name, gate, seed) if kind == "control" else run_fault(FAULTS[name], gate, seed)


def tasks_of(names: Sequence[str], done: Iterable[FaultRow | ControlRow] = ()) -> list[tuple[str, str]]:
    """Kind and name of the rows of the named faults: the controls of their presets, then the faults, less the done.

    Raises:
        ValueError: an unknown fault.
    """
    unknown = [name for name in names if name not in FAULTS]
    if unknown:
        raise ValueError(f"unknown fault {unknown[0]!r}; `dsv32 faults --list` names all of them")
    presets = dict.fromkeys(FAULTS[name].options for name in names)
    finished = {("fault", row.fault) if isinstance(row, FaultRow) else ("control", row.options) for row in done}
    tasks = [("control", preset) for preset in presets] + [("fault", name) for name in names]
    return [task for task in tasks if task not in finished]


def run_rows(
    names: Sequence[str], gate: Gate, seed: int, jobs: int, done: Iterable[FaultRow | ControlRow] = ()
) -> Iterator[FaultRow | ControlRow]:
    """The rows of the named faults and the controls of their presets that are not `done`, as they come.

    Raises:
        ValueError: an unknown fault, or a number of jobs that is not positive.
    """
    tasks = tasks_of(names, done)
    if jobs < 1:
        raise ValueError(f"jobs is {jobs}; give a positive number of processes")
    if jobs == 1:
        yield from (_task(kind, name, gate, seed) for kind, name in tasks)
        return
    # Fresh interpreters: a forked torch may wait for threads that do not exist.
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        waiting = [pool.submit(_task, kind, name, gate, seed) for kind, name in tasks]
        try:
            yield from (finished.result() for finished in as_completed(waiting))
        finally:
            pool.shutdown(cancel_futures=True)


def run_matrix(names: Sequence[str], gate: Gate = "ci", seed: int = 0, jobs: int = 1) -> KillMatrix:
    """The kill matrix of the named faults.

    Raises:
        ValueError: as `run_rows`.
    """
    started = time.monotonic()
    return assemble(list(run_rows(names, gate, seed, jobs)), gate, seed, time.monotonic() - started)


def assemble(rows: Iterable[FaultRow | ControlRow], gate: Gate, seed: int, seconds: float) -> KillMatrix:
    """A matrix of rows that came in any order."""
    place = {name: number for number, name in enumerate(FAULTS)}
    rows = list(rows)
    return KillMatrix(
        gate=gate,
        seed=seed,
        checks=all_checks(),
        rows=tuple(sorted((r for r in rows if isinstance(r, FaultRow)), key=lambda row: place[row.fault])),
        controls=tuple(row for row in rows if isinstance(row, ControlRow)),
        seconds=round(seconds, 1),
    )
