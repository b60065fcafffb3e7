"""What a check says: a status, what it measured, and why."""

from __future__ import annotations

import enum
import math
import sys

import msgspec


class Status(str, enum.Enum):
    """The four outcomes of a check; order of severity is `worst`'s."""

    PASSED = "PASSED"
    FAILED = "FAILED"
    MISTRUSTED = "MISTRUSTED"
    """Nothing was really tested: fails pytest, makes a gate INCONCLUSIVE."""
    SKIPPED = "SKIPPED"


MARGIN_EDGES = tuple(2.0**power for power in range(-5, 9))
"""Upper edges of a router margin as a multiple of the error bound of its scores; only a flip up to 1 is legal."""

_SEVERITY = (Status.SKIPPED, Status.PASSED, Status.MISTRUSTED, Status.FAILED)


def worst(statuses: list[Status]) -> Status:
    """The most severe of several statuses; MISTRUSTED for none, since nothing was tested."""
    return max(statuses, key=_SEVERITY.index, default=Status.MISTRUSTED)


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one check over one case, or over many cases when merged."""

    check: str
    status: Status
    summary: str
    """One line that a person understands without the source; for FAILED, the first violation."""
    measured: dict[str, float | int | str] = {}
    """Numbers, by name; merged, integers are counts and add up, floats are worst values. A worst value that is infinite
    or NaN is kept as the largest float: JSON has no other, and no limit admits it."""
    histograms: dict[str, list[int]] = {}
    """Counts per bin, by name; merged, they add up. `budget used: STAGE` has the bins of `dsv32_ref.bounds.EDGES`,
    `router margin: same choice` and `router margin: flipped` those of `MARGIN_EDGES`."""
    step: int = -1
    """Step of the first violation in the case that failed, -1 if there is none."""

    def __post_init__(self) -> None:
        odd = {n: v for n, v in self.measured.items() if isinstance(v, float) and not math.isfinite(v)}
        if odd:
            kept = self.measured | dict.fromkeys(odd, sys.float_info.max)
            msgspec.structs.force_setattr(self, "measured", kept)
