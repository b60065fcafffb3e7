"""A stopped sign-off goes on behind its last finished phase, and ends as one that was never stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from report_worlds import counterexample, everything, given, reached, router_study, started
from typer.testing import CliRunner

from dsv32_fast.options import PRESETS
from dsv32_fuzz.events import Event, PhaseFinished, PhaseStarted, RunFinished, RunStarted
from dsv32_fuzz.targets.intree import InTreeTarget
from dsv32_reports.bundle import JOURNAL, MANIFEST, write_bundle
from dsv32_reports.cli import app
from dsv32_reports.fingerprint import DEVICE_STATE, fingerprint
from dsv32_reports.fold import fold, make_report
from dsv32_reports.interrupt import Interrupts
from dsv32_reports.json_file import journal_line, read_journal
from dsv32_reports.signoff import check_resumable, collect, kept_events, prepare_folder
from dsv32_reports.verify import verify


def stream(*events: Event) -> Any:
    yield from events


FIRST = [started(fingerprint=fingerprint()), given("router_precision", router_study()), counterexample()]
DONE = [PhaseStarted(phase="proof", title="proof"), *everything(), PhaseFinished(phase="proof", seconds=3.0)]
HALF = [PhaseStarted(phase="workload", title="work"), reached("key_sufficiency", "workload")]
REST = [*HALF, PhaseFinished(phase="workload", seconds=2.0), RunFinished(seconds=2.0)]


def stopped(folder: Path, events: list[Event], torn: bytes = b"") -> Path:
    prepare_folder(folder)
    (folder / JOURNAL).write_bytes(b"".join(map(journal_line, events)) + torn)
    return folder


def test_a_killed_run_goes_on_behind_its_last_finished_phase(tmp_path: Path) -> None:
    folder = stopped(tmp_path / "run", [*FIRST, *DONE, *HALF], torn=b'{"type":"Verd')
    kept = kept_events(folder)
    assert kept == [*FIRST, *DONE]
    evidence = collect(stream(*REST), folder, [], Interrupts(), kept)
    whole = [*FIRST, *DONE, *REST]
    assert read_journal(folder / JOURNAL) == whole
    report = make_report(evidence, "run")
    assert report == fold(whole, "run")
    assert report.seconds == 5.0
    write_bundle(report, folder)


def test_a_run_without_a_finished_phase_keeps_only_what_was_given(tmp_path: Path) -> None:
    folder = stopped(tmp_path / "run", [*FIRST, *HALF])
    (folder / "cases" / "left-behind.json").write_text("{}")
    kept = kept_events(folder)
    assert kept == FIRST[:2]
    collect(stream(*DONE, *REST), folder, [], Interrupts(), kept)
    assert list((folder / "cases").iterdir()) == []


def test_an_interrupted_run_verifies_after_it_went_on(tmp_path: Path) -> None:
    folder = stopped(tmp_path / "run", [FIRST[0], *DONE, RunFinished(seconds=3.0, interrupted=True)])
    write_bundle(fold(read_journal(folder / JOURNAL), "run"), folder)
    evidence = collect(stream(*REST), folder, [], Interrupts(), kept_events(folder))
    write_bundle(make_report(evidence, "run"), folder)
    assert verify(folder)[0] == []


def test_a_run_whose_pages_found_no_room_is_written_when_it_goes_on(tmp_path: Path) -> None:
    folder = stopped(tmp_path / "run", [FIRST[0], *DONE, *REST])
    kept = kept_events(folder)
    assert kept == [FIRST[0], *DONE, *REST[:-1]]
    evidence = collect(stream(REST[-1]), folder, [], Interrupts(), kept)
    write_bundle(make_report(evidence, "run"), folder)
    assert verify(folder)[0] == []


def test_what_cannot_go_on_is_an_error(tmp_path: Path) -> None:
    for name, events, told in (
        ("finished", [*FIRST, *DONE, *REST], "is finished"),
        ("headless", DONE, "does not begin with RunStarted"),
    ):
        folder = stopped(tmp_path / name, list(events))
        (folder / MANIFEST).write_text("{}")
        with pytest.raises(ValueError, match=told):
            kept_events(folder)
    with pytest.raises(ValueError, match=r"holds no events\.jsonl"):
        kept_events(tmp_path)


def test_other_software_cannot_go_on() -> None:
    target = InTreeTarget(PRESETS["pr47766"])
    first = FIRST[0]
    assert isinstance(first, RunStarted)
    check_resumable(first, target, Path("run"))
    warm = started(fingerprint=fingerprint() | {f"{DEVICE_STATE}temperature": "60"})
    check_resumable(warm, target, Path("run"))
    with pytest.raises(ValueError, match="made with another torch"):
        check_resumable(started(fingerprint=fingerprint() | {"torch": "1"}), target, Path("run"))


def test_two_signoffs_in_one_folder(tmp_path: Path) -> None:
    folder = stopped(tmp_path / "run", [])

    def second() -> Any:
        with pytest.raises(ValueError, match="another sign-off writes into"):
            collect(stream(), folder, [], Interrupts())
        yield RunFinished(seconds=0.0)

    collect(second(), folder, [], Interrupts())
    with pytest.raises(ValueError, match="is not empty"):
        prepare_folder(folder)


@pytest.mark.parametrize("option", ["--policy=other.toml", "--seed=1", "--options=pr42982", "--approver=me"])
def test_a_resumed_run_takes_no_other_options(tmp_path: Path, option: str) -> None:
    folder = stopped(tmp_path / "run", FIRST)
    done = CliRunner().invoke(app, ["signoff", "--resume", str(folder), option])
    assert done.exit_code == 2
    assert f"{option.partition('=')[0]} cannot change what --resume goes on with; leave it out" in done.stderr
    assert read_journal(folder / JOURNAL) == FIRST


def test_an_approver_that_no_report_can_show_is_refused(tmp_path: Path) -> None:
    for name in ("\udcff", "\x1b[2J", "a\nb"):
        done = CliRunner().invoke(app, ["signoff", "--out", str(tmp_path / "run"), "--approver", name])
        assert done.exit_code == 2
        assert "--approver holds characters that no report can show" in done.stderr
    assert not (tmp_path / "run").exists()
