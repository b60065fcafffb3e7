"""What the page draws is what the report counts."""

from __future__ import annotations

from report_worlds import everything, whole_run

from dsv32_fuzz.events import VerdictReached
from dsv32_fuzz.verdict import MARGIN_EDGES, Status, Verdict
from dsv32_ref.bounds import EDGES
from dsv32_reports import plots
from dsv32_reports.charts import Cell
from dsv32_reports.fold import fold
from dsv32_reports.gates import make_gates
from dsv32_reports.wording import headline, number


def with_histograms(family: str, check: str, histograms: dict[str, list[int]]) -> list[VerdictReached]:
    verdict = Verdict(check=check, status=Status.PASSED, summary="", measured={"steps": 1}, histograms=histograms)
    return [*everything(), VerdictReached(phase=f"check:{family}", scope=check, verdict=verdict)]


def test_an_element_beyond_its_bound_is_marked() -> None:
    counts = [3, *[0] * (len(EDGES) - 1), 1]
    grid = plots.budgets(make_gates(with_histograms("step", "stage_numerics", {"budget used: attn_z": counts})))
    assert grid is not None
    assert len(grid.columns) == len(EDGES) + 2
    ((name, cells),) = grid.rows
    assert name == "Decode step: attn_z"
    assert [cell.text for cell in cells if cell] == ["75", "25", "4"]
    assert [cell.wrong for cell in cells if cell] == [False, True, False]
    assert plots.budgets(make_gates(everything())) is None


def test_flips_stand_on_the_choices_that_did_not() -> None:
    same, flipped = [0] * (len(MARGIN_EDGES) + 1), [0] * (len(MARGIN_EDGES) + 1)
    same[-1], flipped[0] = 7, 2
    shown = {"router margin: same choice": same, "router margin: flipped": flipped}
    columns = plots.margins(make_gates(with_histograms("router", "router_precision", shown)))
    assert [(c.plain, c.marked) for c in columns if c.plain or c.marked] == [(0, 2), (7, 0)]
    assert columns[plots.LARGEST_LEGAL_MARGIN - 1].label == "1"
    assert plots.margins(make_gates(everything())) == []


def test_a_survivor_is_marked_in_the_kill_map() -> None:
    found = [("key", "key_sufficiency"), ("key", "key_sufficiency"), ("key", ""), ("router", "router_choice")]
    grid = plots.kills([{"area": area, "killed_by": check} for area, check in found])
    rows = dict(grid.rows)
    assert rows["key sufficiency"] == [Cell(text="2", share=2 / 3), None]
    assert [cell.wrong for cell in rows["seen by no check"] if cell] == [True, False]
    assert [cell.text for cell in rows["faults injected"] if cell] == ["3", "1"]
    assert grid.title.startswith("3 of 4")


def test_a_cell_that_was_never_reached_is_marked() -> None:
    covered = fold(whole_run(), "x").coverage
    drawn = [cell for _, cells in plots.coverage(covered).rows for cell in cells if cell]
    counts = [count for row in covered.steps_by_length_and_query.values() for count in row.values()]
    assert [cell.text for cell in drawn] == [str(count) for count in counts]
    assert [cell.wrong for cell in drawn] == [count == 0 for count in counts]


def test_words() -> None:
    assert headline(fold(whole_run(), "x")).startswith("Nothing speaks against deploying pr47766")
    assert headline(fold(whole_run(failing=True), "x")).startswith("Do not deploy pr47766: ")
    assert [number(v) for v in (None, 3, "a", 0.12345, 1604.8)] == ["", "3", "a", "0.123", "1605"]
