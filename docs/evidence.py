"""Regenerates docs/evidence.md: every figure in it is printed by a command here. Run it with `make evidence`."""

from __future__ import annotations

import datetime
import itertools
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from dsv32_fast.options import PRESETS
from dsv32_fuzz.case import Case
from dsv32_fuzz.events import CounterexampleFound
from dsv32_fuzz.search.explore import explore
from dsv32_fuzz.search.properties import StepTraffic
from dsv32_fuzz.targets.intree import InTreeTarget

DSV32 = [str(Path(sys.executable).parent / "dsv32")]
ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "fuzz" / "dsv32_fuzz" / "data"
SEEDS = (0, 1000, 2000)


def run(*arguments: str) -> str:
    """The command's output, as a block with its exit code."""
    environment = {**os.environ, "COLUMNS": "120"}
    done = subprocess.run([*DSV32, *arguments], capture_output=True, text=True, check=False, env=environment)
    shown = " ".join(arguments)
    text = f"`dsv32 {shown}` (exit {done.returncode})\n\n```\n{done.stdout.rstrip()}\n```\n"
    return text.replace(f"{ROOT}/", "")


def signoff(preset: str, folder: Path) -> str:
    """The terminal's text of a sign-off, without the run's folder; the short profile where there is no cache."""
    profile = "ci" if preset == "baseline" else "signoff"
    text = run("signoff", "--options", preset, "--profile", profile, "--out", str(folder / preset))
    seconds = json.loads((folder / preset / "report.json").read_text())["seconds"]
    return text.replace(str(folder), "OUT") + f"\nTook {seconds} s.\n"


def time_to_falsify() -> str:
    """From nothing to a shrunk counterexample, per traffic class and seed."""
    rows = ["| options | traffic | seed | seconds | steps | requests | check |", "|---|---|---|---|---|---|---|"]
    scopes = {"pr42982": ("mtp_decode", "chunked_prefill", "mixed"), "vllm026": ("mtp_decode",)}
    for (preset, classes), seed in itertools.product(scopes.items(), SEEDS):
        for scope in classes:
            started = time.monotonic()
            events = explore(StepTraffic(InTreeTarget(PRESETS[preset]), scope), run_seed=seed, seconds=60)
            found = next((event for event in events if isinstance(event, CounterexampleFound)), None)
            seconds = time.monotonic() - started
            if found is None or not isinstance(found.case, Case):
                rows.append(f"| {preset} | {scope} | {seed} | none in {seconds:.0f} | | | |")
                continue
            requests = max(len(step.query_lens) for step in found.case.steps)
            cells = (preset, scope, seed, f"{seconds:.1f}", len(found.case.steps), requests, found.case.check)
            rows.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(rows) + "\n"


def nightly() -> str:
    """Half an hour of the nightly profile: verdict, and what of the input space it reached."""
    with tempfile.TemporaryDirectory() as name:
        return run("fuzz", "--profile", "nightly", "--max-time", "30m", "--out", f"{name}/night").replace(name, "OUT")


def two_shards() -> str:
    """Cases of one shard and of two in the same wall time, and the ratio."""
    cases = []
    with tempfile.TemporaryDirectory() as name:
        for workers in (1, 2):
            arguments = ["fuzz", "--max-time", "3m", "--workers", str(workers), "--out", f"{name}/{workers}", "--json"]
            done = subprocess.run([*DSV32, *arguments], capture_output=True, text=True, check=False)
            cases.append(json.loads(done.stdout)["cases"])
    return f"One shard: {cases[0]} cases. Two: {cases[1]}, {cases[1] / cases[0]:.2f} times as many (3 min each).\n"


def kill_matrix() -> str:
    """Every fault until its first kill, in three seeds; of each run the summary, without the lines of the faults."""
    parts = []
    for seed in (0, 1, 2):
        command, fence, lines = run("faults", "--gate", "ci", "--seed", str(seed)).partition("```\n")
        parts.append(command + fence + lines[lines.index("area ") :])
    return "\n".join(parts)


def first_meeting() -> str:
    """What was counted when faults and checks, written by different hands, first met; recorded then."""
    known = json.loads((DATA / "first_run_kills.json").read_text())
    then = known["two_repairs"]
    rows = ["| area | killed | faults |", "|---|---|---|"]
    rows += [f"| {area} | {killed} | {faults} |" for area, (killed, faults) in then["areas"].items()]
    rows.append(f"| all | {then['killed']} | {then['faults']} |")
    reasons = "\n".join(f"- {reason}" for reason in known["as_it_was"]["reasons"])
    return (
        f"{known['note']} Recorded on {known['date']} at commit {known['commit']}, gate {known['gate']}, seed "
        f"{known['seed']}.\n\nAs it was, the run {known['as_it_was']['outcome']}:\n\n{reasons}\n\n"
        f"After two repairs ({' and '.join(then['repairs'])}) {then['killed'] / then['faults']:.0%} were killed, the "
        f"median after {then['median_seconds']} s, in {then['cpu_seconds']} s of CPU:\n\n" + "\n".join(rows) + "\n\n"
        f"Failed without a fault: {', '.join(then['false_alarms'])}. Survived: {', '.join(then['survivors'])}.\n"
    )


def a_signoff(preset: str) -> str:
    """One sign-off in a folder of its own."""
    with tempfile.TemporaryDirectory() as name:
        return signoff(preset, Path(name))


def recorded_plans() -> str:
    """Every file of recorded plans."""
    return "\n".join(run("golden", str(path)) for path in sorted((DATA / "plans").glob("*.json.gz")))


def large_trace() -> str:
    """Speed and memory of reading a synthetic trace; the test's own figures, the seconds are CPU time."""
    test = "tests/latency/test_traces.py::test_a_trace_of_300_mb_is_read_in_bounded_memory"
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-m", "nightly", test]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    figures = [line for line in done.stdout.splitlines() if "MB/s" in line]
    return f"`pytest -m nightly {test}` (exit {done.returncode})\n\n```\n" + "\n".join(figures) + "\n```\n"


def large_checkpoint() -> str:
    """The router of a layer whose bias lies in [6.817, 7.063], in a sparse file of 100 GB."""
    sys.path.insert(0, str(ROOT / "tests" / "targets"))
    from test_router_study import run_router, write_huge

    with tempfile.TemporaryDirectory() as folder:
        write_huge(Path(folder) / "model.safetensors", 100)
        done, peak = run_router(Path(folder))
    text = f"{done.stdout.rstrip()}\npeak memory {peak / 2**10:.0f} MiB"
    return f"`dsv32 router --checkpoint DIR` (exit {done.returncode})\n\n```\n{text}\n```\n"


SECTIONS: dict[str, Callable[[], str]] = {
    "Recorded plans": recorded_plans,
    "Recorded decodes": partial(run, "golden", str(DATA / "decodes")),
    "Budget used of the error bounds": partial(run, "bounds"),
    "Speed of the emulated planner": partial(run, "bench", "plan"),
    "Speed of the reference": partial(run, "bench", "ref"),
    "Speed of the checks": partial(run, "bench", "checks"),
    "From nothing to a shrunk counterexample": time_to_falsify,
    **{f"Sign-off of `{preset}`": partial(a_signoff, preset) for preset in PRESETS},
    "Kill matrix": kill_matrix,
    "Faults and checks when they first met": first_meeting,
    "Two shards": two_shards,
    "A night": nightly,
    "Counts of a decode step": partial(run, "bench", "step", "--counts-only"),
    "Claims of the pull request": partial(run, "bench", "claims"),
    "Where the plan cache stops helping": partial(run, "bench", "workload"),
    "Host time of a decode step": partial(run, "bench", "step", "--attribute"),
    "Self-test of the timing": partial(run, "bench", "selftest"),
    "A trace of 300 MB": large_trace,
    "Router of a checkpoint of 100 GB": large_checkpoint,
}
HEAD = """# Evidence

Each section is what the command in it printed; `make evidence` runs them all (about two hours), and
`python docs/evidence.py TITLE...` some of them. All was measured on a CPU with emulated kernels: nothing has run on an
MI355X. Times depend on the machine and on what else runs on it; counts do not. A section without a date is of an
earlier commit.
"""


def sections(text: str) -> dict[str, str]:
    """The sections of a page by title."""
    return {part.partition("\n")[0]: part.partition("\n")[2].strip() + "\n" for part in text.split("\n## ")[1:]}


def main() -> None:
    """Write docs/evidence.md: all sections, or those that are named, the others as they were."""
    page = Path(__file__).parent / "evidence.md"
    known = sections(page.read_text()) if page.exists() else {}
    wanted = sys.argv[1:] or list(SECTIONS)
    unknown = [title for title in wanted if title not in SECTIONS]
    if unknown:
        sys.exit(f"no section {unknown[0]!r}; choose from: {', '.join(SECTIONS)}")
    for title in wanted:
        print(title, file=sys.stderr)
        made = f"Measured {datetime.date.today().isoformat()}, {platform.system()} {platform.machine()}, Python "
        known[title] = f"{made}{platform.python_version()}.\n\n{SECTIONS[title]()}"
        parts = [f"## {name}\n\n{known[name]}" for name in SECTIONS if name in known]
        page.write_text("\n".join([HEAD, *parts]))


if __name__ == "__main__":
    main()
