"""The main job: a campaign over the in-tree path, and a bundle with a verdict."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import torch
import typer

from dsv32_fast.options import PRESETS
from dsv32_fuzz.events import Event, PhaseFinished, RunStarted
from dsv32_fuzz.search.known_cases import KnownCases
from dsv32_fuzz.signoff_run import PROFILES, campaign
from dsv32_fuzz.targets import Target
from dsv32_fuzz.targets.intree import InTreeTarget
from dsv32_fuzz.targets.registry import open_target
from dsv32_reports import signoff as signoff_run
from dsv32_reports.bundle import write_bundle
from dsv32_reports.commands.common import Assignments, Json, TargetName, TargetPython, VllmPath, command
from dsv32_reports.fold import make_report
from dsv32_reports.gates import FIGURES, gate_names
from dsv32_reports.given import accuracy_given, check_limits, latency_given, router_study_given
from dsv32_reports.interrupt import interrupts
from dsv32_reports.model import EXIT_CODES, EXIT_INTERRUPTED
from dsv32_reports.policy import DEFAULT, load_policy
from dsv32_reports.terminal import Output, ProgressListener, print_report
from dsv32_reports.verify import previous_of


@command
def signoff(
    context: typer.Context,
    options: Annotated[
        str | None,
        typer.Option("--options", help=f"Options of the in-tree path: {', '.join(PRESETS)}; default pr47766."),
    ] = None,
    set_: Assignments = None,
    target_name: TargetName = "in-tree",
    vllm_path: VllmPath = None,
    target_python: TargetPython = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the bundle; default ./signoff-<id>/.")] = None,
    resume: Annotated[
        Path | None,
        typer.Option(help="Go on with a stopped or killed sign-off in this folder.", show_default=False),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of everything that is drawn.")] = 0,
    profile: Annotated[str, typer.Option(help=f"How long it takes: {', '.join(PROFILES)}.")] = "signoff",
    policy: Annotated[
        Path | None, typer.Option(help="signoff.toml: scope, gates and limits; see docs/policy.md.", show_default=False)
    ] = None,
    accuracy: Annotated[
        tuple[Path, Path] | None,
        typer.Option(help="Two results of lm-evaluation-harness: the baseline's and the candidate's.", metavar="A B"),
    ] = None,
    accuracy_margin: Annotated[
        float | None,
        typer.Option(
            help="How much worse the candidate may score; default the policy's, else 0.01.", show_default=False
        ),
    ] = None,
    router_study: Annotated[
        Path | None,
        typer.Option(help="What dsv32 router --json printed about your checkpoint.", show_default=False),
    ] = None,
    latency: Annotated[
        Path | None,
        typer.Option(help="What dsv32 trace --out wrote about two traces of your engine.", show_default=False),
    ] = None,
    corpus: Annotated[
        Path | None, typer.Option(help="Folder of known cases, which are run again.", show_default=False)
    ] = None,
    ledger: Annotated[
        Path | None, typer.Option(help="TOML file of the failures of known cases that are allowed.", show_default=False)
    ] = None,
    since: Annotated[
        Path | None, typer.Option(help="Bundle of the last GO; the report says what changed since.", show_default=False)
    ] = None,
    approver: Annotated[str, typer.Option(help="Who answers for this sign-off; recorded in the bundle.")] = "",
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only the verdict and the report's path.")] = False,
    json: Json = False,
) -> int:
    """Check the optimised path on the PR's workload and by fuzzing, and write a report with a verdict.

    Exit 0 GO, 1 NO-GO, 3 INCONCLUSIVE, 2 bad usage, 130 interrupted (what was found until then is in the report).
    """
    torch.set_num_threads(1)  # the tensors are small: more threads only wait for each other
    if resume:
        _only_resumes(context)
        return _run(*_resumed(resume, target_name, vllm_path, target_python), quiet=quiet, json=json)
    if profile not in PROFILES:
        raise ValueError(f"unknown profile {profile!r}; choose one of {', '.join(PROFILES)}")
    if not approver.isprintable():
        raise ValueError("--approver holds characters that no report can show; write the name as UTF-8 in one line")
    target = open_target(target_name, options, tuple(set_ or ()), path=vllm_path, python=target_python)
    rules = load_policy(policy, gate_names(), tuple(FIGURES)) if policy else DEFAULT
    if accuracy_margin is not None:
        rules = rules.with_limit("accuracy", accuracy_margin)
    given = [accuracy_given(*accuracy)] if accuracy else []
    given += [router_study_given(router_study)] if router_study else []
    given += [latency_given(latency)] if latency else []
    check_limits(rules)
    known = KnownCases(corpus=corpus, ledger=ledger).checked(target) if corpus or ledger else None
    previous = previous_of(since) if since else None
    started = signoff_run.started(
        target, seed=seed, profile=profile, policy=rules, approver=approver, previous=previous, known=known
    )
    folder = out or Path(f"signoff-{started.id}")
    signoff_run.prepare_folder(folder)
    events = signoff_run.run(started, campaign(target, PROFILES[profile], run_seed=seed, known=known), given)
    return _run(folder, events, (), quiet=quiet, json=json)


RESUMING = frozenset({"resume", "target_name", "vllm_path", "target_python", "quiet", "json"})


def _only_resumes(context: typer.Context) -> None:
    """A run that goes on keeps its own options, policy and evidence: another one on the command line is an error."""
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        if name not in RESUMING and source is not None and source.name == "COMMANDLINE":
            raise ValueError(f"{parameter.opts[0]} cannot change what --resume goes on with; leave it out")


Events = Generator[Event, None, None]


def _resumed(
    folder: Path, target_name: str, path: str | None, python: str | None
) -> tuple[Path, Events, Sequence[Event]]:
    """The rest of a run that was stopped, with its own options, seed and profile."""
    kept = signoff_run.kept_events(folder)
    first = kept[0]
    assert isinstance(first, RunStarted)
    if first.options is not None:
        target: Target = InTreeTarget(first.options)
    else:
        target = open_target(target_name, None, (), path=path, python=python)
    signoff_run.check_resumable(first, target, folder)
    done = {event.phase for event in kept if isinstance(event, PhaseFinished)}
    known = signoff_run.known_of(first)
    return folder, campaign(target, PROFILES[first.profile], run_seed=first.seed, done=done, known=known), kept


def _run(folder: Path, events: Events, kept: Sequence[Event], *, quiet: bool, json: bool) -> int:
    listener = ProgressListener(Output(stderr=True, quiet=quiet))
    try:
        evidence = signoff_run.collect(events, folder, [listener], interrupts, kept)
    finally:
        listener.close()
    report = make_report(evidence, str(folder))
    digest = write_bundle(report, folder)
    if json:
        print(msgspec.json.encode(report).decode())
    else:
        print_report(report, folder, digest, Output(soft_wrap=False), quiet=quiet)
    if evidence.finished is None or evidence.finished.interrupted:
        print(f"dsv32: stopped early; go on with dsv32 signoff --resume {shlex.quote(str(folder))}", file=sys.stderr)
        return EXIT_INTERRUPTED
    return EXIT_CODES[report.outcome]
