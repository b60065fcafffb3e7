"""The indexer checks pass on the faultless path and see each fault, at the stage where it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from check_trials import faultless, faulty, killed
from torch import Tensor

from dsv32_fast import indexing, layers
from dsv32_fast.kernels.emulated import api
from dsv32_fast.options import PRESETS
from dsv32_fuzz.checks.indexer import IndexLogits, LogitsInput
from dsv32_fuzz.checks.indexer_stages import IndexerStages
from dsv32_fuzz.targets.intree import InTreeTarget
from dsv32_fuzz.verdict import Status

TARGET = InTreeTarget(PRESETS["pr47766"])


def test_logits_pass() -> None:
    found = faultless(IndexLogits)
    assert found.worst_budget_used <= 1


def test_stages_pass() -> None:
    found = faultless(IndexerStages)
    assert found.measured["rows_longer_than_topk"] > found.measured["rows"] // 3
    assert found.measured["rows_of_padding"] > 0


def test_requests_without_a_token_are_mistrusted() -> None:
    assert IndexLogits().run(LogitsInput(contexts=(0, 0)), TARGET).status is Status.MISTRUSTED


Fault = Callable[..., Any]


def _paged(change: Callable[[list[Any], dict[str, Any]], None]) -> Fault:
    """The paged kernel with other arguments."""

    def logits(*args: Any, **named: Any) -> None:
        given = list(args)
        change(given, named)
        api.deepgemm_fp8_paged_mqa_logits(*given, **named)

    return logits


def _one_more(args: list[Any], named: dict[str, Any]) -> None:
    """A future key: every context one longer than it is, where the row has room."""
    args[4] = (args[4] + 1).clamp_max(args[6])


def _absolute(args: list[Any], named: dict[str, Any]) -> None:
    args[2] = args[2].abs()


def _other_layout(args: list[Any], named: dict[str, Any]) -> None:
    """vLLM #43781: the layout is hard-coded."""
    named["Preshuffle"] = args[1].shape[1] % 16 == 0


def _weights_swapped(args: list[Any], named: dict[str, Any]) -> None:
    args[2] = args[2].flip(1)


@pytest.mark.parametrize("change", [_one_more, _absolute, _other_layout, _weights_swapped])
def test_logits_kill_in_the_paged_kernel(change: Any) -> None:
    summary = killed(IndexLogits, faulty(deepgemm_fp8_paged_mqa_logits=_paged(change)))
    assert "index_score of request" in summary or "positions and shows" in summary


def _scales_as_powers_of_two(q: Tensor, k: Tensor, scales: Tensor, *rest: Any, **named: Any) -> Tensor:
    """FlashMLA #184."""
    return api.fp8_mqa_logits(q, k, torch.exp2(scales.log2().round()), *rest, **named)


def _no_relu(q: Tensor, k: Tensor, scales: Tensor, w: Tensor, first: Tensor, last: Tensor) -> Tensor:
    scores = ((q.float() @ k.float().T) * w[..., None]).sum(1) * scales.flatten()
    at = torch.arange(len(k))
    return scores.masked_fill((at < first[:, None]) | (at >= last[:, None]), -torch.inf)


def _window_open(q: Tensor, k: Tensor, scales: Tensor, w: Tensor, first: Tensor, last: Tensor) -> Tensor:
    """sglang #12583: keys of the requests before it are visible."""
    return api.fp8_mqa_logits(q, k, scales, w, first * 0, last)


@pytest.mark.parametrize("fault", [_scales_as_powers_of_two, _no_relu, _window_open])
def test_logits_kill_in_the_ragged_kernel(fault: Fault) -> None:
    summary = killed(IndexLogits, faulty(fp8_mqa_logits=fault))
    assert "index_score of request" in summary or "positions and shows" in summary


def _turn_last(x: Tensor, table: layers.Table, config: Any) -> Tensor:
    rope = config.qk_rope_head_dim
    return torch.cat([x[..., :-rope], layers.rope_half_split(x[..., -rope:], table)], -1)


def _interleaved(x: Tensor, table: layers.Table, config: Any) -> Tensor:
    """vLLM #28968."""
    rope = config.qk_rope_head_dim
    return torch.cat([layers.rope_interleaved(x[..., :rope], table), x[..., rope:]], -1)


def _stale_position(x: Tensor, table: layers.Table, config: Any) -> Tensor:
    return indexing_turn_first(x, tuple(part.roll(1, 0) for part in table), config)  # type: ignore[arg-type]


indexing_turn_first = indexing._turn_first


@pytest.mark.parametrize("fault", [_turn_last, _interleaved, _stale_position])
def test_stages_kill_a_wrong_turn(monkeypatch: pytest.MonkeyPatch, fault: Any) -> None:
    monkeypatch.setattr(indexing, "_turn_first", fault)
    assert "index_key of request" in killed(IndexerStages, TARGET, examples=15)


def test_stages_kill_a_norm_without_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = layers.layer_norm
    monkeypatch.setattr(indexing, "layer_norm", lambda x, gain, bias, eps: genuine(x, gain, bias * 0, eps))
    assert "index_key of request" in killed(IndexerStages, TARGET, examples=10)


def test_stages_kill_a_query_without_rope(monkeypatch: pytest.MonkeyPatch) -> None:
    def queries(qr: Tensor, w: Any, table: Any, config: Any, kernels: Any) -> tuple[Tensor, Tensor]:
        q = layers.linear(qr, w.q_b, kernels).view(len(qr), config.index_n_heads, config.index_head_dim)
        return layers.quantise_ue8m0(q)

    monkeypatch.setattr(indexing, "index_queries", queries)
    assert "index_q: " in killed(IndexerStages, TARGET, examples=15)


def test_stages_kill_a_query_scale_that_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = indexing.head_weights
    monkeypatch.setattr(indexing, "head_weights", lambda a, s, w, c, k: genuine(a, torch.ones_like(s), w, c, k))
    assert "index_w: " in killed(IndexerStages, TARGET, examples=10)


def test_stages_kill_the_next_requests_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = indexing.index_scores

    def scores(query: Any, cache: Tensor, batch: Any, ways: Any, **named: Any) -> Tensor:
        table = batch.block_table.roll(1, 0)
        return genuine(query, cache, dataclasses.replace(batch, block_table=table.clamp_min(0)), ways, **named)

    monkeypatch.setattr(indexing, "index_scores", scores)
    assert "index_score" in killed(IndexerStages, TARGET, examples=20, raises=True)


def test_stages_kill_a_selection_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def first(scores: Tensor, batch: Any, ways: Any, k: int, kernels: Any) -> Tensor:
        rank = torch.arange(k).expand(len(scores), k)
        return torch.where(rank < batch.lengths[:, None], rank, -1).int()

    monkeypatch.setattr(indexing, "select", first)
    assert "index_topk of row" in killed(IndexerStages, TARGET, examples=20)
