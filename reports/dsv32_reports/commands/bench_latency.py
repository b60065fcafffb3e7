"""Benchmarks of the decode step: what it launches, how long host or device take, and whether that can be told."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, cast

import msgspec
import torch
import typer
from rich.table import Table as RichTable

from dsv32_fast.doctor import examine
from dsv32_fast.options import Options, resolve
from dsv32_fuzz.latency.attribution import Comparison, Plan, Timed, Timings, comparisons, time_setting
from dsv32_fuzz.latency.budget import exceeded, shipped_budget
from dsv32_fuzz.latency.counting import Table, count_table, decode_schedule
from dsv32_fuzz.latency.evidence import of_timings
from dsv32_fuzz.latency.selftest import SelfTest, SelfTestSpec, Trial, keep_trial, kept_trials, summary, trials
from dsv32_fuzz.latency.step import Setting
from dsv32_fuzz.latency.timing import ClockName
from dsv32_reports.bars import bar
from dsv32_reports.commands.common import Assignments, Json, OptionsName, Seed, command, numbers, show
from dsv32_reports.interrupt import interrupts
from dsv32_reports.model import EXIT_CODES, EXIT_INTERRUPTED, Outcome

ClockOption = Annotated[
    str | None, typer.Option("--clock", help="cpu, wall or device; device events where there is a GPU, else cpu.")
]
PARTS = {"whole": "whole step", "changed": "changed parts"}


class StepReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `dsv32 bench step --json` prints without --counts-only: every raw sample included."""

    options: Options
    plan: Plan
    timings: tuple[Timings, ...]


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
        bool, typer.Option("--attribute", help="Also what the changes touch alone: all, each alone, each added last.")
    ] = False,
    effect: Annotated[float, typer.Option(help="Effect to detect, as a share of the step.")] = 0.03,
    margin: Annotated[float, typer.Option(help="Smallest effect that matters.")] = 0.01,
    seconds: Annotated[float, typer.Option(help="Of timed runs allowed per comparison, by the clock.")] = 20.0,
    processes: Annotated[int, typer.Option(min=1, help="Fresh processes that share the blocks; 1 is this one.")] = 1,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the timed model.")] = 61,
    clock: ClockOption = None,
    cold: Annotated[bool, typer.Option("--cold", help="Overwrite the caches before each run.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the evidence, every sample included, to this file.")] = None,
    seed: Seed = 0,
    json: Json = False,
) -> int:
    """What a decode step launches, casts and clears, and how long it takes, optimised against baseline.

    Counts are exact, of 61 layers without weights. Without a GPU times are CPU time of the host behind kernels that do
    nothing: no latency of a GPU, and no gate uses them. Exit 1 if a step exceeds its budget of counts or is slower.
    """
    chosen = resolve(options, tuple(assignments or ()))
    if counts_only or budget is not None:
        return _counts(chosen, budget, json)
    used = _clock(clock)
    plan = Plan(
        effect=effect,
        margin=margin,
        seconds=seconds,
        processes=processes,
        layers=layers,
        clock=used,
        kernels="aiter" if used == "device" and _aiter_is_usable() else "hollow",
        cold=cold,
        seed=seed,
    )
    timings, ended = _time(chosen, numbers("--batches", batches), plan, attribute, out)
    if json:
        print(msgspec.json.encode(StepReport(options=chosen, plan=plan, timings=tuple(timings))).decode())
    else:
        _show_timings(timings, plan)
    if ended == EXIT_INTERRUPTED:
        raise KeyboardInterrupt
    if ended:
        return ended
    whole = [timed for one in timings if one.setting.part == "whole" for timed in one.compared]
    return int(any(timed.verdict == "slower" for timed in whole))


def _clock(name: str | None) -> ClockName:
    if name is None:
        return "device" if torch.cuda.is_available() else "cpu"
    if name not in ("cpu", "wall", "device"):
        raise ValueError(f"--clock is {name!r}; choose cpu, wall or device")
    if name == "device" and not torch.cuda.is_available():
        raise ValueError("--clock device: torch sees no GPU, so there are no device events; choose cpu or wall")
    return cast(ClockName, name)


def _aiter_is_usable() -> bool:
    return any(one.available for one in examine().capabilities if one.name == "AITER kernels")


def _time(
    options: Options, batches: Sequence[int], plan: Plan, attribute: bool, out: Path | None
) -> tuple[list[Timings], int]:
    """What was timed, and the exit code if it was cut short, else 0; the evidence so far is in `out` all along."""
    jobs = _jobs(options, batches, plan, attribute)
    total = sum(1 + len(wanted) for _, wanted in jobs)
    known: dict[Setting, Timings] = {}

    def write(complete: bool) -> None:
        if out is not None and any(one.compared for one in known.values()):
            out.write_bytes(msgspec.json.encode(of_timings(list(known.values()), plan, complete=complete)))

    try:
        with bar("bench step", total) as advance, interrupts.noted():
            done = 0
            for setting, wanted in jobs:
                for found in time_setting(wanted, setting, plan):
                    known[setting], done = found, done + 1
                    advance(done, f"batch {setting.batch}, {PARTS[setting.part]}")
                    write(complete=done == total)
                    if interrupts.requested:
                        return list(known.values()), EXIT_INTERRUPTED
    except KeyboardInterrupt:
        return list(known.values()), EXIT_INTERRUPTED
    except RuntimeError as error:  # a timing process was lost; a signal to the terminal's group ends those too
        if interrupts.requested:
            return list(known.values()), EXIT_INTERRUPTED
        print(f"dsv32: error: {error}; what was timed before is shown", file=sys.stderr)
        return list(known.values()), EXIT_CODES[Outcome.INCONCLUSIVE]
    return list(known.values()), 0


def _jobs(
    options: Options, batches: Sequence[int], plan: Plan, attribute: bool
) -> list[tuple[Setting, list[Comparison]]]:
    jobs = [(plan.setting(batch, "whole"), comparisons(options, attribute=False)) for batch in batches]
    if attribute:
        jobs += [(plan.setting(batch, "changed"), comparisons(options, attribute=True)) for batch in batches]
    return jobs


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
    show(shown)
    print("Per step (mean), in-tree: this confirms arithmetic, not what an engine launches; dsv32 trace does that.")


def _show_timings(timings: list[Timings], plan: Plan) -> None:
    table = RichTable("batch", "timed", "B over A", "ratio", "99 % interval", "A, ms", "B, ms", "B - A, us", "verdict")
    for one in timings:
        for timed in (one.null, *one.compared):
            table.add_row(str(one.setting.batch), PARTS[one.setting.part], *_timed_cells(timed))
    show(table)
    for one in timings:
        runs = one.budget.blocks * len(one.null.samples[0].blocks_a[0])
        enough = "" if one.budget.sufficient else f"; {100 * plan.effect:g} % is undetectable in {plan.seconds:g} s"
        where = f"batch {one.setting.batch}, {PARTS[one.setting.part]}"
        spread = f"A/A spread {100 * one.budget.spread:.1f} % per block"
        detectable = f"detectable {100 * one.budget.detectable:.1f} %{enough}"
        print(f"{where}: {spread}, {one.budget.blocks} blocks, {runs} pairs, {detectable}")
        if plan.clock == "device":
            print(f"{where}: {', '.join(f'{name} {value}' for name, value in one.states[-1].items())}")
    print(_what_was_timed(plan))


def _timed_cells(timed: Timed) -> tuple[str, ...]:
    i, a_ms, b_ms = timed.interval, 1e3 * timed.median_a_s, 1e3 * timed.median_b_s
    times = (f"{a_ms:.3f}", f"{b_ms:.3f}", f"{1e3 * (i.ratio - 1) * a_ms:+.0f}")
    return (timed.comparison, f"{i.ratio:.4f}", f"[{i.low:.4f}, {i.high:.4f}]", *times, timed.verdict)


def _what_was_timed(plan: Plan) -> str:
    model = f"{plan.layers} layers of small widths"
    parts = "Changed parts: the metadata build and every mixture's router, once a step."
    if plan.kernels == "aiter":
        return f"Device events around replays of a graph, {model}, AITER's kernels. {parts}"
    kind = {"cpu": "CPU time of the host", "wall": "Wall time on the host", "device": "Device events"}[plan.clock]
    return f"{kind} per eager step, {model}, kernels hollow: no latency of a GPU. {parts}"


@command
def bench_selftest_command(
    effect: Annotated[float, typer.Option(help="Slowdown to detect, as a share of the step.")] = 0.03,
    null_runs: Annotated[int, typer.Option(min=1, help="Comparisons of identical sides.")] = 200,
    effect_runs: Annotated[int, typer.Option(min=1, help="Comparisons with the slowdown.")] = 50,
    clock: Annotated[str, typer.Option(help="cpu or wall.")] = "cpu",
    out: Annotated[
        Path | None, typer.Option(help="Keep every sample in this file; a run that was cut short goes on there.")
    ] = None,
    seed: Seed = 0,
    json: Json = False,
) -> int:
    """Does the timing tell noise from change here: false alarms on identical sides, power on a known busy loop.

    Some minutes. Exit 0 passed, 1 failed, 3 if the effect is undetectable on this machine as it is now.
    """
    if clock not in ("cpu", "wall"):
        raise ValueError(f"--clock is {clock!r}; choose cpu or wall")
    spec = SelfTestSpec(
        effect=effect,
        null_runs=null_runs,
        effect_runs=effect_runs,
        clock=cast(Literal["cpu", "wall"], clock),
        seed=seed,
    )
    found = kept_trials(out, spec) if out is not None else []
    stopped = _try(spec, found, out)
    result = summary(spec, found)
    if json:
        print(msgspec.json.encode(result).decode())
    else:
        _show_selftest(result)
    if stopped:
        again = "" if out is None else f"; the same command goes on behind trial {len(found)} of {spec.trials}"
        print(f"stopped{again}")
        raise KeyboardInterrupt
    return {"PASSED": 0, "FAILED": 1, "UNDETECTABLE": 3, "INCOMPLETE": 3}[result.verdict]


def _try(spec: SelfTestSpec, found: list[Trial], out: Path | None) -> bool:
    """Append the missing trials to `found` and to the file; whether the user stopped them."""
    try:
        with bar("bench selftest", spec.trials, len(found)) as advance, interrupts.noted():
            for trial in trials(spec, len(found)):
                found.append(trial)
                if out is not None:
                    keep_trial(out, trial)
                so_far = summary(spec, found)
                alarms = f"{so_far.false_alarms} false alarms in {so_far.null_runs}"
                advance(len(found), f"{alarms}, {so_far.detected} of {so_far.effect_runs} slowdowns detected")
                if interrupts.requested and len(found) < spec.trials:
                    return True
    except KeyboardInterrupt:
        return True
    return False


def _show_selftest(found: SelfTest) -> None:
    effect, (least, median, most) = 100 * found.spec.effect, found.blocks
    print(
        f"{found.verdict}: {found.spec.clock} time, step {1e6 * found.step_s:.0f} us, A/A spread "
        f"{100 * found.spread:.2f} % per block of {found.pairs} pairs, budget {median} blocks ({least} to {most})"
    )
    print(
        f"false alarms: {found.false_alarms} of {found.null_runs} (nominal 1 %, limit {found.false_alarm_limit}), "
        f"{found.small_differences} more differ by less than the margin of {100 * found.spec.margin:g} %"
    )
    print(
        f"slowdown of {effect:g} % (busy loop of {1e4 * effect * found.step_s:.1f} us): detected {found.detected} of "
        f"{found.effect_runs}, required {found.required_power:g}"
    )
    if found.undetectable:
        print(f"undetectable: for {found.undetectable} of them the budget did not suffice, as the machine was then")
    for failure in found.failures:
        print(failure)
