"""Saved cases, run again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from dsv32_fast.options import PRESETS, resolve
from dsv32_fuzz.campaigns.corpus import case_files
from dsv32_fuzz.case import load_case
from dsv32_fuzz.search.replay import replay_case
from dsv32_fuzz.targets.registry import open_target
from dsv32_fuzz.verdict import Status, Verdict, worst
from dsv32_reports.commands.common import EXIT_OF_STATUS, Assignments, Json, TargetName, TargetPython, VllmPath, command

OWN_CORPUS = Path("fuzz/corpus")


@command
def replay(
    paths: Annotated[
        list[Path] | None, typer.Argument(help="Case files, or folders of them; default fuzz/corpus.")
    ] = None,
    options: Annotated[
        str | None, typer.Option("--options", help=f"Other options than the case's own: {', '.join(PRESETS)}.")
    ] = None,
    set_: Assignments = None,
    target_name: TargetName = "in-tree",
    vllm_path: VllmPath = None,
    target_python: TargetPython = None,
    json: Json = False,
) -> int:
    """Run saved cases again, with their own options, with others, or on another target: FIXED if one passes now.

    Exit 0 if every case passes, 1 if one still fails, 3 if one tested nothing, 2 for a file that is no case.
    """
    override = resolve(options, tuple(set_ or ())) if options else None
    if set_ and not options:
        raise ValueError("--set changes the options of a preset; give --options as well")
    cases = [(path, load_case(path)) for path in case_files(paths or [OWN_CORPUS])]
    other = None
    if target_name != "in-tree" or vllm_path or target_python:
        other = open_target(target_name, options, tuple(set_ or ()), path=vllm_path, python=target_python)
    verdicts: list[Verdict] = []
    for path, case in cases:
        verdict, text = replay_case(case, override, other)
        verdicts.append(verdict)
        if not json:
            word = "FIXED" if verdict.status is Status.PASSED else verdict.status.value
            print(f"{word} {verdict.check} with {text}: {path}\n  {verdict.summary}")
    if json:
        print(
            msgspec.json.encode(
                [{"file": str(p), "verdict": v} for (p, _), v in zip(cases, verdicts, strict=True)]
            ).decode()
        )
    return EXIT_OF_STATUS[worst([verdict.status for verdict in verdicts])]
