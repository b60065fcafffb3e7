"""Cache writers, gatherers and quantisers: byte layouts, scales, skipped slots, flavours of fp8."""

from __future__ import annotations

import math

import pytest
import torch
from kernel_worlds import FAULTS, REFUSALS, RULE, U8, U32, admits
from under_test import (
    concat_and_cache_mla,
    cp_gather_indexer_k_quant_cache,
    indexer_k_quant_and_cache,
    per_group_quant_hip,
    per_token_quant_hip,
)

from dsv32_fast.kernels.emulated import quant
from dsv32_fast.kernels.emulated.cache import power_of_two_above
from dsv32_fast.kernels.emulated.device import MI300X, emulated_device
from dsv32_fast.kernels.emulated.memory import OutOfBoundsError
from dsv32_fast.kernels.emulated.quant import QuantType, get_hip_quant, pertoken_quant

FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
ONE = torch.ones(1)


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# ---- the latent cache ------------------------------------------------------------------------------------------------


@admits(latent=16, rope=8)
@pytest.mark.parametrize("page", [1, 4])
def test_latent_cache_bf16(page):
    """aiter#3235: fewer slots than tokens, and slot -1; nothing else of the cache changes."""
    kv_c, k_pe = randn(5, 16).bfloat16(), randn(5, 8, seed=1).bfloat16()
    cache = torch.full((12 // page, page, 24), math.nan, dtype=BF16)
    concat_and_cache_mla(kv_c, k_pe, cache, torch.tensor([7, -1, 0, 3]), "auto", ONE)
    flat = cache.view(12, 24)
    for token, slot in ((0, 7), (2, 0), (3, 3)):
        assert torch.equal(flat[slot], torch.cat([kv_c[token], k_pe[token]]))
    assert flat[[1, 2, 4, 5, 6, 8, 9, 10, 11]].isnan().all()


@admits(latent=4, rope=2)
@pytest.mark.parametrize("stored_as", [FP8, torch.uint8])
def test_latent_cache_fp8(stored_as):
    """Scale 0.3 (FlashMLA#184: not a power of two) and saturation at 448."""
    kv_c, k_pe = torch.tensor([[0.3, -0.6, 1e6, 0.0]]), torch.tensor([[0.15, -1e6]])
    cache = torch.zeros(2, 1, 6, dtype=torch.uint8).view(stored_as)
    concat_and_cache_mla(kv_c, k_pe, cache, torch.tensor([1]), "fp8", torch.tensor([0.3]))
    assert cache.view(FP8)[1, 0].float().tolist() == [1.0, -2.0, 448.0, 0.0, 0.5, -448.0]
    assert not cache.view(torch.uint8)[0].any()


@admits(latent=4, rope=2)
def test_flavour_of_fp8():
    """vllm#45720: bytes 0x38, 0x40, 0x7e, 0x80 are 1, 2, 448, -0 in FN and 0.5, 1, 224, NaN in FNUZ."""
    cache = torch.zeros(1, 1, 4, dtype=torch.uint8)
    values = torch.tensor([[1.0, 2.0, 448.0]]), torch.tensor([[-0.0]])
    concat_and_cache_mla(*values, cache, torch.tensor([0]), "fp8", ONE)
    assert cache.flatten().tolist() == [0x38, 0x40, 0x7E, 0x80]
    assert cache.view(torch.float8_e4m3fnuz).flatten().float().tolist()[:3] == [0.5, 1.0, 224.0]
    assert cache.view(torch.float8_e4m3fnuz).flatten().float()[3].isnan()
    with emulated_device(MI300X):
        concat_and_cache_mla(*values, cache, torch.tensor([0]), "fp8", ONE)
    assert cache.flatten().tolist() == [0x40, 0x48, 0x7F, 0x00]


@admits(emulation=REFUSALS)
def test_latent_cache_refusals():
    cache = torch.zeros(2, 1, 24, dtype=BF16)
    with pytest.raises(ValueError, match="fp8_ds_mla"):
        concat_and_cache_mla(randn(1, 16), randn(1, 8), cache, torch.tensor([0]), "fp8_ds_mla", ONE)
    with pytest.raises(ValueError, match="rows of 24"):
        concat_and_cache_mla(randn(1, 16), randn(1, 4), cache, torch.tensor([0]), "auto", ONE)
    with pytest.raises(OutOfBoundsError, match="row 2 of 2"):
        concat_and_cache_mla(randn(1, 16), randn(1, 8), cache, torch.tensor([2]), "auto", ONE)
    with pytest.raises(ValueError, match="slot_mapping"):
        concat_and_cache_mla(randn(1, 16), randn(1, 8), cache, torch.tensor([0, 1]), "auto", ONE)


# ---- the indexer cache -----------------------------------------------------------------------------------------------


@admits(emulation=RULE)
def test_page_planar_layout():
    """aiter#5591: a page of 4 slots of 2 dims is 8 key bytes, then 4 fp32 scales: not key and scale by turns."""
    cache = torch.full((2, 4, 6), 0xAA, dtype=torch.uint8)
    k = torch.tensor([[448.0, 224.0], [1.75, -0.875]])
    indexer_k_quant_and_cache(k, cache, torch.tensor([6, 4]), 2, "")
    page = cache[1].flatten()
    assert page[4:6].view(FP8).tolist() == [448.0, 224.0]
    assert page[0:2].view(FP8).tolist() == [448.0, -224.0]
    assert page[8:].view(torch.float32)[[2, 0]].tolist() == [1.0, 1.75 / 448]
    assert (page[[2, 3, 6, 7, *range(12, 16), *range(20, 24)]] == 0xAA).all()
    assert (cache[0] == 0xAA).all()


@admits(emulation=RULE)
def test_preshuffled_layout():
    """Slot 17 of a page of 32, dim 19 of 32: second row of tiles, second tile in it, row 1, column 3."""
    k = torch.zeros(1, 32)
    k[0, 19] = 1.0
    cache = torch.zeros(1, 32, 36, dtype=torch.uint8)
    indexer_k_quant_and_cache(k, cache, torch.tensor([17]), 32, "", preshuffle=True)
    assert cache.flatten()[: 32 * 32].nonzero().flatten().tolist() == [(1 * 2 + 1) * 256 + 1 * 16 + 3]
    with pytest.raises(ValueError, match="whole 16s"):
        indexer_k_quant_and_cache(k, cache.view(2, 16, 36)[:, :8].contiguous(), torch.tensor([0]), 32, "", True)


@pytest.mark.parametrize("scale_fmt", ["", "ue8m0"])
@pytest.mark.parametrize(
    ("page", "block", "preshuffle"),
    [(1, 128, False), (16, 128, False), (16, 128, True), (64, 128, True), (64, 64, False), (64, 64, True)],
)
def test_round_trip(page, block, preshuffle, scale_fmt):
    """Dequantised keys are within e4m3's half ulp: 2^-4 relative, or 2^-10 scales below the normal range."""
    pages = -(-70 // page)
    order = torch.randperm(pages + 5, generator=torch.Generator().manual_seed(9)).int()
    table = torch.full((3, max(pages, 5)), -1, dtype=torch.int32)
    table[0, :pages], table[2, :5] = order[:pages], order[pages:]
    cache = torch.full((pages + 5, page, 128 + 4 * (128 // block)), 0xFF, dtype=torch.uint8)
    k = 3 * randn(75, 128)
    k[3] = 0.0
    position = [(0, j) for j in range(70)] + [(2, j) for j in range(5)]
    slots = torch.tensor([int(table[b, j // page]) * page + j % page for b, j in position])
    indexer_k_quant_and_cache(k, cache, slots, block, scale_fmt, preshuffle)
    dst_k = torch.zeros(75, 128, dtype=torch.uint8).view(FP8)
    dst_scale = torch.zeros(75, 4 * (128 // block), dtype=torch.uint8)
    cu_seq_lens = torch.tensor([0, 70, 70, 75], dtype=torch.int32)
    cp_gather_indexer_k_quant_cache(cache, dst_k, dst_scale, table, cu_seq_lens, preshuffle)
    scales = dst_scale.view(torch.float32).repeat_interleave(block, 1).double()
    error = (dst_k.double() * scales - k.double()).abs()
    assert (error <= (U8 + 4 * U32) * k.double().abs() + scales * 2.0**-10).all()
    largest = k.view(75, -1, block).abs().amax(2).clamp(min=1e-4).repeat_interleave(block, 1)
    if scale_fmt == "ue8m0":
        assert (torch.frexp(scales).mantissa == 0.5).all()
        assert (scales / 2 < largest.double() / 448).all()
        assert (scales >= largest.double() / 448).all()
    else:
        assert torch.equal(scales, (largest / 448).double())


def test_scales_are_kept_in_fp32():
    """FlashMLA#184: a scale of 0.3 stays 0.3, unless it is asked to be a power of two."""
    k = torch.full((1, 128), 0.3 * 448)
    cache = torch.zeros(1, 1, 132, dtype=torch.uint8)
    indexer_k_quant_and_cache(k, cache, torch.tensor([0]), 128, "fp32")
    assert abs(cache[0, 0, 128:].view(torch.float32).item() - 0.3) <= 2 * U32 * 0.3
    indexer_k_quant_and_cache(k, cache, torch.tensor([0]), 128, "ue8m0")
    assert cache[0, 0, 128:].view(torch.float32).item() == 0.5


def test_values_are_multiplied_by_the_rounded_reciprocal():
    """k * (1 / scale), not k / scale: near a midpoint of e4m3 the two round differently, and bytes must be AITER's."""
    largest = 1 + torch.arange(64)[:, None] / 64
    scale = largest / 448
    midpoints = torch.tensor([17.0, 19.0, 34.0, 38.0, 152.0, 200.0]).repeat_interleave(5)
    ulps = torch.tensor([-2, -1, 0, 1, 2], dtype=torch.int32).repeat(6)
    k = torch.zeros(64, 128)
    k[:, :1] = largest
    k[:, 1:31] = ((midpoints * scale).view(torch.int32) + ulps).view(torch.float32)
    cache = torch.zeros(64, 1, 132, dtype=torch.uint8)
    indexer_k_quant_and_cache(k, cache, torch.arange(64), 128, "")
    multiplied, divided = (k * (1 / scale)).to(FP8), (k / scale).to(FP8)
    assert torch.equal(cache[:, 0, :128], multiplied.view(torch.uint8))
    assert not torch.equal(cache[:, 0, :128], divided.view(torch.uint8)), "the example tells the two apart"


@admits(emulation=RULE)
def test_power_of_two_above():
    values = torch.tensor([1.0, 1.0000001, 0.75, 0.5, 2.0**-120, 3e-5])
    assert power_of_two_above(values).tolist() == [2.0 ** math.ceil(math.log2(v)) for v in values.tolist()]


@admits(emulation=FAULTS)
def test_gather_outside_the_cache():
    cache, cu = torch.zeros(2, 4, 132, dtype=torch.uint8), torch.tensor([0, 5], dtype=torch.int32)
    out = torch.zeros(5, 128, dtype=torch.uint8), torch.zeros(5, 1)
    with pytest.raises(OutOfBoundsError, match="kv_cache"):
        cp_gather_indexer_k_quant_cache(cache, *out, torch.tensor([[0, 2]], dtype=torch.int32), cu)
    with pytest.raises(OutOfBoundsError, match="block_table"):
        cp_gather_indexer_k_quant_cache(cache, *out, torch.tensor([[0]], dtype=torch.int32), cu)


# ---- quantisers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quantise", [pertoken_quant, per_token_quant_hip, per_group_quant_hip])
def test_quantisers(quantise):
    """e4m3 is within 2^-4 relative, or 2^-10 scales below the normal range; the scale itself within 2 u."""
    x = (10 * randn(6, 256)).bfloat16()
    x[2] = 0
    values, scales = quantise(x, quant_dtype=FP8)
    groups = 2 if quantise is per_group_quant_hip else 1
    assert scales.shape == (6, groups)
    assert scales.dtype == torch.float32
    largest = x.double().view(6, groups, -1).abs().amax(2)
    largest[2] = {pertoken_quant: 448.0, per_token_quant_hip: 0.0, per_group_quant_hip: 1e-10}[quantise]
    assert ((scales.double() - largest / 448).abs() <= 2 * U32 * largest / 448).all()
    wide = scales.repeat_interleave(256 // groups, 1).double()
    error = (values.double() * wide - x.double()).abs()
    assert (error <= (U8 + 4 * U32) * x.double().abs() + wide * 2.0**-10).all()
    assert values.float().abs().amax().item() == 448


def test_transposed_scales_and_row_counts():
    x = randn(4, 256)
    values, scales = per_group_quant_hip(x, quant_dtype=FP8)
    same, transposed = per_group_quant_hip(x, quant_dtype=FP8, transpose_scale=True)
    assert torch.equal(values.view(torch.uint8), same.view(torch.uint8))
    assert torch.equal(transposed.view(2, 4), scales.T)
    _, scales = per_token_quant_hip(x, quant_dtype=FP8, num_rows=torch.tensor([1]), num_rows_factor=2)
    assert scales.isnan().flatten().tolist() == [False, False, True, True]


@admits(emulation=REFUSALS)
def test_quantiser_choice_and_refusals():
    assert get_hip_quant(QuantType.per_1x128) is quant.per_group_quant_hip
    assert get_hip_quant(QuantType.per_Token) is quant.per_token_quant_hip
    assert get_hip_quant(QuantType.No)(3) == (3, None)
    with pytest.raises(ValueError, match="per_Tensor"):
        get_hip_quant(QuantType.per_Tensor)
    with pytest.raises(ValueError, match="group_size"):
        per_group_quant_hip(randn(2, 100), quant_dtype=FP8)
    for dtype in (torch.float8_e4m3fnuz, torch.int8):
        with pytest.raises(TypeError, match=r"must be torch\.float8_e4m3fn"):
            per_token_quant_hip(randn(2, 100), quant_dtype=dtype)
    with pytest.raises(ValueError, match="scale"):
        per_token_quant_hip(randn(2, 100), torch.ones(1), quant_dtype=FP8)
