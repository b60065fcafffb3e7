"""Stage 1 of MLA decode: attention of some query rows over one contiguous piece of an index list, for many pieces.

The numerics are those of AITER's kernels as far as they are observable: exact products, fp32 accumulation, softmax in
fp32, the row sum taken before P is rounded to bf16 (or to fp8 when Q and KV are fp8), one division at the end, natural
logarithm in the LSE. A piece is attended as a whole with its final maximum; the kernels use a running one.

The bits of a piece depend on that piece alone: its keys are padded to a length that follows from their number, and
nothing here depends on how many pieces are computed together.

Legend: R query rows, W pieces computed together, J query rows of a piece, H heads, N = J * H, L keys padded,
D latent + RoPE dim, C latent dim, P pages, S slots of a page.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dsv32_fast.kernels.emulated.memory import IntArray, beyond_view, require_inside

_ELEMENTS_AT_ONCE = 1 << 22
"""Elements of gathered KV per batch of pieces: 16 MiB in fp32."""


@dataclass(frozen=True, kw_only=True)
class Operands:
    """Everything that stage 1 reads, already in the flavours that the device sees."""

    q: Tensor
    """[R, H, D]."""
    kv: Tensor
    """[P, S, D]."""
    kv_indices: Tensor
    scale: float
    """Softmax scale, including the scales of fp8 Q and KV."""
    value_scale: float
    """Scale of an fp8 V."""
    probability_dtype: torch.dtype
    """What P is rounded to before it meets V."""
    latent: int
    """V is the first `latent` dims of KV."""

    @property
    def page_size(self) -> int:
        """Slots of a page."""
        return self.kv.shape[1]


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """One entry per piece, all int64 [W]."""

    q_start: IntArray
    q_count: IntArray
    kv_start: IntArray
    """First entry of the index list."""
    tokens: IntArray
    """Keys, counted in tokens."""
    slack: IntArray
    """Query row j sees the first tokens + slack + j keys: negative where the causal mask cuts the piece."""

    def __len__(self) -> int:
        return len(self.tokens)


def attend(pieces: Pieces, operands: Operands) -> Iterator[tuple[IntArray, Tensor, Tensor]]:
    """Attention of all pieces that have keys, in batches of equal shape.

    Yields:
        Numbers of the pieces, their fp32 outputs [W, J, H, C] and LSEs [W, J, H]; a row that sees no key has output 0
        and LSE -inf.

    Raises:
        OutOfBoundsError: a piece leads outside the query, the index list or the KV cache.
    """
    padded = np.where(pieces.tokens > 0, _padded_length(pieces.tokens), 0)
    shapes = np.stack([pieces.q_count, padded], axis=1)
    for count, length in np.unique(shapes[(pieces.tokens > 0) & (pieces.q_count > 0)], axis=0):
        group = np.flatnonzero((shapes == (count, length)).all(axis=1))
        at_once = max(1, _ELEMENTS_AT_ONCE // (int(length) * operands.q.shape[-1]))
        for first in range(0, len(group), at_once):
            batch = group[first : first + at_once]
            output, lse = _attend_batch(pieces, operands, batch, int(count), int(length))
            yield batch, output, lse


def _padded_length(tokens: IntArray) -> IntArray:
    """Next multiple of a quarter of the octave (at least 16): few distinct shapes for at most a quarter of padding."""
    octave: IntArray = np.floor(np.log2(np.maximum(tokens, 1))).astype(np.int64)
    step: IntArray = np.maximum(16, 1 << np.maximum(octave - 2, 0))
    return -(-tokens // step) * step


def _attend_batch(
    pieces: Pieces, operands: Operands, batch: IntArray, count: int, length: int
) -> tuple[Tensor, Tensor]:
    device, heads = operands.q.device, operands.q.shape[1]
    q_WND = _gather_queries(operands.q, pieces.q_start[batch], count)
    k_WLD = _gather_keys(operands, pieces.kv_start[batch], pieces.tokens[batch], length)
    scores_WNL = torch.bmm(q_WND, k_WLD.transpose(1, 2)) * operands.scale
    visible_WJ = np.clip(pieces.slack[batch, None] + np.arange(count), None, 0) + pieces.tokens[batch, None]
    if visible_WJ.min() < length:
        visible_WN = torch.from_numpy(visible_WJ).to(device).repeat_interleave(heads, 1)
        scores_WNL.masked_fill_(torch.arange(length, device=device) >= visible_WN[..., None], -math.inf)
    output_WNC, lse_WN = _softmax_times_values(scores_WNL, k_WLD[..., : operands.latent], operands.probability_dtype)
    shape = (len(batch), count, heads)
    return output_WNC.mul_(operands.value_scale).view(*shape, operands.latent), lse_WN.view(shape)


def _softmax_times_values(scores_WNL: Tensor, v_WLC: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    max_WN1 = scores_WNL.amax(2, keepdim=True)
    # A row without a key has maximum -inf; subtracting 0 instead keeps its probabilities 0.
    p_WNL = torch.exp(scores_WNL - max_WN1.masked_fill(max_WN1 == -math.inf, 0.0))
    sum_WN1 = p_WNL.sum(2, keepdim=True)
    output_WNC = torch.bmm(p_WNL.to(dtype).float(), v_WLC)
    output_WNC *= torch.where(sum_WN1 == 0, 0.0, 1 / sum_WN1)
    return output_WNC, (max_WN1 + torch.log(sum_WN1)).squeeze(2)


def _gather_queries(q_RHD: Tensor, start: IntArray, count: int) -> Tensor:
    rows = start[:, None] + np.arange(count)
    stored = beyond_view(q_RHD)
    require_inside("q", rows, stored.shape[0])
    return _decode(stored, torch.from_numpy(rows.ravel())).flatten(1).view(len(start), -1, q_RHD.shape[-1])


def _gather_keys(operands: Operands, start: IntArray, tokens: IntArray, length: int) -> Tensor:
    """fp32 [W, L, D]; keys beyond a piece's own are zero, so that they cannot bring a NaN in."""
    page_size, kv_PSD = operands.page_size, operands.kv
    token_WL = np.minimum(np.arange(length), tokens[:, None] - 1)
    entry_WL = start[:, None] + token_WL // page_size
    indices = beyond_view(operands.kv_indices)
    require_inside("kv_indices", entry_WL, indices.shape[0])
    page = indices.index_select(0, torch.from_numpy(entry_WL.ravel()).to(indices.device)).long()
    if int(page.min()) < 0 or int(page.max()) >= kv_PSD.shape[0]:
        require_inside("kv_buffer", page.cpu().numpy(), kv_PSD.shape[0])
    if page_size == 1:
        k_WLD = _decode(kv_PSD[:, 0], page)
    else:
        k_WLD = _decode(kv_PSD, page, torch.from_numpy((token_WL % page_size).ravel()).to(page.device))
    k_WLD = k_WLD.view(*token_WL.shape, -1)
    if tokens.min() < length:
        k_WLD.masked_fill_(torch.from_numpy(np.arange(length) >= tokens[:, None]).to(page.device)[..., None], 0.0)
    return k_WLD


def _decode(stored: Tensor, index: Tensor, slot: Tensor | None = None) -> Tensor:
    """Rows of a bf16 or fp8 tensor as fp32; fp8 is gathered as bytes, since torch indexes no fp8."""
    raw = stored.view(torch.uint8) if stored.dtype.itemsize == 1 else stored
    index = index.to(stored.device)
    rows = raw.index_select(0, index) if slot is None else raw[index, slot]
    return rows.view(stored.dtype).float()
