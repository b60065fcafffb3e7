"""The terminal: progress on standard error while a run goes on, the verdict on standard output when it is done."""

from __future__ import annotations

import errno
import os
from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from dsv32_fuzz.events import CounterexampleFound, Event, PhaseStarted, RunFinished
from dsv32_fuzz.events import Progress as ProgressEvent
from dsv32_fuzz.verdict import Status
from dsv32_reports.model import Finding, Gate, Outcome, Report
from dsv32_reports.wording import headline, printable, sentence

STYLES = {Status.PASSED: "green", Status.FAILED: "red", Status.MISTRUSTED: "yellow", Status.SKIPPED: "dim"}
OUTCOME_STYLES = {Outcome.GO: "bold green", Outcome.NO_GO: "bold red", Outcome.INCONCLUSIVE: "bold yellow"}


class Output(Console):
    """A console whose closed pipe stays a `BrokenPipeError`; rich makes it an exit with 1, which here is a finding."""

    def on_broken_pipe(self) -> None:
        """Tell whoever prints."""
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


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
                text = f"counterexample: {event.case.check} in {event.case.scope}"
                self._console.print(text, markup=False, highlight=False, style="red")
            case RunFinished():
                self._bars.stop()

    def close(self) -> None:
        """Leave the terminal as it was."""
        self._bars.stop()


def print_report(report: Report, folder: Path, digest: str, console: Console, *, quiet: bool = False) -> None:
    """Verdict and path first, then the gates with what was not judged, the counterexamples and the skip rates."""
    no_gpu = " (CPU, no MI355X)" if report.evidence == "emulated" else ""
    console.print(
        Text.assemble(
            (report.outcome.value, OUTCOME_STYLES[report.outcome]),
            f"  {printable(headline(report))}\n{printable(sentence(report.reason))}\n",
            f"evidence level: {report.evidence}{no_gpu}\n",
            f"report: {folder / 'report.html'}",
        ),
        soft_wrap=True,
    )
    _say(console, f"digest: {digest}")
    if quiet:
        return
    _say(console, "")
    for traffic in report.traffic:
        failed = f": {', '.join(traffic.failed)}" if traffic.failed else ""
        _status_line(console, traffic.status, f"{traffic.scope}{failed}")
    _say(console, "")
    for gate in report.gates:
        _print_gate(gate, console)
    if report.sequences:
        done = report.sequences
        _say(
            console,
            f"\n{done.sequences} independently seeded serving runs, {done.step_batches} step batches, "
            f"{done.failed} runs failed: at most {100 * done.failure_rate_upper_bound:.1f} % of such runs fail "
            "(95 % upper bound, Clopper-Pearson)",
        )
    for finding in report.findings:
        _print_finding(finding, console)
    if report.tables.get("skip_rate"):
        console.print()
        console.print(_skip_table(report))
    for row in report.tables.get("short_contexts", []):
        _say(console, str(row["text"]))


def _status_line(console: Console, status: Status, text: str, indent: str = "") -> None:
    console.print(
        Text.assemble(indent, (f"{status.value:<10}", STYLES[status]), f"  {printable(text)}"), soft_wrap=True
    )


def _say(console: Console, text: str) -> None:
    console.print(printable(text), markup=False, highlight=False, soft_wrap=True)


def _print_gate(gate: Gate, console: Console) -> None:
    """A passed gate without the lines that say the same of several scopes; any other gate with all its lines."""
    steps = sum(int(line.measured.get("steps", 0)) for line in gate.lines)
    over = f" ({steps} steps in {len(gate.lines)} scopes)" if steps and gate.status is Status.PASSED else ""
    if not gate.judged:
        _say(console, f"NOT JUDGED  {gate.title}: {gate.lines[0].summary if gate.lines else gate.meaning}")
        return
    _status_line(console, gate.status, f"{gate.title}: {gate.meaning}{over}")
    told = Counter(line.summary for line in gate.lines)
    for line in gate.lines:
        if gate.status is not Status.PASSED or told[line.summary] == 1:
            _status_line(console, line.status, f"{line.scope}: {line.summary}", indent="    ")


def _print_finding(finding: Finding, console: Console) -> None:
    _say(console, f"\nCounterexample for {finding.check}, {finding.scope}: {finding.summary}")
    if finding.classification:
        _say(console, f"  {finding.classification}")
    if finding.also_fails:
        _say(console, f"  also fails: {', '.join(finding.also_fails)}")
    for line in finding.shown:
        _say(console, f"  {line}")
    _say(console, f"  {finding.command}")


def _skip_table(report: Report) -> Table:
    rows = report.tables["skip_rate"]
    title = f"Plan rebuilds skipped, {rows[0]['input_len']} in / 500 out / 64, {rows[0]['arrivals']} (claimed: 94 %)"
    caption = "served: requests; spread: of their lengths; budget: tokens a step; right, wrong: skips that keep a plan"
    table = Table(title=title, title_justify="left", caption=f"{caption} for the step's rows, or for others")
    table.caption_justify = "left"
    for name in ("served", "spread", "budget", "steps", "skipped", "in decode", "right", "wrong"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            str(row["requests"]),
            f"{100 * row['spread']:.0f} %",
            str(row["budget"]),
            str(row["steps"]),
            f"{100 * row['skip_rate']:.1f} %",
            f"{100 * row['decode_skip_rate']:.1f} %",
            str(row["rightful"]),
            str(row["wrongful"]),
        )
    return table
