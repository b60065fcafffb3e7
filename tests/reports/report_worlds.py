"""Bundles made of events alone, so that tests of pages and bundles run no campaign."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from dsv32_fast.batch import StepBatch
from dsv32_fast.options import PRESETS
from dsv32_fuzz.case import Case, save_case
from dsv32_fuzz.checks.catalogue import INPUT_CHECKS, STEP_CHECKS
from dsv32_fuzz.events import (
    CounterexampleFound,
    Event,
    EvidenceGiven,
    InputSpaceCovered,
    PhaseFinished,
    RunFinished,
    RunStarted,
    SequencesChecked,
    TableMade,
    VerdictReached,
)
from dsv32_fuzz.latency.evidence import Compared, Evidence, judged
from dsv32_fuzz.search.coverage import Coverage
from dsv32_fuzz.verdict import Status, Verdict
from dsv32_reports.bundle import JOURNAL, write_bundle
from dsv32_reports.fold import fold
from dsv32_reports.gates import EVERYWHERE, REQUIRED
from dsv32_reports.json_file import journal_line


def reached(check: str, scope: str, status: Status = Status.PASSED, **measured: int) -> VerdictReached:
    phase = f"fuzz:{scope}" if scope in EVERYWHERE[1:] and check not in REQUIRED else scope
    verdict = Verdict(check=check, status=status, summary="seen", measured={"steps": 1, **measured})
    return VerdictReached(phase=phase, scope=scope, verdict=verdict)


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


def router_study(*, flipped: int = 2, tokens: int = 500, recorded: bool = True, layers: int = 58) -> dict[str, Any]:
    """What `dsv32 router --json` prints of `layers` layers, of which the last flips `flipped` tokens."""

    def layer(number: int, flips: int) -> dict[str, Any]:
        rate = {"flipped": flips, "tokens": tokens, "rate": flips / tokens, "low": 0.0, "high": 1.0, "predicted": 0.0}
        bias = {"bias_dtype": "float32", "bias_low": 6.817, "bias_high": 7.063, "bf16_step": 2.0**-5}
        margins = {"margin_median": 1e-3, "margin_low": 1e-5, "load_shift": 0.01, "weight_shift": 0.004}
        return {
            "layer": number,
            "distinct": 256,
            "distinct_bf16": 9,
            "collapsed": True,
            "flips": dict.fromkeys(("logits", "bias", "both"), rate),
            **bias,
            **margins,
        }

    found = [layer(number, 0) for number in range(3, 2 + layers)] + [layer(2 + layers, flipped)]
    inputs = "recorded: gates.safetensors" if recorded else "synthetic: independent standard normal channels"
    return {"inputs": inputs, "worst_layer": 2 + layers, "layers": found}


def given(kind: Any, document: dict[str, Any]) -> EvidenceGiven:
    """Evidence as a sign-off keeps it."""
    return EvidenceGiven(kind=kind, source=f"{kind}.json", sha256="0" * 64, document=document)


def trace_evidence(before_ms: float, after_ms: float, steps: int = 300) -> Evidence:
    """Two traces of an engine whose steps spread by 1 %."""
    rng = np.random.default_rng(0)
    a, b = (tuple((1e-3 * ms * (1 + 0.01 * rng.standard_normal(steps))).tolist()) for ms in (before_ms, after_ms))
    one = Compared(name="decode step", verdict="faster", ratio=1.0, low=1.0, high=1.0, p_value=1.0, a_s=(a,), b_s=(b,))
    return judged(Evidence(kind="trace", complete=True, measured="step to step", margin=0.01, compared=(one,)))


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
