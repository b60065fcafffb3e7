"""Router kernels behind AITER's signatures (ROCm/aiter e404860): three kernels with three tie rules.

`biased_grouped_topk` runs an optimised kernel for DeepSeek-V3's shape (256 experts, 8 groups of which 4, 8 chosen), a
generic one for other shapes, and from `fused_gate_threshold()` tokens on `moe_fused_gate`, which never applies the
routed scaling factor. All compute in fp32. The two HIP kernels re-read the bytes of the bias in the dtype of the
logits; `require_equal_dtypes` is the check that they lack.

Legend: T tokens, E experts, G groups, K chosen experts, N candidates.
"""

from __future__ import annotations

import math
import os

import torch
from torch import Tensor

from dsv32_fast.kernels.emulated.device import current_device
from dsv32_fast.kernels.emulated.memory import OutOfBoundsError, beyond_view

DEEPSEEK_SHAPE = (256, 8, 4, 8)
"""Experts, groups, kept groups, chosen experts of the optimised kernel."""
_LOG2E = 1.4426950408889634
_LANES = 64
_ROW_ORDER = (15, 14, 13, 12, 8, 9, 10, 11, 0, 1, 2, 3, 7, 6, 5, 4)
"""Which of 16 lanes keeps its candidate in a tie of the generic kernel's cross-lane reduction, best first."""


def fused_gate_threshold() -> int:
    """The largest token count for which `biased_grouped_topk` runs a HIP kernel: 212 per compute unit."""
    return int(os.environ.get("CU_NUM", current_device().compute_units)) * 212


def biased_grouped_topk(
    gating_output: Tensor,
    correction_bias: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    num_expert_group: int,
    topk_group: int,
    need_renorm: bool,
    routed_scaling_factor: float = 1.0,
) -> None:
    """Choose experts by sigmoid(logit) + bias within the best groups; write weights and ids in place.

    Args:
        gating_output: fp32, fp16 or bf16 [T, E]; rows may be strided.
        correction_bias: [E], re-read in the dtype of `gating_output`.
        topk_weights: fp32 [T, K].
        topk_ids: int32 [T, K], with the same row stride.
        num_expert_group: G.
        topk_group: how many groups are kept, by the sum of their two best biased scores.
        need_renorm: divide the weights by their sum; `moe_fused_gate` accepts only True.
        routed_scaling_factor: factor on the weights. The optimised kernel ignores it without `need_renorm`, and
            `moe_fused_gate` always.

    Raises:
        TypeError, ValueError: an argument that the kernels do not take; the message names it.
        OutOfBoundsError: the bias has fewer bytes than the kernel reads.
    """
    tokens, experts = gating_output.shape
    if tokens <= fused_gate_threshold() or experts // num_expert_group > 32:
        biased_grouped_topk_hip(
            gating_output, correction_bias, topk_weights, topk_ids, num_expert_group, topk_group, need_renorm,
            routed_scaling_factor,
        )  # fmt: skip
        return
    if not need_renorm:
        raise ValueError(f"need_renorm must be True from {fused_gate_threshold() + 1} tokens on (moe_fused_gate)")
    moe_fused_gate(
        gating_output, correction_bias, topk_weights, topk_ids, num_expert_group, topk_group, topk_ids.shape[1], 0,
        routed_scaling_factor,
    )  # fmt: skip


def biased_grouped_topk_hip(
    gating_output: Tensor,
    correction_bias: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    num_expert_group: int,
    topk_grp: int,
    need_renorm: bool,
    routed_scaling_factor: float = 1.0,
) -> None:
    """The HIP kernels alone, whatever the token count; arguments and errors as for `biased_grouped_topk`."""
    experts, chosen = gating_output.shape[1], topk_ids.shape[1]
    _check(gating_output, topk_weights, topk_ids, num_expert_group, topk_grp)
    if num_expert_group not in (1, 2, 4, 8):
        raise ValueError(f"num_expert_group must be 1, 2, 4 or 8, not {num_expert_group}")
    if chosen > _LANES:
        raise ValueError(f"topk_ids: at most {_LANES} experts per token, not {chosen}")
    logits_TE, bias_E = gating_output.float(), _bias_as_read(correction_bias, gating_output)
    if (experts, num_expert_group, topk_grp, chosen) == DEEPSEEK_SHAPE:
        ids_TK, weights_TK = _optimised(logits_TE, bias_E, need_renorm, routed_scaling_factor)
    else:
        groups = num_expert_group, topk_grp
        ids_TK, weights_TK = _generic(logits_TE, bias_E, groups, chosen, need_renorm, routed_scaling_factor)
    topk_ids.copy_(ids_TK)
    topk_weights.copy_(weights_TK)


def moe_fused_gate(
    input: Tensor,  # noqa: A002 - AITER's name
    bias: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    num_expert_group: int,
    topk_group: int,
    topk: int,
    n_share_experts_fusion: int,
    routed_scaling_factor: float = 1.0,  # noqa: ARG001 - applied to fused shared experts only
) -> tuple[Tensor, Tensor]:
    """The kernel for large batches: sorted by biased score, ties to the lower id, weights always renormalised.

    Reads rows as if they were contiguous, whatever the row stride of `input`. A NaN logit counts as sigmoid 0. Of
    groups that tie at the cut the lower indices are dropped.

    Returns:
        `topk_weights` and `topk_ids`, written in place.

    Raises:
        TypeError, ValueError: an argument that the kernel does not take, or fused shared experts (not emulated).
    """
    _check(input, topk_weights, topk_ids, num_expert_group, topk_group)
    if n_share_experts_fusion:
        raise ValueError("n_share_experts_fusion: fused shared experts are not emulated; pass 0")
    if input.shape[1] // num_expert_group > 32:
        raise ValueError("num_expert_group: moe_fused_gate takes at most 32 experts per group")
    if topk != topk_ids.shape[1]:
        raise ValueError(f"topk is {topk}, but topk_ids has {topk_ids.shape[1]} columns")
    dense_TE = input.as_strided(input.shape, (input.shape[1], 1))
    logits_TE = dense_TE.float()
    scores_TE = torch.where(logits_TE.isnan(), 0.0, 1 / (1 + torch.exp(-logits_TE.double()).float()))
    biased_TE = scores_TE + _bias_as_read(bias, input)
    order_TG = _group_scores(biased_TE, num_expert_group).argsort(dim=1, stable=True)
    biased_TE = _mask_groups(biased_TE, order_TG[:, num_expert_group - topk_group :], num_expert_group)
    ids_TK = biased_TE.argsort(dim=1, descending=True, stable=True)[:, :topk]
    weights_TK = scores_TE.gather(1, ids_TK)
    topk_ids.copy_(ids_TK)
    topk_weights.copy_(weights_TK / weights_TK.sum(1, keepdim=True))
    return topk_weights, topk_ids


def require_equal_dtypes(gating_output: Tensor, correction_bias: Tensor) -> None:
    """Raise TypeError if the kernels would re-read the bytes of the bias in another dtype."""
    if gating_output.dtype != correction_bias.dtype:
        raise TypeError(
            f"correction_bias is {correction_bias.dtype} but gating_output is {gating_output.dtype}: "
            "the kernel re-reads its bytes in the latter; cast one of them"
        )


def _optimised(logits_TE: Tensor, bias_E: Tensor, renorm: bool, factor: float) -> tuple[Tensor, Tensor]:
    """The kernel for DeepSeek-V3's shape; ids come in candidate order, not sorted by weight."""
    experts, groups, kept, chosen = DEEPSEEK_SHAPE
    width = experts // groups
    biased_TE = _sigmoid(logits_TE) + bias_E
    biased_TE = torch.where(biased_TE.isnan(), -math.inf, biased_TE)
    slots_TG = _first_by_pivot(_group_scores(biased_TE, groups), kept)
    candidates_TN = (slots_TG[..., None] * width + torch.arange(width, device=slots_TG.device)).flatten(1)
    ids_TK = candidates_TN.gather(1, _first_by_pivot(biased_TE.gather(1, candidates_TN), chosen))
    weights_TK = biased_TE.gather(1, ids_TK) - bias_E[ids_TK]
    if renorm:
        pairs = weights_TK[:, 0::2] + weights_TK[:, 1::2]
        quads = pairs[:, 0::2] + pairs[:, 1::2]
        weights_TK = weights_TK * factor * (1 / (quads[:, :1] + quads[:, 1:]))
    return ids_TK, weights_TK


def _sigmoid(logits: Tensor) -> Tensor:
    """1 / (1 + 2^(-log2(e) x)), each step rounded to fp32; the kernels' exp2 and reciprocal are within an ulp of it."""
    exponent = (-_LOG2E * logits.double()).float()
    return 1 / (1 + torch.exp2(exponent.double()).float())


def _first_by_pivot(values_TN: Tensor, count: int) -> Tensor:
    """Positions of the values above the count-th largest, in order, then of those equal to it: the first `count`."""
    pivot_T1 = values_TN.topk(count, dim=1).values[:, -1:]
    rank_TN = torch.where(values_TN > pivot_T1, 0, torch.where(values_TN == pivot_T1, 1, 2))
    return rank_TN.argsort(dim=1, stable=True)[:, :count]


def _generic(
    logits_TE: Tensor, bias_E: Tensor, groups: tuple[int, int], chosen: int, renorm: bool, factor: float
) -> tuple[Tensor, Tensor]:
    """The kernel for other shapes: sorted by biased score, ties by lane; where no expert wins, the id is the slot's."""
    scores_TE = _sigmoid(logits_TE)
    biased_TE = scores_TE + bias_E
    ranked_TE = torch.where(biased_TE.isnan(), -math.inf, biased_TE)
    kept_TG = _group_scores(ranked_TE, groups[0]).argsort(dim=1, descending=True, stable=True)[:, : groups[1]]
    ranked_TE = _mask_groups(ranked_TE, kept_TG, groups[0])
    priority_E = _lane_priority(logits_TE.shape[1]).to(logits_TE.device)
    best = ranked_TE[:, priority_E].sort(dim=1, descending=True, stable=True)
    slot_K = torch.arange(chosen, device=logits_TE.device)
    ids_TK = torch.where(best.values[:, :chosen] == -math.inf, slot_K, priority_E[best.indices[:, :chosen]])
    weights_TK = scores_TE.gather(1, ids_TK)
    if not renorm:
        return ids_TK, weights_TK * factor
    total_T1 = weights_TK[:, :1]
    for slot in range(1, chosen):
        total_T1 = total_T1 + weights_TK[:, slot : slot + 1]
    return ids_TK, weights_TK * (factor / total_T1)


def _lane_priority(experts: int) -> Tensor:
    """Expert ids in the order in which the generic kernel prefers them in a tie."""
    vector = next(width for width in (4, 2, 1) if experts % width == 0)

    def key(expert: int) -> tuple[int, int, int]:
        lane = expert // vector % _LANES
        return -(lane // 16), _ROW_ORDER.index(lane % 16), expert

    return torch.tensor(sorted(range(experts), key=key))


def _group_scores(biased_TE: Tensor, groups: int) -> Tensor:
    """[T, G]: sum of the two best of each group."""
    best = _by_group(biased_TE, groups).topk(min(2, biased_TE.shape[1] // groups), dim=2).values
    return best.sum(2)


def _by_group(values_TE: Tensor, groups: int) -> Tensor:
    return values_TE.reshape(len(values_TE), groups, values_TE.shape[1] // groups)


def _mask_groups(biased_TE: Tensor, kept_TG: Tensor, groups: int) -> Tensor:
    dropped_TG = torch.ones(len(biased_TE), groups, dtype=torch.bool, device=biased_TE.device).scatter(
        1, kept_TG, False
    )
    return _by_group(biased_TE, groups).masked_fill(dropped_TG[..., None], -math.inf).flatten(1)


def _bias_as_read(bias: Tensor, gating: Tensor) -> Tensor:
    """fp32 [E]: the bytes of `bias` as the kernel reads them, in the dtype of the logits."""
    experts, dtype = gating.shape[1], gating.dtype
    if bias.dtype == dtype:
        return bias.float()
    stored = beyond_view(bias.view(torch.uint8))
    needed = experts * dtype.itemsize
    if stored.shape[0] < needed:
        raise OutOfBoundsError(
            f"correction_bias: {dtype} logits make the kernel read {needed} bytes of its {stored.shape[0]}"
        )
    return stored[:needed].clone().view(dtype).float()


def _check(gating: Tensor, weights: Tensor, ids: Tensor, groups: int, kept: int) -> None:
    if gating.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise TypeError(f"gating_output must be fp32, fp16 or bf16, not {gating.dtype}")
    if weights.dtype != torch.float32 or ids.dtype != torch.int32:
        raise TypeError(f"topk_weights and topk_ids must be fp32 and int32, not {weights.dtype} and {ids.dtype}")
    if weights.shape != ids.shape or weights.stride(0) != ids.stride(0):
        raise ValueError(
            "topk_weights and topk_ids must have equal shapes and row strides: the kernel uses one for both"
        )
    if gating.stride(1) != 1:
        raise ValueError("gating_output must be contiguous in its last dimension")
    if gating.shape[1] % groups:
        raise ValueError(f"num_expert_group={groups} does not divide {gating.shape[1]} experts")
    if not 1 <= kept <= groups:
        raise ValueError(f"topk_group must be between 1 and num_expert_group={groups}, not {kept}")
