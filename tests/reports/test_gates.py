"""Gates, outcome and pages: nothing becomes a GO by not having run, and nothing shown is markup."""

from __future__ import annotations

import msgspec
import pytest
from report_worlds import everything, reached, whole_run

from dsv32_fuzz.checks.catalogue import STEP_CHECKS
from dsv32_fuzz.events import VerdictReached
from dsv32_fuzz.verdict import Status
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
