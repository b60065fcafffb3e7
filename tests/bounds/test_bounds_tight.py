"""The bounds are not vacuous: for each, an admissible computation that uses more than half of it.

So half of it would be wrong. Each term of a composite bound has its own case, dominated by that term.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from bounds_inputs import forward_sum, generator, nudge, rows, worst_row
from bounds_stages import FP
from torch import Tensor

from dsv32_ref.bounds import (
    BF16,
    Approx,
    Arithmetic,
    SoftmaxForm,
    approx,
    attend,
    attend_like,
    exact,
    indexer,
    judge,
    linear,
    moe,
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
Case = tuple[Tensor, Approx]


def f32(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def case_dot() -> Case:
    a, b = worst_row(4096, U).float(), torch.ones(4096)
    return forward_sum(a * b), linear.dot(exact(a), exact(b), FP)


def case_dot_underflow() -> Case:
    a = torch.full((64,), 2.0**-75)  # every product is a tie between 0 and the smallest subnormal
    return (a * a).sum(), linear.dot(exact(a), exact(a), FP)


def case_dot_input_error() -> Case:
    a, b = torch.ones(64), torch.ones(64)
    bound = linear.dot(approx(a, 2.0**-9), approx(b, 2.0**-9), FP)
    return (a.double() + 2.0**-9) @ (b.double() + 2.0**-9), bound


def case_dot_bf16_accumulator() -> Case:
    a, b = worst_row(32, 2.0**-8).bfloat16(), torch.ones(32, dtype=torch.bfloat16)
    return forward_sum(a * b), linear.dot(exact(a), exact(b), Arithmetic(acc=BF16))


def case_sum() -> Case:
    a = worst_row(4096, U).float()
    return forward_sum(a), linear.total(exact(a), FP)


def case_hadamard() -> Case:
    a = worst_row(128, U).float()
    signs = torch.ones(128)  # the first column of the matrix
    bound = linear.hadamard(exact(a), FP)
    return forward_sum(a * signs) * 128**-0.5, bound.map(0)


def case_add() -> Case:
    return f32(1.0) + f32(U), el.add(exact(f32(1.0)), exact(f32(U)), FP)


def case_mul() -> Case:
    a, b = (1 + torch.rand(4000, generator=generator(s)) for s in (1, 2))
    return a * b, el.mul(exact(a), exact(b), FP)


def case_div() -> Case:
    """x times a reciprocal that is off by most of an ulp."""
    y = 1 + torch.rand(4000, generator=generator(3)) * 0.05
    reciprocal = 1 / y
    off = nudge(reciprocal, 1)
    off = torch.where((off.double() - 1 / y.double()).abs() <= 2 * U * (1 / y.double()), off, reciprocal)
    x = 1 + torch.rand(4000, generator=generator(4))
    return x * off, el.div(exact(x), exact(y), FP)


def case_exp() -> Case:
    """exp2 of a rounded product, at large arguments."""
    x = -44.4 - 0.3 * torch.rand(
        2000, generator=generator(5)
    )  # x log2 e just beyond -64: the largest relative rounding
    return torch.exp2(x * torch.tensor(math.log2(math.e))), el.exp(exact(x), FP)


def case_sigmoid() -> Case:
    x = -40 - 10 * torch.rand(2000, generator=generator(6))
    e = torch.exp2(x * torch.tensor(math.log2(math.e)))
    return e / (1 + e), el.sigmoid(exact(x), FP)


def case_sigmoid_input() -> Case:
    x = torch.zeros(1)
    return torch.sigmoid(x.double() + 0.01), el.sigmoid(approx(x, 0.01), FP)


def case_silu() -> Case:
    x = torch.full((1,), 3.0)
    return torch.nn.functional.silu(x.double() + 0.01), el.silu(approx(x, 0.01), FP)


def _nudged(exact_value: Tensor, limit: Tensor) -> Tensor:
    """The fp32 result one or two ulps above the correctly rounded one, where still within the allowance."""
    base = exact_value.float()
    for steps in (2, 1):
        moved = nudge(base, steps)
        if bool(((moved.double() - exact_value).abs() <= limit).all()):
            return moved
    return base


def case_rsqrt() -> Case:
    x = torch.full((1,), 3.99)
    true = x.double().rsqrt()
    return _nudged(true, 2 * torch.exp2(true.log2().floor()) * 2.0**-23), el.rsqrt(exact(x), FP)


def case_log() -> Case:
    x = torch.full((1,), 2.9)
    true = x.double().log()
    return _nudged(true, 2 * torch.exp2(true.log2().floor()) * 2.0**-23), el.log(exact(x), FP)


def case_rms_norm() -> Case:
    x = torch.full((4096,), 2.0**-12)
    x[0] = 1.0
    mean = forward_sum(x * x) / 4096
    return x * torch.rsqrt(mean + 1e-6), norm.rms_norm(exact(x), exact(torch.ones(4096)), 1e-6, FP)


def case_rms_norm_input_error() -> Case:
    """An error as large as the row: one element may double while all others vanish."""
    bound = norm.rms_norm(approx(torch.full((8,), 1e-3), 1e-3), exact(torch.ones(8)), 1e-6, FP)
    alone = 2e-3 / (4e-6 / 8 + 1e-6) ** 0.5
    return torch.tensor([alone]), bound.map(slice(0, 1))


def case_residual() -> Case:
    x, r = torch.ones(4), torch.full((4,), 2.0**-8)
    _, kept = norm.residual_norm(exact(x), exact(r), exact(torch.ones(4)), 1e-6, FP, BF16)
    return (x + r).bfloat16(), kept


def _norm_row() -> Tensor:
    x = torch.full((4097,), -(2.0**-12))  # mean 0, and every square but the first is lost
    x[0] = 1.0
    return x


def case_layer_norm_two_pass() -> Case:
    x = _norm_row()
    bound = norm.layer_norm(exact(x), exact(torch.ones(4097)), exact(torch.zeros(4097)), 1e-6, FP)
    return x * torch.rsqrt(forward_sum(x * x) / 4097 + 1e-6), bound


def case_layer_norm_one_pass() -> Case:
    x = _norm_row()
    bound = norm.layer_norm(exact(x), exact(torch.ones(4097)), exact(torch.zeros(4097)), 1e-6, FP, "one-pass")
    return x * torch.rsqrt(forward_sum(x * x) / 4097 + 1e-6), bound


def case_layer_norm_mean() -> Case:
    """A lost mean moves every result: 1, u, u, ... sums to 1."""
    x = torch.cat([torch.tensor([1.0]), torch.full((4095,), U)])
    bound = norm.layer_norm(exact(x), exact(torch.ones(4096)), exact(torch.zeros(4096)), 1e-2, FP)
    mean = forward_sum(x) / 4096
    c = x - mean
    return (c * torch.rsqrt(forward_sum(c * c) / 4096 + 1e-2))[1:], bound.map(slice(1, None))


def case_angle_ideal() -> Case:
    position = torch.arange(163000, 163800)
    f = torch.full((1,), 0.7310585)
    return position.float()[:, None] * f, rope.angles(position, exact(f), FP, reference="ideal")


def case_angle_as_run() -> Case:
    """A frequency known to one ulp only: the rounded product may land on a neighbour."""
    position, f = torch.arange(1000, 1400), torch.full((1,), 0.7310585)
    bound = rope.angles(position, approx(f, 2.0**-24), FP)
    return position.float()[:, None] * nudge(f, 1), bound


def case_frequency() -> Case:
    """pow of a rounded exponent, both at the end of their allowance."""
    exponent = torch.arange(32, dtype=torch.float64) * 2 / 64
    power = 10000.0 ** (exponent * (1 + U)) * (1 + 4 * U)
    return 1 / power * (1 + U), rope.frequencies(64, 10000.0, FP)


def case_cos() -> Case:
    angle = torch.full((1,), 0.9)
    true = angle.double().cos()
    return true + 0.3 * 1e-3 + 0.5e-3 * 0.7, rope.cos_sin(approx(angle, 1e-3), FP)[0]


def case_trig_library() -> Case:
    angle = torch.full((1,), 0.9)
    true = angle.double().cos()
    return _nudged(true, torch.full((1,), 2.0 * U)), rope.cos_sin(exact(angle), FP)[0]


def case_rotate() -> Case:
    """A long position with an ideal angle: the error of the fp32 angle turns the pair."""
    position = torch.arange(163000, 163800)
    f = torch.full((1,), 0.7310585)
    bound = rope.cos_sin(rope.angles(position, exact(f), FP, reference="ideal"), FP)
    angle = position.float()[:, None] * f
    x = torch.cat([torch.ones(800, 1), torch.zeros(800, 1)], -1)
    return torch.cat([angle.cos(), angle.sin()], -1), rope.rotate(exact(x), *bound, "half-split", FP)


def case_rotate_rounding() -> Case:
    x = 1 + torch.rand(20_000, 2, generator=generator(8)) * 0.1
    c, s = torch.full((20_000, 1), 0.75), torch.full((20_000, 1), 0.6614378278)
    got = x[:, :1] * s + x[:, 1:] * c
    bound = rope.rotate(exact(x), exact(c), exact(s), "half-split", FP)
    return got, bound.map((slice(None), slice(1, 2)))


def case_round_bf16() -> Case:
    x = torch.full((1,), 1 + 2.0**-8)
    return x.bfloat16(), round_to(exact(x), BF16)


def case_round_like() -> Case:
    x = torch.full((1,), 1 + 2.0**-8)
    return nudge(x, 3).bfloat16(), round_like(approx(x, 1e-6), BF16)


def case_flush() -> Case:
    x = torch.full((1,), 2.0**-126 * (1 - 2.0**-8))
    return torch.zeros(1), round_to(exact(x), BF16, ftz=True)


@pytest.mark.parametrize("rule", [quant.ACT_QUANT, quant.VLLM_KV, quant.FLASHMLA_KV])
def test_fp8_uses_the_half_step(rule: quant.ScaleRule) -> None:
    x = rows("normal", 50, 128, generator(9))
    bound = quant.fake_quant(exact(x), rule, FP)
    scale = quant.scale_range(exact(x).reshape(50, 1, 128), rule, FP).nominal.squeeze(1).float()
    budget = judge((x / scale).to(torch.float8_e4m3fn).float() * scale, bound)
    assert 0.9 < budget.worst <= 1


def case_fp8_like() -> Case:
    """An input that may cross the midpoint between two codes lands on the far one."""
    x = torch.zeros(128)
    x[0], x[1] = 448.0, 272.0  # 272 lies half-way between the codes 256 and 288
    bound = quant.fake_quant_like(approx(x, 1e-3), quant.ScaleRule(block=128), FP)
    return torch.cat([torch.tensor([512.0, 288.0]), x[2:]])[1:2], bound.map(slice(1, 2))


def case_scores() -> Case:
    q, k = worst_row(576, U).float()[None], torch.ones(1, 576)
    return (forward_sum(q * k) * 0.25)[None], scores(exact(q), exact(k), 0.25, FP)


def _balanced(n: int) -> Tensor:
    """Values +1 and -1 in equal number: the output is 0, so every weight's error counts with its sign."""
    return torch.cat([torch.ones(n // 2, 1), -torch.ones(n // 2, 1)])


def case_attend_score_error() -> Case:
    s, e = torch.zeros(1, 64), 1e-3
    moved = torch.softmax(torch.where(_balanced(64).T > 0, e, -e).double(), -1)
    return moved @ _balanced(64).double(), attend(approx(s, e), exact(_balanced(64)), FP)[0]


def _rounded_up_and_down() -> tuple[Tensor, Tensor]:
    """Weights that bf16 rounds up where V is +1, down where it is -1, and their scores; the largest weight is exact."""
    up = 0.5 * (1 + 2.0**-8) * (1 + 1e-5)
    down = 0.5 * (1 + 3 * 2.0**-8) * (1 - 1e-5)
    p = torch.cat([torch.tensor([1.0]), torch.full((40,), up), torch.full((40,), down)]).double()
    return p, torch.cat([torch.zeros(1, 1), torch.ones(40, 1), -torch.ones(40, 1)]).double()


def case_attend_p_bf16() -> Case:
    p, v = _rounded_up_and_down()
    bound, _ = attend(exact(p.log()[None]), exact(v), FP, SoftmaxForm(p_format=BF16))
    return (p.bfloat16().double() @ v / p.sum())[None], bound


def case_attend_v_error() -> Case:
    return torch.full((1, 1), 1.01), attend(exact(torch.zeros(1, 8)), approx(torch.ones(8, 1), 0.01), FP)[0]


def case_lse_score_error() -> Case:
    s = torch.zeros(1, 64)
    return (s.double() + 1e-3).logsumexp(-1), attend(approx(s, 1e-3), exact(torch.ones(64, 1)), FP)[1]


def case_attend_like() -> Case:
    """All weights but the largest sit near a bf16 midpoint, within reach of the error of their scores."""
    p = torch.cat([torch.tensor([1.0]), torch.full((64,), 0.5 * (1 + 2.0**-8))]).double()
    v = torch.cat([torch.zeros(1, 1), torch.ones(64, 1)]).double()
    e = 4e-6
    bound = attend_like(approx(p.log()[None], e), exact(v), FP, BF16)
    got = torch.where(p < 1, p * (1 + e), p)
    return (got.float().bfloat16().double() @ v / got.sum())[None], bound


def case_index_score() -> Case:
    q = worst_row(128, U).float().expand(1, 8, 128)
    k, w = torch.ones(1, 128), torch.ones(1, 8)
    hits = forward_sum(q * k).clamp_min(0)
    return forward_sum(hits * w)[None], indexer.index_scores(exact(q), exact(w), exact(k), exact(torch.ones(1)), FP)


def case_head_weights() -> Case:
    x, w = worst_row(4096, U).float()[None], torch.ones(4, 4096)
    bound = indexer.head_weights(exact(x), exact(w), exact(torch.ones(1, 4)), 64, FP)
    return forward_sum(x * w)[None] / 16, bound


def case_router_logit_rounding() -> Case:
    logit = torch.tensor([[0.5 * (1 + 2.0**-8)]])
    bound = router.router_scores(round_to(exact(logit), BF16), exact(torch.zeros(1)), FP)[1]
    return logit.bfloat16().double().sigmoid(), bound


def case_router_bias_rounding() -> Case:
    bias = torch.full((1,), 5 + 2.0**-6)
    bound = router.router_scores(exact(torch.zeros(1, 1)), round_to(exact(bias), BF16), FP)[1]
    return torch.zeros(1, 1).sigmoid() + bias.bfloat16().float(), bound


def case_group_score() -> Case:
    c = approx(torch.full((1, 8), 5.0), 1e-3)
    return torch.full((1, 2), 10.002, dtype=torch.float64), router.group_scores(c, 2, FP)


def case_expert_weights() -> Case:
    s, e = torch.full((1, 8), 0.5), torch.full((1, 8), -1e-3)
    e[0, 0] = 1e-3
    moved = s.double() + e
    bound = router.expert_weights(approx(s, 1e-3), torch.arange(8)[None], 2.5, FP)
    return (moved / moved.sum() * 2.5)[:, :1], bound.map((slice(None), slice(0, 1)))


def case_mlp() -> Case:
    """The down projection dominates: 4096 terms 1, u, u, ... of inner values that are exactly 1."""
    one, w2 = torch.ones(1, 1), worst_row(4096, U).float()[None]
    gate = torch.nn.functional.silu(torch.ones(()))
    w3 = next(w for w in (1 / gate, nudge(1 / gate, 1), nudge(1 / gate, 1, up=False)) if float(w * gate) == 1.0)
    bound = moe.mlp(exact(one), exact(one.expand(4096, 1)), exact(w2), exact(w3.expand(4096, 1)), FP)
    return forward_sum((gate * w3) * w2)[None], bound


def case_mlp_bf16() -> Case:
    """All four stored values are rounded the same way."""
    x, w2 = 1 + torch.rand(40_000, 1, generator=generator(10)), torch.full((1, 1), 1.2)
    one = torch.ones(1, 1)
    stored = x.bfloat16().float()
    inner = (torch.nn.functional.silu(stored) * stored).bfloat16().float()
    return (inner * w2).bfloat16(), moe.mlp(exact(x), exact(one), exact(w2), exact(one), FP, storage=BF16)


def case_combine() -> Case:
    outs = worst_row(9, U).float().reshape(1, 9, 1)
    bound = moe.combine(exact(outs[:, :8]), exact(torch.ones(1, 8)), exact(outs[:, 8]), FP)
    return forward_sum(outs.squeeze(-1))[None], bound


CASES: dict[str, Callable[[], Case]] = {name: f for name, f in list(globals().items()) if name.startswith("case_")}


@pytest.mark.parametrize("name", CASES)
def test_half_the_bound_would_be_exceeded(name: str) -> None:
    computed, bound = CASES[name]()
    assert bound.value.numel() > 0
    budget = judge(computed, bound)
    assert 0.5 < budget.worst <= 1, budget.describe(name)
