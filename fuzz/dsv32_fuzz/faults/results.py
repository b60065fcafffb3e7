"""What a run of the catalogue gives: rows of faults, rows of controls, and what follows from them."""

from __future__ import annotations

import statistics
from typing import Any, Literal

import msgspec

from dsv32_fuzz.case import AnyCase, decode_case

Gate = Literal["ci", "nightly"]


class Kill(msgspec.Struct, frozen=True, kw_only=True):
    """One check that fails on a faulty target."""

    check: str
    family: str
    examples: int
    """Examples of all properties that were judged until then."""
    seconds: float
    """CPU time until the first failing example, the search of other properties before it included."""
    summary: str
    case: dict[str, Any] | None = None
    """The shrunk case as a document, where the check was shrunk itself."""

    def saved(self) -> AnyCase | None:
        """The case, ready to be judged or saved."""
        return None if self.case is None else decode_case(msgspec.json.encode(self.case))


class FaultRow(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one fault; the first kill comes first."""

    fault: str
    area: str
    story: str
    reference: str
    seams: tuple[str, ...]
    options: str
    kills: tuple[Kill, ...]
    false_alarms: tuple[Kill, ...]
    """Checks that fail on the same case without the fault."""
    examples: int
    compared: bool
    """Whether any check compared something."""
    seconds: float

    @property
    def killed(self) -> bool:
        """Some check tells the faulty target from the faultless one."""
        return bool(self.kills)


class ControlRow(msgspec.Struct, frozen=True, kw_only=True):
    """The faultless target of one preset under every check."""

    options: str
    checks: int
    passed: int
    """Checks that compared something and found nothing."""
    false_alarms: tuple[Kill, ...]
    examples: int
    seconds: float


class CheckInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A column of the matrix."""

    name: str
    family: str


class KillMatrix(msgspec.Struct, frozen=True, kw_only=True):
    """All rows of one run, in the order of the catalogue."""

    format: Literal["dsv32-faults/1"] = "dsv32-faults/1"
    gate: Gate
    seed: int
    checks: tuple[CheckInfo, ...]
    rows: tuple[FaultRow, ...]
    controls: tuple[ControlRow, ...]
    seconds: float

    @property
    def survivors(self) -> tuple[FaultRow, ...]:
        """Faults that no check tells from their control."""
        return tuple(row for row in self.rows if not row.killed)

    @property
    def false_alarms(self) -> tuple[Kill, ...]:
        """Failures without a fault, on a killing case or in the search of a faultless target."""
        alarms = [row.false_alarms for row in self.rows] + [control.false_alarms for control in self.controls]
        return tuple(kill for found in alarms for kill in found)

    @property
    def untested(self) -> tuple[FaultRow, ...]:
        """Faults on which no check compared anything."""
        return tuple(row for row in self.rows if not row.compared)

    @property
    def idle_checks(self) -> tuple[CheckInfo, ...]:
        """Checks that kill nothing; at gate `ci`, where a search ends with its first kill, this is no verdict."""
        killing = {kill.check for row in self.rows for kill in row.kills}
        return tuple(check for check in self.checks if check.name not in killing)

    @property
    def killed_by_one(self) -> tuple[FaultRow, ...]:
        """Faults that hang on a single check."""
        return tuple(row for row in self.rows if len({kill.check for kill in row.kills}) == 1)

    @property
    def median_seconds(self) -> float:
        """Median CPU time to the first failing example over the killed faults, 0 if none was killed."""
        return statistics.median([row.kills[0].seconds for row in self.rows if row.killed] or [0.0])

    @property
    def cpu_seconds(self) -> float:
        """CPU time of all searches, those without a fault included."""
        return sum(row.seconds for row in self.rows) + sum(row.seconds for row in self.controls)

    def counts(self) -> dict[str, tuple[int, int]]:
        """Killed and all faults of each area, in the order of the rows."""
        found: dict[str, tuple[int, int]] = {}
        for row in self.rows:
            killed, total = found.get(row.area, (0, 0))
            found[row.area] = killed + row.killed, total + 1
        return found
