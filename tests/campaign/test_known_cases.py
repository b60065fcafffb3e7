"""Known cases in a sign-off: what fails must be listed, and what is listed must fail."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from dsv32_fast.batch import StepBatch
from dsv32_fast.options import PRESETS
from dsv32_fuzz.case import Case, save_case
from dsv32_fuzz.events import CounterexampleFound, Event, VerdictReached
from dsv32_fuzz.search.known_cases import CASES, LEDGER, KnownCases, known_cases
from dsv32_fuzz.targets.intree import InTreeTarget
from dsv32_fuzz.verdict import Status, Verdict

BROKEN, REPAIRED = (InTreeTarget(PRESETS[name]) for name in ("pr42982", "pr47766"))
DAY = datetime.date(2026, 12, 1)
Found = dict[str, Verdict]
STEPS = tuple(StepBatch(query_lens=(2,), seq_lens=(length,)) for length in (2048, 2049))
ENTRY = """
[[failure]]
check = "cache_transparency"
cases = ["corpus/one.json"]
reason = "the key forgets the rows"
reference = "https://github.com/vllm-project/vllm/pull/47766"
owner = "attention team"
expires = {expires}
"""


@pytest.fixture
def known(tmp_path: Path) -> KnownCases:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    case = Case(check="cache_transparency", scope="mtp_decode", options=BROKEN.options, steps=STEPS)
    save_case(case, corpus / "one.json")
    (tmp_path / "ledger.toml").write_text(ENTRY.format(expires=datetime.date.today() + datetime.timedelta(days=90)))
    return KnownCases(corpus=corpus, ledger=tmp_path / "ledger.toml")


def ran(
    target: InTreeTarget, known: KnownCases, day: datetime.date | None = None
) -> tuple[dict[str, Verdict], list[Event]]:
    events = list(known_cases(target, known, day))
    return {e.verdict.check: e.verdict for e in events if isinstance(e, VerdictReached)}, events


def test_a_failure_that_is_listed_is_allowed(known: KnownCases) -> None:
    found, events = ran(BROKEN, known.checked(BROKEN))
    assert found[CASES].status is found[LEDGER].status is Status.PASSED
    assert found[CASES].measured == {"cases": 1, "tested": 1, "failed": 1, "listed": 1}
    assert not any(isinstance(event, CounterexampleFound) for event in events)


def test_a_failure_that_is_not_listed_fails_and_is_kept(known: KnownCases) -> None:
    found, events = ran(BROKEN, KnownCases(corpus=known.corpus))
    assert list(found) == [CASES]
    assert found[CASES].status is Status.FAILED
    assert found[CASES].summary.startswith("1 fail unlisted, first cache_transparency: step 1")
    (kept,) = [event for event in events if isinstance(event, CounterexampleFound)]
    assert isinstance(kept.case, Case)
    assert kept.case.steps == STEPS


def test_an_empty_ledger_passes_nothing(known: KnownCases, tmp_path: Path) -> None:
    (tmp_path / "ledger.toml").write_text("")
    found, _ = ran(REPAIRED, KnownCases(ledger=tmp_path / "ledger.toml"))
    assert (found[LEDGER].status, found[LEDGER].summary) == (Status.SKIPPED, "the ledger lists nothing")


def test_an_expired_entry_allows_nothing(known: KnownCases) -> None:
    later = datetime.date.today() + datetime.timedelta(days=91)
    found, _ = ran(BROKEN, known, later)
    assert found[CASES].status is found[LEDGER].status is Status.FAILED
    assert "expired" in found[LEDGER].summary


def test_a_repaired_case_passes_and_an_entry_of_another_target_says_nothing(known: KnownCases) -> None:
    found, _ = ran(REPAIRED, known)
    assert found[CASES].status is found[LEDGER].status is Status.PASSED
    assert found[CASES].measured["failed"] == 0


def test_an_unexpected_pass_fails(known: KnownCases) -> None:
    assert known.corpus is not None
    case = Case(check="cache_transparency", scope="mtp_decode", options=REPAIRED.options, steps=STEPS[:1] * 2)
    save_case(case, known.corpus / "one.json")
    found, _ = ran(REPAIRED, known)
    assert found[LEDGER].status is Status.FAILED
    assert "remove the entry" in found[LEDGER].summary


def test_a_corpus_that_tests_nothing_is_mistrusted(known: KnownCases) -> None:
    assert known.corpus is not None
    nothing = Case(check="cache_transparency", scope="decode", options=REPAIRED.options, steps=STEPS[:1])
    save_case(nothing, known.corpus / "one.json")
    found, _ = ran(REPAIRED, KnownCases(corpus=known.corpus))
    assert found[CASES].status is Status.MISTRUSTED


def test_what_cannot_be_read_is_told_before_the_run(known: KnownCases, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no case"):
        KnownCases(corpus=tmp_path / "empty").checked(BROKEN)
    with pytest.raises(ValueError, match="give a ledger"):
        KnownCases(ledger=tmp_path / "none.toml").checked(BROKEN)
    assert known.corpus is not None
    (known.corpus / "two.json").write_text("{}")
    with pytest.raises(ValueError, match=r"two\.json"):
        known.checked(BROKEN)
