"""A fuzz campaign on this machine: starts the shards, watches them, tells what they find as a stream of events.

Everything that is found is in the shards' journals; this process only watches. So it may be killed at any moment, and
the same campaign started again on the same folder goes on: with the time that is left, where the shards stopped.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import msgspec

from dsv32_fuzz.campaigns.causes import case_digest
from dsv32_fuzz.campaigns.corpus import Corpus
from dsv32_fuzz.campaigns.journal import (
    JOURNAL,
    CounterexampleShrunk,
    Crash,
    case_in,
    document_of,
    read_records,
)
from dsv32_fuzz.campaigns.ledger import Ledger, quarantine, witnesses
from dsv32_fuzz.campaigns.recorded import choose
from dsv32_fuzz.campaigns.shards import SPEC, CampaignSpec, CorpusCase, ShardPlan, read_spec, shard_folder, write_inputs
from dsv32_fuzz.campaigns.watchdog import SHARD_COMMAND, Watched
from dsv32_fuzz.case import decode_case
from dsv32_fuzz.events import CounterexampleFound, Event, PhaseStarted, Progress, RunFinished
from dsv32_fuzz.targets import Target, release_of

POLL_SECONDS = 0.25
PROGRESS_SECONDS = 1.0


class FuzzProfile(msgspec.Struct, frozen=True, kw_only=True):
    """How long a campaign takes by default, and what it promises."""

    seconds: float
    min_examples: int
    """Of every property, over all shards."""


FUZZ_PROFILES: dict[str, FuzzProfile] = {
    "ci": FuzzProfile(seconds=120, min_examples=20),
    "nightly": FuzzProfile(seconds=1800, min_examples=100),
    "deep": FuzzProfile(seconds=8 * 3600, min_examples=1000),
}
CASE_SECONDS = 120.0
"""A case that runs longer hangs; compiling a kernel for the first time is within it."""


@dataclass(frozen=True, kw_only=True)
class FuzzPlan:
    """A campaign, or a machine's part of one."""

    folder: Path
    seconds: float
    workers: int = 1
    """Shards that run at the same time on this machine."""
    part: int = 0
    """This machine's number among `parts`; it runs the shards part * workers, ... of parts * workers."""
    parts: int = 1

    @property
    def of(self) -> int:
        """Shards of the whole campaign."""
        return self.parts * self.workers

    @property
    def numbers(self) -> list[int]:
        """This machine's shards."""
        return [self.part * self.workers + worker for worker in range(self.workers)]


def make_spec(
    target: Target,
    profile: str,
    *,
    seed: int,
    names: Sequence[str] = (),
    case_seconds: float = CASE_SECONDS,
    examples: str = "",
    arguments: Mapping[str, str] = MappingProxyType({}),
    ledger: Ledger | None = None,
    ledger_folder: Path = Path(),
) -> CampaignSpec:
    """The campaign of a profile over a target; `names` narrows it to traffic classes or checks.

    Raises:
        ValueError: an unknown profile or name, or a ledger whose witnesses are no cases.
    """
    if profile not in FUZZ_PROFILES:
        raise ValueError(f"unknown profile {profile!r}; choose one of {', '.join(FUZZ_PROFILES)}")
    return CampaignSpec(
        target=target.name,
        options=target.options,
        arguments=dict(arguments),
        release=release_of(target),
        evidence=target.evidence,
        profile=profile,
        seed=seed,
        properties=choose(target, names),
        min_examples=FUZZ_PROFILES[profile].min_examples,
        case_seconds=case_seconds,
        examples=examples,
        quarantine=quarantine(ledger, ledger_folder) if ledger else {},
    )


def cases_to_run(
    spec: CampaignSpec, target: Target, corpus: Corpus, ledger: Ledger | None, ledger_folder: Path
) -> list[CorpusCase]:
    """The corpus, and the witnesses of the ledger that belong to this target and these options.

    Raises:
        ValueError: a file that is no case, or not one of a check that is known.
    """
    checks = {check for checks in spec.properties.values() for check in checks}
    cases = corpus.cases(target, checks)
    known = {_identity(entry) for entry in cases}
    for entry, case in witnesses(ledger, ledger_folder) if ledger else ():
        own = (case.target, case.options) == (spec.target, spec.options) and case.check in checks
        if own and not entry.quarantine and (case_digest(case), case.check) not in known:
            known.add((case_digest(case), case.check))
            file = f"{ledger_folder}/{case.check}-{case_digest(case)[:6]}"
            cases.append(CorpusCase(file=file, case=document_of(case)))
    return cases


def _identity(entry: CorpusCase) -> tuple[str, str]:
    case = decode_case(bytes(entry.case))
    return case_digest(case), case.check


def prepare(folder: Path, spec: CampaignSpec, cases: Sequence[CorpusCase]) -> None:
    """Make a campaign's folder, or see that it holds this very campaign, which then goes on.

    Raises:
        ValueError: it holds something else, or another campaign; the message names the remedy.
    """
    if (folder / SPEC).exists():
        there = read_spec(folder)
        if msgspec.structs.replace(there, quarantine={}) != msgspec.structs.replace(spec, quarantine={}):
            raise ValueError(f"{folder} holds a campaign with other settings; choose a new folder with --out")
    elif folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty and holds no campaign; choose a new folder with --out")
    write_inputs(folder, spec, cases)


def elapsed(folder: Path, numbers: Sequence[int]) -> float:
    """Seconds that the longest of the shards has run."""
    journals = [shard_folder(folder, number) / JOURNAL for number in numbers]
    return max((record.at for path in journals for record in read_records(path)), default=0.0)


@dataclass
class _Tail:
    """The counterexamples that were added to a shard's journal since the last look."""

    path: Path
    _offset: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._offset = self.path.stat().st_size if self.path.exists() else 0

    def __iter__(self) -> Iterator[CounterexampleFound]:
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                if b'"CounterexampleShrunk"' in line[:40]:
                    yield _found(msgspec.json.decode(line, type=CounterexampleShrunk))


def _found(record: CounterexampleShrunk) -> CounterexampleFound:
    case = case_in(record.case)
    assert case is not None
    return CounterexampleFound(case=case, summary=record.summary, verdicts=record.verdicts)


def fuzz(plan: FuzzPlan, *, command: Sequence[str] = SHARD_COMMAND) -> Generator[Event, None, None]:
    """Run this machine's shards of the campaign that `prepare` laid out; the last event is `RunFinished`.

    Ctrl-C, raised inside the stream, ends it early: every shard finishes its case and its journal.
    """
    started, interrupted = time.monotonic(), False
    spec = read_spec(plan.folder)
    left = max(0.0, plan.seconds - elapsed(plan.folder, plan.numbers))
    until = time.time() + left
    yield PhaseStarted(phase="fuzz", title=f"search {len(spec.properties)} properties", seconds=left)
    plans = [ShardPlan(folder=plan.folder, shard=k, of=plan.of, until=until) for k in plan.numbers]
    shards = [Watched(shard, spec.case_seconds, command) for shard in plans]
    tails = [_Tail(shard.plan.own_folder / JOURNAL) for shard in shards]
    try:
        if left > 0:
            for shard in shards:
                shard.start()
            yield from _watch(shards, tails, plan.seconds)
    except KeyboardInterrupt:
        interrupted = True
        yield from _stop(shards, tails)
    finally:
        for shard in shards:
            shard.kill()
    yield RunFinished(seconds=time.monotonic() - started, interrupted=interrupted)


def _watch(shards: Sequence[Watched], tails: Sequence[_Tail], seconds: float) -> Iterator[Event]:
    """Poll until every shard has ended."""
    told = 0.0
    while any(shard.alive for shard in shards):
        yield from _look(shards, tails)
        if time.monotonic() - told >= PROGRESS_SECONDS:
            told = time.monotonic()
            yield _progress(shards, seconds)
        time.sleep(POLL_SECONDS)
    yield from _look(shards, tails)
    yield _progress(shards, seconds)


def _look(shards: Sequence[Watched], tails: Sequence[_Tail]) -> Iterator[Event]:
    for shard, tail in zip(shards, tails, strict=True):
        yield from tail
        crash = shard.poll()
        if crash is not None:
            yield from _told(crash)


def _told(crash: Crash) -> Iterator[CounterexampleFound]:
    case = case_in(crash.case)
    if case is not None:
        yield CounterexampleFound(case=case, summary=f"the process {crash.how}", verdicts=[])


def _stop(shards: Sequence[Watched], tails: Sequence[_Tail]) -> Iterator[Event]:
    for shard in shards:
        shard.stop()
    while any(shard.alive for shard in shards):
        yield from _look(shards, tails)
        time.sleep(POLL_SECONDS)


def _progress(shards: Sequence[Watched], seconds: float) -> Progress:
    running = [shard.running for shard in shards if shard.running is not None]
    cases, failures = sum(r.number for r in running), sum(r.failures for r in running)
    left = max(0.0, *(shard.plan.left for shard in shards))
    done = 1.0 - left / seconds if seconds else 1.0
    where = ", ".join(dict.fromkeys(r.scope for r in running))
    text = f"{cases} cases, {failures} counterexamples" + (f", in {where}" if where else "")
    return Progress(phase="fuzz", done=min(1.0, max(0.0, done)), text=text)
