"""Sums, dot products and matrix products with error bounds, for any order of summation.

Contract: as in `arith`. Shapes: a [..., m, n] and b [..., n, p] contract over n, x [..., n] and weight [o, n] as a
linear layer. `depth` is the height of the summation tree (default: n, a bare loop over n products, which covers every
order); give a smaller one only for an implementation whose tree is known, e.g. 7 for a 128-point butterfly.
`roundings` counts further multiplicative roundings per term: scales applied to partial sums, each at most 1 or at most
the largest operand (as block scales are).
Source: Higham, Accuracy and Stability, section 3.1; Hallman and Ipsen, arXiv 2107.01604 (trees, martingales).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dsv32_ref.bounds.arith import Approx, Arithmetic, exact


def matmul(a: Approx, b: Approx, arith: Arithmetic, *, depth: int | None = None, roundings: int = 0) -> Approx:
    """a @ b. Raises ValueError where the inner dimensions differ."""
    if a.value.shape[-1] != b.value.shape[-2]:
        raise ValueError(f"b: inner dimension {b.value.shape[-2]} differs from a's {a.value.shape[-1]}")
    return _contract(torch.matmul, a, b, arith, a.value.shape[-1], depth, roundings)


def linear(x: Approx, weight: Approx, arith: Arithmetic, *, depth: int | None = None, roundings: int = 0) -> Approx:
    """x @ weight^T, the weight stored [out, in]."""
    if x.value.dim() == 1:
        return matmul(x.reshape(1, -1), weight.transposed(), arith, depth=depth, roundings=roundings).reshape(-1)
    return matmul(x, weight.transposed(), arith, depth=depth, roundings=roundings)


def dot(a: Approx, b: Approx, arith: Arithmetic, *, depth: int | None = None, roundings: int = 0) -> Approx:
    """Sum over the last dimension of a * b."""
    return _contract(_row_dot, a, b, arith, a.value.shape[-1], depth, roundings)


def total(x: Approx, arith: Arithmetic, *, depth: int | None = None) -> Approx:
    """Sum over the last dimension: at most n - 1 roundings on the way of every term."""
    x = arith.read(x)
    n = x.value.shape[-1]
    growth = arith.growth(max(n - 1, 0) if depth is None else depth)
    magnitude, plain = x.high.sum(-1), x.value.abs().sum(-1)
    err = growth * magnitude + (magnitude - plain) + n * arith.eta_add * (1.0 + growth)
    return arith.result(x.value.sum(-1), err, (1.0 + growth) * magnitude)


def _row_dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(-1)


def _contract(
    product: Callable[[Tensor, Tensor], Tensor],
    a: Approx,
    b: Approx,
    arith: Arithmetic,
    n: int,
    depth: int | None,
    roundings: int,
) -> Approx:
    """(1 + growth) (|a| + ea)(|b| + eb) - |a||b|: rounding and input errors together, plus n underflows."""
    a, b = arith.read(a), arith.read(b)
    growth = arith.growth((n if depth is None else depth + 1) + roundings)
    plain = (a.value.abs(), b.value.abs())
    high = tuple(part + x.err if bool(x.err.any()) else part for part, x in zip(plain, (a, b), strict=True))
    magnitude = product(*high)
    exactly = high[0] is plain[0] and high[1] is plain[1]
    propagated = torch.zeros_like(magnitude) if exactly else magnitude - product(*plain)
    partial = roundings * partial_underflow(a, b, arith) if roundings else 0.0
    underflow = n * (1.0 + growth) * (arith.eta_mul + arith.eta_add + partial)
    err = growth * magnitude + propagated.clamp(min=0.0) + underflow
    return arith.result(product(a.value, b.value), err, (1.0 + growth) * magnitude)


def partial_underflow(a: Approx, b: Approx, arith: Arithmetic) -> Tensor:
    """Underflow of a product with a scale that further factors multiply: one operand, or a scale no larger than one."""
    empty = a.value.numel() == 0 or b.value.numel() == 0
    largest = torch.zeros((), dtype=torch.float64) if empty else a.high.max() + b.high.max()
    return (arith.eta_mul + arith.eta_add) * (1.0 + largest)


def hadamard(x: Approx, arith: Arithmetic, *, depth: int | None = None) -> Approx:
    """Orthonormal Sylvester-Hadamard transform of the last dimension (a power of two), scaled by n^-0.5 once.

    The matrix holds signs only, so products are exact; the scale costs its own rounding and that of the constant.
    Raises ValueError where the dimension is not a power of two.
    """
    n = x.value.shape[-1]
    if n & (n - 1) or n == 0:
        raise ValueError(f"x: last dimension {n} is not a power of two; a Sylvester matrix needs one")
    signs = torch.ones(1, 1, dtype=torch.float64)
    while signs.shape[0] < n:
        signs = torch.cat([torch.cat([signs, signs], 1), torch.cat([signs, -signs], 1)], 0)
    return matmul(x, exact(signs * n**-0.5), arith, depth=depth, roundings=2)
