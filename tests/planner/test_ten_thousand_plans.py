"""Ten thousand random calls of vLLM's kind: the plan equals the list transcription, and the checker finds nothing."""

from __future__ import annotations

import numpy as np
import pytest
from planner_calls import decode, indptr

from dsv32_fast.kernels.emulated.device import MI355X, emulated_device
from dsv32_fuzz.bench.list_planner import plan_lists
from dsv32_fuzz.bench.plan import _rules, compare
from dsv32_fuzz.plan_checker import check_plan

PLANS = 10_000


@pytest.mark.nightly
def test_ten_thousand_random_plans_are_exact_and_clean() -> None:
    rng = np.random.default_rng(20260822)
    checked = 0
    with emulated_device(MI355X):
        for _ in range(PLANS):
            rows = int(rng.integers(1, 65))
            lens = np.minimum(rng.integers(1, rng.choice((40, 600, 2049, 6000)), rows), 2048).tolist()
            plan = decode(lens, cap=16)
            kv = indptr(lens)
            assert check_plan(plan, kv) == []
            compare(plan, plan_lists(_rules(rows), list(range(rows + 1)), kv.tolist(), [1] * rows))
            checked += 1
    assert checked == PLANS
