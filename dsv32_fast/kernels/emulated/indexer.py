"""Lightning-indexer logits behind AITER's signatures (ROCm/aiter e404860).

logit(t, u) = sum over heads of weight(t, h) * relu(q(t, h) . k(u) * k_scale(u)), fp8 operands, fp32 accumulation.
The paged kernel writes -inf at invalid positions of the chunks that it visits and does not touch later chunks, so the
caller's memory shows through there.

Legend: B requests, J query rows of a request, H heads, D dims, T query rows, U keys, L positions of a request.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dsv32_fast.kernels.emulated.cache import read_keys
from dsv32_fast.kernels.emulated.device import current_device
from dsv32_fast.kernels.emulated.memory import host, poison, require_inside

_PRODUCTS_AT_ONCE = 1 << 24


def deepgemm_fp8_paged_mqa_logits(
    q_fp8: Tensor,
    kv_cache: Tensor,
    weights: Tensor,
    out_logits: Tensor,
    context_lens: Tensor,
    kv_indices: Tensor,
    max_model_len: int,
    Preshuffle: bool = False,
    KVBlockSize: int = 1,
    ChunkK: int = 256,
    TotalCuCount: int | None = None,
    WavePerEU: int = 2,
    VarCtxSchedule: Tensor | None = None,
) -> None:
    """Logits of decode rows over their paged keys, written to `out_logits` in place.

    Row (b, n) may see positions j <= context_lens[b] - next_n + n. Other positions below the end of the last visited
    chunk become -inf; those from ceil(context / ChunkK) * ChunkK on are not written. Keys beyond the table of a request
    count as zero.

    Args:
        q_fp8: fp8 [B, J, H, D].
        kv_cache: page-planar fp8 or uint8 [P, KVBlockSize, 1, D + 4].
        weights: fp32 [B * J, H].
        out_logits: fp32 [B * J, at least max_model_len].
        context_lens: int32 [B], including the J new tokens.
        kv_indices: int32 [B, pages].
        max_model_len: no position from here on is written.
        Preshuffle: the cache holds 16 x 16 tiles.
        KVBlockSize: slots of a page.
        ChunkK: keys per step of the kernel.
        TotalCuCount, WavePerEU, VarCtxSchedule: launch geometry, not observable.

    Raises:
        ValueError: shapes that do not fit; the message names the tensor.
        OutOfBoundsError: a page beyond the cache.
    """
    del TotalCuCount, WavePerEU, VarCtxSchedule
    batch, next_n, _, dims = q_fp8.shape
    if kv_cache.shape[1] != KVBlockSize:
        raise ValueError(f"kv_cache has pages of {kv_cache.shape[1]}, but KVBlockSize is {KVBlockSize}")
    if out_logits.shape[0] != batch * next_n or out_logits.shape[1] < max_model_len:
        raise ValueError(
            f"out_logits must be [{batch * next_n}, at least {max_model_len}], not {tuple(out_logits.shape)}"
        )
    cache = kv_cache.view(kv_cache.shape[0], KVBlockSize, kv_cache.shape[-1])
    for request, context in enumerate(host(context_lens).tolist()):
        visited = min(-(-max(context, 0) // ChunkK) * ChunkK, max_model_len)
        written = min(context, max_model_len)
        readable = min(written, kv_indices.shape[1] * KVBlockSize)
        if visited == 0:
            continue
        keys_LD, scales_L = _paged_keys(cache, kv_indices[request], readable, dims, Preshuffle)
        rows = slice(request * next_n, (request + 1) * next_n)
        logits_JL = _logits(q_fp8[request], keys_LD, scales_L, weights[rows])
        last_J = context - next_n + torch.arange(next_n, device=logits_JL.device)
        logits_JL = torch.nn.functional.pad(logits_JL, (0, written - readable))
        position_L = torch.arange(written, device=logits_JL.device)
        out_logits[rows, :visited] = -math.inf
        out_logits[rows, :written] = logits_JL.masked_fill(position_L > last_J[:, None], -math.inf)


def fp8_mqa_logits(
    Q: Tensor,
    KV: Tensor,
    kv_scales: Tensor,
    weights: Tensor,
    cu_starts: Tensor,
    cu_ends: Tensor,
    clean_logits: bool = True,
) -> Tensor:
    """Logits of ragged prefill rows, fp32 [T, U]; row t sees keys [cu_starts[t], cu_ends[t]).

    Elsewhere -inf, or with clean_logits=False uninitialised memory (NaN here).

    Args:
        Q: fp8 [T, H, D].
        KV: fp8 [U, D].
        kv_scales: fp32 [U] or [U, 1].
        weights: fp32 [T, H].
        cu_starts, cu_ends: int32 [T].
        clean_logits: fill the invalid positions.
    """
    logits_TU = _logits(Q, KV.view(torch.uint8), kv_scales.reshape(-1), weights)
    position_U = torch.arange(KV.shape[0], device=KV.device)
    inside = (position_U >= cu_starts[:, None]) & (position_U < cu_ends[:, None])
    elsewhere = -math.inf if clean_logits else math.nan
    return torch.where(inside, logits_TU, elsewhere)


def _paged_keys(cache: Tensor, table: Tensor, length: int, dims: int, preshuffle: bool) -> tuple[Tensor, Tensor]:
    position = torch.arange(length)
    entry = position // cache.shape[1]
    page = table.cpu().long()[entry]
    require_inside("kv_cache", page.numpy(), cache.shape[0])
    keys_LD, scales_L1 = read_keys(cache, page, position % cache.shape[1], dims, preshuffle)
    return keys_LD, scales_L1[:, 0]


def _logits(q_THD: Tensor, keys_UD: Tensor, scales_U: Tensor, weights_TH: Tensor) -> Tensor:
    """fp32 [T, U]; keys are bytes in the device's fp8 flavour."""
    device = current_device().fp8
    tokens, heads, _ = q_THD.shape
    k_DU = keys_UD.contiguous().view(device).float().T
    if k_DU.shape[1] == 0:
        return torch.empty(tokens, 0, device=q_THD.device)
    out_TU = poison((tokens, k_DU.shape[1]), q_THD.device)
    step = max(1, _PRODUCTS_AT_ONCE // max(1, heads * k_DU.shape[1]))
    for first in range(0, tokens, step):
        rows = slice(first, first + step)
        q_XD = q_THD[rows].contiguous().view(device).float().flatten(0, 1)
        products_THU = torch.relu(q_XD @ k_DU * scales_U).view(-1, heads, k_DU.shape[1])
        out_TU[rows] = torch.bmm(weights_TH[rows, None].float(), products_THU)[:, 0]
    return out_TU
