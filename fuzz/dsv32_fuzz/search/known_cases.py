"""Cases that are worth running again: a corpus, and the witnesses of a ledger of known failures.

Each is run on the target. A case that fails is allowed only if an entry of the ledger covers its check and cause; an
expired entry, and a witness that no longer gives what its entry says, are failures of the ledger itself.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dsv32_fuzz.campaigns.causes import case_digest
from dsv32_fuzz.campaigns.corpus import Corpus
from dsv32_fuzz.campaigns.ledger import Judged, Ledger, cause_key, judge_ledger, quarantine, read_ledger, witnesses
from dsv32_fuzz.case import AnyCase, load_case
from dsv32_fuzz.events import CounterexampleFound, Event, PhaseStarted, Progress, VerdictReached
from dsv32_fuzz.search.replay import replay_on
from dsv32_fuzz.targets import Target
from dsv32_fuzz.verdict import Status, Verdict

PHASE = "corpus"
CASES, LEDGER = "corpus_cases", "ledger"
MAX_SHOWN = 5
"""Failing cases that are kept in the bundle; all are counted."""


@dataclass(frozen=True, kw_only=True)
class KnownCases:
    """A folder of cases, a ledger, or both; see that they can be read before a long run, by `checked`."""

    corpus: Path | None = None
    ledger: Path | None = None

    def checked(self, target: Target) -> KnownCases:
        """Itself.

        Raises:
            ValueError: a folder without a case, a file that is no case or not one that `target` can run, or no ledger.
        """
        if self.corpus is not None:
            corpus = Corpus(self.corpus)
            if not corpus.files():
                raise ValueError(f"{self.corpus} holds no case; give a folder that a run saved cases in")
            corpus.cases(target, ())
        self.read()
        return self

    def read(self) -> tuple[Ledger, Path]:
        """The ledger, empty if there is none, and the folder beside which its witnesses lie."""
        if self.ledger is None:
            return Ledger(), Path()
        ledger = read_ledger(self.ledger)
        witnesses(ledger, self.ledger.parent)
        return ledger, self.ledger.parent


def known_cases(target: Target, known: KnownCases, day: datetime.date | None = None) -> Iterator[Event]:
    """A verdict about the cases of the corpus and one about the ledger, whichever is given, and what fails unlisted."""
    yield PhaseStarted(phase=PHASE, title="run the known cases again")
    ledger, beside = known.read()
    shelved = quarantine(ledger, beside)
    corpus = [load_case(path) for path in Corpus(known.corpus).files()] if known.corpus is not None else []
    runs: dict[tuple[str, str], tuple[AnyCase, Verdict]] = {}
    cases = [*corpus, *(case for _, case in witnesses(ledger, beside))]
    for number, case in enumerate(cases, 1):
        key = case_digest(case), case.check
        if key not in runs and key[0] not in shelved and case.check not in shelved:
            runs[key] = case, replay_on(case, target)
        yield Progress(phase=PHASE, done=number / len(cases), text=f"{number} of {len(cases)} cases")
    told = {key: verdict for key, (_, verdict) in runs.items()}
    judged = judge_ledger(ledger, beside, told, target.name, target.options, day)
    if known.corpus is not None:
        own = [runs[key] for case in corpus if (key := (case_digest(case), case.check)) in runs]
        failing = [(case, v) for case, v in own if v.status is Status.FAILED and not _listed(v, judged)]
        for case, verdict in failing[:MAX_SHOWN]:
            yield CounterexampleFound(case=case, summary=verdict.summary, verdicts=[verdict])
        yield VerdictReached(phase=PHASE, scope="cases", verdict=_of_corpus(corpus, own, failing))
    if known.ledger is not None:
        yield VerdictReached(phase=PHASE, scope="ledger", verdict=_of_ledger(ledger, judged))


def _listed(verdict: Verdict, judged: Judged) -> bool:
    return cause_key(verdict.check, verdict.summary) in judged.causes


def _of_corpus(
    corpus: list[AnyCase], own: list[tuple[AnyCase, Verdict]], failing: list[tuple[AnyCase, Verdict]]
) -> Verdict:
    failed = sum(verdict.status is Status.FAILED for _, verdict in own)
    tested = sum(verdict.status in (Status.PASSED, Status.FAILED) for _, verdict in own)
    counts = {"cases": len(corpus), "tested": tested, "failed": failed, "listed": failed - len(failing)}
    if failing:
        case, verdict = failing[0]
        status, summary = Status.FAILED, f"{len(failing)} fail unlisted, first {case.check}: {verdict.summary}"
    elif not tested:
        status, summary = Status.MISTRUSTED, f"none of {len(corpus)} cases tested anything on this target"
    else:
        status = Status.PASSED
        summary = f"{tested} of {len(corpus)} cases tested something; {failed} fail, each listed in the ledger"
    return Verdict(check=CASES, status=status, summary=summary, measured={**counts})


def _of_ledger(ledger: Ledger, judged: Judged) -> Verdict:
    counts = {"entries": len(ledger.failure), "covered_causes": len(judged.causes), "problems": len(judged.problems)}
    if not ledger.failure:
        return Verdict(check=LEDGER, status=Status.SKIPPED, summary="the ledger lists nothing", measured={**counts})
    status = Status.FAILED if judged.problems else Status.PASSED
    summary = "; ".join(judged.problems) or f"{len(ledger.failure)} entries, none expired, no unexpected pass"
    return Verdict(check=LEDGER, status=status, summary=summary, measured={**counts})
