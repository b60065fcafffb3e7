"""The deterministic bound alone rejects real defects: a lost row of 2048, a scale off by one percent, a stale position.

Attention at the true widths (576 scores, 512 values, 2048 keys), honest fp32 accumulation, bf16 inputs and output.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from bounds_inputs import generator
from bounds_stages import FP
from torch import Tensor

from dsv32_ref.bounds import (
    BF16,
    E4M3FN,
    FP16,
    Approx,
    SoftmaxForm,
    approx,
    attend,
    attend_like,
    exact,
    judge,
    linear,
    quant,
    rope,
    round_to,
    scores,
)

D, C, K, SCALE = 576, 512, 2048, 0.13523378


def _inputs(score_std: float, seed: int) -> tuple[Tensor, Tensor]:
    """q [1, D] and the cache [K, D], normal, bf16 values; q is scaled so that scores have this standard deviation."""
    gen = generator(seed)
    q = torch.randn(1, D, generator=gen) * (score_std / (D**0.5 * SCALE))
    return q.bfloat16().float(), torch.randn(K, D, generator=gen).bfloat16().float()


class Kernel:
    """An honest kernel, with a switch for the row it loses."""

    def __init__(self, q: Tensor, kv: Tensor, p_bf16: bool, scale: float = SCALE) -> None:
        s = (q @ kv.T) * scale
        self.w = torch.exp(s - s.amax(-1, keepdim=True))
        self.p = self.w.bfloat16().float() if p_bf16 else self.w
        self.v = kv[:, :C]
        self.product, self.total = self.p @ self.v, self.w.sum(-1, keepdim=True)

    def output(self, lost: int | None = None) -> Tensor:
        if lost is None:
            return (self.product / self.total).bfloat16()
        product = self.product - self.p[:, lost : lost + 1] * self.v[lost]
        return (product / (self.total - self.w[:, lost : lost + 1])).bfloat16()


def _p_fp32(s: Approx, v: Approx) -> Approx:
    return round_to(attend(s, v, FP, SoftmaxForm(rescales=63))[0], BF16)


def _p_bf16_simulated(s: Approx, v: Approx) -> Approx:
    return round_to(attend_like(s, v, FP, BF16), BF16)


def _p_bf16_ideal(s: Approx, v: Approx) -> Approx:
    return round_to(attend(s, v, FP, SoftmaxForm(rescales=63, p_format=BF16))[0], BF16)


def _seen(score_std: float, bound: Callable[[Approx, Approx], Approx], p_bf16: bool, count: int) -> float:
    """Share of single lost rows that the gate rejects; the honest output must pass."""
    q, kv = _inputs(score_std, seed=11)
    pair = bound(scores(exact(q), exact(kv), SCALE, FP), exact(kv[:, :C]))
    kernel = Kernel(q, kv, p_bf16)
    honest = judge(kernel.output(), pair)
    assert honest.passed, honest.describe("honest attention")
    lost = range(0, K, K // count)
    return sum(not judge(kernel.output(row), pair).passed for row in lost) / len(lost)


@pytest.mark.parametrize(("bound", "p_bf16"), [(_p_fp32, False), (_p_bf16_simulated, True)])
def test_any_lost_row_of_2048_is_rejected_with_equal_scores(
    bound: Callable[[Approx, Approx], Approx], p_bf16: bool
) -> None:
    """q = 0, normal V: every weight is 1 and exact, so what remains are one sum of 2048 terms and the output's
    rounding.
    """
    assert _seen(0.0, bound, p_bf16, 2048) == 1.0


def test_lost_rows_under_ordinary_scores() -> None:
    """Scores with standard deviation 1: the worst case of 576-term sums hides light rows. Most, not all, are seen.

    A row of weight p moves the output by p |v - o|; the bound is at least 2 max(score err) sum p|v|, about 1e-3 here.
    """
    share = _seen(1.0, _p_fp32, False, 256)
    assert 0.5 < share < 1.0
    assert _seen(0.25, _p_fp32, False, 256) == 1.0


def test_the_ideal_bound_with_bf16_weights_cannot_see_one_row() -> None:
    """Half a bf16 ulp of every weight is 2^-8 of sum p|v|: eight times the share of one row. Use the simulated
    reference.
    """
    assert _seen(0.0, _p_bf16_ideal, True, 256) == 0.0


def test_a_lost_heavy_row_is_rejected_by_every_bound() -> None:
    """One key far above the rest holds a third of the weight."""
    q, kv = _inputs(1.0, seed=12)
    kv[77] = q[0] / (q @ q.T).item() * (K**0.5 * 12 / SCALE) / K**0.5 * 0.58
    kv = kv.bfloat16().float()
    kernel = Kernel(q, kv, True)
    assert 0.1 < float(kernel.w[0, 77] / kernel.total) < 0.6
    for bound in (_p_bf16_ideal, _p_bf16_simulated):
        pair = bound(scores(exact(q), exact(kv), SCALE, FP), exact(kv[:, :C]))
        assert judge(kernel.output(), pair).passed
        assert judge(kernel.output(77), pair).worst > 5


def test_a_softmax_scale_off_by_one_percent_is_rejected() -> None:
    q, kv = _inputs(3.0, seed=13)
    pair = _p_fp32(scores(exact(q), exact(kv), SCALE, FP), exact(kv[:, :C]))
    assert judge(Kernel(q, kv, False).output(), pair).passed
    assert judge(Kernel(q, kv, False, SCALE * 1.01).output(), pair).worst > 1.5


@pytest.mark.parametrize("rule", [quant.ACT_QUANT, quant.VLLM_KV])
def test_a_dequantisation_scale_off_by_one_percent_is_rejected(rule: quant.ScaleRule) -> None:
    """One block of a row against the simulated-quantised reference, and a whole GEMM with bf16 output against its
    inputs.
    """
    gen = generator(14)
    x = torch.randn(4, 512, generator=gen).bfloat16().float()
    pair = quant.fake_quant_like(exact(x), rule, FP)
    stored = quant.fake_quant_like(exact(x), rule, FP).value.float()
    assert judge(stored, pair).passed
    wrong = stored.clone()
    wrong[2, 128:256] *= 1.01
    budget = judge(wrong, pair)
    assert budget.first is not None
    assert budget.first[0] == 2
    assert 128 <= budget.first[1] < 256
    w = torch.randn(64, 512, generator=gen).bfloat16().float()
    product = round_to(linear.linear(exact(stored), exact(w), FP, roundings=2), BF16)
    assert judge((stored @ w.T).bfloat16(), product).passed
    assert judge((stored * 1.01 @ w.T).bfloat16(), product).worst > 1.2


def test_a_fine_code_needs_the_roundings_of_its_arithmetic() -> None:
    """fp16 codes, values at midpoints: half a step, and on top of it the fp32 quotient and product."""
    rule = quant.ScaleRule(fmt=FP16, largest=60000.0, block=2, ue8m0=False, amax_floor=0.0)
    amax = torch.rand(20_000, 1, generator=generator(36)) + 1
    scale = amax / rule.largest
    middle = scale * (1025.5 * 8)
    for ulps in (-1, 0, 1):
        x = torch.cat([amax, (middle.view(torch.int32) + ulps).view(torch.float32)], 1)
        budget = judge((x / scale).half().float() * scale, quant.fake_quant(exact(x), rule, FP))
        assert 0.99 < budget.worst <= 1


@pytest.mark.parametrize("err", [1e-3, 1e-2])
def test_power_of_two_scales_reach_the_codes_of_both_ends(err: float) -> None:
    """A large exact element fixes the scale; the others' bounds are exactly the farther code that they may get."""
    x = torch.randn(50, 128, generator=generator(37)).double()
    x[:, 0] = 8.0
    errors = torch.full_like(x, err)
    errors[:, 0] = 0.0
    bound = quant.fake_quant_like(approx(x, errors), quant.ACT_QUANT, FP)
    scale = 2.0**-5  # the power of two from 8 / 448 upwards
    down, up = (E4M3FN.round((x + sign * errors) / scale) * scale - bound.value for sign in (-1, 1))
    assert min(int((down.abs() > up.abs()).sum()), int((up.abs() > down.abs()).sum())) > 100
    torch.testing.assert_close(bound.err, torch.maximum(down.abs(), up.abs()), rtol=2.0**-14, atol=0)


@pytest.mark.parametrize("position", [1, 4096, 163839])
@pytest.mark.parametrize("reference", ["ideal", "as-run"])
def test_a_stale_rope_position_is_rejected(position: int, reference: str) -> None:
    """The key of position p rotated as p - 1, stored in bf16. Even the ideal angle's milliradians do not hide it."""
    gen = generator(15)
    f = 1.0 / (10000.0 ** (torch.arange(0, 64, 2, dtype=torch.float32) / 64))
    x = torch.randn(1, 64, generator=gen).bfloat16().float()
    angles = rope.angles(torch.tensor([position]), exact(f), FP, reference=reference)  # type: ignore[arg-type]
    pair = round_to(rope.rotate(exact(x), *rope.cos_sin(angles, FP), "interleaved", FP), BF16)

    def rotated(at: int) -> Tensor:
        angle = torch.tensor(float(at)) * f
        a, b = x[:, 0::2], x[:, 1::2]
        turned = [a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()]
        return torch.stack(turned, -1).flatten(-2).bfloat16()

    assert judge(rotated(position), pair).passed
    assert judge(rotated(position - 1), pair).worst > 20
