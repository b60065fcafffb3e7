"""Traces of a real engine, before a change and after it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.table import Table

from dsv32_fuzz.latency.evidence import of_traces
from dsv32_fuzz.traces.compare import TraceComparison, compare
from dsv32_fuzz.traces.kineto import read_trace
from dsv32_fuzz.traces.steps import StepTable, step_table
from dsv32_reports.commands.common import Json, command, show

EXIT_OF_VERDICT = {"faster": 0, "no difference": 0, "slower": 1, "cannot tell": 3}


@command
def trace(
    before: Annotated[Path, typer.Argument(help="Kineto trace before the change, .json or .json.gz.")],
    after: Annotated[Path, typer.Argument(help="The same workload after the change.")],
    step_marker: Annotated[
        str | None, typer.Option("--step-marker", metavar="REGEX", help="Annotation that begins a step.")
    ] = None,
    count: Annotated[
        list[str] | None, typer.Option("--count", metavar="NAME=REGEX", help='What to count, e.g. "casts=my_kernel".')
    ] = None,
    decode_only: Annotated[bool, typer.Option("--decode-only", help="Leave out steps with prompt tokens.")] = False,
    partial: Annotated[bool, typer.Option("--partial", help="Use what is readable of a damaged trace.")] = False,
    margin: Annotated[float, typer.Option(help="Smallest effect that matters, as a share of the step.")] = 0.01,
    out: Annotated[
        Path | None, typer.Option(help="Write the evidence, every step time included, to this file.")
    ] = None,
    json: Json = False,
) -> int:
    """Was the step made faster: two traces of torch.profiler or vLLM, step by step, against the claims of PR #42982.

    Reads files of hundreds of MB as a stream. Exit 0 faster or no difference, 1 slower or a claim refuted, 3 if it
    cannot be told or a trace is partial. A trace without device work confirms arithmetic only.
    """
    patterns = _patterns(count or [])

    def table(path: Path) -> StepTable:
        return step_table(read_trace(path, partial=partial), step_marker, patterns, decode_only=decode_only)

    found = compare(table(before), table(after), margin)
    if out is not None:
        out.write_bytes(msgspec.json.encode(of_traces(found)))
    if json:
        print(msgspec.json.encode(found).decode())
    else:
        _show(found)
    if found.partial:
        return 3
    if any(claim.status == "refuted" for claim in found.claims):
        return 1
    return EXIT_OF_VERDICT[found.verdict]


def _patterns(counts: list[str]) -> dict[str, str]:
    pairs = [text.partition("=") for text in counts]
    for name, sign, expression in pairs:
        if not (name and sign and expression):
            raise ValueError(f"--count is {name + sign + expression!r}; write NAME=REGEX, like casts=my_kernel")
    return {name: expression for name, _, expression in pairs}


def _show(found: TraceComparison) -> None:
    interval = _interval(found.ratio_low, found.ratio_high, ".4f")
    print(f"{found.verdict}: after / before = {found.ratio:.4f} {interval}, margin {100 * found.margin:g} %")
    for side, steps in (("before", found.before), ("after", found.after)):
        print(f"  {side}: {_described(steps)}")
    print("One trace a side: intervals (99 %) hold the variation within a run, not that between runs.")
    if found.level == "host":
        print("No device work in a trace: counts are of host operators and confirm arithmetic only.")
    table = Table("per step", "before", "after", "difference", "99 % interval")
    for name, (a, b) in found.quantiles.items():
        table.add_row(f"step, ms, {name}", f"{a:.4g}", f"{b:.4g}", f"{b - a:+.4g}", "")
    for row in found.rows:
        cells = (f"{row.before:.6g}", f"{row.after:.6g}", f"{row.difference:+.4g}", _interval(row.low, row.high, ".4g"))
        table.add_row(row.name, *cells)
    show(table)
    claims = Table("claim of PR #42982", "claimed", "measured", "status")
    for claim in found.claims:
        claims.add_row(claim.name, claim.claimed, claim.measured, claim.status)
    show(claims)


def _described(table: StepTable) -> str:
    decode = "" if table.decode is None else f", {sum(table.decode)} of them decode only"
    cut = "" if table.cut is None else f"; PARTIAL: {table.cut}"
    return f"{table.path}: {table.steps} steps{decode}, {table.level} level, marked by {table.marker}{cut}"


def _interval(low: float | None, high: float | None, form: str) -> str:
    return "(too few steps for an interval)" if low is None or high is None else f"[{low:{form}}, {high:{form}}]"
