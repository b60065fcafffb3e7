"""How much of each bound honest arithmetic uses: the reference's own stages in fp32, under given rounding points.

Contract: data only, for a command to print; each stage starts from exactly known random inputs (bf16 values), so one
stage's error does not enter the next. A median near 0 says how far worst cases lie from practice; a worst value above 1
would be a bug of the stage or of its bound. Legend: T tokens, M width, L query latent, H heads, K keys, D cached width,
S cached tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv32_ref import indexer, mla, moe, norm, router
from dsv32_ref.bounds.arith import Approx, Arithmetic, exact
from dsv32_ref.bounds.budget import judge
from dsv32_ref.bounds.stages import StageBounds
from dsv32_ref.config import Config, Precision
from dsv32_ref.rope import rope_table
from dsv32_ref.weights import LayerWeights, assemble, quantise, synthetic

Comparison = tuple[str, Tensor, Approx]
"""Stage, what fp32 arithmetic computed, and its bound."""
KEYS = 16


@dataclass(frozen=True, kw_only=True)
class Utilisation:
    """Budget used by one stage: its median and worst over all elements."""

    stage: str
    elements: int
    median: float
    worst: float


def utilisation(
    config: Config,
    precision: Precision,
    arith: Arithmetic | None = None,
    *,
    simulated: bool = False,
    seed: int = 0,
    tokens: int = 16,
) -> list[Utilisation]:
    """Budget used by every stage of one synthetic layer.

    Args:
        config: dimensions; needs at least one mixture layer.
        precision: rounding points of the computation and of the bounds.
        arith: the model of arithmetic, with `delta` for the square-root-of-n form; default: deterministic fp32.
        simulated: bounds against the simulated-quantised values.
        seed: of weights and inputs.
        tokens: rows of every stage.

    Raises:
        ValueError: the configuration has no mixture layer.
    """
    bounds = StageBounds(config=config, precision=precision, arith=arith or Arithmetic(), simulated=simulated)
    named = synthetic(config, seed)
    weights = assemble(config, quantise(named) if precision.linear_fp8 else named)
    layers = [layer for layer in weights.layers if isinstance(layer.ffn, moe.MoeWeights)]
    if not layers:
        raise ValueError("config: has no mixture layer; need n_layers > n_dense_layers")
    return [_used(*stage) for stage in compare_stages(layers[0], bounds, seed=seed, tokens=tokens)]


def _used(stage: str, computed: Tensor, bound: Approx) -> Utilisation:
    budget = judge(computed, bound)
    return Utilisation(stage=stage, elements=budget.elements, median=budget.median, worst=budget.worst)


class _Inputs:
    """Random inputs on the bf16 grid, each its own stream of one seed."""

    def __init__(self, seed: int, tokens: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.tokens = tokens

    def rows(self, *shape: int, scale: float = 1.0) -> Tensor:
        drawn = torch.randn(self.tokens, *shape, generator=self.generator) * scale
        return drawn.bfloat16().float()

    def positions(self, limit: int) -> Tensor:
        return torch.randint(0, limit, (self.tokens,), generator=self.generator)


def compare_stages(w: LayerWeights, b: StageBounds, *, seed: int, tokens: int) -> Iterator[Comparison]:
    """Every stage of a mixture layer computed by the reference in fp32, with its bound."""
    draw = _Inputs(seed, tokens)
    x_TM, qr_TL = draw.rows(b.config.dim), draw.rows(b.config.q_lora_rank)
    positions_T = draw.positions(b.config.max_seq_len)
    yield from _norms(x_TM, draw.rows(b.config.dim), w, b)
    yield from _attention(x_TM, qr_TL, positions_T, draw, w, b)
    yield from _indexer(x_TM, qr_TL, positions_T, w, b)
    yield from _feed_forward(x_TM, w, b)


def _norms(x_TM: Tensor, residual_TM: Tensor, w: LayerWeights, b: StageBounds) -> Iterator[Comparison]:
    normed, kept = norm.add_rms_norm(x_TM, residual_TM, w.attn_norm, b.config.norm_eps, b.precision)
    bound = b.add_rms_norm(exact(x_TM), exact(residual_TM), w.attn_norm)
    yield "attn_in", normed, bound[0]
    yield "residual", kept, bound[1]


def _attention(
    x_TM: Tensor, qr_TL: Tensor, positions_T: Tensor, draw: _Inputs, w: LayerWeights, b: StageBounds
) -> Iterator[Comparison]:
    c, p, attn = b.config, b.precision, w.attn
    table = rope_table(c, positions_T)
    yield "query latent", mla.query_latent(x_TM, attn, c, p), b.query_latent(exact(x_TM), attn)
    q_nope, q_pe = mla.queries(qr_TL, attn, table, c, p)
    bound = b.queries(exact(qr_TL), attn, positions_T)
    yield "q nope", q_nope, bound[0]
    yield "q rope", q_pe, bound[1]
    yield "latent", mla.latents(x_TM, attn, table, c, p), b.latents(exact(x_TM), attn, positions_T)
    kv_TKD = draw.rows(KEYS, c.kv_lora_rank + c.qk_rope_head_dim)
    valid_TK = torch.rand(len(x_TM), KEYS, generator=draw.generator) < 0.8
    valid_TK[:, 0] = True
    qa = draw.rows(c.n_heads, c.kv_lora_rank, scale=0.2)
    z, lse = mla.attend(qa, q_pe, kv_TKD, valid_TK, c.softmax_scale, p)
    bound = b.attend(exact(qa), exact(q_pe), exact(kv_TKD), valid_TK)
    yield "attend", z, bound[0]
    yield "lse", lse, bound[1]
    o_THV = mla.absorbed(q_nope, q_pe, kv_TKD, valid_TK, attn, c, p)
    yield "absorbed", o_THV, b.absorbed(exact(q_nope), exact(q_pe), exact(kv_TKD), valid_TK, attn)
    kv_SD = draw.rows(c.latent_dim)
    allowed_TS = torch.rand(len(x_TM), len(kv_SD), generator=draw.generator) < 0.8
    allowed_TS[:, 0] = True
    o_THV = mla.unabsorbed(q_nope, q_pe, kv_SD, allowed_TS, attn, c, p)
    yield "unabsorbed", o_THV, b.unabsorbed(exact(q_nope), exact(q_pe), exact(kv_SD), allowed_TS, attn)
    yield "attn_out", mla.output(o_THV, attn, p), b.output(exact(o_THV), attn)


def _indexer(x_TM: Tensor, qr_TL: Tensor, positions_T: Tensor, w: LayerWeights, b: StageBounds) -> Iterator[Comparison]:
    c, p, index = b.config, b.precision, w.indexer
    table = rope_table(c, positions_T)
    q, q_scale = indexer.index_queries(qr_TL, index, table, c, p)
    yield "index query", q * q_scale.unsqueeze(-1), b.index_queries(exact(qr_TL), index, positions_T)
    k, k_scale = indexer.index_keys(x_TM, index, table, c, p)
    yield "index_key", k * k_scale.unsqueeze(-1), b.index_keys(exact(x_TM), index, positions_T)
    score = indexer.index_scores(q, indexer.head_weights(x_TM, q_scale, index, c), k, k_scale)
    bound = b.index_scores(exact(x_TM), exact(qr_TL), exact(k), exact(k_scale), index, positions_T)
    yield "index_score", score, bound


def _feed_forward(x_TM: Tensor, w: LayerWeights, b: StageBounds) -> Iterator[Comparison]:
    c, p, ffn = b.config, b.precision, w.ffn
    if not isinstance(ffn, moe.MoeWeights):
        raise ValueError("w.ffn: is a dense network; give a mixture layer")
    logits = router.gate_logits(x_TM, ffn.gate)
    yield "gate_logits", logits, b.gate_logits(exact(x_TM), ffn.gate)
    chosen = router.choose_experts(logits, ffn.gate.bias, c)
    weights = router.expert_weights(logits, chosen, c)
    yield "gate_w", weights, b.expert_weights(exact(logits), chosen)
    first = ffn.experts[int(chosen[0, 0])]
    yield "mlp", moe.mlp(x_TM, first, p), b.mlp(exact(x_TM), first)
    mixed = moe.mixture(x_TM, chosen, weights, ffn, p)
    yield "ffn_out", mixed, b.mixture(exact(x_TM), chosen, exact(weights), ffn)
