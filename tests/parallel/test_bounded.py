"""The bounds hold for fp32 and bf16 arithmetic in any order of summation, and are small enough to see a lost part."""

from __future__ import annotations

import pytest
import torch

from dsv32_fast.kernels.emulated.attention import mla_decode_fwd
from dsv32_fast.layers import quantise_static
from dsv32_fast.parallel.bounded import attended, exact, gated, summed, total, turned, weighted

SEEDS = range(8)


def within(computed: torch.Tensor, bound) -> float:
    """Largest share of the bound that was used."""
    error = (computed.double() - bound.value).abs()
    return float(torch.where(error == 0, 0.0, error / bound.err).max())


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("seed", SEEDS)
def test_row_parallel_product(seed):
    """A product in one piece, and in four stored pieces summed: both within their bounds, a lost piece outside."""
    x, w = drawn(seed, 6, 64), drawn(seed + 100, 32, 64)
    one = exact(x).linear(w).stored()
    pieces = [exact(x).columns(r, 4).linear(w.chunk(4, 1)[r]).stored() for r in range(4)]
    four = summed(pieces)
    computed = (x.float() @ w.float().T).bfloat16()
    parts = [(x.chunk(4, 1)[r].float() @ w.chunk(4, 1)[r].float().T).bfloat16().float() for r in range(4)]
    assert within(computed, one) <= 1
    assert within(sum(parts).bfloat16(), four) <= 1
    assert within(sum(parts[:3]).bfloat16(), four) > 1
    assert float((computed.double() - sum(parts).bfloat16().double()).abs().sub(one.err + four.err).max()) <= 0
    assert torch.allclose(four.value, one.value, rtol=1e-12, atol=1e-12)
    assert summed([one]) is one


@pytest.mark.parametrize("seed", SEEDS)
def test_gated_product_of_stored_operands(seed):
    """The chain of an MLP up to its down projection; a wrong activation is outside."""
    x, w1, w3 = drawn(seed, 6, 64), drawn(seed + 1, 32, 64), drawn(seed + 2, 32, 64)
    gate, up = ((x.float() @ w.float().T).bfloat16().float() for w in (w1, w3))
    bound = gated(exact(x).linear(w1).stored(), exact(x).linear(w3).stored())
    assert within((torch.nn.functional.silu(gate) * up).bfloat16(), bound) <= 1
    assert within((torch.nn.functional.gelu(gate) * up).bfloat16(), bound) > 1


@pytest.mark.parametrize("seed", SEEDS)
def test_weighted_sum(seed):
    y, weights = drawn(seed, 5, 8, 16).float(), drawn(seed + 1, 5, 8).float().abs()
    bound = weighted(exact(y), weights)
    for order in (torch.arange(8), torch.arange(8).flip(0)):
        computed = torch.zeros(5, 16)
        for k in order.tolist():
            computed += weights[:, k, None] * y[:, k]
        assert within(computed, bound) <= 1
    assert within(computed - weights[:, 0, None] * y[:, 0], bound) > 1


def test_total_adds_bounds():
    a, b = exact(torch.tensor([1.0])).stored(), exact(torch.tensor([-1.0])).stored()
    assert total([a, b]).value.item() == 0
    assert total([a, b]).err.item() > a.err.item() + b.err.item()


@pytest.mark.parametrize("seed", SEEDS)
def test_rope(seed):
    x, angle = drawn(seed, 5, 3, 8), drawn(seed + 1, 5, 1, 4).float()
    cos, sin = angle.cos(), angle.sin()
    a, b = x[..., 0::2].float(), x[..., 1::2].float()
    computed = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2).bfloat16()
    bound = turned(exact(x), cos, sin)
    assert within(computed, bound) <= 1
    assert within(computed.flip(0), bound) > 1


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("keys", [1, 7, 64])
def test_attention_kernel(seed, keys):
    q, kv = drawn(seed, 1, 16, 24), drawn(seed + 1, keys, 1, 1, 24)
    out = torch.zeros(1, 16, 16, dtype=torch.bfloat16)
    indptr = torch.tensor([0, keys], dtype=torch.int32)
    arguments = (torch.tensor([0, 1], dtype=torch.int32), indptr, torch.arange(keys, dtype=torch.int32))
    mla_decode_fwd(q, kv, out, *arguments, torch.ones(1, dtype=torch.int32), 1, sm_scale=0.3)
    bound = attended(q[0], kv[:, 0, 0], 16, 0.3)
    assert within(out[0], bound) <= 1
    if keys > 1:  # one key less is outside
        assert within(out[0], attended(q[0], kv[1:, 0, 0], 16, 0.3)) > 1


@pytest.mark.parametrize("seed", SEEDS)
def test_static_quantisation(seed):
    """Small, ordinary and saturated values; another scale is outside."""
    x, scale = drawn(seed, 4, 64).float() * torch.tensor([1e-4, 0.1, 10.0, 300.0])[:, None], 0.13
    computed = quantise_static(x, torch.tensor([scale])).float() * scale
    assert int((computed.abs() > 448 * scale * 0.999).sum()) > 0
    assert within(computed, exact(x).quantised(scale)) <= 1
    assert within(computed * 1.2, exact(x).quantised(scale)) > 1


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("keys", [1, 7, 64])
def test_attention_kernel_over_an_fp8_cache(seed, keys):
    scales = torch.tensor([0.13]), torch.tensor([0.11])
    q, kv = quantise_static(drawn(seed, 1, 16, 24), scales[0]), quantise_static(drawn(seed, keys, 1, 1, 24), scales[1])
    out = torch.zeros(1, 16, 16, dtype=torch.bfloat16)
    indptr = torch.tensor([0, keys], dtype=torch.int32)
    arguments = (torch.tensor([0, 1], dtype=torch.int32), indptr, torch.arange(keys, dtype=torch.int32))
    lengths = torch.ones(1, dtype=torch.int32)
    mla_decode_fwd(q, kv, out, *arguments, lengths, 1, sm_scale=0.3, q_scale=scales[0], kv_scale=scales[1])
    q_HD, kv_KD = q[0].float() * scales[0], kv[:, 0, 0].double() * scales[1].double()
    bound = attended(q_HD, kv_KD, 16, 0.3, fp8=True)
    assert within(out[0], bound) <= 1
    assert within(out[0] / 0.11, bound) > 1
    if keys == 7:  # one key less is outside
        assert within(out[0], attended(q_HD, kv_KD[1:], 16, 0.3, fp8=True)) > 1
