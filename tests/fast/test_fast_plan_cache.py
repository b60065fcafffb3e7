"""The cached plan in the decode step: a key that is too short misleads exactly the rows that arithmetic says."""

from __future__ import annotations

import pytest
import torch
from fast_worlds import SMALL, Event, path, record, run_reference, stale_rows

from dsv32_fast.kernels.protocol import Kernels
from dsv32_fast.options import Options
from dsv32_fuzz.stages.bounds import attended

TOPK = SMALL.index_topk


def _ids(count: int, first: int) -> tuple[int, ...]:
    return tuple((first + 7 * j) % SMALL.vocab_size for j in range(count))


def crossing() -> list[Event]:
    """Three requests verify four tokens each; the middle one goes from topk tokens to topk + 3 in two steps.

    Rows per request before, with topk = 16: 16 16 16 16 | 13 14 15 16 | 16 16 16 16, after: sixteen each. The key of
    #42982 holds min(seq, topk), 16 for all, both times.
    """
    prompts = Event(tokens={0: _ids(TOPK + 8, 1), 1: _ids(TOPK - 4, 2), 2: _ids(TOPK + 4, 3)})
    first = Event(tokens={0: _ids(4, 4), 1: _ids(4, 5), 2: _ids(4, 6)}, truncate={1: TOPK - 1})
    second = Event(tokens={0: _ids(4, 7), 1: _ids(4, 8), 2: _ids(4, 9)})
    return [prompts, first, second]


def _wrong_rows(kernels: Kernels, options: Options, layer: int) -> list[int]:
    """Rows of the last step whose attention is outside the bound on what it should be."""
    events = crossing()
    run = path(options, kernels)
    rec = record(run, events, run_reference(events))
    bound, computed = attended(rec, layer), rec.of("attn_z", layer).double()
    wrong_T = ~((computed - bound.value).abs() <= bound.err).flatten(1).all(1)
    rows = wrong_T.nonzero().flatten().tolist()
    before = sum(event.rows for event in events[:-1])
    assert all(row >= before for row in rows), "the first plan is its own"
    return [row - before for row in rows]


def test_prediction_of_the_crossing() -> None:
    """By hand: row 4 loses its last three keys, rows 5 to 11 read from 3, 5 and then 6 entries before their own."""
    assert [i for i, flag in enumerate(stale_rows(crossing(), TOPK)[-1]) if flag] == list(range(4, 12))


@pytest.mark.parametrize("layer", range(SMALL.n_layers))
def test_the_key_of_42982_misleads_exactly_the_rows_predicted(kernels: Kernels, layer: int) -> None:
    predicted = [i for i, flag in enumerate(stale_rows(crossing(), TOPK)[-1]) if flag]
    assert _wrong_rows(kernels, Options(key="pr42982"), layer) == predicted


@pytest.mark.parametrize("key", ["none", "pr47766"])
def test_other_keys_mislead_no_row(kernels: Kernels, key: str) -> None:
    for layer in range(SMALL.n_layers):
        assert _wrong_rows(kernels, Options(key=key), layer) == []  # type: ignore[arg-type]


def test_the_key_of_47766_equals_always_planning_bit_for_bit(kernels: Kernels) -> None:
    events = crossing()
    runs = [record(path(Options(key=key), kernels), events, None) for key in ("none", "pr47766")]  # type: ignore[arg-type]
    for stage in ("attn_z", "attn_out", "ffn_out"):
        assert torch.equal(runs[0].of(stage, 1), runs[1].of(stage, 1)), stage


def test_one_launch_serves_all_layers(kernels: Kernels) -> None:
    run = path(Options(), kernels)
    record(run, crossing(), None)
    assert run.builder.counts.plan_launches == len(crossing())
