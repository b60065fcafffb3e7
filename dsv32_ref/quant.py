"""Number formats of the deployed path, simulated: bf16, fp8 e4m3 with block scales, the Hadamard rotation, linears.

Legend: T tokens, N input width, O output width, S scales per row (N / block).
Everything here follows DeepSeek's `inference/kernel.py` as read in November 2025: scales are formed in fp32 whatever
the input dtype, and dequantised values are returned in the dtype of the input.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dsv32_ref.config import Precision, ScaleFormat

Flavour = Literal["e4m3fn", "e4m3fnuz"]
BLOCK = 128
"""Quantisation block: 1 x 128 for activations, 128 x 128 for weights."""
MIN_AMAX = 1e-4
"""Smallest amax that a scale is formed from, so that a row of zeros has a scale."""
FP8 = {"e4m3fn": torch.float8_e4m3fn, "e4m3fnuz": torch.float8_e4m3fnuz}
LARGEST = {"e4m3fn": 448.0, "e4m3fnuz": 224.0}
"""Largest magnitude written. FNUZ reaches 240; engines stop at 224, half of 448, since the same byte means half."""


@dataclass(frozen=True, kw_only=True)
class BlockFp8:
    """A weight matrix [O, N] in e4m3 with one fp32 scale per 128 x 128 block (`weight_scale_inv`: multiply)."""

    bits: Tensor
    scale: Tensor

    @property
    def shape(self) -> torch.Size:
        """[O, N]."""
        return self.bits.shape

    def dequantise(self, dtype: torch.dtype) -> Tensor:
        """The matrix [O, N] in `dtype`; the last block row or column may be partial (wkv_a: 576 = 4.5 x 128 rows)."""
        rows, columns = self.shape
        scale_ON = self.scale.to(dtype).repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
        return self.bits.to(dtype) * scale_ON


Matrix = Tensor | BlockFp8
"""A linear's weight: plain, or block fp8."""


def round_bf16(x: Tensor, precision: Precision) -> Tensor:
    """`x` on the bf16 grid (nearest even), in its own dtype; `x` itself where bf16 is not simulated."""
    return x.to(torch.bfloat16).to(x.dtype) if precision.bf16 else x


def ue8m0(scale: Tensor) -> Tensor:
    """The smallest power of two that is not below each positive fp32 scale, by its exponent field (exact)."""
    mantissa, exponent = torch.frexp(scale)
    return torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).to(exponent.dtype))


def act_quant(
    x: Tensor, *, block: int = BLOCK, scale_format: ScaleFormat = "ue8m0", flavour: Flavour = "e4m3fn"
) -> tuple[Tensor, Tensor]:
    """Quantises the last axis of `x` in blocks: e4m3 values of the shape of `x`, and fp32 scales [..., S].

    Per block: amax = max(max|x|, 1e-4), scale = amax / 448, rounded up to a power of two for `ue8m0`.

    Raises:
        ValueError: the last axis is not a multiple of `block`, or a value is not finite.
    """
    if x.shape[-1] % block:
        raise ValueError(f"x has width {x.shape[-1]}; act_quant needs a multiple of block {block}")
    blocks = torch.unflatten(x.to(torch.float32), -1, (-1, block))
    amax = blocks.abs().amax(-1)
    if not bool(torch.isfinite(amax).all()):
        raise ValueError("x holds NaN or infinity; act_quant needs finite values")
    largest = LARGEST[flavour]
    scale = amax.clamp_min(MIN_AMAX) * (1.0 / largest)
    scale = ue8m0(scale) if scale_format == "ue8m0" else scale
    values = (blocks / scale.unsqueeze(-1)).clamp(-largest, largest).to(FP8[flavour])
    return values.flatten(-2), scale


def dequantise(values: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The product of e4m3 `values` and their block scales [..., S], in `dtype` (exact in fp32 for ue8m0 scales).

    Raises:
        ValueError: the values are not fp8, or the scales do not divide them into blocks.
    """
    if values.dtype not in FP8.values():
        raise ValueError(f"values have dtype {values.dtype}; dequantise needs float8_e4m3fn or float8_e4m3fnuz")
    if scale.shape[:-1] != values.shape[:-1] or values.shape[-1] % scale.shape[-1]:
        raise ValueError(f"scale {tuple(scale.shape)} does not divide values {tuple(values.shape)} into blocks")
    return (torch.unflatten(values.to(dtype), -1, (scale.shape[-1], -1)) * scale.to(dtype).unsqueeze(-1)).flatten(-2)


def fake_quant(x: Tensor, *, block: int = BLOCK, scale_format: ScaleFormat = "ue8m0") -> Tensor:
    """`x` after a round trip through e4m3: dequantise(act_quant(x)), in the dtype of `x`."""
    values, scale = act_quant(x, block=min(block, x.shape[-1]), scale_format=scale_format)
    return dequantise(values, scale, x.dtype)


def quantise_blocks(weight_ON: Tensor) -> BlockFp8:
    """A weight matrix in e4m3 with one fp32 scale (amax / 448) per 128 x 128 block, as published checkpoints are."""
    rows, columns = weight_ON.shape
    padded = torch.nn.functional.pad(weight_ON.to(torch.float32), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = torch.unflatten(torch.unflatten(padded, 0, (-1, BLOCK)), 2, (-1, BLOCK))
    scale = blocks.abs().amax((1, 3)).clamp_min(MIN_AMAX) / LARGEST["e4m3fn"]
    values = (blocks / scale[:, None, :, None]).clamp(-448.0, 448.0).flatten(2, 3).flatten(0, 1)
    return BlockFp8(bits=values[:rows, :columns].to(torch.float8_e4m3fn), scale=scale)


def linear(x_TN: Tensor, weight: Matrix, precision: Precision) -> Tensor:
    """x W^T [T, O], in the dtype of `x`.

    With `linear_fp8` a block-fp8 weight meets activations quantised 1 x 128. The real kernel promotes every partial sum
    of 128 products to fp32, so rounding the operands and not the sums is the whole of the simulation.
    """
    if isinstance(weight, Tensor):
        return round_bf16(x_TN @ weight.T, precision)
    if precision.linear_fp8:
        x_TN = fake_quant(x_TN, scale_format=precision.scale_format)
    return round_bf16(x_TN @ weight.dequantise(x_TN.dtype).T, precision)


@functools.lru_cache(maxsize=8)
def hadamard_matrix(n: int) -> Tensor:
    """The +-1 Hadamard matrix [n, n] in Sylvester (natural) order, fp64.

    Raises:
        ValueError: n is not a power of two.
    """
    if n < 1 or n & (n - 1):
        raise ValueError(f"n is {n}; the Hadamard transform needs a power of two")
    H = torch.ones(1, 1, dtype=torch.float64)
    while len(H) < n:
        H = torch.cat([torch.cat([H, H], 1), torch.cat([H, -H], 1)])
    return H


def hadamard(x: Tensor, precision: Precision) -> Tensor:
    """The orthonormal Hadamard rotation of the last axis: H x n^-0.5.

    It leaves every q.k unchanged and spreads an outlier lane over the whole head before it is quantised.
    """
    n = x.shape[-1]
    return round_bf16(x @ hadamard_matrix(n).to(x) * n**-0.5, precision)
