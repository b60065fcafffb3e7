"""New, known, listed, fixed: from one night to the next."""

from __future__ import annotations

import datetime
from pathlib import Path

import msgspec
import pytest
from campaign_world import number_case

from dsv32_fuzz.campaigns.causes import case_digest, cause_of, purpose
from dsv32_fuzz.campaigns.corpus import HISTORY, Corpus, LastTime, case_files
from dsv32_fuzz.campaigns.journal import document_of
from dsv32_fuzz.campaigns.ledger import Entry, Ledger, cause_key
from dsv32_fuzz.campaigns.result import CampaignResult, CheckLine, CorpusRun, Failure
from dsv32_fuzz.campaigns.standing import assess
from dsv32_fuzz.case import load_case, save_case
from dsv32_fuzz.verdict import Status, Verdict
from dsv32_reports.campaign_text import result_lines

SUMMARY = "number 1002 is too large"
CASE = number_case("even", 1002)


def night(*, found: bool, corpus_status: Status | None = None, file: str = "") -> CampaignResult:
    """A night that found the failure or did not, and ran the corpus' file if there was one."""
    runs = []
    if corpus_status is not None:
        verdict = Verdict(check="even", status=corpus_status, summary=SUMMARY)
        runs = [CorpusRun(file=file, digest=case_digest(CASE), saved_for="even", verdict=verdict)]
    failure = Failure(
        check="even",
        scope="even",
        cause=cause_key("even", SUMMARY),
        summary=SUMMARY,
        standing="new",
        case=document_of(CASE),
        file=file if corpus_status is Status.FAILED else "",
    )
    status = Status.FAILED if found else Status.PASSED
    return CampaignResult(
        target="in-tree",
        options=None,
        evidence="emulated",
        profile="ci",
        seed=0,
        shards=[0],
        shard_seconds=1.0,
        cases=10,
        duplicates=0,
        crashes=0,
        lost_shards=[],
        lines=[CheckLine(check="even", scope="even", status=status, cases=10, summary="")],
        failures=[failure] if found else [],
        corpus=runs,
    )


def test_the_text_names_the_release_and_the_rows_of_a_failure() -> None:
    result = msgspec.structs.replace(night(found=True), target="vllm", release="0.24.0, commit 1a2b3c4d")
    lines = result_lines(result, rows={cause_key("even", SUMMARY): ["step 1: 1 of 2 rows lose keys of their own: 0"]})
    assert lines[0] == "FAILED  vllm 0.24.0, commit 1a2b3c4d, evidence level: emulated"
    assert "        step 1: 1 of 2 rows lose keys of their own: 0" in lines


def test_new_then_known_then_fixed_then_new_again(tmp_path: Path) -> None:
    nothing = Path()
    first = assess(night(found=True), Corpus(tmp_path), None, nothing)
    assert [failure.standing for failure in first.failures] == ["new"]
    file = Path(first.failures[0].file)
    assert load_case(file) == CASE
    assert first.status is Status.FAILED

    again = night(found=True, corpus_status=Status.FAILED, file=file.name)
    second = assess(again, Corpus(tmp_path), None, nothing)
    assert [failure.standing for failure in second.failures] == ["known"]
    assert second.failures[0].file == str(file)
    assert second.status is Status.FAILED  # known is not allowed

    repaired = night(found=False, corpus_status=Status.PASSED, file=file.name)
    third = assess(repaired, Corpus(tmp_path), None, nothing)
    assert third.fixed == [file.name]
    assert third.status is Status.PASSED
    assert assess(repaired, Corpus(tmp_path), None, nothing).fixed == []

    fourth = assess(again, Corpus(tmp_path), None, nothing)
    assert [failure.standing for failure in fourth.failures] == ["new"]
    assert Corpus(tmp_path).files() == [file]


def test_a_listed_failure_passes_and_its_unexpected_pass_fails(tmp_path: Path) -> None:
    save_case(CASE, tmp_path / "even.json")
    today = datetime.datetime.now(datetime.timezone.utc).date()
    entry = Entry(
        check="even",
        cases=("even.json",),
        reason="known",
        reference="https://example.org/1",
        owner="us",
        expires=today + datetime.timedelta(days=1),
    )
    ledger, corpus = Ledger(failure=(entry,)), Corpus(tmp_path / "corpus")
    listed = assess(night(found=True, corpus_status=Status.FAILED, file="ledger/even.json"), corpus, ledger, tmp_path)
    assert [(f.standing, f.reference) for f in listed.failures] == [("listed", "https://example.org/1")]
    assert listed.status is Status.MISTRUSTED  # the only check failed, so nothing is left that passed
    passed = assess(night(found=False, corpus_status=Status.PASSED, file="ledger/even.json"), corpus, ledger, tmp_path)
    assert passed.status is Status.FAILED
    assert "remove the entry" in passed.problems[0]


def test_the_history_is_of_a_target_with_its_options(tmp_path: Path) -> None:
    corpus = Corpus(tmp_path)
    path = corpus.add(CASE, SUMMARY)
    corpus.record("in-tree pr42982", {path.name: LastTime(failing=True, since="2026-11-30", check="even", cause="c")})
    assert Corpus(tmp_path).last_time("in-tree pr42982")[path.name].since == "2026-11-30"
    assert Corpus(tmp_path).last_time("in-tree pr47766") == {}


def test_the_same_case_is_saved_once_under_a_name_that_says_what_for(tmp_path: Path) -> None:
    corpus = Corpus(tmp_path)
    path = corpus.add(CASE, SUMMARY)
    assert path.name.startswith("even-number-is-too-large-")
    assert corpus.add(CASE, "in other words") == path
    assert len(corpus.files()) == 1


def test_the_cap_drops_what_passes_first_and_the_largest_of_it(tmp_path: Path) -> None:
    corpus = Corpus(tmp_path, max_files=2)
    failing = corpus.add(number_case("even", 2), "a failure")
    small = corpus.add(number_case("even", 4), "small")
    large = corpus.add(number_case("even", 10**30), "large")
    corpus.record("in-tree", {failing.name: LastTime(failing=True, since="2026-11-30")})
    assert corpus.files() == sorted([failing, small])
    assert not large.exists()
    by_size = Corpus(tmp_path, max_bytes=failing.stat().st_size)
    by_size.record("in-tree", {})
    assert by_size.files() == [failing]
    assert set(Corpus(tmp_path).last_time("in-tree")) == {failing.name}


def test_a_damaged_history_and_an_empty_folder_are_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no case in this folder"):
        case_files([tmp_path])
    (tmp_path / HISTORY).write_text("{")
    with pytest.raises(ValueError, match=r"not a history .*; remove it"):
        Corpus(tmp_path)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("step 1: 2047 of 2048 rows, first row 0", "step 7: 3 of 16 rows, first row 5"),
        ("worst 1.5e-3 at [1, 2, 3]", "worst 0.25 at [4, 5]"),
        ("pointer 0xdeadBEEF is -3", "pointer 0x1 is 12"),
        ("value nan", "value inf"),
    ],
)
def test_numbers_do_not_tell_causes_apart(one: str, other: str) -> None:
    assert cause_of(one) == cause_of(other)


def test_words_tell_causes_apart() -> None:
    assert cause_of("head 3: lost a slot") != cause_of("head 3: read a foreign slot")
    assert cause_of("fp8 differs") != cause_of("bf16 differs")  # a number inside a name is part of it


def test_the_name_of_a_case_is_a_plain_file_name() -> None:
    name = purpose(CASE, "../../etc: " + "words " * 50 + "\n<b>")
    assert "/" not in name
    assert len(name) < 100
