"""Every class of inputs that the strategies name is really drawn, and is what its name says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor

from dsv32_fuzz.strategies import Steps
from dsv32_fuzz.strategies.batch_mixes import EDGES, edge_lens, verifying
from dsv32_fuzz.strategies.router import BIASES, SHAPES, RouterRows, RowKind, router_rows
from dsv32_fuzz.strategies.scores import ScoreBatch, ScoreKind, ScoreRow, score_batches

SEEDS = range(6)


def seen(strategy: st.SearchStrategy[Any], told: Callable[[Any], Any], examples: int = 150) -> set[Any]:
    """What `told` says of each of some examples, as one set."""
    found: set[Any] = set()

    @seed(0)
    @settings(max_examples=examples, database=None, deadline=None, phases=(Phase.generate,))
    @given(strategy)
    def look(drawn: Any) -> None:
        found.update(told(drawn))

    look()
    return found


def test_every_kind_of_router_row_is_drawn_with_every_bias_and_shape() -> None:
    told = seen(router_rows(), lambda d: (*d.rows, d.shape, (d.bias_offset, d.bias_spread)), examples=300)
    assert told == {*get_args(RowKind), *SHAPES, *BIASES}
    assert any(offset >= 5 and 0 < spread < 0.2 for offset, spread in BIASES)


def test_every_kind_of_score_row_is_drawn_for_both_kernels_and_around_k() -> None:
    assert seen(score_batches(), lambda d: (row.kind for row in d.rows)) == {*get_args(ScoreKind)}
    deltas = seen(score_batches(), lambda d: ((d.prefill, row.length(d.k) - d.k) for row in d.rows))
    assert {(kernel, delta) for kernel in (True, False) for delta in (-1, 0, 1)} <= deltas


def test_lengths_lie_at_and_beside_every_edge() -> None:
    assert {1, 16, 64, 512, 2048} < {*EDGES}
    assert {*EDGES, 2047, 2049} <= seen(edge_lens(), lambda length: (length,), examples=400)


def test_one_to_seven_drafts_are_verified() -> None:
    def query_lens(steps: Steps) -> set[int]:
        return {q - 1 for step in steps for q in step.query_lens if q}

    assert seen(verifying(), query_lens) == {1, 2, 3, 4, 5, 6, 7}


def groups(row_E: Tensor) -> Tensor:
    """The best logits of the 8 groups, best first."""
    return row_E.view(8, 32).amax(-1).sort(descending=True).values


def near_tied(row_E: Tensor) -> bool:
    """Some logits that differ agree in their top 22 bits."""
    bits = row_E.unique().view(torch.int32)
    return len((bits >> 10).unique()) < len(bits)


ROUTER: dict[RowKind, Callable[[Tensor], bool]] = {
    "near_ties": near_tied,
    "exact_ties": lambda row_E: len(row_E.unique()) <= 3,
    "tied_pairs": lambda row_E: len(row_E.unique()) <= 128,
    "all_equal": lambda row_E: len(row_E.unique()) == 1,
    "all_low": lambda row_E: bool((row_E < 0).all()),
    "dominant_group": lambda row_E: bool(groups(row_E)[0] > groups(row_E)[1] + 2),
    "one_far_up": lambda row_E: int((row_E > 0.5).sum()) == 1,
    "saturated": lambda row_E: bool((row_E.sigmoid() == 1).any()),
}


@pytest.mark.parametrize("kind", ROUTER)
def test_a_kind_of_router_row_is_what_it_is_called(kind: RowKind) -> None:
    rows = [RouterRows(rows=(kind,), seed=number).tensors()[0][0] for number in SEEDS]
    held = [ROUTER[kind](row_E) for row_E in rows]
    assert any(held) if kind == "near_ties" else all(held)  # two of three steps between near ties are wider


K = 64
SCORES: dict[ScoreKind, Callable[[Tensor], bool]] = {
    "relu": lambda row_N: int((row_N == 0).sum()) > K,
    "one_winner": lambda row_N: int((row_N > 0).sum()) == 1,
    "all_zero": lambda row_N: int((row_N == 0).sum()) == 4 * K,
    "near_equal": lambda row_N: len((row_N.view(torch.int32) >> 10).unique()) == 1 < len(row_N.unique()),
    "some_minus_inf": lambda row_N: 0 < int(row_N.isfinite().sum()) < 2 * K,
    "all_minus_inf": lambda row_N: bool((row_N == -torch.inf).all()),
    "negative": lambda row_N: bool((row_N < 0).all()),
    "subnormal": lambda row_N: 0 < float(row_N.abs().max()) < 2.0**-126,
}


@pytest.mark.parametrize("kind", SCORES)
def test_a_kind_of_score_row_is_what_it_is_called(kind: ScoreKind) -> None:
    """Rows of 4 k columns: more ties than a kernel keeps for the cut."""
    drawn = [ScoreBatch(rows=(ScoreRow(kind=kind, times=4, delta=0),), seed=number) for number in SEEDS]
    assert all(SCORES[kind](batch.values(K)[0]) for batch in drawn)
