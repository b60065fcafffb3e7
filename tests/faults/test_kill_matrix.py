"""The kill matrix: what kills, what is a false alarm, what survives; its gate, its picture, its command."""

from __future__ import annotations

import datetime
import json
import os
import xml.etree.ElementTree as ET
from pathlib import Path

import msgspec
import pytest
from hypothesis import strategies as st
from typer.testing import CliRunner

from dsv32_fuzz.case import load_case
from dsv32_fuzz.checks.own_input import InputCheck
from dsv32_fuzz.faults import AREAS, FAULTS, Fault, Patch, matrix, rotating
from dsv32_fuzz.faults.journal import NAME
from dsv32_fuzz.faults.matrix import Effort, assemble, ordered, run_control, run_fault, run_matrix, run_rows
from dsv32_fuzz.faults.picture import heat_map
from dsv32_fuzz.faults.results import ControlRow, FaultRow, Gate, Kill, KillMatrix
from dsv32_fuzz.search.properties import OwnInput, Property, properties, property_of
from dsv32_fuzz.targets import Target
from dsv32_fuzz.targets.intree import InTreeTarget
from dsv32_fuzz.verdict import Status, Verdict
from dsv32_reports.cli import app
from dsv32_reports.commands.faults import exit_code, summary

PARTS = 8
"""`make test` takes one part of the catalogue, another one each day."""
NOTHING = Fault(
    name="nothing",
    area="key",
    story="alters nothing",
    reference="none",
    patches=(Patch(where="dsv32_fast.metadata", name="MIN_HEADS", make=lambda heads: heads),),
)


class Nothing(msgspec.Struct, frozen=True):
    pass


class AlwaysFails(InputCheck[Nothing]):
    name = "always_fails"
    meaning = "never holds"
    family = "moe"
    input_type = Nothing

    def inputs(self) -> st.SearchStrategy[Nothing]:
        return st.just(Nothing())

    def run(self, drawn: Nothing, target: Target) -> Verdict:
        return self.verdict(f"{drawn} on {target.name}", {})


@pytest.fixture
def small_effort(monkeypatch: pytest.MonkeyPatch) -> None:
    effort = Effort(passes=(2,), seconds=5.0, shrink_seconds=0.2, every_cell=False, control_examples=1)
    monkeypatch.setitem(matrix.GATES, "ci", effort)


@pytest.fixture
def always_fails(monkeypatch: pytest.MonkeyPatch, small_effort: None) -> None:
    """One more check, which fails on every target."""

    def more(target: Target) -> list[Property]:
        return [OwnInput(target, AlwaysFails)]

    monkeypatch.setattr(matrix, "properties", more)
    monkeypatch.setattr(matrix, "property_of", lambda _, target: OwnInput(target, AlwaysFails))


def test_a_kill_has_a_check_a_case_and_a_quiet_control() -> None:
    fault = FAULTS["plan_below_topk"]
    row = run_fault(fault, "ci", seed=0)
    assert row.killed
    assert row.false_alarms == ()
    kill = row.kills[0]
    case = kill.saved()
    assert case is not None
    assert 0 < kill.examples <= row.examples
    assert 0 < kill.seconds <= row.seconds

    def says(target: InTreeTarget) -> Status:
        return property_of(case, target).judge(case, [kill.check])[0].status

    assert says(fault.control()) is not Status.FAILED
    with fault.inject() as target:
        assert says(target) is Status.FAILED


def test_equal_seeds_kill_alike() -> None:
    first, second = (run_fault(FAULTS["plan_gap"], "ci", seed=3) for _ in range(2))
    assert [(k.check, k.examples) for k in first.kills] == [(k.check, k.examples) for k in second.kills]


def test_what_alters_nothing_survives(small_effort: None) -> None:
    row = run_fault(NOTHING, "ci", seed=0)
    assert (row.killed, row.compared, row.false_alarms) == (False, True, ())
    assert row.examples > 0


def test_a_check_that_fails_without_a_fault_kills_nothing(always_fails: None) -> None:
    row = run_fault(NOTHING, "ci", seed=0)
    assert [kill.check for kill in row.false_alarms] == ["always_fails"]
    assert not row.killed
    control = run_control("pr47766", "ci", seed=0)
    assert [kill.check for kill in control.false_alarms] == ["always_fails"]


def test_the_faultless_target_raises_no_alarm(small_effort: None) -> None:
    control = run_control("pr47766", "ci", seed=1)
    assert control.false_alarms == ()
    assert control.examples >= 4
    assert control.passed <= control.checks


def test_time_that_is_over_tries_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    effort = Effort(passes=(50,), seconds=0.0, shrink_seconds=0.0, every_cell=False, control_examples=1)
    monkeypatch.setitem(matrix.GATES, "ci", effort)
    row = run_fault(FAULTS["plan_gap"], "ci", seed=0)
    assert (row.killed, row.compared, row.examples) == (False, False, 0)


def test_the_families_of_an_area_come_first() -> None:
    found = properties(FAULTS["plan_gap"].control())
    families = [matrix.family_of(searched) for searched in ordered(found, "moe")]
    assert families == sorted(families, key=lambda f: {"moe": 0, "router": 1}.get(f, 2))
    assert families[0] == "moe"
    assert matrix.family_of(ordered(found, "key")[0]) == "traffic"
    assert sorted(families) == sorted(map(matrix.family_of, found))


def test_an_areas_own_families_are_one_pass_ahead() -> None:
    found = properties(FAULTS["plan_gap"].control())
    agenda = [(searched.scope, examples) for searched, examples in matrix._agenda(found, "moe", (10, 50))]
    places = [agenda.index(wanted) for wanted in (("mixture", 10), ("mixture", 50), ("decode", 10), ("decode", 50))]
    assert places == sorted(places)
    assert sorted(agenda) == sorted((searched.scope, examples) for searched in found for examples in (10, 50))


def test_parts_cover_the_catalogue_once() -> None:
    parts = [rotating(number, PARTS) for number in range(PARTS)]
    names = [name for part in parts for name in part]
    assert sorted(names) == sorted(FAULTS)
    assert max(map(len, parts)) <= len(FAULTS) / PARTS + len(AREAS)
    assert rotating(PARTS + 1, PARTS) == parts[1]


def test_the_gate_kills_the_part_of_the_day() -> None:
    """`DSV32_FAULTS_PART` and `DSV32_FAULTS_SEED` ask for another part or seed."""
    today = datetime.datetime.now(datetime.timezone.utc).toordinal()
    part = int(os.environ.get("DSV32_FAULTS_PART", f"{today % PARTS}"))
    seed = int(os.environ.get("DSV32_FAULTS_SEED", "0"))
    found = run_matrix(rotating(part, PARTS), "ci", seed)
    assert [row.fault for row in found.survivors] == []
    assert found.false_alarms == ()


def made_row(fault: str, *checks: str, compared: bool = True) -> FaultRow:
    kills = tuple(Kill(check=check, family="traffic", examples=3, seconds=0.5, summary="<it>") for check in checks)
    known = FAULTS[fault]
    return FaultRow(
        fault=fault,
        area=known.area,
        story=known.story,
        reference=known.reference,
        seams=known.seams,
        options=known.options,
        kills=kills,
        false_alarms=(),
        examples=9,
        compared=compared,
        seconds=1.0,
    )


def made_matrix(*rows: FaultRow, controls: tuple[ControlRow, ...] = ()) -> KillMatrix:
    return assemble([*rows, *controls], "nightly", 7, 2.0)


def test_survivors_idle_checks_and_single_kills_are_named() -> None:
    found = made_matrix(
        made_row("plan_gap", "plan_coverage"),
        made_row("key_identity", "key_sufficiency", "cache_transparency"),
        made_row("moe_no_shared"),
    )
    assert [row.fault for row in found.rows] == ["key_identity", "plan_gap", "moe_no_shared"]
    assert [row.fault for row in found.survivors] == ["moe_no_shared"]
    assert [row.fault for row in found.killed_by_one] == ["plan_gap"]
    assert "step_metadata" in {check.name for check in found.idle_checks}
    assert found.counts() == {"key": (1, 1), "planner": (1, 1), "moe": (0, 1)}
    told = summary(found)
    assert "survived: moe_no_shared" in told
    assert "killed by one check only: plan_gap" in told


def test_the_exit_code_follows_from_the_rows() -> None:
    killed, alive = made_row("plan_gap", "plan_coverage"), made_row("moe_no_shared")
    alarm = Kill(check="x", family="traffic", examples=1, seconds=0.0, summary="")
    control = ControlRow(options="baseline", checks=1, passed=0, false_alarms=(alarm,), examples=1, seconds=0.0)
    assert exit_code(made_matrix(killed)) == 0
    assert exit_code(made_matrix(killed, alive)) == 1
    assert exit_code(made_matrix(killed, made_row("moe_no_shared", compared=False))) == 3
    assert exit_code(made_matrix(killed, controls=(control,))) == 1


def test_the_matrix_is_a_json_document() -> None:
    found = made_matrix(made_row("plan_gap", "plan_coverage"))
    assert msgspec.json.decode(msgspec.json.encode(found), type=KillMatrix) == found


def test_the_picture_is_one_cell_per_fault_and_check() -> None:
    found = made_matrix(made_row("plan_gap", "plan_coverage"), made_row("moe_no_shared"))
    root = ET.fromstring(heat_map(found))
    space = {"s": "http://www.w3.org/2000/svg"}
    cells = root.findall(".//s:rect", space)
    assert len(cells) == 2 * len(found.checks)
    titles = [cell.findtext("s:title", "", space) for cell in cells]
    assert "plan_gap, plan_coverage: 3 examples, 0.50 s: <it>" in titles
    assert len({cell.get("fill") for cell in cells}) == 2


def test_unknown_names_and_jobs_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown fault 'nobody'"):
        next(run_rows(["nobody"], "ci", 0, 1))
    with pytest.raises(ValueError, match="jobs is 0"):
        next(run_rows(["plan_gap"], "ci", 0, 0))
    with pytest.raises(ValueError, match="parts is 0"):
        rotating(1, 0)


def test_the_command_writes_matrix_picture_and_cases(tmp_path: Path, small_effort: None) -> None:
    arguments = ["faults", "--name", "plan_missing_tail", "--jobs", "1", "--json", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert document == json.loads((tmp_path / "faults.json").read_text())
    assert [row["fault"] for row in document["rows"]] == ["plan_missing_tail"]
    (case,) = (tmp_path / "cases").glob("plan_missing_tail-*.json")
    assert load_case(case).check == document["rows"][0]["kills"][0]["check"]
    ET.fromstring((tmp_path / "faults.svg").read_text())


def test_an_ended_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C behind the second row loses none of them; the last line may be cut off."""
    arguments = ["faults", "--name", "plan_gap", "--name", "plan_overlap", "--jobs", "1", "--out", str(tmp_path)]
    ran: list[str] = []
    ends_at = 2

    def task(kind: str, name: str, gate: Gate, seed: int) -> FaultRow | ControlRow:
        if len(ran) == ends_at:
            raise KeyboardInterrupt
        ran.append(name)
        if kind == "control":
            return ControlRow(options=name, checks=1, passed=1, false_alarms=(), examples=1, seconds=0.0)
        return made_row(name, "plan_coverage")

    monkeypatch.setattr(matrix, "_task", task)
    assert CliRunner().invoke(app, arguments).exit_code == 130
    assert not (tmp_path / "faults.json").exists()
    with (tmp_path / NAME).open("ab") as journal:
        journal.write(b'{"fault":{"fault":"plan_over')
    other = CliRunner().invoke(app, [*arguments, "--seed", "1"])
    assert (other.exit_code, ran) == (2, ["pr47766", "plan_gap"])
    assert "another gate, seed or choice of faults" in other.output

    ends_at = 9
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert ran == ["pr47766", "plan_gap", "plan_overlap"]
    assert "2 of 3 rows are there already" in done.output
    document = json.loads((tmp_path / "faults.json").read_text())
    assert [row["fault"] for row in document["rows"]] == ["plan_gap", "plan_overlap"]
    assert [row["options"] for row in document["controls"]] == ["pr47766"]
    assert not (tmp_path / NAME).exists()


def test_what_is_no_journal_is_refused(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text("something else\n")
    done = CliRunner().invoke(app, ["faults", "--name", "plan_gap", "--out", str(tmp_path)])
    assert done.exit_code == 2
    assert "is no journal of a kill matrix" in done.output


def test_the_command_lists_and_refuses() -> None:
    listed = CliRunner().invoke(app, ["faults", "--list", "--json"])
    assert {entry["name"] for entry in json.loads(listed.stdout)} == set(FAULTS)
    for wrong in (["--only", "nowhere"], ["--name", "nobody"], ["--gate", "weekly"], ["--jobs", "0"]):
        assert CliRunner().invoke(app, ["faults", *wrong]).exit_code == 2, wrong
