"""The optimised path, tensor-parallel."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
import typer

from dsv32_fast.parallel.rank import TpSpec
from dsv32_fast.parallel.run import run_tp
from dsv32_fuzz.verdict import Status
from dsv32_reports.commands.common import EXIT_OF_STATUS, Json, command


@command
def tp(
    world: Annotated[int, typer.Option(help="Ranks: 1, 2, 4 or 8; the PR's own is 4.")] = 4,
    rows: Annotated[int, typer.Option(min=1, help="Requests, each with one token per decode step.")] = 8,
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights and tokens.")] = 0,
    kv_cache: Annotated[Literal["bf16", "fp8"], typer.Option(help="fp8: queries and probabilities too.")] = "bf16",
    json: Json = False,
) -> int:
    """Run the optimised path tensor-parallel, one process per rank, and hold it against TP 1.

    128 heads and 256 experts as in the real model, the rest small; emulated kernels, gloo. A minute or more.
    Where AITER ignores the plan (bf16, 16 heads, 32 rows or more) the claim about the cache is SKIPPED.
    """
    result = run_tp(TpSpec(world=world, rows=rows, seed=seed, kv_cache=kv_cache))
    if json:
        print(msgspec.json.encode(result).decode())
    else:
        sizes = f"{result.heads} heads a rank, {rows} rows, {kv_cache} cache"
        print(f"{result.status} TP {world}, {sizes}, evidence level: emulated")
        for claim in result.claims:
            print(f"  {claim.status:<10} {claim.name}: {claim.summary}")
    return EXIT_OF_STATUS[Status(result.status)]
