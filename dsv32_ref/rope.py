"""YaRN rotary embedding in its two layouts: interleaved pairs for MLA, half-split pairs for the indexer.

Legend: T tokens, P pairs (R / 2), R rotated width.
The angle position x frequency is formed in fp32 in one fixed order, whatever the compute dtype: at position 163839
another order, or an fp64 angle, differs by up to 5e-3 rad from what the model runs. Source: YaRN (arXiv 2309.00071) and
`precompute_freqs_cis` of DeepSeek's inference code.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dsv32_ref.config import FP32, Config, Precision
from dsv32_ref.quant import round_bf16


def correction_range(config: Config) -> tuple[float, float]:
    """The pair indices between which YaRN fades from kept to stretched frequencies; (10, 23) for the 671B model."""

    def pair(turns: float) -> float:
        wavelengths = config.original_seq_len / (2 * math.pi * turns)
        return config.qk_rope_head_dim * math.log(wavelengths) / (2 * math.log(config.rope_theta))

    low = max(math.floor(pair(config.beta_fast)), 0)
    high = min(math.ceil(pair(config.beta_slow)), config.qk_rope_head_dim - 1)
    return low, high + 0.001 if low == high else high


def frequencies(config: Config, device: torch.device | None = None) -> Tensor:
    """The rotation per position of each pair, [P] fp32 radians."""
    width = config.qk_rope_head_dim
    f_P = 1.0 / (config.rope_theta ** (torch.arange(0, width, 2, dtype=torch.float32, device=device) / width))
    if not config.yarn:
        return f_P
    low, high = correction_range(config)
    keep_P = 1 - ((torch.arange(width // 2, dtype=torch.float32, device=device) - low) / (high - low)).clamp(0, 1)
    return f_P / config.rope_factor * (1 - keep_P) + f_P * keep_P


def rope_table(config: Config, positions_T: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """cos and sin of the fp32 angles, [T, P] each, evaluated in `dtype`.

    Raises:
        ValueError: a position is negative or not below `max_seq_len`.
    """
    if len(positions_T) and (int(positions_T.min()) < 0 or int(positions_T.max()) >= config.max_seq_len):
        raise ValueError(f"positions reach {int(positions_T.max())}; they must lie in [0, {config.max_seq_len})")
    angle_TP = (positions_T.to(torch.float32)[:, None] * frequencies(config, positions_T.device)).to(dtype)
    return angle_TP.cos(), angle_TP.sin()


def _turn(a: Tensor, b: Tensor, table: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    cos, sin = (part.view(part.shape[0], *[1] * (a.dim() - 2), part.shape[1]) for part in table)
    return a * cos - b * sin, a * sin + b * cos


def rope_interleaved(x: Tensor, table: tuple[Tensor, Tensor], precision: Precision = FP32) -> Tensor:
    """Turns the pairs (x[2i], x[2i+1]) of `x` [T, ..., R] (MLA); the layout stays interleaved."""
    a, b = _turn(x[..., 0::2], x[..., 1::2], table)
    return round_bf16(torch.stack([a, b], -1).flatten(-2), precision)


def rope_half_split(x: Tensor, table: tuple[Tensor, Tensor], precision: Precision = FP32) -> Tensor:
    """Turns the pairs (x[i], x[i + R/2]) of `x` [T, ..., R] (indexer)."""
    half = x.shape[-1] // 2
    a, b = _turn(x[..., :half], x[..., half:], table)
    return round_bf16(torch.cat([a, b], -1), precision)
