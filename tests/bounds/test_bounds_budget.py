"""Budget used: its special values, and the attribution of the first violation."""

from __future__ import annotations

import math

import pytest
import torch

from dsv32_ref.bounds import approx, budget_used, exact, judge


def test_special_values() -> None:
    error = torch.tensor([0.0, 1.0, math.nan, 0.0, 1.0, 0.0, -1.0, math.inf])
    bound = torch.tensor([0.0, 0.0, 1.0, math.nan, math.inf, math.inf, 2.0, 1.0])
    want = [0.0, math.inf, math.inf, math.inf, math.inf, math.inf, 0.5, math.inf]
    assert budget_used(error, bound).tolist() == want


def test_nan_never_passes_and_is_attributed() -> None:
    computed = torch.zeros(2, 3)
    computed[1, 1] = math.nan
    budget = judge(computed, approx(torch.zeros(2, 3), 1.0))
    assert (budget.passed, budget.first, budget.violations) == (False, (1, 1), 1)
    assert "[1, 1]" in budget.describe("stage")


def test_first_violation_and_worst() -> None:
    budget = judge(torch.tensor([0.0, 3.0, 9.0]), approx(torch.zeros(3), torch.tensor([1.0, 2.0, 3.0])))
    assert (budget.first, budget.worst, budget.violations, budget.error, budget.bound) == ((1,), 3.0, 2, 3.0, 2.0)


def test_a_missing_bound_is_a_failure_of_its_own() -> None:
    budget = judge(torch.zeros(2), approx(torch.zeros(2), torch.tensor([1.0, math.inf])))
    assert (budget.passed, budget.unbounded) == (False, 1)


def test_equal_infinities_are_no_error() -> None:
    assert judge(torch.tensor([-math.inf, 1.0]), exact(torch.tensor([-math.inf, 1.0]))).passed
    assert not judge(torch.tensor([math.inf, 1.0]), exact(torch.tensor([-math.inf, 1.0]))).passed


def test_nothing_compared_does_not_pass() -> None:
    budget = judge(torch.zeros(0), exact(torch.zeros(0)))
    assert not budget.passed
    assert "nothing" in budget.describe("stage")
    assert sum(budget.histogram) == 0


def test_bad_shapes_and_bounds_are_named() -> None:
    with pytest.raises(ValueError, match="computed"):
        judge(torch.zeros(2), exact(torch.zeros(3)))
    with pytest.raises(ValueError, match="bound"):
        budget_used(torch.zeros(2), torch.zeros(3))
    with pytest.raises(ValueError, match="negative"):
        budget_used(torch.zeros(2), torch.tensor([1.0, -1.0]))
