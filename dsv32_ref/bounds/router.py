"""Router scores and expert weights with error bounds.

Contract: as in `arith`. Legend: T tokens, M model width, E experts, G groups, K chosen experts. bf16 logits or a bf16
bias are `round_to` (against the ideal) or `round_like` (against the simulated value) on the pair, before these
functions. The choice itself is discrete and has no error bound: see `margins`. Source: DeepSeek-V3 report (arXiv
2412.19437), 2.1.2.
"""

from __future__ import annotations

from torch import Tensor

from dsv32_ref.bounds.arith import Approx, Arithmetic, hull, with_slack
from dsv32_ref.bounds.elementary import add, div, scale_by, sigmoid
from dsv32_ref.bounds.linear import linear, total


def logits(x_TM: Approx, weight_EM: Approx, arith: Arithmetic) -> Approx:
    """x W^T [T, E]."""
    return linear(x_TM, weight_EM, arith)


def router_scores(logits_TE: Approx, bias_E: Approx, arith: Arithmetic) -> tuple[Approx, Approx]:
    """The unbiased scores sigmoid(logits) and the biased ones that steer the choice, [T, E] each."""
    scores_TE = sigmoid(logits_TE, arith)
    return scores_TE, add(scores_TE, bias_E, arith)


def group_scores(biased_TE: Approx, groups: int, arith: Arithmetic) -> Approx:
    """Sum of the two largest biased scores of each group [T, G]: non-decreasing in every score, so two ends bound it.

    Raises ValueError where the groups do not divide the experts.
    """
    if biased_TE.value.shape[-1] % groups:
        raise ValueError(f"groups: {groups} do not divide {biased_TE.value.shape[-1]} experts")
    low, high = biased_TE.value - biased_TE.err, biased_TE.value + biased_TE.err
    inner = hull(*(best_two(part, groups) for part in (biased_TE.value, low, high)))
    return with_slack(inner.value, inner.err + arith.rounding(inner.high))


def best_two(scores_TE: Tensor, groups: int) -> Tensor:
    """Sum of the two largest of each group, [T, G]."""
    grouped = scores_TE.reshape(*scores_TE.shape[:-1], groups, -1)
    best: Tensor = grouped.topk(min(2, grouped.shape[-1]), -1).values
    return best.sum(-1)


def expert_weights(scores_TE: Approx, chosen_TK: Tensor, route_scale: float, arith: Arithmetic) -> Approx:
    """route_scale * s_k / sum(s) over the chosen experts [T, K], from the unbiased scores.

    An epsilon of 1e-20 in the sum, which some engines add, is within err where the sum exceeds 2^-42.
    """
    chosen = Approx(scores_TE.value.gather(-1, chosen_TK), scores_TE.err.gather(-1, chosen_TK))
    total_T = total(chosen, arith)
    share = div(chosen, Approx(total_T.value.unsqueeze(-1), total_T.err.unsqueeze(-1)), arith)
    return scale_by(share, route_scale, arith)
