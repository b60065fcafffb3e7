"""`dsv32 fuzz`, `merge` and `replay` as a user meets them, on the real path."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import msgspec
import pytest
from campaign_world import SPEC, Numbers, number_case, run_numbers, use_numbers
from interrupted import fuzz_until
from typer.testing import CliRunner, Result

from dsv32_fuzz.campaigns.corpus import Corpus
from dsv32_fuzz.campaigns.result import CampaignResult, read_result
from dsv32_fuzz.case import load_case
from dsv32_fuzz.events import CounterexampleFound, Progress
from dsv32_reports.campaign_text import ProgressLines, clock
from dsv32_reports.cli import app
from dsv32_reports.commands.fuzz import parse_duration, parse_shard
from dsv32_reports.json_file import encode_campaign

SHRUNK = b"CounterexampleShrunk"


def dsv32(*arguments: str, cwd: Path, code: int) -> Result:
    before = Path.cwd()
    os.chdir(cwd)
    try:
        done = CliRunner().invoke(app, list(arguments))
    finally:
        os.chdir(before)
    assert done.exit_code == code, done.output
    return done


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A campaign over the defective options, interrupted when a counterexample is shrunk."""
    folder = tmp_path_factory.mktemp("fuzz")
    arguments = ("--options", "pr42982", "--check", "chunked_prefill", "--profile", "ci")
    done = fuzz_until(SHRUNK, folder / "run", *arguments, "--corpus", str(folder / "corpus"))
    (folder / "out.txt").write_text(done.stdout)
    return folder


def test_a_campaign_ends_with_a_verdict_and_a_corpus(campaign: Path) -> None:
    text = (campaign / "out.txt").read_text()
    assert text.startswith("FAILED  in-tree pr42982, evidence level: emulated")
    assert "new     key_sufficiency in chunked_prefill: step " in text
    assert "\n        step 1: q=[" in text
    assert re.search(r"\n        step 1: \d+ of \d+ rows lose keys of their own: ", text)
    result = json.loads((campaign / "run" / "result.json").read_text())
    assert result["status"] == "FAILED"
    assert result["crashes"] == 0
    assert all(len(load_case(path).steps) == 2 for path in Corpus(campaign / "corpus").files())  # type: ignore[union-attr]


def test_replay_says_failed_and_fixed(campaign: Path) -> None:
    own = dsv32("replay", "corpus", cwd=campaign, code=1).stdout
    assert own.startswith("FAILED ")
    repaired = dsv32("replay", "corpus", "--options", "pr47766", cwd=campaign, code=0).stdout
    assert {line.split()[0] for line in repaired.splitlines() if not line.startswith(" ")} == {"FIXED"}


def test_a_finished_campaign_tells_its_result_again(campaign: Path) -> None:
    arguments = ("--options", "pr42982", "--check", "chunked_prefill", "--profile", "ci", "--out", "run")
    again = dsv32("fuzz", *arguments, "--max-time", "1s", "--corpus", "other", "--json", cwd=campaign, code=1)
    assert json.loads(again.stdout)["cases"] == json.loads((campaign / "run" / "result.json").read_text())["cases"]
    other = dsv32("fuzz", *arguments, "--max-time", "1s", "--seed", "7", cwd=campaign, code=2)
    assert "a campaign with other settings; choose a new folder with --out" in other.stderr


def test_merge_of_one_folder_gives_its_result(campaign: Path) -> None:
    merged = json.loads(dsv32("merge", "run", "--out", "merged", "--json", cwd=campaign, code=1).stdout)
    alone = json.loads((campaign / "run" / "result.json").read_text())
    for name in ("status", "cases", "lines", "shard_seconds"):
        assert merged[name] == alone[name]


def test_merge_unites_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for k in (0, 1):
        use_numbers(monkeypatch, Numbers("even"), Numbers("odd"))
        run_numbers(tmp_path / f"machine{k}", shard=k, of=2)
    one = json.loads(dsv32("merge", "machine0", "machine1", "--json", cwd=tmp_path, code=0).stdout)
    other = json.loads(dsv32("merge", "machine1", "machine0", "--json", cwd=tmp_path, code=0).stdout)
    assert one == other
    assert one["shards"] == [0, 1]
    assert one["cases"] + one["duplicates"] == 300


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        (("fuzz", "--max-time", "soon"), "write it like 90s, 30m or 1h30m"),
        (("fuzz", "--profile", "weekly"), "choose one of ci, nightly, deep"),
        (("fuzz", "--check", "nothing"), "choose of"),
        (("fuzz", "--shard", "2/2"), "write I/N"),
        (("fuzz", "--target", "missile"), "unknown target"),
        (("fuzz", "--target", "missile", "--options", "pr47766"), "--options and --set are of the in-tree path"),
        (("fuzz", "--vllm-path", "x"), "the in-tree path takes no path"),
        (("fuzz", "--target", "vllm", "--vllm-path", "taken"), "holds no package vllm"),
        (("fuzz", "--out", "taken"), "choose a new folder with --out"),
        (("fuzz", "--examples", "ftp://x"), "give a folder or redis://"),
        (("fuzz", "--ledger", "missing.toml"), "give a ledger"),
        (("fuzz", "--corpus", "taken"), "give a case file"),
        (("merge", "taken"), "give a folder that `dsv32 fuzz` made"),
        (("replay", "empty"), "no case in this folder"),
    ],
)
def test_bad_usage_is_one_line_with_the_remedy(tmp_path: Path, arguments: tuple[str, ...], remedy: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "text.json").write_text("not a case")
    done = dsv32(*arguments, cwd=tmp_path, code=2)
    assert remedy in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("90s", 90), ("30m", 1800), ("8h", 28800), ("1h30m", 5400), (" 2M ", 120)]
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "0s", "m", "-5s", "1.5h", "5m30m"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match="is not a duration"):
        parse_duration(text)


def test_shards() -> None:
    assert parse_shard("3/8") == (3, 8)
    for text in ("8/8", "1", "-1/2", "a/b", "1/0"):
        with pytest.raises(ValueError, match="write I/N"):
            parse_shard(text)


def test_progress_is_a_line_a_minute_and_a_cause_once() -> None:
    said: list[str] = []
    lines = ProgressLines(600.0, said.append)
    lines(Progress(phase="fuzz", done=0.5, text="3 cases"))
    assert said == []
    lines._told -= 61
    lines(Progress(phase="fuzz", done=0.5, text="3 cases"))
    assert said == ["5:00 of 10:00, 3 cases, ends in 5:00"]
    for number in (4, 6):
        lines(CounterexampleFound(case=number_case("even", number), summary=f"{number} is bad", verdicts=[]))
    assert said[1:] == ["counterexample: even in even: 4 is bad"]
    assert (clock(59.6), clock(3600), clock(-1)) == ("1:00", "1:00:00", "0:00")


def test_a_result_survives_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_numbers(monkeypatch, Numbers("even", lambda n: "bad" if n else ""), Numbers("odd"))
    run_numbers(tmp_path, spec=msgspec.structs.replace(SPEC, seed=3))
    result = read_result([tmp_path])
    assert msgspec.json.decode(encode_campaign(result), type=CampaignResult).lines == result.lines
    assert json.loads(encode_campaign(result))["failures"][0]["case"]["input"] == {"number": 2}
