"""A fuzz campaign: every property searched for so long, on so many shards, with a corpus and a ledger."""

from __future__ import annotations

import contextlib
import datetime
import re
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Annotated

import typer

from dsv32_fast.options import PRESETS, describe
from dsv32_fuzz.campaigns.corpus import Corpus
from dsv32_fuzz.campaigns.journal import case_in
from dsv32_fuzz.campaigns.ledger import Ledger, read_ledger
from dsv32_fuzz.campaigns.local import FUZZ_PROFILES, FuzzPlan, cases_to_run, fuzz, make_spec, prepare
from dsv32_fuzz.campaigns.result import CampaignResult, read_result
from dsv32_fuzz.campaigns.shared_examples import check_place
from dsv32_fuzz.campaigns.standing import assess
from dsv32_fuzz.case import Case, write_atomically
from dsv32_fuzz.checks import TARGET_ERRORS
from dsv32_fuzz.events import Event, RunFinished
from dsv32_fuzz.targets import Target
from dsv32_fuzz.targets.neighbours import told_neighbours
from dsv32_fuzz.targets.registry import IN_TREE, open_target
from dsv32_reports.campaign_text import ProgressLines, result_lines
from dsv32_reports.commands.common import EXIT_OF_STATUS, Assignments, Json, TargetName, TargetPython, VllmPath, command
from dsv32_reports.interrupt import interrupts
from dsv32_reports.json_file import encode_campaign
from dsv32_reports.model import EXIT_INTERRUPTED
from dsv32_reports.signoff import until_interrupted
from dsv32_reports.terminal import Output, ProgressListener

RESULT = "result.json"
_DURATION = re.compile(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s?)?")

CorpusFolder = Annotated[
    Path | None, typer.Option("--corpus", help="Folder of cases that are run first, and that new ones are added to.")
]
LedgerFile = Annotated[Path | None, typer.Option("--ledger", help="TOML file of known failures.")]


@command
def fuzz_command(
    max_time: Annotated[
        str | None,
        typer.Option("--max-time", metavar="DURATION", help="Such as 90s, 30m or 8h; default the profile's."),
    ] = None,
    options: Annotated[
        str | None,
        typer.Option("--options", help=f"Options of the in-tree path: {', '.join(PRESETS)}; default pr47766."),
    ] = None,
    set_: Assignments = None,
    target: TargetName = IN_TREE,
    vllm_path: VllmPath = None,
    target_python: TargetPython = None,
    profile: Annotated[str, typer.Option(help=f"What is promised: {', '.join(FUZZ_PROFILES)}.")] = "nightly",
    check: Annotated[
        list[str] | None, typer.Option(help="Only this check or traffic class; may be given more than once.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Shards at the same time, a process and a core each.")] = 1,
    shard: Annotated[str, typer.Option(metavar="I/N", help="Be machine I of N, counted from 0.")] = "0/1",
    seed: Annotated[int, typer.Option(min=0, help="Seed of everything that is drawn.")] = 0,
    corpus: CorpusFolder = None,
    ledger: LedgerFile = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the campaign; an unfinished one in it goes on.")] = None,
    case_timeout: Annotated[float, typer.Option(min=1, help="Seconds after which a case hangs.")] = 120.0,
    examples: Annotated[
        str, typer.Option(metavar="PLACE", help="Share Hypothesis' examples: a folder, or redis://HOST:PORT/NUMBER.")
    ] = "",
    ray: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Run the shards as Ray tasks: an address, auto or local.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only the verdict and the failures.")] = False,
    json: Json = False,
) -> int:
    """Search every property for failing cases until the time is up, and end with a verdict.

    Failing cases are shrunk, told apart by cause, and saved in the corpus. A killed or interrupted campaign goes on
    when the same command is given with the same --out. Exit 0 if nothing fails but what the ledger lists, 1 for a
    failure, 3 if something was not really tested, 130 if interrupted.
    """
    known = read_ledger(ledger) if ledger else None
    seconds = parse_duration(max_time) if max_time else _profile_seconds(profile)
    part, parts = parse_shard(shard)
    check_place(examples)
    path = str(Path(vllm_path).absolute()) if vllm_path is not None else None  # a resumed campaign may start elsewhere
    arguments = {name: text for name, text in (("path", path), ("python", target_python)) if text is not None}
    subject = open_target(target, options, tuple(set_ or ()), **arguments)
    beside = ledger.parent if ledger else Path()
    spec = make_spec(
        subject,
        profile,
        seed=seed,
        names=tuple(check or ()),
        case_seconds=case_timeout,
        examples=examples,
        arguments=arguments,
        ledger=known,
        ledger_folder=beside,
    )
    folder = out or Path(f"fuzz-{new_name(describe(subject.options) if subject.options else target)}")
    cases = Corpus(corpus or folder / "corpus")
    prepare(folder, spec, cases_to_run(spec, subject, cases, known, beside))
    plan = FuzzPlan(folder=folder, seconds=seconds, workers=workers, part=part, parts=parts)
    interrupted = _drain(_events(plan, ray), seconds, quiet=quiet)
    result = write_result(read_result([folder]), folder, cases, known, beside)
    show(result, folder, quiet=quiet, json=json, target=subject)
    return EXIT_INTERRUPTED if interrupted else EXIT_OF_STATUS[result.status]


def _events(plan: FuzzPlan, ray: str | None) -> Generator[Event, None, None]:
    if ray is None:
        return fuzz(plan)
    from dsv32_fuzz.campaigns.ray_tasks import fuzz_on_ray  # an extra

    return fuzz_on_ray(plan, ray)


def _drain(events: Generator[Event, None, None], seconds: float, *, quiet: bool) -> bool:
    """Show every event; whether the run was interrupted."""
    console = Output(stderr=True, quiet=quiet)
    bars = ProgressListener(console) if console.is_terminal else None
    listener: Callable[[Event], None] = bars or ProgressLines(
        seconds, lambda line: console.print(line, markup=False, highlight=False, soft_wrap=True)
    )
    finished = RunFinished(seconds=0.0, interrupted=True)
    try:
        with interrupts.noted():
            for event in until_interrupted(events, interrupts):
                listener(event)
                finished = event if isinstance(event, RunFinished) else finished
    finally:
        if bars:
            bars.close()
    return finished.interrupted


def write_result(
    result: CampaignResult, folder: Path, corpus: Corpus, ledger: Ledger | None, beside: Path
) -> CampaignResult:
    """Hold the result against corpus and ledger, save what is new, and write result.json."""
    assessed = assess(result, corpus, ledger, beside)
    write_atomically(folder / RESULT, encode_campaign(assessed))
    return assessed


def show(result: CampaignResult, folder: Path, *, quiet: bool, json: bool, target: Target | None = None) -> None:
    """The result on standard output; with its target, also the rows that misread in each failing case of steps."""
    if json:
        print(encode_campaign(result).decode(), end="")
    else:
        rows = _misread(result, target) if target else {}
        print("\n".join([*result_lines(result, quiet=quiet, rows=rows), f"result: {folder / RESULT}"]))


def _misread(result: CampaignResult, target: Target) -> dict[str, list[str]]:
    """Lines on rows that misread, by cause; a case on which the target raises says so in its failure already."""
    told: dict[str, list[str]] = {}
    for failure in result.failures:
        case = case_in(failure.case)
        if isinstance(case, Case):
            with contextlib.suppress(*TARGET_ERRORS):
                told[failure.cause] = told_neighbours(case, target)
    return told


def parse_duration(text: str) -> float:
    """Seconds of a duration such as 90, 90s, 30m or 1h30m.

    Raises:
        ValueError: not such a duration, or none at all.
    """
    match = _DURATION.fullmatch(text.strip().lower())
    hours, minutes, seconds = (int(part or 0) for part in match.groups()) if match else (0, 0, 0)
    total = 3600 * hours + 60 * minutes + seconds
    if total <= 0:
        raise ValueError(f"{text!r} is not a duration; write it like 90s, 30m or 1h30m")
    return float(total)


def parse_shard(text: str) -> tuple[int, int]:
    """The two numbers of I/N.

    Raises:
        ValueError: not two numbers with 0 <= I < N.
    """
    part, sign, parts = text.partition("/")
    if not (sign and part.isdecimal() and parts.isdecimal() and int(part) < int(parts)):
        raise ValueError(f"--shard is {text!r}; write I/N with 0 <= I < N, for instance 0/2 and 1/2")
    return int(part), int(parts)


def _profile_seconds(profile: str) -> float:
    if profile not in FUZZ_PROFILES:
        raise ValueError(f"unknown profile {profile!r}; choose one of {', '.join(FUZZ_PROFILES)}")
    return FUZZ_PROFILES[profile].seconds


def new_name(text: str) -> str:
    """What is under test, and the time: readable, sortable, and distinct for two runs a second apart."""
    stamp = datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m%d-%H%M%S")
    return f"{text.replace(' ', '_').replace('=', '-')}-{stamp}"
