"""The gated MLP of dense layers and experts, and the mixture, with error bounds.

Contract: as in `arith`. Legend: T tokens, M model width, F inner width, K chosen experts. `storage` is the format in
which an implementation keeps W1 x, W3 x, their product and the output (None: that of the arithmetic).
Source: DeepSeek-V3.2-Exp inference/model.py, MLP, Expert and MoE.
"""

from __future__ import annotations

import torch

from dsv32_ref.bounds.arith import Approx, Arithmetic, Format, exact, round_to
from dsv32_ref.bounds.elementary import mul, silu
from dsv32_ref.bounds.linear import linear, matmul


def mlp(
    x_TM: Approx,
    w1_FM: Approx,
    w2_MF: Approx,
    w3_FM: Approx,
    arith: Arithmetic,
    *,
    storage: Format | None = None,
    roundings: int = 0,
) -> Approx:
    """W2 (silu(W1 x) * W3 x), [T, M]. `roundings`: products with scales per term of each linear (fp8: 2)."""
    gate = _stored(linear(x_TM, w1_FM, arith, roundings=roundings), storage)
    up = _stored(linear(x_TM, w3_FM, arith, roundings=roundings), storage)
    inner = _stored(mul(silu(gate, arith), up, arith), storage)
    return _stored(linear(inner, w2_MF, arith, roundings=roundings), storage)


def combine(outputs_TKM: Approx, weights_TK: Approx, shared_TM: Approx | None, arith: Arithmetic) -> Approx:
    """sum_k weight_k output_k + shared [T, M], in any order, before the rounding to storage."""
    parts, weights = outputs_TKM, weights_TK
    if shared_TM is not None:
        parts = _join(parts, Approx(shared_TM.value.unsqueeze(-2), shared_TM.err.unsqueeze(-2)), -2)
        weights = _join(weights, exact(torch.ones_like(weights_TK.value[..., :1])), -1)
    row = Approx(weights.value.unsqueeze(-2), weights.err.unsqueeze(-2))
    summed = matmul(row, parts, arith)
    return Approx(summed.value.squeeze(-2), summed.err.squeeze(-2))


def _join(a: Approx, b: Approx, dim: int) -> Approx:
    return Approx(torch.cat([a.value, b.value], dim), torch.cat([a.err, b.err], dim))


def _stored(x: Approx, storage: Format | None) -> Approx:
    return x if storage is None else round_to(x, storage)
