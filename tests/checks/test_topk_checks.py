"""The top-k checks pass on the faultless path and see each fault."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from check_trials import faultless, faulty, killed
from torch import Tensor

from dsv32_fast import attention
from dsv32_fast.kernels.emulated import api
from dsv32_fast.metadata import SparseMlaMetadata
from dsv32_fast.options import PRESETS
from dsv32_fuzz.case import InputCase, decode_case
from dsv32_fuzz.checks.topk import TopkContract, TopkOrder, TopkSentinel
from dsv32_fuzz.events import CounterexampleFound
from dsv32_fuzz.search import explore
from dsv32_fuzz.search.properties import OwnInput
from dsv32_fuzz.strategies.scores import ScoreBatch, ScoreRow
from dsv32_fuzz.targets.intree import InTreeTarget
from dsv32_fuzz.verdict import Status

TARGET = InTreeTarget(PRESETS["pr47766"])


def test_contract_passes_and_meets_its_corners() -> None:
    found = faultless(TopkContract)
    assert found.measured["rows_tied_at_the_cut"] > found.measured["rows"] // 10
    assert found.measured["rows_longer_than_k"] > found.measured["rows"] // 3
    assert found.measured["rows_with_values"] > 0


def test_order_passes_and_counts_what_a_race_changes() -> None:
    found = faultless(TopkOrder)
    assert found.measured["unstable_rows_that_differ"] > 0


def test_sentinel_passes() -> None:
    found = faultless(TopkSentinel)
    assert found.measured["entries_that_name_nothing"] > 0


def test_rows_that_test_nothing_are_mistrusted() -> None:
    empty = ScoreBatch(rows=(ScoreRow(times=0, delta=0),))
    assert TopkContract().run(empty, TARGET).status is Status.MISTRUSTED
    short = ScoreBatch(rows=(ScoreRow(delta=-1),))
    assert TopkOrder().run(short, TARGET).status is Status.MISTRUSTED


Fault = Callable[..., None]


def _both(change: Callable[[Tensor, Tensor, int], None]) -> dict[str, Fault]:
    """The same fault in both kernels: `change` gets logits, indices and the row length."""

    def decode(logits: Tensor, next_n: int, lens: Tensor, found: Tensor, *rest: Any, **named: Any) -> None:
        api.top_k_per_row_decode(logits, next_n, lens, found, *rest, **named)
        for row in range(len(found)):
            change(logits[row], found[row], int(lens[row // next_n]) - next_n + row % next_n + 1)

    def prefill(logits: Tensor, first: Tensor, last: Tensor, found: Tensor, *rest: Any, **named: Any) -> None:
        api.top_k_per_row_prefill(logits, first, last, found, *rest, **named)
        for row in range(len(found)):
            change(logits[row, int(first[row]) :], found[row], int(last[row] - first[row]))

    return {"top_k_per_row_decode": decode, "top_k_per_row_prefill": prefill}


def _tie_cap(logits: Tensor, found: Tensor, length: int) -> None:
    """sglang #30512: room for 4 candidates that tie at the cut."""
    if length > len(found):
        cut = logits[:length].sort(descending=True).values[len(found) - 1]
        tied = [at for at in range(len(found)) if logits[found[at] % len(logits)] == cut]
        found[tied[4:]] = -1


def _zero_padding(logits: Tensor, found: Tensor, length: int) -> None:
    """vLLM #45324: 0 where nothing is."""
    found[max(0, length) :] = 0


def _twice(logits: Tensor, found: Tensor, length: int) -> None:
    if length > 1:
        found[1] = found[0]


def _second_best(logits: Tensor, found: Tensor, length: int) -> None:
    """The best column gives way to one that was not chosen."""
    if length > len(found):
        best = int(logits[:length].argmax())
        rest = [column for column in range(length) if column not in found.tolist()]
        found[found == best] = rest[0]


def _one_column_more(logits: Tensor, found: Tensor, length: int) -> None:
    if length > len(found):
        found[0] = length


def _last_unwritten(logits: Tensor, found: Tensor, length: int) -> None:
    """vLLM #44527: slots keep what the last step left."""
    found[max(0, length) :] = -77


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (_tie_cap, "-1"),
        (_zero_padding, "not -1"),
        (_twice, "distinct"),
        (_second_best, "best value"),
        (_one_column_more, "outside of columns"),
        (_last_unwritten, "not -1"),
    ],
)
def test_contract_kills(change: Callable[[Tensor, Tensor, int], None], place: str) -> None:
    # A prefill row that does not start at 0 makes some of these fail by another name, hence only the row is asked for.
    summary = killed(TopkContract, faulty(**_both(change)))
    assert summary.startswith("row ")
    assert place in summary or "outside of columns" in summary


def _upper_bits_only(shift: int) -> dict[str, Fault]:
    """A radix select that stops before the last bits."""

    def coarse(logits: Tensor) -> Tensor:
        rounded = torch.empty_strided(logits.shape, logits.stride())  # rows as far apart as they were
        return rounded.copy_((logits.view(torch.int32) >> shift << shift).view(torch.float32))

    def decode(logits: Tensor, *rest: Any, **named: Any) -> None:
        api.top_k_per_row_decode(coarse(logits), *rest, **named)

    return {"top_k_per_row_decode": decode}


def test_contract_kills_equal_top_bits() -> None:
    assert "best value" in killed(TopkContract, faulty(**_upper_bits_only(10)))


def _starts_ignored(logits: Tensor, first: Tensor, last: Tensor, *rest: Any, **named: Any) -> None:
    """sglang #12583: one offset for start and end."""
    api.top_k_per_row_prefill(logits, first * 0, last, *rest, **named)


def test_contract_kills_a_window_from_zero() -> None:
    assert killed(TopkContract, faulty(top_k_per_row_prefill=_starts_ignored)).startswith("row ")


def _never_stable(function: Callable[..., None]) -> Fault:
    def select(*args: Any, stable: bool = False, **named: Any) -> None:
        function(*args, **named)

    return select


def _descending(function: Callable[..., None], at: int) -> Fault:
    """Stable, but in descending order."""

    def select(*args: Any, **named: Any) -> None:
        function(*args, **named)
        if named.get("stable"):
            indices = args[at]
            for row in indices:
                row[row >= 0] = row[row >= 0].flip(0)

    return select


def test_order_kills_a_race() -> None:
    faults = {name: _never_stable(getattr(api, name)) for name in ("top_k_per_row_decode", "top_k_per_row_prefill")}
    assert "rank" in killed(TopkOrder, faulty(**faults))


def test_order_kills_another_order() -> None:
    faults = {
        "top_k_per_row_decode": _descending(api.top_k_per_row_decode, 3),
        "top_k_per_row_prefill": _descending(api.top_k_per_row_prefill, 3),
    }
    assert "stable order" in killed(TopkOrder, faulty(**faults))


def test_order_is_skipped_where_the_release_has_none() -> None:
    def old(logits: Tensor, next_n: int, lens: Tensor, indices: Tensor, rows: int, s0: int, s1: int, k: int) -> None:
        api.top_k_per_row_decode(logits, next_n, lens, indices, rows, s0, s1, k)

    assert "0.1.20" in TopkOrder().inapplicable(faulty(top_k_per_row_decode=old))


_fill = attention.fill_gather_list


def _slot_zero(topk: Tensor, metadata: SparseMlaMetadata, table: Tensor, size: int) -> None:
    """vLLM #45324: what names no token becomes physical slot 0."""
    _fill(topk, metadata, table, size)
    metadata.paged_kv_indices[metadata.paged_kv_indices == -1] = 0


def _first_request_for_all(topk: Tensor, metadata: SparseMlaMetadata, table: Tensor, size: int) -> None:
    others = dataclasses.replace(metadata, req_id_per_token_T=torch.zeros_like(metadata.req_id_per_token_T))
    _fill(topk, others, table, size)


def _fixed_stride(topk: Tensor, metadata: SparseMlaMetadata, table: Tensor, size: int) -> None:
    """Row t at t * topk, as the sparse planner of AITER's own test wants it."""
    width = topk.shape[1]
    ragged = torch.arange(metadata.num_tokens + 1, dtype=torch.int32) * width
    metadata.paged_kv_indices.fill_(-1)
    _fill(topk, dataclasses.replace(metadata, paged_kv_indptr_T1=ragged), table, size)


def _page_for_slot(topk: Tensor, metadata: SparseMlaMetadata, table: Tensor, size: int) -> None:
    """aiter #5591: a table of pages read as one of slots."""
    _fill(topk, metadata, table, 1)


@pytest.mark.parametrize("fault", [_slot_zero, _first_request_for_all, _fixed_stride, _page_for_slot])
def test_sentinel_kills(monkeypatch: pytest.MonkeyPatch, fault: Any) -> None:
    monkeypatch.setattr(attention, "fill_gather_list", fault)
    assert "paged_kv_indices: " in killed(TopkSentinel, TARGET)


def test_a_counterexample_shrinks_and_survives_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row of one kind is left, and the saved document fails again."""
    monkeypatch.setattr(explore, "SHRINK_SECONDS", 5.0)
    searched = OwnInput(faulty(**_both(_twice)), TopkContract)
    events = explore.explore(searched, run_seed=0, seconds=60.0)
    found = next(event for event in events if isinstance(event, CounterexampleFound))
    assert isinstance(found.case, InputCase)
    assert len(found.case.input["rows"]) == 1
    again = decode_case(msgspec.json.encode(found.case))
    (verdict,) = searched.judge(again, [TopkContract.name])
    assert (verdict.status, verdict.summary) == (Status.FAILED, found.summary)
    (repaired,) = OwnInput(TARGET, TopkContract).judge(again, [TopkContract.name])
    assert repaired.status is Status.PASSED
