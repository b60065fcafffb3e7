"""What a decode kernel may return: attention in real arithmetic with the proven bound of an honest kernel.

The kernel that the bound admits (`dsv32_ref.bounds.attention`): scores and softmax in fp32, P rounded to its storage
type before it is normalised, any split of the keys into partials that are merged by LSE, a running maximum that changes
at most once per key, one rounding of the result to bf16, and with fp8 operands one more factor in the score and one on
the result.

Legend: T rows, H heads, K keys of the longest row, S slots, C latent columns, D = C + RoPE width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv32_ref.bounds import BF16, E4M3FN, Approx, Arithmetic, SoftmaxForm, attend, exact, round_to
from dsv32_ref.bounds.attention import scores
from dsv32_ref.bounds.elementary import scale_by

ARITH = Arithmetic()


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Output [T, H, C] and natural-log LSE [T, H] with their bounds; rows without keys have no finite bound."""

    output: Approx
    lse: Approx


def attention(
    q_THD: Tensor,
    kv_SD: Tensor,
    slots_T: Sequence[Tensor],
    latent: int,
    scale: float,
    *,
    scales: tuple[float, float] | None = None,
    fp8_weights: bool = False,
) -> Expected:
    """Attention of every row over its slots.

    Args:
        q_THD, kv_SD: as stored (bf16 or fp8 values, in any float type).
        slots_T: int64 slots of each row.
        latent: C.
        scale: of the softmax.
        scales: of an fp8 Q and KV, None where neither is fp8.
        fp8_weights: whether P is stored in e4m3 instead of bf16.
    """
    most = max((len(slots) for slots in slots_T), default=0)
    kv_TKD = torch.zeros(len(slots_T), most, kv_SD.shape[-1])
    outside_TK = torch.ones(len(slots_T), most, dtype=torch.bool)
    for row, slots in enumerate(slots_T):
        kv_TKD[row, : len(slots)] = kv_SD[slots].float()
        outside_TK[row, : len(slots)] = False
    whole = scale * math.prod(scales or (1.0,))
    plain = scores(exact(q_THD.float()), exact(kv_TKD), whole, ARITH, scalars=3 if scales else 1)
    outside = outside_TK[:, None].expand(plain.value.shape)
    masked = Approx(plain.value.masked_fill(outside, -torch.inf), plain.err.masked_fill(outside, 0.0))
    form = SoftmaxForm(p_format=E4M3FN if fp8_weights else BF16, splits=max(most, 1), rescales=most)
    output, lse = attend(masked, exact(kv_TKD[..., :latent]), ARITH, form)
    if scales:
        output = scale_by(output, scales[1], ARITH)
    return Expected(output=round_to(output, BF16), lse=lse)
