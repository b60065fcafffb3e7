"""The journal: what is written is read, a torn end is dropped, and the case that runs is known."""

from __future__ import annotations

from pathlib import Path

import pytest
from campaign_world import number_case

from dsv32_fuzz.campaigns.journal import (
    JOURNAL,
    RUNNING,
    CaseFinished,
    Journal,
    RoundsDone,
    case_in,
    read_records,
    read_running,
)
from dsv32_fuzz.verdict import Status, Verdict

PASSED = Verdict(check="even", status=Status.PASSED, summary="all is well", measured={"n": 3})
FAILED = Verdict(check="even", status=Status.FAILED, summary="off by 1")


def finished(folder: Path) -> list[CaseFinished]:
    return [record for record in read_records(folder / JOURNAL) if isinstance(record, CaseFinished)]


def write_two(folder: Path) -> None:
    with Journal(folder) as journal:
        for number, verdict in ((2, PASSED), (4, FAILED)):
            case = number_case("even", number)
            journal.begin(case)
            journal.finish(case, [verdict])


def test_what_is_written_is_read(tmp_path: Path) -> None:
    write_two(tmp_path)
    first, second = finished(tmp_path)
    assert (first.number, second.number) == (1, 2)
    assert first.digest != second.digest
    assert first.verdicts == [Verdict(check="even", status=Status.PASSED, summary="", measured={"n": 3})]
    assert second.verdicts == [FAILED]
    assert case_in(first.case) is None
    assert case_in(second.case) == number_case("even", 4)


def test_a_journal_cut_anywhere_keeps_every_whole_line(tmp_path: Path) -> None:
    """Whatever byte a write stopped at, the lines before it are read, and the next record starts a line."""
    write_two(tmp_path / "whole")
    content = (tmp_path / "whole" / JOURNAL).read_bytes()
    for length in range(0, len(content) + 1, 7):
        folder = tmp_path / str(length)
        folder.mkdir()
        (folder / JOURNAL).write_bytes(content[:length])
        whole = content[:length].count(b"\n")
        assert len(finished(folder)) == whole
        with Journal(folder) as journal:
            assert journal.number == whole
            journal.write(RoundsDone(at=1.0, scope="even", rounds=5, executed=7))
        *before, last = read_records(folder / JOURNAL)
        assert (len(before), last) == (whole, RoundsDone(at=1.0, scope="even", rounds=5, executed=7))


def test_a_torn_line_longer_than_a_block_is_cut(tmp_path: Path) -> None:
    write_two(tmp_path)
    with (tmp_path / JOURNAL).open("ab") as file:
        file.write(b"x" * 200_000)
    with Journal(tmp_path) as journal:
        assert journal.number == 2
    assert len(finished(tmp_path)) == 2


def test_a_damaged_line_in_the_middle_is_one_line_with_its_place(tmp_path: Path) -> None:
    write_two(tmp_path)
    lines = (tmp_path / JOURNAL).read_bytes().splitlines(keepends=True)
    (tmp_path / JOURNAL).write_bytes(b'{"type": "Nonsense"}\n' + lines[1])
    with pytest.raises(ValueError, match=r"journal\.jsonl:1: not a record of a journal"):
        list(read_records(tmp_path / JOURNAL))


def test_a_case_is_written_down_before_it_runs(tmp_path: Path) -> None:
    case = number_case("even", 8)
    with Journal(tmp_path) as journal:
        journal.begin(case)
        found = read_running(tmp_path)
        assert found is not None
        assert (found[0].number, found[0].scope, found[1]) == (1, "even", case)
        assert finished(tmp_path) == []
    with Journal(tmp_path) as again:  # the session before ended in the case
        assert again.unfinished is not None
        assert again.unfinished[1] == case
        again.begin(case, attempt=2)
        again.finish(case, [PASSED])
    with Journal(tmp_path) as last:
        assert last.unfinished is None
        assert last.number == 1


def test_a_case_that_was_cut_off_in_writing_is_no_case(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        journal.begin(number_case("even", 8))
    content = (tmp_path / RUNNING).read_bytes()
    (tmp_path / RUNNING).write_bytes(content[:-5])
    found = read_running(tmp_path)
    assert found is not None
    assert found[1] is None
    (tmp_path / RUNNING).write_bytes(content[:5])
    assert read_running(tmp_path) is None


def test_a_journal_has_one_writer(tmp_path: Path) -> None:
    with Journal(tmp_path), pytest.raises(BlockingIOError):
        Journal(tmp_path)


def test_time_goes_on_where_the_session_before_stopped(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        journal.write(RoundsDone(at=100.0, scope="even", rounds=1, executed=1))
    with Journal(tmp_path) as again:
        assert again.elapsed >= 100.0
