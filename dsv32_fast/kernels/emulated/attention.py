"""`mla_decode_fwd` behind AITER's signature (ROCm/aiter e404860): persistent (planned) and split-KV MLA decode.

The persistent kernel reads its work from the plan buffers alone and never re-reads `kv_indptr`, so a stale plan gives
here exactly the wrong answer that it gives on a GPU: a row attends the window of `kv_indices` that the old plan names,
and a row without work is not written. Empty works are skipped without a write, as the readable (opus) kernel does; the
assembly kernels are opaque there. Uninitialised scratch is NaN.

Legend: R query rows, H heads, D latent + RoPE dim, C latent dim, B batch rows.
"""

from __future__ import annotations

import math
import os
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsv32_fast.kernels.emulated.device import current_device
from dsv32_fast.kernels.emulated.memory import IntArray, beyond_view, host, poison, ranges, require_inside
from dsv32_fast.kernels.emulated.pieces import Operands, Pieces, attend
from dsv32_fast.kernels.emulated.reduce import mla_reduce_v1
from dsv32_fast.kernels.emulated.splitkv import get_meta_param, split_kv_decode, writes_output_directly

_FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
GATE_VARIABLE = "AITER_MLA_DECODE_PERSISTENT_MAX_BATCH"
GATE_DEFAULT = 32


class _Plan(NamedTuple):
    works: IntArray
    """Rows of `work_info_set` in the order of execution."""
    reduce_indptr: Tensor
    reduce_final_map: Tensor
    reduce_partial_map: Tensor


def mla_decode_fwd(
    q: Tensor,
    kv_buffer: Tensor,
    o: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_lens: Tensor,
    max_seqlen_q: int,
    page_size: int = 1,
    nhead_kv: int = 1,
    sm_scale: float | None = None,
    logit_cap: float = 0.0,
    num_kv_splits: int | None = None,
    num_kv_splits_indptr: Tensor | None = None,
    work_meta_data: Tensor | None = None,
    work_indptr: Tensor | None = None,
    work_info_set: Tensor | None = None,
    reduce_indptr: Tensor | None = None,
    reduce_final_map: Tensor | None = None,
    reduce_partial_map: Tensor | None = None,
    q_scale: Tensor | None = None,
    kv_scale: Tensor | None = None,
    intra_batch_mode: bool = False,
    return_logits: bool = False,
    return_lse: bool = False,
    g_kv_indptr: Tensor | None = None,
    cp_world_size: int = 1,
    cp_rank: int = 0,
    causal: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Absorbed MLA decode of `q` over the KV that the plan (or `kv_indptr`) names; writes `o` in place.

    Args:
        q: bf16 or fp8 [R, H, D], contiguous.
        kv_buffer: bf16 or fp8 [pages, page_size, 1, D]; V is its first C dims. fp8 bytes are read in the device's
            flavour whatever the tensor's dtype says, as a kernel does.
        o: bf16 [R, H, C], contiguous.
        qo_indptr, kv_indptr: int32 [B + 1]; the persistent kernel reads the first only to place the causal mask of
            more than one query row, and never the second.
        kv_indices: int32, pages.
        kv_last_page_lens: int32 [B]; read when page_size > 1.
        max_seqlen_q: 1 unless a batch row has several query rows.
        sm_scale: default 1 / sqrt(D), which is not DeepSeek's.
        work_meta_data: not None asks for the persistent kernel, which `uses_persistent_kernel` may overrule.
        work_indptr, work_info_set, reduce_indptr, reduce_final_map, reduce_partial_map: the plan.
        q_scale, kv_scale: fp32 [1]; both required with an fp8 q.
        return_logits: undo the folding of heads in the returned partials.
        return_lse: also return the LSE.

    Returns:
        The fp32 partials and the natural-log LSE. Persistent: [partial rows, 1, H, C], NaN where never written, with
        folded heads unless `return_logits`; and [R, H], NaN for rows without work. Split-KV: [R, splits, H, C], or `o`
        where stage 1 writes the result directly; and [R, H]. The LSE is None without `return_lse`, except that a
        direct result then comes with the LSE of its one split, [R, 1, H, 1].

    Raises:
        TypeError: a dtype that no kernel takes.
        ValueError: an argument that no kernel takes or that is not emulated; the message names it.
        OutOfBoundsError: the plan leads outside an allocation.
    """
    refused = {
        "logit_cap": logit_cap > 0,
        "num_kv_splits_indptr": num_kv_splits_indptr is not None,
        "intra_batch_mode": intra_batch_mode,
        "g_kv_indptr": g_kv_indptr is not None,
        "cp_world_size": cp_world_size != 1 or cp_rank != 0,
        "nhead_kv": nhead_kv != 1,
    }
    _refuse([name for name, present in refused.items() if present])
    _check_operands(q, kv_buffer, o, page_size, q_scale, kv_scale)
    operands = _operands(q, kv_buffer, o, kv_indices, sm_scale, q_scale, kv_scale)
    batch = qo_indptr.shape[0] - 1
    persistent = work_meta_data is not None and uses_persistent_kernel(
        q.dtype, kv_buffer.dtype, q.shape[1], max_seqlen_q, batch, num_kv_splits
    )
    if not persistent:
        splits, _ = get_meta_param(num_kv_splits, batch, kv_indices.shape[0], q.shape[1], max_seqlen_q, q.dtype)
        masked = causal and max_seqlen_q > 1
        logits, lse = split_kv_decode(operands, o, qo_indptr, kv_indptr, kv_last_page_lens, splits, masked)
        if writes_output_directly(splits, q.shape[1], max_seqlen_q, q.dtype, kv_buffer.dtype):
            return o, lse if return_lse else lse[:, None, :, None]
        return logits, lse if return_lse else None
    plan = _plan(work_indptr, work_info_set, reduce_indptr, reduce_final_map, reduce_partial_map)
    fold = head_fold(q.dtype, kv_buffer.dtype, q.shape[1], max_seqlen_q)
    if fold > 1 and (page_size > 1 or max_seqlen_q > 1):
        raise ValueError(f"{q.shape[1]} heads are folded by {fold}; that is emulated for page_size=max_seqlen_q=1 only")
    pieces = _pieces(plan, page_size, qo_indptr, kv_last_page_lens, causal and max_seqlen_q > 1)
    logits, final_lse = _run_plan(operands, pieces, plan, o, fold, max_seqlen_q, return_lse)
    return (logits.view(-1, 1, *o.shape[1:]) if return_logits else logits), final_lse


def uses_persistent_kernel(
    q_dtype: torch.dtype, kv_dtype: torch.dtype, heads: int, max_seqlen_q: int, batch: int, num_kv_splits: int | None
) -> bool:
    """False where AITER (v0.1.18 and later) silently ignores the plan and runs the split-KV kernel.

    That is on gfx950 with bf16, 16 heads, one query row and a batch of at least AITER_MLA_DECODE_PERSISTENT_MAX_BATCH
    (32 if unset or no number; 0 or less never), unless the caller fixes `num_kv_splits`. AITER reads the variable once
    per process, the emulation at every call.
    """
    limit = _gate_limit()
    gated_shape = current_device().arch == "gfx950" and heads == 16 and max_seqlen_q == 1
    both_bf16 = q_dtype == kv_dtype == torch.bfloat16
    return not (num_kv_splits is None and gated_shape and both_bf16 and 0 < limit <= batch)


def _gate_limit() -> int:
    try:
        return int(os.environ.get(GATE_VARIABLE, GATE_DEFAULT))
    except ValueError:
        return GATE_DEFAULT


def head_fold(q_dtype: torch.dtype, kv_dtype: torch.dtype, heads: int, max_seqlen_q: int) -> int:
    """How many pseudo rows of 16 heads a query row becomes in the persistent kernel; 1 where a kernel is native.

    AITER has no kernel for fewer than 8 heads; the emulation takes them unfolded, for small tests.

    Raises:
        ValueError: more than 16 heads for which there is neither a kernel nor a folding.
    """
    arch, fp8 = current_device().arch, (q_dtype in _FP8, kv_dtype in _FP8)
    if heads <= 16:
        return 1
    if arch == "gfx950":
        native = not any(fp8) or (all(fp8) and heads in (32, 64, 128))
    else:
        native = all(fp8) and (heads == 128 or (heads == 64 and max_seqlen_q == 1))
    if not native and heads not in range(32, 129, 16):
        raise ValueError(
            f"q has {heads} heads, for which AITER has no persistent kernel; pad to a multiple of 16 up to 128"
        )
    return 1 if native else heads // 16


def _run_plan(
    operands: Operands, pieces: Pieces, plan: _Plan, o: Tensor, fold: int, max_seqlen_q: int, return_lse: bool
) -> tuple[Tensor, Tensor | None]:
    rows, heads, device = o.shape[0] * fold, o.shape[1] // fold, o.device
    operands = replace(operands, q=operands.q.view(rows, heads, operands.q.shape[-1]))
    o_RHC = o.view(rows, heads, operands.latent)
    lse_RH = poison((rows, heads), device) if return_lse else None
    partial_rows = plan.reduce_partial_map.shape[0] * max_seqlen_q
    partial_PHC, partial_lse_PH = (
        poison((partial_rows, *o_RHC.shape[1:]), device),
        poison((partial_rows, heads), device),
    )
    for batch, output_WJHC, lse_WJH in attend(pieces, operands):
        place, first = plan.works[batch, 1], plan.works[batch, 2]
        split = place >= 0
        _scatter("o", o_RHC, first, output_WJHC, ~split)
        if lse_RH is not None:
            _scatter("final_lse", lse_RH, first, lse_WJH, ~split)
        _scatter("partial_output", partial_PHC, place, output_WJHC, split)
        _scatter("partial_lse", partial_lse_PH, place, lse_WJH, split)
    maps = plan.reduce_indptr, plan.reduce_final_map, plan.reduce_partial_map
    mla_reduce_v1(partial_PHC, partial_lse_PH, *maps, max_seqlen_q, 0, o_RHC, lse_RH)
    return partial_PHC[:, None], None if lse_RH is None else lse_RH.view(o.shape[:2])


def _plan(
    work_indptr: Tensor | None,
    work_info_set: Tensor | None,
    reduce_indptr: Tensor | None,
    reduce_final_map: Tensor | None,
    reduce_partial_map: Tensor | None,
) -> _Plan:
    """The works that the workgroups run, in their order, and the maps of the reduction."""
    if (
        work_indptr is None
        or work_info_set is None
        or reduce_indptr is None
        or reduce_final_map is None
        or reduce_partial_map is None
    ):
        raise ValueError("work_meta_data: the persistent kernel needs work_indptr, work_info_set and the reduce_* maps")
    indptr = host(work_indptr)
    numbers = ranges(indptr[:-1], indptr[1:])
    require_inside("work_info_set", numbers, work_info_set.shape[0])
    return _Plan(host(work_info_set)[numbers], reduce_indptr, reduce_final_map, reduce_partial_map)


def _pieces(plan: _Plan, page_size: int, qo_indptr: Tensor, last_page_lens: Tensor, masked: bool) -> Pieces:
    batch, _, q_start, q_end, kv_start, kv_end, kv_offset = plan.works.T[:7]
    pages = np.maximum(kv_end - kv_start, 0)
    tokens = pages * page_size
    if page_size > 1:  # offset 0 says that the piece ends with the row's last page, which is only partly filled
        last = (kv_offset == 0) & (pages > 0)
        require_inside("kv_last_page_lens", batch[last], last_page_lens.shape[0])
        tokens[last] += host(last_page_lens)[batch[last]] - page_size
    slack = np.zeros_like(tokens)
    if masked:
        require_inside("qo_indptr", batch + 1, qo_indptr.shape[0])
        slack = kv_offset - (host(qo_indptr)[batch + 1] - 1 - q_start)
    return Pieces(q_start=q_start, q_count=q_end - q_start, kv_start=kv_start, tokens=tokens, slack=slack)


def _scatter(name: str, target: Tensor, first: IntArray, values_WJ: Tensor, chosen: NDArray[np.bool_]) -> None:
    """Write values[w, j] to target row first[w] + j for the chosen pieces."""
    if chosen.any():
        rows = first[chosen, None] + np.arange(values_WJ.shape[1])
        stored = beyond_view(target)
        require_inside(name, rows, stored.shape[0])
        at = torch.from_numpy(rows).to(target.device)
        stored[at] = values_WJ[torch.from_numpy(chosen).to(target.device)].to(target.dtype)


def _refuse(names: list[str]) -> None:
    if names:
        raise ValueError(f"mla_decode_fwd: not emulated: {', '.join(names)}; leave it at its default")


def _check_operands(
    q: Tensor, kv_buffer: Tensor, o: Tensor, page_size: int, q_scale: Tensor | None, kv_scale: Tensor | None
) -> None:
    if q.dtype not in (torch.bfloat16, *_FP8) or kv_buffer.dtype not in (torch.bfloat16, *_FP8):
        raise TypeError(f"q and kv_buffer must be bf16 or fp8, not {q.dtype} and {kv_buffer.dtype}")
    if q.dtype in _FP8 and (kv_buffer.dtype not in _FP8 or q_scale is None or kv_scale is None):
        raise ValueError("q: fp8 needs an fp8 kv_buffer and both q_scale and kv_scale")
    if o.dtype != torch.bfloat16:
        raise TypeError(f"o must be torch.bfloat16, not {o.dtype}")
    if q.ndim != 3 or o.shape[:2] != q.shape[:2] or not q.is_contiguous() or not o.is_contiguous():
        raise ValueError("q and o must be contiguous [rows, heads, dim] with equal rows and heads")
    if kv_buffer.ndim != 4 or kv_buffer.shape[1:3] != (page_size, 1) or kv_buffer.shape[3] != q.shape[2]:
        raise ValueError(f"kv_buffer must be [pages, {page_size}, 1, {q.shape[2]}], not {tuple(kv_buffer.shape)}")


def _operands(
    q: Tensor,
    kv_buffer: Tensor,
    o: Tensor,
    kv_indices: Tensor,
    sm_scale: float | None,
    q_scale: Tensor | None,
    kv_scale: Tensor | None,
) -> Operands:
    scale = 1 / math.sqrt(q.shape[2]) if sm_scale is None else sm_scale
    fp8_scales = [1.0 if tensor is None else float(tensor.item()) for tensor in (q_scale, kv_scale)]
    return Operands(
        q=_as_device_sees(q),
        kv=_as_device_sees(kv_buffer)[:, :, 0],
        kv_indices=kv_indices,
        scale=scale * math.prod(fp8_scales),
        value_scale=fp8_scales[1],
        probability_dtype=current_device().fp8 if q.dtype in _FP8 else torch.bfloat16,
        latent=o.shape[2],
    )


def _as_device_sees(tensor: Tensor) -> Tensor:
    return tensor.view(current_device().fp8) if tensor.dtype in _FP8 else tensor
