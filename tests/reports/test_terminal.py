"""What the terminal says of a gate."""

from __future__ import annotations

import io
from pathlib import Path

import msgspec
from report_worlds import whole_run
from rich.console import Console

from dsv32_fuzz.verdict import Status
from dsv32_reports.fold import fold
from dsv32_reports.terminal import print_report


def test_a_passed_gate_shows_each_line_that_says_something_of_its_own() -> None:
    report = fold(whole_run(), "a")
    gate = next(gate for gate in report.gates if gate.status is Status.PASSED and gate.lines)
    texts = ["the same", "the same", "one", "another"]
    lines = [msgspec.structs.replace(gate.lines[0], summary=text, scope=f"s{i}") for i, text in enumerate(texts)]
    console = Console(file=io.StringIO(), width=120)
    print_report(
        msgspec.structs.replace(report, gates=[msgspec.structs.replace(gate, lines=lines)]), Path("a"), "", console
    )
    told = console.file.getvalue()
    assert [f"s{i}: {text}" in told for i, text in enumerate(texts)] == [False, False, True, True]
