"""YaRN RoPE with error bounds: frequencies, angles formed in fp32, cosines and sines, rotation in both layouts.

Contract: as in `arith`. Legend: T tokens, P pairs, R = 2P rotated width. At position 163839 the fp32 product
position x frequency carries milliradians. `angles` therefore has two references: the ideal product, whose bound admits
that error, and the product as run (rounded to fp32 once, as every admissible path forms it), whose bound does not.
Source: YaRN (arXiv 2309.00071); DeepSeek-V3.2-Exp inference/model.py.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from dsv32_ref.bounds.arith import Approx, Arithmetic, approx, exact, round_like, with_slack
from dsv32_ref.bounds.elementary import add, div, mul
from dsv32_ref.bounds.linear import dot

Layout = Literal["interleaved", "half-split"]


def frequencies(
    width: int, theta: float, arith: Arithmetic, *, factor: float = 1.0, low: float = 0.0, high: float = 1.0
) -> Approx:
    """Radians per position [P]: f = theta^(-2i/width), stretched by `factor` along the ramp low..high; factor 1:
    plain RoPE.

    The rounded exponent 2i/width moves f by ln(theta) 2i/width u relatively; `pow` adds pow_ulp.
    """
    i_P = torch.arange(width // 2, dtype=torch.float64)
    power_P = torch.exp(2.0 * i_P / width * math.log(theta))
    moved_P = torch.expm1(math.log(theta) * 2.0 * i_P / width * arith.u) + 2.0 * arith.pow_ulp * arith.u
    f_P = div(_filled(1.0, i_P), with_slack(power_P, moved_P * power_P), arith)
    if factor == 1.0:
        return f_P
    climb_P = div(add(exact(i_P), _filled(-low, i_P), arith), _filled(high - low, i_P, arith.u), arith)
    ramp_P = Approx(climb_P.value.clamp(0.0, 1.0), climb_P.err)
    keep_P = add(_filled(1.0, i_P), _minus(ramp_P), arith)
    stretched_P = div(f_P, _filled(factor, i_P), arith)
    left_P = mul(stretched_P, add(_filled(1.0, i_P), _minus(keep_P), arith), arith)
    return add(left_P, mul(f_P, keep_P, arith), arith)


def angles(
    positions_T: Tensor, frequencies_P: Approx, arith: Arithmetic, *, reference: Literal["ideal", "as-run"] = "as-run"
) -> Approx:
    """position x frequency [T, P] in radians. as-run: the value is the product rounded once to arith.acc.

    Raises ValueError for a negative position.
    """
    if bool((positions_T < 0).any()):
        raise ValueError(f"positions_T: smallest is {int(positions_T.min())}; positions count from 0")
    position = exact(positions_T.unsqueeze(-1).to(torch.float64))
    if reference == "ideal":
        return mul(position, frequencies_P, arith)
    value = position.value * frequencies_P.value
    return round_like(Approx(value, position.value * frequencies_P.err), arith.acc)


def cos_sin(angle_TP: Approx, arith: Arithmetic) -> tuple[Approx, Approx]:
    """Cosine and sine: an angle error e moves them by at most |derivative| e + e^2 / 2; the library adds trig_ulp *
    2u.
    """
    cos, sin, e = angle_TP.value.cos(), angle_TP.value.sin(), angle_TP.err
    own = arith.trig_ulp * arith.u
    moved_cos, moved_sin = ((other.abs() * e + e * e / 2).clamp(max=2.0) + own for other in (sin, cos))
    return with_slack(cos, moved_cos), with_slack(sin, moved_sin)


def rotate(x: Approx, cos: Approx, sin: Approx, layout: Layout, arith: Arithmetic) -> Approx:
    """(a, b) -> (a cos - b sin, a sin + b cos) on the pairs of x [..., R]; the layout stays. cos, sin broadcast as
    [..., P].
    """
    a, b = _split(x.value, layout), _split(x.err, layout)
    first, second = Approx(a[0], b[0]), Approx(a[1], b[1])
    turned = (_two(first, _minus(second), cos, sin, arith), _two(first, second, sin, cos, arith))
    return Approx(_join(turned[0].value, turned[1].value, layout), _join(turned[0].err, turned[1].err, layout))


def _two(a: Approx, b: Approx, c: Approx, d: Approx, arith: Arithmetic) -> Approx:
    """a c + b d."""
    return dot(_stack(a, b), _stack(c, d), arith)


def _stack(a: Approx, b: Approx) -> Approx:
    return Approx(torch.stack([a.value, b.value], -1), torch.stack([a.err, b.err], -1))


def _minus(x: Approx) -> Approx:
    return Approx(-x.value, x.err)


def _filled(value: float, like: Tensor, relative: float = 0.0) -> Approx:
    return approx(torch.full_like(like, value), abs(value) * relative)


def _split(x: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    if layout == "interleaved":
        return x[..., 0::2], x[..., 1::2]
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


def _join(a: Tensor, b: Tensor, layout: Layout) -> Tensor:
    return torch.stack([a, b], -1).flatten(-2) if layout == "interleaved" else torch.cat([a, b], -1)
