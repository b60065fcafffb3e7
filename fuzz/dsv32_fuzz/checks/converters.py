"""What moves indices and rows: request-local positions to physical slots, gathers out of a cache, writes into one.

Every cache row says which slot it is (`dsv32_fuzz.probes.codes`), so the output shows what was read, and the cache what
was written. Truth is the block table, walked one entry at a time.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import torch
from hypothesis import strategies as st
from torch import Tensor

from dsv32_fast import attention
from dsv32_fast.batch import StepBatch
from dsv32_fuzz.checks.own_input import InputCheck
from dsv32_fuzz.probes.codes import read_codes, slot_codes
from dsv32_fuzz.probes.decode_step import UNREAD, DecodeEngine, Shape, admitted, kernels_of
from dsv32_fuzz.targets import Target
from dsv32_fuzz.verdict import Verdict

INT32_MAX = 2**31 - 1
SENTINEL = 0x5A


def _device(target: Target) -> torch.device:
    return torch.device("cuda" if target.evidence == "hardware" else "cpu")


class Conversion(msgspec.Struct, frozen=True, kw_only=True):
    """One step's top-k: lengths, page size, how often an entry names nothing, and whether slots lie near 2^31."""

    query_lens: tuple[int, ...]
    contexts: tuple[int, ...]
    page_size: int = 4
    topk: int = 16
    padding: int = 0
    holes: float = 0.2
    far: bool = False
    seed: int = 0


class Converter(InputCheck[Conversion]):
    """The gather list against the block table."""

    name = "converter"
    meaning = (
        "each chosen position became its request's physical slot, what names nothing became -1, nothing else moved"
    )
    family = "attention"
    input_type = Conversion

    def inputs(self) -> st.SearchStrategy[Conversion]:
        """Short and full rows, requests of several rows, pages of 1 to 64, slots up to the largest int32."""
        request = st.tuples(st.sampled_from((1, 2, 1, 4)), st.sampled_from((0, 1, 3, 14, 15, 16, 17, 40, 70)))
        return st.builds(
            lambda requests, **rest: Conversion(
                query_lens=tuple(q for q, _ in requests), contexts=tuple(c for _, c in requests), **rest
            ),
            st.lists(request, min_size=1, max_size=4),
            page_size=st.sampled_from((4, 1, 16, 64)),
            padding=st.sampled_from((0, 3)),
            holes=st.sampled_from((0.2, 0.0, 0.9)),
            far=st.booleans(),
            seed=st.integers(0, 2**16),
        )

    def run(self, drawn: Conversion, target: Target) -> Verdict:
        """Fill the gather list of one step, its rest holding a sentinel."""
        seqs = tuple(q + c for q, c in zip(drawn.query_lens, drawn.contexts, strict=True))
        rows = sum(drawn.query_lens) + drawn.padding
        shape = admitted(Shape(topk=drawn.topk, page_size=drawn.page_size), target)
        engine = DecodeEngine(target, shape, rows)
        with engine.emulated():
            metadata = engine.builder.build(StepBatch(query_lens=drawn.query_lens, seq_lens=seqs, num_tokens=rows))
        metadata.paged_kv_indices.fill_(UNREAD)
        topk_TK, table_BP = _positions(drawn, seqs, rows, shape.topk)
        attention.fill_gather_list(topk_TK.to(engine.device), metadata, table_BP.to(engine.device), drawn.page_size)
        seen = metadata.paged_kv_indices.cpu()
        expected, names = _gather_list(drawn, topk_TK, table_BP, len(seen))
        wrong = (seen != expected).nonzero()[:, 0]
        violation = ""
        if len(wrong):
            place = int(wrong[0])
            name = names.get(place, f"entry {place} behind the list")
            violation = f"{name}: {int(seen[place])} instead of {int(expected[place])} ({len(wrong)} entries in all)"
        nothing = sum(int(expected[place]) == -1 for place in names)
        measured: dict[str, float | int | str] = {"entries": len(names), "naming_nothing": nothing}
        return self.verdict(violation, measured, untested="" if len(names) > nothing else "no entry names a slot")


def _positions(drawn: Conversion, seqs: tuple[int, ...], rows: int, topk: int) -> tuple[Tensor, Tensor]:
    """Chosen positions int32 [T, K] and block table int32 [B, P]; some entries are -1, without a page, or too far."""
    generator = torch.Generator().manual_seed(drawn.seed)
    pages = [-(-length // drawn.page_size) for length in seqs]
    order = torch.randperm(sum(pages) + 3, generator=generator)
    last = INT32_MAX // drawn.page_size  # its last slot is the largest int32, or just below
    order = last - order if drawn.far else order
    table_BP = torch.full((len(seqs), max(pages) + 1), -1, dtype=torch.int32)
    for request, count in enumerate(pages):
        first = sum(pages[:request])
        table_BP[request, :count] = order[first : first + count].int()
    topk_TK = torch.full((rows, topk), -1, dtype=torch.int32)
    row = 0
    nothing = torch.tensor(
        [-1, table_BP.shape[1] * drawn.page_size, INT32_MAX, (table_BP.shape[1] - 1) * drawn.page_size]
    )
    for query, length in zip(drawn.query_lens, seqs, strict=True):
        for visible in range(length - query + 1, length + 1):
            chosen = torch.randperm(visible, generator=generator)[:topk]
            holes = torch.rand(len(chosen), generator=generator) < drawn.holes
            kinds = torch.randint(len(nothing), (len(chosen),), generator=generator)
            topk_TK[row, : len(chosen)] = torch.where(holes, nothing[kinds], chosen).int()
            row += 1
    return topk_TK, table_BP


def _gather_list(drawn: Conversion, topk_TK: Tensor, table_BP: Tensor, size: int) -> tuple[Tensor, dict[int, str]]:
    """The list that the definition gives, `UNREAD` where nothing is to be written, and what each entry is called."""
    expected, names = torch.full((size,), UNREAD, dtype=torch.int32), dict[int, str]()
    row = place = 0
    for request, (query, context) in enumerate(zip(drawn.query_lens, drawn.contexts, strict=True)):
        table = table_BP[request].tolist()
        for token in range(query):
            for rank, position in enumerate(topk_TK[row, : context + token + 1].tolist()):
                page = table[position // drawn.page_size] if 0 <= position < len(table) * drawn.page_size else -1
                expected[place] = page * drawn.page_size + position % drawn.page_size if page >= 0 else -1
                names[place] = f"row {row} (request {request}, token {token}), entry {rank}, position {position}"
                place += 1
            row += 1
    return expected, names


class GatherInput(msgspec.Struct, frozen=True, kw_only=True):
    """Requests whose indexer keys are copied out of a paged cache."""

    lengths: tuple[int, ...]
    page_size: int = 64
    preshuffle: bool = True
    seed: int = 0


class Gather(InputCheck[GatherInput]):
    """Indexer keys and scales out of the page-planar cache."""

    name = "gather"
    meaning = "each gathered key and scale came from its own slot, byte for byte, and nothing else was written"
    family = "cache"
    input_type = GatherInput

    def inputs(self) -> st.SearchStrategy[GatherInput]:
        """Requests around page edges, empty ones between them, both layouts of a page."""
        lengths = st.lists(st.sampled_from((65, 1, 0, 15, 16, 17, 63, 64, 130)), min_size=1, max_size=4)
        layouts = st.sampled_from(((64, True), (64, False), (16, True), (16, False), (1, False)))
        return st.builds(
            lambda lengths, layout, seed: GatherInput(
                lengths=tuple(lengths), page_size=layout[0], preshuffle=layout[1], seed=seed
            ),
            lengths,
            layouts,
            st.integers(0, 2**16),
        )

    def run(self, drawn: GatherInput, target: Target) -> Verdict:
        """Fill a cache with codes, gather, and read the codes."""
        device, width, total = _device(target), 128, sum(drawn.lengths)
        slots_T, table_BP, pages = _paged(drawn)
        cache = _coded_cache(pages, drawn.page_size, width, drawn.preshuffle).to(device)
        keys = torch.full((total + 2, width), SENTINEL, dtype=torch.uint8, device=device)
        scales = torch.full((total + 2, 1), -1.0, device=device)
        ends = torch.tensor([0, *drawn.lengths]).cumsum(0).int().to(device)
        kernels_of(target).cp_gather_indexer_k_quant_cache(
            cache, keys[:total], scales[:total], table_BP.to(device), ends, preshuffle=drawn.preshuffle
        )
        violation = _misread(drawn.lengths, slots_T, read_codes(keys[:total]), scales[:total, 0].cpu())
        if not violation and not (bool((keys[total:] == SENTINEL).all()) and bool((scales[total:] == -1).all())):
            violation = f"rows behind the {total} gathered tokens were written"
        return self.verdict(violation, {"tokens": total}, untested="" if total else "no token was gathered")


def _paged(drawn: GatherInput) -> tuple[Tensor, Tensor, int]:
    """Slots [T] of all tokens, block table [B, P], number of pages (two belong to nobody)."""
    counts = [-(-length // drawn.page_size) for length in drawn.lengths]
    order = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(drawn.seed))
    table_BP = torch.zeros(len(counts), max([1, *counts]), dtype=torch.int32)
    slots = [torch.empty(0, dtype=torch.int64)]
    for request, (count, length) in enumerate(zip(counts, drawn.lengths, strict=True)):
        own = order[sum(counts[:request]) :][:count]
        table_BP[request, :count] = own.int()
        position = torch.arange(length)
        slots.append(own[position // drawn.page_size] * drawn.page_size + position % drawn.page_size)
    return torch.cat(slots), table_BP, sum(counts) + 2


def _coded_cache(pages: int, page_size: int, width: int, preshuffle: bool) -> Tensor:
    """uint8 [P, S, width + 4]: a page holds the codes of its slots (16 x 16 tiles if preshuffled), then their scales,
    s + 1/2 in fp32 for slot s.
    """
    codes = slot_codes(torch.arange(pages * page_size), width).view(pages, page_size, width)
    if preshuffle:
        tiles = codes.view(pages, page_size // 16, 16, width // 16, 16)
        codes = tiles.permute(0, 1, 3, 2, 4).contiguous()
    scales = (torch.arange(pages * page_size, dtype=torch.float32) + 0.5).view(pages, page_size)
    planes = torch.cat([codes.reshape(pages, -1), scales.view(torch.uint8).view(pages, -1)], 1)
    return planes.view(pages, page_size, width + 4).contiguous()


def _misread(lengths: tuple[int, ...], slots_T: Tensor, keys_T: Tensor, scales_T: Tensor) -> str:
    for what, seen in (
        ("key", keys_T),
        ("scale", torch.where(scales_T == scales_T.floor() + 0.5, scales_T.floor(), -1.0)),
    ):
        wrong = (seen.long() != slots_T).nonzero()[:, 0]
        if len(wrong):
            token = int(wrong[0])
            ends = torch.tensor(lengths).cumsum(0)
            request = int((ends <= token).sum())
            position = token - int(ends[request]) + lengths[request]
            source = f"slot {int(seen[token])}" if seen[token] >= 0 else "no one slot"
            return f"the {what} of request {request}, position {position} came from {source}, not {int(slots_T[token])}"
    return ""


class WriteInput(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens that are stored in the latent cache; slots may be skipped (-1), the token list may be longer."""

    tokens: int
    spare: int = 0
    skipped: float = 0.2
    page_size: int = 4
    kv: Literal["auto", "fp8"] = "auto"
    seed: int = 0


class CacheWrite(InputCheck[WriteInput]):
    """The writer of the latent cache."""

    name = "cache_write"
    meaning = "each latent lies in its own slot, rounded once; skipped tokens and all other slots left the cache alone"
    family = "cache"
    input_type = WriteInput

    def inputs(self) -> st.SearchStrategy[WriteInput]:
        """A few tokens, some skipped, at times more tokens than slots are named (a padded batch), both cache types."""
        return st.builds(
            WriteInput,
            tokens=st.sampled_from((5, 1, 2, 17)),
            spare=st.sampled_from((0, 3)),
            skipped=st.sampled_from((0.2, 0.0, 0.8)),
            page_size=st.sampled_from((4, 1, 64)),
            kv=st.sampled_from(("auto", "fp8")),
            seed=st.integers(0, 2**16),
        )

    def run(self, drawn: WriteInput, target: Target) -> Verdict:
        """Store tokens of small whole numbers, exact in either type (times a scale of 1/2), and look at every slot."""
        device, generator, latent, rope = _device(target), torch.Generator().manual_seed(drawn.seed), 512, 64
        pages = -(-drawn.tokens // drawn.page_size) + 2
        slots = torch.randperm(pages * drawn.page_size, generator=generator)[: drawn.tokens]
        slots[torch.rand(drawn.tokens, generator=generator) < drawn.skipped] = -1
        rows = torch.randint(-8, 9, (drawn.tokens + drawn.spare, latent + rope), generator=generator).bfloat16()
        fp8 = drawn.kv == "fp8"
        cache = torch.full((pages, drawn.page_size, latent + rope), 100.0).to(
            torch.float8_e4m3fn if fp8 else torch.bfloat16
        )
        expected = cache.float().flatten(0, 1).clone()
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                expected[slot] = rows[token].float() * (2.0 if fp8 else 1.0)
        cache = cache.to(device)
        scale = torch.tensor([0.5 if fp8 else 1.0], device=device)
        parts = rows[:, :latent].to(device), rows[:, latent:].to(device)
        kernels_of(target).concat_and_cache_mla(*parts, cache, slots.to(device), drawn.kv, scale)
        seen = cache.float().cpu().flatten(0, 1)
        wrong = (seen != expected).any(1).nonzero()[:, 0].tolist()
        violation = ""
        if wrong:
            violation = _miswritten(wrong[0], slots, seen, expected)
        stored = int((slots >= 0).sum())
        return self.verdict(violation, {"stored": stored}, untested="" if stored else "every token was skipped")


def _miswritten(slot: int, slots_T: Tensor, seen_SD: Tensor, expected_SD: Tensor) -> str:
    owner = (slots_T == slot).nonzero()[:, 0].tolist()
    whose = f"token {owner[0]}" if owner else "no token"
    column = int((seen_SD[slot] != expected_SD[slot]).nonzero()[0])
    values = f"{float(seen_SD[slot, column]):g} instead of {float(expected_SD[slot, column]):g}"
    return f"slot {slot}, of {whose}, column {column}: {values}"


CHECKS: tuple[type[InputCheck[Any]], ...] = (Converter, Gather, CacheWrite)
