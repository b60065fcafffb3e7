"""The `dsv32` command: registers the commands. They only wire: they start campaigns and subscribe to their events."""

from __future__ import annotations

import typer

from dsv32_reports.commands import (
    bench,
    bench_checks,
    bench_latency,
    bench_workload,
    bounds,
    doctor,
    faults,
    fuzz,
    golden,
    history,
    merge,
    replay,
    router,
    signoff,
    target,
    tp,
    trace,
    verify,
)
from dsv32_reports.interrupt import interrupts

HELP = """Decide whether an optimised DeepSeek-V3.2 decode path on AMD MI355X may be deployed.

Start with `dsv32 signoff`: it checks the path on the CPU emulation and writes a report with a verdict. A failure is
saved as a case; `dsv32 replay FILE` shows it again, with the same options or others.

Exit codes of every command: 0 GO or clean; 1 NO-GO or a finding; 2 usage or bad input; 3 INCONCLUSIVE (nothing was
compared, a check is MISTRUSTED, required evidence is missing); 130 interrupted; 141 the reader of the output stopped.
"""

app = typer.Typer(
    help=HELP,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
bench_app = typer.Typer(help="Benchmarks: ratios measured in one run, never verdicts.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")
app.add_typer(target.app, name="target")

app.command()(signoff.signoff)
app.command()(verify.verify)
app.command()(history.history)
app.command()(history.diff)
app.command()(replay.replay)
app.command("fuzz")(fuzz.fuzz_command)
app.command()(merge.merge)
app.command()(golden.golden)
app.command()(bounds.bounds)
app.command()(doctor.doctor)
app.command()(faults.faults)
app.command()(tp.tp)
app.command()(router.router)
app.command()(trace.trace)
bench_app.command("plan")(bench.bench_plan_command)
bench_app.command("ref")(bench.bench_ref_command)
bench_app.command("checks")(bench_checks.bench_checks_command)
bench_app.command("step")(bench_latency.bench_step_command)
bench_app.command("selftest")(bench_latency.bench_selftest_command)
bench_app.command("claims")(bench_workload.bench_claims_command)
bench_app.command("workload")(bench_workload.bench_workload_command)


def main() -> None:
    """Entry point of the console script; a polite kill is an interrupt, so that what was found is written."""
    interrupts.install()
    app()
