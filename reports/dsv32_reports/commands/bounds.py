"""How much of its proven bound each stage uses."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer
from rich.table import Table

from dsv32_ref.bounds.utilisation import utilisation
from dsv32_ref.config import GOLDEN, PRECISIONS
from dsv32_reports.commands.common import Json, command, show


@command
def bounds(
    precision: Annotated[str, typer.Option(help=f"Rounding points: {', '.join(PRECISIONS)}.")] = "bf16_q",
    simulated: Annotated[bool, typer.Option(help="Against the simulated-quantised values.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights and inputs.")] = 0,
    json: Json = False,
) -> int:
    """How much of its proven error bound honest arithmetic uses, stage by stage, on a small world.

    Budget used is |error| / bound. Exit 1 if any element exceeds its bound.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"unknown precision {precision!r}; choose one of {', '.join(PRECISIONS)}")
    rows = utilisation(GOLDEN, PRECISIONS[precision], simulated=simulated, seed=seed)
    if json:
        print(msgspec.json.encode(rows).decode())
    else:
        table = Table("stage", "elements", "median", "worst", title=f"budget used, {precision}")
        for row in rows:
            table.add_row(row.stage, str(row.elements), f"{row.median:.2g}", f"{row.worst:.2g}")
        show(table)
    return int(any(not row.worst <= 1 for row in rows))
