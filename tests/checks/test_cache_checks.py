"""The cache, quantiser and address checks pass on the faultless path and see each fault."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from check_trials import faultless, faulty, killed
from torch import Tensor

from dsv32_fast import layers
from dsv32_fast.kernels.emulated import api
from dsv32_fast.options import PRESETS
from dsv32_fuzz.checks.addresses import FarInput, IndexWidth
from dsv32_fuzz.checks.cache import CacheInput, IndexCacheLayout, LatentCacheLayout, key_places, scale_places
from dsv32_fuzz.checks.quantisers import Quantisers
from dsv32_fuzz.targets.intree import InTreeTarget
from dsv32_fuzz.verdict import Status

TARGET = InTreeTarget(PRESETS["pr47766"])
Fault = Callable[..., Any]


@pytest.mark.parametrize("check", [IndexCacheLayout, LatentCacheLayout, Quantisers])
def test_faultless(check: Any) -> None:
    found = faultless(check)
    assert 0.5 < found.worst_budget_used <= 1
    assert found.measured["elements"] > 1000


def test_addresses_pass() -> None:
    assert faultless(IndexWidth).measured["records_beyond"] > 50


def test_nothing_stored_is_mistrusted() -> None:
    for check in (IndexCacheLayout(), LatentCacheLayout()):
        assert check.run(CacheInput(tokens=0, skipped=2), TARGET).status is Status.MISTRUSTED
    assert IndexWidth().run(FarInput(records=(-1,)), TARGET).status is Status.MISTRUSTED


def test_the_bytes_of_a_page() -> None:
    """Two pages of 16 slots, 32 lanes: slot 17 is the second of page 1; a tile row holds 16 lanes of one slot."""
    slot = torch.tensor([17])
    assert key_places(slot, 16, 32, False)[0, :2].tolist() == [16 * 36 + 32, 16 * 36 + 33]
    assert scale_places(slot, 16, 32)[0].tolist() == [16 * 36 + 16 * 32 + 4 + byte for byte in range(4)]
    tiled = key_places(slot, 16, 32, True)[0] - 16 * 36
    assert tiled[:16].tolist() == list(range(16, 32))
    assert tiled[16:].tolist() == list(range(256 + 16, 256 + 32))


def _write(**changes: Any) -> Fault:
    def write(k: Tensor, cache: Tensor, slots: Tensor, block: int, form: str, preshuffle: bool = False) -> None:
        named = {"preshuffle": preshuffle, "form": form} | changes
        api.indexer_k_quant_and_cache(k, cache, slots, block, named["form"], preshuffle=named["preshuffle"])

    return write


def _token_interleaved(
    k: Tensor, cache: Tensor, slots: Tensor, block: int, form: str, preshuffle: bool = False
) -> None:
    """aiter #5591: key and scale side by side."""
    kept = slots >= 0
    one = torch.zeros(int(kept.sum()), 1, cache.shape[2], dtype=torch.uint8)
    api.indexer_k_quant_and_cache(k[: len(slots)][kept], one, torch.arange(len(one)), block, form)
    cache.view(-1, cache.shape[2])[slots[kept]] = one[:, 0]


def _skipped_to_slot_zero(k: Tensor, cache: Tensor, slots: Tensor, *rest: Any, **named: Any) -> None:
    api.indexer_k_quant_and_cache(k, cache, slots.clamp_min(0), *rest, **named)


def _scale_too_small(k: Tensor, cache: Tensor, slots: Tensor, *rest: Any, **named: Any) -> None:
    """The scale is halved behind the writer's back."""
    api.indexer_k_quant_and_cache(k, cache, slots, *rest, **named)
    kept = slots[slots >= 0]
    at = scale_places(kept, cache.shape[1], cache.shape[2] - 4)
    flat = cache.view(-1)
    flat[at] = (flat[at].view(torch.float32) / 2).view(torch.uint8)


@pytest.mark.parametrize(
    "fault",
    [
        _write(preshuffle=False),
        _write(form="ue8m0"),
        _write(form="fp32"),
        _token_interleaved,
        _skipped_to_slot_zero,
        _scale_too_small,
    ],
)
def test_index_layout_kills_a_writer(fault: Fault) -> None:
    assert killed(IndexCacheLayout, faulty(indexer_k_quant_and_cache=fault))


def _gather(change: Callable[[Tensor, Tensor], None]) -> Fault:
    def gather(cache: Tensor, keys: Tensor, scales: Tensor, *rest: Any, **named: Any) -> None:
        api.cp_gather_indexer_k_quant_cache(cache, keys, scales, *rest, **named)
        change(keys, scales)

    return gather


def _keys_shifted(keys: Tensor, scales: Tensor) -> None:
    keys[:-1] = keys[:-1].roll(1, 0)


def _scales_lost(keys: Tensor, scales: Tensor) -> None:
    scales[:-1] = 1.0


def _one_row_more(keys: Tensor, scales: Tensor) -> None:
    scales[-1] = 1.0


@pytest.mark.parametrize(
    ("change", "place"),
    [(_keys_shifted, "gathered key"), (_scales_lost, "gathered scales"), (_one_row_more, "behind the last token")],
)
def test_index_layout_kills_a_gatherer(change: Any, place: str) -> None:
    assert place in killed(IndexCacheLayout, faulty(cp_gather_indexer_k_quant_cache=_gather(change)))


def _latents(change: Callable[[list[Any]], None]) -> Fault:
    def write(*args: Any) -> None:
        given = list(args)
        change(given)
        api.concat_and_cache_mla(*given)

    return write


def _rope_first(args: list[Any]) -> None:
    rope = args[1].shape[1]
    both = torch.cat([args[1], args[0]], 1)
    args[0], args[1] = both[:, :-rope], both[:, -rope:]


def _scale_ignored(args: list[Any]) -> None:
    args[5] = torch.ones(1)


def _scale_inverted(args: list[Any]) -> None:
    args[5] = 1 / args[5]


def _next_slot(args: list[Any]) -> None:
    """Off by one, except where it would leave the cache."""
    slots = args[2].shape[0] * args[2].shape[1]
    args[3] = torch.where(args[3] < 0, -1, (args[3] + 1) % slots)


def _padding_stored(args: list[Any]) -> None:
    args[3] = args[3].clamp_min(0)


@pytest.mark.parametrize("change", [_rope_first, _scale_ignored, _scale_inverted, _next_slot, _padding_stored])
def test_latent_layout_kills(change: Any) -> None:
    assert "latent" in killed(LatentCacheLayout, faulty(concat_and_cache_mla=_latents(change)))


def _largest_of_the_row(x: Tensor, *rest: Any, **named: Any) -> tuple[Tensor, Tensor]:
    """One scale for all groups of a row."""
    values, scales = api.per_group_quant_hip(x, *rest, **named)
    if scales.shape[1] > 1 and not named.get("transpose_scale"):
        block = x.shape[1] // scales.shape[1]
        wide = scales.amax(1, keepdim=True).expand_as(scales).contiguous()
        values = (x.float() / wide.repeat_interleave(block, 1)).to(values.dtype)
        return values, wide
    return values, scales


def _untransposed(x: Tensor, *rest: Any, transpose_scale: bool = False, **named: Any) -> tuple[Tensor, Tensor]:
    return api.per_group_quant_hip(x, *rest, **named)


@pytest.mark.parametrize("fault", [_largest_of_the_row, _untransposed])
def test_quantisers_kill_in_groups(fault: Fault) -> None:
    assert "per_group: " in killed(Quantisers, faulty(per_group_quant_hip=fault), examples=100)


def _clipped(x: Tensor, **named: Any) -> tuple[Tensor, Tensor]:
    """The largest value of FNUZ under the scale of FN."""
    values, scales = api.per_token_quant_hip(x, **named)
    return values.float().clamp(-240, 240).to(values.dtype), scales


def test_quantisers_kill_in_rows() -> None:
    assert "per_token: " in killed(Quantisers, faulty(per_token_quant_hip=_clipped))


def test_quantisers_kill_a_scale_rounded_down(monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = layers.quantise_ue8m0

    def down(x: Tensor) -> tuple[Tensor, Tensor]:
        scale = genuine(x)[1] / 2
        return (x.float() / scale[..., None]).clamp(-448, 448).to(layers.FP8), scale

    monkeypatch.setattr(layers, "quantise_ue8m0", down)
    assert "ue8m0: " in killed(Quantisers, TARGET)


def _wrapped(slots: Tensor, stride: int) -> Tensor:
    """Slots as a kernel finds them that multiplies by the stride in int32, in a cache of `slots` records."""
    offset = (slots * stride + 2**31) % 2**32 - 2**31
    return offset.clamp_min(0) // stride


def _latents_by_int32(c: Tensor, pe: Tensor, cache: Tensor, slots: Tensor, *rest: Any) -> None:
    api.concat_and_cache_mla(c, pe, cache, _wrapped(slots, cache.shape[2]), *rest)


def _keys_by_int32(k: Tensor, cache: Tensor, slots: Tensor, *rest: Any, **named: Any) -> None:
    size = cache.shape[1]
    page = _wrapped(slots // size, size * cache.shape[2])
    api.indexer_k_quant_and_cache(k, cache, page * size + slots % size, *rest, **named)


def _pages_by_int32(cache: Tensor, keys: Tensor, scales: Tensor, table: Tensor, ends: Tensor, **named: Any) -> None:
    near = _wrapped(table.long(), cache.shape[1] * cache.shape[2]).int()
    api.cp_gather_indexer_k_quant_cache(cache, keys, scales, near, ends, **named)


@pytest.mark.parametrize(
    ("name", "fault", "place"),
    [
        ("concat_and_cache_mla", _latents_by_int32, "latent cache: slot"),
        ("indexer_k_quant_and_cache", _keys_by_int32, "index cache: page"),
        ("cp_gather_indexer_k_quant_cache", _pages_by_int32, "gathered"),
    ],
)
def test_addresses_kill(name: str, fault: Fault, place: str) -> None:
    assert place in killed(IndexWidth, faulty(**{name: fault}))
