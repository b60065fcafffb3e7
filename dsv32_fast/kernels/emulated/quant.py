"""Quantisers behind AITER's names (ROCm/aiter e404860), and the enumerations that its calls take.

Every quantiser returns (values, scales) with x ~ values * scale: scale = amax / largest value of the type, 1 for a
group of zeros, and values = x / scale rounded to the type. fp8 is the flavour of the emulated device.

Legend: M rows, N columns.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dsv32_fast.kernels.emulated.device import current_device


class QuantType(enum.Enum):
    """Granularity of the scales; names are AITER's, values carry no meaning."""

    No = enum.auto()
    per_Tensor = enum.auto()  # noqa: N815
    per_Token = enum.auto()  # noqa: N815
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
) -> tuple[Tensor, Tensor]:
    """Quantise the last dimension of `x` with one scale per row, [..., 1].

    Raises:
        ValueError: `scale` or `x_scale` is given (smooth quantisation is not emulated).
    """
    if scale is not None or x_scale is not None:
        raise ValueError("scale and x_scale: given scales are not emulated; leave them None")
    values, scales = quantise_groups(x.float(), quant_dtype)
    return values, scales.to(scale_dtype)


def per_token_quant_hip(
    x: Tensor,
    scale: Tensor | None = None,
    quant_dtype: torch.dtype = torch.int8,
    num_rows: Tensor | None = None,
    num_rows_factor: int = 1,
) -> tuple[Tensor, Tensor]:
    """Quantise [M, N] per row: values [M, N] and fp32 scales [M, 1].

    With `num_rows` (int [1]) only the first num_rows * num_rows_factor rows are done, and the others are uninitialised
    (values 0, scale NaN here).
    """
    if scale is not None:
        raise ValueError("scale: a given scale is not emulated; leave it None")
    return _mask_rows(*quantise_groups(x.float(), quant_dtype), num_rows, num_rows_factor)


def per_group_quant_hip(
    x: Tensor,
    scale: Tensor | None = None,
    quant_dtype: torch.dtype = torch.int8,
    group_size: int = 128,
    transpose_scale: bool = False,
    num_rows: Tensor | None = None,
    num_rows_factor: int = 1,
) -> tuple[Tensor, Tensor]:
    """Quantise [M, N] in groups of 32, 64 or 128 columns: values [M, N] and fp32 scales [M, N / group_size].

    `transpose_scale` stores the scales column by column behind the same shape, as the GEMM that follows wants them.

    Raises:
        ValueError: another group size, one that does not divide N, or a given `scale`.
    """
    if scale is not None:
        raise ValueError("scale: a given scale is not emulated; leave it None")
    if group_size not in (32, 64, 128) or x.shape[-1] % group_size:
        raise ValueError(f"group_size must be 32, 64 or 128 and divide {x.shape[-1]}, not {group_size}")
    grouped = x.float().reshape(*x.shape[:-1], x.shape[-1] // group_size, group_size)
    values, scales = quantise_groups(grouped, quant_dtype)
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


def quantise_groups(groups: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantise the last dimension of an fp32 tensor; scales keep it with size 1."""
    largest = largest_value(dtype)
    scales = groups.abs().amax(-1, keepdim=True) / largest
    scales = torch.where(scales == 0, 1.0, scales)
    scaled = (groups / scales).clamp(-largest, largest)
    return (scaled if dtype.is_floating_point else scaled.round()).to(dtype), scales


def largest_value(dtype: torch.dtype) -> float:
    """Largest finite value of a quantised type.

    Raises:
        TypeError: neither int8 nor the fp8 flavour of the emulated device.
    """
    if dtype == torch.int8:
        return 127.0
    if dtype != current_device().fp8:
        raise TypeError(f"quant_dtype must be torch.int8 or {current_device().fp8} on this device, not {dtype}")
    return float(torch.finfo(dtype).max)


def _mask_rows(values: Tensor, scales: Tensor, num_rows: Tensor | None, factor: int) -> tuple[Tensor, Tensor]:
    if num_rows is not None:
        done = int(num_rows.item()) * factor
        values[done:], scales[done:] = torch.zeros_like(values[done:].float()).to(values.dtype), torch.nan
    return values, scales
