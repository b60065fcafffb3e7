"""The documents name the commands and options that there are: all of them in docs/commands.md, no other anywhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from dsv32_reports.cli import app

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "docs" / "commands.md"
PAGES = [page for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if "dsv32 " in page.read_text()]
OPTION = re.compile(r"(?<![\w-])--?[a-z][a-z-]*")


def commands_of(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, list[Any]]]:
    """Every command as it is typed behind `dsv32`, with its parameters."""
    for name, one in group.commands.items():
        if hasattr(one, "commands"):
            yield from commands_of(one, (*path, name))
        else:
            yield " ".join((*path, name)), one.params


PARAMETERS = dict(commands_of(get_command(app)))
COMMANDS = {
    name: {text for p in parameters if p.param_type_name == "option" for text in (*p.opts, *p.secondary_opts)}
    for name, parameters in PARAMETERS.items()
}
HELP = {"--help", "-h"}


def command_lines(page: str) -> Iterator[str]:
    """What follows `dsv32` in code blocks and code spans, continuation lines joined, comments and pipes cut off."""
    blocks = re.findall(r"^ {4}dsv32 (.*(?:\n {5,}\S.*)*)", page, re.MULTILINE)
    spans = re.findall(r"`dsv32 ([^`]*)`", page)
    for text in (*blocks, *spans):
        yield re.split(r" # | > | \| grep ", " ".join(text.replace("\\\n", " ").split()))[0]


def command_in(line: str) -> str | None:
    """The command that a line starts with; None for a group's name, a placeholder or an option of `dsv32` itself."""
    words = line.split()
    for length in (2, 1):
        if " ".join(words[:length]) in COMMANDS:
            return " ".join(words[:length])
    groups = {name.split()[0] for name in COMMANDS if " " in name}
    assert not words or words[0] in groups | {"COMMAND"} or words[0].startswith("-"), f"no command: dsv32 {line}"
    return None


def synopses() -> dict[str, set[str]]:
    """The options that the synopsis of docs/commands.md gives each command."""
    section = REFERENCE.read_text().partition("\n## Synopsis\n")[2].partition("\n## ")[0]
    found = [(command_in(line), set(OPTION.findall(line))) for line in command_lines(section) if " COMMAND" not in line]
    return {name: options for name, options in found if name is not None}


def test_the_synopsis_has_every_command() -> None:
    assert set(synopses()) == set(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_synopsis_has_every_option(name: str) -> None:
    assert synopses()[name] == COMMANDS[name] - HELP


def test_the_table_has_every_command() -> None:
    rows = re.findall(r"^\| `dsv32 ([^`]*)`", REFERENCE.read_text(), re.MULTILINE)
    assert {command_in(row) for row in rows} == set(COMMANDS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_page_names_an_option_that_is_not_there(page: Path) -> None:
    for line in command_lines(page.read_text()):
        name = command_in(line)
        if name is not None:
            assert set(OPTION.findall(line)) <= COMMANDS[name] | HELP, line


@pytest.mark.parametrize("name", PARAMETERS)
def test_every_parameter_has_a_help_text(name: str) -> None:
    assert [p.name for p in PARAMETERS[name] if not p.help] == []
