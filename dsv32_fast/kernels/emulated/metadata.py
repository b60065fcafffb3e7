"""`get_mla_metadata_v1` on the CPU: AITER's planner for persistent MLA decode, entry for entry.

Exact for planner v1_2 (`fast_mode=True`), including which entries of the buffers stay unwritten, on every recorded
plan of ROCm/aiter commit e404860. The other planners are refused by name, and so are arguments for which AITER's own
result is undefined. Unlike AITER, sizes are checked: a buffer that AITER would write past raises ValueError.

UNPINNED: rules that no recorded plan covers, implemented from the description alone. Trust a plan less that needs one:
folded heads with more than one query token or with max_split_per_batch > 0; is_causal together with
is_cp_round_robin; topk with page_size > 1 or uni_seqlen_qo > 1; the cancelled cut at a tail with several query tiles;
num_heads_k > 1; page sizes other than 1 and 64; fp8 with 32 heads and 3 query tokens; gfx942 with fp8 and 64 heads for
more than one query token, or with folded heads; max_seqlen_qo <= 0; a call without rows; an empty row that just fits;
the exact row count at which the parallel planner gives way to the serial one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from dsv32_fast.kernels.emulated.device import current_device
from dsv32_fast.kernels.emulated.launch import (
    MlaVersion,
    UndefinedInAiter,
    UnsupportedPlanner,
    env_flag,
    is_fp8,
    launch_rules,
)

if TYPE_CHECKING:
    from types import ModuleType

# Name, dtype and columns (0 for one dimension), in the order of `_check_tensors`'s call.
_TENSORS = (
    ("seqlens_qo_indptr", torch.int32, 0),
    ("seqlens_kv_indptr", torch.int32, 0),
    ("kv_last_page_lens", torch.int32, 0),
    ("work_metadata_ptrs", torch.uint64, 0),
    ("work_info_set", torch.int32, 8),
    ("work_indptr", torch.int32, 0),
    ("reduce_indptr", torch.int32, 0),
    ("reduce_final_map", torch.int32, 2),
    ("reduce_partial_map", torch.int32, 0),
)


def get_mla_metadata_v1(
    seqlens_qo_indptr: torch.Tensor,
    seqlens_kv_indptr: torch.Tensor,
    kv_last_page_lens: torch.Tensor,
    num_heads_per_head_k: int,
    num_heads_k: int,
    is_causal: bool,
    work_metadata_ptrs: torch.Tensor,
    work_info_set: torch.Tensor,
    work_indptr: torch.Tensor,
    reduce_indptr: torch.Tensor,
    reduce_final_map: torch.Tensor,
    reduce_partial_map: torch.Tensor,
    page_size: int = 1,
    kv_granularity: int = 16,
    max_seqlen_qo: int = -1,
    uni_seqlen_qo: int = -1,
    fast_mode: bool = True,
    topk: int = -1,
    max_split_per_batch: int = -1,
    intra_batch_mode: bool = False,
    is_cp_round_robin: bool = False,
    mla_version: Any = MlaVersion.V32,
    dtype_q_nope: torch.dtype | None = None,
    dtype_q_rope: torch.dtype | None = None,
    dtype_kv_nope: torch.dtype | None = None,
    dtype_kv_rope: torch.dtype | None = None,
    dtype_q: torch.dtype | None = None,
    dtype_kv: torch.dtype | None = None,
) -> None:
    """Plan a decode call into the six buffers, in place; argument order and defaults are AITER's at e404860.

    seqlens_qo_indptr, seqlens_kv_indptr: int32 [B + 1], the latter in pages from 0. kv_last_page_lens: int32 [B],
    tokens. The buffers: see `dsv32_fast.plan.PlanBuffers`, sized by `get_mla_metadata_info_v1`; note that work_info_set
    comes before work_indptr here. kv_granularity is in pages. A dtype of None is bf16; dtype_q and dtype_kv stand for
    the nope and the rope part. The device is `emulated.device.current_device()`; AITER_ENABLE_EXPERIMENTAL and
    AITER_MLA_META_USE_PARALLEL are read as AITER reads them.

    Raises:
        TypeError: an argument that should be a tensor is none.
        ValueError: a wrong dtype, shape, layout or scalar, an indptr that decreases, or a buffer too small for this
            plan (its contents are then unspecified; nothing is written past its end).
        UndefinedInAiter: a ValueError, for arguments that AITER accepts and plans wrongly; says what it would do.
        UnsupportedPlanner: fast_mode=False (v1_1, or v1_0 with intra_batch_mode), mla_version V40, or a rope dtype
            that differs from the nope dtype.
    """
    _check_tensors(
        seqlens_qo_indptr,
        seqlens_kv_indptr,
        kv_last_page_lens,
        work_metadata_ptrs,
        work_info_set,
        work_indptr,
        reduce_indptr,
        reduce_final_map,
        reduce_partial_map,
    )
    batches = seqlens_qo_indptr.numel() - 1
    if batches < 0 or seqlens_kv_indptr.numel() != batches + 1 or kv_last_page_lens.numel() < batches:
        raise ValueError(
            f"seqlens_qo_indptr, seqlens_kv_indptr and kv_last_page_lens have {batches + 1}, "
            f"{seqlens_kv_indptr.numel()} and {kv_last_page_lens.numel()} entries; B rows need B + 1, B + 1 and B"
        )
    heads = num_heads_per_head_k * num_heads_k
    if not fast_mode or mla_version != MlaVersion.V32:
        _refuse_planner(fast_mode, intra_batch_mode, mla_version, batches, heads, reduce_indptr.numel())
    q = _one_dtype("q", dtype_q, dtype_q_nope, dtype_q_rope)
    k = _one_dtype("kv", dtype_kv, dtype_kv_nope, dtype_kv_rope)
    rules = launch_rules(
        current_device(),
        batches,
        num_heads_per_head_k,
        num_heads_k,
        bool(is_causal),
        page_size,
        kv_granularity,
        max_seqlen_qo,
        uni_seqlen_qo,
        topk,
        max_split_per_batch,
        bool(is_cp_round_robin),
        is_fp8(q),
        is_fp8(k),
        env_flag("AITER_ENABLE_EXPERIMENTAL", 0),
        env_flag("AITER_MLA_META_USE_PARALLEL", 1),
    )
    if work_indptr.numel() <= rules.num_cu:
        raise ValueError(
            f"work_indptr has {work_indptr.numel()} entries; {rules.num_cu} compute units need {rules.num_cu + 1}"
        )
    sizes = (
        work_info_set.numel() // 8,
        reduce_indptr.numel(),
        reduce_final_map.numel() // 2,
        reduce_partial_map.numel(),
    )
    scheduler = _scheduler()
    status, where, works, tiles, split_end, partials = scheduler.schedule(
        batches,
        seqlens_qo_indptr.data_ptr(),
        seqlens_kv_indptr.data_ptr(),
        kv_last_page_lens.data_ptr(),
        work_metadata_ptrs.data_ptr(),
        work_info_set.data_ptr(),
        sizes[0],
        work_indptr.data_ptr(),
        reduce_indptr.data_ptr(),
        sizes[1],
        reduce_final_map.data_ptr(),
        sizes[2],
        reduce_partial_map.data_ptr(),
        sizes[3],
        rules.num_cu,
        rules.num_splits,
        rules.qk_batch_ratio,
        rules.is_sparse,
        rules.parallel,
        rules.uni_seqlen_qo,
        rules.topk,
        rules.tiles_per_row,
        rules.tile_size,
        rules.overhead,
        rules.tail_done_threshold,
        rules.trims_tail,
        page_size,
        kv_granularity.bit_length() - 1,
    )
    if status:
        _raise_status(scheduler, status, where)
    if works > sizes[0] or tiles >= sizes[1] or split_end > sizes[2] or partials > sizes[3]:
        _raise_overflow((works, tiles + 1, split_end, partials), sizes)


_scheduler_module: ModuleType | None = None


def _scheduler() -> ModuleType:
    """The compiled part, imported at the first plan: importing numba takes half a second."""
    global _scheduler_module  # noqa: PLW0603 - a name lookup per plan instead of an import statement's microsecond
    if _scheduler_module is None:
        from dsv32_fast.kernels.emulated import _scheduler as module

        _scheduler_module = module
    return _scheduler_module


def _check_tensors(*tensors: torch.Tensor) -> None:
    """AITER passes addresses on, so every tensor must be of the plain layout."""
    for tensor, (name, dtype, columns) in zip(tensors, _TENSORS, strict=True):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} is {type(tensor).__name__}; pass a torch tensor")
        if (
            tensor.dtype is not dtype
            or tensor.dim() != (2 if columns else 1)
            or not tensor.is_contiguous()
            or not tensor.is_cpu
            or (columns and tensor.shape[1] != columns)
        ):
            raise ValueError(
                f"{name} is {'' if tensor.is_contiguous() else 'non-contiguous '}{tensor.dtype} of shape "
                f"{tuple(tensor.shape)} on {tensor.device}; pass a contiguous CPU tensor of {dtype} and shape "
                f"{f'[n, {columns}]' if columns else '[n]'}"
            )
    if tensors[3].numel() != 2 or not tensors[6].numel():
        raise ValueError(
            f"work_metadata_ptrs and reduce_indptr have {tensors[3].numel()} and {tensors[6].numel()} elements; they "
            "need 2, and one more than there are query tiles"
        )


def _one_dtype(
    name: str, alias: torch.dtype | None, nope: torch.dtype | None, rope: torch.dtype | None
) -> torch.dtype | None:
    """The dtype of both parts of q or kv; AITER takes each as bf16 unless it, its alias or the nope part says more."""
    if alias is None and nope is None and rope is None:
        return None
    given = {dtype for dtype in (alias, nope, rope) if dtype is not None}
    for dtype in given:
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype_{name}* is {dtype!r}; pass a torch dtype or None")
    if len(given) > 1 or (alias is None and nope is None):
        raise UnsupportedPlanner(
            f"dtype_{name}_nope and dtype_{name}_rope differ; this emulation plans equal ones only"
        )
    return given.pop()


def _refuse_planner(
    fast_mode: bool, intra_batch_mode: bool, mla_version: Any, batches: int, heads: int, reduce_size: int
) -> None:
    version = getattr(mla_version, "name", mla_version)
    if version != "V32":
        raise UnsupportedPlanner(f"mla_version {version} is not emulated; pass V32")
    if fast_mode:
        return  # an enum of another make, with the right name
    if intra_batch_mode:
        raise UnsupportedPlanner("intra_batch_mode (planner v1_0) is not emulated; pass fast_mode=True")
    folds = heads % 16 == 0 and heads not in (16, 128)
    if folds and reduce_size < batches * heads // 16 + 1:
        raise UndefinedInAiter(
            f"fast_mode=False (planner v1_1) folds {heads} heads into {heads // 16} rows and writes "
            f"{batches * heads // 16 + 1} entries of reduce_indptr, which has {reduce_size}: AITER writes out of bounds"
        )
    raise UnsupportedPlanner("fast_mode=False (planner v1_1) is not emulated; pass fast_mode=True")


def _raise_status(scheduler: ModuleType, status: int, where: int) -> None:
    if status == scheduler.KV_START:
        raise ValueError("seqlens_kv_indptr does not start at 0; AITER's planner counts positions from 0")
    if status == scheduler.KV_ORDER:
        raise ValueError(f"seqlens_kv_indptr decreases at index {where}; pass a cumulative sum")
    if status == scheduler.QO_ORDER:
        raise ValueError(f"seqlens_qo_indptr is negative or decreases at index {where}; pass a cumulative sum")
    if status == scheduler.QO_OUT_OF_RANGE:
        raise UndefinedInAiter("uni_seqlen_qo <= 0 with several rows per request: AITER reads qo_indptr out of bounds")
    if status == scheduler.OUT_OF_UNITS:
        raise RuntimeError(f"the planner went on to compute unit {where}, which the device does not have; report this")
    if status == scheduler.TOO_FAR:
        raise UndefinedInAiter("query tokens x topk exceed int32: AITER's kv_start overflows")
    raise UndefinedInAiter("the blocks of all rows exceed int32: AITER's payload overflows")


def _raise_overflow(needed: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    names = ("work_info_set", "reduce_indptr", "reduce_final_map", "reduce_partial_map")
    for name, need, size in zip(names, needed, sizes, strict=True):
        if need > size:
            raise ValueError(
                f"{name} has {size} rows and this plan needs {need}; AITER would write out of bounds: "
                "size the buffers with get_mla_metadata_info_v1"
            )
