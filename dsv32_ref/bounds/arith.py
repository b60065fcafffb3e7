"""Numbers with error bounds, number formats and the model of arithmetic.

Contract: `Approx(value, err)` says that a computed quantity lies within `err` of `value`, for every implementation that
obeys the `Arithmetic` it was derived under. `value` is the result in real arithmetic (evaluated in float64), never the
result of one particular rounding order. Every function of this package takes such pairs, returns such pairs, and may
therefore be chained. docs/bounds.md holds the derivations.

Model: fl(a op b) = (a op b)(1 + d) + e with |d| <= u and |e| <= the underflow unit; e = 0 for additions unless
subnormal results are flushed. A fused multiply-add makes fewer errors and is covered. Overflow is not: where it may
happen err is inf.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# The float64 evaluation of value and err commits n * 2^-53 where the bound grants at least sqrt(n) * 2^-32 for the same
# magnitudes (u >= 2^-32 is enforced): less than 2^-16 of err for every n <= 2^20.
EVALUATION_SLACK = 1.0 + 2.0**-16
SMALLEST_ROUNDOFF = 2.0**-32


@dataclass(frozen=True)
class Format:
    """A binary floating-point format: `bits` of significand (hidden bit included), exponent of the smallest normal,
    largest value.
    """

    name: str
    bits: int
    min_exp: int
    max: float

    @property
    def u(self) -> float:
        """Unit roundoff 2^-bits of rounding to nearest."""
        return 2.0**-self.bits

    @property
    def min_normal(self) -> float:
        """Smallest normal number."""
        return 2.0**self.min_exp

    @property
    def underflow(self) -> float:
        """Half the subnormal spacing: the largest rounding error below the normal range."""
        return 2.0 ** (self.min_exp - self.bits)

    def half_ulp(self, magnitude: Tensor) -> Tensor:
        """Largest rounding error (to nearest) of any number of at most this magnitude; 0 for 0. Never decreasing in
        `magnitude`.
        """
        exponent = torch.frexp(magnitude).exponent - 1
        step = torch.ldexp(torch.ones_like(magnitude), exponent.clamp(min=self.min_exp) - self.bits)
        return torch.where(torch.isfinite(magnitude), torch.where(magnitude == 0, 0.0, step), math.inf)

    def round(self, x: Tensor) -> Tensor:
        """`x` (float64) rounded to nearest even in this format; beyond its range: infinity."""
        step = 2.0 * self.half_ulp(x.abs())
        rounded = torch.where(x == 0, x, torch.round(x / step) * step)
        rounded = torch.where(torch.isinf(x), x, rounded)
        return torch.where(rounded.abs() > self.max, torch.copysign(torch.full_like(x, math.inf), x), rounded)


FP32 = Format("fp32", 24, -126, float(torch.finfo(torch.float32).max))
BF16 = Format("bf16", 8, -126, float(torch.finfo(torch.bfloat16).max))
FP16 = Format("fp16", 11, -14, 65504.0)
E4M3FN = Format("e4m3fn", 4, -6, 448.0)
E4M3FNUZ = Format("e4m3fnuz", 4, -7, 240.0)


@dataclass(frozen=True, kw_only=True)
class Arithmetic:
    """What an implementation may do, and how strong the bound shall be.

    acc: format of arithmetic and accumulation. truncating: its roundings are not to nearest (the unit doubles).
    ftz: subnormal inputs and results may be read or written as zero.
    delta: None for the deterministic bound; else the probability, per reduction, with which the square-root-of-n
    bound may fail under mean-independent rounding errors.
    *_ulp: assumed accuracy of library functions, in units in the last place of their result (trig_ulp: in units of u,
    the last place of numbers just below 1, since hardware sine is accurate absolutely).
    Raises ValueError for a roundoff below 2^-32 (float64 could not judge it), delta outside (0, 0.5], or both delta
    and truncating.
    """

    acc: Format = FP32
    truncating: bool = False
    ftz: bool = False
    delta: float | None = None
    exp_ulp: float = 2.0
    log_ulp: float = 2.0
    rcp_ulp: float = 1.0
    rsqrt_ulp: float = 2.0
    pow_ulp: float = 2.0
    trig_ulp: float = 2.0

    def __post_init__(self) -> None:
        if self.acc.u < SMALLEST_ROUNDOFF:
            raise ValueError(f"acc: roundoff {self.acc.u:g} is below 2^-32; a float64 reference cannot judge it")
        if self.delta is not None and not 0.0 < self.delta <= 0.5:
            raise ValueError(f"delta: {self.delta} is not in (0, 0.5]; use None for the deterministic bound")

        if self.delta is not None and self.truncating:
            raise ValueError(
                "delta: truncation is biased, and the square-root-of-n form needs mean-zero errors; use None"
            )

    @property
    def u(self) -> float:
        """Unit roundoff of one operation."""
        return self.acc.u * (2.0 if self.truncating else 1.0)

    @property
    def eta_mul(self) -> float:
        """Absolute underflow error of one product, quotient or library function."""
        return self.acc.min_normal if self.ftz else self.acc.underflow * (2.0 if self.truncating else 1.0)

    @property
    def eta_add(self) -> float:
        """Absolute underflow error of one sum: none unless results are flushed."""
        return self.acc.min_normal if self.ftz else 0.0

    @property
    def lam(self) -> float:
        """lambda(delta) = sqrt(2 ln(2 / delta)) of the Azuma-Hoeffding inequality."""
        if self.delta is None:
            raise ValueError("delta: the deterministic bound has no lambda; give a probability")
        return math.sqrt(2.0 * math.log(2.0 / self.delta))

    def growth(self, depth: int) -> float:
        """Relative error of `depth` successive roundings: gamma_depth, or lambda sqrt(depth) u (1 + u)^depth.

        Raises ValueError where depth * u >= 1: no bound exists.
        """
        if depth * self.u >= 1.0:
            raise ValueError(f"depth: {depth} roundings at u = {self.u:g} leave no digit; accumulate in a wider format")
        gamma = depth * self.u / (1.0 - depth * self.u)
        if self.delta is None:
            return gamma
        return min(gamma, self.lam * math.sqrt(depth) * self.u * (1.0 + self.u) ** depth)

    def rounding(self, magnitude: Tensor) -> Tensor:
        """Error of one operation whose exact result is at most `magnitude`: half an ulp there, plus the flush."""
        half = self.acc.half_ulp(magnitude) * (2.0 if self.truncating else 1.0)
        return half + self.eta_add if self.ftz else half

    def library(self, ulps: float, magnitude: Tensor) -> Tensor:
        """Error of a library function of that accuracy (one ulp is at most 2u of the result), plus the underflow."""
        return 2.0 * ulps * self.u * magnitude + (2.0 * ulps + 1.0) * self.eta_mul

    def result(self, value: Tensor, err: Tensor, reach: Tensor | None = None) -> Approx:
        """The pair, widened by the float64 evaluation error; err is inf where the result, or the intermediate magnitude
        `reach`, may exceed the largest number of `acc`.
        """
        pair = with_slack(value, err)
        largest = pair.high if reach is None else torch.maximum(reach, pair.high)
        return Approx(value, torch.where(largest > self.acc.max, math.inf, pair.err))

    def read(self, x: Approx) -> Approx:
        """`x` as an operation may read it: unchanged, or with its subnormal numbers taken as zero (ftz)."""
        if not self.ftz:
            return x
        flushed = (x.value.abs() - x.err < self.acc.min_normal) & (x.high > 0)
        return Approx(x.value, x.err + torch.where(flushed, x.high.clamp(max=self.acc.min_normal), 0.0))


@dataclass(frozen=True)
class Approx:
    """A float64 `value` and the float64 bound `err` >= 0 on the distance of every admissible computed result.

    Raises TypeError unless both are float64, ValueError where err is negative or NaN or the shapes differ.
    """

    value: Tensor
    err: Tensor

    def __post_init__(self) -> None:
        if self.value.dtype != torch.float64 or self.err.dtype != torch.float64:
            raise TypeError(
                f"value, err: {self.value.dtype}, {self.err.dtype} must be float64; use exact() or approx()"
            )
        if self.value.shape != self.err.shape:
            raise ValueError(f"err: shape {tuple(self.err.shape)} differs from value's {tuple(self.value.shape)}")
        if self.err.numel() and not float(self.err.amin()) >= 0:  # amin of NaN is NaN
            raise ValueError("err: negative or NaN; an error bound is a number >= 0 (inf: nothing is promised)")

    @property
    def high(self) -> Tensor:
        """|value| + err: the largest magnitude a computed result can have."""
        return self.value.abs() + self.err

    def apply(self, change: Callable[[Tensor], Tensor]) -> Approx:
        """The same change of layout (a gather, a transpose, a split) applied to value and err."""
        return Approx(change(self.value), change(self.err))

    def map(self, index: object) -> Approx:
        """The same indexing applied to value and err."""
        return Approx(self.value[index], self.err[index])  # type: ignore[index]

    def reshape(self, *shape: int) -> Approx:
        """Both parts reshaped."""
        return Approx(self.value.reshape(*shape), self.err.reshape(*shape))

    def transposed(self) -> Approx:
        """Both parts with the last two dimensions exchanged."""
        return Approx(self.value.mT, self.err.mT)


def exact(x: Tensor) -> Approx:
    """A stored tensor of any floating dtype, taken as exact."""
    value = x.to(torch.float64)
    return Approx(value, torch.zeros_like(value))


def approx(value: Tensor, err: Tensor | float) -> Approx:
    """A pair from a tensor and a bound that broadcasts to it."""
    value = value.to(torch.float64)
    bound = torch.as_tensor(err, dtype=torch.float64)
    return Approx(value, bound.expand(value.shape).clone())


def with_slack(value: Tensor, err: Tensor) -> Approx:
    """The pair with err widened by the float64 evaluation error; a value or bound that is not finite promises
    nothing.
    """
    sound = torch.isfinite(value) & ~torch.isnan(err)
    return Approx(value, torch.where(sound, err * EVALUATION_SLACK, math.inf))


def round_to(x: Approx, fmt: Format, *, ftz: bool = False) -> Approx:
    """`x` stored in `fmt`, against the ideal (unrounded) value: err grows by half an ulp of the largest possible
    magnitude.

    ftz: results below the normal range may be stored as zero. Where |x| may exceed fmt.max, err is inf.
    """
    step = fmt.half_ulp(x.high)
    if ftz:
        low = x.value.abs() - x.err < fmt.min_normal
        step = torch.where(low, torch.maximum(step, x.high.clamp(max=fmt.min_normal)), step)
    return Approx(x.value, torch.where(x.high > fmt.max, math.inf, x.err + step))


def round_like(x: Approx, fmt: Format) -> Approx:
    """`x` stored in `fmt`, against the simulated-rounded value fmt.round(x).

    Rounding is monotone, so every x' in [x - err, x + err] rounds into [round(x - err), round(x + err)]: err is 0
    wherever that interval crosses no rounding boundary.
    """
    value = fmt.round(x.value)
    return hull(value, fmt.round(x.value - x.err), fmt.round(x.value + x.err))


def hull(value: Tensor, low: Tensor, high: Tensor) -> Approx:
    """The pair around `value` that contains [low, high]."""
    reach = torch.maximum(high - value, value - low).clamp(min=0.0)
    sound = torch.isfinite(value) & torch.isfinite(low) & torch.isfinite(high)
    return Approx(value, torch.where(sound, reach, math.inf))
