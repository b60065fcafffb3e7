"""Benchmarks: ratios measured in one run, never verdicts."""

from __future__ import annotations

import importlib.util
from typing import Annotated

import msgspec
import typer
from rich.table import Table

from dsv32_fuzz.bench.plan import bench_plan
from dsv32_fuzz.bench.ref import bench_ref
from dsv32_reports.commands.common import Json, command, show

MAX_BENCH_ROWS = 65536


@command
def bench_ref_command(
    repeats: Annotated[int, typer.Option(min=1, help="Timed steps of each side.")] = 5,
    threads: Annotated[int, typer.Option(min=1, help="Threads of both sides.")] = 1,
    json: Json = False,
) -> int:
    """Decode speed of the reference beside transformers' DeepSeek-V3.2, on the same weights, in one run.

    Needs the `oracle` extra and 2 GB of memory. The results are compared equal first.
    """
    if importlib.util.find_spec("transformers") is None:
        raise ValueError("transformers is not installed; install dsv32-validation[oracle]")
    timings = bench_ref(repeats=repeats, threads=threads)
    if json:
        print(msgspec.json.encode(timings).decode())
        return 0
    table = Table(
        "workload", "batch", "cached", "tokens/s", "ms", "transformers ms", "times faster", "over bare products"
    )
    for timing in timings:
        over = "" if timing.over_matmul is None else f"{timing.over_matmul:.2f}"
        milliseconds = (f"{1000 * timing.reference_s:.1f}", f"{1000 * timing.transformers_s:.1f}")
        cells = (timing.name, str(timing.batch), str(timing.cached_tokens), f"{timing.tokens_per_s:.0f}")
        table.add_row(*cells, *milliseconds, f"{timing.speedup:.1f}", over)
    show(table)
    return 0


@command
def bench_plan_command(
    rows: Annotated[str, typer.Option(help="Batch sizes, separated by commas.")] = "1,64,512",
    seconds: Annotated[float, typer.Option(min=0.1, help="Time per batch size.")] = 2.0,
    json: Json = False,
) -> int:
    """Plans per second of the emulated planner, beside the same algorithm on Python lists, in one run.

    2048 keys per row, 256 compute units, one thread. Both plans are compared equal after every repetition.
    """
    sizes = [int(part) if part.strip().isdecimal() else 0 for part in rows.split(",")]
    if not all(1 <= size <= MAX_BENCH_ROWS for size in sizes):
        raise ValueError(
            f"--rows is {rows!r}; write sizes from 1 to {MAX_BENCH_ROWS} separated by commas, like 1,64,512"
        )
    rates = bench_plan(tuple(sizes), seconds)
    if json:
        print(msgspec.json.encode(rates).decode())
        return 0
    table = Table("rows", "plans/s", "lowest", "highest", "on lists", "times faster", title="emulated planner")
    for rate in rates:
        spread = (rate.planner.median, rate.planner.lowest, rate.planner.highest, rate.lists.median, rate.speedup)
        table.add_row(str(rate.rows), *(f"{value:,.0f}" for value in spread))
    show(table)
    return 0
