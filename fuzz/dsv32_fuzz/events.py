"""The event stream of a run. Whoever wants to show or keep something subscribes to it; nobody calls back into a run.

Every event is a tagged record that survives JSON, so a journal of events is a complete record of a run.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from dsv32_fast.options import Options
from dsv32_fuzz.case import AnyCase
from dsv32_fuzz.search.coverage import Coverage
from dsv32_fuzz.verdict import Verdict


class Event(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all events."""


class RunStarted(Event, frozen=True, kw_only=True):
    """The first event of a sign-off: what it was made of, so that the journal alone gives the report again."""

    id: str
    target: str
    evidence: str
    options: Options | None
    options_text: str
    started: str
    """ISO 8601, UTC."""
    seed: int
    profile: str
    fingerprint: dict[str, str]
    policy: dict[str, Any] = {}
    approver: str = ""
    previous: dict[str, Any] | None = None
    """The last sign-off that this one is compared with: its id, outcome, options, fingerprint and digest."""
    corpus: str = ""
    """Folder of cases that are run again, and the ledger of those that may fail; empty if there is none."""
    ledger: str = ""


class EvidenceGiven(Event, frozen=True, kw_only=True):
    """Evidence that was not made by the run: the raw numbers, so that whoever has the journal can judge it again."""

    kind: Literal["accuracy", "router_precision", "latency"]
    source: str
    """The files that it was read from."""
    sha256: str
    """Of the content of those files, one behind the other."""
    document: dict[str, Any]


class PhaseStarted(Event, frozen=True, kw_only=True):
    """A part of the run begins; `seconds` is its time budget, 0 if it takes what it takes."""

    phase: str
    title: str
    seconds: float = 0.0


class PhaseFinished(Event, frozen=True, kw_only=True):
    """A part of the run is done; a run that is resumed goes on behind it. `seconds` is what it took."""

    phase: str
    seconds: float


class Progress(Event, frozen=True, kw_only=True):
    """How far a phase is: `done` of 1, and a short text."""

    phase: str
    done: float
    text: str


class VerdictReached(Event, frozen=True, kw_only=True):
    """A check's verdict over everything that a phase ran in one scope (traffic class)."""

    phase: str
    scope: str
    verdict: Verdict


class CounterexampleFound(Event, frozen=True, kw_only=True):
    """A shrunk case on which a check fails, and what every other check says of it."""

    case: AnyCase
    summary: str
    verdicts: list[Verdict]


class SequencesChecked(Event, frozen=True, kw_only=True):
    """Independently seeded workload sequences, the unit of the failure-rate bound."""

    sequences: int
    failed: int
    step_batches: int


class InputSpaceCovered(Event, frozen=True, kw_only=True):
    """Which cells of the input space, and which rare events, a search of step sequences has visited."""

    phase: str
    scope: str
    coverage: Coverage


class TableMade(Event, frozen=True, kw_only=True):
    """Rows for the report, already plain data."""

    name: str
    rows: list[dict[str, Any]]


class RunFinished(Event, frozen=True, kw_only=True):
    """The last event; `interrupted` if the user stopped the run."""

    seconds: float
    interrupted: bool = False


AnyEvent = (
    RunStarted
    | EvidenceGiven
    | PhaseStarted
    | PhaseFinished
    | Progress
    | VerdictReached
    | CounterexampleFound
    | SequencesChecked
    | InputSpaceCovered
    | TableMade
    | RunFinished
)
