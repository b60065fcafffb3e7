"""The templates for a user's own CI: they are well-formed, and every command in them is one that `dsv32` takes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from dsv32_reports.cli import app

ROOT = Path(__file__).parents[2]
CI = ROOT / "docs" / "ci"
COMMAND = re.compile(r"(?:\.venv/bin/|\$\(BIN\)/)dsv32 (.+)")
STAND_INS = (
    (r"\$\{\{ *inputs\.max-time[^}]*\}\}|\$\(MAX_TIME\)", "30m"),
    (r"\$\$BUILDKITE_PARALLEL_JOB_COUNT", "2"),
    (r"\$\{\{[^}]*\}\}|\$\([A-Z]+\)|\$\$[A-Z_]+", "1"),
)
"""What a shell or the CI would put in, as regular expressions."""


def folded(text: str) -> str:
    """Lines that a backslash goes on joined."""
    return re.sub(r"\\\n\s*", " ", text)


def commands(text: str) -> list[list[str]]:
    """The arguments of each `dsv32` command in lines of shell."""
    found = COMMAND.findall(folded(text))
    for pattern, value in STAND_INS:
        found = [re.sub(pattern, value, command) for command in found]
    return [shlex.split(re.split(r" \|\|? |; ", command)[0]) for command in found]


def parsed(arguments: list[str]) -> dict[str, Any]:
    """The values of the options as `dsv32` reads them; an unknown one raises."""
    group: Any = typer.main.get_command(app)
    values: dict[str, Any] = group.commands[arguments[0]].make_context(arguments[0], arguments[1:]).params
    return values


def steps_of(name: str) -> list[str]:
    """Every line of shell in a pipeline, however deep it lies."""
    yaml = pytest.importorskip("yaml", reason="PyYAML comes with the extra `ray`")

    def visit(part: object) -> list[str]:
        if isinstance(part, dict):
            own = [part[key] for key in ("run", "command") if key in part]
            lines = [line for each in own for line in (each if isinstance(each, list) else [each])]
            return lines + [line for value in part.values() for line in visit(value) if not isinstance(value, str)]
        return [line for value in part for line in visit(value)] if isinstance(part, list) else []

    return visit(yaml.safe_load((CI / name).read_text(encoding="utf-8")))


@pytest.mark.parametrize("name", ["github-actions.yml", "buildkite.yml"])
def test_a_pipeline_fuzzes_on_two_machines_and_merges(name: str) -> None:
    lines = steps_of(name)
    assert "make .venv/ready" in lines
    fuzz, merge = (parsed(arguments) for line in lines for arguments in commands(line))
    assert (fuzz["profile"], fuzz["max_time"], fuzz["shard"]) == ("nightly", "30m", "1/2")
    assert fuzz["corpus"] == merge["corpus"]
    for given in (fuzz, merge):
        assert (ROOT / given["ledger"]).is_file()


def test_cron_makes_a_night_with_settings_that_the_makefile_has() -> None:
    text = (CI / "nightly.cron").read_text(encoding="utf-8")
    (entry,) = [line for line in text.splitlines() if re.match(r"[\d*]", line)]
    *when, command = entry.split(maxsplit=5)
    assert all(re.fullmatch(r"\d+|\*", field) for field in when)
    assert "make --no-print-directory nightly" in command
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert all(f"\n{name} ?= " in makefile for name in re.findall(r" ([A-Z]+)=", command))
    (arguments,) = [found for found in commands(makefile) if found[0] == "fuzz"]
    assert parsed(arguments)["profile"] == "nightly"


def test_a_wrong_option_would_be_seen() -> None:
    with pytest.raises(Exception, match="No such option"):
        parsed(["fuzz", "--max-times", "30m"])
