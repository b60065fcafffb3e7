"""The plan: the six buffers that `get_mla_metadata_v1` fills and the decode kernels read.

A plan is larger than what it says: AITER leaves the entries that no consumer reads as they were. Two plans are the same
for a consumer when their `consumer_bytes` are equal, whatever lies in the rest.

Legend: W work slots, C compute units, T query tiles, R partial slots.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

IntArray = npt.NDArray[np.int32]
BufferSpec = tuple[Any, torch.dtype]
SixTensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class PlanBuffers(NamedTuple):
    """The six buffers, by AITER's names, in the order of `get_mla_metadata_info_v1`.

    `get_mla_metadata_v1` takes them in another order: `call_order` has it.
    """

    work_metadata_ptrs: torch.Tensor
    """uint64 [2]: addresses of work_indptr and work_info_set; differs from process to process, never compare it."""
    work_indptr: torch.Tensor
    """int32 [C + 1]: compute unit c does the works work_indptr[c] to work_indptr[c + 1]."""
    work_info_set: torch.Tensor
    """int32 [W, 8]: batch_idx, partial_qo_loc, qo_start, qo_end, kv_start, kv_end, kv_offset, 0."""
    reduce_indptr: torch.Tensor
    """int32 [T + 1]: tile t merges the partials reduce_indptr[t] to reduce_indptr[t + 1]."""
    reduce_final_map: torch.Tensor
    """int32 [T, 2]: rows [qo_start, qo_end) of the output that a split tile writes."""
    reduce_partial_map: torch.Tensor
    """int32 [R]: row of the partial buffer that each partial starts at."""

    def call_order(self) -> SixTensors:
        """The buffers in the order of `get_mla_metadata_v1`'s arguments: work_info_set comes before work_indptr."""
        pointers, indptr, works, reduces, final, partial = self
        return pointers, works, indptr, reduces, final, partial


class ConsumerView(NamedTuple):
    """What a consumer reads of a plan, as views or copies in int32."""

    work_indptr: IntArray
    work_info_set: IntArray
    """The works that some compute unit does: rows up to work_indptr[-1]."""
    reduce_indptr: IntArray
    reduce_final_map: IntArray
    """Rows of the split tiles only, in tile order."""
    reduce_partial_map: IntArray
    """Entries up to reduce_indptr[-1]."""


def allocate(info: tuple[BufferSpec, ...], fill: int | None = None, device: str = "cpu") -> PlanBuffers:
    """Buffers of the shapes and dtypes in `info`, the result of `get_mla_metadata_info_v1`.

    `fill` poisons every element (a negative one wraps in the unsigned buffer); without it memory stays uninitialised,
    as vLLM leaves it.

    Raises:
        ValueError: `info` does not describe six buffers.
    """
    if len(info) != len(PlanBuffers._fields):
        raise ValueError(f"info describes {len(info)} buffers; pass the six of get_mla_metadata_info_v1")
    buffers = PlanBuffers(*(torch.empty(shape, dtype=dtype, device=device) for shape, dtype in info))
    if fill is not None:
        for buffer in buffers:
            (buffer.view(torch.int64) if buffer.dtype == torch.uint64 else buffer).fill_(fill)
    return buffers


def consumer_view(plan: PlanBuffers) -> ConsumerView:
    """Exactly the entries of `plan` that stage 1 and the reduction read; copies a plan on a GPU to the host.

    Counts that point outside a buffer (a plan that nobody wrote) are clamped to it.
    """
    work_indptr, works, reduce_indptr, final_map, partials = (b.cpu().numpy() for b in plan[1:])
    split = np.flatnonzero(reduce_indptr[1:] > reduce_indptr[:-1])
    return ConsumerView(
        work_indptr=work_indptr,
        work_info_set=works[: _end(work_indptr)],
        reduce_indptr=reduce_indptr,
        reduce_final_map=final_map[split[split < len(final_map)]],
        reduce_partial_map=partials[: _end(reduce_indptr)],
    )


def consumer_bytes(plan: PlanBuffers) -> bytes:
    """`consumer_view(plan)` as one string: two plans in buffers of the same sizes are equal iff these are."""
    return b"".join([array.tobytes() for array in consumer_view(plan)])


def _end(indptr: IntArray) -> int:
    return max(0, int(indptr[-1])) if len(indptr) else 0
