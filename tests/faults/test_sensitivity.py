"""The sensitivity phase: one fault per area, and nothing that survives, alarms or idles passes."""

from __future__ import annotations

import msgspec
import pytest

from dsv32_fuzz.events import TableMade, VerdictReached
from dsv32_fuzz.faults import AREAS, FAULTS, Fault
from dsv32_fuzz.faults import sensitivity as phase
from dsv32_fuzz.faults.results import FaultRow, Kill
from dsv32_fuzz.verdict import Status

KILL = Kill(check="plan_coverage", family="traffic", examples=3, seconds=0.1, summary="row 0")
ROW = FaultRow(
    fault="f",
    area="key",
    story="s",
    reference="r",
    seams=(),
    options="pr47766",
    kills=(KILL,),
    false_alarms=(),
    examples=3,
    compared=True,
    seconds=0.2,
)


def test_every_area_is_asked_and_every_fault_in_turn() -> None:
    for seed in (0, 5):
        assert [FAULTS[name].area for name in phase.one_per_area(seed)] == list(AREAS)
    seen = {name for seed in range(20) for name in phase.one_per_area(seed)}
    assert seen == set(phase.whole_catalogue())


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({}, Status.PASSED),
        ({"kills": ()}, Status.FAILED),
        ({"false_alarms": (KILL,)}, Status.FAILED),
        ({"kills": (), "compared": False}, Status.MISTRUSTED),
    ],
)
def test_one_bad_row_decides_its_area(changes: dict[str, object], status: Status) -> None:
    verdict = phase.area_verdict([ROW, msgspec.structs.replace(ROW, **changes)])
    assert verdict.status is status
    assert verdict.measured["faults"] == 2


def test_events_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(fault: Fault, _gate: str, _seed: int) -> FaultRow:
        return msgspec.structs.replace(ROW, fault=fault.name, area=fault.area)

    monkeypatch.setattr(phase, "run_fault", killed)
    events = list(phase.sensitivity(phase.one_per_area(0), 0))
    verdicts = [event for event in events if isinstance(event, VerdictReached)]
    assert [event.scope for event in verdicts] == list(AREAS)
    (table,) = [event for event in events if isinstance(event, TableMade)]
    assert [row["fault"] for row in table.rows] == list(phase.one_per_area(0))
