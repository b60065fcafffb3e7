"""Rows of index scores that are hard for a top-k: more ties than any cap, ReLU zeros, -inf, near-equal bits, edges.

Lengths are given relative to k, so that the same input means the same edge at k = 8 and at k = 2048.

Legend: N columns of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import msgspec
import torch
from hypothesis import strategies as st
from torch import Tensor

from dsv32_fuzz.strategies.steps import booleans, integers, sampled_from

ScoreKind = Literal[
    "normal",
    "relu",
    "one_winner",
    "all_zero",
    "levels",
    "near_equal",
    "some_minus_inf",
    "all_minus_inf",
    "negative",
    "ascending",
    "subnormal",
    "huge",
    "signed_zeros",
]
"""What a row of scores looks like; see `_DRAW`."""


KINDS: tuple[ScoreKind, ...] = (
    *get_args(ScoreKind),
    *("near_equal",) * 3,
    *("some_minus_inf",) * 3,
    "all_minus_inf",
    "one_winner",
    "relu",
)
"""As often as each is drawn: near-equal rows show a select that stops before the last bits, -inf shows a sentinel."""


class ScoreRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One row of `times * k + delta` columns (at least 0), the first of which is column `start`."""

    kind: ScoreKind = "normal"
    times: int = 1
    delta: int = 1
    start: int = 0

    def length(self, k: int) -> int:
        """Columns of the row."""
        return max(0, self.times * k + self.delta)


class ScoreBatch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rows for one call of a top-k kernel."""

    k: int = 8
    rows: tuple[ScoreRow, ...] = (ScoreRow(),)
    prefill: bool = False
    """Which of the two kernels; only the prefill kernel knows starts."""
    next_n: int = 1
    """Query rows per request of the decode kernel: row n of a request sees one column more than row n - 1."""
    gap: int = 3
    """Columns of the logits that belong to no row."""
    pitch: int = 0
    """Columns of the allocation behind the logits: rows lie further apart than they are wide."""
    seed: int = 0

    def values(self, k: int) -> list[Tensor]:
        """fp32 scores of each row."""
        g = torch.Generator().manual_seed(self.seed)
        return [_DRAW[row.kind](torch.randn(row.length(k), generator=g), g) for row in self.rows]


def _one_winner(noise_N: Tensor, g: torch.Generator) -> Tensor:
    """A single positive score among the zeros of the ReLU (sglang #30512)."""
    row_N = torch.zeros_like(noise_N)
    if len(row_N):
        row_N[int(torch.randint(len(row_N), (1,), generator=g))] = 1.0
    return row_N


def _near_equal(noise_N: Tensor, g: torch.Generator) -> Tensor:
    """Scores whose fp32 bits agree but for the last few: what a radix select sees last."""
    del g
    bits = torch.tensor([0.37]).view(torch.int32) + (3 * noise_N).round().int()
    return bits.view(torch.float32)


def _some_minus_inf(noise_N: Tensor, g: torch.Generator) -> Tensor:
    """Fewer finite scores than k, more often than not (sglang #38829)."""
    return torch.where(torch.rand(len(noise_N), generator=g) < 0.8, -torch.inf, noise_N)


_DRAW: dict[ScoreKind, Callable[[Tensor, torch.Generator], Tensor]] = {
    "normal": lambda noise_N, _g: noise_N,
    "relu": lambda noise_N, _g: (noise_N - 1.5).clamp_min(0),
    "one_winner": _one_winner,
    "all_zero": lambda noise_N, _g: torch.zeros_like(noise_N),
    "levels": lambda noise_N, _g: noise_N.round(),
    "near_equal": _near_equal,
    "some_minus_inf": _some_minus_inf,
    "all_minus_inf": lambda noise_N, _g: torch.full_like(noise_N, -torch.inf),
    "negative": lambda noise_N, _g: -noise_N.abs() - 0.01,
    "ascending": lambda noise_N, _g: torch.arange(len(noise_N), dtype=torch.float32) / 7 - 3,
    "subnormal": lambda noise_N, _g: noise_N * 2.0**-130,
    "huge": lambda noise_N, _g: noise_N * 2.0**120,
    "signed_zeros": lambda noise_N, _g: torch.where(noise_N < 0, -0.0, 0.0) + (noise_N > 1.5) * noise_N,
}


@st.composite
def score_rows(draw: st.DrawFn, *, starts: bool) -> ScoreRow:
    """Any row; lengths around 0, k and its multiples."""
    return ScoreRow(
        kind=draw(sampled_from(KINDS)),
        times=draw(sampled_from((1, 1, 1, 2, 3, 0))),
        delta=draw(sampled_from((1, 0, 2, -1, 3, 5, 13))),
        start=draw(sampled_from((0, 5, 1, 64))) if starts else 0,
    )


@st.composite
def score_batches(draw: st.DrawFn) -> ScoreBatch:
    """Any batch of one to five rows, for either kernel."""
    prefill = draw(booleans())
    return ScoreBatch(
        k=draw(sampled_from((8, 2, 16, 64))),
        rows=tuple(draw(st.lists(score_rows(starts=prefill), min_size=1, max_size=5))),
        prefill=prefill,
        next_n=1 if prefill else draw(sampled_from((1, 1, 2, 4))),
        gap=draw(sampled_from((3, 0, 61))),
        pitch=draw(sampled_from((0, 5, 64))),
        seed=draw(integers(0, 1 << 16)),
    )
