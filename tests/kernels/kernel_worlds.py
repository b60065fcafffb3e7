"""Plan buffers written by hand, a literal fp64 attention, and the error bound that lies between it and the kernels.

A plan is given as the windows of `kv_indices` that each row attends, so that these tests need no scheduler.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from under_test import mla_decode_fwd

from dsv32_fast.kernels.selection import Admits, current

U32 = 2.0**-24
"""Unit roundoff of fp32."""
U16 = 2.0**-8
"""Unit roundoff of bf16."""
U8 = 2.0**-4
"""Unit roundoff of e4m3."""

Windows = list[list[tuple[int, int]]]

FAULTS = "a GPU faults here, or uses foreign memory"
NEIGHBOURS = "it looks at memory beside the views that a kernel is given"
UNWRITTEN = "memory that no kernel writes holds anything on a GPU"
REFUSALS = "bad arguments, which a GPU need not refuse"
RULE = "a rule of the host, not what a kernel computes"
FLAVOUR = "it changes the device, or the order in which threads arrive"


def admits(**fixed: Any) -> pytest.MarkDecorator:
    """What a test fixes; see `dsv32_fast.kernels.selection.Admits`."""
    return pytest.mark.admits(Admits(**fixed))


def assert_unwritten(part: Tensor) -> None:
    """Scratch still holds the emulation's poison; of a GPU nothing is said."""
    assert current().limits.defined or part.isnan().all()


def windows(lengths: list[int], pieces: int = 1) -> Windows:
    """Consecutive windows of the given lengths, each cut into at most `pieces` parts of whole 16s."""
    result, start = [], 0
    for length in lengths:
        step = max(16, math.ceil(length / pieces / 16) * 16)
        result.append([(s, min(s + step, start + length)) for s in range(start, start + length, step)])
        start += length
    return result


def plan_buffers(rows: Windows, workgroups: int = 8) -> dict[str, Tensor]:
    """The plan for query length 1 and page size 1 whose row i attends the windows rows[i]; junk where unwritten."""
    works, partial_map, reduce_indptr = [], [], [0]
    final_map = torch.full((len(rows), 2), -12345, dtype=torch.int32)
    for row, cuts in enumerate(rows):
        split = len(cuts) > 1
        for start, end in cuts:
            place = len(partial_map) if split else -1
            works.append([row, place, row, row + 1, start, end, cuts[-1][1] - end, 0])
            if split:
                partial_map.append(place)
        reduce_indptr.append(len(partial_map))
        if split:
            final_map[row] = torch.tensor([row, row + 1])
    share = -(-len(works) // workgroups)
    return {
        "work_meta_data": torch.zeros(2, dtype=torch.uint64),
        "work_indptr": torch.tensor([min(c * share, len(works)) for c in range(workgroups + 1)], dtype=torch.int32),
        "work_info_set": torch.tensor([*works, [-12345] * 8], dtype=torch.int32),
        "reduce_indptr": torch.tensor(reduce_indptr, dtype=torch.int32),
        "reduce_final_map": final_map,
        "reduce_partial_map": torch.tensor([*partial_map, -12345], dtype=torch.int32),
    }


@dataclass(kw_only=True)
class World:
    """A small decode step: one query per row, KV slots all distinct."""

    q: Tensor
    kv: Tensor
    indices: Tensor
    lengths: list[int]
    latent: int
    scale: float

    def run(self, plan: dict[str, Tensor], **changes: object) -> tuple[Tensor, Tensor, Tensor]:
        """(output, partials, LSE) of `mla_decode_fwd`; the output starts as 768."""
        out = torch.full((*self.q.shape[:2], self.latent), 768.0, dtype=torch.bfloat16)
        indptr = torch.tensor([0, *torch.tensor(self.lengths).cumsum(0).tolist()], dtype=torch.int32)
        batch = len(self.lengths)
        fixed = (torch.arange(batch + 1, dtype=torch.int32), indptr, self.indices, torch.ones(batch, dtype=torch.int32))
        arguments = {"sm_scale": self.scale, "return_lse": True, **plan, **changes}
        logits, lse = mla_decode_fwd(self.q, self.kv, out, *fixed, 1, **arguments)  # type: ignore[arg-type]
        assert lse is not None
        return out, logits, lse


def world(
    lengths: list[int], heads: int = 4, latent: int = 16, rope: int = 8, slots: int | None = None, seed: int = 0
) -> World:
    """Random bf16 operands of at least these dimensions, as the kernels take them; slots that no row owns hold NaN."""
    limits = current().limits
    heads, latent, rope = (
        limits.smallest(name, wanted) for name, wanted in (("heads", heads), ("latent", latent), ("rope", rope))
    )
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    slots = total + 7 if slots is None else slots
    indices = torch.randperm(slots, generator=generator)[:total].to(torch.int32)
    kv = torch.full((slots, 1, 1, latent + rope), math.nan, dtype=torch.bfloat16)
    kv[indices.long()] = torch.randn(total, 1, 1, latent + rope, generator=generator).bfloat16()
    q = torch.randn(len(lengths), heads, latent + rope, generator=generator).bfloat16()
    # Scores of a deviation of 1.5, whatever the dimensions: with a peaked softmax a bound could not see a lost key.
    scale = 1.5 * (latent + rope) ** -0.5
    return World(q=q, kv=kv, indices=indices, lengths=lengths, latent=latent, scale=scale)


@dataclass(kw_only=True)
class Attention:
    """fp64 attention of one row and the bound on what a kernel may make of it."""

    output: Tensor
    lse: Tensor
    bound: Tensor
    lse_bound: Tensor


def attention(q_HD: Tensor, k_LD: Tensor, latent: int, scale: float, pieces: int = 1, p_unit: float = U16) -> Attention:
    """Literal fp64 attention with the error bound of the kernel's roundings.

    First the score: an fp32 dot product of D exact products is off by at most (D + 2) u * scale * sum|q k| = delta,
    whatever the order; the same for the maximum. Hence an unnormalised probability has relative error
    e = exp(2 delta + 4 u + u * spread) - 1 (exp itself within 2 u, the subtraction within u * spread of the scores),
    its sum e + L u, its rounding `p_unit`, the product with V L u, and the final scaling 3 u. Merging n pieces weighs
    them with exp(lse_i - L): each LSE is off by eta = delta + e + (L + 4) u + 2 u |lse|, so a weight by
    exp(2 eta) - 1, and the sum by n u. All these are relative to sum p|v|. An e4m3 probability is also rounded to
    multiples of 2^-9 below 2^-6, which adds at most 2^-10 sum|v|. Last, the output is rounded once to bf16.
    """
    q, k = q_HD.double(), k_LD.double()
    scores = q @ k.T * scale
    p, values = scores.softmax(1), k[:, :latent]
    output, lse = p @ values, scores.logsumexp(1)
    keys, dims = k.shape
    delta = (dims + 2) * U32 * abs(scale) * (q.abs() @ k.abs().T).amax(1)
    spread = scores.amax(1) - scores.amin(1)
    e = torch.expm1(2 * delta + 4 * U32 + U32 * spread)
    eta = delta + e + (keys + 4) * U32 + 2 * U32 * lse.abs()
    merge = torch.exp(2 * eta) * (1 + (pieces + 4) * U32) if pieces > 1 else torch.ones_like(eta)
    factor = (1 + e) * (1 + p_unit) * (1 + (keys + 3) * U32) / (1 - e - keys * U32) * merge - 1
    bound = factor[:, None] * (p @ values.abs())
    if p_unit == U8:
        bound = bound + 2.0**-10 * values.abs().sum(0) * merge[:, None]
    bound = bound + U16 * (output.abs() + bound)
    lse_bound = eta + (eta + (pieces + 4) * U32 + 2 * U32 * lse.abs() if pieces > 1 else 0)
    return Attention(output=output, lse=lse, bound=bound, lse_bound=lse_bound)


def assert_attends(step: World, out: Tensor, row: int, slots: Tensor, pieces: int = 1, **kernel: float) -> None:
    """Row `row` of `out` is attention over `slots`, within the bound."""
    keys = step.kv[slots.long(), 0, 0].float()
    expected = attention(step.q[row].float(), keys, step.latent, step.scale, pieces, **kernel)
    error = (out[row].double() - expected.output).abs()
    assert (error <= expected.bound).all(), f"row {row}: {(error / expected.bound).max():.3g} of the bound"


def assert_lse(step: World, lse: Tensor, row: int, slots: Tensor, pieces: int = 1) -> None:
    """Row `row` of `lse` is the logarithm of the sum over `slots`, within the bound."""
    keys = step.kv[slots.long(), 0, 0].float()
    expected = attention(step.q[row].float(), keys, step.latent, step.scale, pieces)
    error = (lse[row].double() - expected.lse).abs()
    assert (error <= expected.lse_bound).all(), f"row {row}: {(error / expected.lse_bound).max():.3g} of the bound"
