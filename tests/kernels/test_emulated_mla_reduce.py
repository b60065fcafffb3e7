"""`mla_reduce_v1`: which rows it merges, what it trusts, and its error against fp64."""

from __future__ import annotations

import math

import pytest
import torch
from kernel_worlds import REFUSALS, U16, U32, admits
from under_test import mla_reduce_v1

from dsv32_fast.kernels.emulated.memory import OutOfBoundsError
from dsv32_fast.kernels.selection import current

INF, NAN = math.inf, math.nan
HEADS, LATENT = current().limits.smallest("heads", 1), current().limits.smallest("latent", 1)


def reduce(outputs, lses, counts, final_map=None, partial_map=None):
    """Merge partials given per tile; outputs [P, H, C], lses [P, H]; the final tensors start as 768."""
    indptr = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
    final_map = [[t, t + 1] for t in range(len(counts))] if final_map is None else final_map
    partial_map = list(range(sum(counts))) if partial_map is None else partial_map
    rows = max(end for _, end in final_map)
    final = torch.full((rows, *outputs.shape[1:]), 768.0, dtype=torch.bfloat16)
    lse = torch.full((rows, outputs.shape[1]), 768.0)
    maps = (torch.tensor(final_map, dtype=torch.int32), torch.tensor(partial_map, dtype=torch.int32))
    mla_reduce_v1(outputs[:, None], lses[:, None, :, None], indptr, *maps, 1, 0, final, lse)
    return final, lse


@pytest.mark.parametrize("counts", [[2], [3, 0, 2], [4, 1, 64], [5, 3]])
def test_merge_is_the_weighted_mean(counts):
    """fp32 merge: weights within exp(2 u (|lse| + |L| + 2)) - 1, sum of n terms n u; then one rounding to bf16."""
    generator = torch.Generator().manual_seed(0)
    total = sum(counts)
    heads, latent = max(HEADS, 2), max(LATENT, 8)
    outputs = torch.randn(total, heads, latent, generator=generator)
    lses = 3 * torch.randn(total, heads, generator=generator)
    final, lse = reduce(outputs, lses, counts)
    start = 0
    for tile, count in enumerate(counts):
        part, logs = outputs[start : start + count].double(), lses[start : start + count].double()
        start += count
        if count < 2:
            assert (final[tile] == 768).all(), "a tile with fewer than two partials is left alone"
            assert (lse[tile] == 768).all()
            continue
        weights = logs.softmax(0)[..., None]
        unit = math.expm1(2 * U32 * (2 * float(logs.abs().max()) + math.log(count) + 2)) + (count + 3) * U32
        expected, size = (weights * part).sum(0), (weights * part.abs()).sum(0)
        assert ((final[tile].double() - expected).abs() <= unit * size + U16 * (expected.abs() + unit * size)).all()
        assert ((lse[tile].double() - logs.logsumexp(0)).abs() <= unit + U32 * logs.logsumexp(0).abs()).all()


def test_tiles_of_several_rows_follow_their_maps():
    final, _ = reduce(everywhere(range(8)), torch.zeros(8, HEADS), [0, 2], [[-9, -9], [1, 4]], [5, 1])
    assert torch.equal(final.float(), everywhere([768, 3, 4, 5]))  # rows 1.. merge partial rows 5 + r and 1 + r


def everywhere(values):
    """One value a row, [rows, HEADS, LATENT]."""
    return torch.tensor(list(values), dtype=torch.float32)[:, None, None].repeat(1, HEADS, LATENT)


def case(lses, outputs):
    """Output and LSE of one merged row; all heads and dims have the same."""
    final, lse = reduce(everywhere(outputs), torch.tensor(lses)[:, None].repeat(1, HEADS), [len(lses)])
    for merged in (final, lse):
        assert torch.equal(merged.isnan(), merged.isnan()[..., :1].expand_as(merged))
        assert merged.nan_to_num().unique().numel() == 1
    return final.flatten()[0].item(), lse.flatten()[0].item()


def test_empty_partials_of_weight_zero():
    assert case([0.0, -INF], [1.0, 5.0]) == (1.0, 0.0)
    assert case([-INF, 0.0], [5.0, 1.0]) == (1.0, 0.0)
    assert case([0.0, -INF, -INF, -INF], [1.0, 5.0, 5.0, 5.0]) == (1.0, 0.0)


@pytest.mark.parametrize("count", [2, 4])
def test_nan_partial_poisons_its_row(count):
    """aiter#4420 (not merged): a NaN output of weight 0 should be ignored; the kernel multiplies it instead."""
    output, lse = case([0.0] + [-INF] * (count - 1), [1.0] + [NAN] * (count - 1))
    assert math.isnan(output)
    assert lse == 0.0


def test_nan_lse_poisons_its_row():
    for count in (2, 4):
        output, lse = case([0.0] * (count - 1) + [NAN], [1.0] * count)
        assert math.isnan(output)
        assert lse == INF


def test_all_empty_row():
    """aiter#4420: 0 and -inf would be right; the online path gives NaN, the two-pass path 0, and both +inf as LSE."""
    online, two_pass = case([-INF, -INF], [1.0, 1.0]), case([-INF] * 4, [1.0] * 4)
    assert math.isnan(online[0])
    assert online[1] == INF
    assert two_pass == (0.0, INF)


@admits(emulation=REFUSALS)
def test_refusals():
    good = torch.zeros(2, 1, 1), torch.zeros(2, 1)
    with pytest.raises(OutOfBoundsError, match="partial_output"):
        reduce(*good, [2], partial_map=[0, 2])
    with pytest.raises(OutOfBoundsError, match="reduce_partial_map"):
        reduce(*good, [3], partial_map=[0, 1])
    maps = torch.zeros(2, dtype=torch.int32), None, torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match="reduce_final_map"):
        mla_reduce_v1(*good, *maps, 1, 0, torch.zeros(1, 1, 1))
    with pytest.raises(TypeError, match="partial_lse"):
        mla_reduce_v1(good[0], good[1].half(), *maps, 1, 0, torch.zeros(1, 1, 1))
