"""Norms, RoPE, linears and quantisation of the optimised path, with the precision points of vLLM on ROCm.

Contract: values are computed in fp32 and rounded once to the dtype of the input, the activation dtype. Formulas are
those of the DeepSeek-V3.2 report and its inference code of November 2025, written here a second time on purpose:
nothing numerical is shared with `dsv32_ref`.

Legend: T rows, N input width, O output width, P pairs (R / 2), R rotated width, S scales per row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv32_fast.kernels.protocol import CacheKernels
from dsv32_ref.config import Config

BLOCK = 128
FP8 = torch.float8_e4m3fn
"""The fp8 of gfx950; gfx942 has e4m3fnuz, for which this path is not made."""
LARGEST = 448.0
SMALLEST_AMAX = 1e-10
Table = tuple[Tensor, Tensor]
"""cos and sin, fp32 [T, P] each."""


def rms_norm(x_TN: Tensor, gain_N: Tensor, eps: float) -> Tensor:
    """g x / sqrt(mean(x^2) + eps)."""
    return _rms(x_TN.float(), gain_N, eps).to(x_TN.dtype)


def add_rms_norm(x_TN: Tensor, residual_TN: Tensor, gain_N: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm of the unrounded x + residual, and the rounded sum as the new residual."""
    sum_TN = x_TN.float() + residual_TN.float()
    return _rms(sum_TN, gain_N, eps).to(x_TN.dtype), sum_TN.to(x_TN.dtype)


def _rms(wide_TN: Tensor, gain_N: Tensor, eps: float) -> Tensor:
    return wide_TN * torch.rsqrt(wide_TN.square().mean(-1, keepdim=True) + eps) * gain_N


def layer_norm(x_TN: Tensor, gain_N: Tensor, bias_N: Tensor, eps: float) -> Tensor:
    """g (x - mean) / sqrt(var + eps) + b, the norm of the indexer's key."""
    return torch.nn.functional.layer_norm(x_TN.float(), gain_N.shape, gain_N, bias_N, eps).to(x_TN.dtype)


@dataclass(frozen=True, kw_only=True)
class Linear:
    """A weight as the path holds it: plain [O, N] in the activation dtype, or e4m3 with fp32 scales per 128 x 128."""

    weight: Tensor
    scale: Tensor | None = None


def linear(x_TN: Tensor, w: Linear, kernels: CacheKernels) -> Tensor:
    """x W^T, accumulated in fp32. fp8 weights meet activations quantised 1 x 128 with fp32 scales, as on ROCm."""
    if w.scale is None:
        return product(x_TN, w.weight)
    values_TN, scale_TS = kernels.per_group_quant_hip(x_TN, quant_dtype=FP8, group_size=BLOCK)
    wide_TN = values_TN.float() * scale_TS.repeat_interleave(BLOCK, 1)
    return (wide_TN @ dequantised(w.weight, w.scale).T).to(x_TN.dtype)


def product(x_TN: Tensor, weight_ON: Tensor) -> Tensor:
    """x W^T in the dtype of `x`. On a CPU the fp32 accumulation is spelt out, since bf16 products differ by machine."""
    if x_TN.device.type != "cpu":
        return torch.nn.functional.linear(x_TN, weight_ON)
    return (x_TN.float() @ weight_ON.float().T).to(x_TN.dtype)


def dequantised(weight_ON: Tensor, scale: Tensor) -> Tensor:
    """A block-fp8 weight in fp32; the last block row or column may be partial."""
    rows, columns = weight_ON.shape
    wide = scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    return weight_ON.float() * wide


def quantise_ue8m0(x: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 values [..., I] and one power-of-two scale [...] per last axis: what the indexer's queries go through."""
    wide = x.float()
    mantissa, exponent = torch.frexp(wide.abs().amax(-1).clamp_min(SMALLEST_AMAX) / LARGEST)
    scale = torch.ldexp(torch.ones_like(mantissa), exponent - (mantissa == 0.5).int())
    return (wide / scale[..., None]).clamp(-LARGEST, LARGEST).to(FP8), scale


def quantise_static(x: Tensor, scale_1: Tensor) -> Tensor:
    """e4m3 of x / scale with a given fp32 scale [1], as a product with its reciprocal, saturated at 448."""
    return (x.float() * (1 / scale_1)).clamp(-LARGEST, LARGEST).to(FP8)


def rope_table(config: Config, positions_T: Tensor) -> Table:
    """cos and sin of position x YaRN frequency; frequency, angle and table in fp32, whatever the activations are."""
    width = config.qk_rope_head_dim
    pair_P = torch.arange(0, width, 2, dtype=torch.float32, device=positions_T.device)
    f_P = 1.0 / (config.rope_theta ** (pair_P / width))
    if config.yarn:
        keep_P = 1 - _ramp(config, pair_P / 2)
        f_P = f_P / config.rope_factor * (1 - keep_P) + f_P * keep_P
    angle_TP = positions_T.float()[:, None] * f_P
    return angle_TP.cos(), angle_TP.sin()


def _ramp(config: Config, pair_P: Tensor) -> Tensor:
    """0 where a frequency is kept, 1 where it is divided by the YaRN factor."""
    low, high = (
        config.qk_rope_head_dim
        * math.log(config.original_seq_len / (2 * math.pi * turns))
        / (2 * math.log(config.rope_theta))
        for turns in (config.beta_fast, config.beta_slow)
    )
    first, last = float(max(math.floor(low), 0)), float(min(math.ceil(high), config.qk_rope_head_dim - 1))
    last = first + 0.001 if first == last else last
    return ((pair_P - first) / (last - first)).clamp(0, 1)


def rope_interleaved(x: Tensor, table: Table) -> Tensor:
    """Turns the pairs (x[2i], x[2i + 1]) of `x` [T, ..., R] (MLA)."""
    a, b = _turn(x.float().unflatten(-1, (-1, 2)).unbind(-1), table)  # type: ignore[no-untyped-call]
    return torch.stack([a, b], -1).flatten(-2).to(x.dtype)


def rope_half_split(x: Tensor, table: Table) -> Tensor:
    """Turns the pairs (x[i], x[i + R / 2]) of `x` [T, ..., R] (indexer)."""
    return torch.cat(_turn(x.float().chunk(2, -1), table), -1).to(x.dtype)


def _turn(pairs: tuple[Tensor, ...], table: Table) -> tuple[Tensor, Tensor]:
    a, b = pairs
    cos, sin = (part.reshape(len(part), *[1] * (a.dim() - 2), part.shape[1]) for part in table)
    return a * cos - b * sin, a * sin + b * cos
