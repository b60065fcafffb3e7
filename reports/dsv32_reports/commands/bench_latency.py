"""Benchmarks of the decode step: what it launches, how long the host takes, what a workload should gain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Literal, cast

import msgspec
import typer
from rich.console import Console
from rich.table import Table as RichTable

from dsv32_fast.options import Options, resolve
from dsv32_fuzz.latency.attribution import Plan, Timed, Timings, time_batch
from dsv32_fuzz.latency.budget import exceeded, shipped_budget
from dsv32_fuzz.latency.cost import Costs, Prediction, claim_rows, costs_of, predict, sweep
from dsv32_fuzz.latency.counting import Table, count_table, decode_schedule
from dsv32_fuzz.latency.device import device_state
from dsv32_fuzz.latency.selftest import selftest
from dsv32_fuzz.traces.kineto import read_trace
from dsv32_fuzz.workload import PR42982_WORKLOAD, Workload
from dsv32_fuzz.workload.skip_rate import BUDGETS
from dsv32_reports.commands.common import Assignments, Json, OptionsName, command
from dsv32_reports.skip_plot import USEFUL, skip_plot

Seed = Annotated[int, typer.Option(min=0, help="Seed of inputs, orders and resampling.")]
Policy = Annotated[str, typer.Option("--key", help="Metadata key: pr42982 or pr47766.")]
CostRange = Annotated[str | None, typer.Option(metavar="LOW:HIGH")]


class StepReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `dsv32 bench step --json` prints without --counts-only: every raw sample included."""

    options: Options
    plan: Plan
    device: dict[str, str]
    timings: list[Timings]


@command
def bench_step_command(
    options: OptionsName = "pr47766",
    assignments: Assignments = None,
    counts_only: Annotated[bool, typer.Option("--counts-only", help="Count launches, time nothing.")] = False,
    budget: Annotated[
        Path | None, typer.Option(help="A table of --counts-only --json that no step may exceed.")
    ] = None,
    batches: Annotated[str, typer.Option(help="Timed batch sizes, separated by commas.")] = "1,16,64",
    attribute: Annotated[
        bool, typer.Option("--attribute", help="Also each change alone, and each added last.")
    ] = False,
    effect: Annotated[float, typer.Option(help="Effect to detect, as a share of the step.")] = 0.03,
    margin: Annotated[float, typer.Option(help="Smallest effect that matters.")] = 0.01,
    seconds: Annotated[float, typer.Option(help="Allowed per comparison.")] = 20.0,
    processes: Annotated[int, typer.Option(min=1, help="Fresh processes that share the pairs; 1 is this one.")] = 1,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the timed model.")] = 61,
    cold: Annotated[bool, typer.Option("--cold", help="Overwrite the caches before each step.")] = False,
    seed: Seed = 0,
    json: Json = False,
) -> int:
    """What a decode step launches, casts and clears, and its host time, optimised against baseline.

    Counts are exact, of 61 layers without weights. Times are CPU time of the host behind kernels that do nothing:
    no latency of a GPU, and no gate uses them. Exit 1 if a step exceeds its budget of counts or is slower.
    """
    chosen = resolve(options, tuple(assignments or ()))
    if counts_only or budget is not None:
        return _counts(chosen, budget, json)
    plan = Plan(effect=effect, margin=margin, seconds=seconds, processes=processes, layers=layers, cold=cold, seed=seed)
    timings = [time_batch(chosen, batch, plan, attribute) for batch in _numbers("--batches", batches)]
    if json:
        report = StepReport(options=chosen, plan=plan, device=device_state(), timings=timings)
        print(msgspec.json.encode(report).decode())
    else:
        _show_timings(timings, plan)
    return int(any(timed.verdict == "slower" for one in timings for timed in one.compared if timed.comparison == "all"))


def _counts(options: Options, budget: Path | None, json: bool) -> int:
    """Count, print, and hold against a budget: the given one, or the shipped one if made for these options."""
    limit = _read_budget(budget) if budget is not None else shipped_budget()
    table = count_table(options, limit.schedule if budget is not None else decode_schedule())
    problems = exceeded(table, limit) if budget is not None or _same(table, limit) else []
    if json:
        print(msgspec.json.encode(table).decode())
    else:
        _show_counts(table)
        kept = "kept" if budget is not None or _same(table, limit) else "none for these options"
        print("\n".join(problems) or f"budget: {kept}")
    return int(bool(problems))


def _same(table: Table, limit: Table) -> bool:
    return {v.name: v.options for v in table.variants} == {v.name: v.options for v in limit.variants}


def _read_budget(path: Path) -> Table:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Table)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{path}: no table of `dsv32 bench step --counts-only --json`: {error}") from error


def _show_counts(table: Table) -> None:
    title = (
        f"{table.layers} layers, {table.moe_layers} mixture; budget {table.max_num_batched_tokens}, topk {table.topk}; "
        f"{len(table.schedule)} steps; torch {table.torch}"
    )
    shown = RichTable(
        "",
        "router casts",
        "casts",
        "kernels",
        "operators",
        "plan launches",
        "MB cleared",
        "to device",
        "syncs",
        title=title,
    )
    for variant in table.variants:
        steps = variant.steps

        def mean(values: Sequence[float]) -> str:
            return f"{sum(values) / len(values):g}"

        shown.add_row(
            variant.name,
            mean([s.router_casts for s in steps]),
            mean([sum(s.casts.values()) for s in steps]),
            f"{sum(sum(s.kernels.values()) for s in steps) / len(steps):.1f}",
            mean([sum(s.operators.values()) for s in steps]),
            f"{sum(s.plan_launches for s in steps)} of {len(steps)}",
            f"{sum(s.bytes_cleared for s in steps) / len(steps) / 1e6:.4g}",
            mean([s.host_to_device for s in steps]),
            mean([s.synchronisations for s in steps]),
        )
    Console().print(shown)
    print("Per step (mean), in-tree: this confirms arithmetic, not what an engine launches; dsv32 trace does that.")


def _show_timings(timings: list[Timings], plan: Plan) -> None:
    table = RichTable("batch", "B over A", "ratio", "99 % interval", "A, ms", "B, ms", "pairs", "verdict")
    for one in timings:
        for timed in (one.null, *one.compared):
            table.add_row(str(one.batch), *_timed_cells(timed))
    Console().print(table)
    for one in timings:
        enough = "" if one.budget.sufficient else f"; {100 * plan.effect:g} % is undetectable in {plan.seconds:g} s"
        print(f"batch {one.batch}: detectable effect {100 * one.budget.detectable:.1f} %{enough}")
    print("CPU time of the host per step, kernels hollow: no latency of a GPU.")


def _timed_cells(timed: Timed) -> tuple[str, ...]:
    i = timed.interval
    times = (f"{1e3 * timed.median_a_s:.2f}", f"{1e3 * timed.median_b_s:.2f}")
    return (timed.comparison, f"{i.ratio:.4f}", f"[{i.low:.4f}, {i.high:.4f}]", *times, str(i.pairs), timed.verdict)


@command
def bench_selftest_command(
    effect: Annotated[float, typer.Option(help="Slowdown to detect, as a share of the step.")] = 0.03,
    null_runs: Annotated[int, typer.Option(min=1, help="Comparisons of identical sides.")] = 200,
    effect_runs: Annotated[int, typer.Option(min=1, help="Comparisons with the slowdown.")] = 50,
    seed: Seed = 0,
    json: Json = False,
) -> int:
    """Does the timing tell noise from change here: false alarms on identical sides, power on a known busy loop.

    Several minutes. Exit 0 passed, 1 failed, 3 if the effect is undetectable on this machine as it is now.
    """
    found = selftest(effect, null_runs, effect_runs, seed=seed)
    if json:
        print(msgspec.json.encode(found).decode())
    else:
        b = found.budget
        print(
            f"{found.verdict}: A/A spread {100 * b.spread:.2f} % per pair, {b.pairs} pairs of {found.block} runs, "
            f"detectable {100 * b.detectable:.2f} %"
        )
        print(f"false alarms: {found.false_alarms} of {found.null_runs} (nominal 1 %, limit {found.false_alarm_limit})")
        print(
            f"slowdown of {100 * effect:g} % ({1e6 * found.busy_s:.1f} us of {1e6 * found.step_s:.0f} us): detected "
            f"{found.detected} of {found.effect_runs}, required {found.required_power:g}"
        )
        for failure in found.failures:
            print(failure)
    return {"PASSED": 0, "FAILED": 1, "UNDETECTABLE": 3}[found.verdict]


@command
def bench_claims_command(
    key: Policy = "pr42982",
    plan_us: CostRange = None,
    cast_us: CostRange = None,
    clear_us_per_mb: CostRange = None,
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
    Console().print(table)
    return 0


@command
def bench_workload_command(
    isl: Annotated[str, typer.Option(help="Input lengths, separated by commas.")] = "512,1024,2048,4096,8192",
    concurrency: Annotated[str, typer.Option(help="Concurrencies.")] = "1,16,64",
    mtp: Annotated[str, typer.Option(help="Draft tokens per step.")] = "0,1,3",
    osl: Annotated[int, typer.Option(min=1, help="Output tokens per request.")] = 500,
    budget: Annotated[int, typer.Option(min=1, help="max_num_batched_tokens.")] = 8192,
    spread: Annotated[float, typer.Option(help="Spread of the lengths, as a fraction.")] = 0.0,
    acceptance: Annotated[float, typer.Option(help="Probability that a draft is accepted.")] = 0.85,
    key: Policy = "pr47766",
    plan_us: CostRange = None,
    cast_us: CostRange = None,
    clear_us_per_mb: CostRange = None,
    costs_from: Annotated[Path | None, typer.Option(help="Take plan and cast costs from this device trace.")] = None,
    svg: Annotated[Path | None, typer.Option(help="Write a plot of the skip rates to this file.")] = None,
    seed: Seed = 0,
    json: Json = False,
) -> int:
    """What a serving workload should gain over input length, concurrency and MTP; where the cache stops helping."""
    workload = msgspec.structs.replace(
        Workload(), output_len=osl, max_num_batched_tokens=budget, length_spread=spread, acceptance=acceptance
    )
    grid = (_numbers("--isl", isl), _numbers("--concurrency", concurrency), _numbers("--mtp", mtp, least=0))
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
    table = RichTable(
        *names, "steps", "skipped", "wrongly", "plan launches", "casts", "MB cleared a step", "saved, ms a step"
    )
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
    Console().print(table)


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


def _numbers(option: str, text: str, least: int = 1) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) >= least for part in parts):
        raise ValueError(f"{option} is {text!r}; write integers from {least} up, separated by commas")
    return [int(part) for part in parts]
