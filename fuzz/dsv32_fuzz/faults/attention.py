"""Faults of the gather list and of the attention over it: a key lost, a key of somebody else, rows and heads mixed.

A lost key of 2048 moves an output by less than a thousandth; a foreign one need not look foreign at all.
Legend: T rows, H heads, K top-k, P pages.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsv32_fast.metadata import MIN_HEADS
from dsv32_fuzz.faults.base import Call, Fault, Patch, after, around, before, writes

_PATH = "dsv32_fast.attention"


def _rows_with_keys(indptr: Tensor, at_least: int) -> Tensor:
    return (indptr.diff() >= at_least).nonzero().flatten()


def _last_is_first(call: Call) -> None:
    indptr, indices = call["kv_indptr"].long(), call["kv_indices"].clone()
    rows = _rows_with_keys(indptr, 2)
    indices[indptr[rows + 1] - 1] = indices[indptr[rows]]
    call["kv_indices"] = indices


def _shifted(call: Call) -> None:
    used = int(call["kv_indptr"][-1])
    indices = call["kv_indices"].clone()
    indices[:used] = indices[:used].roll(1)
    call["kv_indices"] = indices


def _queries_exchanged(call: Call) -> None:
    if len(call["q"]) > 1:
        order = torch.arange(len(call["q"]), device=call["q"].device)
        order[:2] = order[:2].flip(0)
        call["q"] = call["q"][order].contiguous()


def _heads_rotated(call: Call) -> None:
    call["o"].copy_(call["o"].roll(1, 1))


def _zero_for_invalid(run: Any, call: Call) -> None:
    run(call)
    metadata = call["metadata"]
    used = int(metadata.paged_kv_indptr_T1[-1])
    metadata.paged_kv_indices[:used].clamp_(min=0)


def _logical_slots(run: Any, call: Call) -> None:
    table = call["block_table_BP"]
    run({**call, "block_table_BP": torch.arange(table.shape[1], dtype=table.dtype).expand_as(table).to(table.device)})


def _first_requests_table(run: Any, call: Call) -> None:
    run({**call, "block_table_BP": call["block_table_BP"][:1].expand_as(call["block_table_BP"])})


def _no_offset_in_page(run: Any, call: Call) -> None:
    size = call["page_size"]
    topk_TK = call["topk_TK"]
    run({**call, "topk_TK": torch.where(topk_TK >= 0, topk_TK // size * size, topk_TK)})


def _unpads_wrongly(call: Call, z_THC: Tensor) -> Tensor:
    heads = call["config"].n_heads
    copies = max(1, MIN_HEADS // heads)
    return z_THC[:, torch.arange(heads) // copies]


def _latent_only(call: Call) -> None:
    """The scores lose the RoPE part: its query is zero."""
    q = call["q"].clone()
    q[..., call["o"].shape[-1] :] = 0
    call["q"] = q


def _list_kept(original: Any) -> Any:
    """Row pointers are compared with those of the last fill of the same buffer."""
    filled: dict[int, Tensor] = {}

    def change(run: Any, call: Call) -> None:
        metadata = call["metadata"]
        indptr_T1, where = metadata.paged_kv_indptr_T1, metadata.paged_kv_indices.data_ptr()
        if where not in filled or not torch.equal(filled[where], indptr_T1):
            filled[where] = indptr_T1.clone()
            run(call)

    return around(change)(original)


def _decode(name: str, story: str, reference: str, change: Any, bugs: tuple[str, ...] = ()) -> Fault:
    return Fault(
        name=name, area="attention", story=story, reference=reference, bugs=bugs, kernels={"mla_decode_fwd": change}
    )


def _gather(name: str, story: str, reference: str, change: Any, bugs: tuple[str, ...] = ()) -> Fault:
    patch = Patch(where=_PATH, name="fill_gather_list", make=around(change))
    return Fault(name=name, area="attention", story=story, reference=reference, bugs=bugs, patches=(patch,))


FAULTS: tuple[Fault, ...] = (
    _decode(
        "attention_lost_key",
        "the last key of every row is replaced by its first, so the newest chosen token is lost",
        "vLLM #47042 (needles lost); ATOM #2118",
        before(_last_is_first),
    ),
    _decode(
        "attention_shifted_window",
        "every row reads its gather list one entry too early",
        "vLLM #47766: a stale plan's window starts inside another row",
        before(_shifted),
        ("Z01",),
    ),
    _decode(
        "attention_rows_exchanged",
        "the first two rows are computed with each other's query",
        "AITER #4076",
        before(_queries_exchanged),
    ),
    _decode(
        "attention_heads_rotated",
        "every head's result is stored one head further",
        "vLLM #36855, AITER #4957 (head counts)",
        writes(_heads_rotated),
        ("Z70",),
    ),
    _decode(
        "attention_no_rope_part",
        "the scores leave out the 64 RoPE dims of the query",
        "DeepSeek-V2 report, section 2.1: scores over latent and RoPE part",
        before(_latent_only),
    ),
    _gather(
        "attention_slot_zero",
        "a chosen position that is not cached becomes physical slot 0 instead of -1",
        "vLLM #45324",
        _zero_for_invalid,
        ("Z21",),
    ),
    _gather(
        "attention_logical_slots",
        "the block table is ignored: positions are taken for physical slots",
        "AITER #5591",
        _logical_slots,
        ("Z64",),
    ),
    _gather(
        "attention_first_table",
        "every row's positions go through the first request's block table",
        "vLLM #42982 (review): request ids that are stale or zero",
        _first_requests_table,
        ("Z20",),
    ),
    _gather(
        "attention_page_start",
        "the offset within a page is lost, so a row reads the first slot of each page",
        "vLLM #43781 (block size 1 hard-coded)",
        _no_offset_in_page,
        ("Z57",),
    ),
    Fault(
        name="attention_list_kept",
        area="attention",
        story="the gather list is filled only if the row pointers changed: it holds an earlier layer's or step's slots",
        reference="vLLM #44527, #50008, #51323: a persistent index buffer keeps what an earlier fill left",
        bugs=("Z23",),
        patches=(Patch(where=_PATH, name="fill_gather_list", make=_list_kept),),
    ),
    Fault(
        name="attention_unpads_wrongly",
        area="attention",
        story="fewer than 16 heads are repeated in turn and read back as if they lay one behind the other",
        reference="vLLM #36855, #41835; ATOM #1252",
        bugs=("Z70",),
        patches=(Patch(where=_PATH, name="decode", make=after(_unpads_wrongly)),),
    ),
)
