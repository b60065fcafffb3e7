"""The deterministic bounds hold: no exceedance on any generated input, in any order of summation."""

from __future__ import annotations

import pytest
from bounds_inputs import generator
from bounds_stages import STAGES

from dsv32_ref.bounds import judge


@pytest.mark.parametrize("stage", STAGES)
def test_no_computed_value_exceeds_its_bound(stage: str) -> None:
    run, inputs = STAGES[stage]
    counts = []
    for computed, bound in run(generator(7)):
        budget = judge(computed, bound)
        assert budget.passed, budget.describe(f"{stage}, pair {len(counts)}")
        counts.append(len(computed))
    assert counts[0] == inputs


def test_at_least_20000_stage_inputs_are_judged() -> None:
    assert sum(inputs for _, inputs in STAGES.values()) >= 20_000


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(100, 120))
@pytest.mark.parametrize("stage", STAGES)
def test_no_computed_value_exceeds_its_bound_on_more_seeds(stage: str, seed: int) -> None:
    run, _ = STAGES[stage]
    for computed, bound in run(generator(seed)):
        budget = judge(computed, bound)
        assert budget.passed, budget.describe(f"{stage}, seed {seed}")
