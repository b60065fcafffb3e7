"""The lightning indexer's score with error bounds.

Contract: as in `arith`. Legend: T tokens, J indexer heads, I head width, S keys. Projections, norm, RoPE, Hadamard and
quantisation of q and k are the stages of `linear`, `norm`, `rope` and `quant`; their pairs enter here.
Source: the DeepSeek-V3.2 report, equation 1.
"""

from __future__ import annotations

import torch

from dsv32_ref.bounds.arith import Approx, Arithmetic, hull, with_slack
from dsv32_ref.bounds.elementary import mul
from dsv32_ref.bounds.linear import linear, matmul


def relu(x: Approx) -> Approx:
    """max(x, 0): no rounding, and no error where the whole interval is negative."""
    return hull(*(part.clamp(min=0.0) for part in (x.value, x.value - x.err, x.value + x.err)))


def head_weights(x_TM: Approx, weight_JM: Approx, q_scale_TJ: Approx, head_width: int, arith: Arithmetic) -> Approx:
    """Weight of each head [T, J]: x W^T J^-0.5 q_scale I^-0.5. Two rounded constants and two products: four
    roundings.
    """
    plain = linear(x_TM, weight_JM, arith, roundings=4)
    factor = float(weight_JM.value.shape[0] * head_width) ** -0.5
    return mul(with_slack(plain.value * factor, plain.err * factor), q_scale_TJ, arith)


def index_scores(q_TJI: Approx, w_TJ: Approx, k_SI: Approx, k_scale_S: Approx, arith: Arithmetic) -> Approx:
    """k_scale(s) sum_j w(t, j) max(q(t, j) . k(s), 0), [T, S], before any mask.

    k_scale may be applied inside or outside the sum (it is positive), at the cost of one rounding per term.
    """
    keys = k_SI.transposed()
    hits = relu(matmul(q_TJI, Approx(keys.value.unsqueeze(0), keys.err.unsqueeze(0)), arith))
    row = Approx(w_TJ.value.unsqueeze(1), w_TJ.err.unsqueeze(1))
    total_TS = matmul(row, hits, arith, roundings=1)
    shape = torch.Size((q_TJI.value.shape[0], k_SI.value.shape[0]))
    outside = mul(total_TS.reshape(*shape), k_scale_S, arith)
    # Inside the sum the scaled logit may underflow before w multiplies it, and so may that product.
    inside = 2.0 * (arith.eta_mul + arith.eta_add) * (1.0 + w_TJ.high).sum(-1, keepdim=True)
    return with_slack(outside.value, outside.err + inside)
