"""Faults of the planner and of what reaches it: lengths, split boundaries, maps, unwritten tails.

Kernel faults change the plan after AITER's planner wrote it, or restore what it should have overwritten.
Legend: T rows, W works, columns of a work as in `dsv32_fast.plan.PlanBuffers`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dsv32_fast.batch import StepBatch
from dsv32_fast.metadata import MetadataBuilder
from dsv32_fuzz.faults.base import Call, Fault, around, writes

_PLACE, _KV_START, _KV_END = 1, 4, 5
_PLANNER = "get_mla_metadata_v1"


def _works(call: Call) -> torch.Tensor:
    """The works that some compute unit does, as a view."""
    works: torch.Tensor = call["work_info_set"]
    return works[: int(call["work_indptr"][-1])]


def _first_pieces(call: Call) -> torch.Tensor:
    """Numbers of the works that are followed by another piece of the same row."""
    works_W8 = _works(call)
    same = (works_W8[1:, 2] == works_W8[:-1, 2]) & (works_W8[1:, _PLACE] >= 0) & (works_W8[:-1, _PLACE] >= 0)
    return same.nonzero().flatten()


def _gap(call: Call) -> None:
    _works(call)[_first_pieces(call), _KV_END] -= 1


def _overlap(call: Call) -> None:
    _works(call)[_first_pieces(call) + 1, _KV_START] -= 1


def _missing_tail(call: Call) -> None:
    indptr = call["work_indptr"]
    indptr.clamp_(max=max(0, int(indptr[-1]) - 1))


def _trim(call: Call) -> None:
    works_W8, last_row = _works(call), call["seqlens_qo_indptr"].numel() - 2
    ends = torch.ones(len(works_W8), dtype=torch.bool)
    ends[_first_pieces(call)] = False
    works_W8[ends & (works_W8[:, 2] < last_row) & (works_W8[:, _KV_END] > works_W8[:, _KV_START]), _KV_END] -= 1


def _compact_final_map(call: Call) -> None:
    tiles = call["reduce_indptr"].diff().nonzero().flatten()
    rows = call["reduce_final_map"][tiles].clone()
    call["reduce_final_map"][: len(rows)] = rows


def _whole_by_map(call: Call) -> None:
    works_W8, indptr = _works(call), call["reduce_indptr"]
    whole = works_W8[works_W8[:, _PLACE] < 0][:1, 2]
    if len(whole) and int(indptr[-1]) > 0:
        call["reduce_final_map"][indptr.diff().nonzero()[0]] = torch.stack([whole, whole + 1], 1)


def _partial_shift(call: Call) -> None:
    used = int(call["reduce_indptr"][-1])
    if used:
        call["reduce_partial_map"][used - 1] = call["reduce_partial_map"][used - 2]


def _keeps(name: str, live: Callable[[Call], int]) -> Callable[[Callable[[Call], Any], Call], None]:
    """The planner leaves the entries of a buffer behind the live ones as they were."""

    def change(run: Callable[[Call], Any], call: Call) -> None:
        old = call[name].clone()
        run(call)
        call[name][live(call) :] = old[live(call) :]

    return change


def _busy_units(call: Call) -> int:
    indptr = call["work_indptr"]
    return int((indptr < indptr[-1]).sum()) + 1


def _swap_two_rows(call: Call) -> None:
    works_W8 = _works(call)
    whole = (works_W8[:, _PLACE] < 0).nonzero().flatten()[:2]
    if len(whole) == 2:
        works_W8[whole, _KV_START : _KV_END + 1] = works_W8[whole.flip(0), _KV_START : _KV_END + 1]


class _PadRowsOne(MetadataBuilder):
    def _rows(self, step: StepBatch) -> tuple[torch.Tensor, torch.Tensor]:
        req_ids, lens_T = super()._rows(step)
        lens_T[len(req_ids) :] = 1
        return req_ids, lens_T


class _PadRowsLast(MetadataBuilder):
    def _rows(self, step: StepBatch) -> tuple[torch.Tensor, torch.Tensor]:
        req_ids, lens_T = super()._rows(step)
        if len(req_ids):
            lens_T[len(req_ids) :] = lens_T[len(req_ids) - 1]
        return req_ids, lens_T


class _Multiples(MetadataBuilder):
    def _rows(self, step: StepBatch) -> tuple[torch.Tensor, torch.Tensor]:
        req_ids, lens_T = super()._rows(step)
        return req_ids, torch.where(lens_T > 16, lens_T // 16 * 16, lens_T)


class _StopsBelowTopk(MetadataBuilder):
    def _rows(self, step: StepBatch) -> tuple[torch.Tensor, torch.Tensor]:
        req_ids, lens_T = super()._rows(step)
        return req_ids, lens_T.clamp_max(self.config.topk - 1)


class _TopkOf2048(MetadataBuilder):
    def _rows(self, step: StepBatch) -> tuple[torch.Tensor, torch.Tensor]:
        req_ids, lens_T = super()._rows(step)
        left_T = torch.cat([torch.arange(q - 1, -1, -1) for q in (*step.query_lens, 0)])
        seq_B = torch.tensor((*step.seq_lens, 0))
        lens_T[: len(req_ids)] = (seq_B[req_ids.long()] - left_T).clamp_max(2048).int()
        return req_ids, lens_T


def _planner(name: str, story: str, reference: str, change: Any, bugs: tuple[str, ...] = ()) -> Fault:
    return Fault(
        name=name, area="planner", story=story, reference=reference, bugs=bugs, kernels={_PLANNER: writes(change)}
    )


FAULTS: tuple[Fault, ...] = (
    _planner(
        "plan_gap",
        "each piece of a split row but the last ends one token early, so one key is lost at every cut",
        "AITER planner v1_2: pieces of a row tile its KV range",
        _gap,
    ),
    _planner(
        "plan_overlap",
        "each piece of a split row but the first starts one token early, so one key counts twice at every cut",
        "AITER planner v1_2: pieces of a row tile its KV range",
        _overlap,
    ),
    _planner(
        "plan_missing_tail",
        "a payload too small by one block: the compute units run out and the last work is never done",
        "AITER planner v1_2: payload = ceil(sum / splits) + overhead",
        _missing_tail,
        ("Z10",),
    ),
    _planner(
        "plan_trim_by_tiles",
        "rows are taken for query tiles of one request, and all but the last are trimmed by a token",
        "AITER planner v1_2: the causal trim counts tiles, not tokens",
        _trim,
    ),
    _planner(
        "plan_compact_final_map",
        "reduce_final_map is written densely, split row after split row, instead of at the row's tile",
        "AITER planner v1_2: reduce_final_map is indexed by tile",
        _compact_final_map,
    ),
    _planner(
        "plan_whole_row_in_map",
        "a row that was not split appears in reduce_final_map, in the place of the first split row",
        "AITER #3606; planner v1_1 writes (-1, -2) there",
        _whole_by_map,
    ),
    _planner(
        "plan_partial_twice",
        "the last partial of the batch is listed at the place of the one before it",
        "AITER planner v1_2: partial locations are consecutive",
        _partial_shift,
    ),
    _planner(
        "plan_rows_exchanged",
        "the first two unsplit rows have each other's KV range",
        "AITER #4076: a wrong plan looks like a wrong kernel",
        _swap_two_rows,
        ("Z10",),
    ),
    Fault(
        name="plan_units_tail_stale",
        area="planner",
        story="work_indptr behind the last busy compute unit keeps what an earlier plan left",
        reference="AITER planner v1_2: units left over get empty ranges; AITER #4129 (zeros against empty)",
        bugs=("Z11",),
        kernels={_PLANNER: around(_keeps("work_indptr", _busy_units))},
    ),
    Fault(
        name="plan_tiles_tail_stale",
        area="planner",
        story="reduce_indptr behind the last row keeps what an earlier plan left",
        reference="AITER planner v1_2: reduce_indptr is filled to its end",
        kernels={_PLANNER: around(_keeps("reduce_indptr", lambda call: call["seqlens_kv_indptr"].numel()))},
    ),
    Fault(
        name="plan_pad_rows_one",
        area="planner",
        story="padding rows get length 1 instead of 0 and read somebody's first key",
        reference="vLLM #35969, #38436; flashinfer #5015",
        bugs=("Z34",),
        builder=_PadRowsOne,
    ),
    Fault(
        name="plan_pad_rows_last",
        area="planner",
        story="padding rows repeat the last request's length and look like real contexts",
        reference="vLLM #53906, vllm-backport #49",
        bugs=("Z26",),
        builder=_PadRowsLast,
    ),
    Fault(
        name="plan_whole_blocks",
        area="planner",
        story="lengths are rounded down to the KV granularity of 16, so a row loses its last keys",
        reference="AITER planner v1_2: kv_granularity counts a started block as a whole one",
        builder=_Multiples,
    ),
    Fault(
        name="plan_below_topk",
        area="planner",
        story="a saturated row is planned for topk - 1 keys",
        reference="DeepSeek-V3.2 report: min(position + 1, topk) keys",
        builder=_StopsBelowTopk,
    ),
    Fault(
        name="plan_topk_of_2048",
        area="planner",
        story="topk is 2048 whatever the model says, while the gather list is index_topk wide",
        reference="TensorRT-LLM #8882 (review)",
        bugs=("Z53",),
        builder=_TopkOf2048,
    ),
)
