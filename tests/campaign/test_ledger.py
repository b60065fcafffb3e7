"""The ledger: what it covers, and everything that makes it fail a campaign."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest
from campaign_world import number_case

from dsv32_fuzz.campaigns.causes import case_digest
from dsv32_fuzz.campaigns.ledger import MAX_ENTRIES, judge_ledger, quarantine, read_ledger
from dsv32_fuzz.case import save_case
from dsv32_fuzz.verdict import Status, Verdict

DAY = datetime.date(2026, 12, 1)
ENTRY = """
[[failure]]
check = "even"
cases = ["even.json"]
reason = "the key forgets the number"
reference = "https://github.com/vllm-project/vllm/pull/47766"
owner = "attention team"
expires = 2027-01-31
"""
CASE = number_case("even", 1002)


def ledger_in(folder: Path, text: str = ENTRY) -> Path:
    save_case(CASE, folder / "even.json")
    path = folder / "ledger.toml"
    path.write_text(text)
    return path


def judged(folder: Path, status: Status, text: str = ENTRY, day: datetime.date = DAY):  # type: ignore[no-untyped-def]
    ledger = read_ledger(ledger_in(folder, text), DAY)
    verdict = Verdict(check="even", status=status, summary="number 1002 is too large")
    return judge_ledger(ledger, folder, {(case_digest(CASE), "even"): verdict}, "in-tree", None, day)


def test_a_witness_that_fails_covers_its_cause(tmp_path: Path) -> None:
    found = judged(tmp_path, Status.FAILED)
    assert found.problems == []
    assert found.causes == {"even: number # is too large": "https://github.com/vllm-project/vllm/pull/47766"}


@pytest.mark.parametrize("status", [Status.PASSED, Status.MISTRUSTED, Status.SKIPPED])
def test_an_unexpected_pass_is_a_problem(tmp_path: Path, status: Status) -> None:
    found = judged(tmp_path, status)
    assert found.causes == {}
    assert found.problems == [f"even is listed as FAILED but a case of it is {status.value} even: remove the entry"]


def test_the_allowed_verdict_may_be_mistrusted(tmp_path: Path) -> None:
    text = ENTRY + 'allowed = "MISTRUSTED"\n'
    assert judged(tmp_path, Status.MISTRUSTED, text).problems == []
    assert len(judged(tmp_path, Status.FAILED, text).problems) == 1


def test_an_entry_covers_nothing_after_its_last_day(tmp_path: Path) -> None:
    assert judged(tmp_path, Status.FAILED, day=datetime.date(2027, 1, 31)).problems == []
    found = judged(tmp_path, Status.FAILED, day=datetime.date(2027, 2, 1))
    assert found.causes == {}
    assert found.problems == ["even expired on 2027-01-31 (attention team): the key forgets the number"]


def test_a_witness_for_other_options_or_one_that_was_not_run_says_nothing(tmp_path: Path) -> None:
    ledger = read_ledger(ledger_in(tmp_path), DAY)
    for runs, target in (({}, "in-tree"), ({(case_digest(CASE), "even"): None}, "vllm")):
        found = judge_ledger(ledger, tmp_path, runs, target, None, DAY)  # type: ignore[arg-type]
        assert (found.causes, found.problems) == ({}, [])


def test_quarantine_is_of_a_case_or_of_a_check(tmp_path: Path) -> None:
    why = "the key forgets the number (https://github.com/vllm-project/vllm/pull/47766)"
    ledger = read_ledger(ledger_in(tmp_path, ENTRY + "quarantine = true\n"), DAY)
    assert quarantine(ledger, tmp_path) == {case_digest(CASE): why}
    whole = ENTRY.replace('cases = ["even.json"]', "quarantine = true")
    assert quarantine(read_ledger(ledger_in(tmp_path, whole), DAY), tmp_path) == {"even": why}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (("reason =", "because ="), "unknown field `because`"),
        (('reason = "the key forgets the number"', 'reason = " "'), "`reason` is empty"),
        (("owner =", "#"), "missing required field `owner`"),
        (("https:", "see "), "must be a public address"),
        (('cases = ["even.json"]', ""), "name a case that fails"),
        (("2027-01-31", '"soon"'), "Expected `date`|ISO8601|date"),
        (("2027-01-31", "2028-01-31"), "at most 183 days"),
        (("[[failure]]", "[[failure"), "not a ledger"),
        (("owner", 'allowed = "PASSED"\nowner'), "Invalid enum value|PASSED"),
    ],
)
def test_a_bad_ledger_is_one_line(tmp_path: Path, change: tuple[str, str], told: str) -> None:
    path = ledger_in(tmp_path, ENTRY.replace(*change))
    with pytest.raises(ValueError, match=told) as caught:
        read_ledger(path, DAY)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(str(path))


def test_the_size_is_capped_and_a_missing_file_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="repair something first"):
        read_ledger(ledger_in(tmp_path, ENTRY * (MAX_ENTRIES + 1)), DAY)
    with pytest.raises(ValueError, match="cannot be read"):
        read_ledger(tmp_path / "missing.toml", DAY)


def test_a_witness_of_another_check_is_refused(tmp_path: Path) -> None:
    ledger = read_ledger(ledger_in(tmp_path, ENTRY.replace('check = "even"', 'check = "odd"')), DAY)
    with pytest.raises(ValueError, match="was saved for even"):
        quarantine(ledger, tmp_path)
