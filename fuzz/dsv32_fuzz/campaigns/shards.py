"""One shard of a campaign: a process that searches every property in turn, and writes down whatever it does.

A property is sharded by example. Every shard searches every property, each with its own stream of seeds: round r of
property p on shard k is seeded with a hash of (campaign seed, p, k, r). So no shard needs to know how many there are,
more shards can be added later, and the union of what they ran is what one would have run. Two shards may still draw the
same small case; cases are told apart by a digest of what they run, and a merge counts each once.

A shard is one process with one thread. It is started, watched and restarted by `campaigns.watchdog`; what it did is
in its journal (`campaigns.journal`), from which it also resumes.
"""

from __future__ import annotations

import argparse
import datetime
import faulthandler
import hashlib
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from dsv32_fast.options import Options
from dsv32_fuzz.campaigns.causes import case_digest
from dsv32_fuzz.campaigns.journal import (
    CRASHES,
    AnyRecord,
    CaseFinished,
    CorpusCaseRun,
    CounterexampleShrunk,
    Crash,
    Journal,
    RoundsDone,
    SessionBegan,
    SessionEnded,
    append_durably,
    case_in,
    document_of,
    read_records,
)
from dsv32_fuzz.campaigns.processes import die_with_parent, limit_threads
from dsv32_fuzz.campaigns.recorded import Recorded, StopRequested, selected
from dsv32_fuzz.campaigns.shared_examples import open_examples
from dsv32_fuzz.case import AnyCase, decode_case, write_atomically
from dsv32_fuzz.checks import told
from dsv32_fuzz.events import CounterexampleFound, Event
from dsv32_fuzz.search.explore import SHRINK_SECONDS, Search
from dsv32_fuzz.search.replay import replay_on
from dsv32_fuzz.targets import Target, registry
from dsv32_fuzz.targets.intree import InTreeTarget

SPEC, CORPUS = "campaign.json", "corpus.jsonl"
LONGEST_SLICE, SHORTEST_SLICE = 10.0, 0.5
REPEATS = 2
"""How often a check may shrink to a cause that is known, before it is set aside on the shard."""
ATTEMPTS = 3
"""Sessions that may die in one case before it is taken for the one that kills them."""


class CampaignSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a campaign is: shards of equal specs are one campaign, however long and wherever they ran."""

    format: Literal["dsv32-campaign/1"] = "dsv32-campaign/1"
    target: str = "in-tree"
    options: Options | None = None
    arguments: dict[str, str] = {}
    """What another target than the in-tree one is opened with, such as the path of an installation."""
    release: str = ""
    """Release and commit of another target, where it tells them."""
    evidence: str = "emulated"
    profile: str
    seed: int
    properties: dict[str, tuple[str, ...]]
    """Scope of each property that is searched, and the checks that judge it."""
    min_examples: int
    """Examples that every property gets in the whole campaign, else its verdict is MISTRUSTED."""
    case_seconds: float
    """A case that runs longer hangs."""
    examples: str = ""
    """Where Hypothesis' own examples are shared, empty if they are not."""
    quarantine: dict[str, str] = {}
    """Digests of cases, or names of checks, that are not run; and why."""


class CorpusCase(msgspec.Struct, frozen=True, kw_only=True):
    """A case to run again, with the file that it came from."""

    file: str
    case: msgspec.Raw


@dataclass(frozen=True, kw_only=True)
class ShardPlan:
    """Which shard this is, and until when it runs."""

    folder: Path
    """The campaign's: it holds campaign.json, corpus.jsonl and a folder for each shard."""
    shard: int
    of: int
    until: float
    """Seconds since the epoch."""

    @property
    def own_folder(self) -> Path:
        """Where the shard's journal lies."""
        return shard_folder(self.folder, self.shard)

    @property
    def left(self) -> float:
        """Seconds that are left, negative if the time is up."""
        return self.until - time.time()


def shard_folder(folder: Path, shard: int) -> Path:
    """The folder of one shard of the campaign in `folder`."""
    return folder / f"shard-{shard:04d}"


def read_spec(folder: Path) -> CampaignSpec:
    """The campaign in a folder.

    Raises:
        ValueError: none, or one that is damaged; the message names the remedy.
    """
    path = folder / SPEC
    try:
        return msgspec.json.decode(path.read_bytes(), type=CampaignSpec)
    except OSError as error:
        raise ValueError(
            f"{folder}: no campaign in it ({error.strerror}); give a folder that `dsv32 fuzz` made"
        ) from error
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path}: not a campaign ({reason}); give a folder that `dsv32 fuzz` made") from error


def write_inputs(folder: Path, spec: CampaignSpec, corpus: Iterable[CorpusCase]) -> None:
    """What shards read: the campaign, and the cases that are run again first."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / CORPUS, b"".join(msgspec.json.encode(case) + b"\n" for case in corpus))
    write_atomically(folder / SPEC, msgspec.json.format(msgspec.json.encode(spec), indent=2) + b"\n")


def open_target(name: str, options: Options | None, arguments: Mapping[str, str]) -> Target:
    """The target of a campaign: the in-tree path with its options, or another one with its own arguments.

    Raises:
        ValueError: no target of that name, or one that cannot be opened.
    """
    if name == registry.IN_TREE:
        if options is None or arguments:
            raise ValueError(f"the in-tree path takes options, and no {', '.join(arguments) or 'other argument'}")
        return InTreeTarget(options)
    given: dict[str, Any] = dict(arguments)
    return registry.open_target(name, **given)


def round_seed(seed: int, scope: str, shard: int, number: int) -> int:
    """The seed of one Hypothesis round: every round of every property on every shard has its own."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{scope}/{shard}/{number}".encode(), digest_size=8).digest(), "big")


@dataclass
class Shard:
    """The work of one shard, on an open journal."""

    plan: ShardPlan
    spec: CampaignSpec
    target: Target
    journal: Journal
    quarantine: dict[str, str]
    properties: list[Recorded] = field(init=False)
    searches: list[Search] = field(init=False)

    def __post_init__(self) -> None:
        """Take the searches up where the journal left them; shards begin with different properties."""
        chosen = selected(self.target, self.spec.properties)
        turn = self.plan.shard * max(1, len(chosen) // max(1, self.plan.of)) % max(1, len(chosen))
        chosen = chosen[turn:] + chosen[:turn]
        self.properties = [Recorded(searched, self.journal, self.quarantine) for searched in chosen]
        self.searches = [self._search(recorded) for recorded in self.properties]
        by_scope = {s.searched.scope: (p, s) for p, s in zip(self.properties, self.searches, strict=True)}
        for record in self.journal.past:
            _restore(record, by_scope)

    def _search(self, recorded: Recorded) -> Search:
        scope, shard, seed = recorded.scope, self.plan.shard, self.spec.seed
        return Search(
            recorded,
            lambda number: round_seed(seed, scope, shard, number),
            repeats=REPEATS,
            database=open_examples(self.spec.examples, scope),
        )

    def run(self, corpus: Sequence[CorpusCase]) -> str:
        """Work until the time is up; returns why the work ended."""
        try:
            self._run_unfinished()
            self._run_corpus(corpus)
            return self._search_all()
        except StopRequested:
            return "interrupted"

    def _run_unfinished(self) -> None:
        """A case that a killed session was in runs first; one that kills session after session is written down."""
        if self.journal.unfinished is None:
            return
        running, case = self.journal.unfinished
        judge = next((p for p in self.properties if case is not None and p.scope == case.scope), None)
        if case is None or judge is None:
            return
        if running.attempt >= ATTEMPTS:
            how = f"{running.attempt} sessions ended while it ran, each together with its watchdog"
            crash = Crash(at=self.journal.elapsed, how=how, scope=case.scope, case=document_of(case))
            append_durably(self.plan.own_folder / CRASHES, crash)
            self.quarantine[case_digest(case)] = how
        else:
            judge.judge(case, judge.checks, attempt=running.attempt + 1)

    def _run_corpus(self, corpus: Sequence[CorpusCase]) -> None:
        """Run this shard's part of the corpus; on a resume, what is left of it."""
        done = {record.file for record in self.journal.past if isinstance(record, CorpusCaseRun)}
        # Where shards go on being added, as on a cluster, those beyond the first `of` have no part left.
        for entry in corpus[self.plan.shard :: self.plan.of] if self.plan.shard < self.plan.of else ():
            if entry.file in done or self.plan.left <= 0:
                continue
            case = decode_case(bytes(entry.case))
            verdict = replay_on(case, self.target, lambda p: Recorded(p, self.journal, self.quarantine))
            self.journal.write(
                CorpusCaseRun(at=self.journal.elapsed, file=entry.file, verdict=verdict, case=entry.case)
            )
            for search in self.searches:
                search.learn([verdict])

    def _search_all(self) -> str:
        """Round robin over the properties; in the first round each gets its minimum, within its share of the time."""
        at_least = -(-self.spec.min_examples // self.plan.of)
        todo = list(self.searches)
        usual = min(LONGEST_SLICE, max(SHORTEST_SLICE, self.plan.left / (4 * max(1, len(todo)))))
        for place, search in enumerate(self.searches):
            share = self.plan.left / (len(self.searches) - place)
            self._slice(search, min(usual, share), at_least, share)
        while todo and self.plan.left > 0:
            todo = [search for search in todo if self._slice(search, usual, at_least, usual)]
        return "nothing left to search" if not todo and self.plan.left > 0 else "time"

    def _slice(self, search: Search, seconds: float, at_least: int, at_most: float) -> bool:
        """One slice; False if the search came to its end: every check set aside, or nothing new to be drawn."""
        if self.plan.left <= 0:
            return True
        before = self.journal.number
        search.shrink_seconds = min(SHRINK_SECONDS, max(1.0, self.plan.left))
        try:
            for event in search.slice(min(seconds, self.plan.left), at_least, at_most=min(at_most, self.plan.left)):
                self._keep(search, event)
        except OSError:  # a full disk is no finding
            raise
        except Exception as error:  # one property that cannot be drawn from must not end the others' search
            how = f"cannot draw for {search.searched.scope}: {told(error).removeprefix('the target raised ')}"
            crash = Crash(at=self.journal.elapsed, how=how, scope=search.searched.scope)
            append_durably(self.plan.own_folder / CRASHES, crash)
            return False
        return bool(search.active) and (self.journal.number > before or search.executed < at_least)

    def _keep(self, search: Search, event: Event) -> None:
        if isinstance(event, CounterexampleFound):
            self.journal.write(
                CounterexampleShrunk(
                    at=self.journal.elapsed,
                    case=document_of(event.case),
                    summary=event.summary,
                    verdicts=event.verdicts,
                )
            )
        self.journal.write(
            RoundsDone(
                at=self.journal.elapsed,
                scope=search.searched.scope,
                rounds=search.rounds,
                executed=search.executed,
                set_aside=sorted(search.set_aside),
            )
        )


def _restore(record: AnyRecord, by_scope: Mapping[str, tuple[Recorded, Search]]) -> None:
    """Bring a property and its search to where an earlier session left them."""
    match record:
        case CaseFinished() if record.scope in by_scope:
            by_scope[record.scope][0].remember(record.digest, record.verdicts)
        case RoundsDone() if record.scope in by_scope:
            search = by_scope[record.scope][1]
            search.rounds, search.executed, search.set_aside = record.rounds, record.executed, {*record.set_aside}
        case CounterexampleShrunk():
            found = case_in(record.case)
            if found is not None and found.scope in by_scope:
                by_scope[found.scope][1].learn(record.verdicts)
        case CorpusCaseRun():
            for _, search in by_scope.values():
                search.learn([record.verdict])


def adopted(case: AnyCase, spec: CampaignSpec) -> AnyCase:
    """A case of the corpus with the target and the options of this campaign."""
    return msgspec.structs.replace(case, target=spec.target, options=spec.options)


def read_corpus(folder: Path) -> list[CorpusCase]:
    """The cases that the shards of a campaign run again first."""
    path = folder / CORPUS
    if not path.exists():
        return []
    return [msgspec.json.decode(line, type=CorpusCase) for line in path.read_bytes().splitlines()]


def known_crashers(folder: Path) -> Iterator[tuple[str, str]]:
    """Digests of the cases on which shards of this campaign died, and how."""
    for path in sorted(folder.glob(f"shard-*/{CRASHES}")):
        for record in read_records(path):
            if isinstance(record, Crash) and (case := case_in(record.case)) is not None:
                yield case_digest(case), record.how


def run_shard(plan: ShardPlan) -> None:
    """Run a shard in this process until its time is up or it is told to stop."""
    spec = read_spec(plan.folder)
    target = open_target(spec.target, spec.options, spec.arguments)
    with Journal(plan.own_folder, sync_each_case=target.evidence == "hardware") as journal:
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        journal.write(SessionBegan(at=journal.elapsed, started=now))
        shard = Shard(plan, spec, target, journal, {**spec.quarantine, **dict(known_crashers(plan.folder))})
        reason = shard.run(read_corpus(plan.folder))
        journal.write(SessionEnded(at=journal.elapsed, reason=reason))


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of a shard's process: `python -m dsv32_fuzz.campaigns.shards FOLDER SHARD OF UNTIL`."""
    parser = argparse.ArgumentParser(description="One shard of a campaign; `dsv32 fuzz` starts and watches it.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("shard", type=int)
    parser.add_argument("of", type=int)
    parser.add_argument("until", type=float)
    given = parser.parse_args(arguments)
    faulthandler.enable()  # a crash, and the abort that the watchdog sends on a hang, leave the stack in log.txt
    die_with_parent()
    limit_threads()
    signal.signal(signal.SIGTERM, lambda *_: Recorded.stop())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the campaign decides what an interrupt means
    run_shard(ShardPlan(folder=given.folder, shard=given.shard, of=given.of, until=given.until))


if __name__ == "__main__":
    main(sys.argv[1:])
