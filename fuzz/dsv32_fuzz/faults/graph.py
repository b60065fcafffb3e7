"""Faults of captured graphs: addresses that move or are recycled, writes without an order, inputs of another step.

Legend: S rows of the graph, T rows of the step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Any

import msgspec
import torch

from dsv32_fast.batch import StepBatch
from dsv32_fast.metadata import MetadataBuilder, SparseMlaMetadata
from dsv32_fast.plan import PlanBuffers
from dsv32_fuzz.faults.base import Call, Fault, Patch, around, before

_ATTENTION = "dsv32_fast.graph.attention"
_QUEUES = "dsv32_fast.graph.queues"


class _Moves(MetadataBuilder):
    """The row pointers get new storage at every step."""

    def build(self, step: StepBatch) -> SparseMlaMetadata:
        self.paged_kv_indptr_N1 = self.paged_kv_indptr_N1.clone()
        return super().build(step)


class _Recycles(MetadataBuilder):
    """Plans by key in two sets of buffers; the older one is handed on to the next key (an LRU cache of size two)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._kept: list[tuple[Hashable, PlanBuffers]] = []

    def build(self, step: StepBatch) -> SparseMlaMetadata:
        key = self._key(step)
        for place, (known, plan) in enumerate(self._kept):
            if known == key:
                self._kept.append(self._kept.pop(place))
                self.plan, self.last_key = plan, key
                return super().build(step)
        self.plan = PlanBuffers(*(b.clone() for b in self.plan)) if len(self._kept) < 2 else self._kept.pop(0)[1]
        self._kept.append((key, self.plan))
        return super().build(step)


def _never_waits(call: Call) -> None:
    call["synchronise"] = False


def _one_buffer(call: Call) -> None:
    call["depth"], call["wait"] = 1, False


def _one_row_short(call: Call) -> None:
    call["size"] = max(1, call["size"] - 1)


def _unpadded(run: Any, call: Call) -> SparseMlaMetadata:
    """The metadata is made for the live rows; the rows behind them are those of an earlier step."""
    step, builder = call["step"], call["self"].builder
    live = step.num_query_tokens
    indptr_N1, ids_N = builder.paged_kv_indptr_N1.clone(), builder.req_id_per_token_N.clone()
    metadata: SparseMlaMetadata = run({**call, "step": msgspec.structs.replace(step, num_tokens=live)})
    T = step.num_tokens
    builder.paged_kv_indptr_N1[live + 1 : T + 1] = indptr_N1[live + 1 : T + 1]
    builder.req_id_per_token_N[live:T] = ids_N[live:T]
    return dataclasses.replace(
        metadata,
        num_tokens=T,
        req_id_per_token_T=builder.req_id_per_token_N[:T],
        qo_indptr_T1=builder.qo_indptr_N1[: T + 1],
        paged_kv_indptr_T1=builder.paged_kv_indptr_N1[: T + 1],
        paged_kv_last_page_len_T=builder.paged_kv_last_page_len_N[:T],
        paged_kv_indices=builder.paged_kv_indices_NK[: T * builder.config.topk],
    )


def _any_scalars(run: Any, call: Call) -> Any:
    """A graph is chosen by its size alone."""
    graphs = call["self"]._graphs.get(call["size"])
    return next(iter(graphs.values())) if graphs else run(call)


def _copied_once(_original: Any) -> Any:
    """The selected slots are brought over when their number changes, and not otherwise."""

    def change(run: Any, call: Call) -> None:
        layer, rows = call["self"], call["rows"]
        kept = layer.__dict__.setdefault("_slots_rows", -1)
        if call["name"] == "slots" and kept == len(rows):
            return
        if call["name"] == "slots":
            layer.__dict__["_slots_rows"] = len(rows)
        run(call)

    return around(change)(_original)


def _stale_indices(_original: Any) -> Any:
    """The gather list is packed without clearing what lies behind the packed entries, and one entry late."""

    def gather(slots_SK: torch.Tensor, indptr_S1: torch.Tensor, paged_SK: torch.Tensor) -> None:
        rows, width = slots_SK.shape
        place_SK = indptr_S1[:-1, None] + torch.arange(width, dtype=torch.int32, device=slots_SK.device)
        place_SK = torch.where(place_SK < indptr_S1[1:, None], place_SK, rows * width)
        packed = torch.zeros(rows * width + 1, dtype=torch.int32, device=slots_SK.device)
        packed.scatter_(0, place_SK.flatten().long(), slots_SK.flatten())
        paged_SK[1:].copy_(packed[:-2])

    return gather


def _graph(name: str, story: str, reference: str, patch: Patch, bugs: tuple[str, ...] = ()) -> Fault:
    return Fault(name=name, area="graph", story=story, reference=reference, bugs=bugs, patches=(patch,))


FAULTS: tuple[Fault, ...] = (
    Fault(
        name="graph_stale_address",
        area="graph",
        story="a buffer is allocated anew at every step; the graph goes on reading the captured one",
        reference="AITER #5193; sglang #38663",
        bugs=("Z29", "Z33"),
        builder=_Moves,
    ),
    Fault(
        name="graph_recycled_plan",
        area="graph",
        story="plans live in a cache of two; the storage that a graph captured is handed on to another key",
        reference="AITER #5193, #5194, #4587, #5393",
        bugs=("Z29",),
        builder=_Recycles,
    ),
    _graph(
        "graph_unordered_plan",
        "nothing orders the planner's write before the replay that reads it",
        "vLLM #47404, #47196",
        Patch(where=f"{_QUEUES}.QueuedPlanner", name="__init__", make=before(_never_waits)),
        ("Z28",),
    ),
    _graph(
        "graph_staging_reused",
        "the host overwrites a staging buffer before the copy out of it has run",
        "vllm-ascend #12071, #16428; TensorRT-LLM #15546; vLLM #36013, #48085",
        Patch(where=f"{_QUEUES}.Staging", name="__init__", make=before(_one_buffer)),
        ("Z33",),
    ),
    _graph(
        "graph_short_view",
        "the output view has fewer rows than the graph writes",
        "vLLM #42810 (review), #42072",
        Patch(where=f"{_ATTENTION}.StepBuffers", name="rows", make=before(_one_row_short)),
        ("Z24",),
    ),
    _graph(
        "graph_unpadded_metadata",
        "100 requests run the graph of 112 rows on metadata that was made for 100",
        "xllm #1939",
        Patch(where=f"{_ATTENTION}.GraphedAttention", name="build", make=around(_unpadded)),
        ("Z32",),
    ),
    _graph(
        "graph_baked_scalar",
        "graphs are chosen by size alone; a number that was baked in at capture is out of date",
        "aprender #2030",
        Patch(where="dsv32_fast.graph.runner.GraphRunner", name="_choose", make=around(_any_scalars)),
        ("Z07",),
    ),
    _graph(
        "graph_input_not_copied",
        "the selected slots are copied to the graph's input only when their number changes",
        "vllm-ascend #17170; sglang #15227",
        Patch(where=f"{_ATTENTION}.GraphedAttention", name="put", make=_copied_once),
        ("Z08", "Z09"),
    ),
    _graph(
        "graph_late_gather",
        "inside the graph the gather list is packed one entry late",
        "sglang #37975 (a replay that rebuilds the wrong indices)",
        Patch(where=_ATTENTION, name="gather_indices", make=_stale_indices),
    ),
)
