"""RMSNorm, its fused add, and the indexer's LayerNorm (DeepSeek-V3.2 inference code, sections "norm" and "Block").

Legend: T tokens, N width. Each result is rounded once, after the gain, where `precision` simulates bf16.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv32_ref.config import FP32, Precision
from dsv32_ref.quant import round_bf16


def rms_norm(x_TN: Tensor, gain_N: Tensor, eps: float, precision: Precision = FP32) -> Tensor:
    """g x / sqrt(mean(x^2) + eps), [T, N] in the dtype of `x`."""
    normed_TN = x_TN * torch.rsqrt(x_TN.square().mean(-1, keepdim=True) + eps)
    return round_bf16(gain_N * normed_TN, precision)


def add_rms_norm(
    x_TN: Tensor, residual_TN: Tensor, gain_N: Tensor, eps: float, precision: Precision = FP32
) -> tuple[Tensor, Tensor]:
    """The norm of x + residual, and the new residual.

    The norm reads the UNROUNDED sum; the stored residual is rounded. A path that norms the rounded sum differs in bf16.
    """
    sum_TN = x_TN + residual_TN
    return rms_norm(sum_TN, gain_N, eps, precision), round_bf16(sum_TN, precision)


def layer_norm(x_TN: Tensor, gain_N: Tensor, bias_N: Tensor, eps: float, precision: Precision = FP32) -> Tensor:
    """g (x - mean) / sqrt(var + eps) + b with the biased variance, [T, N] in the dtype of `x`."""
    centred_TN = x_TN - x_TN.mean(-1, keepdim=True)
    normed_TN = centred_TN * torch.rsqrt(centred_TN.square().mean(-1, keepdim=True) + eps)
    return round_bf16(gain_N * normed_TN + bias_N, precision)
