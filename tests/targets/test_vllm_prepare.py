"""Preparing releases: names, requirements, and what is refused; nothing is downloaded."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_vllm import write_fake
from typer.testing import CliRunner

from dsv32_fuzz.targets.vllm.prepare import distribution_of, prepared, release_of, requirements
from dsv32_reports.cli import app


def test_releases_are_named_exactly() -> None:
    assert release_of("vllm==0.25.1") == "0.25.1"
    for wrong in ("vllm", "vllm>=0.24", "vllm==", "vllm==../x", "torch==2.0", "vllm==0.24.0; rm"):
        with pytest.raises(ValueError, match=r"write it like vllm==0\.24\.0"):
            release_of(wrong)


def test_only_requirements_of_the_release_are_ever_installed(tmp_path: Path) -> None:
    metadata = tmp_path / "vllm-1.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Name: vllm\nRequires-Dist: py-cpuinfo\nRequires-Dist: partial_json_parser>=1; extra == 'x'\n")
    required = requirements(tmp_path)
    assert required == {"py-cpuinfo", "partial-json-parser"}
    assert distribution_of("cpuinfo", required) == "py-cpuinfo"
    assert distribution_of("partial_json_parser.core", required) == "partial-json-parser"
    assert distribution_of("zmq", required) == "pyzmq"  # on the short list
    assert distribution_of("uvloop", {"fastapi"}) == "uvloop"  # a part of fastapi[standard]
    with pytest.raises(ValueError, match="the release imports uvloop"):
        distribution_of("uvloop", required)
    with pytest.raises(ValueError, match="the release imports evil, which is no requirement of it"):
        distribution_of("evil", required)


def test_prepared_releases_newest_first(tmp_path: Path) -> None:
    for release in ("0.9.2", "0.33.0", "0.24.0"):
        write_fake(tmp_path / release)
    (tmp_path / "env").mkdir()
    assert [folder.name for folder in prepared(tmp_path)] == ["0.33.0", "0.24.0", "0.9.2"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["target", "table"], "holds no prepared release"),
        (["target", "diff", "vllm==0.24.0", "vllm==0.26.0"], "is not prepared; run dsv32 target install vllm==0.24.0"),
        (["target", "contract", "vllm==0.24.0"], "is not prepared"),
        (["target", "install", "torch"], "names no release"),
    ],
)
def test_usage_errors_are_one_line_with_a_remedy(tmp_path: Path, arguments: list[str], told: str) -> None:
    done = CliRunner().invoke(app, [*arguments, "--into", str(tmp_path / "releases")])
    assert done.exit_code == 2
    assert told in done.output
    assert done.output.strip().count("\n") == 0
