"""The check of index widths: caches in which an offset does not fit into 32 bits (vLLM #56037, aiter #4474).

Legend: T tokens, D latent + RoPE width, I index width.
"""

from __future__ import annotations

import tempfile
from typing import Any, Literal

import msgspec
import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from dsv32_fast.batch import StepBatch
from dsv32_fast.metadata import BuilderConfig, MetadataBuilder
from dsv32_fast.offsets import INT32_MAX
from dsv32_fast.options import PRESETS
from dsv32_fuzz.checks.findings import Findings, same_bits
from dsv32_fuzz.checks.own_input import InputCheck
from dsv32_fuzz.strategies.steps import integers, sampled_from
from dsv32_fuzz.targets import Target
from dsv32_fuzz.verdict import Verdict


class FarInput(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Records of a cache around the first one whose offset does not fit into 32 bits."""

    cache: Literal["latent", "index"] = "latent"
    page_size: int = 64
    records: tuple[int, ...] = (0,)
    """Slots (latent) or pages (index), counted from the first whose offset wraps; -1 is the last that does not."""
    seed: int = 0


class IndexWidth(InputCheck[FarInput]):
    """Writers and readers of a cache beyond 2^31 elements, in a sparse file of which a few pages exist."""

    name = "index_width"
    meaning = "a token beyond element 2^31 of a cache is written and read there, as one at the start is"
    family = "cache"
    input_type = FarInput

    def inapplicable(self, target: Target) -> str:
        """A GPU has no sparse memory."""
        sparse = "" if target.evidence == "emulated" else "needs sparse memory; a GPU has none"
        return super().inapplicable(target) or sparse

    def inputs(self) -> st.SearchStrategy[FarInput]:
        """Next to the wrap, on both sides."""
        return st.builds(
            FarInput,
            cache=sampled_from(("latent", "index")),
            page_size=sampled_from((64, 16)),
            records=st.lists(sampled_from((0, 1, -1, 7, 100)), min_size=1, max_size=3, unique=True).map(tuple),
            seed=integers(0, 1 << 16),
        )

    def run(self, drawn: FarInput, target: Target) -> Verdict:
        """Write far tokens and compare with the same tokens in a small cache."""
        found, g = Findings(), torch.Generator().manual_seed(drawn.seed)
        (self._latent if drawn.cache == "latent" else self._index)(found, drawn, g, target)
        beyond = sum(record >= 0 for record in drawn.records)
        found.counts["records_beyond"] += beyond
        return self.verdict(found.violation, found.measured(), untested="" if beyond else "no record lies beyond 2^31")

    def _latent(self, found: Findings, drawn: FarInput, g: torch.Generator, target: Target) -> None:
        width, size, count = 576, drawn.page_size, len(drawn.records)
        slots = INT32_MAX // width + 1 + torch.tensor(drawn.records)
        pages = int(slots.max()) // size + 2
        kv_TD = torch.randn(count, width, generator=g).bfloat16()
        assert target.kernels is not None
        with tempfile.TemporaryFile() as file:
            flat = _sparse(file, pages * size * width * 2).view(torch.bfloat16)
            target.kernels.concat_and_cache_mla(
                kv_TD[:, :512], kv_TD[:, 512:], flat.view(pages, size, width), slots, "auto", torch.ones(1)
            )
            for row, slot in enumerate(slots.tolist()):
                same = same_bits(flat[slot * width : (slot + 1) * width], kv_TD[row])
                found.require("records", same, f"latent cache: slot {slot} does not hold its token")
            q_1HD = torch.randn(1, 16, width, generator=g).bfloat16()
            far = _decoded(target, q_1HD, flat.view(-1, 1, 1, width), slots)
        near = _decoded(target, q_1HD, kv_TD.view(count, 1, 1, width), torch.arange(count))
        text = f"latent cache: attention over slots {slots.tolist()} differs from that over a small cache"
        found.require("rows_attended", same_bits(far, near), text)

    def _index(self, found: Findings, drawn: FarInput, g: torch.Generator, target: Target) -> None:
        width, size, count = 128, drawn.page_size, len(drawn.records)
        pages = INT32_MAX // (size * (width + 4)) + 1 + torch.tensor(drawn.records)
        total, slots = int(pages.max()) + 2, pages * size + 5
        keys_TI = torch.randn(count, width, generator=g).bfloat16()
        near = torch.zeros(count, size, width + 4, dtype=torch.uint8)
        assert target.kernels is not None
        write, gather = target.kernels.indexer_k_quant_and_cache, target.kernels.cp_gather_indexer_k_quant_cache
        write(keys_TI, near, torch.arange(count) * size + 5, width, "ue8m0")
        with tempfile.TemporaryFile() as file:
            far = _sparse(file, total * size * (width + 4)).view(total, size, width + 4)
            write(keys_TI, far, slots, width, "ue8m0")
            for row, page in enumerate(pages.tolist()):
                same = torch.equal(far[page], near[row])
                found.require("records", same, f"index cache: page {page} does not hold its token")
            read = torch.zeros(count * size, width, dtype=torch.uint8), torch.zeros(count * size, 1)
            ends = torch.tensor([0, count * size], dtype=torch.int32)
            far[pages] = near
            gather(far, *read, pages[None].int(), ends)
        expected = near.flatten(1)[:, : size * width].reshape(-1, width)
        text = f"index cache: pages {pages.tolist()} are not what was gathered from them"
        found.require("pages_gathered", torch.equal(read[0], expected), text, times=count)


def _decoded(target: Target, q_1HD: Tensor, kv: Tensor, slots: Tensor) -> Tensor:
    """One row's attention over these slots, [1, H, C]."""
    assert target.kernels is not None
    builder = MetadataBuilder(
        config=BuilderConfig(num_heads=16, topk=16, max_num_batched_tokens=1),
        options=PRESETS["baseline"],
        kernels=target.kernels,
    )
    step = builder.build(StepBatch(query_lens=(1,), seq_lens=(len(slots),)))
    step.paged_kv_indices[: len(slots)] = slots
    out = torch.full((1, 16, 512), torch.nan, dtype=torch.bfloat16)
    plan = step.plan
    target.kernels.mla_decode_fwd(
        q_1HD,
        kv,
        out,
        step.qo_indptr_T1,
        step.paged_kv_indptr_T1,
        step.paged_kv_indices,
        step.paged_kv_last_page_len_T,
        1,
        sm_scale=0.05,
        work_meta_data=plan.work_metadata_ptrs,
        work_indptr=plan.work_indptr,
        work_info_set=plan.work_info_set,
        reduce_indptr=plan.reduce_indptr,
        reduce_final_map=plan.reduce_final_map,
        reduce_partial_map=plan.reduce_partial_map,
    )
    return out


def _sparse(file: Any, size: int) -> Tensor:
    """`size` bytes of zeros, hardly any of which exist."""
    return torch.from_numpy(np.memmap(file, dtype=np.uint8, mode="w+", shape=(size,)))


CHECKS: tuple[type[InputCheck[Any]], ...] = (IndexWidth,)
