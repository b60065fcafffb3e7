"""Formats against torch's own casts, the model of arithmetic, and the refusal of bad input."""

from __future__ import annotations

import math

import mpmath
import pytest
import torch
from bounds_inputs import every_kind, exact_dot, forward_sum, generator
from bounds_stages import FP

from dsv32_ref.bounds import (
    BF16,
    E4M3FN,
    E4M3FNUZ,
    FP16,
    FP32,
    Approx,
    Arithmetic,
    Format,
    SoftmaxForm,
    approx,
    attend,
    exact,
    indexer,
    judge,
    linear,
    norm,
    quant,
    rope,
    round_like,
    round_to,
    router,
    scores,
)
from dsv32_ref.bounds import elementary as el

U = 2.0**-24
TORCH = {
    FP32: torch.float32,
    BF16: torch.bfloat16,
    FP16: torch.float16,
    E4M3FN: torch.float8_e4m3fn,
    E4M3FNUZ: torch.float8_e4m3fnuz,
}


@pytest.mark.parametrize("fmt", TORCH, ids=lambda f: f.name)
def test_rounding_equals_the_cast_of_torch(fmt: Format) -> None:
    x = every_kind(500, 16, generator(0)).clamp(-0.99 * min(fmt.max, 3e38), 0.99 * min(fmt.max, 3e38))
    ties = x.to(TORCH[fmt]).double() + fmt.half_ulp(x.to(TORCH[fmt]).double().abs())
    for values in (x.double(), ties.clamp(-0.99 * fmt.max, 0.99 * fmt.max).float().double()):
        assert torch.equal(fmt.round(values), values.float().to(TORCH[fmt]).double())


@pytest.mark.parametrize("fmt", TORCH, ids=lambda f: f.name)
def test_half_ulp_bounds_and_reaches_the_rounding_error(fmt: Format) -> None:
    x = torch.exp2(torch.linspace(fmt.min_exp - fmt.bits - 1, min(math.log2(fmt.max) - 1, 100), 40_001).double())
    error = (fmt.round(x) - x).abs() / fmt.half_ulp(x)
    assert 0.95 < float(error.max()) <= 1


def test_overflow_promises_nothing() -> None:
    assert math.isinf(float(round_to(exact(torch.tensor(449.0)), E4M3FN).err))
    assert math.isinf(float(round_like(exact(torch.tensor(1e39, dtype=torch.float64)), FP32).err))
    big = exact(torch.full((4,), 3e38))
    minus = Approx(-big.value, big.err)
    zeros = exact(torch.zeros(4, 2))
    sums = linear.total(Approx(torch.cat([big.value, minus.value]), torch.zeros(8).double()), FP)
    for bound in (
        el.exp(exact(torch.tensor(89.0)), FP),
        el.add(big, big, FP),
        el.mul(big, big, FP),
        el.div(big, exact(torch.full((4,), 1e-3)), FP),
        sums,  # the sum is 0, its partial sums may overflow
        norm.rms_norm(big, exact(torch.ones(4)), 1e-6, FP),
    ):
        assert bool(torch.isinf(bound.err).all())
    assert bool(torch.isfinite(el.exp(exact(torch.tensor(88.0)), FP).err))
    assert bool(torch.isfinite(el.sigmoid(exact(torch.tensor(-1e5)), FP).err))
    spread = attend(exact(torch.zeros(1, 4)), exact(torch.full((4, 2), 3e38)), FP)[0]
    assert bool(torch.isinf(spread.err).all())
    assert bool(torch.isfinite(attend(exact(torch.zeros(1, 4)), zeros, FP)[0].err).all())


def test_nothing_is_promised_near_a_pole() -> None:
    zero = approx(torch.tensor(1e-3), 1e-2)
    for bound in (el.div(exact(torch.tensor(1.0)), zero, FP), el.rsqrt(zero, FP), el.log(zero, FP)):
        assert math.isinf(float(bound.err))


def test_rounding_like_is_exact_away_from_boundaries() -> None:
    assert float(round_like(approx(torch.tensor(1.001), 1e-4), BF16).err) == 0
    assert float(round_like(approx(torch.tensor(1.0039), 1e-4), BF16).err) == 2.0**-7


def test_values_equal_mpmath() -> None:
    mpmath.mp.prec = 200
    for value in (-75.3, -1.5, -1e-9, 0.0, 0.7, 12.0, 80.0):
        x = exact(torch.tensor([value], dtype=torch.float64))
        for bound, true in (
            (el.exp(x, FP), mpmath.exp(value)),
            (el.sigmoid(x, FP), 1 / (1 + mpmath.exp(-value))),
            (el.silu(x, FP), value / (1 + mpmath.exp(-value))),
        ):
            assert abs(mpmath.mpf(float(bound.value)) - true) <= float(bound.err) * 2.0**-16


def test_dot_values_are_exact_to_the_stated_share_of_the_bound() -> None:
    a, b = every_kind(20, 96, generator(1)), every_kind(20, 96, generator(2))
    bound = linear.dot(exact(a), exact(b), FP)
    assert bool(((bound.value - exact_dot(a, b)).abs() <= bound.err * 2.0**-16).all())


def test_flushed_subnormals_need_the_flushing_model() -> None:
    a, b = torch.full((64,), 2.0**-63), torch.full((64,), 2.0**-63 * (1 - 2.0**-20))
    flushed = torch.zeros(())  # each product is just below 2^-126
    assert judge(flushed, linear.dot(exact(a), exact(b), FP)).worst > 1
    # Products and partial sums may be flushed, hence one half of the bound for flushed products alone.
    assert 0.45 < judge(flushed, linear.dot(exact(a), exact(b), Arithmetic(ftz=True))).worst <= 1


def test_subnormal_inputs_may_be_read_as_zero() -> None:
    x, y = torch.tensor([2.0**-127]), torch.tensor([2.0**20])
    assert judge(torch.zeros(1), el.mul(exact(x), exact(y), FP)).worst > 1
    assert judge(torch.zeros(1), el.mul(exact(x), exact(y), Arithmetic(ftz=True))).passed


def test_a_scaled_logit_may_underflow_before_its_weight_enlarges_it() -> None:
    """Half a subnormal step, times 1024: the key scale applied inside the sum."""
    q, k = torch.ones(1, 1, 1), torch.full((1, 1), 2.0**-140)
    w, scale = torch.full((1, 1), 2.0**10), torch.full((1,), 2.0**-10)
    inside = ((q[0] @ k.T).clamp_min(0) * scale) * w
    assert float(inside) == 0
    assert judge(inside, indexer.index_scores(exact(q), exact(w), exact(k), exact(scale), FP)).passed


def test_a_constant_in_the_query_may_underflow_there() -> None:
    q, k = torch.full((1, 1), 2.0**-140), torch.full((1, 1), 2.0**20)
    early = (q * 2.0**-10) @ k.T
    assert float(early) == 0
    assert judge(early, scores(exact(q), exact(k), 2.0**-10, FP)).passed


def test_flushing_never_narrows_a_bound() -> None:
    """At magnitudes where nothing is flushed, each operation still grants its rounding."""
    x, y = (exact(torch.rand(64, generator=generator(seed)) + 0.5) for seed in (5, 6))
    for f in (el.add, el.mul, el.div):
        assert bool((f(x, y, Arithmetic(ftz=True)).err >= f(x, y, FP).err).all())
    for g in (el.exp, el.sigmoid, el.silu, el.rsqrt, el.log):
        assert bool((g(x, Arithmetic(ftz=True)).err >= g(x, FP).err).all())
    unit = exact(torch.ones(1))
    lost = torch.ones(1) + torch.full((1,), U)
    assert judge(lost, el.add(unit, exact(torch.full((1,), U)), Arithmetic(ftz=True))).passed


def test_library_results_may_be_flushed() -> None:
    x = exact(torch.tensor([-87.5]))
    assert judge(torch.zeros(1), el.exp(x, FP)).worst > 1
    assert judge(torch.zeros(1), el.exp(x, Arithmetic(ftz=True))).passed


def test_a_sigmoid_whose_exponential_overflows_is_zero() -> None:
    x = torch.tensor([-88.9])
    got = 1 / (1 + (-x).exp())
    assert float(got) == 0
    assert judge(got, el.sigmoid(exact(x), FP)).passed


def test_a_partial_sum_may_underflow_between_two_scales() -> None:
    """1 * 2^-150 is a tie to 0, before the second scale, 2^10, can enlarge it."""
    small, large = (torch.tensor([2.0**k], dtype=torch.float64) for k in (-150, 10))
    lost = small.float() * large.float()
    assert float(lost) == 0
    assert judge(lost.sum(), linear.dot(exact(small), exact(large), FP, roundings=2)).passed


def test_truncating_accumulation_needs_its_own_unit() -> None:
    """1, then addends just under an ulp: truncation loses all of them."""
    n = 512
    x = torch.full((n,), 2.0**-23 * (1 - 2.0**-10), dtype=torch.float32)
    x[0] = 1.0
    lost = torch.ones(())
    assert judge(lost, linear.total(exact(x), Arithmetic(truncating=True))).passed
    assert judge(lost, linear.total(exact(x), FP)).worst > 1.9


def test_a_known_summation_depth_tightens_the_bound() -> None:
    x = exact(torch.rand(1, 1024, generator=generator(3)) + 1)
    assert float(linear.total(x, FP, depth=10).err) < 0.011 * float(linear.total(x, FP).err)
    # and a bare loop exceeds what a tree would be granted
    worst = torch.cat([torch.ones(1), torch.full((1023,), 2.0**-24)])
    assert judge(forward_sum(worst), linear.total(exact(worst), FP, depth=10)).worst > 1


def test_bounds_grow_with_their_inputs_errors() -> None:
    x = torch.rand(8, generator=generator(4)) + 0.5
    for f in (el.exp, el.sigmoid, el.silu, el.rsqrt, el.log):
        errors = [float(f(approx(x, e), FP).err.min()) for e in (0.0, 1e-6, 1e-3)]
        assert errors[0] < errors[1] < errors[2]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Arithmetic(delta=0.0), "delta"),
        (lambda: Arithmetic(delta=0.7), "delta"),
        (lambda: Arithmetic(delta=0.1, truncating=True), "biased"),
        (lambda: Arithmetic(acc=Format("fp64", 53, -1022, 1e308)), "acc"),
        (lambda: Arithmetic(acc=BF16).growth(256), "depth"),
        (lambda: FP.lam, "delta"),
        (lambda: approx(torch.zeros(2), -1.0), "err"),
        (lambda: approx(torch.zeros(2), math.nan), "err"),
        (lambda: Approx(torch.zeros(2).double(), torch.zeros(3).double()), "err"),
        (lambda: linear.matmul(exact(torch.zeros(2, 3)), exact(torch.zeros(2, 3)), FP), "inner dimension"),
        (lambda: linear.hadamard(exact(torch.zeros(1, 12)), FP), "power of two"),
        (lambda: quant.fake_quant(exact(torch.zeros(1, 100)), quant.ACT_QUANT, FP), "block"),
        (lambda: rope.angles(torch.tensor([-1]), exact(torch.ones(1)), FP), "positions_T"),
        (lambda: router.group_scores(exact(torch.zeros(1, 10)), 4, FP), "groups: 4 do not divide 10 experts"),
        (lambda: SoftmaxForm(splits=0), "splits"),
    ],
)
def test_bad_input_is_named(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]


def test_pairs_are_float64() -> None:
    with pytest.raises(TypeError, match="float64"):
        Approx(torch.zeros(2), torch.zeros(2))
