"""Progress of a long command on standard error: a bar on a terminal, lines elsewhere, both with an ETA."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from dsv32_reports.terminal import Output

LINE_EVERY = 30.0
"""Seconds between lines where there is no terminal."""
Advance = Callable[[int, str], None]
"""(done, note): how many of all are done, and what is going on."""


@contextmanager
def bar(title: str, total: int, done: int = 0) -> Iterator[Advance]:
    """Shows how many of `total` are done, of which `done` were before."""
    console = Output(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn())
    times = (TextColumn("{task.fields[note]}"), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, *times, console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task(title, total=total, completed=done, note="")
        began = shown = time.monotonic()

        def advance(now: int, note: str) -> None:
            nonlocal shown
            bars.update(task, completed=now, note=note)
            at = time.monotonic()
            if not console.is_terminal and at - shown >= LINE_EVERY and now > done:
                shown, left = at, (at - began) * (total - now) / (now - done)
                text = f"{title}: {now} of {total}, {note}; about {left / 60:.1f} min left"
                console.print(text, markup=False, highlight=False, soft_wrap=True)

        yield advance
