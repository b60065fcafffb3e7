"""Byte layouts of the paged caches, the two e4m3 flavours, and the page table."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch

from dsv32_ref.cache import CacheFormat, IndexCache, LatentCache, LatentLayout, PageTable, encode_656
from dsv32_ref.config import BF16_Q, FP32_Q, GOLDEN, Config
from dsv32_ref.decode import decode, prefill
from dsv32_ref.quant import act_quant
from dsv32_ref.state import Model, State
from dsv32_ref.weights import assemble, synthetic

TRUE = Config()


def tokens(n: int, width: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, width, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("flavour", ["e4m3fn", "e4m3fnuz"])
@pytest.mark.parametrize("layout", get_args(LatentLayout))
def test_what_is_written_is_read(layout: LatentLayout, flavour: str, page_size: int) -> None:
    form = CacheFormat(latent=layout, page_size=page_size, flavour=flavour, scale=0.25)  # type: ignore[arg-type]
    cache, kv = LatentCache(TRUE, form, 192, torch.float32), tokens(100, 576)
    slots = torch.randperm(192, generator=torch.Generator().manual_seed(1))[:100]
    cache.write(slots, kv)
    read = cache.gather(slots)
    # Half an ulp: bf16 2^-8, e4m3 2^-4; below the normal range of e4m3 half a step, 2^-10 (FNUZ 2^-11) of the scale.
    exact = {"plain": (0.0, 0.0), "bf16": (2**-8, 0.0), "fp8_flat": (2**-4, 0.25 * 2**-10)}
    rtol, atol = exact.get(layout, (2**-4, 2**-10 * float(act_quant(kv[:, :512])[1].max()) * 2))
    torch.testing.assert_close(read, kv, rtol=rtol, atol=atol)
    if layout.startswith("fp8_656"):
        torch.testing.assert_close(read[:, 512:], kv[:, 512:], rtol=2**-8, atol=0.0)
    else:
        assert (torch.equal(read, kv)) == (layout == "plain")
    # Nothing else was written: what was never stored reads NaN, and a negative slot reads zeros.
    others = torch.tensor(sorted(set(range(192)) - set(slots.tolist())))
    assert bool(cache.gather(others).isnan().any(-1).all())
    assert torch.equal(cache.gather(torch.tensor([[-1, int(slots[0])]]))[0, 0], torch.zeros(576))


def test_a_656_byte_record_is_contiguous_per_token_or_planar_per_page() -> None:
    kv, slots = tokens(64, 576), torch.arange(64) + 64
    values, scale, rope = (part.contiguous().view(torch.uint8) for part in encode_656(kv, TRUE, CacheFormat()))
    assert (values.shape[1], scale.shape[1], rope.shape[1]) == (512, 16, 128)
    token = LatentCache(TRUE, CacheFormat(latent="fp8_656"), 128, torch.float32)
    planar = LatentCache(TRUE, CacheFormat(latent="fp8_656_planar"), 128, torch.float32)
    for cache in (token, planar):
        cache.write(slots, kv)
    record = token.planes.bytes[(64 + 5) * 656 :][:656]
    assert torch.equal(record, torch.cat([values[5], scale[5], rope[5]]))
    page = planar.planes.bytes[64 * 656 :]
    for start, part in ((0, values), (64 * 512, scale), (64 * 528, rope)):
        width = part.shape[1]
        assert torch.equal(page[start + 5 * width :][:width], part[5])


def test_index_pages_hold_all_keys_then_all_scales() -> None:
    """Page-planar and not interleaved by token (aiter #5591)."""
    config = GOLDEN.replace(index_head_dim=128)
    values, scale = act_quant(tokens(4, 128))
    cache = IndexCache(config, CacheFormat(index="fp8_132", page_size=4), 8, torch.float32)
    cache.write(torch.tensor([4, 5, 6, 7]), values.float(), scale[:, 0])
    page = cache.planes.bytes[4 * 132 :]
    assert torch.equal(page[:512].view(4, 128), values.view(torch.uint8))
    assert torch.equal(page[512:].view(torch.float32), scale[:, 0])
    keys, read = cache.gather(torch.tensor([6, 4]))
    assert torch.equal(keys, values.float()[[2, 0]])
    assert torch.equal(read, scale[[2, 0], 0])


def test_the_same_bytes_mean_half_in_the_other_flavour() -> None:
    """0x38, 0x40, 0x7e, 0x80 (vllm #45720)."""
    bits = torch.tensor([0x38, 0x40, 0x7E, 0x80], dtype=torch.uint8)
    assert bits.view(torch.float8_e4m3fn).float().tolist() == [1.0, 2.0, 448.0, 0.0]
    fnuz = bits.view(torch.float8_e4m3fnuz).float().tolist()
    assert fnuz[:3] == [0.5, 1.0, 224.0]
    assert math.isnan(fnuz[3])
    written = LatentCache(TRUE, CacheFormat(latent="fp8_flat"), 64, torch.float32)
    written.write(torch.tensor([0]), torch.ones(1, 576))
    misread = LatentCache(TRUE, CacheFormat(latent="fp8_flat", flavour="e4m3fnuz"), 64, torch.float32)
    misread.planes.bytes = written.planes.bytes
    assert torch.equal(misread.gather(torch.tensor([0])), torch.full((1, 576), 0.5))


def test_fnuz_never_writes_beyond_224() -> None:
    cache = LatentCache(TRUE, CacheFormat(latent="fp8_flat", flavour="e4m3fnuz"), 64, torch.float32)
    cache.write(torch.tensor([0]), torch.full((1, 576), 1e4))
    assert float(cache.gather(torch.tensor([0])).max()) == 224.0


def test_scales_need_not_be_powers_of_two() -> None:
    """Scale 0.3 read through e8m0 would be 0.25 or 0.5 (FlashMLA #184)."""
    cache = LatentCache(TRUE, CacheFormat(latent="fp8_656"), 64, torch.float32)
    parts = (
        torch.full((1, 512), 0x38, dtype=torch.uint8),
        torch.full((1, 4), 0.3),
        torch.zeros(1, 64).to(torch.bfloat16),
    )
    cache.planes.write(torch.tensor([3]), parts)
    assert torch.equal(cache.gather(torch.tensor([3]))[0, :512], torch.full((512,), 0.3))


def test_writers_differ_in_their_scales_and_agree_in_their_values() -> None:
    kv = tokens(32, 576) * torch.logspace(-6, 3, 32)[:, None]
    scales = {}
    for rule in ("deepseek", "flashmla", "vllm"):
        cache = LatentCache(TRUE, CacheFormat(latent="fp8_656", rule=rule), 64, torch.float32)  # type: ignore[arg-type]
        cache.write(torch.arange(32), kv)
        scales[rule] = encode_656(kv, TRUE, CacheFormat(rule=rule))[1]  # type: ignore[arg-type]
        atol = 2**-10 * scales[rule].repeat_interleave(128, -1)
        assert bool(((cache.gather(torch.arange(32)) - kv).abs()[:, :512] <= 2**-4 * kv[:, :512].abs() + atol).all())
    assert float(scales["deepseek"].min()) == 2.0**-22
    assert float(scales["flashmla"].min()) == 2.0**-13
    mantissas = torch.frexp(scales["vllm"]).mantissa
    assert bool((mantissas != 0.5).any())


def test_index_records_refuse_values_that_are_not_e4m3() -> None:
    cache = IndexCache(GOLDEN, CacheFormat(index="fp8_132"), 64, torch.float32)
    with pytest.raises(ValueError, match="not an e4m3 value"):
        cache.write(torch.tensor([0]), torch.full((1, 128), 1.06), torch.ones(1))


@pytest.mark.parametrize("flavour", ["e4m3fn", "e4m3fnuz"])
def test_decode_from_bytes_equals_decode_from_values(flavour: str) -> None:
    """The 656- and 132-byte records hold a bf16 path's quantised values exactly, so nothing may change."""
    weights = assemble(GOLDEN, synthetic(GOLDEN, 1))
    model, ids = Model(config=GOLDEN, weights=weights, precision=BF16_Q), list(range(40))
    results = []
    latent: LatentLayout = "fp8_656" if flavour == "e4m3fn" else "plain"
    for form in (
        CacheFormat(),
        CacheFormat(latent=latent, index="fp8_132", flavour=flavour),  # type: ignore[arg-type]
        CacheFormat(latent="fp8_656_planar", index="fp8_132", page_size=1),
        CacheFormat(latent="bf16", page_size=8),
    ):
        state = State(model, 64, form)
        prefill(model, state, {0: ids})
        results.append(decode(model, state, {0: [7]}).logits)
    for result in results[1:]:
        assert torch.equal(result, results[0])


def test_fp32_values_are_not_what_a_bf16_cache_holds() -> None:
    model = Model(config=GOLDEN, weights=assemble(GOLDEN, synthetic(GOLDEN, 1)), precision=FP32_Q)
    plain, stored = State(model, 64), State(model, 64, CacheFormat(latent="bf16"))
    a, b = (prefill(model, state, {0: list(range(20))}).logits for state in (plain, stored))
    assert not torch.equal(a, b)


def test_pages_are_shared_counted_and_returned() -> None:
    table = PageTable(n_pages=4, page_size=8)
    table.admit(0)
    table.grow(0, 17)
    assert table.pages[0] == [0, 1, 2]
    table.admit(1, table.pages[0][:2])
    table.grow(1, 20)
    assert table.pages[1] == [0, 1, 3]
    assert table.slots(1, 15, 18).tolist() == [15, 24, 25]
    with pytest.raises(ValueError, match="request 0 needs 1 pages and 0 are free"):
        table.grow(0, 25)
    with pytest.raises(ValueError, match="shared with another request"):
        table.shrink(1, 12)
    table.shrink(0, 0)
    assert table.users == [1, 1, 0, 1]
    with pytest.raises(ValueError, match="already admitted"):
        table.admit(1)


def test_a_physical_slot_beyond_int32_is_addressed_in_int64() -> None:
    """slot x 656 passes 2^31 at slot 3 273 604 (vllm #56748); the address is formed without the memory."""
    cache = LatentCache(TRUE, CacheFormat(latent="fp8_656"), 64, torch.float32)
    assert int(cache.planes._addresses(torch.tensor([3_273_604]), 0)[0, 0]) == 3_273_604 * 656


@pytest.mark.parametrize(
    ("fields", "message"), [({"page_size": 0}, "page_size is 0"), ({"scale": 0.0}, "scale is 0.0")]
)
def test_bad_formats(fields: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CacheFormat(**fields)  # type: ignore[arg-type]


def test_state_refuses_what_it_cannot_do() -> None:
    model = Model(config=GOLDEN, weights=assemble(GOLDEN, synthetic(GOLDEN, 1)))
    state = State(model, 64)
    with pytest.raises(ValueError, match="token outside"):
        prefill(model, state, {0: [512]})
    with pytest.raises(ValueError, match="max_seq_len is 256"):
        prefill(model, state, {0: [0] * 257})
    with pytest.raises(ValueError, match="pages and 1 are free"):
        prefill(model, state, {0: [0] * 65})
    prefill(model, state, {1: [0] * 20})
    with pytest.raises(ValueError, match="whole pages"):
        state.fork(2, 1, 20)
    with pytest.raises(ValueError, match="not within request 1"):
        state.truncate(1, 21)
    with pytest.raises(ValueError, match="cannot be preempted"):
        state.preempt(9)
