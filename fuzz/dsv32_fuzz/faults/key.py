"""Faults of the metadata key: it forgets something that the plan depends on, so a stale plan is reused.

Three real designs give ready-made ones: a guard by shape only (FlashMLA), a key of aggregates (AITER's
`get_meta_param`), a key by identity (TensorRT-LLM).
Legend: B requests.
"""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from dsv32_fast.batch import StepBatch
from dsv32_fast.metadata import MetadataBuilder, SparseMlaMetadata, metadata_key
from dsv32_fuzz.faults.base import Fault


def _lens(step: StepBatch, topk: int) -> tuple[list[int], list[int], list[int]]:
    """min(seq, topk), min(context, topk) and query length of each request."""
    context = [s - q for s, q in zip(step.seq_lens, step.query_lens, strict=True)]
    return [min(s, topk) for s in step.seq_lens], [min(c, topk) for c in context], list(step.query_lens)


def _scalars(step: StepBatch, builder: MetadataBuilder) -> tuple[int, int, int]:
    return step.num_tokens, step.max_query_len, builder.num_heads


class _OfPr42982(MetadataBuilder):
    def _key(self, step: StepBatch) -> Hashable:
        return metadata_key(step, "pr42982", self.config.topk, self.num_heads)


class _Aggregate(MetadataBuilder):
    def _key(self, step: StepBatch) -> Hashable:
        return (*_scalars(step, self), *(sum(lens) for lens in _lens(step, self.config.topk)))


class _ShapeOnly(MetadataBuilder):
    def _key(self, step: StepBatch) -> Hashable:
        return step.num_tokens, self.num_heads


class _Identity(MetadataBuilder):
    def _key(self, step: StepBatch) -> Hashable:
        del step
        return id(self.paged_kv_indptr_N1)


class _NoContext(MetadataBuilder):
    def _key(self, step: StepBatch) -> Hashable:
        seq_B, _, query_B = _lens(step, self.config.topk)
        return (*_scalars(step, self), *seq_B, *query_B)


class _NoQueryLens(MetadataBuilder):
    def _key(self, step: StepBatch) -> Hashable:
        seq_B, context_B, _ = _lens(step, self.config.topk)
        return (*_scalars(step, self), *seq_B, *context_B)


class _NoOrder(MetadataBuilder):
    def _key(self, step: StepBatch) -> Hashable:
        return (*_scalars(step, self), *sorted(zip(*_lens(step, self.config.topk), strict=True)))


class _UpperBound(MetadataBuilder):
    def _key(self, step: StepBatch) -> Hashable:
        return (*_scalars(step, self), min(step.max_seq_len, self.config.topk), *step.query_lens)


class _NoRows(MetadataBuilder):
    def _key(self, step: StepBatch) -> Hashable:
        return tuple(zip(*_lens(step, self.config.topk), strict=True))


class _Pages(MetadataBuilder):
    def _key(self, step: StepBatch) -> Hashable:
        seq_B, context_B, query_B = _lens(step, self.config.topk)
        pages = [-(-length // 64) for length in (*seq_B, *context_B)]
        return (*_scalars(step, self), *pages, *query_B)


class _Truncated(MetadataBuilder):
    def _key(self, step: StepBatch) -> Hashable:
        bytes_B = [np.asarray(lens).astype(np.uint8).tobytes() for lens in _lens(step, self.config.topk)]
        return (*_scalars(step, self), *bytes_B)


class _KeptAfterDummy(MetadataBuilder):
    def build(self, step: StepBatch) -> SparseMlaMetadata:
        before = self.last_key
        metadata = super().build(step)
        # A capture passes the model's longest sequence as bound; that is how a runner's dummy step can be told.
        if step.max_seq_len > max(step.seq_lens, default=0):
            self.last_key = before
        return metadata


class _IdleReuses(MetadataBuilder):
    def _key(self, step: StepBatch) -> Hashable:
        return super()._key(step) if step.num_query_tokens or self.last_key is None else self.last_key


FAULTS: tuple[Fault, ...] = (
    Fault(
        name="key_of_pr42982",
        area="key",
        story="the key holds min(seq, topk) only: a ramp and a saturated chunk, or drafts crossing topk, are the same",
        reference="vLLM #42982, #47042, #47766",
        bugs=("Z01", "Z02", "Z03"),
        builder=_OfPr42982,
    ),
    Fault(
        name="key_aggregate",
        area="key",
        story="the key holds sums over the batch, so lengths that move between requests go unnoticed",
        reference="AITER #5193 (`get_meta_param` keyed on total_kv)",
        bugs=("Z03", "Z29"),
        builder=_Aggregate,
    ),
    Fault(
        name="key_shape_only",
        area="key",
        story="the plan is kept while the number of rows stays the same, whatever the lengths are",
        reference="FlashMLA's scheduler metadata; aprender #2030",
        bugs=("Z07",),
        builder=_ShapeOnly,
    ),
    Fault(
        name="key_identity",
        area="key",
        story="the key is the identity of a buffer that is written in place, so it never changes",
        reference="TensorRT-LLM #3322 (review)",
        bugs=("Z05",),
        builder=_Identity,
    ),
    Fault(
        name="key_no_context",
        area="key",
        story="the key lacks min(context, topk): drafts that cross topk leave it unchanged",
        reference="vLLM #47766",
        bugs=("Z02",),
        builder=_NoContext,
    ),
    Fault(
        name="key_no_query_lens",
        area="key",
        story="the key lacks the query lengths: two chunks that cross topk may exchange tokens unseen",
        reference="vLLM #47766",
        bugs=("Z03",),
        builder=_NoQueryLens,
    ),
    Fault(
        name="key_no_order",
        area="key",
        story="the key holds the requests' lengths as a multiset, so a reordered batch keeps its old plan",
        reference="vLLM #47766; row order is part of AITER's planner input",
        bugs=("Z03",),
        builder=_NoOrder,
    ),
    Fault(
        name="key_upper_bound",
        area="key",
        story="the key is taken from the optimistic bound of the lengths, the plan from the lengths themselves",
        reference="vLLM #54369, #29134; vllm-ascend #10506",
        bugs=("Z04",),
        builder=_UpperBound,
    ),
    Fault(
        name="key_no_rows",
        area="key",
        story="the key lacks the padded number of rows, so a step padded to another size keeps its plan",
        reference="vLLM #42982 (num_tokens is part of the key)",
        bugs=("Z32",),
        builder=_NoRows,
    ),
    Fault(
        name="key_pages",
        area="key",
        story="the key counts pages of 64, so a length that grows within a page keeps its plan",
        reference="rtp-llm #1254",
        bugs=("Z06",),
        builder=_Pages,
    ),
    Fault(
        name="key_truncated",
        area="key",
        story="the lengths enter the key as 8-bit numbers, so lengths 256 apart are the same",
        reference="vLLM #42982 (the key is made of the bytes of an int32 array)",
        builder=_Truncated,
    ),
    Fault(
        name="key_kept_after_dummy",
        area="key",
        story="a dummy build overwrites the plan but not the key, so the next step takes the dummy's plan for its own",
        reference="vllm-ascend #17170",
        bugs=("Z09",),
        builder=_KeptAfterDummy,
    ),
    Fault(
        name="key_idle_reuses",
        area="key",
        story="an idle step, padded to some rows, keeps the plan of the batch before it",
        reference="sglang #15227",
        bugs=("Z08",),
        builder=_IdleReuses,
    ),
)
