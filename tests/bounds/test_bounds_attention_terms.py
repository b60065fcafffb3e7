"""Every term of the attention bound is needed: computations dominated by one term exceed the bound of a form without
it.
"""

from __future__ import annotations

import math

import pytest
import torch
from bounds_inputs import generator, worst_row
from bounds_stages import FP, _split_attention

from dsv32_ref.bounds import (
    BF16,
    E4M3FN,
    FP16,
    Arithmetic,
    SoftmaxForm,
    approx,
    attend,
    attend_like,
    exact,
    judge,
)
from dsv32_ref.bounds.attention import shares

U = 2.0**-24


def test_a_merge_at_large_scores_needs_the_lse_rounding() -> None:
    s = torch.tensor([[1000.0, 1000.0, 1000.0, 1000.5, 1000.5, 1000.5]])
    v = torch.cat([torch.ones(1, 3, 1), -torch.ones(1, 3, 1)], 1)
    out, _ = _split_attention(s, v, 3, 2, False)
    merged, _ = attend(exact(s), exact(v), FP, SoftmaxForm(splits=2))
    plain, _ = attend(exact(s), exact(v), FP)
    assert judge(out[None], merged).passed
    assert judge(out[None], plain).worst > 2


def test_rescaling_errors_need_the_count_of_rescales() -> None:
    """64 rising scores: the accumulator is rescaled before every key, each time with the full error of an 8-ulp exp."""
    rough, n = Arithmetic(exp_ulp=8.0), 64
    s = torch.arange(n, dtype=torch.float32)[None] / 1024
    v = torch.cat([torch.ones(n // 2, 1), -torch.ones(n // 2, 1)])
    p = torch.exp(s.double() - s.max()) * (1 + 16 * U) ** torch.arange(n - 1, -1, -1)
    out = p @ v.double() / p.sum()
    assert judge(out, attend(exact(s), exact(v), rough, SoftmaxForm(rescales=n - 1))[0]).passed
    assert judge(out, attend(exact(s), exact(v), rough)[0]).worst > 1.5


def test_a_rescaled_sum_needs_the_count_of_rescales() -> None:
    """1000 rescales by about 1, each rounded: the accumulator shrinks by u each time and the sum grows by u."""
    n, rescales = 4, 1000
    out = torch.full((1, 1), ((1 - U) / (1 + U)) ** rescales, dtype=torch.float64)
    granted = Arithmetic(exp_ulp=0.0)
    s, v = exact(torch.zeros(1, n)), exact(torch.ones(n, 1))
    bound, _ = attend(s, v, granted, SoftmaxForm(rescales=rescales))
    assert 0.9 < judge(out, bound).worst <= 1
    assert judge(out, attend(s, v, granted)[0]).worst > 10


def test_a_lagging_maximum_needs_the_rounding_of_its_exponents() -> None:
    """Two equal scores, 1000 above the maximum in use: each exponent is rounded three times, there and back again, one
    upwards and one downwards.
    """
    lag = 1000.0
    out = torch.full((1, 1), math.tanh(6 * U * lag), dtype=torch.float64)
    s, v = exact(torch.zeros(1, 2)), exact(torch.tensor([[1.0], [-1.0]]))
    assert 0.9 < judge(out, attend(s, v, FP, SoftmaxForm(lazy=lag))[0]).worst <= 1
    assert judge(out, attend(s, v, FP)[0]).worst > 10


def test_leading_dimensions_are_independent_rows() -> None:
    """Scores [2, 3, 40] in fp16, where the number of keys shows in every term, against their rows alone."""
    s, v = torch.randn(2, 3, 40, generator=generator(34)), torch.randn(2, 40, 5, generator=generator(35))
    for form in (SoftmaxForm(), SoftmaxForm(splits=3, rescales=2, lazy=1.0), SoftmaxForm(normalise_first=True)):
        rows = [attend(approx(s[b], 1e-3), exact(v[b]), Arithmetic(acc=FP16), form) for b in range(2)]
        for whole, alone in zip(
            attend(approx(s, 1e-3), exact(v), Arithmetic(acc=FP16), form), zip(*rows, strict=True), strict=True
        ):
            assert bool(torch.isfinite(whole.err).all())
            torch.testing.assert_close(whole.err, torch.stack([row.err for row in alone]), rtol=1e-12, atol=0)


def test_numerator_sum() -> None:
    """V = 1, u, u, ..., -1 summed in order gives 0; with an output near 0 only the numerator's sum explains that.

    The magnitudes sum to 2, the error is (n - 2) u: half of the bound.
    """
    n = 2048
    v = torch.cat([worst_row(n - 1, U), torch.tensor([-1.0])]).float()[:, None]
    assert 0.45 < judge(torch.zeros(1, 1), attend(exact(torch.zeros(1, n)), exact(v), FP)[0]).worst <= 1


def test_denominator_sum() -> None:
    """Weights 1, u, u, ...: the sum stays 1 while the numerator is exact. Both sums may err, so this is half of the
    bound.
    """
    n = 4096
    weights = worst_row(n, U)
    out = (weights.sum() / 1.0).reshape(1, 1)
    assert 0.45 < judge(out, attend(exact(weights.log()[None]), exact(torch.ones(n, 1)), FP)[0]).worst <= 1


def test_fp8_weights_underflow() -> None:
    """Weights of 2^-10 are a tie between 0 and the smallest e4m3 subnormal: all of them vanish."""
    p = torch.cat([torch.ones(1), torch.full((2000,), 2.0**-10)]).double()
    v = torch.cat([torch.zeros(1, 1), torch.ones(2000, 1)])
    stored = p.float().to(torch.float8_e4m3fn).double()
    out = (stored @ v.double() / p.sum())[None]
    assert float(out) == 0
    bound, _ = attend(exact(p.log()[None]), exact(v), FP, SoftmaxForm(p_format=E4M3FN))
    assert 0.9 < judge(out, bound).worst <= 1


def test_the_sum_of_stored_weights_differs_from_the_sum_of_weights() -> None:
    up, down = 0.5 * (1 + 2.0**-8) * (1 + 1e-5), 0.5 * (1 + 3 * 2.0**-8) * (1 - 1e-5)
    p = torch.cat([torch.ones(1), torch.full((20,), up), torch.full((180,), down)]).double()
    v = torch.cat([torch.zeros(1, 1), torch.ones(20, 1), torch.zeros(180, 1)])
    stored = p.bfloat16().double()
    out = (stored @ v.double() / stored.sum())[None]
    bound, _ = attend(exact(p.log()[None]), exact(v), FP, SoftmaxForm(p_format=BF16, sum_rounded=True))
    without, _ = attend(exact(p.log()[None]), exact(v), FP, SoftmaxForm(p_format=BF16))
    assert 0.8 < judge(out, bound).worst <= 1
    assert judge(out, without).worst > 1.5


def test_normalised_weights_round_on_their_own_scale() -> None:
    up, down = 2.0**-7 * (1 + 2.0**-8 + 1e-5), 2.0**-7 * (1 + 3 * 2.0**-8 - 1e-5)
    share = torch.cat([torch.full((40,), up), torch.full((40,), down)]).double()
    share = torch.cat([1 - share.sum()[None], share])
    v = torch.cat([torch.zeros(1, 1), torch.ones(40, 1), -torch.ones(40, 1)]).double()
    out = (share.bfloat16().double() @ v)[None]
    bound, _ = attend(exact(share.log()[None]), exact(v), FP, SoftmaxForm(p_format=BF16, normalise_first=True))
    assert 0.9 < judge(out, bound).worst <= 1


def test_normalised_fp8_weights_underflow_all_together() -> None:
    """2048 equal weights are 2^-11 each: below half the smallest e4m3 subnormal, so nothing is left."""
    out = torch.zeros(1, 1)
    bound, _ = attend(
        exact(torch.zeros(1, 2048)), exact(torch.ones(2048, 1)), FP, SoftmaxForm(p_format=E4M3FN, normalise_first=True)
    )
    assert judge(out, bound).passed
    unnormalised, _ = attend(exact(torch.zeros(1, 2048)), exact(torch.ones(2048, 1)), FP, SoftmaxForm(p_format=E4M3FN))
    assert judge(out, unnormalised).worst > 10


def test_a_row_without_keys_is_zero_and_has_no_lse() -> None:
    out, lse = attend(exact(torch.full((1, 4), -torch.inf)), exact(torch.ones(4, 2)), FP)
    assert judge(torch.zeros(1, 2), out).passed
    assert not judge(torch.tensor([torch.inf]), lse).passed
    assert not judge(torch.full((1, 2), torch.nan), out).passed


def test_distant_scores_need_the_rounding_of_the_exponent() -> None:
    """A second key 44 below the first: x log2 e lies just beyond -64, where fp32 rounds it by a whole u of itself."""
    far = -44.4 - 0.3 * torch.rand(500, 1, generator=generator(31))
    s = torch.cat([torch.zeros(500, 1), far], 1)
    p = torch.exp2(s * torch.tensor(math.log2(math.e)))
    v = torch.tensor([[0.0], [1.0]])
    bound, _ = attend(exact(s), exact(v), FP)
    budget = judge((p @ v) / p.sum(-1, keepdim=True), bound)
    assert budget.passed
    # 44.4 * 1.2 u observed, 44.4 * 3 u granted; all other terms together grant about 15 u.
    assert budget.worst * 44.4 * 3 > 2 * 15


@pytest.mark.parametrize("err", [1e-6, 1e-2, 0.5, 5.0])
def test_normalised_shares_reach_the_corners_of_the_scores(err: float) -> None:
    """One score as high, all others as low as they may be (and the reverse): the shares lie within the bound, and at
    its edge up to the steps of their storage. V is the identity, so that the output is the stored share itself.
    """
    s = torch.randn(50, 12, generator=generator(32)).double()
    bound = attend_like(approx(s, err), exact(torch.eye(12)), FP, FP16, normalise_first=True)
    reached = torch.zeros_like(s)
    for key in range(12):
        for sign in (1.0, -1.0):
            moved = s - sign * err
            moved[:, key] += 2 * sign * err
            share = FP16.round(torch.softmax(moved, -1))
            budget = judge(share, bound)
            assert budget.passed, budget.describe(f"key {key}")
            reached[:, key] = torch.maximum(reached[:, key], (share - bound.value).abs()[:, key])
    edge = bound.err - 2.1 * FP16.half_ulp(bound.high)
    assert bool((reached >= edge).all())


def test_one_key_has_share_one_whatever_the_error_of_its_score() -> None:
    s = torch.tensor([[3.0, -math.inf, -math.inf]])
    bound = attend_like(approx(s, torch.tensor([[7.0, 0.0, 0.0]])), exact(torch.eye(3)), FP, BF16, normalise_first=True)
    assert judge(torch.tensor([[1.0, 0.0, 0.0]]), bound).passed
    assert float(bound.err.max()) < 1e-6


def test_shares_hold_in_fp32_arithmetic() -> None:
    """Honest fp32 softmax, stored in bf16, exact scores: within the bound, and mostly equal bit for bit."""
    s = 4 * torch.randn(2000, 64, generator=generator(33))
    bound = attend_like(exact(s), exact(torch.eye(64)), FP, BF16, normalise_first=True)
    share = torch.softmax(s, -1).bfloat16()
    budget = judge(share, bound)
    assert budget.passed, budget.describe("shares")
    assert float((share.double() == bound.value).double().mean()) > 0.99


def test_shares_of_a_sum_that_loses_its_small_terms() -> None:
    """Weights 1, u, u, ... add up to 1 in order: every share is too large by n u, which only the sum explains."""
    weights = worst_row(4096, U)
    bound = shares(exact(weights.log()[None]), FP)
    assert 0.9 < judge(weights[None], bound).worst <= 1


def test_shares_of_a_sum_that_is_too_large() -> None:
    """Weights 1, then 1.5 u at a time: ties to even carry every second addition up to 2 u, up to a quarter too much."""
    weights = torch.full((4096,), 1.5 * U, dtype=torch.float64)
    weights[0] = 1.0
    total = torch.zeros((), dtype=torch.float32)
    for weight in weights.float():
        total = total + weight
    assert float(total) > float(weights.sum()) + 1000 * U
    bound = shares(exact(weights.log()[None]), FP)
    budget = judge((weights / total.double())[None], bound)
    assert 0.2 < budget.worst <= 1
