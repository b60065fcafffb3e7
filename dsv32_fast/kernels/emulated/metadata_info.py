"""Buffer sizes of a plan, as AITER's pure-Python `get_mla_metadata_info_v1` computes them (commit e404860).

Exact on the sizes of all recorded plans. Rules that no recorded plan pins, implemented from the text alone: gfx942
with folded heads, the experimental kernel with `is_sparse`, and `max_split_per_batch`.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from dsv32_fast.kernels.emulated.device import current_device
from dsv32_fast.kernels.emulated.launch import is_fp8, native_heads, packed_qo_len, workgroups_per_cu

BufferInfo = tuple[Any, torch.dtype]


def get_mla_metadata_info_v1(
    batch_size: int,
    max_seqlen_qo: int,
    num_head_qo: int,
    q_dtype: torch.dtype | None,
    kv_dtype: torch.dtype | None,
    is_sparse: bool,
    fast_mode: bool = True,
    num_kv_splits: int = 32,
    intra_batch_mode: bool = False,
    max_split_per_batch: int = -1,
) -> tuple[BufferInfo, ...]:
    """(shape, dtype) of work_metadata_ptrs, work_indptr, work_info_set, reduce_indptr, reduce_final_map and
    reduce_partial_map, in this order; `get_mla_metadata_v1` takes work_info_set before work_indptr.

    Sizes depend on the emulated device and on AITER_ENABLE_EXPERIMENTAL. With `is_sparse` every query token is a row.

    Raises:
        ValueError: heads not a multiple of 8, or a count that is not positive (batch_size may be 0).
    """
    if num_head_qo < 8 or num_head_qo % 8:
        raise ValueError(f"num_head_qo is {num_head_qo}; AITER requires a multiple of 8: pad the heads")
    if batch_size < 0 or max_seqlen_qo < 1 or num_kv_splits < 1:
        raise ValueError(
            f"batch_size {batch_size}, max_seqlen_qo {max_seqlen_qo}, num_kv_splits {num_kv_splits}: "
            "the first must not be negative, the others must be positive"
        )
    rows = batch_size * max_seqlen_qo if is_sparse else batch_size
    seqlen_qo = 1 if is_sparse else max_seqlen_qo
    per_row = _tiles_per_row(seqlen_qo, num_head_qo, q_fp8=is_fp8(q_dtype), kv_fp8=is_fp8(kv_dtype))
    units = _workgroups(num_head_qo, max_seqlen_qo, both_fp8=is_fp8(q_dtype) and is_fp8(kv_dtype))
    tiles = rows * per_row
    if intra_batch_mode:
        works = partials = tiles * num_kv_splits
    elif fast_mode:
        works, partials = (rows + units - 1) * per_row, min(rows + units - 1, 2 * (units - 1)) * per_row
    else:
        works = partials = tiles * units
    if max_split_per_batch > 0:
        partials = max(partials, tiles + min(units, max_split_per_batch * rows))
    int32 = torch.int32
    return (
        (2, torch.uint64),
        (units + 1, int32),
        ((works, 8), int32),
        (tiles + 1, int32),
        ((tiles, 2), int32),
        (partials, int32),
    )


def _workgroups(heads: int, seqlen_qo: int, *, both_fp8: bool) -> int:
    # The Python side compares the text with "1"; the launcher in C++ takes every integer but 0 (`env_flag`).
    experimental = os.environ.get("AITER_ENABLE_EXPERIMENTAL") == "1"
    device = current_device()
    return device.compute_units * workgroups_per_cu(
        device.arch, heads, seqlen_qo, both_fp8=both_fp8, experimental=experimental
    )


def _tiles_per_row(seqlen_qo: int, heads: int, *, q_fp8: bool, kv_fp8: bool) -> int:
    """Query tiles that a row can become at most."""
    arch, packed, both_fp8 = current_device().arch, seqlen_qo * heads, q_fp8 and kv_fp8
    if arch != "gfx950":
        native = native_heads(arch, heads, seqlen_qo, q_fp8=q_fp8, kv_fp8=kv_fp8)
        return -(-packed // (128 if native else 16))
    if packed_qo_len(arch, heads, seqlen_qo, q_fp8=q_fp8, kv_fp8=kv_fp8) == 64:
        return seqlen_qo if 2 * heads > 64 else -(-packed // 64)
    if heads == 16 or (both_fp8 and ((heads == 32 and seqlen_qo == 4) or heads in (64, 128))):
        return -(-packed // 128)
    if not (q_fp8 or kv_fp8) and (packed >= 128 or heads > 64):
        return seqlen_qo if 2 * heads > 128 else -(-packed // 128)
    return -(-packed // 16)
