"""`dsv32 fuzz` and `dsv32 replay` on targets that are not the in-tree path: the shards are processes of their own."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from fake_vllm import write_fake
from interrupted import fuzz_until
from typer.testing import CliRunner, Result

from dsv32_fuzz.campaigns.corpus import Corpus
from dsv32_fuzz.case import load_case
from dsv32_reports.cli import app

EXAMPLE = Path(__file__).parents[2] / "docs" / "example_target.py"
LATE = """
from example_target import TinyEngine, TinyTarget

faultless = TinyEngine.step


def late(engine, step):
    lens_T = faultless(engine, step)
    engine.indptr_N1[1] += 1
    return lens_T


def open_late():
    TinyEngine.step = late
    return TinyTarget(name="late")
"""


def dsv32(*arguments: str, code: int) -> Result:
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == code, done.output
    return done


def fuzzed(*arguments: str) -> set[str]:
    """The checks that fail in a campaign over plain decode."""
    settings = ("--check", "decode", "--profile", "ci", "--corpus", "corpus")
    done = fuzz_until(b"FAILED", Path("run"), *arguments, *settings)
    result = json.loads(Path("run/result.json").read_bytes())
    assert (result["status"], result["crashes"], done.stdout.split()[0]) == ("FAILED", 0, "FAILED")
    return {failure["check"] for failure in result["failures"]}


@pytest.fixture
def registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the path of this process and of the shards: a package with an entry point, as if installed."""
    site = tmp_path / "site"
    described = site / "late_engine-1.0.dist-info"
    described.mkdir(parents=True)
    shutil.copy(EXAMPLE, site)
    (site / "late_engine.py").write_text(LATE)
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: late-engine\nVersion: 1.0\n")
    (described / "entry_points.txt").write_text("[dsv32.targets]\nlate = late_engine:open_late\n")
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.chdir(tmp_path)
    return site


def test_a_target_of_another_package_is_fuzzed_and_its_cases_replayed(registered: Path) -> None:
    assert "step_metadata" in fuzzed("--target", "late")
    path = next(path for path in Corpus(Path("corpus")).files() if path.name.startswith("step_metadata"))
    case = load_case(path)
    assert (case.target, case.options) == ("late", None)
    assert "FAILED step_metadata with late" in dsv32("replay", "corpus", "--target", "late", code=1).stdout
    assert dsv32("replay", str(path), "--options", "pr47766", code=0).stdout.startswith("FIXED step_metadata")
    refused = dsv32("fuzz", "--target", "late", "--vllm-path", "x", code=2)
    assert "target late takes no path; leave it out" in refused.stderr
    assert registered.is_dir()


@pytest.mark.nightly
def test_a_folder_in_the_place_of_vllm_is_fuzzed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that clears nothing: stale indices in the first step that shrinks."""
    monkeypatch.chdir(tmp_path)
    folder = write_fake(tmp_path / "fake", clear=False)
    assert "buffer_hygiene" in fuzzed("--target", "vllm", "--vllm-path", str(folder))
