"""How fast step batches are judged."""

from __future__ import annotations

from typing import Annotated

import msgspec
import torch
import typer
from rich.table import Table

from dsv32_fast.options import resolve
from dsv32_fuzz.bench.checks import bench_checks
from dsv32_fuzz.targets.intree import InTreeTarget
from dsv32_reports.commands.common import Assignments, Json, OptionsName, command, show


@command
def bench_checks_command(
    batches: Annotated[str, typer.Option(help="Batch sizes, separated by commas.")] = "1,64,256",
    steps: Annotated[int, typer.Option(min=16, help="Steps of a sequence.")] = 400,
    options: OptionsName = "pr47766",
    assignments: Assignments = None,
    json: Json = False,
) -> int:
    """Step batches fully judged by all step checks together per second of a core, and each one's share of the time.

    The true constants: topk 2048, 256 compute units, max_num_batched_tokens 8192. One thread, processor time.
    """
    sizes = tuple(int(part) if part.strip().isdecimal() else 0 for part in batches.split(","))
    torch.set_num_threads(1)
    rates = bench_checks(InTreeTarget(resolve(options, tuple(assignments or ()))), sizes, steps)
    if json:
        print(msgspec.json.encode(rates).decode())
        return 0
    table = Table("all step checks", *(f"batch {rate.batch}" for rate in rates))
    table.add_row("step batches per second of a core", *(f"{rate.steps_per_second:,.0f}" for rate in rates))
    table.add_row("lowest to highest", *(f"{rate.lowest:,.0f} to {rate.highest:,.0f}" for rate in rates))
    for name in rates[0].shares:
        table.add_row(f"share of {name}", *(f"{100 * rate.shares[name]:.0f} %" for rate in rates))
    show(table)
    return 0
