"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) over a given set of cached tokens.

Legend: T query tokens, M model width, L query latent, H heads, N nope, R rope, X = N + R, V value width, C latent,
D = C + R (one cached token), S cache slots of one request, K selected tokens.
The unabsorbed form (prefill) expands every cached latent into keys and values; the absorbed form (decode) moves the
expansion to the query side, so that all heads read the latent itself. They are equal in exact arithmetic and round at
different places. Both let a token see only what the indexer selected.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv32_ref.config import FP32, Config, Precision
from dsv32_ref.norm import rms_norm
from dsv32_ref.quant import Matrix, fake_quant, linear, round_bf16
from dsv32_ref.rope import rope_interleaved

Table = tuple[Tensor, Tensor]
"""cos and sin [T, R/2] of `rope.rope_table`."""


@dataclass(frozen=True, kw_only=True)
class MlaWeights:
    """One layer's attention weights, [out, in], under DeepSeek's names."""

    wq_a: Matrix
    q_norm: Tensor
    wq_b: Matrix
    wkv_a: Matrix
    kv_norm: Tensor
    wkv_b: Matrix
    wo: Matrix


def query_latent(x_TM: Tensor, w: MlaWeights, config: Config, precision: Precision = FP32) -> Tensor:
    """The normed query latent [T, L], shared by attention and indexer."""
    return rms_norm(linear(x_TM, w.wq_a, precision), w.q_norm, config.norm_eps, precision)


def queries(
    qr_TL: Tensor, w: MlaWeights, table: Table, config: Config, precision: Precision = FP32
) -> tuple[Tensor, Tensor]:
    """Queries per head: nope part [T, H, N], and rope part [T, H, R] after RoPE."""
    q_THX = torch.unflatten(linear(qr_TL, w.wq_b, precision), -1, (config.n_heads, config.qk_head_dim))
    q_nope_THN, q_pe_THR = torch.split_with_sizes(q_THX, [config.qk_nope_head_dim, config.qk_rope_head_dim], -1)
    return q_nope_THN, rope_interleaved(q_pe_THR, table, precision)


def latents(x_TM: Tensor, w: MlaWeights, table: Table, config: Config, precision: Precision = FP32) -> Tensor:
    """What is cached of each token, [T, D]: normed latent C (fp8 round trip where simulated), then RoPE key R."""
    c_TC, k_pe_TR = torch.split_with_sizes(
        linear(x_TM, w.wkv_a, precision), [config.kv_lora_rank, config.qk_rope_head_dim], -1
    )
    c_TC = rms_norm(c_TC, w.kv_norm, config.norm_eps, precision)
    if precision.latent_fp8:
        c_TC = fake_quant(c_TC, scale_format=precision.scale_format)
    return torch.cat([c_TC, rope_interleaved(k_pe_TR, table, precision)], -1)


def _softmax(scores_THS: Tensor, allowed_TS: Tensor, precision: Precision) -> tuple[Tensor, Tensor]:
    """Weights [T, H, S] over the allowed tokens and their log-sum-exp [T, H]; no token allowed: zeros and +inf."""
    masked_THS = scores_THS.masked_fill(~allowed_TS[:, None, :], -torch.inf)
    lse_TH = masked_THS.logsumexp(-1)
    lonely_TH = ~allowed_TS.any(-1)[:, None].expand_as(lse_TH)
    p_THS = torch.softmax(masked_THS, -1).masked_fill(lonely_TH[..., None], 0.0)
    return round_bf16(p_THS, precision), lse_TH.masked_fill(lonely_TH, torch.inf)


def attend(
    qa_THC: Tensor, q_pe_THR: Tensor, kv_TKD: Tensor, valid_TK: Tensor, scale: float, precision: Precision = FP32
) -> tuple[Tensor, Tensor]:
    """The decode kernel: multi-query attention of absorbed queries over the gathered tokens.

    Returns z [T, H, C] and the log-sum-exp [T, H] of the scaled scores (natural log). A row without any valid token
    gives 0 and +inf, as FlashMLA defines it. Invalid entries of `kv_TKD` must be finite: 0 times NaN is NaN.
    """
    c_TKC, k_pe_TKR = torch.split_with_sizes(kv_TKD, [qa_THC.shape[-1], q_pe_THR.shape[-1]], -1)
    nope_THK = round_bf16(qa_THC @ c_TKC.mT, precision)
    rope_THK = round_bf16(q_pe_THR @ k_pe_TKR.mT, precision)
    scores_THK = round_bf16(round_bf16(nope_THK + rope_THK, precision) * scale, precision)
    p_THK, lse_TH = _softmax(scores_THK, valid_TK, precision)
    return round_bf16(p_THK @ c_TKC, precision), lse_TH


def _up_matrices(w: MlaWeights, config: Config, precision: Precision, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """UK [H, N, C] and UV [H, V, C], the two halves of wkv_b per head."""
    matrix = w.wkv_b if isinstance(w.wkv_b, Tensor) else round_bf16(w.wkv_b.dequantise(dtype), precision)
    per_head = torch.unflatten(matrix, 0, (config.n_heads, config.qk_nope_head_dim + config.v_head_dim))
    uk_HNC, uv_HVC = torch.split_with_sizes(per_head, [config.qk_nope_head_dim, config.v_head_dim], 1)
    return uk_HNC, uv_HVC


def absorbed(
    q_nope_THN: Tensor,
    q_pe_THR: Tensor,
    kv_TKD: Tensor,
    valid_TK: Tensor,
    w: MlaWeights,
    config: Config,
    precision: Precision = FP32,
) -> Tensor:
    """Head outputs [T, H, V] by absorption: qa = UK^T q, z = attend(qa), o = UV z."""
    uk_HNC, uv_HVC = _up_matrices(w, config, precision, kv_TKD.dtype)
    qa_THC = round_bf16((q_nope_THN.transpose(0, 1) @ uk_HNC).transpose(0, 1), precision)
    z_THC, _ = attend(qa_THC, q_pe_THR, kv_TKD, valid_TK, config.softmax_scale, precision)
    return round_bf16((z_THC.transpose(0, 1) @ uv_HVC.mT).transpose(0, 1), precision)


def unabsorbed(
    q_nope_THN: Tensor,
    q_pe_THR: Tensor,
    kv_SD: Tensor,
    allowed_TS: Tensor,
    w: MlaWeights,
    config: Config,
    precision: Precision = FP32,
) -> Tensor:
    """Head outputs [T, H, V] by expansion: k = UK c, v = UV c for each of the S tokens, then masked attention."""
    c_SC, k_pe_SR = torch.split_with_sizes(kv_SD, [config.kv_lora_rank, config.qk_rope_head_dim], -1)
    kv_SHX = torch.unflatten(linear(c_SC, w.wkv_b, precision), -1, (config.n_heads, -1))
    k_nope_SHN, v_SHV = torch.split_with_sizes(kv_SHX, [config.qk_nope_head_dim, config.v_head_dim], -1)
    k_SHX = torch.cat([k_nope_SHN, k_pe_SR[:, None].expand(-1, config.n_heads, -1)], -1)
    q_THX = torch.cat([q_nope_THN, q_pe_THR], -1)
    raw_THS = round_bf16(torch.einsum("thx,shx->ths", q_THX, k_SHX), precision)
    p_THS, _ = _softmax(round_bf16(raw_THS * config.softmax_scale, precision), allowed_TS, precision)
    return round_bf16(torch.einsum("ths,shv->thv", p_THS, v_SHV), precision)


def output(o_THV: Tensor, w: MlaWeights, precision: Precision = FP32) -> Tensor:
    """The output projection of the concatenated heads, [T, M]."""
    return linear(o_THV.flatten(-2), w.wo, precision)
