"""The sign-off: runs a campaign and keeps its events as they come. It never runs a check itself."""

from __future__ import annotations

import datetime
import fcntl
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from dsv32_fast.options import describe
from dsv32_fuzz.case import save_case
from dsv32_fuzz.events import (
    AnyEvent,
    CounterexampleFound,
    Event,
    EvidenceGiven,
    PhaseFinished,
    RunFinished,
    RunStarted,
)
from dsv32_fuzz.search.known_cases import KnownCases
from dsv32_fuzz.targets import Target, versions_of
from dsv32_reports.bundle import JOURNAL, MANIFEST
from dsv32_reports.fingerprint import DEVICE_STATE, device_fingerprint, fingerprint
from dsv32_reports.fold import Evidence
from dsv32_reports.interrupt import Interrupts
from dsv32_reports.json_file import journal_line, read_journal
from dsv32_reports.policy import DEFAULT, Policy

Listener = Callable[[Event], None]


def prepare_folder(folder: Path) -> None:
    """Make the bundle's folder, and see that it can be written, before anything long starts.

    Raises:
        ValueError: it holds something already, or cannot be written; the message names the remedy.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ValueError(
                f"{folder} is not empty; a sign-off never overwrites another: choose a new folder with --out"
            )
        (folder / "cases").mkdir()
    except OSError as error:
        raise ValueError(f"{folder} cannot be written ({error.strerror}); choose another folder with --out") from error


def new_id(options_text: str) -> str:
    """Time and options: readable, sortable, and distinct for two runs a second apart."""
    stamp = datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m%d-%H%M%S")
    return f"{options_text.replace(' ', '_').replace('=', '-')}-{stamp}"


def started(
    target: Target,
    *,
    seed: int,
    profile: str,
    policy: Policy = DEFAULT,
    approver: str = "",
    previous: dict[str, Any] | None = None,
    known: KnownCases | None = None,
) -> RunStarted:
    """The first event: what the run is made of, and on what."""
    release = versions_of(target).get(target.name, "")
    options_text = describe(target.options) if target.options else f"{target.name} {release}".strip()
    now = datetime.datetime.now(datetime.timezone.utc)
    return RunStarted(
        id=new_id(options_text),
        target=target.name,
        evidence=target.evidence,
        options=target.options,
        options_text=options_text,
        started=now.isoformat(timespec="seconds"),
        seed=seed,
        profile=profile,
        fingerprint=fingerprint() | target_fingerprint(target) | device_fingerprint(),
        policy=msgspec.to_builtins(policy),
        approver=approver,
        previous=previous,
        corpus=str(known.corpus.absolute()) if known and known.corpus else "",
        ledger=str(known.ledger.absolute()) if known and known.ledger else "",
    )


def known_of(first: RunStarted) -> KnownCases | None:
    """The corpus and the ledger that a run was started with."""
    if not first.corpus and not first.ledger:
        return None
    corpus, ledger = (Path(text) if text else None for text in (first.corpus, first.ledger))
    return KnownCases(corpus=corpus, ledger=ledger)


def target_fingerprint(target: Target) -> dict[str, str]:
    """What the target's own process runs, beside what the suite runs."""
    return {f"target {name}": version for name, version in versions_of(target).items()}


def run(
    first: RunStarted, campaign: Generator[Event, None, None], given: Iterable[EvidenceGiven] = ()
) -> Generator[Event, None, None]:
    """The events of a sign-off: what it is made of, evidence that was given, then the campaign."""
    yield first
    yield from given
    yield from campaign


def kept_events(folder: Path) -> list[AnyEvent]:
    """What a run that was stopped or killed leaves to be resumed: its events up to the last finished phase.

    Raises:
        ValueError: no such run in the folder, or one that is finished.
    """
    journal = folder / JOURNAL
    if not journal.is_file():
        raise ValueError(f"{folder} holds no {JOURNAL}; give the folder of a sign-off that was stopped")
    events = read_journal(journal)
    if not events or not isinstance(events[0], RunStarted):
        raise ValueError(f"{journal} does not begin with RunStarted; start a new sign-off")
    whole = (folder / MANIFEST).is_file()  # a full disk may have left the pages out
    if whole and any(isinstance(event, RunFinished) and not event.interrupted for event in events):
        raise ValueError(f"{folder} is finished; see its report.html, or start a new sign-off")
    given = 1
    while given < len(events) and isinstance(events[given], EvidenceGiven):
        given += 1
    ends = [number for number, event in enumerate(events, 1) if isinstance(event, PhaseFinished)]
    return events[: max(ends, default=given)]


def check_resumable(first: RunStarted, target: Target, folder: Path) -> None:
    """Only the same software on the same target may go on with a run.

    Raises:
        ValueError: something differs.
    """
    now = fingerprint() | target_fingerprint(target) | {"target": target.name}
    then = {name: value for name, value in first.fingerprint.items() if not name.startswith(DEVICE_STATE)}
    then |= {"target": first.target}
    changed = [name for name in now.keys() | then.keys() if now.get(name) != then.get(name)]
    if changed:
        raise ValueError(f"{folder} was made with another {', '.join(sorted(changed))}; start a new sign-off")


def collect(
    events: Generator[Event, None, None],
    folder: Path,
    listeners: Iterable[Listener],
    interrupts: Interrupts,
    kept: Sequence[Event] = (),
) -> Evidence:
    """Drain the stream: every event goes to the journal and the listeners first, then into the evidence.

    Raises:
        ValueError: another sign-off writes into this folder.
    """
    evidence = Evidence()
    listeners = list(listeners)
    with interrupts.noted(), _journal(folder, kept) as journal:
        for event in kept:
            evidence.add(event)
        for event in until_interrupted(events, interrupts):
            journal.write(journal_line(event))
            journal.flush()
            evidence.add(event)
            if isinstance(event, CounterexampleFound):
                save_case(event.case, folder / "cases" / f"{event.case.scope}-{event.case.check}.json")
            for listener in listeners:
                listener(event)
    return evidence


@contextmanager
def _journal(folder: Path, kept: Sequence[Event]) -> Iterator[BinaryIO]:
    """The journal with what is kept, locked, open for more; cases of what is not kept are gone."""
    with (folder / JOURNAL).open("ab") as journal:
        try:
            fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ValueError(f"another sign-off writes into {folder}; wait for it, or give another --out") from error
        lines = (folder / JOURNAL).read_bytes().splitlines(keepends=True) if kept else []
        if journal.tell():
            journal.truncate(sum(len(line) for line in lines[: len(kept)]))
        cases = {f"{e.case.scope}-{e.case.check}.json" for e in kept if isinstance(e, CounterexampleFound)}
        for path in folder.glob("cases/*"):
            if path.name not in cases:
                path.unlink()
        yield journal


def until_interrupted(events: Generator[Event, None, None], interrupts: Interrupts) -> Iterator[Event]:
    """The events; a noted interrupt is raised inside the stream, between two of them, once."""
    raised = False
    for event in events:
        yield event
        if interrupts.requested and not raised and not isinstance(event, RunFinished):
            raised = True
            yield events.throw(KeyboardInterrupt())
