"""Bundles made of events alone, so that tests of pages and bundles run no campaign."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Any

from dsv32_fast.batch import StepBatch
from dsv32_fast.options import PRESETS
from dsv32_fuzz.case import Case, save_case
from dsv32_fuzz.checks.catalogue import INPUT_CHECKS, STEP_CHECKS
from dsv32_fuzz.coverage import Coverage
from dsv32_fuzz.events import (
    CounterexampleFound,
    Event,
    InputSpaceCovered,
    PhaseFinished,
    RunFinished,
    RunStarted,
    SequencesChecked,
    TableMade,
    VerdictReached,
)
from dsv32_fuzz.verdict import Status, Verdict
from dsv32_reports.bundle import JOURNAL, write_bundle
from dsv32_reports.fold import fold
from dsv32_reports.gates import EVERYWHERE, REQUIRED
from dsv32_reports.json_file import journal_line


def reached(check: str, scope: str, status: Status = Status.PASSED, **measured: int) -> VerdictReached:
    phase = f"fuzz:{scope}" if scope in EVERYWHERE[1:] and check not in REQUIRED else scope
    verdict = Verdict(check=check, status=status, summary="seen", measured={"steps": 1, **measured})
    return VerdictReached(phase=phase, scope=scope, verdict=verdict)


NOT_MADE = ("accuracy", "router_precision", "latency", "corpus_cases", "ledger")
"""Checks whose evidence a user gives; a run without it says nothing of them."""


def everything(status: Status = Status.PASSED) -> list[VerdictReached]:
    names = [check.name for check in STEP_CHECKS]
    events = [reached(name, scope, status) for name in names for scope in EVERYWHERE]
    for check in INPUT_CHECKS:
        verdict = Verdict(check=check.name, status=status, summary="seen", measured={"steps": 1})
        events.append(VerdictReached(phase=f"check:{check.family}", scope=check.name, verdict=verdict))
    return events + [reached(check, scope, status) for check, scopes in REQUIRED.items() for scope in scopes]


def started(**changes: Any) -> RunStarted:
    fields: dict[str, Any] = {
        "id": "pr47766-20260101-000000",
        "target": "in-tree",
        "evidence": "emulated",
        "options": PRESETS["pr47766"],
        "options_text": "pr47766",
        "started": "2026-01-01T00:00:00+00:00",
        "seed": 0,
        "profile": "signoff",
        "fingerprint": {"dsv32-validation": metadata.version("dsv32-validation"), "torch": "2.13.0"},
    }
    return RunStarted(**(fields | changes))


def counterexample() -> CounterexampleFound:
    steps = tuple(StepBatch(query_lens=(2,), seq_lens=(length,)) for length in (2048, 2049))
    case = Case(check="key_sufficiency", scope="mtp_decode", options=PRESETS["pr42982"], steps=steps)
    verdicts = [
        Verdict(check="key_sufficiency", status=Status.FAILED, summary="same key, other rows", step=1, measured={}),
        Verdict(check="plan_coverage", status=Status.FAILED, summary="row 0", step=1, measured={}),
    ]
    return CounterexampleFound(case=case, summary="step 1: same key, other rows", verdicts=verdicts)


def coverage() -> Coverage:
    """Of one case that crosses topk."""
    steps = tuple(StepBatch(query_lens=(1,), seq_lens=(length,)) for length in (2047, 2048, 2049))
    found = Coverage()
    found.add(Case(check="", scope="decode", options=PRESETS["pr47766"], steps=steps))
    return found


def whole_run(*, failing: bool = False, **changes: Any) -> list[Event]:
    events: list[Event] = [started(**changes), *everything()]
    if failing:
        events += [counterexample(), reached("key_sufficiency", "mtp_decode", Status.FAILED)]
    row = {
        "budget": 8192,
        "input_len": 5000,
        "spread": 0.0,
        "requests": 128,
        "arrivals": "closed loop",
        "steps": 1000,
        "decode_steps": 900,
        "skip_rate": 0.88,
        "decode_skip_rate": 0.9,
        "rightful": 880,
        "wrongful": 0,
        "wrongful_by_class": {},
        "claimed": 0.94,
    }
    return [
        *events,
        InputSpaceCovered(phase="fuzz:decode", scope="decode", coverage=coverage()),
        SequencesChecked(sequences=40, failed=0, step_batches=12000),
        TableMade(name="skip_rate", rows=[row]),
        PhaseFinished(phase="workload", seconds=100.0),
        RunFinished(seconds=100.0),
    ]


def make_bundle(folder: Path, events: list[Event]) -> str:
    """What a sign-off leaves, made of `events`; returns the digest."""
    (folder / "cases").mkdir(parents=True)
    (folder / JOURNAL).write_bytes(b"".join(journal_line(event) for event in events))
    for event in events:
        if isinstance(event, CounterexampleFound):
            save_case(event.case, folder / "cases" / f"{event.case.scope}-{event.case.check}.json")
    return write_bundle(fold(events, folder.name), folder)
