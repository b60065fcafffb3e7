"""The fault catalogue and its kill matrix."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer

from dsv32_fuzz.case import save_case, write_atomically
from dsv32_fuzz.faults import AREAS, CATALOGUE, of_area
from dsv32_fuzz.faults.journal import Run, finished, read, written
from dsv32_fuzz.faults.matrix import assemble, run_rows, tasks_of
from dsv32_fuzz.faults.picture import heat_map
from dsv32_fuzz.faults.results import ControlRow, FaultRow, KillMatrix
from dsv32_reports.commands.common import Json, command
from dsv32_reports.model import EXIT_USAGE

Only = Annotated[str, typer.Option("--only", metavar="AREA", help=f"One area: {', '.join(AREAS)}.")]
Out = Annotated[
    Path | None,
    typer.Option("--out", metavar="DIR", help="Write faults.json, faults.svg and cases here; an ended run goes on."),
]


@command
def faults(
    gate: Annotated[
        Literal["ci", "nightly"], typer.Option(help="ci: up to the first kill. nightly: all cells.")
    ] = "ci",
    only: Only = "",
    name: Annotated[list[str] | None, typer.Option("--name", help="One fault; may be repeated.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of all searches.")] = 0,
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = 2,
    catalogue: Annotated[bool, typer.Option("--list", help="List the faults and run nothing.")] = False,
    out: Out = None,
    json: Json = False,
) -> int:
    """Inject every fault of the catalogue and count which check kills it.

    Exit code 0 if every fault is killed and no check fails without one; 1 for a survivor or a false alarm; 3 if no
    check compared anything for some fault.
    """
    names = list(name) if name else [fault.name for fault in (of_area(only) if only else CATALOGUE)]
    if catalogue:
        _list(names, json)
        return 0
    matrix = _run(Run(gate=gate, seed=seed, names=tuple(names)), jobs, out, quiet=json)
    if out is not None:
        write(matrix, out)
    print(msgspec.json.encode(matrix).decode() if json else summary(matrix))
    return exit_code(matrix)


def exit_code(matrix: KillMatrix) -> int:
    """0, 1 or 3; see `faults`."""
    if matrix.false_alarms or any(row.compared for row in matrix.survivors):
        return 1
    return 3 if matrix.survivors else 0


def _list(names: list[str], json: bool) -> None:
    unknown = set(names) - {fault.name for fault in CATALOGUE}
    if unknown:
        print(f"dsv32: error: unknown fault {sorted(unknown)[0]!r}; leave --name out to see all", file=sys.stderr)
        raise typer.Exit(EXIT_USAGE)
    shown = [fault for fault in CATALOGUE if fault.name in names]
    if json:
        fields = ("name", "area", "story", "reference", "bugs", "seams", "options")
        print(msgspec.json.encode([{field: getattr(fault, field) for field in fields} for fault in shown]).decode())
        return
    for fault in shown:
        print(f"{fault.name:<32} {fault.area:<10} {fault.story} [{fault.reference}]")


def _run(run: Run, jobs: int, out: Path | None, *, quiet: bool) -> KillMatrix:
    old = [] if out is None else read(out, run)
    new = run_rows(run.names, run.gate, run.seed, jobs, old)
    total, started, rows = len(tasks_of(run.names)), time.monotonic(), []
    if old and not quiet:
        print(f"{len(old)} of {total} rows are there already", flush=True)
    for row in new if out is None else written(out, run, old, new):
        rows.append(row)
        left = (time.monotonic() - started) / max(1, len(rows) - len(old)) * (total - len(rows))
        if not quiet and len(rows) > len(old):
            print(f"{len(rows):>3}/{total}, {left / 60:.0f} min left  {_line(row)}", flush=True)
    return assemble(rows, run.gate, run.seed, time.monotonic() - started)


def _line(row: FaultRow | ControlRow) -> str:
    if isinstance(row, ControlRow):
        quiet = f"{row.passed} of {row.checks} checks passed" if not row.false_alarms else "FALSE ALARM"
        return f"control   {row.options:<32} {quiet}, {row.examples} examples, {row.seconds:.1f} s"
    if not row.killed:
        return f"{'SURVIVED' if row.compared else 'UNTESTED':<9} {row.fault:<32} {row.examples} examples"
    kill = row.kills[0]
    return f"killed    {row.fault:<32} {kill.check}, {kill.examples} examples, {kill.seconds:.2f} s: {kill.summary}"


def summary(matrix: KillMatrix) -> str:
    """The table of areas, then whoever needs attention."""
    lines = ["", f"{'area':<12} {'killed':>6} {'faults':>6}"]
    lines += [f"{area:<12} {killed:>6} {total:>6}" for area, (killed, total) in matrix.counts().items()]
    killed, total = len(matrix.rows) - len(matrix.survivors), len(matrix.rows)
    lines.append(f"{'all':<12} {killed:>6} {total:>6}")
    times = f"run {matrix.seconds:.0f} s, searches {matrix.cpu_seconds:.0f} s of CPU"
    lines.append(f"median time to kill {matrix.median_seconds:.2f} s, {times}, seed {matrix.seed}")
    parts = {
        "survived": [row.fault for row in matrix.survivors],
        "false alarms": sorted({f"{kill.check} ({kill.summary})" for kill in matrix.false_alarms}),
        "killed by one check only": [row.fault for row in matrix.killed_by_one] if matrix.gate == "nightly" else [],
        "checks that kill nothing": [check.name for check in matrix.idle_checks] if matrix.gate == "nightly" else [],
    }
    return "\n".join([*lines, *(f"{title}: {', '.join(found)}" for title, found in parts.items() if found)])


def write(matrix: KillMatrix, folder: Path) -> None:
    """faults.json, faults.svg, and one case per kill that was searched for, in the place of the run's journal."""
    (folder / "cases").mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "faults.json", msgspec.json.format(msgspec.json.encode(matrix), indent=2) + b"\n")
    write_atomically(folder / "faults.svg", heat_map(matrix).encode())
    for row in matrix.rows:
        for kill in row.kills:
            case = kill.saved()
            if case is not None:
                save_case(case, folder / "cases" / f"{row.fault}-{kill.check}.json")
    finished(folder)
