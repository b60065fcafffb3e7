"""A value in real arithmetic and how far a computed one may lie from it, for the stages that tensor parallelism cuts.

TP 1 and TP N evaluate one function with sums in other orders and other roundings; each lies within its own bound of the
real value, so they lie within the sum of both of each other. Bounds are first-order running bounds made rigorous by
gamma_n = n u / (1 - n u) (Higham, Accuracy and Stability, lemma 3.1), in fp64. Underflow is not covered: every value
here is far above 2^-126. The reference has bounds of its own, which this floor must not see.

Legend: T rows, N input width, O output width, H heads, K attended tokens, D latent + RoPE, C latent.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

U32, U16, U8 = 2.0**-24, 2.0**-8, 2.0**-4
"""Unit roundoffs of fp32, bf16 and e4m3."""
TINY8, LARGEST8 = 2.0**-10, 448.0
"""Half of e4m3's smallest step, and its largest value."""
SILU_SLOPE = 1.1
"""Largest slope of x sigmoid(x): 1.0998 at x = 2.4."""


def gamma(n: int) -> float:
    """n u / (1 - n u) for fp32."""
    return n * U32 / (1 - n * U32)


@dataclass(frozen=True)
class Bounded:
    """`value` fp64, and `err` >= |computed - value|."""

    value: Tensor
    err: Tensor

    @property
    def reach(self) -> Tensor:
        """The largest magnitude that the computed value may have."""
        return self.value.abs() + self.err

    def stored(self) -> Bounded:
        """Rounded to bf16."""
        return Bounded(self.value, self.err + U16 * self.reach)

    def quantised(self, scale: float) -> Bounded:
        """e4m3 with a given fp32 scale, dequantised; what lies beyond 448 scales is lost.

        The reciprocal, two products and a rounding to fp32 of the result are four roundings at most.
        """
        high = self.reach / scale * (1 + gamma(4))
        step = U8 * high.clamp(max=LARGEST8) + TINY8 + (high - LARGEST8).clamp(min=0)
        return Bounded(self.value, self.err + scale * step + gamma(4) * self.reach)

    def linear(self, weight_ON: Tensor) -> Bounded:
        """x W^T with N-term fp32 sums in any order; weights [..., O, N] are broadcast over leading axes."""
        w = weight_ON.double()
        err = self.err @ w.abs().mT + gamma(w.shape[-1]) * (self.reach @ w.abs().mT)
        return Bounded(self.value @ w.mT, err)

    def columns(self, rank: int, world: int) -> Bounded:
        """One rank's part of the last axis."""
        return Bounded(self.value.chunk(world, -1)[rank], self.err.chunk(world, -1)[rank])


def exact(x: Tensor) -> Bounded:
    """What both sides were given."""
    return Bounded(x.double(), torch.zeros_like(x, dtype=torch.float64))


def total(parts: list[Bounded]) -> Bounded:
    """An fp32 sum."""
    err = sum((p.err for p in parts), torch.zeros(())) + gamma(len(parts) - 1) * sum(p.reach for p in parts)
    return Bounded(sum((p.value for p in parts), torch.zeros(())), err)


def weighted(x_TKO: Bounded, weights_TK: Tensor) -> Bounded:
    """sum_k weight x_k in fp32, [T, O]: a product and K - 1 additions each."""
    w = weights_TK.double()[..., None]
    err = (w * x_TKO.err).sum(1) + gamma(w.shape[1]) * (w * x_TKO.reach).sum(1)
    return Bounded((w * x_TKO.value).sum(1), err)


def gated(gate: Bounded, up: Bounded) -> Bounded:
    """silu(gate) up, rounded to bf16.

    In fp32 the sigmoid takes an exponential (within an ulp, two roundings), an addition and a division; with the two
    products that is six relative roundings.
    """
    silu = torch.nn.functional.silu(gate.value)
    silu_err = SILU_SLOPE * gate.err
    err = silu.abs() * up.err + silu_err * up.reach + gamma(6) * (silu.abs() + silu_err) * up.reach
    return Bounded(silu * up.value, err).stored()


def summed(parts: list[Bounded]) -> Bounded:
    """What the ranks' bf16 summands give: an fp32 sum rounded once; of one rank, the summand itself."""
    return parts[0] if len(parts) == 1 else total(parts).stored()


def turned(x: Bounded, cos: Tensor, sin: Tensor) -> Bounded:
    """RoPE on the pairs (2i, 2i + 1) of the last axis with a given fp32 table, rounded to bf16.

    Two products and an addition: two relative roundings of each term.
    """
    a, b, ea, eb = x.value[..., 0::2], x.value[..., 1::2], x.err[..., 0::2], x.err[..., 1::2]
    cos, sin = cos.double(), sin.double()
    value = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
    err = torch.stack([ea * cos.abs() + eb * sin.abs(), ea * sin.abs() + eb * cos.abs()], -1).flatten(-2)
    size_a, size_b = a.abs() + ea, b.abs() + eb
    terms = torch.stack([size_a * cos.abs() + size_b * sin.abs(), size_a * sin.abs() + size_b * cos.abs()], -1)
    return Bounded(value, err + gamma(2) * terms.flatten(-2)).stored()


def attended(q_HD: Tensor, kv_KD: Tensor, latent: int, scale: float, *, fp8: bool = False) -> Bounded:
    """Decode attention of one row [H, C], by a kernel that keeps fp32 scores and rounds P to bf16, or to e4m3.

    A score is off by at most delta = gamma(D + 1) scale sum |q k|, and so is the maximum. An unnormalised probability
    therefore has relative error e = expm1(2 delta + 4 u + u spread) (exponential two roundings, difference one, u of
    its argument), its sum e + gamma(K), its rounding to bf16 U16, its product with V gamma(K), the division and scaling
    three. Splits, at most K of them, are merged with weights exp(lse_i - lse), each lse off by
    eta = delta + e + gamma(K + 4) + 2 u |lse|: a factor exp(2 eta) (1 + gamma(K + 4)). All relative to sum p |v|.

    With `fp8`, q and kv are the dequantised values. Their two scales are multiplied into the scores, and q was rounded
    when it was dequantised: gamma(D + 4). The scale of V costs one more rounding. P of at most 1 is rounded to e4m3,
    U8 of it or half of the smallest step; the latter is TINY8 of the largest probability of its split, which is at most
    the largest of the row.
    """
    q, kv = q_HD.double(), kv_KD.double()
    K, D = kv.shape
    scores = q @ kv.T * scale
    p, v = scores.softmax(-1), kv[:, :latent]
    delta = gamma(D + (4 if fp8 else 1)) * scale * (q.abs() @ kv.abs().T).amax(-1)
    e = torch.expm1(2 * delta + 4 * U32 + U32 * (scores.amax(-1) - scores.amin(-1)))
    eta = delta + e + gamma(K + 4) + 2 * U32 * scores.logsumexp(-1).abs()
    others = (1 + e) * (1 + gamma(K + (4 if fp8 else 3))) / (1 - e - gamma(K))
    others = others * torch.exp(2 * eta) * (1 + gamma(K + 4))
    err = (others * (1 + (U8 if fp8 else U16)) - 1)[:, None] * (p @ v.abs())
    if fp8:
        err = err + (others * TINY8 * p.amax(-1))[:, None] * v.abs().sum(0)
    return Bounded(p @ v, err).stored()
