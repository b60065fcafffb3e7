"""Generated inputs and honest low-precision summation for the tests of the bounds."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

KINDS = ("normal", "cancelling", "outlier", "subnormal", "zeros", "offset", "mixed", "near-tie")


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def rows(kind: str, count: int, n: int, gen: torch.Generator) -> Tensor:
    """fp32 rows [count, n] of one kind of difficulty."""
    x = torch.randn(count, n, generator=gen)
    if kind == "cancelling":
        half = n // 2
        x[:, half : 2 * half] = -x[:, :half] * (1 + 1e-6 * torch.randn(count, half, generator=gen))
    elif kind == "outlier":
        x.scatter_(1, torch.randint(n, (count, 1), generator=gen), 3e4)
    elif kind == "subnormal":
        x = x * 2.0**-140
    elif kind == "zeros":
        x = torch.where(torch.rand(count, n, generator=gen) < 0.9, 0.0, x)
        x[0] = 0.0
    elif kind == "offset":
        x = x * 1e-3 + 100.0
    elif kind == "mixed":
        x = x * torch.exp2(torch.randint(-60, 40, (count, n), generator=gen).float())
    elif kind == "near-tie":  # half-way between bf16 neighbours, give or take an fp32 ulp
        grid = x.bfloat16().float()
        x = grid * (1 + 2.0**-8) * (1 + 2.0**-23 * torch.randint(-1, 2, (count, n), generator=gen))
    return x


def every_kind(count: int, n: int, gen: torch.Generator) -> Tensor:
    """count rows of each kind, [8 count, n]."""
    return torch.cat([rows(kind, count, n, gen) for kind in KINDS])


def forward_sum(terms: Tensor) -> Tensor:
    """One after the other, in the dtype of the terms."""
    total = torch.zeros_like(terms[..., 0])
    for i in range(terms.shape[-1]):
        total = total + terms[..., i]
    return total


def pairwise_sum(terms: Tensor) -> Tensor:
    while terms.shape[-1] > 1:
        odd = terms[..., -1:] if terms.shape[-1] % 2 else terms[..., :0]
        even = terms[..., : terms.shape[-1] // 2 * 2]
        terms = torch.cat([even[..., 0::2] + even[..., 1::2], odd], -1)
    return terms[..., 0]


def blocked_sum(terms: Tensor, block: int = 32) -> Tensor:
    pad = torch.nn.functional.pad(terms, (0, -terms.shape[-1] % block))
    return forward_sum(forward_sum(pad.reshape(*terms.shape[:-1], -1, block)))


def summation_orders(terms: Tensor, gen: torch.Generator) -> Iterator[Tensor]:
    """The same terms summed in seven orders, each in the dtype of the terms."""
    yield forward_sum(terms)
    yield forward_sum(terms.flip(-1))
    yield forward_sum(terms[..., torch.randperm(terms.shape[-1], generator=gen)])
    yield forward_sum(terms.gather(-1, terms.abs().argsort(-1, descending=True)))
    yield pairwise_sum(terms)
    yield blocked_sum(terms)
    yield terms.sum(-1)


def worst_row(n: int, u: float) -> Tensor:
    """1, u, u, ... [n]: added one after the other every u is lost in a tie to even."""
    x = torch.full((n,), u, dtype=torch.float64)
    x[0] = 1.0
    return x


def exact_dot(a: Tensor, b: Tensor) -> Tensor:
    """Correctly rounded float64 dot products of fp32 rows (products of two fp32 numbers are exact in float64)."""
    products = a.double() * b.double()
    return torch.tensor([math.fsum(row) for row in products.tolist()], dtype=torch.float64)


def nudge(x: Tensor, ulps: int, up: bool = True) -> Tensor:
    """x moved by whole fp32 ulps."""
    for _ in range(ulps):
        x = torch.nextafter(x, torch.full_like(x, math.inf if up else -math.inf))
    return x
