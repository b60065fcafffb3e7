"""The report: what a sign-off writes to report.json, and what every page shows."""

from __future__ import annotations

import enum
from typing import Any, Literal

import msgspec

from dsv32_fast.options import Options
from dsv32_fuzz.verdict import Status
from dsv32_reports.policy import Policy


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
    histograms: dict[str, list[int]] = {}
    """Counts per bin, by name; see `Verdict.histograms`."""
    in_scope: bool = True
    """False for traffic that the policy leaves out: it is shown and decides nothing."""


class Gate(msgspec.Struct, frozen=True, kw_only=True):
    """One requirement of the sign-off, with everything that was found about it."""

    name: str
    title: str
    status: Status
    """The worst of the lines in scope, and of the figure against its limit."""
    meaning: str
    lines: list[ScopeLine]
    required: bool = True
    figure: str = ""
    """What the gate measures, empty if it only passes or fails."""
    value: float | None = None
    limit: float | None = None

    @property
    def judged(self) -> bool:
        """Whether there was anything to judge; a gate without is shown as NOT JUDGED, and decides nothing unless the
        policy requires it.
        """
        return self.status is not Status.SKIPPED

    @property
    def violations(self) -> str:
        """Violations in scope of how many steps or cases, for a gate without a figure."""
        lines = [line.measured for line in self.lines if line.in_scope]
        compared = sum(int(line.get("steps", 0)) for line in lines)
        found = sum(int(line.get("violations", 0)) for line in lines)
        return f"{found} of {compared}" if compared else ""

    @property
    def margin(self) -> float | None:
        """How far the figure is below its limit."""
        return None if self.value is None or self.limit is None else self.limit - self.value


class Given(msgspec.Struct, frozen=True, kw_only=True):
    """Evidence that was handed to the sign-off; the journal holds its raw numbers."""

    kind: str
    source: str
    """The files that it was read from."""
    sha256: str


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that was found in one traffic class, over all gates: its worst status, and the checks that failed."""

    scope: str
    status: Status
    failed: list[str]
    in_scope: bool = True


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


class Covered(msgspec.Struct, frozen=True, kw_only=True):
    """What the searches of step sequences have visited of the input space."""

    cases: int
    steps: int
    visited: int
    possible: int
    """Cells: length class x query class x mix x padding, without those that contradict themselves."""
    steps_by_length_and_query: dict[str, dict[str, int]]
    rare_events: dict[str, int]


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
    policy: Policy
    previous: Previous | None
    given: list[Given]
    gates: list[Gate]
    traffic: list[Traffic]
    findings: list[Finding]
    sequences: Sequences | None
    coverage: Covered
    tables: dict[str, list[dict[str, Any]]]
    not_judged: list[str]
    fingerprint: dict[str, str]
