"""The paged caches: byte layouts of what an engine keeps per token, and the page table of each request.

Legend: T tokens, C latent, R rope, D = C + R, I indexer width, P tokens per page.
A slot is physical page x page size + offset. Layouts of the MLA latent:
  plain     D values in the compute dtype (the ideal reference)
  bf16      D bf16
  fp8_flat  D e4m3 with one scale for the whole cache; the rope part is quantised too
  fp8_656   per token C e4m3, C/128 fp32 scales, R bf16 (656 bytes), contiguous per token (FlashMLA)
  fp8_656_planar  the same three parts, each contiguous per page (AITER's three buffers)
and of the indexer key: plain, and fp8_132: per PAGE P x I e4m3, then P fp32 scales (DeepGEMM, AITER, vLLM).
Fresh pages hold NaN, so that a read of something never written shows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from dsv32_ref.config import Config
from dsv32_ref.quant import BLOCK, FP8, LARGEST, Flavour, act_quant, dequantise, ue8m0

LatentLayout = Literal["plain", "bf16", "fp8_flat", "fp8_656", "fp8_656_planar"]
IndexLayout = Literal["plain", "fp8_132"]
ScaleRule = Literal["deepseek", "flashmla", "vllm"]
"""Who writes the 656-byte records; the scale rules differ where a tile is tiny:
deepseek max(amax, 1e-4) / 448, flashmla max(amax / 448, 1e-4), both rounded up to a power of two; vllm amax / 448."""


@dataclass(frozen=True, kw_only=True)
class CacheFormat:
    """How the caches are stored.

    Raises:
        ValueError: a page size that no engine has, or a scale that is not positive.
    """

    latent: LatentLayout = "plain"
    index: IndexLayout = "plain"
    page_size: int = 64
    flavour: Flavour = "e4m3fn"
    """gfx950 has e4m3fn, gfx942 e4m3fnuz."""
    rule: ScaleRule = "deepseek"
    """The scale rule of the 656-byte records."""
    scale: float = 1.0
    """The one scale of `fp8_flat` (dequantised = stored x scale)."""

    def __post_init__(self) -> None:
        if self.page_size < 1:
            raise ValueError(f"page_size is {self.page_size}; give 1, 64 or another positive number")
        if not self.scale > 0:
            raise ValueError(f"scale is {self.scale}; fp8_flat needs a positive scale")


class Planes:
    """Byte storage in which the record of a token has several parts, planar per page or contiguous per token."""

    def __init__(self, n_slots: int, widths: tuple[int, ...], form: CacheFormat, *, planar: bool) -> None:
        nan_byte = 0xFF if form.flavour == "e4m3fn" else 0x80
        self.bytes = torch.full((n_slots * sum(widths),), nan_byte, dtype=torch.uint8)
        self.page_size = form.page_size if planar else 1
        self.widths = widths

    def _addresses(self, slots_T: Tensor, part: int) -> Tensor:
        page_T, offset_T = slots_T // self.page_size, slots_T % self.page_size
        before, width = sum(self.widths[:part]), self.widths[part]
        start_T = page_T * self.page_size * sum(self.widths) + self.page_size * before + offset_T * width
        return start_T[..., None] + torch.arange(width)

    def write(self, slots_T: Tensor, parts: tuple[Tensor, ...]) -> None:
        """Stores one record per slot; each part is [T, values] of any dtype."""
        for part, values in enumerate(parts):
            self.bytes[self._addresses(slots_T, part)] = values.contiguous().view(torch.uint8)

    def read(self, slots: Tensor, part: int, dtype: torch.dtype) -> Tensor:
        """Part `part` of the records at `slots` [...], as values [..., width / itemsize]."""
        return self.bytes[self._addresses(slots, part)].view(dtype)


class LatentCache:
    """One layer's cache of MLA latents: `write` [T, D] at slots, `gather` at any shape of slots."""

    def __init__(self, config: Config, form: CacheFormat, n_slots: int, dtype: torch.dtype) -> None:
        self.config, self.form, self.dtype = config, form, dtype
        self.block = min(BLOCK, config.kv_lora_rank)
        C, R, D = config.kv_lora_rank, config.qk_rope_head_dim, config.latent_dim
        if form.latent in ("plain", "bf16"):
            self.values = torch.full((n_slots, D), torch.nan, dtype=dtype if form.latent == "plain" else torch.bfloat16)
            return
        widths = (D,) if form.latent == "fp8_flat" else (C, C // self.block * 4, 2 * R)
        self.planes = Planes(n_slots, widths, form, planar=form.latent == "fp8_656_planar")

    def write(self, slots_T: Tensor, kv_TD: Tensor) -> None:
        """Stores one token per slot."""
        if self.form.latent in ("plain", "bf16"):
            self.values[slots_T] = kv_TD.to(self.values.dtype)
        elif self.form.latent == "fp8_flat":
            largest = LARGEST[self.form.flavour]
            scaled_TD = (kv_TD.to(torch.float32) / self.form.scale).clamp(-largest, largest)
            self.planes.write(slots_T, (scaled_TD.to(FP8[self.form.flavour]),))
        else:
            self.planes.write(slots_T, encode_656(kv_TD, self.config, self.form))

    def gather(self, slots: Tensor) -> Tensor:
        """The tokens at `slots` [...], [..., D] in the compute dtype; a negative slot reads zeros."""
        valid, slots = slots >= 0, slots.clamp_min(0)
        if self.form.latent in ("plain", "bf16"):
            found = self.values[slots].to(self.dtype)
        elif self.form.latent == "fp8_flat":
            found = self.planes.read(slots, 0, FP8[self.form.flavour]).to(self.dtype) * self.form.scale
        else:
            values = self.planes.read(slots, 0, FP8[self.form.flavour])
            latent = dequantise(values, self.planes.read(slots, 1, torch.float32), self.dtype)
            found = torch.cat([latent, self.planes.read(slots, 2, torch.bfloat16).to(self.dtype)], -1)
        return found if bool(valid.all()) else found.masked_fill(~valid[..., None], 0.0)


def encode_656(kv_TD: Tensor, config: Config, form: CacheFormat) -> tuple[Tensor, Tensor, Tensor]:
    """The three parts of the 656-byte record: e4m3 latent [T, C], fp32 scales [T, C/128], bf16 rope [T, R].

    Raises:
        ValueError: a latent is not finite.
    """
    c_TC, pe_TR = torch.split_with_sizes(kv_TD, [config.kv_lora_rank, config.qk_rope_head_dim], -1)
    block, largest = min(BLOCK, config.kv_lora_rank), LARGEST[form.flavour]
    if form.rule == "deepseek":
        return *act_quant(c_TC, block=block, flavour=form.flavour), pe_TR.to(torch.bfloat16)
    tiles_TSb = torch.unflatten(c_TC.to(torch.float32), -1, (-1, block))
    raw_TS = tiles_TSb.abs().amax(-1) / largest
    if not bool(raw_TS.isfinite().all()):
        raise ValueError("a latent holds NaN or infinity; the 656-byte record needs finite values")
    smallest = 1e-4 if form.rule == "flashmla" else torch.finfo(torch.float32).tiny
    scale_TS = raw_TS.clamp_min(smallest)
    scale_TS = ue8m0(scale_TS) if form.rule == "flashmla" else scale_TS
    values_TSb = (tiles_TSb / scale_TS[..., None]).clamp(-largest, largest).to(FP8[form.flavour])
    return values_TSb.flatten(-2), scale_TS, pe_TR.to(torch.bfloat16)


class IndexCache:
    """One layer's cache of indexer keys and their scales."""

    def __init__(self, config: Config, form: CacheFormat, n_slots: int, dtype: torch.dtype) -> None:
        self.form, self.dtype, width = form, dtype, config.index_head_dim
        if form.index == "plain":
            self.values = torch.full((n_slots, width + 1), torch.nan, dtype=dtype)
        else:
            self.planes = Planes(n_slots, (width, 4), form, planar=True)

    def write(self, slots_T: Tensor, k_TI: Tensor, scale_T: Tensor) -> None:
        """Stores quantised keys and their scales.

        Raises:
            ValueError: a key is not an e4m3 value, where the layout is fp8_132 (simulate `index_fp8`).
        """
        if self.form.index == "plain":
            self.values[slots_T] = torch.cat([k_TI, scale_T[:, None]], -1)
            return
        values_TI, stored_T = k_TI, scale_T
        if self.form.flavour == "e4m3fnuz":
            # The same value has another byte there: half the exponent bias, so half the value with twice the scale.
            values_TI, stored_T = k_TI / 2, scale_T * 2
        bits_TI = values_TI.to(FP8[self.form.flavour])
        if not torch.equal(bits_TI.to(k_TI.dtype), values_TI):
            raise ValueError("an indexer key is not an e4m3 value; the fp8_132 layout needs Precision(index_fp8=True)")
        self.planes.write(slots_T, (bits_TI, stored_T[:, None].to(torch.float32)))

    def gather(self, slots_S: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [S, I] and scales [S] at `slots_S`, in the compute dtype."""
        if self.form.index == "plain":
            found = self.values[slots_S]
            return found[:, :-1], found[:, -1]
        bits_SI = self.planes.read(slots_S, 0, FP8[self.form.flavour])
        return bits_SI.to(self.dtype), self.planes.read(slots_S, 1, torch.float32)[:, 0].to(self.dtype)


@dataclass(kw_only=True)
class PageTable:
    """Which pages each request owns: allocation, shared prefixes, release. Pages are reference-counted."""

    n_pages: int
    page_size: int
    pages: dict[int, list[int]] = field(default_factory=dict)
    users: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.users = [0] * self.n_pages

    def admit(self, request: int, share: list[int] | None = None) -> None:
        """Adds a request, which reads the pages `share` of another one as its prefix.

        Raises:
            ValueError: the request is there already.
        """
        if request in self.pages:
            raise ValueError(f"request {request} is already admitted; release it first")
        self.pages[request] = list(share or [])
        for page in self.pages[request]:
            self.users[page] += 1

    def grow(self, request: int, length: int) -> None:
        """Gives `request` pages for `length` tokens; nothing changes where there are too few.

        Raises:
            ValueError: too few pages are free.
        """
        need = -(-length // self.page_size) - len(self.pages[request])
        free = [page for page, users in enumerate(self.users) if users == 0] if need > 0 else []
        if need > len(free):
            raise ValueError(
                f"request {request} needs {need} pages and {len(free)} are free; preempt one or give n_slots"
            )
        for page in free[: max(need, 0)]:
            self.users[page] = 1
            self.pages[request].append(page)

    def shrink(self, request: int, length: int) -> None:
        """Returns the pages behind the first `length` tokens.

        Raises:
            ValueError: the cut lies inside a shared page, which the request would then overwrite.
        """
        keep = -(-length // self.page_size)
        if length % self.page_size and self.users[self.pages[request][keep - 1]] > 1:
            raise ValueError(
                f"request {request}: position {length} lies in a page shared with another request; cut at a page"
            )
        for page in self.pages[request][keep:]:
            self.users[page] -= 1
        del self.pages[request][keep:]

    def slots(self, request: int, start: int, stop: int) -> Tensor:
        """Physical slots [stop - start] int64 of the positions start..stop-1."""
        positions = torch.arange(start, stop)
        table = torch.tensor(self.pages[request], dtype=torch.int64)
        return table[positions // self.page_size] * self.page_size + positions % self.page_size
