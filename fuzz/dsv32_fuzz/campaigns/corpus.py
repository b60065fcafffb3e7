"""The corpus: cases that are worth running again, each named by its purpose, and what became of each last time.

A folder of case files, as `dsv32 replay` takes them, and `history.json`: for each target with its options, which cases
failed when they last ran, and since when. So a night can say which failures are new, which are known and which are
fixed. The folder is capped; what goes first is a case that no longer fails, the largest first.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from dsv32_fast.options import Options, describe
from dsv32_fuzz.campaigns.causes import case_digest, purpose
from dsv32_fuzz.campaigns.journal import document_of
from dsv32_fuzz.campaigns.shards import CorpusCase
from dsv32_fuzz.case import AnyCase, InputCase, load_case, save_case, write_atomically
from dsv32_fuzz.checks.catalogue import INPUT_CHECKS_BY_NAME
from dsv32_fuzz.search.properties import property_of
from dsv32_fuzz.targets import Target

HISTORY = "history.json"
MAX_FILES, MAX_BYTES = 1000, 32 * 2**20


class LastTime(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a case when it last ran: whether it failed, since which day, and for what cause."""

    failing: bool
    since: str
    check: str = ""
    cause: str = ""


class History(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """For each target with its options: file name to what became of it."""

    format: Literal["dsv32-history/1"] = "dsv32-history/1"
    cases: dict[str, dict[str, LastTime]] = {}


def subject(target: str, options: Options | None) -> str:
    """A target and its options in words, as the key of a history."""
    return f"{target} {describe(options)}" if options else target


def today() -> str:
    """The date in UTC."""
    return datetime.datetime.now(datetime.timezone.utc).date().isoformat()


@dataclass
class Corpus:
    """A folder of cases.

    Raises:
        ValueError: the history is damaged.
    """

    folder: Path
    max_files: int = MAX_FILES
    max_bytes: int = MAX_BYTES

    def __post_init__(self) -> None:
        """Read the history; a folder that does not exist yet is an empty corpus."""
        path = self.folder / HISTORY
        try:
            self.history = msgspec.json.decode(path.read_bytes(), type=History) if path.exists() else History()
        except ValueError as error:
            raise ValueError(f"{path}: not a history ({' '.join(str(error).split())}); remove it") from error

    def files(self) -> list[Path]:
        """The case files, by name."""
        return sorted(path for path in self.folder.glob("*.json") if path.name != HISTORY)

    def cases(self, target: Target, checks: Iterable[str]) -> list[CorpusCase]:
        """The cases that were saved for one of `checks`, each seen to be runnable on `target`.

        Raises:
            ValueError: a file is no case, or not one of a check that is known; the message names it.
        """
        wanted = set(checks)
        loaded = [(path, load_case(path)) for path in self.files()]
        for path, case in loaded:
            _runnable(path, case, target)
        return [CorpusCase(file=p.name, case=document_of(case)) for p, case in loaded if case.check in wanted]

    def add(self, case: AnyCase, summary: str) -> Path:
        """Save a case under a name that says what it is for; the same case once."""
        self.folder.mkdir(parents=True, exist_ok=True)
        digest = case_digest(case)
        for path in self.folder.glob(f"*-{digest[:6]}.json"):
            known = load_case(path)
            if case_digest(known) == digest and known.check == case.check:
                return path
        path = self.folder / purpose(case, summary)
        save_case(case, path)
        return path

    def last_time(self, subject_: str) -> dict[str, LastTime]:
        """What became of each case with this target and these options."""
        return self.history.cases.get(subject_, {})

    def record(self, subject_: str, now: dict[str, LastTime]) -> None:
        """Remember what became of the cases that ran, drop what the cap drops, and write the history."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.history.cases[subject_] = {**self.last_time(subject_), **now}
        self._evict()
        names = {path.name for path in self.files()}
        kept = {s: {f: t for f, t in sorted(told.items()) if f in names} for s, told in self.history.cases.items()}
        self.history.cases = dict(sorted(kept.items()))
        write_atomically(
            self.folder / HISTORY, msgspec.json.format(msgspec.json.encode(self.history), indent=2) + b"\n"
        )

    def _evict(self) -> None:
        sizes = {path: path.stat().st_size for path in self.files()}
        failing = {f for told in self.history.cases.values() for f, last in told.items() if last.failing}
        order = sorted(sizes, key=lambda path: (path.name in failing, -sizes[path], path.name))
        for path in order:
            if len(sizes) <= self.max_files and sum(sizes.values()) <= self.max_bytes:
                return
            path.unlink()
            del sizes[path]


def _runnable(path: Path, case: AnyCase, target: Target) -> None:
    try:
        property_of(case, target)
        if isinstance(case, InputCase):
            msgspec.convert(case.input, INPUT_CHECKS_BY_NAME[case.check].input_type)
    except ValueError as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())}; remove the file from the corpus") from error


def case_files(paths: Sequence[Path]) -> list[Path]:
    """The files of a list of files and folders; in a folder, every case.

    Raises:
        ValueError: a folder without a case.
    """
    found: list[Path] = []
    for path in paths:
        inside = Corpus(path).files() if path.is_dir() else [path]
        if not inside:
            raise ValueError(f"{path}: no case in this folder; give a case file, or a folder that a run saved cases in")
        found += inside
    return found
