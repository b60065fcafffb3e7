"""Shards of one campaign that ran in different places, united."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dsv32_fuzz.campaigns.corpus import Corpus
from dsv32_fuzz.campaigns.ledger import read_ledger
from dsv32_fuzz.campaigns.result import read_result
from dsv32_reports.commands.common import EXIT_OF_STATUS, Json, command
from dsv32_reports.commands.fuzz import CorpusFolder, LedgerFile, show, write_result


@command
def merge(
    folders: Annotated[list[Path], typer.Argument(help="Folders that `dsv32 fuzz` made.", show_default=False)],
    out: Annotated[Path, typer.Option(help="Folder for result.json and the failing cases.")] = Path("merged"),
    corpus: CorpusFolder = None,
    ledger: LedgerFile = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only the verdict and the failures.")] = False,
    json: Json = False,
) -> int:
    """Unite shards of one campaign into one result; the order of the folders does not matter.

    A case that two shards ran counts once. Exit 0 if nothing fails but what the ledger lists, 1 for a failure, 3 if
    something was not really tested or a shard did not run to its end.
    """
    known = read_ledger(ledger) if ledger else None
    result = read_result(folders)
    out.mkdir(parents=True, exist_ok=True)
    cases = Corpus(corpus or out / "corpus")
    assessed = write_result(result, out, cases, known, ledger.parent if ledger else Path())
    show(assessed, out, quiet=quiet, json=json)
    return EXIT_OF_STATUS[assessed.status]
