"""Faults of the persistent buffers: what earlier steps left behind, what no step ever wrote, views of a wrong size."""

from __future__ import annotations

from dataclasses import replace

import torch

from dsv32_fast.batch import StepBatch
from dsv32_fast.metadata import MetadataBuilder, SparseMlaMetadata
from dsv32_fuzz.faults.base import Fault

GARBAGE = 1 << 30
"""What `torch.empty` may hold; as a request id it leads far outside every block table."""


class _Empty(MetadataBuilder):
    def __post_init__(self) -> None:
        super().__post_init__()
        self.req_id_per_token_N.fill_(GARBAGE)


class _EmptyIndices(MetadataBuilder):
    def __post_init__(self) -> None:
        super().__post_init__()
        self.paged_kv_indices_NK.fill_(GARBAGE)


class _NoClear(MetadataBuilder):
    def _clear(self, step: StepBatch) -> None:
        del step


class _NoIndexClear(MetadataBuilder):
    def _clear(self, step: StepBatch) -> None:
        self._extents.indices = 0
        super()._clear(step)


class _OneStepLate(MetadataBuilder):
    def _clear(self, step: StepBatch) -> None:
        older = getattr(self, "_older", self._extents)
        previous, self._extents = self._extents, older
        super()._clear(step)
        self._older = previous


class _PaddedExtent(MetadataBuilder):
    def _clear(self, step: StepBatch) -> None:
        extent = self._extents.req_ids
        self._extents.req_ids = 0  # the ids' tail is cleared from the padded row count on, and so not in the padding
        super()._clear(step)
        self.req_id_per_token_N[step.num_tokens : extent].zero_()


class _IndptrTailZero(MetadataBuilder):
    def build(self, step: StepBatch) -> SparseMlaMetadata:
        metadata = super().build(step)
        self.paged_kv_indptr_N1[step.num_tokens + 1 :] = 0
        return metadata


class _IndptrTailStale(MetadataBuilder):
    def build(self, step: StepBatch) -> SparseMlaMetadata:
        old_N1 = self.paged_kv_indptr_N1.clone()
        metadata = super().build(step)
        self.paged_kv_indptr_N1[step.num_tokens + 1 :] = old_N1[step.num_tokens + 1 :]
        return metadata


class _ShortView(MetadataBuilder):
    def build(self, step: StepBatch) -> SparseMlaMetadata:
        metadata = super().build(step)
        return replace(metadata, req_id_per_token_T=metadata.req_id_per_token_T[: step.num_query_tokens])


class _DummyExtent(MetadataBuilder):
    def _clear(self, step: StepBatch) -> None:
        before = replace(self._extents)
        super()._clear(step)
        if step.max_seq_len > max(step.seq_lens, default=0):
            self._extents = before


class _IdsOneShort(MetadataBuilder):
    def _rows(self, step: StepBatch) -> tuple[torch.Tensor, torch.Tensor]:
        req_ids, lens_T = super()._rows(step)
        return req_ids[:-1], lens_T


def _buffers(
    name: str, story: str, reference: str, builder: type[MetadataBuilder], bugs: tuple[str, ...] = ()
) -> Fault:
    return Fault(name=name, area="buffers", story=story, reference=reference, bugs=bugs, builder=builder)


FAULTS: tuple[Fault, ...] = (
    _buffers(
        "buffer_empty_ids",
        "the request ids are allocated uninitialised; a graph of 64 rows reads garbage behind 32 live ones",
        "vLLM #42982 (review of 2026-05-18)",
        _Empty,
        ("Z20",),
    ),
    _buffers(
        "buffer_empty_indices",
        "the index buffer is allocated uninitialised; nothing ever writes it beyond the first steps' extent",
        "AITER #4129, reverted by #4186",
        _EmptyIndices,
        ("Z11", "Z20"),
    ),
    _buffers("buffer_no_clear", "a shrinking step clears nothing", "vLLM #44527, #50008", _NoClear, ("Z20", "Z23")),
    _buffers(
        "buffer_no_index_clear",
        "a shrinking step clears the request ids but not the indices",
        "vLLM #44527, #51323 (review)",
        _NoIndexClear,
        ("Z23",),
    ),
    _buffers(
        "buffer_clear_late",
        "the tail is cleared up to the extent of the step before the last one",
        "vLLM #42982: the extent must be that of the last write",
        _OneStepLate,
        ("Z20",),
    ),
    _buffers(
        "buffer_padded_extent",
        "the request ids are cleared from the padded row count on, so padding rows keep old ids",
        "vLLM #42982: two extents, query tokens and padded rows",
        _PaddedExtent,
        ("Z20",),
    ),
    _buffers(
        "buffer_indptr_tail_zero",
        "row pointers behind the step are 0 instead of the last value: the next row has a negative length",
        "sglang #37975; vLLM #35969",
        _IndptrTailZero,
        ("Z34",),
    ),
    _buffers(
        "buffer_indptr_tail_stale",
        "row pointers behind the step keep those of a longer one",
        "xllm #1939; vllm-ascend #12071",
        _IndptrTailStale,
        ("Z32",),
    ),
    _buffers(
        "buffer_short_view",
        "a view has the live rows where the kernel takes the padded ones",
        "vLLM #42810 (review), #42072",
        _ShortView,
        ("Z24",),
    ),
    _buffers(
        "buffer_dummy_extent",
        "a dummy build writes the buffers but not their extent, so its rows are never cleared",
        "vllm-ascend #17170",
        _DummyExtent,
        ("Z09", "Z20"),
    ),
    _buffers(
        "buffer_ids_one_short",
        "the last query token's request id is not copied",
        "AITER #3235 (509 of 512 entries)",
        _IdsOneShort,
        ("Z27",),
    ),
)
