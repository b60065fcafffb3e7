"""Checks of the two caches and of the quantisers: what is written lies where its reader looks, and nowhere else.

The layouts are spelt out here once more, byte by byte, and share no code with the writers: a latent row is contiguous
per slot; an index page holds the keys of all its slots, then their fp32 scales; preshuffled keys lie in tiles of 16
slots by 16 lanes. Values are held against `dsv32_ref.bounds.quant`.

Legend: T tokens, P pages, S slots of a page, C latent, R rope, D = C + R, I index width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from hypothesis import strategies as st
from torch import Tensor

from dsv32_fast.kernels.emulated.device import MI300X, MI355X, emulated_device
from dsv32_fuzz.checks.findings import Findings, device_of, same_bits
from dsv32_fuzz.checks.own_input import InputCheck
from dsv32_fuzz.checks.quantisers import VALUES, Values, values_of
from dsv32_fuzz.strategies.steps import booleans, integers, sampled_from
from dsv32_fuzz.targets import Target
from dsv32_fuzz.verdict import Verdict
from dsv32_ref.bounds import E4M3FN, E4M3FNUZ, Approx, Arithmetic, exact
from dsv32_ref.bounds.quant import ScaleRule, fake_quant, scale_range

ARITH = Arithmetic()
POISON = 0xA5


def key_places(slots_T: Tensor, page_size: int, width: int, preshuffle: bool) -> Tensor:
    """[T, I]: byte of each lane of a key in the flat index cache."""
    page_T1, slot_T1 = (slots_T // page_size)[:, None], (slots_T % page_size)[:, None]
    lane_I = torch.arange(width)
    inside = slot_T1 * width + lane_I
    if preshuffle:
        tile = slot_T1 // 16 * (width // 16) + lane_I // 16
        inside = tile * 256 + slot_T1 % 16 * 16 + lane_I % 16
    return page_T1 * page_size * (width + 4) + inside


def scale_places(slots_T: Tensor, page_size: int, width: int) -> Tensor:
    """[T, 4]: bytes of each key's fp32 scale."""
    start_T = slots_T // page_size * page_size * (width + 4) + page_size * width + slots_T % page_size * 4
    return start_T[:, None] + torch.arange(4)


class CacheInput(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tokens and their slots in a cache of pages."""

    tokens: int = 1
    """Tokens that have a slot."""
    skipped: int = 0
    """Tokens among them with slot -1."""
    unmapped: int = 0
    """Tokens behind the end of the slot mapping, as in a padded graph (aiter #3235)."""
    page_size: int = 16
    preshuffle: bool = False
    ue8m0: bool = True
    fnuz: bool = False
    """The fp8 of gfx942."""
    values: Values = "normal"
    scale: float = 1.0
    """Of the flat fp8 latent cache."""
    fp8: bool = False
    seed: int = 0

    @property
    def rows(self) -> int:
        """Tokens that the writer is given."""
        return self.tokens + self.skipped + self.unmapped


@st.composite
def cache_inputs(draw: st.DrawFn) -> CacheInput:
    """Any layout, any kind of values."""
    page_size = draw(sampled_from((16, 64, 1, 32)))
    return CacheInput(
        tokens=draw(sampled_from((3, 1, 17, 40))),
        skipped=draw(sampled_from((0, 1, 3))),
        unmapped=draw(sampled_from((0, 1))),
        page_size=page_size,
        preshuffle=page_size % 16 == 0 and draw(booleans()),
        ue8m0=draw(booleans()),
        fnuz=draw(sampled_from((False, False, True))),
        values=draw(sampled_from(VALUES)),
        scale=draw(sampled_from((1.0, 0.3, 0.0123, 4.0))),
        fp8=draw(booleans()),
        seed=draw(integers(0, 1 << 16)),
    )


@dataclass(frozen=True)
class _Slots:
    """Where the tokens go."""

    pages: int
    mapping: Tensor
    """int64, -1 where a token is skipped; may be shorter than the tokens."""
    stored: Tensor
    """Tokens that are stored, and `at` their slots."""
    at: Tensor


def _slots(drawn: CacheInput, g: torch.Generator) -> _Slots:
    pages = -(-drawn.tokens // drawn.page_size) + 2
    mapping = torch.full((drawn.tokens + drawn.skipped,), -1)
    order = torch.randperm(len(mapping), generator=g)[: drawn.tokens]
    mapping[order] = torch.randperm(pages * drawn.page_size, generator=g)[: drawn.tokens]
    stored = (mapping >= 0).nonzero().squeeze(1)
    return _Slots(pages, mapping, stored, mapping[stored])


def _untouched(found: Findings, what: str, bytes_X: Tensor, written: Tensor, record: int) -> None:
    """Every byte that no token owns still has its poison."""
    other = torch.ones(len(bytes_X), dtype=torch.bool)
    other[written.flatten()] = False
    wrong = other & (bytes_X != POISON)
    at = int(wrong.int().argmax()) if len(wrong) else 0
    text = f"{what}: byte {at} (record {at // record}) was written, and no token has its slot"
    found.require("bytes_untouched", not bool(wrong.any()), text, times=int(other.sum()))


class IndexCacheLayout(InputCheck[CacheInput]):
    """The page-planar cache of indexer keys: its writer and its gatherer."""

    name = "index_cache_layout"
    meaning = "keys and scales lie at their bytes, within half a step of the key; gathering returns them in order"
    family = "cache"
    input_type = CacheInput

    def inputs(self) -> st.SearchStrategy[CacheInput]:
        """Any layout."""
        return cache_inputs()

    def run(self, drawn: CacheInput, target: Target) -> Verdict:
        """Write into poison, read the bytes, gather."""
        found, g = Findings(), torch.Generator().manual_seed(drawn.seed)
        hardware = target.evidence == "hardware"
        width = 128 if hardware else 32
        fnuz = drawn.fnuz and not hardware
        slots, keys_TI = _slots(drawn, g), values_of(drawn.values, drawn.rows, width, g)
        shape = (slots.pages, drawn.page_size, width + 4)
        cache = torch.full(shape, POISON, dtype=torch.uint8, device=device_of(target))
        form = "ue8m0" if drawn.ue8m0 else "fp32"
        assert target.kernels is not None
        with emulated_device(MI300X if fnuz else MI355X):
            target.kernels.indexer_k_quant_and_cache(
                keys_TI.to(cache.device),
                cache,
                slots.mapping.to(cache.device),
                width,
                form,
                preshuffle=drawn.preshuffle,
            )
            self._stored(found, drawn, (keys_TI, slots), cache.cpu().flatten(), fnuz)
            self._gathered(found, drawn, cache, target)
        untested = "" if len(slots.at) else "no token has a slot"
        return self.verdict(found.violation, found.measured(), untested=untested)

    def _stored(
        self, found: Findings, drawn: CacheInput, given: tuple[Tensor, _Slots], raw: Tensor, fnuz: bool
    ) -> None:
        keys_TI, slots = given
        width = keys_TI.shape[1]
        if len(slots.at) == 0:
            return
        at_key = key_places(slots.at, drawn.page_size, width, drawn.preshuffle)
        at_scale = scale_places(slots.at, drawn.page_size, width)
        fmt, dtype = (E4M3FNUZ, torch.float8_e4m3fnuz) if fnuz else (E4M3FN, torch.float8_e4m3fn)
        scales_T1 = raw[at_scale].view(torch.float32)
        stored_TI = raw[at_key].view(dtype).double() * scales_T1.double()
        rule = ScaleRule(fmt=fmt, largest=fmt.max, block=width, ue8m0=drawn.ue8m0)
        keys = exact(keys_TI[slots.stored])
        around = scale_range(keys.reshape(-1, 1, width), rule, ARITH)
        inside = (scales_T1 >= around.low[:, 0]) & (scales_T1 <= around.high[:, 0])
        row = int((~inside).int().argmax()) if len(inside) else 0
        text = f"scale of token {row}: not {rule.fmt.name}'s for its largest value"
        found.require("scales", bool(inside.all()), text, times=len(inside))
        found.within("index key", stored_TI, fake_quant(keys, rule, ARITH))
        _untouched(found, "index cache", raw, torch.cat([at_key, at_scale], 1), width + 4)

    def _gathered(self, found: Findings, drawn: CacheInput, cache: Tensor, target: Target) -> None:
        """Two requests that own the pages in reverse: the bytes come back in the order of their positions."""
        pages, size, width = cache.shape[0], cache.shape[1], cache.shape[2] - 4
        first = min(pages - 1, 1) * size - size // 2
        counts = [max(1, first), (pages - 1) * size]
        table_BP = torch.full((2, pages), -1, dtype=torch.int32)
        table_BP[0, :1], table_BP[1, : pages - 1] = pages - 1, torch.arange(pages - 2, -1, -1)
        ends = torch.tensor([0, counts[0], sum(counts)], dtype=torch.int32)
        keys = torch.full((sum(counts) + 1, width), POISON, dtype=torch.uint8, device=cache.device)
        scales = torch.full((sum(counts) + 1, 1), -7.0, device=cache.device)
        assert target.kernels is not None
        target.kernels.cp_gather_indexer_k_quant_cache(
            cache, keys, scales, table_BP.to(cache.device), ends.to(cache.device), preshuffle=drawn.preshuffle
        )
        positions = [torch.arange(count) for count in counts]
        at = torch.cat([table_BP[b].long()[p // size] * size + p % size for b, p in enumerate(positions)])
        raw = cache.cpu().flatten()
        expected = raw[key_places(at, size, width, drawn.preshuffle)]
        row = int((keys[:-1].cpu() != expected).any(1).int().argmax())
        text = f"gathered key {row} is not the one of slot {int(at[row])}"
        found.require("keys_gathered", torch.equal(keys[:-1].cpu(), expected), text, times=len(at))
        expected = raw[scale_places(at, size, width)].view(torch.float32)
        text = "gathered scales are not those of the slots"
        found.require("scales_gathered", same_bits(scales[:-1].cpu(), expected), text, times=len(at))
        kept = bool((keys[-1] == POISON).all()) and float(scales[-1]) == -7.0
        found.require("canaries", kept, "the gatherer wrote behind the last token")


class LatentCacheLayout(InputCheck[CacheInput]):
    """The cache of MLA latents: bf16 rows, or flat fp8 with one scale."""

    name = "latent_cache_layout"
    meaning = "latent and RoPE key lie in their slot, exact in bf16 and within half a step in fp8, and nowhere else"
    family = "cache"
    input_type = CacheInput

    def inputs(self) -> st.SearchStrategy[CacheInput]:
        """Any layout."""
        return cache_inputs()

    def run(self, drawn: CacheInput, target: Target) -> Verdict:
        """Write into poison, read the bytes."""
        found, g = Findings(), torch.Generator().manual_seed(drawn.seed)
        hardware = target.evidence == "hardware"
        latent, rope = (512, 64) if hardware else (32, 8)
        slots, kv_TD = _slots(drawn, g), values_of(drawn.values, drawn.rows, latent + rope, g)
        item = 1 if drawn.fp8 else 2
        shape = (slots.pages, drawn.page_size, (latent + rope) * item)
        raw = torch.full(shape, POISON, dtype=torch.uint8, device=device_of(target))
        cache = raw if drawn.fp8 else raw.view(torch.bfloat16)
        kv, scale = kv_TD.to(raw.device), torch.tensor([drawn.scale], device=raw.device)
        assert target.kernels is not None
        target.kernels.concat_and_cache_mla(
            kv[:, :latent].contiguous(),
            kv[:, latent:].contiguous(),
            cache,
            slots.mapping.to(raw.device),
            "fp8" if drawn.fp8 else "auto",
            scale,
        )
        bytes_X = raw.cpu().flatten()
        at = slots.at[:, None] * shape[2] + torch.arange(shape[2])
        self._stored(found, drawn, kv_TD[slots.stored], bytes_X[at])
        _untouched(found, "latent cache", bytes_X, at, shape[2])
        untested = "" if len(slots.at) else "no token has a slot"
        return self.verdict(found.violation, found.measured(), untested=untested)

    def _stored(self, found: Findings, drawn: CacheInput, kv_TD: Tensor, bytes_TX: Tensor) -> None:
        if not drawn.fp8:
            same = same_bits(bytes_TX.view(torch.bfloat16), kv_TD)
            found.require("rows", same, "latent cache: a bf16 row is not the token's, bit for bit", times=len(kv_TD))
            return
        stored_TD = bytes_TX.view(torch.float8_e4m3fn).double() * float(torch.tensor(drawn.scale))
        found.counts["rows"] += len(kv_TD)
        found.within("latent fp8", stored_TD, flat_fp8(kv_TD, float(torch.tensor(drawn.scale))))


def flat_fp8(x: Tensor, scale: float) -> Approx:
    """x through e4m3 with a given scale, saturated: half a step of the quotient, which two roundings precede (a rounded
    reciprocal and a product); a step never shrinks as the quotient grows.
    """
    saturated = x.double().clamp(-448 * scale, 448 * scale)
    quotient = (x.double().abs() / scale * (1 + 4 * ARITH.u)).clamp(max=448.0 * (1 + 4 * ARITH.u))
    err = scale * E4M3FN.half_ulp(quotient) + 4 * ARITH.u * saturated.abs() + scale * 2 * ARITH.eta_mul
    return Approx(saturated, err)


CHECKS: tuple[type[InputCheck[Any]], ...] = (IndexCacheLayout, LatentCacheLayout)
