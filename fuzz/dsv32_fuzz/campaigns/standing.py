"""New, known, listed or fixed: a campaign's result held against the corpus' history and the ledger."""

from __future__ import annotations

from pathlib import Path

import msgspec

from dsv32_fuzz.campaigns.corpus import Corpus, LastTime, subject, today
from dsv32_fuzz.campaigns.journal import case_in
from dsv32_fuzz.campaigns.ledger import Judged, Ledger, cause_key, judge_ledger
from dsv32_fuzz.campaigns.result import CampaignResult, Failure
from dsv32_fuzz.verdict import Status


def assess(result: CampaignResult, corpus: Corpus, ledger: Ledger | None, ledger_folder: Path) -> CampaignResult:
    """Say of each failure whether it is new, known or listed, save its case in the corpus, and say what is fixed.

    The corpus' history is written, so that the next campaign knows.

    Raises:
        ValueError: a witness of the ledger is no case, or was saved for another check.
    """
    runs = {(run.digest, run.saved_for): run.verdict for run in result.corpus}
    judged = Judged()
    if ledger is not None:
        judged = judge_ledger(ledger, ledger_folder, runs, result.target, result.options)
    about = subject(result.target, result.options)
    last = corpus.last_time(about)
    seen = {f"{told.check}: {told.cause}": told.since for told in last.values() if told.failing}
    failures = [_placed(failure, seen, judged, corpus) for failure in result.failures]
    now, fixed = _what_became(result, last), []
    for failure in failures:
        if failure.file:
            cause = failure.cause.partition(": ")[2]
            told = LastTime(failing=True, since=failure.since, check=failure.check, cause=cause)
            now[Path(failure.file).name] = told
    fixed = sorted(file for file, told in now.items() if not told.failing and file in last and last[file].failing)
    corpus.record(about, now)
    return msgspec.structs.replace(
        result, failures=failures, fixed=fixed, problems=judged.problems, listed=judged.causes
    )


def _placed(failure: Failure, seen: dict[str, str], judged: Judged, corpus: Corpus) -> Failure:
    case = case_in(failure.case)
    file = failure.file if "/" in failure.file else str(corpus.folder / failure.file)
    if not Path(file).is_file():  # found just now, or in another place's corpus
        file = str(corpus.add(case, failure.summary)) if case is not None else ""
    standing = "listed" if failure.cause in judged.causes else "known" if failure.cause in seen else "new"
    return msgspec.structs.replace(
        failure,
        standing=standing,
        since=seen.get(failure.cause, today()),
        file=file,
        reference=judged.causes.get(failure.cause, ""),
    )


def _what_became(result: CampaignResult, last: dict[str, LastTime]) -> dict[str, LastTime]:
    """For each case of the corpus that ran: failing or not, since which day, and for what cause."""
    now: dict[str, LastTime] = {}
    for run in result.corpus:
        failing = run.verdict.status is Status.FAILED
        before = last.get(run.file)
        since = before.since if before is not None and before.failing == failing else today()
        cause = cause_key(run.verdict.check, run.verdict.summary).partition(": ")[2] if failing else ""
        now[run.file] = LastTime(failing=failing, since=since, check=run.verdict.check if failing else "", cause=cause)
    return now
