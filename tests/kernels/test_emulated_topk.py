"""The top-k kernels: the exact set, the padding of short rows, ties, strides and odd values."""

from __future__ import annotations

import math

import pytest
import torch
from kernel_worlds import FLAVOUR, NEIGHBOURS, REFUSALS, admits
from under_test import top_k_per_row_decode, top_k_per_row_prefill

from dsv32_fast.kernels.emulated.memory import OutOfBoundsError
from dsv32_fast.kernels.emulated.topk import arrival_order

NAN, INF = math.nan, math.inf


def decode(logits, lengths, k, next_n=1, stable=False, seed=0):
    indices = torch.full((len(lengths) * next_n, k), -77, dtype=torch.int32)
    lengths = torch.tensor(lengths, dtype=torch.int32)
    with arrival_order(seed):
        top_k_per_row_decode(logits, next_n, lengths, indices, len(indices), *logits.stride(), k, stable)
    return indices.tolist()


def literal(row, k):
    """The k best columns of a list, smallest index first on ties, as a sorted list."""
    return sorted(sorted(range(len(row)), key=lambda j: (-row[j], j))[:k])


@pytest.mark.parametrize("k", [pytest.param(k, marks=admits(topk=k)) for k in (1, 4, 128)])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_set_equals_a_literal_sort(seed, k):
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(seed))
    lengths = [k + 1, 300, k + 3, 299, 200]
    for row, chosen in enumerate(decode(logits, lengths, k, seed=seed)):
        assert sorted(chosen) == literal(logits[row, : lengths[row]].tolist(), k)


@pytest.mark.parametrize("length", [2047, 2048, 2049, 2050, 4095, 4097])
def test_edges_of_2048(length):
    """vllm#39303 was right up to 2048 and random from 2049."""
    logits = torch.randn(1, 4100, generator=torch.Generator().manual_seed(length))
    (chosen,) = decode(logits, [length], 2048)
    assert sorted(c for c in chosen if c >= 0) == literal(logits[0, :length].tolist(), 2048)
    assert chosen.count(-1) == max(0, 2048 - length)


@admits(topk=4)
def test_short_rows_are_padded_in_order():
    """Automodel#3035: a row of fewer than k columns gives all of them, then -1; an empty row only -1."""
    assert decode(torch.randn(3, 4), [3, 0, 4], 4) == [[0, 1, 2, -1], [-1] * 4, [0, 1, 2, 3]]
    assert decode(torch.randn(4, 4), [3, 0], 4, next_n=2) == [[0, 1, -1, -1], [0, 1, 2, -1], [-1] * 4, [-1] * 4]


@admits(topk=2)
def test_rows_of_one_request_see_one_column_more_each():
    logits = torch.arange(8.0).expand(3, 8).contiguous()
    assert [sorted(row) for row in decode(logits, [8], 2, next_n=3)] == [[4, 5], [5, 6], [6, 7]]


@admits(topk=8)
def test_many_ties():
    """sglang#30512: 1 winner and 20 zeros, k = 8: eight distinct columns with the winner among them."""
    logits = torch.zeros(1, 21)
    logits[0, 13] = 1.0
    (chosen,) = decode(logits, [21], 8)
    assert len(set(chosen)) == 8
    assert min(chosen) >= 0
    assert 13 in chosen


@admits(topk=16)
def test_padding_columns_never_outrank_data():
    """sglang#38829: row of 51 columns, 3 finite and 48 of -inf, k = 16: never an index of 51 or more."""
    logits = torch.full((1, 64), 1000.0)
    logits[0, :51] = -INF
    logits[0, :3] = 0.0
    (chosen,) = decode(logits, [51], 16)
    assert {0, 1, 2} <= set(chosen)
    assert max(chosen) < 51
    assert len(set(chosen)) == 16


@admits(emulation=FLAVOUR)
def test_race_and_stable_order():
    """aiter#4415: 10 equal scores, k = 4: the set depends on the arrival, unless stable."""
    logits = torch.zeros(1, 10)
    sets = {tuple(sorted(decode(logits, [10], 4, seed=seed)[0])) for seed in range(20)}
    assert len(sets) > 1
    assert {tuple(decode(logits, [10], 4, stable=True, seed=seed)[0]) for seed in range(20)} == {(0, 1, 2, 3)}
    assert decode(logits, [10], 4, seed=7) == decode(logits, [10], 4, seed=7)


@admits(emulation=FLAVOUR)
def test_order_is_unspecified_but_the_set_is_not():
    logits = torch.randn(1, 100, generator=torch.Generator().manual_seed(0))
    rows = [decode(logits, [100], 8, seed=seed)[0] for seed in range(5)]
    assert len({tuple(row) for row in rows}) > 1
    assert len({frozenset(row) for row in rows}) == 1
    assert rows[0] != sorted(rows[0]) or rows[1] != sorted(rows[1])
    assert decode(logits, [100], 8, stable=True)[0] == sorted(rows[0])


@admits(topk=8)
def test_odd_values_are_ordered_by_their_bits():
    ascending = [-NAN, -INF, -1.0, -0.0, 0.0, 1e-45, 1.0, INF, NAN]
    logits = torch.tensor([ascending])
    logits[0, 0] = torch.tensor([-1], dtype=torch.int32).view(torch.float32)[0]  # a NaN with its sign bit set
    for k in range(1, 9):
        assert sorted(decode(logits, [9], k)[0]) == list(range(9 - k, 9))


@admits(emulation=NEIGHBOURS)
def test_strided_rows():
    """vllm#46856: a 5x3 view of 5x8 storage starts row r at 8 r; the stride passed decides."""
    storage = torch.arange(40.0).view(5, 8)
    storage[:, 3:] = 1e9
    storage[2, 0] = 100.0
    view = storage[:, :3]
    chosen = decode(view, [3] * 5, 2)
    assert [sorted(row) for row in chosen] == [[1, 2], [1, 2], [0, 2], [1, 2], [1, 2]]
    indices = torch.full((5, 2), -77, dtype=torch.int32)
    top_k_per_row_decode(view, 1, torch.full((5,), 3, dtype=torch.int32), indices, 5, 3, 1, 2, True)
    assert indices.tolist() == [[1, 2], [0, 1], [0, 1], [1, 2], [0, 1]]


def prefill(logits, starts, ends, k, stable=True, values=None):
    indices = torch.full((len(starts), k), -77, dtype=torch.int32)
    bounds = torch.tensor(starts, dtype=torch.int32), torch.tensor(ends, dtype=torch.int32)
    top_k_per_row_prefill(logits, *bounds, indices, values, len(starts), *logits.stride(), k, stable)
    return indices.tolist()


@admits(topk=2)
def test_prefill_indices_are_columns():
    """vllm#56749: a row that starts at 5 returns columns here; a caller that wants them from its start subtracts 5."""
    logits = torch.tensor([[9.0, 9, 9, 9, 9, 1, 3, 2, 9, 9]] * 3)
    assert prefill(logits, [5, 5, 0], [8, 6, 0], 2) == [[6, 7], [5, -1], [-1, -1]]


@admits(topk=2)
def test_prefill_values():
    values = torch.full((2, 2), -7.0)
    assert prefill(torch.tensor([[1.0, 5.0, 3.0], [4.0, 0.0, 0.0]]), [0, 0], [3, 1], 2, values=values) == [
        [1, 2],
        [0, -1],
    ]
    assert values.tolist() == [[5.0, 3.0], [4.0, 0.0]]


@admits(emulation=REFUSALS)
def test_refusals():
    logits = torch.zeros(2, 8)
    lengths = torch.tensor([8, 8], dtype=torch.int32)
    with pytest.raises(ValueError, match="indices must be"):
        top_k_per_row_decode(logits, 1, lengths, torch.zeros(2, 4, dtype=torch.int32), 2, 8, 1, 8)
    with pytest.raises(TypeError, match="int32"):
        top_k_per_row_decode(logits, 1, lengths, torch.zeros(2, 4, dtype=torch.int64), 2, 8, 1, 4)
    with pytest.raises(OutOfBoundsError, match="row 1 ends at element 17 of 16"):
        top_k_per_row_decode(logits, 1, lengths + 1, torch.zeros(2, 4, dtype=torch.int32), 2, 8, 1, 4)
