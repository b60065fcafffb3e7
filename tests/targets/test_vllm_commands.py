"""Commands on a folder in the place of vLLM: verdicts of the sign-off, unknown releases, doctor, rows that misread."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_vllm import write_fake
from typer.testing import CliRunner, Result

from dsv32_fuzz.case import Case
from dsv32_fuzz.checks import run_case
from dsv32_fuzz.checks.catalogue import STEP_CHECKS
from dsv32_fuzz.events import Event, RunFinished, VerdictReached
from dsv32_fuzz.targets import Target, release_of
from dsv32_fuzz.targets.corpus import cases
from dsv32_fuzz.targets.neighbours import ranges, told_neighbours
from dsv32_fuzz.targets.registry import open_target
from dsv32_fuzz.targets.vllm import VllmTarget
from dsv32_fuzz.targets.vllm.identity import DRIVEN, is_known
from dsv32_reports.cli import app
from dsv32_reports.commands import signoff
from dsv32_reports.commands.target import _contract_table
from dsv32_reports.gates import INDEPENDENT


def purposeful(target: Target, *_: object, **__: object) -> Iterator[Event]:
    """In a campaign's place: the purposeful sequences, without a search."""
    for _, case in cases(target):
        for verdict in run_case(case, target, STEP_CHECKS):
            yield VerdictReached(phase="purposes", scope=case.scope, verdict=verdict)
    yield RunFinished(seconds=1.0)


def dsv32(*arguments: str, code: int) -> Result:
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == code, done.output
    return done


def release(folder: Path, version: str, commit: str | None = None) -> None:
    """Metadata as an installer leaves it."""
    described = folder / f"vllm-{version}.dist-info"
    described.mkdir()
    (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    if commit:
        (described / "direct_url.json").write_text(json.dumps({"vcs_info": {"commit_id": commit}}))


def judged(folder: Path, out: Path, code: int) -> dict[str, list[dict[str, str]]]:
    """The lines of each gate of a sign-off."""
    done = dsv32("signoff", "--target", "vllm", "--vllm-path", str(folder), "--out", str(out), "--json", code=code)
    return {gate["name"]: gate["lines"] for gate in json.loads(done.stdout)["gates"]}


def test_a_sign_off_of_an_unknown_release_is_inconclusive_for_the_gates_that_drive_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signoff, "campaign", purposeful)
    folder = write_fake(tmp_path / "fake")
    release(folder, "0.99.0")
    gates = judged(folder, tmp_path / "out", 3)
    doubted = {name for name, lines in gates.items() for line in lines if line["scope"] == "release"}
    assert {"key", "cache", "plan", "hygiene"} <= doubted
    assert not doubted & INDEPENDENT
    summaries = {line["summary"] for lines in gates.values() for line in lines if line["scope"] == "release"}
    assert summaries == {
        "the suite was not written for target vllm 0.99.0: what passes here may rest on what it does not know"
    }


def test_a_sign_off_of_a_known_release_with_the_old_key_is_no_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signoff, "campaign", purposeful)
    folder = write_fake(tmp_path / "fake", key="old")
    release(folder, "0.24.0")
    gates = judged(folder, tmp_path / "out", 1)
    assert not [line for lines in gates.values() for line in lines if line["scope"] == "release"]
    assert "FAILED" in {line["status"] for line in gates["plan"]}
    assert "FAILED" not in {line["status"] for line in gates["hygiene"]}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_fake(tmp_path_factory.mktemp("installed") / "fake", key="old")
    release(folder, "0.24.0", commit="1a2b3c4d")
    return folder


def test_doctor_tells_what_the_process_of_the_target_has(installed: Path) -> None:
    done = CliRunner().invoke(app, ["doctor", "--target", "vllm", "--vllm-path", str(installed), "--json"])
    told = json.loads(done.stdout)["target"]
    assert (told["target vllm"], told["target vllm commit"]) == ("0.24.0", "1a2b3c4d")
    assert (told["target vllm known"], told["target aiter"]) == ("yes", "emulated")


def test_rows_that_misread_are_listed(installed: Path) -> None:
    target = open_target("vllm", path=str(installed))
    assert isinstance(target, VllmTarget)
    assert release_of(target) == "0.24.0, commit 1a2b3c4d"
    by_name: dict[str, Case] = dict(cases(target))
    assert told_neighbours(by_name["saturated decode"], target) == []
    # Rows [2047, 2048] first; the next step has [2048, 2048] in the old plan's places: 0..2047 and 2047..4095.
    assert told_neighbours(by_name["two drafts at the edge"], target) == [
        "step 1: 1 of 2 rows read a neighbour's keys: 1",
        "step 1: 2 of 2 rows lose keys of their own: 0-1",
    ]
    target.close()


def test_rows_are_told_in_runs() -> None:
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    assert ranges(list(range(0, 40, 2))) == "0, 2, 4, 6, 8, 10, 12, 14, ... 20 runs in all"


def test_equal_neighbours_share_a_column_of_the_contract_table() -> None:
    def found(*statuses: str) -> list[dict[str, str]]:
        return [{"name": f"p{i}", "status": status, "summary": ""} for i, status in enumerate(statuses)]

    answers = {
        "1.0": found("PASSED", "FAILED"),
        "1.1": found("PASSED", "FAILED"),
        "1.2": found("SKIPPED", "PASSED"),
        "1.3": found("PASSED", "FAILED"),
    }
    assert _contract_table(answers) == [
        "| probe | 1.0 to 1.1 | 1.2 | 1.3 |",
        "|---|---|---|---|",
        "| p0 |  | SKIPPED |  |",
        "| p1 | FAILED |  | FAILED |",
    ]


def test_releases_that_were_driven_are_known() -> None:
    assert all(is_known(name) for name in (*DRIVEN, "0.33.0+rocm700"))
    assert not any(is_known(name) for name in ("0.34.0", "0.33.0.dev3", "0.33.0rc1", "", "0+source"))
