"""The `dsv32` command. It only wires: it starts campaigns and replays, and subscribes to their events."""

from __future__ import annotations

import datetime
import functools
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NoReturn, ParamSpec

import msgspec
import torch
import typer
from rich.console import Console
from rich.table import Table

from dsv32_fast.doctor import examine
from dsv32_fast.options import PRESETS, describe, resolve
from dsv32_fast.parallel.rank import TpSpec
from dsv32_fast.parallel.run import run_tp
from dsv32_fuzz.bench.plan import bench_plan
from dsv32_fuzz.bench.ref import bench_ref
from dsv32_fuzz.campaign import PROFILES, campaign, decodes_verdict, plans_verdict
from dsv32_fuzz.case import load_case
from dsv32_fuzz.replay import replay_case
from dsv32_fuzz.targets.intree import InTreeTarget
from dsv32_fuzz.verdict import Status, Verdict, worst
from dsv32_ref.bounds.utilisation import utilisation
from dsv32_ref.config import GOLDEN, PRECISIONS
from dsv32_reports import signoff as signoff_run
from dsv32_reports.doctor_command import doctor_exit_code, doctor_json, doctor_text
from dsv32_reports.interrupt import interrupts
from dsv32_reports.model import EXIT_CODES, EXIT_INTERRUPTED, EXIT_USAGE
from dsv32_reports.terminal import ProgressListener, print_report

P = ParamSpec("P")

MAX_BENCH_ROWS = 65536
EXIT_OF_STATUS = {Status.PASSED: 0, Status.FAILED: 1, Status.MISTRUSTED: 3, Status.SKIPPED: 3}

HELP = """Decide whether an optimised DeepSeek-V3.2 decode path on AMD MI355X may be deployed.

Start with `dsv32 signoff`: it checks the path on the CPU emulation and writes a report with a verdict. A failure is
saved as a case; `dsv32 replay FILE` shows it again, with the same options or others.

Exit codes of every command: 0 GO or clean; 1 NO-GO or a finding; 2 usage or bad input; 3 INCONCLUSIVE (nothing was
compared, a check is MISTRUSTED, required evidence is missing); 130 interrupted.
"""

app = typer.Typer(
    help=HELP,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
bench = typer.Typer(help="Benchmarks: ratios measured in one run, never verdicts.", no_args_is_help=True)
app.add_typer(bench, name="bench")

OptionsName = Annotated[str, typer.Option("--options", help=f"Options of the optimised path: {', '.join(PRESETS)}.")]
Assignments = Annotated[
    list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Set one field of the options, e.g. bias=fp32.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]


def fail(message: str) -> NoReturn:
    """One line on standard error, exit 2."""
    print(f"dsv32: error: {' '.join(message.split())}", file=sys.stderr)
    raise typer.Exit(EXIT_USAGE)


def command(function: Callable[P, int]) -> Callable[P, None]:
    """Turn a function that returns an exit code into a command with the suite's errors and exit codes."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            code = function(*args, **kwargs)
        except KeyboardInterrupt:
            print("dsv32: interrupted", file=sys.stderr)
            raise typer.Exit(EXIT_INTERRUPTED) from None
        except ValueError as error:
            fail(str(error))
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            fail(f"{where}{error.strerror}; free space or choose another place, then run the command again")
        raise typer.Exit(code)

    return run


@app.command()
@command
def signoff(
    options: OptionsName = "pr47766",
    set_: Assignments = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the bundle; default ./signoff-<id>/.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of everything that is drawn.")] = 0,
    profile: Annotated[str, typer.Option(help=f"How long it takes: {', '.join(PROFILES)}.")] = "signoff",
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only the verdict and the report's path.")] = False,
    json: Json = False,
) -> int:
    """Check the optimised path on the PR's workload and by fuzzing, and write a report with a verdict.

    Exit 0 GO, 1 NO-GO, 3 INCONCLUSIVE, 2 bad usage, 130 interrupted (what was found until then is in the report).
    """
    if profile not in PROFILES:
        raise ValueError(f"unknown profile {profile!r}; choose one of {', '.join(PROFILES)}")
    torch.set_num_threads(1)  # the tensors are small: more threads only wait for each other
    target = InTreeTarget(resolve(options, tuple(set_ or ())))
    run_id = signoff_run.new_id(describe(target.options))
    folder = out or Path(f"signoff-{run_id}")
    signoff_run.prepare_folder(folder)
    started = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    listener = ProgressListener(Console(stderr=True, quiet=quiet))
    try:
        events = campaign(target, PROFILES[profile], run_seed=seed)
        evidence = signoff_run.collect(events, folder, [listener], interrupts)
    finally:
        listener.close()
    report = signoff_run.make_report(evidence, target, run_id=run_id, seed=seed, profile=profile, started=started)
    signoff_run.write_bundle(report, folder)
    if json:
        print(msgspec.json.encode(report).decode())
    else:
        print_report(report, folder, Console(soft_wrap=False), quiet=quiet)
    interrupted = evidence.finished is None or evidence.finished.interrupted
    return EXIT_INTERRUPTED if interrupted else EXIT_CODES[report.outcome]


@app.command()
@command
def replay(
    files: Annotated[list[Path], typer.Argument(help="Case files that a run saved.", show_default=False)],
    options: Annotated[
        str | None, typer.Option("--options", help=f"Other options than the case's own: {', '.join(PRESETS)}.")
    ] = None,
    set_: Assignments = None,
    json: Json = False,
) -> int:
    """Run saved cases again, with their own options or with others.

    Exit 0 if every case passes, 1 if one still fails, 3 if one tested nothing, 2 for a file that is no case.
    """
    override = resolve(options, tuple(set_ or ())) if options else None
    if set_ and not options:
        raise ValueError("--set changes the options of a preset; give --options as well")
    cases = [(path, load_case(path)) for path in files]
    verdicts: list[Verdict] = []
    for path, case in cases:
        verdict, text = replay_case(case, override)
        verdicts.append(verdict)
        if not json:
            print(f"{verdict.status.value} {verdict.check} with {text}: {path}\n  {verdict.summary}")
    if json:
        print(
            msgspec.json.encode(
                [{"file": str(p), "verdict": v} for (p, _), v in zip(cases, verdicts, strict=True)]
            ).decode()
        )
    return EXIT_OF_STATUS[worst([verdict.status for verdict in verdicts])]


@app.command()
@command
def golden(
    path: Annotated[Path, typer.Argument(help="Recorded plans (.json.gz) or a folder of decodes.", show_default=False)],
    json: Json = False,
) -> int:
    """Hold recorded outputs of another implementation against ours.

    A .json.gz file holds plans of AITER's planner; a folder with manifest.json and .npz files holds decodes, which are
    replayed stage by stage against the reference. A run recorded with a defect (NEGATIVE_...) must disagree.

    Exit 0 if everything agrees, 1 with the first difference, 3 if everything was skipped, 2 for another kind of file.
    """
    verdict = decodes_verdict(path, None if json else print) if path.is_dir() else plans_verdict(path)
    if json:
        print(msgspec.json.encode(verdict).decode())
    else:
        print(f"{verdict.status.value} {path}: {verdict.summary}")
    return EXIT_OF_STATUS[verdict.status]


@app.command()
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
        Console().print(table)
    return int(any(not row.worst <= 1 for row in rows))


@app.command()
@command
def doctor(json: Json = False) -> int:
    """What is installed here (torch, ROCm, AITER, vLLM), and what it can run.

    AITER is read without importing it. Exit 1 if AITER, or a package that goes by its name, cannot be used.
    """
    diagnosis = examine()
    print(doctor_json(diagnosis) if json else doctor_text(diagnosis))
    return doctor_exit_code(diagnosis)


@app.command()
@command
def tp(
    world: Annotated[int, typer.Option(help="Ranks: 1, 2, 4 or 8; the PR's own is 4.")] = 4,
    rows: Annotated[int, typer.Option(min=1, help="Requests, each with one token per decode step.")] = 8,
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights and tokens.")] = 0,
    json: Json = False,
) -> int:
    """Run the optimised path tensor-parallel, one process per rank, and hold it against TP 1.

    128 heads and 256 experts as in the real model, the rest small; emulated kernels, gloo. A minute or more.
    Where AITER ignores the plan (bf16, 16 heads, 32 rows or more) the claim about the cache is SKIPPED.
    """
    result = run_tp(TpSpec(world=world, rows=rows, seed=seed))
    if json:
        print(msgspec.json.encode(result).decode())
    else:
        print(f"{result.status} TP {world}, {result.heads} heads a rank, {rows} rows, evidence level: emulated")
        for claim in result.claims:
            print(f"  {claim.status:<10} {claim.name}: {claim.summary}")
    return EXIT_OF_STATUS[Status(result.status)]


@bench.command("ref")
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
    Console().print(table)
    return 0


@bench.command("plan")
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
    Console().print(table)
    return 0


def main() -> None:
    """Entry point of the console script; a polite kill is an interrupt, so that what was found is written."""
    interrupts.install()
    app()
