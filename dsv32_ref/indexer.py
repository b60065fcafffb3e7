"""The lightning indexer of DeepSeek sparse attention: a cheap score per cached token, and the top-k of it.

Legend: T query tokens, M model width, L query latent, J indexer heads, I indexer head width, S cached tokens, K top-k.
Source: the DeepSeek-V3.2 report, equation 1, and the inference code of 17 November 2025: RoPE is HALF-SPLIT and turns
the FIRST part of each head (MLA turns interleaved pairs of the last part); `weights_proj` is applied in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv32_ref.config import FP32, Config, Precision
from dsv32_ref.mla import Table
from dsv32_ref.norm import layer_norm
from dsv32_ref.quant import Matrix, act_quant, hadamard, linear
from dsv32_ref.rope import rope_half_split


@dataclass(frozen=True, kw_only=True)
class IndexerWeights:
    """One layer's indexer weights, [out, in], under DeepSeek's names."""

    wq_b: Matrix
    wk: Matrix
    k_norm_weight: Tensor
    k_norm_bias: Tensor
    weights_proj: Tensor


def _turn_first(x: Tensor, table: Table, config: Config, precision: Precision) -> Tensor:
    pe, nope = torch.split_with_sizes(x, [config.qk_rope_head_dim, config.index_head_dim - config.qk_rope_head_dim], -1)
    return torch.cat([rope_half_split(pe, table, precision), nope], -1)


def quantise(x: Tensor, precision: Precision = FP32) -> tuple[Tensor, Tensor]:
    """One e4m3 block per head: values in the shape and dtype of `x` [..., I], scales [...]; without fp8, `x`, 1."""
    if not precision.index_fp8:
        return x, torch.ones_like(x[..., 0])
    values, scale = act_quant(x, block=x.shape[-1], scale_format=precision.scale_format)
    return values.to(x.dtype), scale.squeeze(-1).to(x.dtype)


def index_queries(
    qr_TL: Tensor, w: IndexerWeights, table: Table, config: Config, precision: Precision = FP32
) -> tuple[Tensor, Tensor]:
    """Rotated and quantised queries [T, J, I], and their scales [T, J]."""
    q_TJI = torch.unflatten(linear(qr_TL, w.wq_b, precision), -1, (config.index_n_heads, config.index_head_dim))
    return quantise(hadamard(_turn_first(q_TJI, table, config, precision), precision), precision)


def index_keys(
    x_TM: Tensor, w: IndexerWeights, table: Table, config: Config, precision: Precision = FP32
) -> tuple[Tensor, Tensor]:
    """What is cached of each token: rotated and quantised key [T, I], and its scale [T]."""
    k_TI = linear(x_TM, w.wk, precision)
    k_TI = layer_norm(k_TI, w.k_norm_weight, w.k_norm_bias, config.norm_eps, precision)
    return quantise(hadamard(_turn_first(k_TI, table, config, precision), precision), precision)


def head_weights(x_TM: Tensor, q_scale_TJ: Tensor, w: IndexerWeights, config: Config) -> Tensor:
    """The weight [T, J] of each indexer head; it may be negative. Carries the query scale, J^-0.5 and I^-0.5."""
    w_TJ = x_TM @ w.weights_proj.T * float(config.index_n_heads**-0.5)
    return w_TJ * q_scale_TJ * float(config.index_head_dim**-0.5)


def index_scores(q_TJI: Tensor, w_TJ: Tensor, k_SI: Tensor, k_scale_S: Tensor) -> Tensor:
    """I(t, s) = k_scale(s) sum_j w(t, j) max(q(t, j) . k(s), 0), [T, S], before any mask."""
    relu_TJS = (q_TJI @ k_SI.T).clamp_min(0)
    return (w_TJ[:, None] @ relu_TJS).squeeze(1) * k_scale_S


def select_topk(scores_TS: Tensor, lengths_T: Tensor, k: int) -> Tensor:
    """The `k` best of the first `lengths_T` columns of each row, [T, k] int64, best first; -1 pads short rows.

    Ties go to the lower index, so the set and its order are a function of the scores alone.

    Raises:
        ValueError: a length exceeds the row, or a score within it is NaN.
    """
    T, S = scores_TS.shape
    if lengths_T.shape != (T,) or (T and (int(lengths_T.max()) > S or int(lengths_T.min()) < 0)):
        raise ValueError(f"lengths {lengths_T.tolist()[:8]} do not fit index_score rows of {S}; give one per row")
    device = scores_TS.device
    inside_TS = torch.arange(S, device=device) < lengths_T[:, None]
    if bool((scores_TS.isnan() & inside_TS).any()):
        raise ValueError("index_score is NaN inside a row; the top-k of NaN is undefined")
    # Columns outside follow all columns inside, so the stable sort puts them behind even a legal score of -inf.
    order_TS = scores_TS.masked_fill(~inside_TS, -torch.inf).sort(dim=-1, descending=True, stable=True).indices
    best_TK = torch.full((T, k), -1, dtype=torch.int64, device=device)
    best_TK[:, : min(k, S)] = order_TS[:, :k]
    rank_K = torch.arange(k, device=device)
    return best_TK.masked_fill(rank_K >= lengths_T[:, None], -1)


def allowed(topk_TK: Tensor, n_slots: int) -> Tensor:
    """The top-k as a mask [T, S] over the cached tokens."""
    mask = torch.zeros(topk_TK.shape[0], n_slots + 1, dtype=torch.bool, device=topk_TK.device)
    return mask.scatter_(1, topk_TK.masked_fill(topk_TK < 0, n_slots), True)[:, :n_slots]
