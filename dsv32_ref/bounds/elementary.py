"""Element-wise operations with error bounds: sums, products, quotients, exp, sigmoid, SiLU, rsqrt.

Contract: as in `arith`. Monotone functions propagate an input interval exactly, by evaluating its two ends; the error
of the function itself is the ulp allowance of `Arithmetic`. Inputs broadcast.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dsv32_ref.bounds.arith import Approx, Arithmetic, hull


def add(x: Approx, y: Approx, arith: Arithmetic) -> Approx:
    """x + y, one rounding."""
    x, y = arith.read(x), arith.read(y)
    value, err = x.value + y.value, x.err + y.err
    return arith.result(value, err + arith.rounding(value.abs() + err))


def mul(x: Approx, y: Approx, arith: Arithmetic) -> Approx:
    """x * y, one rounding."""
    x, y = arith.read(x), arith.read(y)
    value = x.value * y.value
    err = x.value.abs() * y.err + x.err * y.value.abs() + x.err * y.err
    return arith.result(value, err + arith.rounding(value.abs() + err))


def div(x: Approx, y: Approx, arith: Arithmetic) -> Approx:
    """x / y as a quotient or as x times the reciprocal; err is inf where y may be 0."""
    x, y = arith.read(x), arith.read(y)
    value, low = x.value / y.value, y.value.abs() - y.err
    err = (x.err + value.abs() * y.err) / low
    own = (1.0 + arith.u) * (1.0 + 2.0 * arith.rcp_ulp * arith.u) - 1.0
    err = err + (value.abs() + err) * own + 2.0 * arith.eta_mul * (1.0 + x.high)
    return arith.result(value, torch.where(low > 0, err, math.inf))


def exp_relative(argument: Tensor, arith: Arithmetic) -> Tensor:
    """Relative error of a computed exp at |argument| `argument`, also when formed as exp2(x * log2 e).

    The product and the rounded constant log2 e move the argument by at most 2u|x|(1 + u); the library adds exp_ulp.
    """
    moved = torch.expm1(2.0 * arith.u * (1.0 + arith.u) * argument)
    return (1.0 + moved) * (1.0 + 2.0 * arith.exp_ulp * arith.u) - 1.0


def exp(x: Approx, arith: Arithmetic) -> Approx:
    """exp(x)."""
    x = arith.read(x)
    inner = hull(x.value.exp(), (x.value - x.err).exp(), (x.value + x.err).exp())
    own = exp_relative(x.high, arith) * inner.high + (2.0 * arith.exp_ulp + 1.0) * arith.eta_mul
    return arith.result(inner.value, inner.err + own)


def sigmoid(x: Approx, arith: Arithmetic) -> Approx:
    """1 / (1 + exp(-x)), or exp(x) / (1 + exp(x)): an error r of the exponential becomes r (1 - s) in both.

    Below x = -87 the first form may overflow to 0: the absolute term min_normal covers it.
    """
    x = arith.read(x)
    inner = hull(torch.sigmoid(x.value), torch.sigmoid(x.value - x.err), torch.sigmoid(x.value + x.err))
    smallest = torch.sigmoid(x.value - x.err)
    denominator = (1.0 + exp_relative(x.high, arith) * (1.0 - smallest)) * (1.0 + arith.u) - 1.0
    # + u: the quotient's own rounding where the reciprocal is multiplied by the numerator.
    own = (1.0 + 2.0 * arith.rcp_ulp * arith.u) * (1.0 + arith.u) / (1.0 - denominator) - 1.0
    return arith.result(inner.value, inner.err + own * inner.high + 4.0 * arith.acc.min_normal)


def silu(x: Approx, arith: Arithmetic) -> Approx:
    """x * sigmoid(x), in the arithmetic's format; the caller rounds to storage."""
    return mul(x, sigmoid(x, arith), arith)


def rsqrt(x: Approx, arith: Arithmetic, least: Tensor | None = None) -> Approx:
    """1 / sqrt(x); err is inf where x may be <= 0. `least`: a lower bound of the computed x known otherwise."""
    low = x.value - x.err if least is None else torch.maximum(x.value - x.err, least)
    inner = hull(x.value.rsqrt(), (x.value + x.err).rsqrt(), low.clamp(min=torch.finfo(torch.float64).tiny).rsqrt())
    err = inner.err + arith.library(arith.rsqrt_ulp, inner.high)
    return arith.result(inner.value, torch.where((low > 0) & torch.isfinite(x.err), err, math.inf))


def log(x: Approx, arith: Arithmetic) -> Approx:
    """Natural logarithm, also as log2(x) * ln 2 (two more roundings); err is inf where x may be <= 0."""
    low = x.value - x.err
    inner = hull(x.value.log(), low.clamp(min=torch.finfo(torch.float64).tiny).log(), (x.value + x.err).log())
    err = inner.err + arith.library(arith.log_ulp + 1.0, inner.high)
    return arith.result(inner.value, torch.where(low > 0, err, math.inf))


def scale_by(x: Approx, factor: float, arith: Arithmetic) -> Approx:
    """x times a constant whose stored value is within one roundoff of `factor` (exact for powers of two)."""
    is_power = math.frexp(abs(factor))[0] == 0.5
    constant = torch.tensor(factor, dtype=torch.float64).expand(x.value.shape)
    return mul(x, Approx(constant, constant.abs() * (0.0 if is_power else arith.u)), arith)
