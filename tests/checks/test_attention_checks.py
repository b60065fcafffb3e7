"""Checks of attention, converters and gathers: each sees different faults in the right place, and no fault in none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from input_checks import assert_faultless, failure, faulty
from torch import Tensor

from dsv32_fast import attention as path_attention
from dsv32_fast.kernels.emulated import attention as emulated_attention
from dsv32_fast.kernels.mounted import EMULATION
from dsv32_fast.metadata import SparseMlaMetadata
from dsv32_fast.options import PRESETS
from dsv32_fuzz.checks.attention import AttentionNumerics, TracerCoverage, TracerRows
from dsv32_fuzz.checks.attention_invariance import (
    Determinism,
    DispatchConsistency,
    Poison,
    ReduceMerge,
    SplitInvariance,
)
from dsv32_fuzz.checks.converters import CacheWrite, Converter, Gather
from dsv32_fuzz.checks.own_input import InputCheck
from dsv32_fuzz.targets.intree import InTreeTarget

CHECKS: tuple[type[InputCheck[Any]], ...] = (
    TracerCoverage,
    TracerRows,
    AttentionNumerics,
    SplitInvariance,
    ReduceMerge,
    Determinism,
    Poison,
    DispatchConsistency,
    Converter,
    Gather,
    CacheWrite,
)
decode: Any = EMULATION.mla_decode_fwd
Change = Callable[..., tuple[Tensor, ...]]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_no_fault_no_failure(check: type[InputCheck[Any]]) -> None:
    for seed, options in enumerate(("pr47766", "baseline", "vllm026")):
        assert_faultless(check, InTreeTarget(PRESETS[options]), seed, 8)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_no_fault_no_failure_at_length(check: type[InputCheck[Any]], seed: int) -> None:
    assert_faultless(check, InTreeTarget(PRESETS["pr47766"]), 100 + seed, 60)


def bits(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.element_size() == 1 else x


def exchanged(x: Tensor, one: int, other: int, dim: int) -> Tensor:
    order = torch.arange(x.shape[dim])
    order[[one, other]] = order[[other, one]]
    return bits(x).index_select(dim, order).view(x.dtype)


def rows_exchanged(q: Tensor, *args: Any, **kwargs: Any) -> Any:
    return decode(exchanged(q, 0, len(q) - 1, 0), *args, **kwargs)


def heads_exchanged(q: Tensor, *args: Any, **kwargs: Any) -> Any:
    return decode(exchanged(q, 3, 4, 1), *args, **kwargs)


def rope_dropped(q: Tensor, kv: Tensor, o: Tensor, *args: Any, **kwargs: Any) -> Any:
    q = q.clone()
    bits(q)[..., o.shape[2] :] = 0
    return decode(q, kv, o, *args, **kwargs)


def own_scale(*args: Any, **kwargs: Any) -> Any:
    return decode(*args, **{**kwargs, "sm_scale": None})


def last_entry_is_the_first(*args: Any, **k: Any) -> Any:
    q, kv, o, qo, indptr, indices, *a = args
    indices = indices.clone()
    indices[int(indptr[-1]) - 1] = indices[0]
    return decode(q, kv, o, qo, indptr, indices, *a, **k)


def value_scale_forgotten(q: Tensor, kv: Tensor, o: Tensor, *args: Any, **kwargs: Any) -> Any:
    result = decode(q, kv, o, *args, **kwargs)
    if kwargs.get("kv_scale") is not None:
        o /= kwargs["kv_scale"].item()
    return result


def base_two_lse(*args: Any, **kwargs: Any) -> Any:
    logits, lse = decode(*args, **kwargs)
    return logits, None if lse is None else lse * 1.4426950408889634


def averaged(partials: Tensor, lses: Tensor, *args: Any, **kwargs: Any) -> None:
    EMULATION.mla_reduce_v1(partials, torch.zeros_like(lses), *args, **kwargs)


def last_partial_dropped(partials: Tensor, lses: Tensor, indptr: Tensor, *args: Any) -> None:
    counts = indptr.diff()
    assert len(counts)
    lses = lses.clone()
    lses[args[1][indptr[1:][counts > 1].long() - 1].long()] = -torch.inf
    EMULATION.mla_reduce_v1(partials, lses, indptr, *args)


def lse_of_the_largest_alone(partials: Tensor, lses: Tensor, *args: Any) -> None:
    EMULATION.mla_reduce_v1(partials, lses, *args)
    if args[-1] is not None:
        args[-1][args[-1] != 768] -= 0.01


def unsplit_zeroed(partials: Tensor, lses: Tensor, indptr: Tensor, final_map: Tensor, *args: Any) -> None:
    EMULATION.mla_reduce_v1(partials, lses, indptr, final_map, *args)
    for tile in (indptr.diff() < 2).nonzero()[:, 0].tolist():
        args[3][int(final_map[tile, 0])] = 0


KERNELS = [
    (TracerCoverage, {"mla_decode_fwd": last_entry_is_the_first}, "lost 1 of"),
    (TracerCoverage, {"mla_decode_fwd": value_scale_forgotten}, "row 0"),
    (TracerRows, {"mla_decode_fwd": rows_exchanged}, "answered"),
    (TracerRows, {"mla_decode_fwd": heads_exchanged}, "head 3: the query of row 0 (request 0, token 0), head 4"),
    (TracerRows, {"mla_decode_fwd": rope_dropped}, "a score of the RoPE part is 0 ln 2"),
    (TracerRows, {"mla_decode_fwd": own_scale}, "and no query has such scores"),
    (AttentionNumerics, {"mla_decode_fwd": base_two_lse}, "LSE of row 0"),
    (AttentionNumerics, {"mla_decode_fwd": last_entry_is_the_first}, "output of row"),
    (ReduceMerge, {"mla_reduce_v1": averaged}, "output of head 0: error"),
    (ReduceMerge, {"mla_reduce_v1": last_partial_dropped}, "output of head 0: error"),
    (ReduceMerge, {"mla_reduce_v1": lse_of_the_largest_alone}, "LSE of head 0: error"),
    (ReduceMerge, {"mla_reduce_v1": unsplit_zeroed}, "it has nothing to merge and was written"),
]


@pytest.mark.parametrize(("check", "replaced", "place"), KERNELS)
def test_a_faulty_kernel_is_seen(check: type[InputCheck[Any]], replaced: dict[str, Any], place: str) -> None:
    assert place in failure(check, faulty(**replaced))


@pytest.mark.parametrize("seed", range(3))
def test_a_key_that_is_too_short_is_seen(seed: int) -> None:
    """#42982: the plan of the step before sends a row to another part of the gather list."""
    told = failure(TracerCoverage, InTreeTarget(PRESETS["pr42982"]), seed)
    assert "lost" in told or "too often" in told
    assert "token" in told


Fill = Callable[[Tensor, SparseMlaMetadata, Tensor, int], None]
fill: Fill = path_attention.fill_gather_list


def first_slot_for_nothing(topk_TK: Tensor, metadata: SparseMlaMetadata, table: Tensor, page: int) -> None:
    fill(topk_TK, metadata, table, page)
    indices = metadata.paged_kv_indices
    indices.masked_fill_(indices == -1, 0)


def next_slot(topk_TK: Tensor, metadata: SparseMlaMetadata, table: Tensor, page: int) -> None:
    fill(torch.where(topk_TK % 4 == 3, topk_TK - 1, topk_TK), metadata, table, page)


def table_of_request_0(topk_TK: Tensor, metadata: SparseMlaMetadata, table: Tensor, page: int) -> None:
    fill(topk_TK, metadata, table[:1].expand_as(table), page)


def writes_behind(topk_TK: Tensor, metadata: SparseMlaMetadata, table: Tensor, page: int) -> None:
    fill(topk_TK, metadata, table, page)
    end = int(metadata.paged_kv_indptr_T1[-1])
    metadata.paged_kv_indices[end : end + 1] = 0


def in_int32(topk_TK: Tensor, metadata: SparseMlaMetadata, table: Tensor, page: int) -> None:
    """Byte offsets of 4 per slot, computed in int32."""
    fill(topk_TK, metadata, table, page)
    indices = metadata.paged_kv_indices
    indices.copy_(torch.where(indices >= 0, (indices * 4) // 4, indices))


@pytest.mark.parametrize(
    ("check", "fault", "place"),
    [
        (Converter, first_slot_for_nothing, "0 instead of -1"),
        (Converter, next_slot, "position"),
        (Converter, table_of_request_0, "(request 1"),
        (Converter, writes_behind, "behind the list: 0"),
        (Converter, in_int32, "instead of"),
        (TracerCoverage, next_slot, "doubled, 2 times"),
        (TracerCoverage, table_of_request_0, "request 1"),
    ],
)
def test_a_faulty_gather_list_is_seen(
    check: type[InputCheck[Any]], fault: Fill, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(path_attention, "fill_gather_list", fault)
    assert place in failure(check, InTreeTarget(PRESETS["pr47766"]), examples=100)


def moved(o: Tensor, by: float) -> None:
    o.view(-1)[0] *= 1 + by


def nudged_by_company(q: Tensor, kv: Tensor, o: Tensor, *args: Any, **kwargs: Any) -> Any:
    """One bit of the first row, in batches of an even number of rows."""
    result = decode(q, kv, o, *args, **kwargs)
    if len(q) % 2 == 0:
        moved(o, 2.0**-7)
    return result


def merged_unweighted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulated_attention, "mla_reduce_v1", averaged)


def test_a_row_that_its_company_changes_is_seen() -> None:
    told = failure(SplitInvariance, faulty(mla_decode_fwd=nudged_by_company))
    assert "cut alike" in told or "output of row" in told


def test_an_unweighted_merge_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    merged_unweighted(monkeypatch)
    assert "output of row" in failure(SplitInvariance, InTreeTarget(PRESETS["pr47766"]))


class Counting:
    """A kernel whose every third call is off by one bit of one element, or one that keeps a value between calls."""

    def __init__(self, kept: bool) -> None:
        self.calls, self.kept, self.value = 0, kept, torch.zeros(1)

    def __call__(self, q: Tensor, kv: Tensor, o: Tensor, *args: Any, **kwargs: Any) -> Any:
        result = decode(q, kv, o, *args, **kwargs)
        self.calls += 1
        if self.kept:
            o.view(-1)[0] += self.value.to(o)[0]
            self.value = o.view(-1)[:1].float().clone()
        elif self.calls % 3 == 0:
            moved(o, 2.0**-7)
        return result


@pytest.mark.parametrize("kept", [False, True])
def test_runs_that_differ_are_seen(kept: bool) -> None:
    told = failure(Determinism, faulty(mla_decode_fwd=Counting(kept)))
    assert "changed the output of row 0 (request 0, token 0), head 0" in told


def touches_all_slots(q: Tensor, kv: Tensor, o: Tensor, *args: Any, **kwargs: Any) -> Any:
    result = decode(q, kv, o, *args, **kwargs)
    o += (kv.float().sum() * 0).to(o)
    return result


def reads_one_too_far(*args: Any, **k: Any) -> Any:
    q, kv, o, qo, indptr, indices, *a = args
    result = decode(q, kv, o, qo, indptr, indices, *a, **k)
    end = int(indptr[-1])
    if end < len(indices):
        o += 0 * kv[indices[end].long()].float().sum().to(o)
    return result


def touches_padding(q: Tensor, kv: Tensor, o: Tensor, *args: Any, **kwargs: Any) -> Any:
    result = decode(q, kv, o, *args, **kwargs)
    o += (q.float().sum() * 0).to(o)
    return result


@pytest.mark.parametrize("fault", [touches_all_slots, reads_one_too_far, touches_padding])
def test_reading_what_is_nobodys_is_seen(fault: Any) -> None:
    told = failure(Poison, faulty(mla_decode_fwd=fault))
    assert "poison in unread memory changed" in told or "raised IndexError" in told


def rounded_alone(q: Tensor, *args: Any, **kwargs: Any) -> Any:
    """A kernel for few rows that stores the queries in fewer bits."""
    few = q.to(torch.float8_e4m3fn).to(q.dtype) if len(q) < 3 and q.element_size() > 1 else q
    return decode(few, *args, **kwargs)


def scaled_when_many(*args: Any, **kwargs: Any) -> Any:
    return decode(*args, **{**kwargs, "sm_scale": kwargs["sm_scale"] * (1.05 if len(args[0]) >= 32 else 1.0)})


@pytest.mark.parametrize(("fault", "sizes"), [(rounded_alone, (1, 2)), (scaled_when_many, (32, 33, 64))])
def test_a_kernel_that_is_wrong_for_some_batch_sizes_is_seen(fault: Any, sizes: tuple[int, ...]) -> None:
    told = failure(DispatchConsistency, faulty(mla_decode_fwd=fault))
    assert any(told.startswith(f"in a batch of {size} rows: ") for size in sizes)


gather: Any = EMULATION.cp_gather_indexer_k_quant_cache
store: Any = EMULATION.concat_and_cache_mla


def layout_forgotten(*args: Any, preshuffle: bool = False) -> None:
    gather(*args)


def one_page_for_all(cache: Tensor, keys: Tensor, scales: Tensor, table: Tensor, *rest: Any, **kwargs: Any) -> None:
    gather(cache, keys, scales, table[:, :1].expand_as(table), *rest, **kwargs)


def scales_shifted(cache: Tensor, keys: Tensor, scales: Tensor, *rest: Any, **kwargs: Any) -> None:
    gather(cache, keys, scales, *rest, **kwargs)
    scales.copy_(scales.roll(1, 0))


def padding_stored(c: Tensor, pe: Tensor, cache: Tensor, slots: Tensor, *rest: Any) -> None:
    store(c, pe, cache, slots.clamp_min(0), *rest)


def scale_forgotten(c: Tensor, pe: Tensor, cache: Tensor, slots: Tensor, kind: str, scale: Tensor) -> None:
    store(c, pe, cache, slots, kind, torch.ones_like(scale))


def halves_exchanged(c: Tensor, pe: Tensor, *rest: Any) -> None:
    store(c, pe.roll(1, 1), *rest)


@pytest.mark.parametrize(
    ("check", "replaced", "place"),
    [
        (Gather, {"cp_gather_indexer_k_quant_cache": layout_forgotten}, "the key of request 0, position 0 came from"),
        (Gather, {"cp_gather_indexer_k_quant_cache": one_page_for_all}, "position"),
        (Gather, {"cp_gather_indexer_k_quant_cache": scales_shifted}, "the scale of request 0, position 0 came from"),
        (CacheWrite, {"concat_and_cache_mla": padding_stored}, "slot 0"),
        (CacheWrite, {"concat_and_cache_mla": scale_forgotten}, "instead of"),
        (CacheWrite, {"concat_and_cache_mla": halves_exchanged}, "column 512"),
    ],
)
def test_faulty_gathers_and_writers_are_seen(
    check: type[InputCheck[Any]], replaced: dict[str, Any], place: str
) -> None:
    assert place in failure(check, faulty(**replaced))
