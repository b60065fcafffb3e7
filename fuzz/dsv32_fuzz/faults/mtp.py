"""Faults of verified drafts: one row planned for several, a window that is the same for all, drafts seen too early.

Legend: T rows, B requests, H heads, C latent.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from dsv32_fast.batch import StepBatch
from dsv32_fast.metadata import MetadataBuilder
from dsv32_fuzz.faults.base import Call, Fault, Patch, after, before, returns


class _OneRowPerRequest(MetadataBuilder):
    """Only as many rows as there are requests are planned; the others get no keys."""

    def _rows(self, step: StepBatch) -> tuple[Tensor, Tensor]:
        req_ids, lens_T = super()._rows(step)
        lens_T[sum(q > 0 for q in step.query_lens) :] = 0
        return req_ids, lens_T


class _SameWindow(MetadataBuilder):
    def _rows(self, step: StepBatch) -> tuple[Tensor, Tensor]:
        req_ids, lens_T = super()._rows(step)
        seq_B = torch.tensor(step.seq_lens, dtype=torch.int32)
        lens_T[: len(req_ids)] = seq_B[req_ids.long()].clamp_max(self.config.topk)
        return req_ids, lens_T


class _WithoutItself(MetadataBuilder):
    def _rows(self, step: StepBatch) -> tuple[Tensor, Tensor]:
        req_ids, lens_T = super()._rows(step)
        drafts_B = torch.tensor([q > 1 for q in step.query_lens])
        short = drafts_B[req_ids.long()] & (lens_T[: len(req_ids)] < self.config.topk)
        lens_T[: len(req_ids)] -= short.int()
        return req_ids, lens_T


class _ClampedFirst(MetadataBuilder):
    """min(seq, topk) - q + j + 1: the clamp before the causal offset instead of behind it."""

    def _rows(self, step: StepBatch) -> tuple[Tensor, Tensor]:
        req_ids, lens_T = super()._rows(step)
        seq_B = torch.tensor(step.seq_lens, dtype=torch.int32)
        lost_B = seq_B - seq_B.clamp_max(self.config.topk)
        position_T = self._unclamped(step, req_ids)
        lens_T[: len(req_ids)] = (position_T - lost_B[req_ids.long()]).clamp_min(0)
        return req_ids, lens_T

    def _unclamped(self, step: StepBatch, req_ids: Tensor) -> Tensor:
        query_B = torch.tensor(step.query_lens, dtype=torch.int32)
        last_B = torch.cumsum(query_B, 0, dtype=torch.int32) - 1
        seq_B = torch.tensor(step.seq_lens, dtype=torch.int32)
        return (seq_B - last_B)[req_ids.long()] + torch.arange(len(req_ids), dtype=torch.int32)


def _buffers_for_one(call: Call) -> None:
    call["batch_size"] = min(call["batch_size"], 1)


def _same_output(call: Call, z_THC: Tensor) -> Tensor:
    """Rows of a request whose query length is no power of two are all its first one."""
    metadata, z_THC = call["metadata"], z_THC.clone()
    live = metadata.paged_kv_indptr_T1.diff() > 0
    for request in metadata.req_id_per_token_T[live].unique().tolist():
        rows = (live & (metadata.req_id_per_token_T == request)).nonzero().flatten()
        if len(rows) & (len(rows) - 1):
            z_THC[rows] = z_THC[rows[0]].clone()
    return z_THC


def _sees_later_drafts(batch: Any) -> Any:
    """Every row of a request may see all of its tokens."""
    seq_B = torch.tensor([*batch.step.seq_lens, 0], dtype=torch.int32)
    live = torch.arange(len(batch.lengths)) < batch.live
    return dataclasses.replace(batch, lengths=torch.where(live, seq_B[batch.owner], batch.lengths))


def _one_position(batch: Any) -> Any:
    """All drafts of a request have the position of the first."""
    positions_T = batch.positions.clone()
    for rows in batch.spans():
        positions_T[rows] = positions_T[rows][:1]
    return dataclasses.replace(batch, positions=positions_T)


_BATCH = "dsv32_fast.state.CacheState"

FAULTS: tuple[Fault, ...] = (
    Fault(
        name="mtp_planned_as_one",
        area="mtp",
        story="a verify step is planned with one row per request; the drafts' rows attend nothing",
        reference="vLLM #45227",
        bugs=("Z17",),
        builder=_OneRowPerRequest,
    ),
    Fault(
        name="mtp_buffers_for_one",
        area="mtp",
        story="the plan buffers are sized for one row",
        reference="vLLM #45227",
        bugs=("Z17",),
        kernels={"get_mla_metadata_info_v1": before(_buffers_for_one)},
    ),
    Fault(
        name="mtp_same_window",
        area="mtp",
        story="all drafts of a request get the KV length of the last one",
        reference="vLLM #45227: a causal window per row",
        bugs=("Z17",),
        builder=_SameWindow,
    ),
    Fault(
        name="mtp_without_itself",
        area="mtp",
        story="a draft's row sees seq - q + j keys: everything but itself",
        reference="vLLM #45227: seq - q + j + 1",
        bugs=("Z17", "Z58"),
        builder=_WithoutItself,
    ),
    Fault(
        name="mtp_clamped_first",
        area="mtp",
        story="topk is applied to the sequence before the causal offset, so early drafts lose keys beyond topk",
        reference="ATOM #2118: a window applied to local lengths",
        bugs=("Z58",),
        builder=_ClampedFirst,
    ),
    Fault(
        name="mtp_identical_rows",
        area="mtp",
        story="with a query length that is no power of two all rows of a request give the first one's output",
        reference="AITER #2720",
        bugs=("Z16",),
        patches=(Patch(where="dsv32_fast.attention", name="decode", make=after(_same_output)),),
    ),
    Fault(
        name="mtp_future_keys",
        area="mtp",
        story="the indexer lets a draft see the drafts behind it",
        reference="lablup #619; sglang #12583",
        bugs=("Z54",),
        patches=(Patch(where=_BATCH, name="_batch", make=returns(_sees_later_drafts)),),
    ),
    Fault(
        name="mtp_one_position",
        area="mtp",
        story="all drafts of a request are turned at the position of the first",
        reference="vllm-ascend #17170 (old positions in a batch)",
        bugs=("Z09",),
        patches=(Patch(where=_BATCH, name="_batch", make=returns(_one_position)),),
    ),
)
