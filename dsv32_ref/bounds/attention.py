"""Softmax attention with error bounds: scores, weights, any split of the keys with an LSE merge, P rounded to storage.

Contract: as in `arith`. Legend: H heads (or rows), K keys, D score width, C value width. Valid for any order of
summation, any running maximum and any partition of the keys that `SoftmaxForm` admits: a shift of all scores of a row
cancels between numerator and denominator, and so does the sum of a split between its normalised output and its LSE
(docs/bounds.md). A masked key has score -inf and err 0. A row without any key has value 0 and err 0 (FlashMLA's
rule), and no LSE (err inf).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv32_ref.bounds.arith import Approx, Arithmetic, Format, hull, round_like, with_slack
from dsv32_ref.bounds.elementary import div
from dsv32_ref.bounds.linear import matmul, partial_underflow, total


@dataclass(frozen=True, kw_only=True)
class SoftmaxForm:
    """What the implementation may do between scores and output.

    p_format: storage of the weights for the product with V (None: that of the arithmetic). sum_rounded: the sum is
    taken of the stored weights. normalise_first: the weights are divided by their sum before they are stored.
    splits: largest number of partial results merged by LSE. rescales: largest number of changes of the running maximum
    within a split (KV tiles minus one). lazy: a running maximum may lag behind by this much (natural-log units).
    """

    p_format: Format | None = None
    sum_rounded: bool = False
    normalise_first: bool = False
    splits: int = 1
    rescales: int = 0
    lazy: float = 0.0

    def __post_init__(self) -> None:
        if self.splits < 1 or self.rescales < 0 or self.lazy < 0.0:
            raise ValueError("splits, rescales, lazy: need splits >= 1, rescales >= 0 and lazy >= 0")


PLAIN = SoftmaxForm()


def scores(
    q_HD: Approx, k_KD: Approx, scale: float, arith: Arithmetic, *, scalars: int = 1, depth: int | None = None
) -> Approx:
    """scale * q k^T [..., H, K], wherever the constants are applied.

    `scalars`: how many constants are multiplied in (sm_scale; q_scale, kv_scale). `depth`: as in `linear`.
    """
    plain = matmul(q_HD, k_KD.transposed(), arith, depth=depth, roundings=2 * scalars)
    # Constants multiplied into q or k may underflow there, unscaled.
    early = 2 * scalars * q_HD.value.shape[-1] * partial_underflow(q_HD, k_KD, arith)
    return with_slack(plain.value * scale, plain.err * abs(scale) + early)


@dataclass(frozen=True)
class _Weights:
    """Unnormalised weights exp(s - max): value and err [..., H, K], the row maximum, and the number of admitted
    keys.
    """

    p: Approx
    top: Tensor
    live: Tensor


def _argument_error(scores_HK: Approx, distance: Tensor, arith: Arithmetic, form: SoftmaxForm) -> Tensor:
    """Total error of the exponents that lead to one weight.

    All arguments on its way (score minus running maximum, old minus new maximum, split LSE minus total) have one sign
    and telescope to the distance from the final maximum; each is rounded three times (difference, log2 e, product).
    """
    wobble = scores_HK.err.amax(-1, keepdim=True)
    three = 3.0 * arith.u * (1.0 + 4.0 * arith.u)
    error = scores_HK.err + three * (distance + 2.0 * wobble + 2.0 * form.lazy)
    if form.splits == 1:
        return error
    log_k = math.log(max(scores_HK.value.shape[-1], 1)) + form.lazy
    return error + three * (distance + 2.0 * wobble + log_k) + _lse_rounding(scores_HK, wobble, log_k, arith)


def _lse_rounding(scores_HK: Approx, wobble: Tensor, log_k: float, arith: Arithmetic) -> Tensor:
    """Rounding of one LSE = maximum + log(sum): the sum of both, and the logarithm of at most K (1 + growth)
    exp(wobble).
    """
    finite = torch.where(torch.isfinite(scores_HK.value), scores_HK.value.abs(), 0.0)
    log_sum = log_k + wobble + arith.growth(scores_HK.value.shape[-1] + 4)
    largest = finite.amax(-1, keepdim=True) + wobble + log_sum
    return arith.u * largest + 2.0 * arith.u * (arith.log_ulp + 1.0) * log_sum


def _weights(scores_HK: Approx, arith: Arithmetic, form: SoftmaxForm, shift: Tensor | float = 0.0) -> _Weights:
    live = scores_HK.value != -math.inf
    top = scores_HK.value.amax(-1, keepdim=True)
    top = torch.where(torch.isfinite(top), top, 0.0)
    distance = torch.where(live, top - scores_HK.value, 0.0)
    weight = torch.where(live, torch.exp(-distance), 0.0)
    moved = torch.expm1(_argument_error(scores_HK, distance, arith, form) + shift)
    exps = (1.0 + 2.0 * arith.exp_ulp * arith.u) ** (1 + form.rescales + (form.splits > 1))
    underflow = (2.0 * arith.exp_ulp + 1.0) * arith.eta_mul
    err = torch.where(live, weight * ((1.0 + moved) * exps - 1.0) + underflow, 0.0)
    return _Weights(Approx(weight, torch.where(torch.isnan(err), math.inf, err)), top, live)


def attend(scores_HK: Approx, v_KC: Approx, arith: Arithmetic, form: SoftmaxForm = PLAIN) -> tuple[Approx, Approx]:
    """softmax(scores) V [..., H, C] before rounding to storage, and the natural-log LSE [..., H]; ideal weights as
    reference.
    """
    scores_HK, v_KC = arith.read(scores_HK), arith.read(v_KC)
    w = _weights(scores_HK, arith, form)
    sum_H, sum_err_H = _denominator(w, arith, form)
    product, product_err = _numerator(w, sum_H + sum_err_H, v_KC, scores_HK, arith, form)
    some = sum_H > 0
    out = torch.where(some, product / sum_H, 0.0)
    err = (product_err + out.abs() * sum_err_H) / (sum_H - sum_err_H)
    own = (1.0 + arith.u) * (1.0 + 2.0 * arith.rcp_ulp * arith.u) - 1.0
    err = err + (out.abs() + err) * own + _output_underflow(out, v_KC, arith, form)
    err = torch.where(sum_H > sum_err_H, err, math.inf)
    return with_slack(out, torch.where(some, err, 0.0)), _lse(w, sum_H, sum_err_H, scores_HK, arith, form)


def _denominator(w: _Weights, arith: Arithmetic, form: SoftmaxForm) -> tuple[Tensor, Tensor]:
    n = w.p.value.shape[-1]
    stored = _storage_error(w, form, 1.0) if form.sum_rounded else torch.zeros_like(w.p.err)
    spread = w.p.err + stored
    growth = arith.growth(n + form.rescales + (4 if form.splits > 1 else 0))
    plain = w.p.value.sum(-1, keepdim=True)
    err = spread.sum(-1, keepdim=True)
    return plain, err + growth * (plain + err) + n * arith.eta_add


def _output_underflow(out: Tensor, v_KC: Approx, arith: Arithmetic, form: SoftmaxForm) -> Tensor:
    """Underflows after the division, hence not divided by the sum: quotient, partial outputs, normalised weights
    times V.
    """
    merged = 2 * form.splits if form.splits > 1 else 0
    n = v_KC.value.shape[-2] if form.normalise_first else 0
    units = 2.0 * (1.0 + out.abs()) + merged + n * (1.0 + v_KC.high.amax(-2, keepdim=True))
    return (arith.eta_mul + arith.eta_add) * units


def _storage_error(w: _Weights, form: SoftmaxForm, sum_H: Tensor | float) -> Tensor:
    """Rounding of each weight to p_format: relative u / (1 + u), and half its subnormal spacing on the scale where it
    is stored.
    """
    if form.p_format is None:
        return torch.zeros_like(w.p.err)
    unit = form.p_format.u / (1.0 + form.p_format.u)
    floor = form.p_format.underflow * (sum_H if form.normalise_first else 1.0)
    return torch.where(w.live, unit * w.p.high + floor, 0.0)


def _numerator(
    w: _Weights, sum_H: Tensor, v_KC: Approx, scores_HK: Approx, arith: Arithmetic, form: SoftmaxForm
) -> tuple[Tensor, Tensor]:
    """Sum of weights times values, and its error; under `delta` the roundings of P add up in quadrature (times
    lambda).
    """
    n = w.p.value.shape[-1]
    quotients = int(form.normalise_first) + int(form.splits > 1)
    own = ((1.0 + arith.u) ** 2 * (1.0 + 2.0 * arith.rcp_ulp * arith.u)) ** quotients - 1.0
    common = torch.zeros_like(sum_H)
    if form.splits > 1:  # the merge divides by exp(LSE), whose own rounding no denominator repeats
        log_k = math.log(max(n, 1)) + form.lazy
        wobble = scores_HK.err.amax(-1, keepdim=True)
        common = torch.expm1(_lse_rounding(scores_HK, wobble, log_k, arith))
    spread = w.p.err + w.p.high * ((1.0 + own) * (1.0 + common) - 1.0)
    stored = _storage_error(w, form, sum_H)
    growth = arith.growth(n + form.rescales + (4 if form.splits > 1 else 0))
    magnitude = (w.p.value + spread + stored) @ v_KC.high
    known = w.p.value @ v_KC.value.abs()
    underflow = (
        (n + form.rescales + form.splits) * (arith.eta_mul + arith.eta_add) * (1.0 + v_KC.high.amax(-2, keepdim=True))
    )
    value = w.p.value @ v_KC.value
    underflow = torch.where((1.0 + growth) * magnitude > arith.acc.max, math.inf, underflow)  # overflow
    if arith.delta is None:
        return value, growth * magnitude + (magnitude - known).clamp(min=0.0) + underflow
    settled = (w.p.value + spread) @ v_KC.high - known
    random = torch.minimum(arith.lam * (stored.square() @ v_KC.high.square()).sqrt(), stored @ v_KC.high)
    return value, growth * magnitude + settled.clamp(min=0.0) + random + underflow


def _lse(w: _Weights, sum_H: Tensor, err_H: Tensor, scores_HK: Approx, arith: Arithmetic, form: SoftmaxForm) -> Approx:
    value = w.top + sum_H.log()
    wobble = scores_HK.err.amax(-1, keepdim=True)
    log_k = math.log(max(w.p.value.shape[-1], 1)) + form.lazy
    err = -torch.log1p(-err_H / sum_H) + _lse_rounding(scores_HK, wobble, log_k, arith)
    return with_slack(value.squeeze(-1), torch.where(sum_H > err_H, err, math.inf).squeeze(-1))


def attend_like(
    scores_HK: Approx, v_KC: Approx, arith: Arithmetic, p_format: Format, *, normalise_first: bool = False
) -> Approx:
    """As `attend` in one pass over the keys, against the value with simulated-rounded weights. A row needs a key.

    Unless they are normalised, stored weights depend on the computed maximum, whose error then joins every exponent.
    """
    if normalise_first:
        stored = hull(*(p_format.round(part) for part in _share_ends(scores_HK, arith)))
        return matmul(stored, v_KC, arith)
    w = _weights(scores_HK, arith, SoftmaxForm(p_format=p_format), shift=scores_HK.err.amax(-1, keepdim=True))
    sum_H = total(w.p, arith)
    divisor = Approx(sum_H.value.unsqueeze(-1), sum_H.err.unsqueeze(-1))
    return div(matmul(round_like(w.p, p_format), v_KC, arith), divisor, arith)


def shares(scores_HK: Approx, arith: Arithmetic) -> Approx:
    """Normalised weights before they are stored; finite for every finite error of the scores. A row needs a key."""
    return hull(*_share_ends(scores_HK, arith))


def _share_ends(scores_HK: Approx, arith: Arithmetic) -> tuple[Tensor, Tensor, Tensor]:
    """Value, smallest and largest share. A share rises with its own score and falls with every other one, so its
    extremes lie in two corners of the box of scores, whatever the errors.
    """
    n = scores_HK.value.shape[-1]
    top = scores_HK.value.amax(-1, keepdim=True)
    distance = torch.where(scores_HK.value == -math.inf, 0.0, top - scores_HK.value)
    own = _argument_error(scores_HK, distance, arith, PLAIN)
    own = own + 2.0 * arith.exp_ulp * arith.u * (1.0 + 4.0 * arith.exp_ulp * arith.u)
    low, high = torch.exp(scores_HK.value - own - top), torch.exp(scores_HK.value + own - top)
    lost = n * 2.0**-52  # of a sum in float64
    least = low.sum(-1, keepdim=True) * (1.0 - lost) - low
    most = high.sum(-1, keepdim=True) * (1.0 + lost) - high
    quotient = (1.0 + arith.u) * (1.0 + 2.0 * arith.rcp_ulp * arith.u) / (1.0 - arith.growth(n)) - 1.0
    underflow = torch.where(scores_HK.value == -math.inf, 0.0, 4.0 * (n + 1) * (arith.exp_ulp + 1.0) * arith.eta_mul)
    smallest = (low / (low + most.clamp(min=0.0)) * (1.0 - quotient) - underflow).clamp(min=0.0)
    largest = high / (high + least.clamp(min=0.0)) * (1.0 + quotient) + underflow
    return torch.softmax(scores_HK.value, -1), smallest, largest
