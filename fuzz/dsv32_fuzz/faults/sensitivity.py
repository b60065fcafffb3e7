"""The sensitivity phase of a campaign: would the checks of this run, on this machine, have seen known defects?

It injects faults of the catalogue into the in-tree path, whatever the target of the campaign is, because what is on
trial here are the checks. One verdict per area: FAILED if a fault survives or a check fails without one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dsv32_fuzz.events import Event, PhaseStarted, Progress, TableMade, VerdictReached
from dsv32_fuzz.faults import AREAS, CATALOGUE, FAULTS, of_area
from dsv32_fuzz.faults.matrix import run_fault
from dsv32_fuzz.faults.results import FaultRow
from dsv32_fuzz.verdict import Status, Verdict

PHASE = "sensitivity"


def one_per_area(seed: int) -> tuple[str, ...]:
    """The name of one fault of each area, another one for each seed."""
    return tuple(faults[seed % len(faults)].name for area in AREAS if (faults := of_area(area)))


def whole_catalogue(_seed: int = 0) -> tuple[str, ...]:
    """The names of all faults."""
    return tuple(fault.name for fault in CATALOGUE)


def sensitivity(names: Sequence[str], seed: int) -> Iterator[Event]:
    """Search each fault until its first kill.

    Yields progress, a verdict per area (the scope), and the table `kill_matrix`.
    """
    yield PhaseStarted(phase=PHASE, title=f"inject {len(names)} known faults: do the checks see them?")
    rows: list[FaultRow] = []
    for number, name in enumerate(names, 1):
        rows.append(run_fault(FAULTS[name], "ci", seed))
        killed = sum(row.killed for row in rows)
        yield Progress(phase=PHASE, done=number / len(names), text=f"{killed} of {number} faults killed")
    for area in AREAS:
        of_this = [row for row in rows if row.area == area]
        if of_this:
            yield VerdictReached(phase=PHASE, scope=area, verdict=area_verdict(of_this))
    yield TableMade(name="kill_matrix", rows=[table_row(row) for row in rows])


def area_verdict(rows: Sequence[FaultRow]) -> Verdict:
    """What the faults of one area say of the checks."""
    survivors = [row.fault for row in rows if row.compared and not row.killed]
    untested = [row.fault for row in rows if not row.compared]
    alarms = [f"{kill.check} ({kill.summary})" for row in rows for kill in row.false_alarms]
    if survivors or alarms:
        status = Status.FAILED
        parts = [f"no check sees {', '.join(survivors)}"] if survivors else []
        parts += [f"fails without a fault: {alarms[0]}"] if alarms else []
        summary = "; ".join(parts)
    elif untested:
        status, summary = Status.MISTRUSTED, f"no check compared anything under {', '.join(untested)}"
    else:
        first = rows[0]
        status = Status.PASSED
        summary = f"{first.fault} ({first.story}) killed by {first.kills[0].check}"
        summary += f", and {len(rows) - 1} more" if len(rows) > 1 else ""
    killed = sum(row.killed for row in rows)
    measured: dict[str, float | int | str] = {"faults": len(rows), "killed": killed, "false_alarms": len(alarms)}
    return Verdict(check=PHASE, status=status, summary=summary, measured=measured)


def table_row(row: FaultRow) -> dict[str, object]:
    """A row of the report's table."""
    kill = row.kills[0] if row.kills else None
    return {
        "fault": row.fault,
        "area": row.area,
        "story": row.story,
        "reference": row.reference,
        "killed_by": kill.check if kill else "",
        "examples": kill.examples if kill else row.examples,
        "seconds": kill.seconds if kill else row.seconds,
    }
