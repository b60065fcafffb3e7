"""Faults of the caches and of fp8: flavours of a byte, scales, layouts of a page, offsets, slots.

Legend: T tokens, P pages, S slots of a page, D width of a record or key, L positions of a request.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dsv32_fast.kernels.emulated.cache import power_of_two_above, read_keys
from dsv32_fuzz.faults.base import Call, Fault, Patch, after, around, before, returns, writes

_CACHE = "dsv32_fast.kernels.emulated.cache"
_INDEXER = "dsv32_fast.kernels.emulated.indexer"


def wrapped_slots(slots: Tensor, width: int, bits: int = 32) -> Tensor:
    """Where a kernel lands that computes slot * width as a signed integer of `bits` bits; negative slots stay."""
    half, whole = 1 << (bits - 1), 1 << bits
    offset = (slots.long() * width + half) % whole - half
    return torch.where(slots < 0, slots.long(), offset.div(width, rounding_mode="floor")).to(slots.dtype)


def wraps(argument: str, cache: str, *, page_slots: bool = True, bits: int = 32) -> Callable[[Call], None]:
    """The slots in `argument` are turned into offsets of `bits` bits; a wrapped one is a wild access.

    A wild write does nothing here (it goes somewhere else on a GPU), a wild read is told by the emulation.
    """

    def change(call: Call) -> None:
        width = call[cache].shape[-1]
        slots = wrapped_slots(call[argument], width, bits)
        call[argument] = torch.where((slots < 0) & (call[argument] >= 0), -1, slots) if page_slots else slots

    return change


def _fnuz(original: Any) -> Any:
    return lambda: dataclasses.replace(original(), fp8=torch.float8_e4m3fnuz)


def _e8m0(result: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    values, scales = result
    return values, power_of_two_above(scales)


def _rounded_down(call: Call, result: Tensor) -> Tensor:
    return torch.where(result > call["scales"], result / 2, result)


def _interleaved(run: Any, call: Call) -> None:
    """Each slot's key and scale lie side by side, where the reader expects all keys of a page before all scales."""
    cache, k = call["kv_cache"], call["k"]
    if k.shape[1] != call["quant_block_size"]:
        raise ValueError("quant_block_size: this fault is made for one scale per key")
    shadow = torch.zeros_like(cache.view(torch.uint8))
    run({**call, "kv_cache": shadow, "preshuffle": False})
    slots = call["slot_mapping"][call["slot_mapping"] >= 0].long()
    page, slot = slots // cache.shape[1], slots % cache.shape[1]
    keys_TD, scales_T1 = read_keys(shadow, page, slot, k.shape[1], False)
    cache.view(torch.uint8)[page, slot] = torch.cat([keys_TD, scales_T1.view(torch.uint8)], 1)


def _flat_writer(call: Call) -> None:
    call["preshuffle"] = False


def _table_per_token(_original: Any) -> Any:
    def paged_keys(cache: Tensor, table: Tensor, length: int, dims: int, preshuffle: bool) -> tuple[Tensor, Tensor]:
        position_L = torch.arange(length)
        page_L = table.cpu().long()[position_L.clamp_max(len(table) - 1)]
        keys_LD, scales_L1 = read_keys(cache, page_L, position_L % cache.shape[1], dims, preshuffle)
        return keys_LD, scales_L1[:, 0]

    return paged_keys


def _padding_to_slot_zero(call: Call) -> None:
    call["slot_mapping"] = call["slot_mapping"].clamp_min(0)


def _padding_has_a_slot(batch: Any) -> Any:
    return dataclasses.replace(batch, new_slots=batch.new_slots.clamp_min(0))


def _last_page_missing(call: Call) -> None:
    slots = call["slot_mapping"]
    page = slots // call["kv_cache"].shape[1]
    live = page[slots >= 0]
    if len(live.unique()) > 1:
        call["slot_mapping"] = torch.where(page == live[-1], -1, slots)


def _scales_shifted(call: Call) -> None:
    call["dst_scale"].copy_(call["dst_scale"].roll(1, 0))


def _rope_first(run: Any, call: Call) -> None:
    run({**call, "kv_c": call["k_pe"], "k_pe": call["kv_c"]})


def _slot_late(call: Call) -> None:
    slots = call["slot_mapping"]
    last = call["kv_cache"].shape[0] * call["kv_cache"].shape[1] - 1
    call["slot_mapping"] = torch.where(slots >= 0, (slots + 1).clamp_max(last), slots)


def _cache(name: str, story: str, reference: str, kernel: str, make: Any, bugs: tuple[str, ...] = ()) -> Fault:
    return Fault(name=name, area="cache", story=story, reference=reference, bugs=bugs, kernels={kernel: make})


_OFFSETS = "vLLM #56748, #56037; AITER #4474, #4427, #2517; flashinfer #3136"

FAULTS: tuple[Fault, ...] = (
    Fault(
        name="cache_fnuz_reader",
        area="cache",
        story="keys are written in e4m3fn and read in e4m3fnuz, where the same byte is half as large",
        reference="vLLM #45720, #42893; sglang #28455",
        bugs=("Z61",),
        patches=(Patch(where=_INDEXER, name="current_device", make=_fnuz),),
    ),
    _cache(
        "cache_e8m0_scales",
        "fp32 scales go through e8m0: 0.3 becomes 0.5, only powers of two survive",
        "FlashMLA #184",
        "per_group_quant_hip",
        returns(_e8m0),
        ("Z62",),
    ),
    Fault(
        name="cache_scale_rounded_down",
        area="cache",
        story="the power-of-two scale is rounded down instead of up, so the largest values saturate",
        reference="AITER indexer_k_quant_and_cache, ue8m0: rounded up",
        patches=(Patch(where=_CACHE, name="power_of_two_above", make=after(_rounded_down)),),
    ),
    _cache(
        "cache_interleaved_page",
        "the writer stores key and scale of a slot side by side, the reader expects a page's keys, then its scales",
        "AITER #5591; vLLM #50576",
        "indexer_k_quant_and_cache",
        around(_interleaved),
        ("Z64",),
    ),
    _cache(
        "cache_flat_writer",
        "the writer stores keys row by row, the reader expects 16 x 16 tiles",
        "vLLM #43781, #52109, #50455",
        "indexer_k_quant_and_cache",
        before(_flat_writer),
        ("Z57",),
    ),
    Fault(
        name="cache_table_per_token",
        area="cache",
        story="the paged indexer looks a token's page up by position instead of by position / page size",
        reference="AITER #5591",
        bugs=("Z64",),
        patches=(Patch(where=_INDEXER, name="_paged_keys", make=_table_per_token),),
    ),
    _cache(
        "cache_gather_scales_shifted",
        "the gather copies each key with the scale of the key before it",
        "AITER #5591 (planar against interleaved)",
        "cp_gather_indexer_k_quant_cache",
        writes(_scales_shifted),
        ("Z64",),
    ),
    _cache(
        "cache_int32_latent_write",
        "the latent's offset slot x 576 is computed in int32 and wraps at slot 3 728 271",
        _OFFSETS,
        "concat_and_cache_mla",
        before(wraps("slot_mapping", "kv_cache")),
        ("Z65",),
    ),
    _cache(
        "cache_int32_latent_read",
        "the decode kernel computes slot x 576 in int32",
        _OFFSETS,
        "mla_decode_fwd",
        before(wraps("kv_indices", "kv_buffer", page_slots=False)),
        ("Z65",),
    ),
    _cache(
        "cache_int32_index_write",
        "the indexer's offset slot x 132 is computed in int32",
        _OFFSETS,
        "indexer_k_quant_and_cache",
        before(wraps("slot_mapping", "kv_cache")),
        ("Z65",),
    ),
    _cache(
        "cache_padding_to_slot_zero",
        "padding rows, whose slot is -1, are stored in slot 0",
        "AITER #3235",
        "concat_and_cache_mla",
        before(_padding_to_slot_zero),
        ("Z27",),
    ),
    Fault(
        name="cache_padding_has_a_slot",
        area="cache",
        story="the slots of padding rows are filled with 0 instead of -1: a padded graph writes into the first page",
        reference="AITER #3235: a padded row, whose slot is -1, stores nothing",
        bugs=("Z27",),
        patches=(Patch(where="dsv32_fast.state.CacheState", name="_batch", make=returns(_padding_has_a_slot)),),
    ),
    _cache(
        "cache_index_page_missing",
        "the indexer's last page of a prompt is not stored while the latents' is",
        "sglang #31108",
        "indexer_k_quant_and_cache",
        before(_last_page_missing),
        ("Z66",),
    ),
    _cache(
        "cache_rope_first",
        "the record holds the RoPE key before the latent",
        "AITER concat_and_cache_mla: latent, then RoPE key",
        "concat_and_cache_mla",
        around(_rope_first),
    ),
    _cache(
        "cache_slot_late",
        "every latent is stored one slot late",
        "vllm-ascend #12071 (boundaries of another batch)",
        "concat_and_cache_mla",
        before(_slot_late),
        ("Z33",),
    ),
)
