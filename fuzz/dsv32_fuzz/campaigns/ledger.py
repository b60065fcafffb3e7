"""The ledger of known failures: a TOML file of what may fail, why, until when, and who answers for it.

    [[failure]]
    check = "cache_transparency"
    cases = ["corpus/cache_transparency-mtp_decode-work-indptr-differs-1a2b3c.json"]
    allowed = "FAILED"
    reason = "the split cap is not in the key"
    reference = "https://github.com/vllm-project/vllm/pull/47766"
    owner = "attention team"
    expires = 2027-03-31

`cases` are witnesses, files beside the ledger: each is run by every campaign on the target and with the options that it
was saved with, and must give the allowed verdict; one that gives another is an unexpected pass, and fails the campaign,
as an expired entry does. A failure that a search finds is covered by an entry if it has the check and the cause of a
witness.

With `quarantine = true` the witnesses are not run at all, or the whole check if there are none: for what hangs or
crashes. The ledger is capped, so that it cannot become the place where failures go to be forgotten.
"""

from __future__ import annotations

import datetime
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from dsv32_fast.options import Options
from dsv32_fuzz.campaigns.causes import case_digest, cause_of
from dsv32_fuzz.case import AnyCase, load_case
from dsv32_fuzz.verdict import Status, Verdict

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MAX_ENTRIES = 20
LONGEST_DAYS = 183
"""An entry expires within half a year; whoever still needs it then looks at it again."""


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One known failure.

    Raises:
        ValueError: a text that is empty, a reference that is no address, or neither witness nor quarantine.
    """

    check: str
    reason: str
    reference: str
    owner: str
    expires: datetime.date
    cases: tuple[str, ...] = ()
    allowed: Literal["FAILED", "MISTRUSTED"] = "FAILED"
    quarantine: bool = False

    def __post_init__(self) -> None:
        """Refuse what says nothing."""
        for name in ("check", "reason", "owner"):
            if not getattr(self, name).strip():
                raise ValueError(f"`{name}` is empty")
        if not self.reference.startswith(("https://", "http://")):
            raise ValueError("`reference` must be a public address, https://...")
        if not self.cases and not self.quarantine:
            raise ValueError("`cases` is empty; name a case that fails, or set quarantine = true")

    def is_expired(self, day: datetime.date) -> bool:
        """Whether its last day is over."""
        return day > self.expires


class Ledger(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All known failures."""

    failure: tuple[Entry, ...] = ()


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """A ledger held against a target: the causes that it covers, and what is wrong with it."""

    causes: dict[str, str] = {}
    """`check: cause` to the reference of the entry that covers it."""
    problems: list[str] = []
    """Expired entries and unexpected passes, one line each."""


def read_ledger(path: Path, day: datetime.date | None = None) -> Ledger:
    """Read a ledger.

    Raises:
        ValueError: not a ledger, too many entries, or an expiry too far away; one line that names the place.
    """
    day = day or datetime.datetime.now(datetime.timezone.utc).date()
    try:
        ledger = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), Ledger)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); give a ledger of known failures") from error
    except ValueError as error:
        raise ValueError(f"{path}: not a ledger ({' '.join(str(error).split())}); see docs/fuzzing.md") from error
    if len(ledger.failure) > MAX_ENTRIES:
        raise ValueError(f"{path}: {len(ledger.failure)} entries, above {MAX_ENTRIES}; repair something first")
    for entry in ledger.failure:
        if (entry.expires - day).days > LONGEST_DAYS:
            raise ValueError(f"{path}: {entry.check} expires on {entry.expires}; at most {LONGEST_DAYS} days from now")
    return ledger


def witnesses(ledger: Ledger, folder: Path) -> list[tuple[Entry, AnyCase]]:
    """Each entry's cases, read from beside the ledger.

    Raises:
        ValueError: a file that is no case, or was saved for another check.
    """
    found = [(entry, load_case(folder / name)) for entry in ledger.failure for name in entry.cases]
    for entry, case in found:
        if case.check != entry.check:
            raise ValueError(f"a case of the ledger's entry for {entry.check} was saved for {case.check}; name another")
    return found


def quarantine(ledger: Ledger, folder: Path) -> dict[str, str]:
    """What must not be run, for `CampaignSpec.quarantine`.

    Raises:
        ValueError: a file that is no case, or was saved for another check.
    """
    cases = {case_digest(case): _why(entry) for entry, case in witnesses(ledger, folder) if entry.quarantine}
    whole = {entry.check: _why(entry) for entry in ledger.failure if entry.quarantine and not entry.cases}
    return {**cases, **whole}


def judge_ledger(
    ledger: Ledger,
    folder: Path,
    runs: Mapping[tuple[str, str], Verdict],
    target: str,
    options: Options | None,
    day: datetime.date | None = None,
) -> Judged:
    """What the ledger covers, by what became of its witnesses: `runs` holds verdicts by case digest and check.

    A witness for another target or other options, or one that was not run, says nothing.

    Raises:
        ValueError: a file that is no case, or was saved for another check.
    """
    day = day or datetime.datetime.now(datetime.timezone.utc).date()
    causes: dict[str, str] = {}
    problems = [
        f"{e.check} expired on {e.expires} ({e.owner}): {e.reason}" for e in ledger.failure if e.is_expired(day)
    ]
    for entry, case in witnesses(ledger, folder):
        verdict = runs.get((case_digest(case), case.check))
        silent = entry.quarantine or entry.is_expired(day) or verdict is None
        if silent or verdict is None or (case.target, case.options) != (target, options):
            continue
        if verdict.status is Status(entry.allowed) and verdict.check == entry.check:
            causes[cause_key(verdict.check, verdict.summary)] = entry.reference
        else:
            what = f"{verdict.status.value} {verdict.check}"
            problems.append(f"{entry.check} is listed as {entry.allowed} but a case of it is {what}: remove the entry")
    return Judged(causes=causes, problems=problems)


def cause_key(check: str, summary: str) -> str:
    """Check and cause in one text: two failures with the same are one."""
    return f"{check}: {cause_of(summary)}"


def _why(entry: Entry) -> str:
    return f"{entry.reason} ({entry.reference})"
