"""Feed-forward networks: the gated MLP of dense layers and experts, and the mixture with its shared expert.

Legend: T tokens, M model width, F inner width, K chosen experts.
Source: `MLP`, `Expert`, `MoE` of DeepSeek's inference code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv32_ref.config import FP32, Precision
from dsv32_ref.quant import Matrix, linear, round_bf16
from dsv32_ref.router import GateWeights


@dataclass(frozen=True, kw_only=True)
class MlpWeights:
    """Gate w1 [F, M], down w2 [M, F], up w3 [F, M]."""

    w1: Matrix
    w2: Matrix
    w3: Matrix


@dataclass(frozen=True, kw_only=True)
class MoeWeights:
    """Router, routed experts by id, and the shared experts as one MLP (None when there are none)."""

    gate: GateWeights
    experts: Mapping[int, MlpWeights]
    shared: MlpWeights | None


def mlp(x_TM: Tensor, w: MlpWeights, precision: Precision = FP32) -> Tensor:
    """W2 (silu(W1 x) * W3 x), [T, M]; the product is rounded once."""
    gate_TF, up_TF = linear(x_TM, w.w1, precision), linear(x_TM, w.w3, precision)
    return linear(round_bf16(torch.nn.functional.silu(gate_TF) * up_TF, precision), w.w2, precision)


def mixture(x_TM: Tensor, idx_TK: Tensor, weights_TK: Tensor, w: MoeWeights, precision: Precision = FP32) -> Tensor:
    """sum_k weight_k expert_k(x) + shared(x), [T, M]: by ascending expert, the shared one last, rounded once.

    Raises:
        ValueError: an expert was chosen whose weights are not there.
    """
    sum_TM = torch.zeros_like(x_TM)
    for expert in sorted(set(idx_TK.flatten().tolist())):
        if expert not in w.experts:
            raise ValueError(
                f"experts.{expert} was chosen and its weights are not loaded; load it, or force the choice"
            )
        rows, ranks = torch.where(idx_TK == expert)
        sum_TM[rows] += mlp(x_TM[rows], w.experts[expert], precision) * weights_TK[rows, ranks, None]
    if w.shared is not None:
        sum_TM += mlp(x_TM, w.shared, precision)
    return round_bf16(sum_TM, precision)
