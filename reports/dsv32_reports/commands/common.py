"""What every command shares: its options, its errors, its exit codes."""

from __future__ import annotations

import errno
import functools
import os
import signal
import sys
from collections.abc import Callable
from typing import Annotated, NoReturn, ParamSpec

import typer
from rich.table import Table

from dsv32_fast.options import PRESETS
from dsv32_fuzz.verdict import Status
from dsv32_reports.model import EXIT_INTERRUPTED, EXIT_USAGE
from dsv32_reports.terminal import Output

P = ParamSpec("P")

EXIT_CLOSED = 128 + signal.SIGPIPE
"""Whoever read the output stopped reading, as `head` does."""

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
EXIT_OF_STATUS = {Status.PASSED: 0, Status.FAILED: 1, Status.MISTRUSTED: 3, Status.SKIPPED: 3}

OptionsName = Annotated[str, typer.Option("--options", help=f"Options of the optimised path: {', '.join(PRESETS)}.")]
Assignments = Annotated[
    list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Set one field of the options, e.g. bias=fp32.")
]
TargetName = Annotated[str, typer.Option("--target", help="What is under test; dsv32 target list names them.")]
VllmPath = Annotated[
    str | None, typer.Option("--vllm-path", help="Folder that holds the package vllm: prepared, or a source tree.")
]
TargetPython = Annotated[
    str | None, typer.Option("--target-python", help="Interpreter that has the target, such as that of a ROCm image.")
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of inputs, orders and resampling.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]


def fail(message: str) -> NoReturn:
    """One line on standard error, exit 2."""
    print(f"dsv32: error: {' '.join(message.split())}", file=sys.stderr)
    raise typer.Exit(EXIT_USAGE)


def command(function: Callable[P, int]) -> Callable[P, None]:
    """Turn a function that returns an exit code into a command with the suite's errors and exit codes."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            code = function(*args, **kwargs)
            sys.stdout.flush()
        except KeyboardInterrupt:
            print("dsv32: interrupted", file=sys.stderr)
            raise typer.Exit(EXIT_INTERRUPTED) from None
        except ValueError as error:
            fail(str(error))
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still buffered has no reader
            raise typer.Exit(EXIT_CLOSED) from None
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            remedy = "free space or choose another place" if error.errno in NO_ROOM else "give another path"
            fail(f"{where}{error.strerror}; {remedy}, then run the command again")
        raise typer.Exit(code)

    return run


def show(table: Table) -> None:
    """Print a table whose cells are folded, never cut; off a terminal it has 120 columns at least."""
    for column in table.columns:
        column.overflow = "fold"
    console = Output()
    if not console.is_terminal:
        console.width = max(console.width, 120)
    console.print(table)


def numbers(option: str, text: str, least: int = 1) -> list[int]:
    """The integers that an option lists, separated by commas; a ValueError names the option."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) >= least for part in parts):
        raise ValueError(f"{option} is {text!r}; write integers from {least} up, separated by commas")
    return [int(part) for part in parts]
