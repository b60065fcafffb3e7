"""RMSNorm, LayerNorm and the fused residual add, with error bounds.

Contract: as in `arith`; x [..., n], weight and bias [n]. Results are in the arithmetic's format, before rounding to
storage. Source: DeepSeek-V3.2-Exp inference/model.py (norm in fp32, rounded once; weight multiplied in fp32).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from dsv32_ref.bounds.arith import Approx, Arithmetic, Format, exact, round_to
from dsv32_ref.bounds.elementary import add, div, mul, rsqrt
from dsv32_ref.bounds.linear import dot, total


def rms_norm(x: Approx, weight: Approx, eps: float, arith: Arithmetic) -> Approx:
    """weight * x / sqrt(mean(x^2) + eps)."""
    mean_square = _over_n(dot(x, x, arith), x.value.shape[-1], arith)
    shifted = add(mean_square, _constant(eps, mean_square, arith), arith)
    inverse = rsqrt(shifted, arith, _least_mean_square(x, eps, arith))
    return mul(mul(x, _column(inverse), arith), weight, arith)


def layer_norm(
    x: Approx,
    weight: Approx,
    bias: Approx,
    eps: float,
    arith: Arithmetic,
    moments: Literal["two-pass", "one-pass"] = "two-pass",
) -> Approx:
    """weight * (x - mean) / sqrt(var + eps) + bias.

    two-pass: variance from the centred values. one-pass: mean(x^2) - mean^2, which loses (mean/std)^2 ulps. Updating
    (Welford) algorithms err less than one-pass and more than two-pass; judge them by one-pass.
    """
    n = x.value.shape[-1]
    mean = _over_n(total(x, arith), n, arith)
    centred = add(x, Approx(-mean.value.unsqueeze(-1), mean.err.unsqueeze(-1)), arith)
    least = None
    if moments == "two-pass":
        least = _least_mean_square(centred, eps, arith)
        variance = _over_n(dot(centred, centred, arith), n, arith)
    else:
        square = mul(mean, mean, arith)
        variance = add(_over_n(dot(x, x, arith), n, arith), Approx(-square.value, square.err), arith)
    inverse = rsqrt(add(variance, _constant(eps, variance, arith), arith), arith, least)
    return add(mul(mul(centred, _column(inverse), arith), weight, arith), bias, arith)


def residual_norm(
    x: Approx, residual: Approx, weight: Approx, eps: float, arith: Arithmetic, storage: Format
) -> tuple[Approx, Approx]:
    """Fused add and norm: (rms_norm(x + residual), x + residual), both rounded once to `storage`.

    The norm reads the unrounded sum; the stored residual is rounded.
    """
    together = add(x, residual, arith)
    return round_to(rms_norm(together, weight, eps, arith), storage), round_to(together, storage)


def _least_mean_square(x: Approx, eps: float, arith: Arithmetic) -> Tensor:
    """Lower bound of the computed mean(x^2) + eps: squares cannot be negative, however large the error of x.

    Eight roundings cover the stored eps, the quotient by n and the sum; the terms are positive, so growth is relative.
    """
    n = x.value.shape[-1]
    squares = (x.value.abs() - x.err).clamp(min=0.0).square().sum(-1) * (1.0 - min(arith.growth(n), 1.0))
    lost = 4.0 * (n + 1) * (arith.eta_mul + arith.eta_add)
    return (squares / n + eps) * (1.0 - 8.0 * arith.u) - lost


def _over_n(x: Approx, n: int, arith: Arithmetic) -> Approx:
    """x / n, or x times a rounded 1 / n."""
    return div(x, exact(torch.full_like(x.value, float(n))), arith)


def _constant(value: float, like: Approx, arith: Arithmetic) -> Approx:
    """A decimal constant as the implementation stores it: within one roundoff."""
    return Approx(torch.full_like(like.value, value), torch.full_like(like.value, abs(value) * arith.u))


def _column(x: Approx) -> Approx:
    return Approx(x.value.unsqueeze(-1), x.err.unsqueeze(-1))
