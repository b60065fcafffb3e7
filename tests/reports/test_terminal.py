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


def test_no_text_of_a_run_controls_the_terminal() -> None:
    report = fold(whole_run(failing=True), "a")
    odd = "\x1b[2J\x9b1m[bold]GO[/]\r"
    gates = [
        msgspec.structs.replace(gate, lines=[msgspec.structs.replace(line, summary=odd) for line in gate.lines])
        for gate in report.gates
    ]
    findings = [msgspec.structs.replace(found, summary=odd, shown=[odd]) for found in report.findings]
    changed = msgspec.structs.replace(report, gates=gates, findings=findings, reason=odd, options_text=odd)
    console = Console(file=io.StringIO(), width=120)
    print_report(changed, Path("a"), "", console)
    told = console.file.getvalue()
    assert "[bold]GO[/]" in told
    assert not set("\x1b\x9b\r") & set(told)


def test_what_was_not_judged_is_told_once() -> None:
    report = fold(whole_run(), "a")
    console = Console(file=io.StringIO(), width=120)
    print_report(report, Path("a"), "", console)
    for text in report.not_judged:
        assert console.file.getvalue().count(text.partition(": ")[2]) == 1
