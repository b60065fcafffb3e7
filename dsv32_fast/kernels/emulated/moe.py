"""`fused_moe` behind AITER's signature (ROCm/aiter e404860), as the dense computation that it must equal.

expert(x) = W2 (silu(gate) * up), [gate; up] = W1 x. Without quantisation the operands are used as they are; with
`QuantType.per_1x128` weights are fp8 with one fp32 scale per 128 x 128 block, and both activations are quantised to fp8
in groups of 128. Accumulation is fp32, the intermediate is rounded to the activation dtype, the sum over experts is
taken in order of the expert ids and rounded once. Weights are in natural layout: what AITER's kernels ask for on a GPU
is the same matrix after `aiter.ops.shuffle.shuffle_weight`.

Legend: T tokens, E local experts, K chosen experts, D hidden dim, I intermediate dim.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dsv32_fast.kernels.emulated.device import current_device
from dsv32_fast.kernels.emulated.memory import host, require_inside
from dsv32_fast.kernels.emulated.quant import ActivationType, QuantType, per_group_quant_hip

_BLOCK = 128


def fused_moe(
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weight: Tensor,
    topk_ids: Tensor,
    expert_mask: Tensor | None = None,
    activation: ActivationType = ActivationType.Silu,
    quant_type: QuantType = QuantType.No,
    doweight_stage1: bool = False,
    w1_scale: Tensor | None = None,
    w2_scale: Tensor | None = None,
    a1_scale: Tensor | None = None,
    a2_scale: Tensor | None = None,
    block_size_M: int | None = None,
    num_local_tokens: Tensor | None = None,
    moe_sorting_dispatch_policy: int = 0,
    dtype: torch.dtype | None = None,
    hidden_pad: int = 0,
    intermediate_pad: int = 0,
    bias1: Tensor | None = None,
    bias2: Tensor | None = None,
    splitk: int = 0,
    swiglu_limit: float | None = None,
    beta: float | None = None,
    linear_beta: float | None = None,
    gate_mode: str | None = "separated",
    shared_w1: Tensor | None = None,
    shared_w2: Tensor | None = None,
    shared_w1_scale: Tensor | None = None,
    shared_w2_scale: Tensor | None = None,
    shared_expert_id: int = -1,
    stage2_scatter: object = None,
) -> Tensor:
    """Sum over each token's experts of weight * expert(token), [T, D].

    Args:
        hidden_states: bf16 or fp16 (or fp32, for tests) [T, D].
        w1: [E, 2 I, D], gate rows first; fp8 with `QuantType.per_1x128`.
        w2: [E, D, I].
        topk_weight: fp32 [T, K].
        topk_ids: int32 [T, K], global expert ids.
        expert_mask: int32 [global experts], 1 where the expert is among the local ones, which are numbered in that
            order; others contribute nothing. None: every expert is local.
        activation: only Silu.
        quant_type: No or per_1x128.
        w1_scale, w2_scale: fp32 [E, ceil(rows / 128), ceil(columns / 128)], any shape of that size.
        block_size_M, moe_sorting_dispatch_policy, splitk: launch geometry, not observable.
        num_local_tokens: int [1]; later rows are not computed (0 here).
        dtype: of the output, that of `hidden_states` by default.

    Raises:
        ValueError: an argument that is not emulated, or a scale that is missing; the message names it.
        OutOfBoundsError: an expert id without a weight.
    """
    del block_size_M, moe_sorting_dispatch_policy, splitk, shared_w1_scale, shared_w2_scale
    refused = {
        "activation": activation.name != "Silu",
        "quant_type": quant_type.name not in ("No", "per_1x128"),
        "doweight_stage1": doweight_stage1,
        "a1_scale": a1_scale is not None,
        "a2_scale": a2_scale is not None,
        "hidden_pad": hidden_pad != 0,
        "intermediate_pad": intermediate_pad != 0,
        "bias1 or bias2": bias1 is not None or bias2 is not None,
        "swiglu_limit": swiglu_limit is not None,
        "beta or linear_beta": beta is not None or linear_beta is not None,
        "gate_mode": gate_mode != "separated",
        "shared_w1 or shared_w2": shared_w1 is not None or shared_w2 is not None,
        "shared_expert_id": shared_expert_id != -1,
        "stage2_scatter": stage2_scatter is not None,
    }
    if names := [name for name, present in refused.items() if present]:
        raise ValueError(f"fused_moe: not emulated: {', '.join(names)}; leave it at its default")
    quantised = quant_type.name == "per_1x128"
    live = hidden_states.shape[0] if num_local_tokens is None else int(num_local_tokens.item())
    local_TK = _local_ids(topk_ids[:live], expert_mask, w1.shape[0])
    x_TD = _quantise(hidden_states[:live].float()) if quantised else hidden_states[:live].float()
    out_TD = torch.zeros(hidden_states.shape, dtype=torch.float32, device=hidden_states.device)
    for expert in np.unique(host(local_TK[local_TK >= 0])).tolist():
        token, slot = (local_TK == expert).nonzero(as_tuple=True)
        w1_ND = _weights(w1[expert], w1_scale, expert, "w1_scale", quantised)
        w2_DI = _weights(w2[expert], w2_scale, expert, "w2_scale", quantised)
        y_TD = _expert(x_TD[token], w1_ND, w2_DI, hidden_states.dtype, quantised)
        out_TD.index_add_(0, token, topk_weight[token, slot, None] * y_TD)
    return out_TD.to(dtype or hidden_states.dtype)


def _expert(x_TD: Tensor, w1_ND: Tensor, w2_DI: Tensor, dtype: torch.dtype, quantised: bool) -> Tensor:
    gate_TI, up_TI = (x_TD @ w1_ND.T).chunk(2, dim=1)
    h_TI = (torch.nn.functional.silu(gate_TI) * up_TI).to(dtype).float()
    return (_quantise(h_TI) if quantised else h_TI) @ w2_DI.T


def _quantise(x: Tensor) -> Tensor:
    """fp32 values after fp8 rounding in groups of 128."""
    values, scales = per_group_quant_hip(x, quant_dtype=current_device().fp8)
    return values.float() * scales.repeat_interleave(_BLOCK, 1)


def _weights(weight_NM: Tensor, scale: Tensor | None, expert: int, name: str, quantised: bool) -> Tensor:
    """fp32 weights of one expert."""
    if not quantised:
        return weight_NM.float()
    if scale is None:
        raise ValueError(f"{name} is required with quant_type per_1x128")
    rows, columns = weight_NM.shape
    blocks = scale[expert].reshape(-(-rows // _BLOCK), -(-columns // _BLOCK))
    wide = blocks.repeat_interleave(_BLOCK, 0)[:rows].repeat_interleave(_BLOCK, 1)[:, :columns]
    return weight_NM.contiguous().view(current_device().fp8).float() * wide


def _local_ids(topk_ids: Tensor, expert_mask: Tensor | None, experts: int) -> Tensor:
    """Numbers of the experts among the local ones, -1 where an expert is not local."""
    ids = topk_ids.long()
    if expert_mask is not None:
        require_inside("expert_mask", host(ids), len(expert_mask))
        local_E = torch.where(expert_mask > 0, expert_mask.long().cumsum(0) - 1, -1)
        ids = local_E[ids]
    require_inside("w1", host(ids[ids >= 0] if expert_mask is not None else ids), experts)
    return ids
