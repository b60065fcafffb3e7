"""Sign-offs over time, and what differs between two."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.table import Table

from dsv32_fuzz.case import write_atomically
from dsv32_reports.commands.common import Json, command, show
from dsv32_reports.history import changes, drifts, opened
from dsv32_reports.html_page import render_history
from dsv32_reports.verify import verified_report


@command
def history(
    bundles: Annotated[list[Path], typer.Argument(help="Bundles to add; none to look at what is kept.")] = [],  # noqa: B006
    db: Annotated[Path, typer.Option(help="The SQLite file that keeps them.")] = Path("dsv32-history.sqlite"),
    html: Annotated[Path | None, typer.Option(help="Write a page with a trend plot of every figure.")] = None,
    json: Json = False,
) -> int:
    """Keep sign-offs in a SQLite file, list them, and say which figures drift before they become failures.

    A bundle that does not verify is refused. Exit 0, 1 if a figure drifts, 2 for a bad bundle or file.
    """
    reports = [verified_report(folder) for folder in bundles]
    with opened(db) as kept:
        added = sum(kept.add(report, digest) for report, digest in reports)
        rows, series = kept.rows(), kept.figures()
    found = drifts(series)
    if html:
        write_atomically(html, render_history(rows, series, found).encode())
    if json:
        print(msgspec.json.encode({"added": added, "signoffs": rows, "drifts": found}).decode())
        return int(bool(found))
    table = Table("started", "outcome", "what", "id", title=f"{len(rows)} sign-offs, {added} new", title_justify="left")
    for row in rows:
        table.add_row(row.started, row.outcome, row.series, row.id)
    show(table)
    for drift in found:
        print(f"DRIFT {drift.figure} ({drift.series}): {drift.first:.4g} -> {drift.last:.4g}, p = {drift.p_value:.2g}")
    return int(bool(found))


@command
def diff(
    before: Annotated[Path, typer.Argument(help="The earlier bundle.", show_default=False)],
    after: Annotated[Path, typer.Argument(help="The later bundle.", show_default=False)],
    json: Json = False,
) -> int:
    """What differs between two sign-offs: outcome, inputs, gates, counterexamples, figures.

    Exit 0 if nothing differs, 1 if something does, 2 for a folder that does not verify.
    """
    found = changes(verified_report(before)[0], verified_report(after)[0])
    if json:
        print(msgspec.json.encode(found).decode())
    else:
        print("\n".join(found) or "nothing differs")
    return int(bool(found))
