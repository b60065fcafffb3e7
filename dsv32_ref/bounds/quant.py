"""Block fp8 quantisation with error bounds, against the ideal and against the simulated-quantised value.

Contract: as in `arith`; x [..., N] in blocks of the last dimension, results dequantised. The scale of a block is
max(amax, amax_floor) / largest, then at least scale_floor, then for ue8m0 the next power of two not below. Writers
differ in these rules (DeepSeek, FlashMLA, vLLM, AITER), hence `ScaleRule`. Whether x is divided by the scale or
multiplied by its rounded reciprocal is left open, and so is the rounding of amax / largest: the intervals below admit
all of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv32_ref.bounds.arith import E4M3FN, FP32, Approx, Arithmetic, Format, hull, with_slack


@dataclass(frozen=True, kw_only=True)
class ScaleRule:
    """How a writer forms the scale of a block of `block` values; the defaults are DeepSeek's act_quant."""

    fmt: Format = E4M3FN
    largest: float = 448.0
    block: int = 128
    ue8m0: bool = True
    amax_floor: float = 1e-4
    scale_floor: float = 0.0

    def scale(self, amax: Tensor) -> Tensor:
        """The scale in real arithmetic, before a ue8m0 rounding: max(amax, amax_floor) / largest, at least
        scale_floor.
        """
        return (amax.clamp(min=self.amax_floor) / self.largest).clamp(min=self.scale_floor)


ACT_QUANT = ScaleRule()
"""DeepSeek: amax floored at 1e-4, power-of-two scale."""
FLASHMLA_KV = ScaleRule(amax_floor=0.0, scale_floor=1e-4)
"""FlashMLA's tests: the scale itself floored at 1e-4, then a power of two."""
VLLM_KV = ScaleRule(ue8m0=False, amax_floor=0.0, scale_floor=2.0**-126)
"""vLLM: raw fp32 scale."""


@dataclass(frozen=True)
class ScaleRange:
    """Smallest, nominal and largest scale of each block, [..., blocks, 1] (nominal: as fp32 arithmetic forms it)."""

    low: Tensor
    nominal: Tensor
    high: Tensor


def scale_range(x_blocks: Approx, rule: ScaleRule, arith: Arithmetic) -> ScaleRange:
    """The scales that admissible writers may form for blocks [..., blocks, block]: three roundings around amax /
    largest.
    """
    amax = x_blocks.value.abs().amax(-1, keepdim=True)
    lowest = (x_blocks.value.abs() - x_blocks.err).amax(-1, keepdim=True).clamp(min=0.0)
    relative = (1.0 + arith.u) ** 3 - 1.0
    low = rule.scale(lowest) * (1.0 - relative)
    high = rule.scale(x_blocks.high.amax(-1, keepdim=True)) * (1.0 + relative)
    nominal = FP32.round(rule.scale(amax))
    return ScaleRange(*map(power_of_two, (low, nominal, high))) if rule.ue8m0 else ScaleRange(low, nominal, high)


def power_of_two(scale: Tensor) -> Tensor:
    """The smallest power of two not below each positive scale."""
    mantissa, exponent = torch.frexp(scale)
    return torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).to(exponent.dtype))


def fake_quant(x: Approx, rule: ScaleRule, arith: Arithmetic) -> Approx:
    """Quantised and dequantised x against x itself: half a step of the largest possible scale, plus arithmetic.

    For a power-of-two scale s the step s * half_ulp(|x| / s) never decreases with s; in general it is at most
    max(u |x|, s * underflow). Twelve roundings cover scale, quotient, clamp (at most six) and product.
    Raises ValueError where the last dimension is not a multiple of the block.
    """
    blocks = _blocks(x, rule)
    scale, high = scale_range(blocks, rule, arith), blocks.high
    within = rule.largest * (1.0 + 8.0 * arith.u)
    divisor = scale.high if rule.ue8m0 else scale.low
    running = scale.high * rule.fmt.half_ulp((high / divisor * (1.0 + 4.0 * arith.u)).clamp(max=within))
    general = torch.maximum(rule.fmt.u * high * (1.0 + 8.0 * arith.u), scale.high * rule.fmt.underflow)
    own = 12.0 * arith.u * high + 2.0 * arith.eta_mul * (1.0 + scale.high)
    return _whole(with_slack(blocks.value, blocks.err + torch.minimum(running, general) + own), x)


def fake_quant_like(x: Approx, rule: ScaleRule, arith: Arithmetic) -> Approx:
    """Quantised and dequantised x against the simulated-quantised value: 0 where no admissible scale, quotient or input
    crosses a rounding boundary (rounding is monotone), else the distance to the neighbour it may reach.

    Raises ValueError where the last dimension is not a multiple of the block.
    """
    blocks = _blocks(x, rule)
    scale = scale_range(blocks, rule, arith)
    value = _code(blocks.value / scale.nominal, rule) * scale.nominal
    ends = ((scale.low, scale.low), (scale.high, scale.high)) if rule.ue8m0 else ((scale.low, scale.high),)
    reached = [_reach(blocks, low, high, rule, arith) for low, high in ends]
    lowest = torch.stack([r[0] for r in reached]).amin(0)
    highest = torch.stack([r[1] for r in reached]).amax(0)
    around = hull(value, torch.minimum(lowest, value), torch.maximum(highest, value))
    own = torch.zeros_like(value) if rule.ue8m0 else arith.u * (around.high + 2.0 * arith.eta_mul)
    return _whole(with_slack(around.value, around.err + own), x)


def _reach(x: Approx, low: Tensor, high: Tensor, rule: ScaleRule, arith: Arithmetic) -> tuple[Tensor, Tensor]:
    """Smallest and largest dequantised value for scales in [low, high] and inputs in the interval of x."""
    if rule.ue8m0:  # low = high, and a quotient by a power of two is exact, also as a product with its reciprocal
        return _code((x.value - x.err) / low, rule) * low, _code((x.value + x.err) / low, rule) * low
    wiggle = 3.0 * arith.u  # quotient, or reciprocal and product
    codes = [
        _code(end / scale * factor, rule)
        for end in (x.value - x.err, x.value + x.err)
        for scale, factor in ((low, 1.0 + wiggle), (high, 1.0 - wiggle))
    ]
    # The code's magnitude falls with the scale, and the code rises with the input: these corners are its extremes.
    smallest, largest = torch.stack(codes).amin(0), torch.stack(codes).amax(0)
    return torch.minimum(smallest * low, smallest * high), torch.maximum(largest * low, largest * high)


def _code(quotient: Tensor, rule: ScaleRule) -> Tensor:
    return rule.fmt.round(quotient.clamp(-rule.largest, rule.largest))


def _blocks(x: Approx, rule: ScaleRule) -> Approx:
    if x.value.shape[-1] % rule.block:
        raise ValueError(
            f"x: width {x.value.shape[-1]} is not a multiple of the block {rule.block}; pad it or name the block"
        )
    shape = (*x.value.shape[:-1], -1, rule.block)
    return x.reshape(*shape)


def _whole(blocks: Approx, like: Approx) -> Approx:
    return blocks.reshape(*like.value.shape)
