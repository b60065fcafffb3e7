"""What AITER's planner decides on the host, from its scalar arguments, the device and the environment.

Facts are those of ROCm/aiter commit e404860 (csrc/kernels/mla/metadata.cu and its launchers). The names of the rules
are AITER's template and kernel parameters. Configurations whose result AITER leaves undefined are refused here by
name, so that nobody trusts numbers that the hardware would not give.
"""

from __future__ import annotations

import enum
import os
import re
from functools import lru_cache
from typing import NamedTuple

import torch

from dsv32_fast.kernels.emulated.device import DeviceProperties

_FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
_FOLDED_HEADS = 16  # kernels without a native head count see heads / 16 rows of 16 heads
_FIXED_OVERHEAD_TOKENS = 16
INT32_MAX = 2**31 - 1


class UnsupportedPlanner(NotImplementedError):  # noqa: N818 - says what the arguments are
    """A planner that AITER has and this emulation has not: the result would be defined, but is not known here."""


class UndefinedInAiter(ValueError):  # noqa: N818
    """Arguments for which AITER reads or writes out of bounds, or plans from uninitialised memory."""


class MlaVersion(enum.IntEnum):
    """Kernel generations of `mla_version`; V32 is DeepSeek-V3.2's."""

    V32 = 0
    V40 = 1


class LaunchRules(NamedTuple):
    """The scalars that the device code is launched with; counts are per call, blocks are of kv_granularity pages."""

    num_cu: int
    num_splits: int
    qk_batch_ratio: int
    """Rows that one batch entry becomes when its heads are folded to 16; 1 where the head count is native."""
    num_heads: int
    """Query heads of one row, after folding."""
    packed_qo_len_per_wg: int
    qo_splits: bool
    is_sparse: bool
    parallel: bool
    uni_seqlen_qo: int
    """Query length of every row, or 0 where the planner reads qo_indptr."""
    topk: int
    """In pages; -1 for the dense planner."""
    tiles_per_row: int
    tile_size: int
    """Query tokens per tile, or 0 where a row's only tile is as long as its query."""
    overhead: int
    """Blocks that a compute unit is charged for each work, whatever its length."""
    tail_done_threshold: int
    trims_tail: bool
    """Whether a tile ends before the row's KV does, by the query tiles that follow it."""


def is_fp8(dtype: torch.dtype | None) -> bool:
    """Whether AITER takes `dtype` for its fp8; None means bf16."""
    return dtype in _FP8


def env_flag(name: str, default: int) -> bool:
    """An AITER switch as its C++ side reads it: the leading integer of the variable's text, on unless it is 0."""
    text = os.environ.get(name)
    if text is None:
        return bool(default)
    digits = re.match(r"\s*[+-]?\d+", text)
    return bool(int(digits.group())) if digits else False


def native_heads(arch: str, heads: int, max_seqlen_qo: int, *, q_fp8: bool, kv_fp8: bool) -> bool:
    """Whether AITER has a decode kernel for this head count, so that heads are not folded."""
    if heads == _FOLDED_HEADS:
        return True
    both_fp8 = q_fp8 and kv_fp8
    if arch == "gfx950":
        return not (q_fp8 or kv_fp8) or (both_fp8 and heads in (32, 64, 128))
    return both_fp8 and (heads == 128 or (heads == 64 and max_seqlen_qo == 1))


def packed_qo_len(arch: str, heads: int, max_seqlen_qo: int, *, q_fp8: bool, kv_fp8: bool) -> int:
    """Query rows (tokens x heads) that one workgroup takes."""
    if arch != "gfx950":
        return 128
    packed = heads * max_seqlen_qo
    bf16_64 = not (q_fp8 or kv_fp8) and heads <= 64 and packed >= 64 and (packed < 128 or heads == 48)
    fp8_64 = q_fp8 and kv_fp8 and heads == 32 and max_seqlen_qo == 3
    return 64 if bf16_64 or fp8_64 else 128


def workgroups_per_cu(arch: str, heads: int, max_seqlen_qo: int, *, both_fp8: bool, experimental: bool) -> int:
    """2 for the one experimental kernel that runs twice on a compute unit, else 1."""
    return 2 if experimental and arch == "gfx950" and both_fp8 and heads * max_seqlen_qo == 64 else 1


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _power_of_two(name: str, value: int) -> None:
    if value < 1 or value & (value - 1):
        raise ValueError(f"{name} is {value}; AITER requires a power of two")


def _fits_lds(rows: int, lds_bytes: int, *, varlen: bool) -> bool:
    """The parallel planner keeps five words per row, and a sixth for a query length that it must look up."""
    return 4 * (3 + (6 if varlen else 5) * rows) <= lds_bytes


@lru_cache(maxsize=4096)
def launch_rules(
    device: DeviceProperties,
    batches: int,
    num_heads_per_head_k: int,
    num_heads_k: int,
    is_causal: bool,
    page_size: int,
    kv_granularity: int,
    max_seqlen_qo: int,
    uni_seqlen_qo: int,
    topk: int,
    max_split_per_batch: int,
    is_cp_round_robin: bool,
    q_fp8: bool,
    kv_fp8: bool,
    experimental: bool,
    parallel_enabled: bool,
) -> LaunchRules:
    """The launcher of v1_2 (fast_mode=True).

    Raises:
        ValueError: a scalar that AITER's own checks reject, or one that no launch can have.
        UndefinedInAiter: arguments that AITER accepts and plans wrongly; the message says what it would do.
    """
    _power_of_two("page_size", page_size)
    _power_of_two("kv_granularity", kv_granularity)
    if num_heads_per_head_k < 1 or num_heads_k < 1:
        raise ValueError(f"head counts are {num_heads_per_head_k} and {num_heads_k}; both must be positive")
    arch, heads = device.arch, num_heads_k * num_heads_per_head_k
    occupancy = workgroups_per_cu(arch, heads, max_seqlen_qo, both_fp8=q_fp8 and kv_fp8, experimental=experimental)
    num_cu = device.compute_units * occupancy // num_heads_k
    if num_cu < 1:
        raise ValueError(f"num_heads_k is {num_heads_k}, more than the device's {device.compute_units} compute units")
    packed = packed_qo_len(arch, heads, max_seqlen_qo, q_fp8=q_fp8, kv_fp8=kv_fp8)
    native = native_heads(arch, heads, max_seqlen_qo, q_fp8=q_fp8, kv_fp8=kv_fp8)
    ratio = 1 if native or heads % _FOLDED_HEADS else heads // _FOLDED_HEADS
    heads //= ratio
    qo_splits = not 0 < max_seqlen_qo * num_heads_per_head_k <= packed
    is_sparse = topk >= 0
    num_splits = num_cu if max_split_per_batch < 0 else min(num_cu, max_split_per_batch * batches * ratio)
    uni = max(uni_seqlen_qo, 0)
    _refuse_undefined(batches, num_splits, uni, ratio, page_size, qo_splits=qo_splits, is_sparse=is_sparse)
    tiles = 1
    if qo_splits:
        tiles = uni if 2 * heads > packed else _ceil_div(uni * heads, packed)
    one_token_rows = max_seqlen_qo == 1 and not qo_splits and not is_sparse and page_size == 1 and ratio == 1
    return LaunchRules(
        num_cu=num_cu,
        num_splits=num_splits,
        qk_batch_ratio=ratio,
        num_heads=heads,
        packed_qo_len_per_wg=packed,
        qo_splits=qo_splits,
        is_sparse=is_sparse,
        parallel=parallel_enabled and one_token_rows and _fits_lds(batches, device.lds_bytes, varlen=uni == 0),
        uni_seqlen_qo=uni,
        topk=_ceil_div(topk, page_size) if is_sparse else -1,
        tiles_per_row=tiles,
        tile_size=_ceil_div(uni, tiles),
        overhead=max(1, _ceil_div(_FIXED_OVERHEAD_TOKENS, page_size)),
        tail_done_threshold=max_seqlen_qo,
        trims_tail=is_causal and not is_cp_round_robin and page_size == 1,
    )


def _refuse_undefined(
    batches: int, num_splits: int, uni: int, ratio: int, page_size: int, *, qo_splits: bool, is_sparse: bool
) -> None:
    if num_splits == 0:
        raise UndefinedInAiter("the split budget (max_split_per_batch x rows) is 0: AITER divides by it")
    if is_sparse and batches == 0:
        raise UndefinedInAiter("topk with no batch entry: AITER reads qo_indptr[1] out of bounds")
    if uni == 0 and qo_splits:
        raise UndefinedInAiter(
            "uni_seqlen_qo <= 0 where queries are tiled (max_seqlen_qo x heads above one workgroup): AITER sums query "
            "lengths from LDS before it fills them, so the payload is garbage; pass one query length as uni_seqlen_qo"
        )
    if uni == 0 and ratio > 1:
        raise UndefinedInAiter("uni_seqlen_qo <= 0 with folded heads: AITER reads qo_indptr out of bounds")
    if page_size > 1 and ratio > 1 and not is_sparse:
        raise UndefinedInAiter(
            "page_size > 1 with folded heads: AITER indexes kv_last_page_lens by folded row, out of bounds"
        )
