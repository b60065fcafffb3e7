"""The check of tensor-parallel ranks passes on the faultless path, and sees what makes one rank differ from another."""

from __future__ import annotations

import pytest
from check_trials import SEEDS, faultless, trial

from dsv32_fast.options import PRESETS
from dsv32_fuzz.checks.tp_agreement import RanksInput, TpAgreement
from dsv32_fuzz.faults import FAULTS
from dsv32_fuzz.targets.intree import InTreeTarget
from dsv32_fuzz.verdict import Status


@pytest.mark.parametrize("preset", ["baseline", "pr47766"])
def test_ranks_agree_where_another_order_would_route_otherwise(preset: str) -> None:
    found = faultless(TpAgreement, preset, examples=12)
    assert found.measured["rows_that_depend_on_the_order"] > found.measured["rows_that_another_order_reroutes"] > 0


@pytest.mark.parametrize(
    ("fault", "stage"),
    [
        ("router_own_part_first", "attn_out: row"),
        ("router_ties_by_arrival", "gate_idx: row"),
        ("topk_by_arrival", "index_topk: row"),
    ],
)
def test_a_rank_that_differs_is_named(fault: str, stage: str) -> None:
    for run_seed in SEEDS:
        with FAULTS[fault].inject() as target:
            found = trial(TpAgreement, target, run_seed=run_seed, examples=30)
        assert found.summary.startswith(stage), (run_seed, found)
        assert "of rank" in found.summary


def test_a_sum_that_has_no_order_is_mistrusted() -> None:
    """bf16 parts of one magnitude add up exactly in fp32."""
    verdict = TpAgreement().run(RanksInput(large=0), InTreeTarget(PRESETS["pr47766"]))
    assert (verdict.status, verdict.summary) == (Status.MISTRUSTED, "the sum has the same bits in another order")
