"""Faults that change no value and cost time: launches, host reads, copies, casts, fills, widths, synchronisations.

Legend: T rows, S positions, E experts.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import msgspec
import torch
from torch import Tensor

from dsv32_fast.batch import StepBatch
from dsv32_fast.metadata import MetadataBuilder, SparseMlaMetadata
from dsv32_fuzz.faults.base import Call, Fault, Patch, around, before, returns, writes

FULL_WIDTH = 4096
"""Columns that stand for the model's longest sequence; wider than any row of a small world."""


class _AlwaysRebuilds(MetadataBuilder):
    def _key(self, step: StepBatch) -> Hashable:
        return step, self.counts.builds


class _FullFill(MetadataBuilder):
    def _clear(self, step: StepBatch) -> None:
        asked, self.options = self.options, msgspec.structs.replace(self.options, clear="full")
        super()._clear(step)
        self.options = asked


class _CountedRead(MetadataBuilder):
    def build(self, step: StepBatch) -> SparseMlaMetadata:
        self.counts.host_device_reads += 1
        return super().build(step)


class _HiddenRead(MetadataBuilder):
    def build(self, step: StepBatch) -> SparseMlaMetadata:
        metadata = super().build(step)
        assert int(self.paged_kv_indptr_N1[step.num_tokens].item()) >= 0
        return metadata


class _SecondCopy(MetadataBuilder):
    def _rows(self, step: StepBatch) -> tuple[Tensor, Tensor]:
        torch.tensor(step.seq_lens, dtype=torch.int32, device=self.device)
        return super()._rows(step)


def _casts_back(run: Any, call: Call) -> Tensor:
    logits_TE: Tensor = run(call)
    return call["casts"].widen(logits_TE).to(logits_TE.dtype)  # type: ignore[no-any-return]


def _full_width(scores_TS: Tensor) -> Tensor:
    return torch.nn.functional.pad(scores_TS, (0, max(0, FULL_WIDTH - scores_TS.shape[1])), value=-torch.inf)


def _cap_of_16(call: Call) -> None:
    if call["max_split_per_batch"] < 0 or call["max_split_per_batch"] > 16:
        call["max_split_per_batch"] = 16


def _waits(call: Call) -> None:
    if call["self"].queues is not None:
        call["self"].queues.synchronize("main")


FAULTS: tuple[Fault, ...] = (
    Fault(
        name="latency_always_rebuilds",
        area="latency",
        story="every step has a new key, so the plan is made anew each time",
        reference="TensorRT-LLM #3322: a new slice object per layer",
        bugs=("Z05",),
        builder=_AlwaysRebuilds,
    ),
    Fault(
        name="latency_full_fill",
        area="latency",
        story="whole buffers are cleared although the tail was asked for",
        reference="vLLM #55373",
        bugs=("Z71",),
        builder=_FullFill,
    ),
    Fault(
        name="latency_counted_read",
        area="latency",
        story="the key reads the lengths back from the device at every step, hit or miss",
        reference="vLLM #54369",
        bugs=("Z04",),
        builder=_CountedRead,
    ),
    Fault(
        name="latency_hidden_read",
        area="latency",
        story="a build reads one element of a device tensor; nothing counts it",
        reference="vLLM #54369, #40654",
        bugs=("Z04",),
        builder=_HiddenRead,
    ),
    Fault(
        name="latency_second_copy",
        area="latency",
        story="a build copies the sequence lengths to the device once more, beside those that it uses",
        reference="the builder's contract: the lengths go to the device once, in one tensor",
        builder=_SecondCopy,
    ),
    Fault(
        name="latency_extra_cast",
        area="latency",
        story="bf16 logits are widened and narrowed again, one cast more per mixture layer",
        reference="vLLM #42982: 58 casts per step",
        patches=(Patch(where="dsv32_fast.router", name="gate_logits", make=around(_casts_back)),),
    ),
    Fault(
        name="latency_full_width",
        area="latency",
        story="index scores are as wide as the model's longest sequence, whatever the live lengths are",
        reference="vLLM #55373, #48582; sglang #40441",
        bugs=("Z71", "Z73"),
        patches=(Patch(where="dsv32_fast.indexing", name="index_scores", make=returns(_full_width)),),
    ),
    Fault(
        name="latency_split_cap_16",
        area="latency",
        story="the planner splits a row over at most 16 compute units, so small batches leave most of them idle",
        reference="ATOM #611, #1911",
        bugs=("Z18",),
        kernels={"get_mla_metadata_v1": before(_cap_of_16)},
    ),
    Fault(
        name="latency_waits_on_hits",
        area="latency",
        story="the host waits for the queue after every build, whether or not the planner ran",
        reference="vLLM #47404: synchronise after a recompute only",
        bugs=("Z28",),
        patches=(Patch(where="dsv32_fast.graph.attention.GraphedAttention", name="build", make=writes(_waits)),),
    ),
)
