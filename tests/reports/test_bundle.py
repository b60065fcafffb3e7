"""A bundle can be computed again from its journal, and no edit goes unseen."""

from __future__ import annotations

import json
import os
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from report_worlds import make_bundle, reached, started, whole_run

from dsv32_fuzz.events import VerdictReached
from dsv32_fuzz.verdict import Status, Verdict
from dsv32_reports.bundle import JOURNAL, MANIFEST, Manifest, digest, files_of, write_bundle
from dsv32_reports.fold import fold
from dsv32_reports.json_file import encode, read_journal
from dsv32_reports.model import Report
from dsv32_reports.verify import previous_of, verify


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    make_bundle(tmp_path / "run", whole_run(failing=True))
    return tmp_path / "run"


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) >= 1, f"{old!r} is not in {path.name}"
    path.write_text(text.replace(old, new, 1))


def remake_manifest(folder: Path) -> None:
    files = {name: digest((folder / name).read_bytes()) for name in files_of(folder)}
    (folder / MANIFEST).write_bytes(encode(Manifest(files=files)))


def swap(folder: Path, one: str, other: str) -> None:
    first, second = (folder / one).read_bytes(), (folder / other).read_bytes()
    (folder / one).write_bytes(second)
    (folder / other).write_bytes(first)


def drop_a_gate(folder: Path) -> None:
    document = json.loads((folder / "report.json").read_text())
    del document["gates"][0]
    (folder / "report.json").write_text(json.dumps(document))


def link_away(path: Path) -> None:
    path.rename(path.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent / "elsewhere")


EDITS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a number": (lambda b: edit(b / "report.json", '"sequences": 40', '"sequences": 4000'), "report.json"),
    "the verdict": (lambda b: edit(b / "report.json", "NO-GO", "GO"), "report.json"),
    "a gate dropped": (drop_a_gate, "report.json"),
    "the page only": (lambda b: edit(b / "report.html", "NO-GO", "GO"), "report.html"),
    "junit only": (lambda b: edit(b / "junit.xml", "<failure", "<skipped"), "junit.xml"),
    "the statement only": (
        lambda b: edit(b / "test-result.intoto.json", "FAILED", "PASSED"),
        "test-result.intoto.json",
    ),
    "the schema": (lambda b: edit(b / "report.schema.json", "string", "number"), "report.schema.json"),
    "the journal": (lambda b: edit(b / JOURNAL, '"failed":0', '"failed":1'), JOURNAL),
    "a case": (lambda b: edit(b / "cases/mtp_decode-key_sufficiency.json", "2049", "2048"), "mtp_decode-key_suffic"),
    "two files swapped": (lambda b: swap(b, "junit.xml", "report.html"), "junit.xml"),
    "a file removed": (lambda b: (b / "junit.xml").unlink(), "junit.xml"),
    "the report removed": (lambda b: (b / "report.json").unlink(), "report.json"),
    "the journal removed": (lambda b: (b / JOURNAL).unlink(), JOURNAL),
    "the manifest removed": (lambda b: (b / MANIFEST).unlink(), MANIFEST),
    "a file added": (lambda b: (b / "cases/more.json").write_text("{}"), "cases/more.json"),
    "an event twice": (lambda b: (b / JOURNAL).write_bytes((b / JOURNAL).read_bytes() * 2), JOURNAL),
    "a link": (lambda b: link_away(b / "report.html"), "report.html"),
    "the manifest": (lambda b: edit(b / MANIFEST, "sha256:", "sha256:0"), ""),
    "no JSON": (lambda b: (b / "report.json").write_text("{"), "report.json"),
    "a deep journal": (lambda b: (b / JOURNAL).write_text("[" * 100_000 + "\n"), JOURNAL),
}


def test_an_untouched_bundle_verifies(bundle: Path) -> None:
    assert verify(bundle) == ([], digest((bundle / MANIFEST).read_bytes()))


def test_what_is_no_file_is_named(bundle: Path) -> None:
    os.mkfifo(bundle / "cases" / "pipe")
    assert verify(bundle)[0] == ["cases/pipe: not in the manifest", "cases/pipe: no file of a sign-off"]
    (bundle / "cases" / "pipe").unlink()
    link_away(bundle / "cases")
    assert "cases: not in the manifest" in verify(bundle)[0]


@pytest.mark.parametrize("name", EDITS)
def test_every_edit_is_named(bundle: Path, name: str) -> None:
    change, named = EDITS[name]
    change(bundle)
    problems, _ = verify(bundle)
    assert any(named in problem for problem in problems), problems


@pytest.mark.parametrize("name", [name for name in EDITS if "manifest" not in name])
def test_a_manifest_made_to_fit_does_not_hide_an_edit(bundle: Path, name: str) -> None:
    kept = digest((bundle / MANIFEST).read_bytes())
    EDITS[name][0](bundle)
    remake_manifest(bundle)
    problems, found = verify(bundle)
    assert problems
    assert found != kept or name == "a link"  # a link has the same content


def test_whoever_rewrites_everything_still_changes_the_digest(tmp_path: Path) -> None:
    kept = make_bundle(tmp_path / "run", whole_run(failing=True))
    for path in sorted((tmp_path / "run").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    (tmp_path / "run").rmdir()
    make_bundle(tmp_path / "run", whole_run(failing=False))
    assert verify(tmp_path / "run")[0] == []
    problems, _ = verify(tmp_path / "run", kept)
    assert "was changed after it was made" in problems[0]


def test_the_swapped_verdict_is_told_with_both_values(bundle: Path) -> None:
    edit(bundle / "report.json", '"outcome": "NO-GO"', '"outcome": "GO"')
    assert "report.json: outcome is 'GO', the journal gives 'NO-GO'" in verify(bundle)[0]


def test_what_is_no_bundle_is_an_error(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ValueError, match="a sign-off wrote"):
            verify(folder)


def test_a_killed_run_keeps_its_whole_lines(bundle: Path) -> None:
    journal = (bundle / JOURNAL).read_bytes()
    whole = len(read_journal(bundle / JOURNAL))
    (bundle / JOURNAL).write_bytes(journal[:-5])
    assert len(read_journal(bundle / JOURNAL)) == whole - 1


@pytest.mark.parametrize(
    ("old", "new"), [('"steps":1000,', ""), ('"steps":1000', '"steps":0'), ('"skip_rate":0.88', '"skip_rate":null')]
)
def test_a_journal_that_no_page_can_show_is_named(bundle: Path, old: str, new: str) -> None:
    edit(bundle / JOURNAL, old, new)
    remake_manifest(bundle)
    (problem,) = verify(bundle)[0]
    assert problem.startswith("events.jsonl: gives no report (")


def test_a_journal_without_a_start_gives_no_report() -> None:
    with pytest.raises(ValueError, match="RunStarted"):
        fold(whole_run()[1:], "x")


def test_what_changed_since_the_last_go_is_told(tmp_path: Path) -> None:
    make_bundle(tmp_path / "last", whole_run())
    previous = previous_of(tmp_path / "last")
    fingerprint = started().fingerprint | {"torch": "2.14.0"}
    now = whole_run(previous=previous, fingerprint=fingerprint, options_text="vllm026")
    report = fold(now, "now")
    make_bundle(tmp_path / "now", now)
    assert "Since pr47766-20260101-000000 (GO)" in (tmp_path / "now" / "report.html").read_text()
    assert report.previous is not None
    assert report.previous.digest == digest((tmp_path / "last" / MANIFEST).read_bytes())
    assert report.previous.changed == ["options: pr47766 -> vllm026", "torch: 2.13.0 -> 2.14.0"]


def test_an_edited_bundle_is_no_last_go(bundle: Path) -> None:
    edit(bundle / "report.html", "NO-GO", "GO")
    with pytest.raises(ValueError, match="does not verify"):
        previous_of(bundle)


@pytest.mark.parametrize("worst", [float("inf"), float("nan")])
def test_a_kernel_that_gives_nan_leaves_a_bundle_that_verifies(tmp_path: Path, worst: float) -> None:
    verdict = Verdict(check="drift_forced", status=Status.PASSED, summary="s", measured={"worst_budget_used": worst})
    odd = VerdictReached(phase="drift", scope="decode", verdict=verdict)
    first, *rest = whole_run()
    make_bundle(tmp_path / "run", [first, odd, *rest])
    assert verify(tmp_path / "run")[0] == []
    report = msgspec.json.decode((tmp_path / "run" / "report.json").read_bytes(), type=Report)
    assert report.reason == "failed: Decode drift"


def test_junit_counts_what_the_report_says(bundle: Path) -> None:
    root = ET.parse(bundle / "junit.xml").getroot()
    report = msgspec.json.decode((bundle / "report.json").read_bytes(), type=Report)
    lines = [line.status for gate in report.gates for line in gate.lines]
    assert int(root.get("tests", "")) == len(lines) + 1 == len(root.findall(".//testcase"))
    assert int(root.get("failures", "")) == lines.count(Status.FAILED) + 1 == len(root.findall(".//failure"))


def test_an_inconclusive_run_is_not_green_in_junit(tmp_path: Path) -> None:
    make_bundle(tmp_path / "run", [started(), reached("key_sufficiency", "decode")])
    root = ET.parse(tmp_path / "run" / "junit.xml").getroot()
    assert root.find(".//testcase[@name='outcome']/error") is not None


def test_xml_holds_no_control_characters(tmp_path: Path) -> None:
    make_bundle(tmp_path / "run", whole_run(id="a\x00b\x1b<c>&"))
    assert "<c>&" in ET.parse(tmp_path / "run" / "junit.xml").getroot().get("name", "")


def test_the_statement_is_about_the_report(bundle: Path) -> None:
    statement = json.loads((bundle / "test-result.intoto.json").read_text())
    assert f"sha256:{statement['subject'][0]['digest']['sha256']}" == digest((bundle / "report.json").read_bytes())
    assert statement["predicate"]["result"] == "FAILED"
    assert statement["predicate"]["failedTests"] == ["Metadata key"]


def test_the_bundle_is_a_function_of_the_journal(bundle: Path) -> None:
    before = {name: (bundle / name).read_bytes() for name in files_of(bundle)}
    write_bundle(fold(read_journal(bundle / JOURNAL), bundle.name), bundle)
    assert before == {name: (bundle / name).read_bytes() for name in files_of(bundle)}


def test_another_commit_is_named_beside_what_differs(bundle: Path, tmp_path: Path) -> None:
    mine = started().fingerprint
    make_bundle(tmp_path / "old", whole_run(fingerprint=mine | {"dsv32-validation commit": "0123abc"}))
    assert verify(tmp_path / "old")[0] == []
    edit(tmp_path / "old" / "report.json", '"sequences": 40', '"sequences": 4000')
    assert "made by commit 0123abc" in verify(tmp_path / "old")[0][-1]
    edit(bundle / "report.json", '"sequences": 40', '"sequences": 4000')
    assert not any("commit" in problem for problem in verify(bundle)[0])


def test_another_versions_bundle_is_named(tmp_path: Path) -> None:
    make_bundle(tmp_path / "run", whole_run(fingerprint={"dsv32-validation": "0.0.1"}))
    (problem,) = verify(tmp_path / "run")[0]
    assert "made by dsv32-validation 0.0.1" in problem
    assert "verify it with 0.0.1" in problem
