"""Quantisers behind AITER's names (ROCm/aiter e404860), and the enumerations that its calls take.

Every quantiser returns (values, scales) with x ~ values * scale, where scale = amax / largest value of the type. Only
fp8 in the flavour of the emulated device is emulated, so `quant_dtype` must be given: AITER's default is int8.

Legend: M rows, N columns.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dsv32_fast.kernels.emulated.device import current_device

_GROUP_SIZES = (32, 64, 128)
_GROUP_FLOOR = 1e-10


class QuantType(enum.Enum):
    """Granularity of the scales; names are AITER's, values carry no meaning."""

    No = enum.auto()
    per_Tensor = enum.auto()
    per_Token = enum.auto()
    per_1x128 = enum.auto()


class ActivationType(enum.Enum):
    """Activation of a gated MLP; names are AITER's, values carry no meaning."""

    Silu = enum.auto()
    Gelu = enum.auto()


def pertoken_quant(
    x: Tensor,
    scale: Tensor | None = None,
    x_scale: Tensor | None = None,
    scale_dtype: torch.dtype = torch.float32,
    quant_dtype: torch.dtype = torch.int8,
    dtypeMax: float | None = None,
) -> tuple[Tensor, Tensor]:
    """AITER's torch reference: one scale amax / largest per row, [..., 1], 1 for a row of zeros; values x / scale.

    Raises:
        ValueError: `scale`, `x_scale` or `dtypeMax` is given (not emulated).
        TypeError: `quant_dtype` is not the device's fp8.
    """
    if scale is not None or x_scale is not None or dtypeMax is not None:
        raise ValueError("scale, x_scale and dtypeMax are not emulated; leave them None")
    largest, wide = _largest(quant_dtype), x.float()
    scales = wide.abs().amax(-1, keepdim=True) / largest
    scales = torch.where(scales == 0, 1.0, scales)
    return (wide / scales).to(quant_dtype), scales.to(scale_dtype)


def per_token_quant_hip(
    x: Tensor,
    scale: Tensor | None = None,
    quant_dtype: torch.dtype = torch.int8,
    num_rows: Tensor | None = None,
    num_rows_factor: int = 1,
) -> tuple[Tensor, Tensor]:
    """Quantise [M, N] per row: values [M, N] and fp32 scales [M, 1].

    A row of zeros has scale 0; its values are 0 here, where the kernel multiplies 0 by 1 / 0. Rows of 32, 64 or 128
    columns take the kernel of `per_group_quant_hip`. With `num_rows` (int [1]) only the first
    num_rows * num_rows_factor rows are done; the others are uninitialised (values 0, scale NaN here).

    Raises:
        ValueError: `scale` is given.
        TypeError: `quant_dtype` is not the device's fp8.
    """
    _refuse_scale(scale)
    floor = _GROUP_FLOOR if x.shape[-1] in _GROUP_SIZES else 0.0
    return _mask_rows(*_quantise(x, quant_dtype, floor), num_rows, num_rows_factor)


def per_group_quant_hip(
    x: Tensor,
    scale: Tensor | None = None,
    quant_dtype: torch.dtype = torch.int8,
    group_size: int = 128,
    transpose_scale: bool = False,
    num_rows: Tensor | None = None,
    num_rows_factor: int = 1,
    scale_type: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Quantise [M, N] in groups of 32, 64 or 128 columns: values [M, N] and fp32 scales [M, N / group_size].

    amax counts as at least 1e-10. `transpose_scale` stores the scales column by column behind the same shape, as the
    GEMM that follows wants them.

    Raises:
        ValueError: another group size, one that does not divide N, another `scale_type`, or `scale` is given.
        TypeError: `quant_dtype` is not the device's fp8.
    """
    _refuse_scale(scale)
    if group_size not in _GROUP_SIZES or x.shape[-1] % group_size:
        raise ValueError(f"group_size must be 32, 64 or 128 and divide {x.shape[-1]}, not {group_size}")
    if scale_type != torch.float32:
        raise ValueError(f"scale_type {scale_type} is not emulated; leave it torch.float32")
    grouped = x.reshape(*x.shape[:-1], x.shape[-1] // group_size, group_size)
    values, scales = _quantise(grouped, quant_dtype, _GROUP_FLOOR)
    values, scales = _mask_rows(values.reshape(x.shape), scales.squeeze(-1), num_rows, num_rows_factor)
    if transpose_scale:
        scales = scales.transpose(0, 1).contiguous().view(scales.shape)
    return values, scales


def get_hip_quant(qType: QuantType) -> Callable[..., tuple[Any, Any]]:
    """The quantiser of a granularity: `per_token_quant_hip`, or `per_group_quant_hip` for groups of 128.

    Raises:
        ValueError: another granularity (not emulated).
    """
    match qType.name:
        case "No":
            return lambda x, *_, **__: (x, None)
        case "per_Token":
            return per_token_quant_hip
        case "per_1x128":
            return per_group_quant_hip
    raise ValueError(f"qType {qType.name} is not emulated; choose No, per_Token or per_1x128")


def _quantise(x: Tensor, dtype: torch.dtype, floor: float) -> tuple[Tensor, Tensor]:
    """The HIP arithmetic over the last dimension: fp32 reciprocals instead of divisions."""
    largest, wide = _largest(dtype), x.float()
    scales = wide.abs().amax(-1, keepdim=True).clamp(min=floor) * (1 / torch.tensor(largest))
    reciprocals = torch.where(scales == 0, 0.0, 1 / scales)
    return (wide * reciprocals).clamp(-largest, largest).to(dtype), scales


def _largest(dtype: torch.dtype) -> float:
    if dtype != current_device().fp8:
        raise TypeError(f"quant_dtype {dtype} is not emulated; on this device it must be {current_device().fp8}")
    return float(torch.finfo(dtype).max)


def _refuse_scale(scale: Tensor | None) -> None:
    if scale is not None:
        raise ValueError("scale: a given scale is not supported; leave it None")


def _mask_rows(values: Tensor, scales: Tensor, num_rows: Tensor | None, factor: int) -> tuple[Tensor, Tensor]:
    if num_rows is not None:
        done = int(num_rows.item()) * factor
        values[done:], scales[done:] = torch.zeros_like(values[done:].float()).to(values.dtype), torch.nan
    return values, scales
