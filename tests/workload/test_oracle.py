"""The planner input: the vectorised oracle against its definition, written as loops."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv32_fast.batch import StepBatch
from dsv32_fuzz.oracle import planner_lens, split_cap


def literal_lens(step: StepBatch, topk: int) -> list[int]:
    lens = []
    for q, seq in zip(step.query_lens, step.seq_lens, strict=True):
        for j in range(q):
            length = 0
            for position in range(seq):  # row j sees the context, the rows before it, and itself
                length += position <= seq - q + j
            lens.append(min(length, topk))
    return lens + [0] * (step.num_tokens - len(lens))


@st.composite
def batches(draw: st.DrawFn) -> StepBatch:
    requests = draw(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 20)), max_size=6))
    query_lens = tuple(q for q, _ in requests)
    return StepBatch(
        query_lens=query_lens,
        seq_lens=tuple(q + context for q, context in requests),
        num_tokens=sum(query_lens) + draw(st.integers(0, 5)),
    )


@given(batches(), st.integers(1, 25))
def test_lens_equal_the_definition(step: StepBatch, topk: int) -> None:
    lens_T = planner_lens(step, topk)
    assert lens_T.dtype == np.int32
    assert lens_T.tolist() == literal_lens(step, topk)


def test_lens_at_the_true_topk() -> None:
    step = StepBatch(query_lens=(4, 1, 0), seq_lens=(2049, 2**31 - 1, 0), num_tokens=8)
    assert planner_lens(step).tolist() == [2046, 2047, 2048, 2048, 2048, 0, 0, 0]
    assert planner_lens(StepBatch(query_lens=(), seq_lens=())).shape == (0,)
    assert planner_lens(StepBatch(query_lens=(0,), seq_lens=(7,), num_tokens=2)).tolist() == [0, 0]


def test_topk_must_be_positive() -> None:
    with pytest.raises(ValueError, match="topk is 0; it must be at least 1"):
        planner_lens(StepBatch(query_lens=(1,), seq_lens=(1,)), 0)


@given(st.integers(1, 2**31 - 1), st.integers(1, 65536), st.integers(1, 304))
def test_split_cap_equals_the_definition(bound: int, topk: int, compute_units: int) -> None:
    power = 1
    while power < min(bound, topk) // 128:
        power *= 2
    step = StepBatch(query_lens=(1,), seq_lens=(1,), max_seq_len=bound)
    assert split_cap(step, topk, compute_units) == min(power, compute_units)


@pytest.mark.parametrize(("bound", "cap"), [(1, 1), (255, 1), (256, 2), (511, 4), (2047, 16), (2048, 16), (163840, 16)])
def test_split_cap_at_the_true_topk(bound: int, cap: int) -> None:
    assert split_cap(StepBatch(query_lens=(1,), seq_lens=(1,), max_seq_len=bound)) == cap
