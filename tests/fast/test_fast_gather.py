"""The gather list: request-local positions to physical slots, and what becomes of entries that name nothing."""

from __future__ import annotations

import pytest
import torch
from fast_worlds import KERNELS, SMALL, path

from dsv32_fast.attention import decode, fill_gather_list
from dsv32_fast.batch import StepBatch
from dsv32_fast.kernels.emulated.memory import OutOfBoundsError
from dsv32_fast.kernels.selection import Admits, current
from dsv32_fast.metadata import BuilderConfig, MetadataBuilder, SparseMlaMetadata
from dsv32_fast.options import Options

HOST = current().from_host
PAGE = 4
TABLE = torch.tensor([[9, 2, -1], [5, 7, 3]], dtype=torch.int32)


def _metadata(step: StepBatch, topk: int = 4) -> SparseMlaMetadata:
    config = BuilderConfig(topk=topk, max_num_batched_tokens=16, num_heads=16)
    return MetadataBuilder(config=config, options=Options(), kernels=HOST).build(step)


def test_positions_become_slots_of_their_own_request() -> None:
    """Request 0 has 6 tokens in pages 9 and 2, request 1 has 9 in pages 5, 7, 3; three rows of 4 keys, two of none."""
    metadata = _metadata(StepBatch(query_lens=(1, 2), seq_lens=(6, 9), num_tokens=5))
    topk_TK = torch.tensor([[5, 0, 3, 4], [7, 1, 4, 2], [8, 0, 6, 3], [-1] * 4, [-1] * 4], dtype=torch.int32)
    fill_gather_list(topk_TK, metadata, TABLE, PAGE)
    expected = [9, 36, 39, 8, 31, 21, 28, 22, 12, 20, 30, 23]
    assert metadata.paged_kv_indptr_T1.tolist() == [0, 4, 8, 12, 12, 12]
    assert metadata.paged_kv_indices[:12].tolist() == expected


def test_short_rows_are_packed() -> None:
    metadata = _metadata(StepBatch(query_lens=(3,), seq_lens=(3,)))
    topk_TK = torch.tensor([[0, -1, -1, -1], [1, 0, -1, -1], [2, 0, 1, -1]], dtype=torch.int32)
    fill_gather_list(topk_TK, metadata, TABLE[1:], PAGE)
    assert metadata.paged_kv_indices[:6].tolist() == [20, 21, 20, 22, 20, 21]


@pytest.mark.admits(Admits(emulation="a GPU faults here, or uses foreign memory"))
@pytest.mark.parametrize("entry", [-1, 9, 400], ids=["-1", "page without memory", "beyond the table"])
def test_an_entry_that_names_nothing_stays_minus_one(entry: int) -> None:
    """vLLM #45324: written as 0 it would be attended, as the first slot of the cache; here the kernel faults on it."""
    metadata = _metadata(StepBatch(query_lens=(1,), seq_lens=(6,)))
    topk_TK = torch.tensor([[5, entry, entry, 0]], dtype=torch.int32)
    fill_gather_list(topk_TK, metadata, TABLE[:1], PAGE)
    assert metadata.paged_kv_indices[:4].tolist() == [9, -1, -1, 36]
    cache_PSD = torch.ones(10, PAGE, SMALL.latent_dim, dtype=torch.bfloat16)
    q_THD = torch.ones(1, SMALL.n_heads, SMALL.latent_dim, dtype=torch.bfloat16)
    with pytest.raises(OutOfBoundsError, match="kv_buffer: access to row -1"):
        decode(q_THD, cache_PSD, metadata, SMALL, HOST)


@pytest.mark.admits(Admits(topk=16))
def test_pages_are_neither_contiguous_nor_in_order() -> None:
    """Else the conversion could be the identity, and no test would see a wrong one."""
    run = path(Options(), KERNELS)
    state = run.new_state(160)
    run.decode(state, {0: tuple(range(20)), 1: (1,)})
    run.decode(state, {0: tuple(range(20))})
    slots = state.slots(0)
    assert not torch.equal(slots, torch.arange(len(slots)))
    assert bool((slots.diff() < 0).any())
    state.truncate(0, 5)
    run.decode(state, {1: tuple(range(20)), 0: tuple(range(15))})
    owned = [page for pages in state.pages.values() for page in pages]
    assert sorted(owned + state.free) == list(range(10)), "every page has one owner"
