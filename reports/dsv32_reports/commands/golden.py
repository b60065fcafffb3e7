"""Recorded outputs of other implementations, held against ours."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from dsv32_fuzz.golden.verdicts import decodes_verdict, plans_verdict
from dsv32_reports.commands.common import EXIT_OF_STATUS, Json, command


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
