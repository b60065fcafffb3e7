"""What a serving workload should gain, and the pull request's own workload beside its claims."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal, cast

import msgspec
import typer
from rich.table import Table as RichTable

from dsv32_fuzz.latency.cost import Costs, Prediction, claim_rows, costs_of, predict, sweep
from dsv32_fuzz.traces.kineto import read_trace
from dsv32_fuzz.workload import PR42982_WORKLOAD, Workload
from dsv32_fuzz.workload.skip_rate import BUDGETS
from dsv32_reports.commands.common import Json, Seed, command, numbers, show
from dsv32_reports.skip_plot import USEFUL, skip_plot

Policy = Annotated[str, typer.Option("--key", help="Metadata key: pr42982 or pr47766.")]
PlanCost = Annotated[str | None, typer.Option(metavar="LOW:HIGH", help="Microseconds of a plan launch.")]
CastCost = Annotated[str | None, typer.Option(metavar="LOW:HIGH", help="Microseconds of a cast.")]
ClearCost = Annotated[str | None, typer.Option(metavar="LOW:HIGH", help="Microseconds to clear a megabyte.")]


@command
def bench_claims_command(
    key: Policy = "pr42982",
    plan_us: PlanCost = None,
    cast_us: CastCost = None,
    clear_us_per_mb: ClearCost = None,
    costs_from: Annotated[Path | None, typer.Option(help="Take plan and cast costs from this device trace.")] = None,
    json: Json = False,
) -> int:
    """PR #42982's own workload, baseline against optimised, beside its claims: what is confirmed and what cannot be."""
    costs = _costs(plan_us, cast_us, clear_us_per_mb, costs_from)
    rows = [
        predict(msgspec.structs.replace(PR42982_WORKLOAD, max_num_batched_tokens=budget), _policy(key), costs)
        for budget in BUDGETS
    ]
    claims = claim_rows(rows)
    if json:
        print(msgspec.json.encode({"predictions": rows, "claims": claims, "costs": costs}).decode())
        return 0
    _show_predictions(rows, ("budget", lambda p: str(p.workload.max_num_batched_tokens)))
    table = RichTable("claim", "claimed", "found", "status")
    for claim in claims:
        table.add_row(claim.claim, claim.claimed, claim.found, claim.status)
    show(table)
    return 0


@command
def bench_workload_command(
    isl: Annotated[str, typer.Option(help="Input lengths, separated by commas.")] = "512,1024,2048,4096,8192",
    concurrency: Annotated[str, typer.Option(help="Requests at a time, separated by commas.")] = "1,16,64",
    mtp: Annotated[str, typer.Option(help="Draft tokens per step, separated by commas.")] = "0,1,3",
    osl: Annotated[int, typer.Option(min=1, help="Output tokens per request.")] = 500,
    budget: Annotated[int, typer.Option(min=1, help="Tokens per step at most: vLLM's max_num_batched_tokens.")] = 8192,
    spread: Annotated[float, typer.Option(help="Spread of the lengths, as a fraction.")] = 0.0,
    acceptance: Annotated[float, typer.Option(help="Probability that a draft is accepted.")] = 0.85,
    key: Policy = "pr47766",
    plan_us: PlanCost = None,
    cast_us: CastCost = None,
    clear_us_per_mb: ClearCost = None,
    costs_from: Annotated[Path | None, typer.Option(help="Take plan and cast costs from this device trace.")] = None,
    svg: Annotated[Path | None, typer.Option(help="Write a plot of the skip rates to this file.")] = None,
    seed: Seed = 0,
    json: Json = False,
) -> int:
    """What a serving workload should gain over input length, concurrency and MTP; where the cache stops helping."""
    workload = msgspec.structs.replace(
        Workload(), output_len=osl, max_num_batched_tokens=budget, length_spread=spread, acceptance=acceptance
    )
    grid = (numbers("--isl", isl), numbers("--concurrency", concurrency), numbers("--mtp", mtp, least=0))
    costs = _costs(plan_us, cast_us, clear_us_per_mb, costs_from)
    rows = sweep(*grid, workload=workload, policy=_policy(key), costs=costs, seed=seed)
    if svg is not None:
        svg.write_text(skip_plot(rows))
    if json:
        print(msgspec.json.encode({"predictions": rows, "costs": costs}).decode())
        return 0
    _show_predictions(
        rows,
        ("input", lambda p: str(p.workload.input_len)),
        ("concurrency", lambda p: str(p.workload.concurrency)),
        ("MTP", lambda p: str(p.workload.mtp_depth)),
    )
    for line in _where_it_stops(rows):
        print(line)
    return 0


def _where_it_stops(rows: list[Prediction]) -> list[str]:
    found = []
    for c, m in sorted({(p.workload.concurrency, p.workload.mtp_depth) for p in rows}):
        useful = [
            p.workload.input_len
            for p in rows
            if (p.workload.concurrency, p.workload.mtp_depth) == (c, m) and p.skip_rate >= USEFUL
        ]
        where = (
            f"skips at least half from {min(useful)} input tokens on" if useful else "never skips half in this range"
        )
        found.append(f"concurrency {c}, MTP {m}: the cache {where}")
    return found


def _show_predictions(rows: list[Prediction], *columns: tuple[str, Callable[[Prediction], str]]) -> None:
    names = [name for name, _ in columns]
    table = RichTable(*names, "steps", "skipped", "wrongly", "plans", "casts", "MB cleared a step", "saved, ms a step")
    for p in rows:
        low, high = p.saved_ms
        table.add_row(
            *(cell(p) for _, cell in columns),
            str(p.steps),
            f"{100 * p.skip_rate:.1f} %",
            str(p.wrongful),
            f"{p.steps} to {p.plan_launches}",
            f"{p.casts_before} to 0",
            f"{p.bytes_full / p.steps / 1e6:.3g} to {p.bytes_tail / p.steps / 1e6:.3g}",
            f"{low:.3f} to {high:.3f}",
        )
    show(table)


def _costs(plan: str | None, cast_: str | None, clear: str | None, trace: Path | None) -> Costs:
    costs = Costs() if trace is None else costs_of(read_trace(trace))
    given = {"plan_us": plan, "cast_us": cast_, "clear_us_per_mb": clear}
    ranges = {name: _range(name, text) for name, text in given.items() if text is not None}
    return Costs(**({n: getattr(costs, n) for n in costs.__struct_fields__} | ranges))


def _range(name: str, text: str) -> tuple[float, float]:
    low, _, high = text.partition(":")
    try:
        return float(low), float(high or low)
    except ValueError:
        raise ValueError(f"--{name.replace('_', '-')} is {text!r}; write LOW:HIGH or one number") from None


def _policy(key: str) -> Literal["pr42982", "pr47766"]:
    if key not in ("pr42982", "pr47766"):
        raise ValueError(f"--key is {key!r}; choose pr42982 or pr47766")
    return cast(Literal["pr42982", "pr47766"], key)
