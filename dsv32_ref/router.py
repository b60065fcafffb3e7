"""The mixture's router: sigmoid scores, a bias that only steers the choice, and a choice limited to the best groups.

Legend: T tokens, M model width, E experts, G groups, K chosen experts.
Source: DeepSeek-V3 report (arXiv 2412.19437), section 2.1.2, and `Gate` of the inference code: fp32 throughout.
Ties go to the lower group and the lower expert.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv32_ref.config import Config


@dataclass(frozen=True, kw_only=True)
class GateWeights:
    """Router matrix [E, M] and correction bias [E], both held in fp32 or wider."""

    weight: Tensor
    bias: Tensor


def gate_logits(x_TM: Tensor, w: GateWeights) -> Tensor:
    """x W^T [T, E], never rounded: two logits that differ by 2^-9 must stay apart."""
    return x_TM @ w.weight.T


def choose_experts(logits_TE: Tensor, bias_E: Tensor, config: Config) -> Tensor:
    """The K experts of each token, [T, K] int64, by descending biased score.

    A group is worth the sum of its two best biased scores; experts outside the best groups count as -inf (not 0: a
    biased score may be negative).

    Raises:
        ValueError: a wrong shape, or a NaN.
    """
    _check(logits_TE, bias_E, config)
    biased_TE = logits_TE.sigmoid() + bias_E
    grouped_TGe = torch.unflatten(biased_TE, -1, (config.n_expert_groups, -1))
    group_TG = grouped_TGe.topk(min(2, grouped_TGe.shape[-1]), -1).values.sum(-1)
    kept_TG = group_TG.sort(dim=-1, descending=True, stable=True).indices[:, : config.n_limited_groups]
    outside_TG = torch.ones_like(group_TG, dtype=torch.bool).scatter_(1, kept_TG, False)
    masked_TE = grouped_TGe.masked_fill(outside_TG[..., None], -torch.inf).flatten(-2)
    return masked_TE.sort(dim=-1, descending=True, stable=True).indices[:, : config.n_activated_experts]


def expert_weights(logits_TE: Tensor, idx_TK: Tensor, config: Config) -> Tensor:
    """The weight of each chosen expert, [T, K]: its UNBIASED score, renormalised to sum to `route_scale`.

    Gathered from the scores and never recovered as (score + bias) - bias, which cancels to 0 for a bias near 12.
    """
    scores_TK = logits_TE.sigmoid().gather(1, idx_TK)
    return scores_TK / scores_TK.sum(-1, keepdim=True) * config.route_scale


def _check(logits_TE: Tensor, bias_E: Tensor | None, config: Config) -> None:
    if bias_E is None:
        raise ValueError("gate.bias is missing; without e_score_correction_bias the choice is another function")
    if logits_TE.shape[-1] != config.n_routed_experts or bias_E.shape != (config.n_routed_experts,):
        shapes = f"gate_logits {tuple(logits_TE.shape)} and gate.bias {tuple(bias_E.shape)}"
        raise ValueError(f"{shapes} do not belong to {config.n_routed_experts} experts")
    for name, values in (("gate_logits", logits_TE), ("gate.bias", bias_E)):
        if bool(values.isnan().any()):
            raise ValueError(f"{name} holds NaN; the choice of experts is undefined")
