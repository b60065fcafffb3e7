"""Gates, outcome and pages: nothing becomes a GO by not having run, and nothing shown is markup."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import strategies as st
from report_worlds import everything, reached, whole_run

from dsv32_fuzz.checks.catalogue import STEP_CHECKS
from dsv32_fuzz.checks.own_input import InputCheck
from dsv32_fuzz.events import VerdictReached
from dsv32_fuzz.targets import Target
from dsv32_fuzz.verdict import Status, Verdict
from dsv32_reports.fold import fold
from dsv32_reports.gates import GATES, REQUIRED, by_traffic, decide, make_gates
from dsv32_reports.html_page import render_html
from dsv32_reports.model import EXIT_CODES, Finding, Outcome
from dsv32_reports.statistics import failure_rate_upper_bound


def outcome(events: list[VerdictReached], interrupted: bool = False) -> Outcome:
    return decide(make_gates(events), interrupted=interrupted)[0]


def test_every_check_belongs_to_exactly_one_gate() -> None:
    owned = [check for _, _, checks in GATES.values() for check in checks]
    assert sorted(owned) == sorted({check.name for check in STEP_CHECKS} | set(REQUIRED))


def test_all_passed_is_go() -> None:
    assert outcome(everything()) is Outcome.GO


@pytest.mark.parametrize("left_out", range(len(everything())))
def test_one_missing_verdict_is_never_a_go(left_out: int) -> None:
    events = everything()
    del events[left_out]
    assert outcome(events) is Outcome.INCONCLUSIVE


@pytest.mark.parametrize("position", range(0, len(everything()), 5))
def test_one_failure_outranks_everything(position: int) -> None:
    events = everything()
    events[position] = msgspec.structs.replace(
        events[position], verdict=msgspec.structs.replace(events[position].verdict, status=Status.FAILED)
    )
    assert outcome(events) is outcome(events, interrupted=True) is Outcome.NO_GO


def test_mistrusted_interrupted_and_nothing_are_inconclusive() -> None:
    assert outcome(everything(Status.MISTRUSTED)) is Outcome.INCONCLUSIVE
    assert outcome(everything(), interrupted=True) is Outcome.INCONCLUSIVE
    assert outcome([]) is Outcome.INCONCLUSIVE
    assert outcome(everything(Status.SKIPPED)) is Outcome.INCONCLUSIVE
    assert EXIT_CODES == {Outcome.GO: 0, Outcome.NO_GO: 1, Outcome.INCONCLUSIVE: 3}


def test_go_for_one_traffic_class_and_no_go_for_another_are_two_lines() -> None:
    events = everything()
    events.append(reached("key_sufficiency", "mtp_decode", Status.FAILED))
    lines = {line.scope: (line.status, line.failed) for line in by_traffic(events)}
    assert lines["decode, q = 1 throughout"] == (Status.PASSED, [])
    assert lines["pure MTP decode, q > 1"] == (Status.FAILED, ["key_sufficiency"])


class _Drawn(InputCheck[Any]):
    meaning, input_type = "it holds", dict

    def inputs(self) -> st.SearchStrategy[Any]:
        return st.nothing()

    def run(self, drawn: Any, target: Target) -> Verdict:
        raise NotImplementedError


class RowsAttended(_Drawn):
    name, family = "rows_attended", "attention"


class HeadsApart(_Drawn):
    name, family = "heads_apart", "attention"


class Clocks(_Drawn):
    name, family = "clocks", "wall_clock"


FAMILIES = (RowsAttended, HeadsApart, Clocks)


def of_family(check: type[InputCheck[Any]], status: Status = Status.PASSED) -> VerdictReached:
    return VerdictReached(
        phase=f"check:{check.family}",
        scope=check.name,
        verdict=Verdict(check=check.name, status=status, summary="s", measured={"rows": 7}),
    )


def test_every_family_of_checks_is_a_gate() -> None:
    gates = make_gates([of_family(check) for check in FAMILIES], checks=FAMILIES)[len(GATES) :]
    assert [(gate.name, gate.title, gate.status) for gate in gates] == [
        ("checks_attention", "Attention", Status.PASSED),
        ("checks_wall_clock", "Wall clock", Status.PASSED),
    ]
    assert [line.scope for line in gates[0].lines] == ["rows attended", "heads apart"]
    assert gates[0].lines[0].measured == {"rows": 7}
    assert "rows attended, heads apart" in gates[0].meaning


@pytest.mark.parametrize("status", [Status.FAILED, Status.MISTRUSTED])
@pytest.mark.parametrize("bad", FAMILIES)
def test_one_bad_check_is_the_status_of_its_family(bad: type[InputCheck[Any]], status: Status) -> None:
    reached = [of_family(check, status if check is bad else Status.PASSED) for check in FAMILIES]
    by_name = {gate.name: gate.status for gate in make_gates(reached, checks=FAMILIES)[len(GATES) :]}
    assert by_name[f"checks_{bad.family}"] is status
    assert sorted(by_name.values()) == sorted([status, Status.PASSED])


@pytest.mark.parametrize("left_out", range(len(FAMILIES)))
def test_a_check_of_a_family_that_did_not_run_is_never_a_go(left_out: int) -> None:
    reached = [of_family(check) for number, check in enumerate(FAMILIES) if number != left_out]
    gates = make_gates(everything() + reached, checks=FAMILIES)
    assert decide(gates, interrupted=False)[0] is Outcome.INCONCLUSIVE
    assert (
        decide(make_gates(everything() + [of_family(c) for c in FAMILIES], checks=FAMILIES), interrupted=False)[0]
        is Outcome.GO
    )


def test_a_family_that_does_not_apply_decides_nothing() -> None:
    gates = make_gates(everything() + [of_family(check, Status.SKIPPED) for check in FAMILIES], checks=FAMILIES)
    assert {gate.status for gate in gates[len(GATES) :]} == {Status.SKIPPED}
    assert decide(gates, interrupted=False)[0] is Outcome.GO


def test_upper_bound_is_the_rule_of_three_and_needs_a_trial() -> None:
    assert failure_rate_upper_bound(0, 100) == pytest.approx(1 - 0.05**0.01)
    assert failure_rate_upper_bound(100, 100) == 1
    for failed, trials in ((0, 0), (2, 1)):
        with pytest.raises(ValueError, match="give no rate"):
            failure_rate_upper_bound(failed, trials)


def test_everything_shown_is_escaped() -> None:
    evil = "<img src=x onerror=alert(1)>"
    finding = Finding(
        check=evil,
        scope=evil,
        summary=evil,
        classification=evil,
        also_fails=[evil],
        shown=[evil],
        file=evil,
        command=evil,
    )
    strings = {"id": evil, "target": evil, "profile": evil, "started": evil, "approver": evil, "options_text": evil}
    report = fold(whole_run(**strings, fingerprint={evil: evil}), evil)
    page = render_html(msgspec.structs.replace(report, findings=[finding]))
    assert "<img" not in page
    assert page.count("&lt;img") >= 12


def test_coverage_is_shown_as_counted() -> None:
    report = fold(whole_run(), "run")
    assert (report.coverage.cases, report.coverage.steps) == (1, 3)
    assert report.coverage.visited == 1 < report.coverage.possible
    assert sum(sum(row.values()) for row in report.coverage.steps_by_length_and_query.values()) == 3
    assert report.coverage.rare_events["row crosses topk"] == 1
    assert "1 step sequences of 3 steps" in render_html(report)
