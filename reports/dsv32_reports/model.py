"""The report: what a sign-off writes to report.json, and what every page shows."""

from __future__ import annotations

import enum
from typing import Any, Literal

import msgspec

from dsv32_fast.options import Options
from dsv32_fuzz.verdict import Status


class Outcome(str, enum.Enum):
    """The three answers of a sign-off."""

    GO = "GO"
    NO_GO = "NO-GO"
    INCONCLUSIVE = "INCONCLUSIVE"


EXIT_CODES = {Outcome.GO: 0, Outcome.NO_GO: 1, Outcome.INCONCLUSIVE: 3}
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


class ScopeLine(msgspec.Struct, frozen=True, kw_only=True):
    """What one gate found in one scope: a traffic class, the workload, or the proof by exhaustion."""

    scope: str
    status: Status
    summary: str
    measured: dict[str, float | int | str]


class Gate(msgspec.Struct, frozen=True, kw_only=True):
    """One requirement of the sign-off, with everything that was found about it."""

    name: str
    title: str
    status: Status
    meaning: str
    lines: list[ScopeLine]


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that was found in one traffic class, over all gates: its worst status, and the checks that failed."""

    scope: str
    status: Status
    failed: list[str]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """A counterexample that was saved, and the command that shows it again."""

    check: str
    scope: str
    summary: str
    classification: str
    also_fails: list[str]
    """Other checks that fail on the same case."""
    shown: list[str]
    """The case in lines, the first few."""
    file: str
    command: str


class Sequences(msgspec.Struct, frozen=True, kw_only=True):
    """The workload sequences as trials; the unit of the bound is the sequence, never a generated example."""

    sequences: int
    failed: int
    step_batches: int
    failure_rate_upper_bound: float
    confidence: float = 0.95


class Previous(msgspec.Struct, frozen=True, kw_only=True):
    """The sign-off that this one is compared with, and what is no longer as it was."""

    id: str
    outcome: Outcome
    digest: str
    changed: list[str]
    """Options, policy and fingerprint, each as `name: before -> now`."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a sign-off says."""

    format: Literal["dsv32-report/1"] = "dsv32-report/1"
    id: str
    folder: str
    """The name by which the commands in the report call the bundle."""
    outcome: Outcome
    reason: str
    evidence: str
    target: str
    options: Options | None
    options_text: str
    started: str
    seconds: float
    seed: int
    profile: str
    approver: str
    previous: Previous | None
    gates: list[Gate]
    traffic: list[Traffic]
    findings: list[Finding]
    sequences: Sequences | None
    tables: dict[str, list[dict[str, Any]]]
    not_judged: list[str]
    fingerprint: dict[str, str]
