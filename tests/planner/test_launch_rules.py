"""Launch rules at their limits, also those that no recorded plan covers."""

from __future__ import annotations

from typing import Any

import pytest

from dsv32_fast.kernels.emulated.device import MI300X, MI355X
from dsv32_fast.kernels.emulated.launch import LaunchRules, launch_rules

BF16, FP8, MIXED = (False, False), (True, True), (False, True)


def rules(heads: int, q: int, dtypes: tuple[bool, bool], batches: int = 4, **more: Any) -> LaunchRules:
    arguments: dict[str, Any] = {
        "device": MI355X,
        "batches": batches,
        "num_heads_per_head_k": heads,
        "num_heads_k": 1,
        "is_causal": True,
        "page_size": 1,
        "kv_granularity": 16,
        "max_seqlen_qo": q,
        "uni_seqlen_qo": q,
        "topk": -1,
        "max_split_per_batch": -1,
        "is_cp_round_robin": False,
        "q_fp8": dtypes[0],
        "kv_fp8": dtypes[1],
        "experimental": False,
        "parallel_enabled": True,
    }
    return launch_rules(**arguments | more)


@pytest.mark.parametrize(
    ("heads", "q", "dtypes", "packed", "tiles"),
    [
        (16, 1, BF16, 128, 1),
        (16, 3, BF16, 128, 1),
        (16, 4, BF16, 64, 1),
        (16, 5, BF16, 64, 2),
        (16, 7, BF16, 64, 2),
        (16, 8, BF16, 128, 1),
        (16, 9, BF16, 128, 2),
        (48, 1, BF16, 128, 1),
        (48, 2, BF16, 64, 2),
        (48, 4, BF16, 64, 4),
        (64, 1, BF16, 64, 1),
        (64, 2, BF16, 128, 1),
        (64, 3, BF16, 128, 2),
        (80, 2, BF16, 128, 2),
        (128, 3, BF16, 128, 3),
        (32, 3, FP8, 64, 2),
        (32, 4, FP8, 128, 1),
        (32, 5, FP8, 128, 2),
        (16, 4, FP8, 128, 1),
        (32, 1, MIXED, 128, 1),
        (128, 16, MIXED, 128, 2),
    ],
)
def test_query_tiles_on_gfx950(heads, q, dtypes, packed, tiles):
    found = rules(heads, q, dtypes)
    assert (found.packed_qo_len_per_wg, found.tiles_per_row) == (packed, tiles)
    assert found.tile_size == -(-q // tiles)


@pytest.mark.parametrize(
    ("device", "heads", "q", "dtypes", "ratio"),
    [
        (MI355X, 128, 1, BF16, 1),
        (MI355X, 128, 1, FP8, 1),
        (MI355X, 32, 1, FP8, 1),
        (MI355X, 96, 1, FP8, 6),
        (MI355X, 128, 1, MIXED, 8),
        (MI355X, 16, 1, MIXED, 1),
        (MI355X, 24, 1, MIXED, 1),
        (MI300X, 16, 1, BF16, 1),
        (MI300X, 32, 1, BF16, 2),
        (MI300X, 128, 1, FP8, 1),
        (MI300X, 64, 1, FP8, 1),
        (MI300X, 64, 2, FP8, 4),
        (MI300X, 128, 1, BF16, 8),
    ],
)
def test_head_folding(device, heads, q, dtypes, ratio):
    found = rules(heads, q, dtypes, device=device)
    assert (found.qk_batch_ratio, found.num_heads) == (ratio, heads // ratio)


@pytest.mark.parametrize(("cap", "splits"), [(-1, 256), (1, 4), (16, 64), (64, 256), (1000, 256)])
def test_split_budget(cap, splits):
    assert rules(16, 1, BF16, max_split_per_batch=cap).num_splits == splits


def test_split_budget_counts_folded_rows():
    assert rules(32, 1, MIXED, max_split_per_batch=4).num_splits == 32


def test_key_heads_share_the_compute_units():
    found = rules(16, 1, BF16, num_heads_k=2, q_fp8=False)
    assert found.num_cu == 128
    assert found.num_heads == 32


@pytest.mark.parametrize(("page_size", "overhead"), [(1, 16), (2, 8), (16, 1), (64, 1)])
def test_overhead_shrinks_with_the_page(page_size, overhead):
    assert rules(16, 1, BF16, page_size=page_size).overhead == overhead


@pytest.mark.parametrize(
    ("device", "uni", "most"), [(MI355X, 1, 8191), (MI355X, -1, 6826), (MI300X, 1, 3276), (MI300X, -1, 2730)]
)
def test_parallel_planner_needs_its_rows_in_lds(device, uni, most):
    """4 * (3 + 5 rows) bytes, 6 words per row where query lengths differ, in 160 or 64 KiB."""
    assert rules(16, 1, BF16, most, device=device, uni_seqlen_qo=uni).parallel
    assert not rules(16, 1, BF16, most + 1, device=device, uni_seqlen_qo=uni).parallel


@pytest.mark.parametrize(
    "change",
    [
        {"parallel_enabled": False},
        {"max_seqlen_qo": 2},
        {"topk": 2048},
        {"page_size": 64},
        {"num_heads_per_head_k": 32, "kv_fp8": True},
        {"num_heads_per_head_k": 144},
    ],
)
def test_parallel_planner_takes_plain_decode_only(change):
    assert rules(16, 1, BF16).parallel
    assert not rules(16, 1, BF16, **change).parallel


def test_tails_are_trimmed_for_causal_single_pages_only():
    assert rules(16, 4, BF16).trims_tail
    assert not rules(16, 4, BF16, is_causal=False).trims_tail
    assert not rules(16, 4, BF16, is_cp_round_robin=True).trims_tail
    assert not rules(16, 4, BF16, page_size=64).trims_tail


def test_topk_counts_pages():
    assert rules(16, 1, BF16, topk=100, page_size=64).topk == 2
    assert rules(16, 1, BF16, topk=0).is_sparse
    assert rules(16, 1, BF16).topk == -1
