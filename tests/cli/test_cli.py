"""The command line as a user meets it: exit codes, one-line errors, bundles, replay, interruption."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path

import jsonschema
import pytest
import short_signoff
from short_signoff import run_some, take_the_least
from typer.testing import CliRunner, Result

from dsv32_reports.cli import app
from dsv32_reports.json_file import report_schema
from dsv32_reports.wording import replay_command

DSV32 = [sys.executable, "-c", "from dsv32_reports.cli import main; main()"]


def dsv32(*arguments: str, cwd: Path, code: int) -> Result:
    """Run a command in this process, from `cwd`; what only a process of its own shows is tested with `DSV32`."""
    before = Path.cwd()
    os.chdir(cwd)
    try:
        done = CliRunner().invoke(app, list(arguments))
    finally:
        os.chdir(before)
    assert done.exit_code == code, done.output
    return done


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One short sign-off of the defective options and one of the repaired ones."""
    folder = tmp_path_factory.mktemp("bundles")
    with pytest.MonkeyPatch.context() as patch:
        take_the_least(patch)
        for name, code in (("pr42982", 1), ("pr47766", 0)):
            done = dsv32("signoff", "--options", name, "--profile", "ci", "--out", name, cwd=folder, code=code)
            (folder / f"{name}.txt").write_text(done.stdout)
    return folder


def report(bundles: Path, name: str) -> dict[str, object]:
    return json.loads((bundles / name / "report.json").read_text())


def test_output_opens_with_verdict_evidence_and_path(bundles: Path) -> None:
    for name, outcome in (("pr42982", "NO-GO  Do not deploy pr42982: "), ("pr47766", "GO  Nothing speaks against ")):
        lines = (bundles / f"{name}.txt").read_text().splitlines()
        assert lines[0].startswith(outcome)
        opening = lines[: lines.index("")]
        assert "evidence level: emulated (CPU, no MI355X)" in opening
        assert f"report: {name}/report.html" in opening


@pytest.mark.parametrize(("target", "command"), [("in-tree", "replay 'a b'"), ("vllm", "replay 'a b' --target vllm")])
def test_the_command_that_shows_a_case_again_names_another_target(target: str, command: str) -> None:
    assert replay_command("a b", target) == f"dsv32 {command}"


def test_pr42982_is_refuted_in_mtp_and_chunked_prefill_and_exact_for_decode(bundles: Path) -> None:
    document = report(bundles, "pr42982")
    gates = {gate["name"]: gate for gate in document["gates"]}
    status = {line["scope"]: line["status"] for line in gates["key"]["lines"]}
    assert status["decode, q = 1 throughout (by exhaustion)"] == "PASSED"
    assert status["decode, q = 1 throughout (fuzzed)"] == "PASSED"
    assert status["pure MTP decode, q > 1 (fuzzed)"] == "FAILED"
    assert status["chunked prefill (fuzzed)"] == "FAILED"
    traffic = {line["scope"]: line["status"] for line in document["traffic"]}
    assert traffic["decode, q = 1 throughout"] == "PASSED"
    assert traffic["pure MTP decode, q > 1"] == "FAILED"
    scopes = {finding["scope"] for finding in document["findings"]}
    assert {"mtp_decode", "chunked_prefill"} <= scopes
    assert gates["hygiene"]["status"] == gates["planner"]["status"] == "PASSED"


def test_pr47766_says_how_much_it_checked_and_what_it_did_not_judge(bundles: Path) -> None:
    document = report(bundles, "pr47766")
    assert document["outcome"] == "GO"
    assert document["findings"] == []
    assert {line["status"] for line in document["traffic"]} == {"PASSED"}
    checked = document["sequences"]
    assert checked["failed"] == 0
    assert checked["step_batches"] > 100
    n = checked["sequences"]
    assert checked["failure_rate_upper_bound"] == pytest.approx(1 - 0.05 ** (1 / n))
    assert any("your checkpoint" in text for text in document["not_judged"])


def test_workload_table_covers_the_budgets(bundles: Path) -> None:
    rows = report(bundles, "pr42982")["tables"]["skip_rate"]
    assert {(row["budget"], row["spread"]) for row in rows} == {
        (budget, spread) for budget in (2048, 8192, 16384, 32768) for spread in (0.0, 0.1)
    }
    for row in rows:
        assert row["rightful"] + row["wrongful"] == pytest.approx(row["skip_rate"] * row["steps"])
    assert any(row["wrongful"] for row in rows)
    assert not any(row["wrongful"] for row in report(bundles, "pr47766")["tables"]["skip_rate"])
    (short,) = report(bundles, "pr42982")["tables"]["short_contexts"]
    assert short["skip_rate"] == 0


@pytest.mark.parametrize("name", ["pr42982", "pr47766"])
def test_report_json_follows_its_schema(bundles: Path, name: str) -> None:
    jsonschema.validate(report(bundles, name), report_schema())


class Page(HTMLParser):
    """Collects what a page would load, and its visible headings."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.headings: list[str] = []
        self._heading = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._heading = tag in ("h1", "h2")
        self.loads += [value or "" for key, value in attrs if key in ("src", "href") and value]
        assert tag != "script"

    def handle_data(self, data: str) -> None:
        if self._heading and data.strip():
            self.headings.append(data.strip())


@pytest.mark.parametrize("name", ["pr42982", "pr47766"])
def test_report_html_is_self_contained(bundles: Path, name: str) -> None:
    page = Page()
    page.feed((bundles / name / "report.html").read_text())
    assert all(link.startswith("#") for link in page.loads)
    assert page.headings[0] == report(bundles, name)["outcome"]
    assert {"Gates", "Not judged", "How often the plan is reused"} <= set(page.headings)
    assert ("Counterexamples" in page.headings) == (name == "pr42982")


def test_replay_fails_the_same_way_and_passes_when_repaired(bundles: Path) -> None:
    for finding in report(bundles, "pr42982")["findings"]:
        case = str(Path("pr42982") / finding["file"])
        again = dsv32("replay", case, cwd=bundles, code=1)
        assert finding["summary"] in again.stdout
        repaired = dsv32("replay", case, "--options", "pr47766", cwd=bundles, code=0)
        assert repaired.stdout.startswith("FIXED")


def test_replay_speaks_json(bundles: Path) -> None:
    case = str(next((bundles / "pr42982" / "cases").iterdir()))
    (entry,) = json.loads(dsv32("replay", case, "--json", cwd=bundles, code=1).stdout)
    assert entry["verdict"]["status"] == "FAILED"


def corrupt(case: Path, how: str) -> bytes:
    document = json.loads(case.read_text())
    match how:
        case "truncated":
            return case.read_bytes()[:-40]
        case "foreign":
            return json.dumps({"hello": "world"}).encode()
        case "unknown field":
            return json.dumps(document | {"payload": 1}).encode()
        case "impossible step":
            document["steps"][0]["query_lens"] = [5000]
            document["steps"][0]["seq_lens"] = [10]
        case "unknown check":
            document["check"] = "nothing"
        case "too many rows":
            document["dims"] = {"topk": 2048, "max_num_batched_tokens": 1 << 40}
        case "deep":
            return b"[" * 100_000
        case "binary":
            return bytes(range(256)) * 10
    return json.dumps(document).encode()


@pytest.mark.parametrize(
    "how",
    ["truncated", "foreign", "unknown field", "impossible step", "unknown check", "too many rows", "deep", "binary"],
)
def test_a_bad_case_file_is_one_line(bundles: Path, tmp_path: Path, how: str) -> None:
    bad = tmp_path / "bad.json"
    bad.write_bytes(corrupt(next((bundles / "pr42982" / "cases").glob("mtp*")), how))
    done = dsv32("replay", str(bad), cwd=tmp_path, code=2)
    assert done.stderr.startswith("dsv32: error: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        (("signoff", "--options", "pr1"), "choose one of baseline, pr42982"),
        (("signoff", "--set", "bias=fp8"), "choose one of fp32, bf16"),
        (("signoff", "--profile", "weekly"), "choose one of ci, signoff"),
        (("signoff", "--out", "taken"), "choose a new folder"),
        (("signoff", "--out", "/dev/null/x"), "choose another folder"),
        (("signoff", "--latency", "none.json"), "give what dsv32 trace --out writes"),
        (("signoff", "--corpus", "none"), "holds no case"),
        (("replay", "missing.json"), "give a case file"),
        (("replay", "x.json", "--set", "bias=fp32"), "give --options"),
        (("golden", "missing.json.gz"), "missing.json.gz"),
        (("golden", "taken/text"), "copy the recording again"),
        (("bench", "plan", "--rows", "many"), "like 1,64,512"),
    ],
)
def test_bad_usage_is_one_line_with_the_remedy(tmp_path: Path, arguments: tuple[str, ...], remedy: str) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "text").write_text("not a recording")
    done = dsv32(*arguments, cwd=tmp_path, code=2)
    assert remedy in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_process_reports_as_the_command_does(tmp_path: Path) -> None:
    done = subprocess.run([*DSV32, "replay", "missing.json"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("dsv32: error: missing.json: cannot be read")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("arguments", [("doctor", "--json"), ("faults", "--list")])
def test_a_reader_that_stops_is_no_verdict_and_no_error(arguments: tuple[str, ...]) -> None:
    run = subprocess.Popen([*DSV32, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert run.stdout is not None
    assert run.stderr is not None
    run.stdout.close()
    assert (run.stderr.read(), run.wait()) == ("", 141)


def test_unknown_option_of_a_command_is_usage(tmp_path: Path) -> None:
    assert "--nope" in dsv32("signoff", "--nope", cwd=tmp_path, code=2).stderr


def test_a_file_that_is_missing_is_not_a_matter_of_space(tmp_path: Path) -> None:
    told = dsv32("trace", "before.json", "after.json", cwd=tmp_path, code=2).stderr
    assert (
        told == "dsv32: error: before.json: No such file or directory; give another path, then run the command again\n"
    )


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    """/dev/full takes the place of the journal's disk."""
    program = (
        "import pathlib, dsv32_reports.signoff as s; from dsv32_reports.cli import main;"
        "s.prepare_folder = lambda folder: (folder.mkdir(), (folder / 'events.jsonl').symlink_to('/dev/full'));"
        "main()"
    )
    arguments = [sys.executable, "-c", program, "signoff", "--profile", "ci", "--out", "full"]
    done = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "No space left on device; free space" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_keeps_what_was_found(
    tmp_path: Path, sent: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = subprocess.Popen(
        [sys.executable, short_signoff.__file__, "signoff", "--options", "pr42982", "--profile", "ci", "--out", "run"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    journal = tmp_path / "run" / "events.jsonl"
    until = time.monotonic() + 120
    while time.monotonic() < until and not (journal.exists() and b"CounterexampleFound" in journal.read_bytes()):
        time.sleep(0.2)
    run.send_signal(sent)
    output, errors = run.communicate(timeout=120)
    assert run.returncode == 130, errors
    document = json.loads((tmp_path / "run" / "report.json").read_text())
    assert document["outcome"] == "NO-GO"
    assert output.startswith("NO-GO")
    assert document["findings"]
    assert "go on with dsv32 signoff --resume run" in errors
    if sent is signal.SIGINT:
        run_some(monkeypatch)
        dsv32("signoff", "--resume", "run", cwd=tmp_path, code=1)
        assert "interrupted" not in json.loads((tmp_path / "run" / "report.json").read_text())["reason"]
        dsv32("verify", "run", cwd=tmp_path, code=0)
        assert "is finished" in dsv32("signoff", "--resume", "run", cwd=tmp_path, code=2).stderr


def test_golden_replays_a_folder_of_decodes(tmp_path: Path) -> None:
    decodes = Path(__file__).parents[2] / "fuzz" / "dsv32_fuzz" / "data" / "decodes"
    manifest = json.loads((decodes / "manifest.json").read_text())
    manifest["runs"] = {name: manifest["runs"][name] for name in ("fp32_seed0", "NEGATIVE_sep30rope_fp32_seed0")}
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / "manifest.json").write_text(json.dumps(manifest))
    for name in manifest["runs"]:
        shutil.copy(decodes / f"{name}.npz", tmp_path / "some")
    text = dsv32("golden", "some", cwd=tmp_path, code=0).stdout
    assert "NEGATIVE_sep30rope_fp32_seed0: differs first at step 0, layer 0 index_topk, request 0" in text
    assert "manifest.json" in dsv32("golden", str(tmp_path), cwd=tmp_path, code=2).stderr


def test_bounds_print_the_budget_of_every_stage(tmp_path: Path) -> None:
    rows = json.loads(dsv32("bounds", "--json", cwd=tmp_path, code=0).stdout)
    assert {"attn_in", "attn_out", "index_score", "gate_logits", "ffn_out"} <= {row["stage"] for row in rows}
    assert all(row["elements"] > 0 and 0 < row["worst"] <= 1 for row in rows)
    assert "choose one of fp32" in dsv32("bounds", "--precision", "x", cwd=tmp_path, code=2).stderr


def test_doctor_says_what_is_installed(tmp_path: Path) -> None:
    assert "torch" in dsv32("doctor", cwd=tmp_path, code=0).stdout
    assert json.loads(dsv32("doctor", "--json", cwd=tmp_path, code=0).stdout)["exit_code"] == 0


def test_tensor_parallel_ranks_agree(tmp_path: Path) -> None:
    result = json.loads(dsv32("tp", "--world", "2", "--rows", "2", "--json", cwd=tmp_path, code=0).stdout)
    assert [claim["status"] for claim in result["claims"]] == ["PASSED"] * 3
    assert "world" in dsv32("tp", "--world", "3", cwd=tmp_path, code=2).stderr
    assert "is not one of 'bf16'" in dsv32("tp", "--kv-cache", "fp16", cwd=tmp_path, code=2).stderr


def test_golden_counts_and_exit_codes(tmp_path: Path) -> None:
    plans = Path(__file__).parents[2] / "fuzz" / "dsv32_fuzz" / "data" / "plans"
    done = dsv32("golden", str(plans / "aiter_e404860_v1.json.gz"), "--json", cwd=tmp_path, code=0)
    assert json.loads(done.stdout)["measured"] == {"passed": 111, "failed": 0, "skipped": 11, "refused": 0}
