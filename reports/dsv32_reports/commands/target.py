"""Targets other than the in-tree path: prepare vLLM releases, and hold one against another."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import msgspec
import torch
import typer
from rich.table import Table

from dsv32_fuzz.case import save_case
from dsv32_fuzz.checks.catalogue import STEP_CHECKS
from dsv32_fuzz.targets.registry import names, open_target
from dsv32_fuzz.targets.survey import Behaviour, Survey, behaviour, compare, survey
from dsv32_fuzz.targets.vllm import VllmTarget
from dsv32_fuzz.targets.vllm.prepare import install, prepared, release_of
from dsv32_fuzz.verdict import Status
from dsv32_reports.commands.common import Json, command, show

Into = Annotated[Path, typer.Option("--into", help="Folder of the prepared releases.")]
Seconds = Annotated[float, typer.Option(min=0, help="Search time per traffic class, after the corpus.")]
DEFAULT_FOLDER = Path("vllm-releases")

app = typer.Typer(help="Other targets: prepare vLLM releases, judge them, compare them.", no_args_is_help=True)


@app.command("list")
@command
def target_list() -> int:
    """Names that `--target` takes."""
    print("\n".join(names()))
    return 0


@app.command("install")
@command
def target_install(
    specs: Annotated[list[str], typer.Argument(help="Releases, as vllm==0.24.0.", show_default=False)],
    into: Into = DEFAULT_FOLDER,
) -> int:
    """Prepare vLLM releases to be driven without a GPU: no compiled parts, only what the import chain needs.

    All releases share one virtual environment in the folder; the suite's own environment is not touched.
    """
    for spec in specs:
        release_of(spec)
    for spec in specs:
        folder = install(spec, into, lambda text: print(f"  {text}"))
        print(f"{folder} is ready: dsv32 signoff --target vllm --vllm-path {folder}")
    return 0


@app.command("table")
@command
def target_table(
    into: Into = DEFAULT_FOLDER,
    seconds: Seconds = 5.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the search.")] = 0,
    cases: Annotated[Path | None, typer.Option(help="Where counterexamples are saved.")] = None,
    json: Json = False,
) -> int:
    """Judge every prepared release by its own code: releases against checks, as a Markdown table.

    Exit 1 if any release fails a check, 3 if one could not be driven.
    """
    folders = _all_prepared(into)
    torch.set_num_threads(1)
    surveys = []
    for folder in folders:
        surveys.append(_survey(folder, seconds, seed))
        if not json:
            print(_line(surveys[-1]) if len(surveys) > 1 else _head() + _line(surveys[-1]), flush=True)
        if cases is not None:
            _save(surveys[-1], cases)
    if json:
        print(msgspec.json.encode(surveys).decode())
    return _exit_code(surveys)


def _survey(folder: Path, seconds: float, seed: int) -> Survey:
    started = time.monotonic()
    try:
        target = open_target("vllm", path=str(folder))
    except ValueError as error:
        return Survey(target=folder.name, refusal=str(error), seconds=time.monotonic() - started)
    assert isinstance(target, VllmTarget)
    try:
        return survey(
            target, label=folder.name, versions=target.versions, seconds=seconds, run_seed=seed, started=started
        )
    finally:
        target.close()


def _head() -> str:
    columns = ["vLLM", *(check.name for check in STEP_CHECKS), "first finding"]
    return "| " + " | ".join(columns) + " |\n|" + "---|" * len(columns) + "\n"


def _line(row: Survey) -> str:
    if row.refusal:
        return f"| {row.target} | not driven: {row.refusal} |" + " |" * len(STEP_CHECKS)
    cells = [_cell(row, check.name) for check in STEP_CHECKS]
    first = row.first_finding_seconds
    return f"| {row.target} | {' | '.join(cells)} | {'' if first is None else f'{first:.0f} s'} |"


def _cell(row: Survey, check: str) -> str:
    """The status; a plan that depends on history but covers every row is told apart from one that reads wrong keys."""
    verdict, key = row.verdicts[check], row.verdicts["key_sufficiency"].measured
    wrongful = key.get("wrongful", 0)
    of_plan = check in ("key_sufficiency", "cache_transparency")
    if verdict.status is Status.FAILED and of_plan and wrongful and wrongful == key.get("wrongful_split_cap_only"):
        return "FAILED: split cap only"
    return verdict.status.value


def _save(row: Survey, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for case in row.findings:
        save_case(case, folder / f"vllm-{row.target}-{case.scope}-{case.check}.json")


def _exit_code(surveys: Iterable[Survey]) -> int:
    statuses = {verdict.status for row in surveys for verdict in row.verdicts.values()}
    if Status.FAILED in statuses:
        return 1
    return 3 if Status.MISTRUSTED in statuses or any(row.refusal for row in surveys) else 0


@app.command("diff")
@command
def target_diff(
    first: Annotated[str, typer.Argument(help="A prepared release, as vllm==0.24.0.", show_default=False)],
    second: Annotated[str, typer.Argument(help="Another one.", show_default=False)],
    into: Into = DEFAULT_FOLDER,
    json: Json = False,
) -> int:
    """Run the purposeful sequences on two prepared releases and list what they do differently.

    Exit 1 if anything differs.
    """
    torch.set_num_threads(1)
    seen = [_behaviour(into / release_of(spec)) for spec in (first, second)]
    changes = compare(seen[0], seen[1])
    if json:
        print(msgspec.json.encode([{"change": what, "steps": where} for what, where in changes]).decode())
    elif changes:
        table = Table("what changed", "steps", "first", title=f"{first} -> {second}")
        for what, where in changes:
            table.add_row(what, str(len(where)), where[0])
        show(table)
    else:
        print(f"{first} and {second} do the same in all {sum(map(len, seen[0].values()))} steps")
    return int(bool(changes))


def _behaviour(folder: Path) -> dict[str, list[Behaviour]]:
    target = _open(folder)
    try:
        return behaviour(target)
    finally:
        target.close()


@app.command("contract")
@command
def target_contract(
    spec: Annotated[
        str | None, typer.Argument(help="A prepared release, as vllm==0.24.0; none for a table of all.")
    ] = None,
    into: Into = DEFAULT_FOLDER,
    aiter_release: Annotated[
        str | None, typer.Option(help="AITER release whose signatures the emulation shows; default the newest read.")
    ] = None,
    json: Json = False,
) -> int:
    """Probe a prepared release's kernels and what it assumes of AITER: converters by tracers, contracts by driving.

    Without a release, all prepared ones are probed and told as a Markdown table, equal neighbours in one column.
    Exit 1 if anything is not as the contract says.
    """
    torch.set_num_threads(1)
    folders = [into / release_of(spec)] if spec else _all_prepared(into)[::-1]
    answers = {folder.name: _probed(folder, aiter_release) for folder in folders}
    if json:
        print(msgspec.json.encode(answers[folders[0].name] if spec else answers).decode())
    elif spec:
        print(f"{spec} with AITER {aiter_release or 'as emulated'}")
        for answer in answers[folders[0].name]:
            print(f"  {answer['status']:7} {answer['name']}: {answer['summary']}")
    else:
        print("\n".join(_contract_table(answers)))
    return int(any(answer["status"] == Status.FAILED.value for found in answers.values() for answer in found))


Answers = list[dict[str, str]]


def _probed(folder: Path, aiter_release: str | None) -> Answers:
    target = _open(folder, aiter_release)
    try:
        return target.probe()
    finally:
        target.close()


def _contract_table(answers: dict[str, Answers]) -> list[str]:
    """A row for each probe, a column for each run of neighbours that answer all of them alike; PASSED is blank."""
    groups: list[tuple[list[str], dict[str, str]]] = []
    for release, found in answers.items():
        statuses = {answer["name"]: answer["status"] for answer in found}
        if groups and groups[-1][1] == statuses:
            groups[-1][0].append(release)
        else:
            groups.append(([release], statuses))
    columns = [names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}" for names, _ in groups]
    lines = [f"| probe | {' | '.join(columns)} |", "|" + "---|" * (len(columns) + 1)]
    for name in groups[0][1]:
        cells = ("" if statuses[name] == Status.PASSED.value else statuses[name] for _, statuses in groups)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _all_prepared(into: Path) -> list[Path]:
    """Folders of the prepared releases, newest first."""
    folders = prepared(into)
    if not folders:
        raise ValueError(f"{into} holds no prepared release; run dsv32 target install vllm==0.24.0 --into {into}")
    return folders


def _open(folder: Path, aiter_release: str | None = None) -> VllmTarget:
    if not folder.is_dir():
        spec = f"vllm=={folder.name}"
        raise ValueError(f"{folder} is not prepared; run dsv32 target install {spec} --into {folder.parent}")
    target = open_target("vllm", path=str(folder), aiter_release=aiter_release)
    assert isinstance(target, VllmTarget)
    return target
