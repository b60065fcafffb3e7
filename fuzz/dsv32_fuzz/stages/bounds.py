"""What each stage of the optimised path may return, from the inputs that the path itself recorded (layer-local).

`StageBounds` covers the rounding points that the path shares with the reference (every linear, norm, RoPE and MLP
output rounded once to bf16). Where the path rounds elsewhere the pair is composed here from the same proven pieces:
- index_q, index_w: no Hadamard rotation; head weights come from a product rounded to bf16.
- index_score: fp32 arithmetic on the recorded fp8 operands, one batch of keys per row.
- attn_z: scores in fp32, softmax in fp32 with P rounded to bf16 before it is normalised, merged from at most one
  partial per key (a split holds at least one), a running maximum changed at most once per key.
- fp8 KV: `cached` and `attn_q` are e4m3 with one given scale (`static_quant`), P is rounded to e4m3, both scales are
  multiplied into the scores, and that of V into V, into each partial or into the result: one rounding of every term.
- gate_w: the optimised kernel takes a score as (score + bias) - bias: two more fp32 roundings of up to |score + bias|.
- ffn_out: the routed sum, the shared expert and their sum are each rounded to bf16; gate and up of routed experts not.
Each pair's value is the stage in real arithmetic, which is what the reference stage computes.

Legend: T rows, H heads, K top-k, S positions, J indexer heads, I indexer width, M model width, E experts.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dsv32_fast.options import Options
from dsv32_ref.bounds import BF16, E4M3FN, Approx, Arithmetic, SoftmaxForm, attend, certify_router, exact, round_to
from dsv32_ref.bounds import attention as attention_bounds
from dsv32_ref.bounds import linear as linear_bounds
from dsv32_ref.bounds import moe as moe_bounds
from dsv32_ref.bounds import norm as norm_bounds
from dsv32_ref.bounds import quant as quant_bounds
from dsv32_ref.bounds import router as router_bounds
from dsv32_ref.bounds.elementary import add, mul, scale_by, silu
from dsv32_ref.bounds.indexer import relu
from dsv32_ref.bounds.margins import Certificate
from dsv32_ref.bounds.stages import StageBounds
from dsv32_ref.config import Config, Precision
from dsv32_ref.moe import MlpWeights, MoeWeights
from dsv32_ref.quant import Matrix
from dsv32_ref.router import choose_experts
from dsv32_ref.weights import LayerWeights, Weights

Values = dict[tuple[str, int], Tensor]
"""What one step recorded, by stage and layer."""
Compared = tuple[str, Tensor, Approx]
"""Stage, what the path computed, what it may."""
ARITH = Arithmetic()


@dataclass(frozen=True, kw_only=True)
class Recording:
    """The stages of many steps, row under row."""

    config: Config
    weights: Weights
    options: Options
    steps: list[Values]
    gate_store: torch.dtype | None = None
    """What the gate's GEMM stored, where that is not the type of the logits."""
    precision: Precision = field(default_factory=lambda: Precision(bf16=True))
    """bf16 or fp32 activations; fp8 linears where the weights are fp8."""
    kv_scales: tuple[float, float] | None = None
    """Of queries and cache where these are fp8, as the kernel gets them (fp32)."""

    @property
    def bounds(self) -> StageBounds:
        """The bounds of the stages that the path shares with the reference."""
        return StageBounds(config=self.config, precision=self.precision, arith=ARITH)

    def stored(self, x: Approx) -> Approx:
        """A rounding to the activation type."""
        return stored(x) if self.precision.bf16 else x

    def of(self, stage: str, layer: int) -> Tensor:
        """[all rows, ...]; columns are padded where steps differ (with -inf in scores)."""
        parts = [step[stage, layer] for step in self.steps]
        if stage in ("index_score", "keys", "key_scales"):
            width = max(part.shape[1] for part in parts)
            fill = -torch.inf if stage == "index_score" else 0.0
            parts = [_wider(part, width, fill) for part in parts]
        return torch.cat(parts)

    def bias(self, layer: int) -> Tensor:
        """The router's bias with the values that reach the kernel."""
        ffn = self.weights.layers[layer].ffn
        assert isinstance(ffn, MoeWeights)
        narrow = "bf16" in (self.options.bias, self.options.logits)
        return ffn.gate.bias.bfloat16().float() if narrow else ffn.gate.bias


def _of_layer(rec: Recording, layer: int, stage: str) -> Tensor:
    return rec.of(stage, layer)


def _wider(part: Tensor, width: int, fill: float) -> Tensor:
    extra = part.new_full((part.shape[0], width - part.shape[1], *part.shape[2:]), fill)
    return torch.cat([part, extra], 1)


def stored(x: Approx) -> Approx:
    """A rounding to bf16."""
    return round_to(x, BF16)


def values(rec: Recording) -> Iterator[Compared]:
    """Every stage with a bound, layer by layer."""
    h_TM = rec.weights.embed[rec.of("tokens", -1)]
    residual_TM = torch.zeros_like(h_TM)
    for layer, w in enumerate(rec.weights.layers):
        at = functools.partial(_of_layer, rec, layer)
        normed, _ = rec.bounds.add_rms_norm(exact(h_TM), exact(residual_TM), w.attn_norm)
        yield f"attn_in {layer}", at("attn_in"), normed
        yield from _attention(rec, w, layer)
        # The sum that the attention norm stored: one fp32 addition and one rounding, the same in every path.
        kept_TM = h_TM.float() + residual_TM.float()
        kept_TM = kept_TM.bfloat16() if rec.precision.bf16 else kept_TM
        normed, summed = rec.bounds.add_rms_norm(exact(at("attn_out")), exact(kept_TM), w.ffn_norm)
        yield f"residual {layer}", at("residual"), summed
        yield f"ffn_in {layer}", at("ffn_in"), normed
        yield from _feed_forward(rec, w, layer)
        h_TM, residual_TM = at("ffn_out"), at("residual")
    final, _ = rec.bounds.add_rms_norm(exact(h_TM), exact(residual_TM), rec.weights.norm)
    yield "final_norm", rec.of("final_norm", -1), final
    head = rec.bounds.head(exact(rec.of("final_norm", -1)), rec.weights.head)
    yield "logits", rec.of("logits", -1), rec.stored(head)


def _attention(rec: Recording, w: LayerWeights, layer: int) -> Iterator[Compared]:
    b, positions_T = rec.bounds, rec.of("positions", -1)
    a_TM = exact(rec.of("attn_in", layer))
    qr_TL = b.query_latent(a_TM, w.attn)
    yield f"latent {layer}", rec.of("latent", layer), b.latents(a_TM, w.attn, positions_T)
    latent_TD = exact(rec.of("latent", layer))
    kept = stored(latent_TD) if rec.kv_scales is None else static_quant(latent_TD, rec.kv_scales[1])
    yield f"cached {layer}", rec.of("cached", layer), kept
    yield from _indexer(rec, w, layer)
    uk_HNC, uv_HVC = up_matrices(rec.config, w)
    nope, turned = b.queries(qr_TL, w.attn, positions_T)
    qa_HTC = rec.stored(linear_bounds.matmul(nope.apply(lambda t: t.transpose(0, 1)), uk_HNC, ARITH))
    q_THD = _join(qa_HTC.apply(lambda t: t.transpose(0, 1)), turned)
    narrow = q_THD if rec.precision.bf16 else stored(q_THD)
    received = narrow if rec.kv_scales is None else static_quant(q_THD, rec.kv_scales[0])
    yield f"attn_q {layer}", rec.of("attn_q", layer), received
    yield f"attn_z {layer}", rec.of("attn_z", layer), attended(rec, layer)
    z_HTC = exact(rec.of("attn_z", layer).transpose(0, 1))
    o_HTV = rec.stored(linear_bounds.matmul(z_HTC, uv_HVC.transposed(), ARITH))
    yield f"attn_out {layer}", rec.of("attn_out", layer), b.output(o_HTV.apply(lambda t: t.transpose(0, 1)), w.attn)


def up_matrices(config: Config, w: LayerWeights) -> tuple[Approx, Approx]:
    """UK and UV; of block fp8 the values that a product in fp32 and one rounding to bf16 give."""
    matrix = w.attn.wkv_b
    dense = matrix if isinstance(matrix, Tensor) else matrix.dequantise(torch.float32).bfloat16()
    per_head = dense.reshape(config.n_heads, -1, config.kv_lora_rank)
    return exact(per_head[:, : config.qk_nope_head_dim]), exact(per_head[:, config.qk_nope_head_dim :])


def attended(rec: Recording, layer: int) -> Approx:
    """attn_z from the recorded queries and the tokens that the row should have attended."""
    q_THD, kv_TKD = exact(rec.of("attn_q", layer)), exact(rec.of("kv", layer))
    fp8 = rec.kv_scales is not None
    scores = attention_bounds.scores(q_THD, kv_TKD, rec.config.softmax_scale, ARITH, scalars=3 if fp8 else 1)
    outside = (rec.of("attended", layer) < 0)[:, None].expand(scores.value.shape)
    scores = Approx(scores.value.masked_fill(outside, -torch.inf), scores.err.masked_fill(outside, 0.0))
    keys = kv_TKD.value.shape[1]
    form = SoftmaxForm(p_format=E4M3FN if fp8 else BF16, splits=keys, rescales=keys)
    v_TKC = kv_TKD.apply(lambda t: t[..., : rec.config.kv_lora_rank])
    v_TKC = Approx(v_TKC.value, v_TKC.value.abs() * ARITH.u) if fp8 else v_TKC
    return stored(attend(scores, v_TKC, ARITH, form)[0])


def static_quant(x: Approx, scale: float) -> Approx:
    """e4m3 with a given fp32 scale, dequantised, against x itself.

    The quotient, or the reciprocal and the product, and the product with the scale are four roundings at most. Beyond
    448 scales x saturates, so the excess is lost. `attn_q` and `cached` are compared dequantised in fp64 or in fp32.
    """
    high = x.high / scale * (1.0 + 4.0 * ARITH.u)
    step = E4M3FN.half_ulp(high.clamp(max=E4M3FN.max)) + (high - E4M3FN.max).clamp(min=0.0)
    own = 4.0 * ARITH.u * x.high + 2.0 * ARITH.eta_mul * (1.0 + scale)
    return Approx(x.value, x.err + scale * step + own)


def index_pairs(rec: Recording, layer: int) -> tuple[Approx, Approx]:
    """Queries [T, J, I], dequantised, and head weights [T, J] without the query scales, from the layer's input."""
    b, config, index = rec.bounds, rec.config, rec.weights.layers[layer].indexer
    a_TM = exact(rec.of("attn_in", layer))
    qr_TL = b.query_latent(a_TM, rec.weights.layers[layer].attn)
    q_TJI = b.linear(qr_TL, index.wq_b).apply(lambda t: t.reshape(len(t), config.index_n_heads, -1))
    weights_TJ = b.linear(a_TM, index.weights_proj)
    for width in (config.index_head_dim, config.index_n_heads):
        weights_TJ = scale_by(weights_TJ, width**-0.5, ARITH)
    return _fp8_head(rec, q_TJI, amax_floor=1e-10), weights_TJ


def _indexer(rec: Recording, w: LayerWeights, layer: int) -> Iterator[Compared]:
    b, config, index, positions_T = rec.bounds, rec.config, w.indexer, rec.of("positions", -1)
    scale_TJ, w_TJ = rec.of("index_q_scale", layer), rec.of("index_w", layer)
    q_TJI, weights_TJ = index_pairs(rec, layer)
    yield f"index_q {layer}", rec.of("index_q", layer).double() * scale_TJ.double()[..., None], q_TJI
    yield f"index_w {layer}", w_TJ, mul(weights_TJ, exact(scale_TJ), ARITH)
    gain, bias = exact(index.k_norm_weight), exact(index.k_norm_bias)
    normed = norm_bounds.layer_norm(
        b.linear(exact(rec.of("attn_in", layer)), index.wk), gain, bias, config.norm_eps, ARITH
    )
    own = torch.arange(len(positions_T)), positions_T
    keys, scales = rec.of("keys", layer), rec.of("key_scales", layer)
    cached = keys[own].double() * scales[own].double()[:, None]
    yield f"index_key {layer}", cached, _fp8_head(rec, rec.stored(normed), amax_floor=1e-4)
    scores = index_scores(exact(rec.of("index_q", layer)), exact(w_TJ), exact(keys), exact(scales))
    seen = torch.arange(keys.shape[1]) <= positions_T[:, None]
    computed = rec.of("index_score", layer)
    assert bool((computed[~seen] == -torch.inf).all()), f"index_score {layer} shows a column beyond a row's own"
    yield f"index_score {layer}", computed[seen], scores.apply(lambda t: t[seen])


def _fp8_head(rec: Recording, x: Approx, amax_floor: float) -> Approx:
    """RoPE on the first part, then e4m3 with one power-of-two scale per head."""
    rope, positions_T = rec.config.qk_rope_head_dim, rec.of("positions", -1)
    turned = rec.bounds.turned(x.apply(lambda t: t[..., :rope]), positions_T, "half-split")
    whole = _join(turned, x.apply(lambda t: t[..., rope:]))
    rule = quant_bounds.ScaleRule(block=rec.config.index_head_dim, amax_floor=amax_floor)
    return quant_bounds.fake_quant(whole, rule, ARITH)


def index_scores(q_TJI: Approx, w_TJ: Approx, k_TSI: Approx, scale_TS: Approx) -> Approx:
    """As `dsv32_ref.bounds.indexer.index_scores`, with keys of their own for every row."""
    hits = relu(linear_bounds.matmul(q_TJI, k_TSI.transposed(), ARITH))
    total = linear_bounds.matmul(w_TJ.apply(lambda t: t[:, None]), hits, ARITH, roundings=1)
    return mul(total.apply(lambda t: t[:, 0]), scale_TS, ARITH)


def _feed_forward(rec: Recording, w: LayerWeights, layer: int) -> Iterator[Compared]:
    x_TM = exact(rec.of("ffn_in", layer))
    if isinstance(w.ffn, MlpWeights):
        yield f"ffn_out {layer}", rec.of("ffn_out", layer), rec.bounds.mlp(x_TM, w.ffn)
        return
    logits = rec.bounds.gate_logits(x_TM, w.ffn.gate)
    logits_TE = rec.of("gate_logits", layer)
    narrow = torch.bfloat16 in (logits_TE.dtype, rec.gate_store)
    yield f"gate_logits {layer}", logits_TE, stored(logits) if narrow else logits
    chosen_TK, weights_TK = rec.of("routed", layer).long(), rec.of("gate_w", layer)
    yield f"gate_w {layer}", weights_TK, kernel_weights(exact(logits_TE), rec.bias(layer), chosen_TK, rec.config)
    yield f"ffn_out {layer}", rec.of("ffn_out", layer), mixture(rec, x_TM, chosen_TK, exact(weights_TK), w.ffn)


def kernel_weights(logits_TE: Approx, bias_E: Tensor, chosen_TK: Tensor, config: Config) -> Approx:
    """Weights from scores that went through (score + bias) - bias."""
    bias = exact(bias_E)
    biased_TE = router_bounds.router_scores(logits_TE, bias, ARITH)[1]
    scores_TE = add(biased_TE, Approx(-bias.value, bias.err), ARITH)
    return router_bounds.expert_weights(scores_TE, chosen_TK, config.route_scale, ARITH)


def mixture(rec: Recording, x_TM: Approx, chosen_TK: Tensor, weights_TK: Approx, w: MoeWeights) -> Approx:
    """Routed and shared experts, and their sum, each rounded."""
    shape = (*chosen_TK.shape, x_TM.value.shape[1])
    value, err = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
    for expert in sorted(set(chosen_TK.flatten().tolist())):
        rows, ranks = torch.where(chosen_TK == expert)
        part = _routed_expert(rec, x_TM.map(rows), w.experts[expert])
        value[rows, ranks], err[rows, ranks] = part.value, part.err
    routed = rec.stored(moe_bounds.combine(Approx(value, err), weights_TK, None, ARITH))
    assert w.shared is not None
    return rec.stored(add(routed, rec.bounds.mlp(x_TM, w.shared), ARITH))


def _routed_expert(rec: Recording, x_TM: Approx, w: MlpWeights) -> Approx:
    gate, up = (_unrounded(rec, x_TM, part) for part in (w.w1, w.w3))
    return _unrounded(rec, rec.stored(mul(silu(gate, ARITH), up, ARITH)), w.w2)


def _unrounded(rec: Recording, x: Approx, weight: Matrix) -> Approx:
    """A linear whose fp32 sum is not rounded; fp8 costs two more roundings per term, as in `StageBounds.linear`."""
    if isinstance(weight, Tensor):
        return linear_bounds.linear(x, exact(weight), ARITH)
    dense = exact(weight.dequantise(torch.float64))
    return linear_bounds.linear(rec.bounds.quantised(x), dense, ARITH, roundings=2)


def expert_choices(rec: Recording, layer: int) -> Certificate:
    """Is the kernel's choice the one that its own logits and bias call for?"""
    logits_TE, bias_E, config = rec.of("gate_logits", layer).float(), rec.bias(layer), rec.config
    biased = router_bounds.router_scores(exact(logits_TE), exact(bias_E), ARITH)[1]
    return certify_router(
        biased.value,
        biased.err,
        choose_experts(logits_TE, bias_E, config),
        rec.of("gate_idx", layer).long(),
        groups=config.n_expert_groups,
        kept=config.n_limited_groups,
        arith=ARITH,
    )


def ideal_biased(rec: Recording, layer: int) -> tuple[Approx, Tensor]:
    """Biased scores of the ideal fp32 router on the layer's input, and the choice that they call for.

    The error holds what the options permit: logits stored in bf16, and the distance of each bias from its bf16 value.
    """
    ffn = rec.weights.layers[layer].ffn
    assert isinstance(ffn, MoeWeights)
    logits = rec.bounds.gate_logits(exact(rec.of("ffn_in", layer)), ffn.gate)
    ideal = choose_experts(logits.value, ffn.gate.bias.double(), rec.config)
    if torch.bfloat16 in (rec.of("gate_logits", layer).dtype, rec.gate_store):
        logits = stored(logits)
    moved = (ffn.gate.bias.double() - rec.bias(layer).double()).abs()
    return router_bounds.router_scores(logits, Approx(ffn.gate.bias.double(), moved), ARITH)[1], ideal


def _join(a: Approx, b: Approx) -> Approx:
    return Approx(torch.cat([a.value, b.value], -1), torch.cat([a.err, b.err], -1))
