"""Indexer logits against a literal fp64 sum, and what the paged kernel writes and leaves."""

from __future__ import annotations

import math

import pytest
import torch
from kernel_worlds import FAULTS, REFUSALS, U32, admits
from under_test import deepgemm_fp8_paged_mqa_logits, fp8_mqa_logits, indexer_k_quant_and_cache

from dsv32_fast.kernels.emulated.memory import OutOfBoundsError

FP8, INF = torch.float8_e4m3fn, math.inf


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def literal(q_HD, k_UD, scale_U, w_H):
    """fp64 logits [U] and their bound: products of e4m3 are exact in fp32, so (D + H + 6) u on the sum of sizes."""
    q, k, scale, w = q_HD.double(), k_UD.double(), scale_U.double(), w_H.double()
    logits = ((q @ k.T).clamp(min=0) * scale * w[:, None]).sum(0)
    sizes = (q.abs() @ k.abs().T * scale * w.abs()[:, None]).sum(0)
    return logits, (q.shape[1] + q.shape[0] + 6) * U32 * sizes


class Paged:
    """A paged cache of two requests of 300 and 70 keys."""

    def __init__(self, page, next_n, preshuffle, heads=4, dims=128):
        self.page, self.next_n, self.preshuffle, self.contexts = page, next_n, preshuffle, [300, 70]
        pages = [-(-n // page) for n in self.contexts]
        order = torch.randperm(sum(pages) + 2, generator=torch.Generator().manual_seed(1)).int()
        self.table = torch.full((2, max(pages)), 10**6, dtype=torch.int32)
        self.table[0, : pages[0]], self.table[1, : pages[1]] = order[: pages[0]], order[pages[0] : sum(pages)]
        self.cache = torch.full((sum(pages) + 2, page, dims + 4), 0x7F, dtype=torch.uint8)  # NaN in both planes
        position = [(b, j) for b, n in enumerate(self.contexts) for j in range(n)]
        self.slots = torch.tensor([int(self.table[b, j // page]) * page + j % page for b, j in position])
        self.k = 2 * randn(len(position), dims)
        indexer_k_quant_and_cache(self.k, self.cache, self.slots, dims, "", preshuffle)
        self.q = randn(2, next_n, heads, dims, seed=2).to(FP8)
        self.weights = randn(2 * next_n, heads, seed=3)

    def run(self, width=1024, model_len=1000, chunk=256):
        out = torch.full((2 * self.next_n, width), 768.0)
        contexts, cache = torch.tensor(self.contexts, dtype=torch.int32), self.cache[:, :, None]
        deepgemm_fp8_paged_mqa_logits(
            self.q, cache, self.weights, out, contexts, self.table, model_len,
            Preshuffle=self.preshuffle, KVBlockSize=self.page, ChunkK=chunk,
        )  # fmt: skip
        return out

    def keys(self, request):
        rows = self.k[:300] if request == 0 else self.k[300:]
        scale = rows.abs().amax(1) / 448
        return (rows * (1 / scale)[:, None]).to(FP8), scale


@pytest.mark.parametrize(("page", "preshuffle"), [(1, False), (16, True), (64, False), (64, True)])
@pytest.mark.parametrize("next_n", [1, 3])
def test_paged_logits(next_n, page, preshuffle):
    paged = Paged(page, next_n, preshuffle)
    out = paged.run()
    for row in range(2 * next_n):
        request, n = divmod(row, next_n)
        context, visited = paged.contexts[request], (512, 256)[request]
        valid = context - next_n + n + 1
        expected, bound = literal(paged.q[request, n], *paged.keys(request), paged.weights[row])
        assert ((out[row, :valid].double() - expected[:valid]).abs() <= bound[:valid]).all()
        assert (out[row, valid:visited] == -INF).all(), "invalid positions of visited chunks"
        assert (out[row, visited:] == 768).all(), "later chunks are not written"


@admits(emulation=FAULTS)
def test_interleaved_reading_of_a_planar_page_is_far_outside_the_bound():
    """aiter#5591: the comparison above sees a reader that takes key and scale by turns."""
    paged = Paged(16, 1, False)
    planar = paged.cache.clone()
    turned = torch.cat(
        [planar.flatten(1)[:, : 16 * 128].view(-1, 16, 128), planar.flatten(1)[:, 16 * 128 :].view(-1, 16, 4)], 2
    )
    paged.cache = turned.contiguous()
    expected, bound = literal(paged.q[0, 0], *paged.keys(0), paged.weights[0])
    wrong = ~((paged.run()[0, :300].double() - expected).abs() <= bound)
    assert wrong.sum() > 290


@pytest.mark.parametrize("context", [0, 1, 255, 256, 257])
def test_chunk_edges(context):
    paged = Paged(16, 1, False)
    paged.contexts = [context, 0]
    out = paged.run(width=300, model_len=280)
    end = min(-(-context // 256) * 256, 280)
    assert (out[0, :context].isfinite() & (out[0, :context] != 768)).all()
    assert (out[0, context:end] == -INF).all()
    assert (out[0, end:] == 768).all()
    assert (out[1] == 768).all()


def test_rows_do_not_depend_on_their_company():
    paged = Paged(16, 1, False)
    together = paged.run()
    paged.contexts = [0, 70]
    assert torch.equal(paged.run()[1], together[1])


@admits(emulation=FAULTS)
def test_keys_beyond_the_table_count_as_zero():
    paged = Paged(16, 1, False)
    within = paged.run()
    paged.contexts[0] = 320
    out = paged.run()
    assert torch.equal(out[0, :300], within[0, :300])
    assert out[0, 304:320].tolist() == [0.0] * 16


@admits(emulation=REFUSALS)
def test_paged_refusals():
    paged = Paged(16, 1, False)
    with pytest.raises(ValueError, match="out_logits"):
        paged.run(width=100)
    paged.contexts = [300, 81]
    with pytest.raises(OutOfBoundsError, match="kv_cache: access to row 1000000"):
        paged.run()
    paged.page = 8
    with pytest.raises(ValueError, match="KVBlockSize"):
        paged.run()


@pytest.mark.parametrize("clean", [True, False])
def test_ragged_logits(clean):
    q, k = randn(5, 4, 128).to(FP8), randn(7, 128, seed=1).to(FP8)
    scale, weights = randn(7, seed=2).abs(), randn(5, 4, seed=3)
    starts, ends = [0, 0, 2, 5, 3], [1, 7, 4, 7, 3]
    bounds = torch.tensor(starts, dtype=torch.int32), torch.tensor(ends, dtype=torch.int32)
    out = fp8_mqa_logits(q, k, scale[:, None], weights, *bounds, clean)
    for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
        expected, bound = literal(q[row], k, scale, weights[row])
        assert ((out[row].double() - expected).abs() <= bound)[start:end].all()
        outside = torch.cat([out[row, :start], out[row, end:]])
        assert ((outside == -INF) if clean else outside.isnan()).all()


def test_relu_comes_before_the_weight():
    """Two heads of opposite sign and a negative weight: relu per head, then the weighted sum."""
    q = torch.zeros(1, 2, 16)
    q[0, 0, 0], q[0, 1, 0] = 1.0, -1.0
    k = torch.zeros(2, 16)
    k[0, 0], k[1, 0] = 2.0, -4.0
    bounds = torch.tensor([0]), torch.tensor([2])
    weights, scale = torch.tensor([[1.0, -1.0]]), torch.tensor([0.5, 0.25])
    assert fp8_mqa_logits(q.to(FP8), k.to(FP8), scale, weights, *bounds).tolist() == [[1.0, -1.0]]
