"""What a campaign found: the journals of its shards, folded into one result that does not depend on their order.

A case that two shards ran counts once. Integers that a check measured add up over cases, figures of kind float are
worst values and their maximum is kept. A check is FAILED if a case failed it or its process died on one, MISTRUSTED if
no case gave it anything to compare or if its property got fewer examples than the profile promises.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from dsv32_fast.options import Options
from dsv32_fuzz.campaigns.causes import case_digest
from dsv32_fuzz.campaigns.journal import (
    CRASHES,
    JOURNAL,
    NO_CASE,
    AnyRecord,
    CaseFinished,
    CorpusCaseRun,
    CounterexampleShrunk,
    Crash,
    Document,
    RoundsDone,
    SessionBegan,
    SessionEnded,
    case_in,
    document_of,
    read_records,
)
from dsv32_fuzz.campaigns.ledger import cause_key
from dsv32_fuzz.campaigns.shards import CampaignSpec, adopted, read_spec
from dsv32_fuzz.verdict import Status, Verdict, worst

Standing = Literal["new", "known", "listed"]
CRASHED = "crash"
"""Stands for a check where a process died between two cases."""


class CheckLine(msgspec.Struct, frozen=True, kw_only=True):
    """A check in one scope, over everything that was run."""

    check: str
    scope: str
    status: Status
    cases: int
    summary: str
    measured: dict[str, float | int] = {}


class Failure(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One cause of failure, with its smallest case."""

    check: str
    scope: str
    cause: str
    summary: str
    standing: Standing
    """`new`, `known` (the corpus saw it before), or `listed` (in the ledger, so it does not fail the campaign)."""
    since: str = ""
    shrunk: bool = True
    case: Document = NO_CASE
    """The case, not there if the process died between two cases."""
    file: str = ""
    """Where the case was saved."""
    reference: str = ""
    also_fails: list[str] = []
    """Other checks that fail on the same case; their failures have the same cause."""


class CorpusRun(msgspec.Struct, frozen=True, kw_only=True):
    """A case of the corpus, run again."""

    file: str
    digest: str
    saved_for: str
    verdict: Verdict


class CampaignResult(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a campaign found."""

    format: Literal["dsv32-campaign-result/1"] = "dsv32-campaign-result/1"
    target: str
    options: Options | None
    release: str = ""
    """Release and commit of another target than the in-tree one, where it tells them."""
    evidence: str
    profile: str
    seed: int
    shards: list[int]
    shard_seconds: float
    cases: int
    duplicates: int
    """Cases that a second shard ran too; they count once."""
    crashes: int
    lost_shards: list[int]
    """Shards that did not run to their end; nothing they finished is lost."""
    lines: list[CheckLine]
    failures: list[Failure]
    corpus: list[CorpusRun]
    fixed: list[str] = []
    """Files of the corpus that failed last time and pass now."""
    problems: list[str] = []
    """What is wrong with the ledger."""
    listed: dict[str, str] = {}
    """`check: cause` that the ledger allows, and the reference of its entry."""
    cells: dict[str, int] = {}
    """Cells of the input space, and `event: NAME` for each rare event, with the number of cases that reached it."""

    @property
    def status(self) -> Status:
        """FAILED for a failure that is not listed or a wrong ledger; MISTRUSTED for what was not really tested."""
        if self.problems or any(failure.standing != "listed" for failure in self.failures):
            return Status.FAILED
        failing = {check for failure in self.failures for check in (failure.check, *failure.also_fails)}
        rest = [line.status for line in self.lines if not self._allowed(line, failing)]
        return worst([*rest, Status.MISTRUSTED] if self.lost_shards else rest)

    def _allowed(self, line: CheckLine, failing: set[str]) -> bool:
        """Whether the ledger answers for a line: every failure that is left is listed by now."""
        if line.status is Status.FAILED:
            return line.check in failing
        return line.status is Status.MISTRUSTED and cause_key(line.check, line.summary) in self.listed


@dataclass
class _Tally:
    """One check in one scope."""

    cases: int = 0
    statuses: set[Status] = field(default_factory=set)
    measured: dict[str, float | int] = field(default_factory=dict)
    told: dict[Status, str] = field(default_factory=dict)

    def add(self, verdict: Verdict) -> None:
        self.cases += verdict.status is not Status.SKIPPED
        self.statuses.add(verdict.status)
        for name, value in verdict.measured.items():
            if isinstance(value, int):
                self.measured[name] = self.measured.get(name, 0) + value
            elif isinstance(value, float):
                self.measured[name] = max(self.measured.get(name, value), value)
        self.told[verdict.status] = min(verdict.summary, self.told.get(verdict.status, verdict.summary))

    @property
    def status(self) -> Status:
        order = (Status.FAILED, Status.PASSED, Status.MISTRUSTED, Status.SKIPPED)
        return next((status for status in order if status in self.statuses), Status.MISTRUSTED)


@dataclass
class _Fold:
    spec: CampaignSpec
    tallies: dict[tuple[str, str], _Tally] = field(default_factory=dict)
    executed: dict[str, int] = field(default_factory=dict)
    failures: dict[str, Failure] = field(default_factory=dict)
    pending: dict[tuple[str, str], Failure] = field(default_factory=dict)
    explained: set[str] = field(default_factory=set)
    """Causes that a counterexample found for another check has too."""
    unshrunk: list[Failure] = field(default_factory=list)
    corpus: dict[str, CorpusRun] = field(default_factory=dict)
    cells: dict[str, int] = field(default_factory=dict)
    judged: set[tuple[str, str]] = field(default_factory=set)
    digests: set[str] = field(default_factory=set)
    duplicates: int = 0
    crashes: int = 0
    seconds: float = 0.0
    lost: list[int] = field(default_factory=list)

    def add_shard(self, number: int, records: Iterable[AnyRecord]) -> None:
        ended, last, own = "", 0.0, set[str]()
        self.pending = {}
        executed: dict[str, int] = {}
        for record in records:
            match record:
                case SessionBegan():
                    ended = ""
                case CaseFinished():
                    self._finished(record, own)
                case CounterexampleShrunk():
                    self._shrunk(record)
                case CorpusCaseRun():
                    self._corpus_run(record)
                case RoundsDone():
                    executed[record.scope] = record.executed
                case Crash():
                    self._crash(record)
                case SessionEnded():
                    ended = record.reason
            last = max(last, record.at)
        self.unshrunk += self.pending.values()
        self.digests |= own
        self.seconds += last
        for scope, count in executed.items():
            self.executed[scope] = self.executed.get(scope, 0) + count
        if not ended:
            self.lost.append(number)

    def _finished(self, record: CaseFinished, own: set[str]) -> None:
        if record.digest not in own:
            if record.digest in self.digests:
                self.duplicates += 1
            else:
                for cell in record.cells:
                    self.cells[cell] = self.cells.get(cell, 0) + 1
            own.add(record.digest)
        for verdict in record.verdicts:
            if (record.digest, verdict.check) not in self.judged:
                self.judged.add((record.digest, verdict.check))
                self.tallies.setdefault((record.scope, verdict.check), _Tally()).add(verdict)
            if verdict.status is Status.FAILED and cause_key(verdict.check, verdict.summary) not in self.explained:
                pending = self._failure(verdict.check, record.scope, verdict.summary, record.case, shrunk=False)
                self.pending[record.scope, verdict.check] = pending

    def _shrunk(self, record: CounterexampleShrunk) -> None:
        case = case_in(record.case)
        if case is None:
            return
        failed = [verdict for verdict in record.verdicts if verdict.status is Status.FAILED]
        others = [verdict for verdict in failed if verdict.check != case.check]
        failure = self._failure(case.check, case.scope, record.summary, record.case)
        self.keep(msgspec.structs.replace(failure, also_fails=[verdict.check for verdict in others]))
        self.explained |= {cause_key(verdict.check, verdict.summary) for verdict in others}
        for verdict in failed:
            self.pending.pop((case.scope, verdict.check), None)

    def _corpus_run(self, record: CorpusCaseRun) -> None:
        case = case_in(record.case)
        if case is None:
            return
        run = CorpusRun(file=record.file, digest=case_digest(case), saved_for=case.check, verdict=record.verdict)
        self.corpus[record.file] = run
        if record.verdict.status is Status.FAILED:
            failure = self._failure(record.verdict.check, case.scope, record.verdict.summary, record.case)
            self.keep(msgspec.structs.replace(failure, file=record.file))
            # The case finished just now, so its failures stand as pending; they need no shrinking.
            same = {k for k, f in self.pending.items() if _digest(f.case) == run.digest}
            self.pending = {k: f for k, f in self.pending.items() if k not in same}

    def _crash(self, record: Crash) -> None:
        self.crashes += 1
        case = case_in(record.case)
        check = CRASHED if case is None else case.check or self.spec.properties.get(case.scope, (CRASHED,))[0]
        self.keep(self._failure(check, record.scope, f"the process {record.how}", record.case))
        self.tallies.setdefault((record.scope, check), _Tally()).statuses.add(Status.FAILED)

    def _failure(self, check: str, scope: str, summary: str, document: Document, *, shrunk: bool = True) -> Failure:
        case = case_in(document)
        if case is not None:
            document = document_of(adopted(msgspec.structs.replace(case, check=check), self.spec))
        cause = cause_key(check, summary)
        return Failure(
            check=check, scope=scope, cause=cause, summary=summary, standing="new", shrunk=shrunk, case=document
        )

    def keep(self, failure: Failure) -> None:
        """One failure a cause: the smallest case, so that the order of shards does not matter."""
        known = self.failures.get(failure.cause)
        if known is None or _size(failure) < _size(known):
            self.failures[failure.cause] = failure

    def line(self, scope: str, check: str) -> CheckLine:
        tally = self.tallies.get((scope, check), _Tally())
        # A round that was interrupted did not tell how many examples it had; its cases are known all the same.
        executed, promised = max(self.executed.get(scope, 0), tally.cases), self.spec.min_examples
        status = tally.status
        if status is Status.PASSED and executed < promised:
            status = Status.MISTRUSTED
            summary = f"{executed} of the {promised} examples that the profile promises were run; give it more time"
        elif not tally.statuses:
            summary = "no case was run in the time; give it more"
        else:
            summary = tally.told.get(status, "")
        return CheckLine(
            check=check, scope=scope, status=status, cases=tally.cases, summary=summary, measured=tally.measured
        )


def _digest(document: Document) -> str:
    case = case_in(document)
    return "" if case is None else case_digest(case)


def _size(failure: Failure) -> tuple[bool, bool, int, bytes]:
    """Shrunk cases first, among them those that the corpus has already, then small ones."""
    document = bytes(failure.case)
    return (not failure.shrunk, not failure.file, len(document), document)


def read_result(folders: Sequence[Path]) -> CampaignResult:
    """Fold the shards of one campaign, from one folder or from several of them.

    Raises:
        ValueError: no campaign, damaged journals, or folders of different campaigns.
    """
    specs = [read_spec(folder) for folder in folders]
    for folder, spec in zip(folders, specs, strict=True):
        if _identity(spec) != _identity(specs[0]):
            raise ValueError(f"{folder} is of another campaign than {folders[0]}; merge shards of one campaign")
    fold = _Fold(msgspec.structs.replace(specs[0], quarantine={}))
    shards = sorted(
        ((int(path.name.partition("-")[2]), path) for folder in folders for path in folder.glob("shard-[0-9]*")),
        key=lambda found: (found[0], _content_key(found[1])),
    )
    for number, path in shards:
        fold.add_shard(number, [*read_records(path / JOURNAL), *read_records(path / CRASHES)])
    for failure in fold.unshrunk:
        if failure.cause not in fold.explained:
            fold.keep(failure)
    return _result(fold, sorted({number for number, _ in shards}))


def _content_key(folder: Path) -> bytes:
    """Orders two folders of one shard by what they hold: the beginning of the journal has the time of the session."""
    path = folder / JOURNAL
    if not path.exists():
        return b""
    with path.open("rb") as file:
        return file.readline()


def _identity(spec: CampaignSpec) -> CampaignSpec:
    """What must agree: where a target or shared examples lie on a machine does not change what a case means."""
    return msgspec.structs.replace(spec, arguments={}, examples="", quarantine={}, case_seconds=0.0)


def _result(fold: _Fold, shards: list[int]) -> CampaignResult:
    spec = fold.spec
    lines = [fold.line(scope, check) for scope, checks in spec.properties.items() for check in checks]
    return CampaignResult(
        target=spec.target,
        options=spec.options,
        release=spec.release,
        evidence=spec.evidence,
        profile=spec.profile,
        seed=spec.seed,
        shards=shards,
        shard_seconds=round(fold.seconds, 1),
        cases=len(fold.digests),
        duplicates=fold.duplicates,
        crashes=fold.crashes,
        lost_shards=sorted(set(fold.lost)),
        lines=lines,
        failures=sorted(fold.failures.values(), key=lambda failure: failure.cause),
        corpus=sorted(fold.corpus.values(), key=lambda run: run.file),
        cells=dict(sorted(fold.cells.items())),
    )
