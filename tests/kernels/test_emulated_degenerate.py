"""Calls without tokens, without requests or without keys: nothing is written, or what the kernels say of nothing."""

from __future__ import annotations

import math

import pytest
import torch
from under_test import (
    biased_grouped_topk,
    concat_and_cache_mla,
    cp_gather_indexer_k_quant_cache,
    deepgemm_fp8_paged_mqa_logits,
    fp8_mqa_logits,
    fused_moe,
    indexer_k_quant_and_cache,
    moe_fused_gate,
    per_group_quant_hip,
    per_token_quant_hip,
    top_k_per_row_decode,
    top_k_per_row_prefill,
)

FP8 = torch.float8_e4m3fn


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def no_slots():
    return torch.empty(0, dtype=torch.int64)


@pytest.mark.parametrize("kind", ["auto", "fp8"])
@pytest.mark.parametrize("slots", [no_slots(), torch.tensor([-1, -1])], ids=["no tokens", "padding only"])
def test_writers_write_nothing(kind, slots):
    tokens = len(slots)
    latent = torch.full((4, 1, 576), 7.0).to(torch.bfloat16 if kind == "auto" else FP8)
    c, pe = torch.ones(tokens, 512).bfloat16(), torch.ones(tokens, 64).bfloat16()
    concat_and_cache_mla(c, pe, latent, slots, kind, torch.ones(1))
    assert (latent.float() == 7).all()
    index = torch.full((2, 64, 132), 0xAA, dtype=torch.uint8)
    indexer_k_quant_and_cache(torch.ones(tokens, 128).bfloat16(), index, slots, 128, "ue8m0")
    assert (index == 0xAA).all()


@pytest.mark.parametrize("requests", [0, 2])
def test_gathering_no_keys(requests):
    keys, scales = torch.empty(0, 128, dtype=torch.uint8), torch.empty(0, 1)
    table = torch.zeros(requests, 1, dtype=torch.int32)
    cache = torch.zeros(2, 64, 132, dtype=torch.uint8)
    cp_gather_indexer_k_quant_cache(cache, keys, scales, table, ints(*[0] * (requests + 1)))


@pytest.mark.parametrize("requests", [0, 2])
def test_paged_logits_of_empty_contexts_are_not_written(requests):
    out, cache = torch.full((requests, 256), 7.0), torch.zeros(2, 64, 1, 132, dtype=torch.uint8)
    q, weights = torch.zeros(requests, 1, 64, 128).to(FP8), torch.zeros(requests, 64)
    table = torch.zeros(requests, 1, dtype=torch.int32)
    deepgemm_fp8_paged_mqa_logits(q, cache, weights, out, ints(*[0] * requests), table, 256, KVBlockSize=64)
    assert (out == 7).all()


@pytest.mark.parametrize(("rows", "keys"), [(0, 5), (2, 0), (2, 5)])
def test_ragged_logits_of_nothing(rows, keys):
    """Rows that may see no key are -inf throughout."""
    q, k = torch.ones(rows, 64, 128).to(FP8), torch.ones(keys, 128).to(FP8)
    none = ints(*[0] * rows)
    logits = fp8_mqa_logits(q, k, torch.ones(keys), torch.ones(rows, 64), none, none)
    assert logits.shape == (rows, keys)
    assert (logits == -math.inf).all()


@pytest.mark.parametrize("rows", [0, 2])
def test_top_k_of_nothing_is_padding(rows):
    logits = torch.randn(rows, 256, generator=torch.Generator().manual_seed(0))
    for prefill in (False, True):
        found = torch.full((rows, 128), -7, dtype=torch.int32)
        if prefill:
            top_k_per_row_prefill(logits, ints(*[3] * rows), ints(*[3] * rows), found, None, rows, 256, 1, k=128)
        else:
            top_k_per_row_decode(logits, 1, ints(*[0] * rows), found, rows, 256, 1, k=128)
        assert (found == -1).all()


def test_routing_no_tokens():
    weights, ids = torch.empty(0, 8), torch.empty(0, 8, dtype=torch.int32)
    for dtype in (torch.float32, torch.bfloat16):
        logits, bias = torch.empty(0, 256, dtype=dtype), torch.zeros(256, dtype=dtype)
        biased_grouped_topk(logits, bias, weights, ids, 8, 4, True, 2.5)
        moe_fused_gate(logits, bias, weights, ids, 8, 4, 8, 0)
    assert weights.shape == ids.shape == (0, 8)


def test_experts_of_no_tokens():
    x, ids = torch.empty(0, 128).bfloat16(), torch.empty(0, 2, dtype=torch.int32)
    w1, w2 = torch.zeros(4, 256, 128).bfloat16(), torch.zeros(4, 128, 128).bfloat16()
    assert fused_moe(x, w1, w2, torch.empty(0, 2), ids).shape == (0, 128)


@pytest.mark.parametrize(("quantise", "scales"), [(per_token_quant_hip, 1), (per_group_quant_hip, 2)])
def test_quantising_no_rows(quantise, scales):
    values, found = quantise(torch.empty(0, 256).bfloat16(), quant_dtype=FP8)
    assert (values.shape, found.shape) == ((0, 256), (0, scales))
