"""The main job: a campaign over the in-tree path, and a bundle with a verdict."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Annotated

import msgspec
import torch
import typer
from rich.console import Console

from dsv32_fast.options import PRESETS, describe
from dsv32_fuzz.campaign import PROFILES, campaign
from dsv32_fuzz.targets import Target
from dsv32_fuzz.targets.registry import open_target
from dsv32_reports import signoff as signoff_run
from dsv32_reports.commands.common import Assignments, Json, TargetName, TargetPython, VllmPath, command
from dsv32_reports.interrupt import interrupts
from dsv32_reports.model import EXIT_CODES, EXIT_INTERRUPTED
from dsv32_reports.terminal import ProgressListener, print_report


@command
def signoff(
    options: Annotated[
        str | None,
        typer.Option("--options", help=f"Options of the in-tree path: {', '.join(PRESETS)}; default pr47766."),
    ] = None,
    set_: Assignments = None,
    target_name: TargetName = "in-tree",
    vllm_path: VllmPath = None,
    target_python: TargetPython = None,
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
    target = open_target(target_name, options, tuple(set_ or ()), path=vllm_path, python=target_python)
    run_id = signoff_run.new_id(describe(target.options) if target.options else target.name)
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
    report = msgspec.structs.replace(report, fingerprint={**report.fingerprint, **_versions(target)})
    signoff_run.write_bundle(report, folder)
    if json:
        print(msgspec.json.encode(report).decode())
    else:
        print_report(report, folder, Console(soft_wrap=False), quiet=quiet)
    interrupted = evidence.finished is None or evidence.finished.interrupted
    return EXIT_INTERRUPTED if interrupted else EXIT_CODES[report.outcome]


def _versions(target: Target) -> dict[str, str]:
    """What the target's own process runs, beside what the suite runs."""
    found: dict[str, str] = getattr(target, "versions", {})
    return {f"target {name}": version for name, version in found.items()}
