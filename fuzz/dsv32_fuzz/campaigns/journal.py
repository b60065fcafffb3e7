"""The journal of one shard: what it finished, line by line, so that a killed process loses no finished case.

A shard's folder holds
- `journal.jsonl`: append-only, one record a line. A line is written with one system call before the next case starts,
  so it survives the death of the process; it is forced to the disk about once a second, against the death of the
  machine. A last line without its end is one that was being written: it is dropped.
- `running.json`: the case that runs now, written before it runs. What reads it is the watchdog, and whoever wants to
  know on which case a process died.
- `crashes.jsonl`: cases on which the process died or hung, written by its watchdog.
- `log.txt`: what the process printed; after a crash, its stack.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

import msgspec

from dsv32_fuzz.campaigns.causes import case_digest
from dsv32_fuzz.case import AnyCase, decode_case
from dsv32_fuzz.verdict import Status, Verdict

JOURNAL, RUNNING, CRASHES, LOG = "journal.jsonl", "running.json", "crashes.jsonl", "log.txt"
SYNC_SECONDS = 1.0

Document = msgspec.Raw
"""A case as JSON: there are two forms of case, and `case_in` decodes either."""
NO_CASE = Document(b"")


class Record(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Base of all records."""


def document_of(case: AnyCase) -> Document:
    """The case as a field of a record."""
    return Document(msgspec.json.encode(case))


def case_in(document: Document) -> AnyCase | None:
    """The case in a field of a record, None if it holds none.

    Raises:
        ValueError: not a case.
    """
    return decode_case(bytes(document)) if bytes(document) not in (b"", b"null") else None


class SessionBegan(Record, frozen=True, kw_only=True):
    """A process took up the shard; `at` is the elapsed time of the sessions before it, in seconds."""

    at: float
    started: str
    """Date and time, ISO 8601."""


class CaseFinished(Record, frozen=True, kw_only=True):
    """A case that ran to its end, with a verdict for each check that judged it; with the case if one of them failed."""

    at: float
    """Elapsed time of the shard, in seconds, sessions before this one included."""
    number: int
    """Counts the cases of the shard, from 1."""
    digest: str
    scope: str
    verdicts: list[Verdict]
    case: Document = NO_CASE
    cells: list[str] = []
    """Cells of the input space that the case lies in."""


class CounterexampleShrunk(Record, frozen=True, kw_only=True):
    """A failing case as small as it gets, and what every check says of it."""

    at: float
    case: Document
    summary: str
    verdicts: list[Verdict]


class CorpusCaseRun(Record, frozen=True, kw_only=True):
    """A case of the corpus, run again: the verdict of the check that it was saved for, or of another that failed."""

    at: float
    file: str
    verdict: Verdict
    case: Document


class RoundsDone(Record, frozen=True, kw_only=True):
    """How far the seed stream of a property is used up."""

    at: float
    scope: str
    rounds: int
    executed: int
    """Examples drawn and judged in these rounds; an example drawn twice counts twice, and is judged once."""
    set_aside: list[str] = []


class SessionEnded(Record, frozen=True, kw_only=True):
    """The process ended by itself: because the time was up, because it was told to, or because nothing was left."""

    at: float
    reason: str


class Crash(Record, frozen=True, kw_only=True):
    """The process hung or died; `case` is what it was running, nothing if it was between two cases."""

    at: float
    how: str
    scope: str
    case: Document = NO_CASE


class Running(msgspec.Struct, frozen=True, kw_only=True):
    """First line of running.json; the case follows on the second."""

    number: int
    scope: str
    failures: int
    at: float
    attempt: int = 1


AnyRecord = SessionBegan | CaseFinished | CounterexampleShrunk | CorpusCaseRun | RoundsDone | SessionEnded | Crash
_decoder = msgspec.json.Decoder(AnyRecord)
_encoder = msgspec.json.Encoder()


def _line(record: Record) -> bytes:
    return _encoder.encode(record) + b"\n"


def append_durably(path: Path, record: Record) -> None:
    """Add one record to a file that is not kept open."""
    with path.open("ab") as file:
        file.write(_line(record))
        file.flush()
        os.fsync(file.fileno())


def read_records(path: Path) -> Iterator[AnyRecord]:
    """The records of a journal; a missing file has none, and a last line without its end was never finished.

    Raises:
        ValueError: a line in the middle is no record; the message names file, line and remedy.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                yield _decoder.decode(line)
            except (ValueError, RecursionError) as error:
                reason = " ".join(str(error).split())
                raise ValueError(f"{path}:{number}: not a record of a journal ({reason}); leave it out") from error


def read_running(folder: Path) -> tuple[Running, AnyCase | None] | None:
    """What a shard runs, or ran when it died; None if that was nothing yet. A case cut off in writing is None."""
    try:
        head, _, document = (folder / RUNNING).read_bytes().partition(b"\n")
        running = msgspec.json.decode(head, type=Running)
    except (OSError, ValueError):
        return None
    try:
        return running, decode_case(document)
    except ValueError:
        return running, None


class Journal:
    """The open journal of a shard, for its only writer; a context manager.

    Raises:
        BlockingIOError: another process writes it.
    """

    def __init__(self, folder: Path, *, sync_each_case: bool = False) -> None:
        """Cut off a line that an earlier process did not finish, and continue its count of cases and of time.

        `sync_each_case` forces the case to the disk before it runs: where a kernel can take the machine down.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._path, self._sync_each_case = folder / JOURNAL, sync_each_case
        in_flight = read_running(folder)
        self._journal = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        _lock(self._journal)
        _cut_torn_line(self._journal)
        self._running = os.open(folder / RUNNING, os.O_RDWR | os.O_CREAT, 0o644)
        os.ftruncate(self._running, 0)
        self.number, self.failures, self._before = 0, 0, 0.0
        self.past: list[AnyRecord] = list(read_records(self._path))
        for record in self.past:
            self._before = max(self._before, record.at)
            if isinstance(record, CaseFinished):
                self.number = record.number
            self.failures += isinstance(record, CounterexampleShrunk)
        unfinished = in_flight is not None and in_flight[0].number > self.number
        self.unfinished = in_flight if unfinished else None
        """What ran when an earlier session was killed together with its watchdog."""
        self._started = self._synced = time.monotonic()

    @property
    def elapsed(self) -> float:
        """Seconds that the shard has run, sessions before this one included."""
        return self._before + time.monotonic() - self._started

    def begin(self, case: AnyCase, attempt: int = 1) -> None:
        """Write down the case that runs next; `attempt` counts the sessions that were killed while it ran, and this."""
        self.number += 1
        head = Running(number=self.number, scope=case.scope, failures=self.failures, at=self.elapsed, attempt=attempt)
        content = _encoder.encode(head) + b"\n" + _encoder.encode(case)
        os.ftruncate(self._running, 0)
        os.pwrite(self._running, content, 0)
        if self._sync_each_case:
            os.fsync(self._running)

    def finish(self, case: AnyCase, verdicts: Sequence[Verdict], cells: Sequence[str] = ()) -> None:
        """Write down what became of it."""
        failed = any(verdict.status is Status.FAILED for verdict in verdicts)
        self.write(
            CaseFinished(
                at=self.elapsed,
                number=self.number,
                digest=case_digest(case),
                scope=case.scope,
                verdicts=[_told_briefly(verdict) for verdict in verdicts],
                case=document_of(case) if failed else NO_CASE,
                cells=list(cells),
            )
        )

    def write(self, record: Record) -> None:
        """Append one record; it is on the disk within a second, or at once if the machine may die with the case."""
        os.write(self._journal, _line(record))
        self.failures += isinstance(record, CounterexampleShrunk)
        if self._sync_each_case or time.monotonic() - self._synced >= SYNC_SECONDS:
            os.fsync(self._journal)
            self._synced = time.monotonic()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        os.fsync(self._journal)
        os.close(self._journal)
        os.close(self._running)


def _told_briefly(verdict: Verdict) -> Verdict:
    """What a passed check means is known from its name."""
    return msgspec.structs.replace(verdict, summary="") if verdict.status is Status.PASSED else verdict


def _lock(handle: int) -> None:
    try:
        import fcntl  # absent on Windows, where nothing else is
    except ImportError:
        return
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _cut_torn_line(handle: int) -> None:
    """Drop what follows the last line end, else the next record would be glued to it."""
    size = os.fstat(handle).st_size
    position = size
    while position:
        start = max(0, position - 65536)
        block = os.pread(handle, position - start, start)
        end = block.rfind(b"\n")
        if end >= 0:
            position = start + end + 1
            break
        position = start
    if position != size:
        os.ftruncate(handle, position)
