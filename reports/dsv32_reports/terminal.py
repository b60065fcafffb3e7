"""The terminal: progress on standard error while a run goes on, the verdict on standard output when it is done."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from dsv32_fuzz.events import CounterexampleFound, Event, PhaseStarted, RunFinished
from dsv32_fuzz.events import Progress as ProgressEvent
from dsv32_fuzz.verdict import Status
from dsv32_reports.model import Outcome, Report

STYLES = {Status.PASSED: "green", Status.FAILED: "red", Status.MISTRUSTED: "yellow", Status.SKIPPED: "dim"}
OUTCOME_STYLES = {Outcome.GO: "bold green", Outcome.NO_GO: "bold red", Outcome.INCONCLUSIVE: "bold yellow"}


class ProgressListener:
    """A bar per phase on a terminal, one line per phase elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bars.add_task("starting", total=1.0, note="")
        self._bars.start()

    def __call__(self, event: Event) -> None:
        """Show one event."""
        match event:
            case PhaseStarted():
                self._bars.reset(self._task, description=event.title, total=1.0, note="")
                if not self._console.is_terminal:
                    budget = f" ({event.seconds:.0f} s)" if event.seconds else ""
                    self._console.print(f"{event.title}{budget} ...", markup=False, highlight=False)
            case ProgressEvent():
                self._bars.update(self._task, completed=event.done, note=event.text)
            case CounterexampleFound():
                text = f"counterexample: {event.case.check} in {event.case.scope} ({len(event.case.steps)} steps)"
                self._console.print(text, markup=False, highlight=False, style="red")
            case RunFinished():
                self._bars.stop()

    def close(self) -> None:
        """Leave the terminal as it was."""
        self._bars.stop()


def print_report(report: Report, folder: Path, console: Console, *, quiet: bool = False) -> None:
    """Verdict and path first, then the gates, the counterexamples, the skip rates and what was not judged."""
    headline = Text.assemble(
        (report.outcome.value, OUTCOME_STYLES[report.outcome]),
        f"  {report.options_text}, evidence level: {report.evidence} (CPU, no MI355X)\n{report.reason}\n",
        f"report: {folder / 'report.html'}",
    )
    console.print(headline, highlight=False, soft_wrap=True)
    if quiet:
        return
    console.print(_gate_table(report))
    if report.sequences:
        done = report.sequences
        console.print(
            f"{done.sequences} independently seeded serving runs, {done.step_batches} step batches checked, "
            f"{done.failed} runs failed; 95 % upper bound on the share of such runs that fail: "
            f"{100 * done.failure_rate_upper_bound:.1f} %",
            highlight=False,
        )
    for finding in report.findings:
        console.print(f"\n{finding.check} in {finding.scope}: {finding.summary}", markup=False, highlight=False)
        if finding.classification:
            console.print(f"  {finding.classification}", markup=False, highlight=False)
        for i, step in enumerate(finding.steps):
            console.print(f"  step {i}: {step}", markup=False, highlight=False)
        console.print(f"  {finding.command}", markup=False, highlight=False, soft_wrap=True)
    if report.tables.get("skip_rate"):
        console.print(_skip_table(report))
    for row in report.tables.get("short_contexts", []):
        console.print(str(row["text"]), markup=False, highlight=False)
    console.print("\nNot judged:", style="bold")
    for text in report.not_judged:
        console.print(f"- {text}", markup=False, highlight=False)


def _gate_table(report: Report) -> Table:
    table = Table("gate", "status", "where", "found", title="gates", title_justify="left")
    for gate in report.gates:
        table.add_row(gate.title, Text(gate.status.value, STYLES[gate.status]), "", "")
        for line in gate.lines:
            table.add_row("", Text(line.status.value, STYLES[line.status]), line.scope, Text(line.summary))
    return table


def _skip_table(report: Report) -> Table:
    numbers = ("budget", "input", "spread", "requests", "steps", "skipped", "in decode", "rightful", "wrongful")
    table = Table(title="plan rebuilds skipped (claimed: 94 %)", title_justify="left")
    for name in numbers:
        table.add_column(name, justify="right")
    for row in report.tables["skip_rate"]:
        table.add_row(
            str(row["budget"]),
            str(row["input_len"]),
            f"{100 * row['spread']:.0f} %",
            f"{row['requests']} {row['arrivals']}",
            str(row["steps"]),
            f"{100 * row['skip_rate']:.1f} %",
            f"{100 * row['decode_skip_rate']:.1f} %",
            str(row["rightful"]),
            str(row["wrongful"]),
        )
    return table
