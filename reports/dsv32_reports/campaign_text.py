"""What a fuzz campaign says on the terminal: progress while it goes on, and its result when it is over."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import MappingProxyType

from dsv32_fast.options import describe
from dsv32_fuzz.campaigns.journal import case_in
from dsv32_fuzz.campaigns.ledger import cause_key
from dsv32_fuzz.campaigns.recorded import EVENT
from dsv32_fuzz.campaigns.result import CampaignResult, CheckLine, Failure
from dsv32_fuzz.events import CounterexampleFound, Event, Progress
from dsv32_fuzz.verdict import Status
from dsv32_reports.fold import shown_case
from dsv32_reports.wording import replay_command

LINE_SECONDS = 60.0
"""Off a terminal, progress is a line a minute."""


class ProgressLines:
    """Progress for logs: how far, how many cases, and when it will end; a counterexample at once."""

    def __init__(self, seconds: float, say: Callable[[str], None]) -> None:
        self._seconds, self._say, self._told = seconds, say, time.monotonic()
        self._shown: set[str] = set()

    def __call__(self, event: Event) -> None:
        """Show one event."""
        now = time.monotonic()
        if isinstance(event, CounterexampleFound):
            self._show(event)
        elif isinstance(event, Progress) and now - self._told >= LINE_SECONDS:
            self._told = now
            done = event.done * self._seconds
            self._say(f"{clock(done)} of {clock(self._seconds)}, {event.text}, ends in {clock(self._seconds - done)}")

    def _show(self, found: CounterexampleFound) -> None:
        cause = cause_key(found.case.check, found.summary)
        if cause not in self._shown:
            self._shown.add(cause)
            self._say(f"counterexample: {found.case.check} in {found.case.scope}: {found.summary}")


def clock(seconds: float) -> str:
    """A duration as h:mm:ss or m:ss."""
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def result_lines(
    result: CampaignResult, *, quiet: bool = False, rows: Mapping[str, list[str]] = MappingProxyType({})
) -> list[str]:
    """The result in lines: the verdict first, then failures, what is fixed, and every check.

    `rows` tells of rows that misread, by cause of the failure (`targets.neighbours`).
    """
    options = describe(result.options) if result.options else result.release or "as installed"
    shards = f"{len(result.shards)} shard{'s' if len(result.shards) != 1 else ''}"
    lines = [
        f"{result.status.value}  {result.target} {options}, evidence level: {result.evidence}",
        f"{result.cases} cases in {clock(result.shard_seconds)} of search on {shards}, profile {result.profile}, "
        f"seed {result.seed}, {result.crashes} crashes or hangs",
    ]
    if result.lost_shards:
        lost = ", ".join(map(str, result.lost_shards))
        lines.append(f"shards that did not run to their end: {lost}; run the same command again to go on")
    lines += [f"ledger: {problem}" for problem in result.problems]
    for failure in result.failures:
        lines += _failure_lines(failure, result.target, rows.get(failure.cause, []))
    lines += [f"fixed   {file}" for file in result.fixed]
    if quiet:
        return lines
    if result.corpus:
        passed = sum(run.verdict.status is Status.PASSED for run in result.corpus)
        lines.append(f"corpus: {passed} of {len(result.corpus)} cases pass")
    if result.cells:
        events = sum(cell.startswith(EVENT) for cell in result.cells)
        lines.append(
            f"{len(result.cells) - events} cells of the input space covered, {events} kinds of rare event reached"
        )
    return [*lines, "", *(_check_line(line) for line in result.lines)]


def _failure_lines(failure: Failure, target: str, rows: list[str]) -> list[str]:
    since = f", since {failure.since}" if failure.standing != "new" else ""
    where = failure.check if failure.check == failure.scope else f"{failure.check} in {failure.scope}"
    shrunk = "" if failure.shrunk else " (not shrunk: the run ended first)"
    lines = [f"{failure.standing:<7} {where}{since}{shrunk}: {failure.summary}"]
    if failure.also_fails:
        lines.append(f"        also fails: {', '.join(failure.also_fails)}")
    case = case_in(failure.case)
    lines += [f"        {line}" for line in [*(shown_case(case) if case else []), *rows]]
    if failure.reference:
        lines.append(f"        {failure.reference}")
    if failure.file:
        lines.append(f"        {replay_command(failure.file, target)}")
    return lines


def _check_line(line: CheckLine) -> str:
    where = line.check if line.check == line.scope else f"{line.check} in {line.scope}"
    told = f": {line.summary}" if line.status is not Status.PASSED else ""
    return f"{line.status.value:<10}  {line.cases:>7}  {where}{told}"
