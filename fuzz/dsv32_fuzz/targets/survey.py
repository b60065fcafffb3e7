"""A target in one row: the verdict of every check, and what it did on the purposeful sequences, for comparison.

Nothing here knows a release. Each row is what the target's own code earns on the purposeful corpus in several worlds,
followed by a search of each traffic class.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec

from dsv32_fuzz.case import AnyCase
from dsv32_fuzz.checks import merge, run_case
from dsv32_fuzz.checks.catalogue import STEP_CHECKS
from dsv32_fuzz.events import CounterexampleFound, VerdictReached
from dsv32_fuzz.search.explore import counterexample, explore
from dsv32_fuzz.search.properties import StepTraffic
from dsv32_fuzz.strategies import WORLDS
from dsv32_fuzz.strategies.traffic import TRAFFIC
from dsv32_fuzz.targets import Session, Target
from dsv32_fuzz.targets.corpus import cases
from dsv32_fuzz.verdict import Status, Verdict

CORPUS_WORLDS = (WORLDS[0], WORLDS[3], WORLDS[4])  # the PR's own; many heads with an fp8 cache; heads that are padded


class Survey(msgspec.Struct, frozen=True, kw_only=True):
    """What one target earned; or, with `refusal`, why it could not be driven."""

    target: str
    versions: dict[str, str] = {}
    verdicts: dict[str, Verdict] = {}
    findings: list[AnyCase] = []
    first_finding_seconds: float | None = None
    """From the start of the survey, the target's import included."""
    seconds: float = 0.0
    sequences: int = 0
    refusal: str = ""


def survey(
    target: Target, *, label: str, versions: dict[str, str], seconds: float, run_seed: int, started: float
) -> Survey:
    """Run the corpus in three worlds, then search each traffic class for `seconds`.

    `started` is a `time.monotonic()` from before the target was opened.
    """
    totals: dict[str, Verdict] = {}
    found: list[AnyCase] = []
    first: float | None = None
    sequences = 0

    def add(verdict: Verdict) -> None:
        known = totals.get(verdict.check)
        totals[verdict.check] = merge([known, verdict]) if known else verdict

    for world in CORPUS_WORLDS:
        for _, case in cases(target, world):
            sequences += 1
            for verdict in run_case(case, target, STEP_CHECKS):
                new = verdict.status is Status.FAILED and verdict.check not in {c.check for c in found}
                add(verdict)
                if new:
                    first = first if first is not None else time.monotonic() - started
                    failing = msgspec.structs.replace(case, check=verdict.check)
                    found.append(counterexample(StepTraffic(target, case.scope), failing).case)
    for scope in TRAFFIC if seconds else ():
        for event in explore(StepTraffic(target, scope), run_seed=run_seed, seconds=seconds):
            if isinstance(event, VerdictReached):
                add(event.verdict)
            elif isinstance(event, CounterexampleFound):
                first = first if first is not None else time.monotonic() - started
                if (event.case.check, event.case.scope) not in {(c.check, c.scope) for c in found}:
                    found.append(event.case)
    return Survey(
        target=label,
        versions=versions,
        verdicts=totals,
        findings=found,
        first_finding_seconds=first,
        seconds=time.monotonic() - started,
        sequences=sequences,
    )


class Behaviour(msgspec.Struct, frozen=True, kw_only=True):
    """What a target did in one step, without the values that only differ by address."""

    launched: bool
    persistent: bool
    rows: int
    scalars: dict[str, str]
    kv_len_total: int
    events: tuple[str, ...]

    def differences(self, other: Behaviour) -> list[str]:
        """Fields that differ, as `field ours -> theirs`."""
        mine: dict[str, Any] = msgspec.structs.asdict(self)
        theirs: dict[str, Any] = msgspec.structs.asdict(other)
        told = [f"{n} {mine[n]} -> {theirs[n]}" for n in mine if n != "scalars" and mine[n] != theirs[n]]
        names = sorted(mine["scalars"].keys() | theirs["scalars"].keys())
        pairs = [(name, mine["scalars"].get(name, "-"), theirs["scalars"].get(name, "-")) for name in names]
        return told + [f"{name} {a} -> {b}" for name, a, b in pairs if a != b]


def behaviour(target: Target) -> dict[str, list[Behaviour]]:
    """What the target does on every purposeful sequence, step by step, by name and world."""
    seen: dict[str, list[Behaviour]] = {}
    for world in CORPUS_WORLDS:
        for name, case in cases(target, world):
            session = target.open(case.dims)
            seen[f"{name} ({world[0]} heads, {world[1]})"] = [_observe(session, step) for step in case.steps]
    return seen


def _observe(session: Session, step: Any) -> Behaviour:
    record = session.build(step)
    planned = record.planner_input
    scalars = {name: str(value) for name, value in planned.scalars} if planned else {}
    return Behaviour(
        launched=record.launched,
        persistent=record.persistent,
        rows=record.metadata.num_tokens,
        scalars=scalars,
        kv_len_total=int(planned.kv_lens.sum()) if planned else -1,
        events=record.events,
    )


def compare(ours: dict[str, list[Behaviour]], theirs: dict[str, list[Behaviour]]) -> list[tuple[str, list[str]]]:
    """Each kind of change, and the steps that show it: `(what changed, [sequence, step ...])`."""
    changes: dict[str, list[str]] = {}
    for name in ours:
        for index, (a, b) in enumerate(zip(ours[name], theirs[name], strict=True)):
            for what in a.differences(b):
                changes.setdefault(what, []).append(f"{name}, step {index}")
    return sorted(changes.items())
