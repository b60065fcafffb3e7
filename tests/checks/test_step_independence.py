"""The check that a request's step knows nothing of its surroundings: quiet on the path, and it sees what leaks in."""

from __future__ import annotations

import pytest
from check_trials import faultless, trial

from dsv32_fast.options import PRESETS
from dsv32_fuzz.checks.serving import HistoryIndependence, PaddingInvariance
from dsv32_fuzz.checks.step_independence import StepIndependence, Surroundings, Turn
from dsv32_fuzz.checks.step_numerics import StageNumerics
from dsv32_fuzz.faults import FAULTS
from dsv32_fuzz.targets.intree import InTreeTarget
from dsv32_fuzz.verdict import Status

TARGET = InTreeTarget(PRESETS["pr47766"])
PADDED = Surroundings(requests=((44, 2),), turns=(Turn(order=(0,), padding=1),))
IN_TURN = Surroundings(requests=((60, 1), (60, 1)), turns=(Turn(order=(0,)), Turn(order=(1,))))
TOGETHER = Surroundings(requests=((60, 1),) * 3, turns=(Turn(order=(2, 0, 1), padding=6),))


@pytest.mark.parametrize("preset", ["baseline", "vllm026"])
def test_surroundings_change_nothing(preset: str) -> None:
    """With a split cap that no key holds, a history changes how rows are cut; the results stay within the bound."""
    found = faultless(StepIndependence, preset, examples=4)
    assert found.measured["rows_of_equal_bits"] > found.measured["rows"] > found.measured["rows_cut_alike"] > 0
    assert found.measured["caches"] > 0
    assert 0 < found.worst_budget_used <= 1


@pytest.mark.parametrize(
    ("fault", "drawn", "says"),
    [
        ("cache_padding_to_slot_zero", PADDED, "turn 0: latents of request 0, layer 0"),
        ("attention_list_kept", IN_TURN, "turn 1: attn_z 0: request 1, position 60"),
        ("mtp_one_position", PADDED, ""),
    ],
)
def test_what_reaches_across_is_named(fault: str, drawn: Surroundings, says: str) -> None:
    """A request that is wrong by itself is another check's business."""
    with FAULTS[fault].inject() as target:
        verdict = StepIndependence().run(drawn, target)
    assert verdict.summary.startswith(says) if says else verdict.status is Status.PASSED


def test_padding_in_the_first_page_is_seen_by_no_check_of_metadata_or_stages() -> None:
    with FAULTS["cache_padding_has_a_slot"].inject() as target:
        assert "turn 0: latents of request 0, layer 0" in StepIndependence().run(PADDED, target).summary
        for check in (HistoryIndependence, PaddingInvariance, StageNumerics):
            assert trial(check, target, examples=4).statuses[Status.FAILED] == 0


def test_a_request_that_is_always_alone_is_mistrusted() -> None:
    alone = Surroundings(requests=((44, 2),), turns=(Turn(order=(0,)), Turn(order=(0,))))
    verdict = StepIndependence().run(alone, TARGET)
    assert (verdict.status, verdict.summary) == (Status.MISTRUSTED, "every request was alone")


def test_a_row_that_is_cut_otherwise_is_bounded_and_not_compared_by_bits() -> None:
    """Alone a row of 48 keys is cut in three; beside two more on 8 compute units it is not."""
    verdict = StepIndependence().run(TOGETHER, TARGET)
    assert verdict.status is Status.PASSED
    assert verdict.measured["rows_cut_alike"] < verdict.measured["rows"] == 3
    assert 0 < float(verdict.measured["worst_budget_used"]) <= 1
