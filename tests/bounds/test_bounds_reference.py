"""The reference's own stages, run in fp32 under each precision, lie within their bounds; faulty ones do not."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from bounds_inputs import generator
from torch import Tensor

from dsv32_ref import indexer, mla, moe, norm, router
from dsv32_ref.bounds import Approx, certify_router, certify_topk, exact, judge
from dsv32_ref.bounds.stages import StageBounds
from dsv32_ref.config import BF16_Q, FP8, FP32, FP32_Q, GOLDEN, Precision
from dsv32_ref.rope import rope_table
from dsv32_ref.weights import LayerWeights, assemble, quantise, synthetic

T, S = 12, 48
BF16_ONLY = Precision(bf16=True)
SCALES_FP32 = dataclasses.replace(BF16_Q, scale_format="fp32")
PRECISIONS = {
    "fp32": FP32,
    "bf16": BF16_ONLY,
    "fp32_q": FP32_Q,
    "bf16_q": BF16_Q,
    "bf16_q, fp32 scales": SCALES_FP32,
    "fp8": FP8,
}


@pytest.fixture(scope="module")
def plain() -> LayerWeights:
    return assemble(GOLDEN, synthetic(GOLDEN, seed=3)).layers[1]


@pytest.fixture(scope="module")
def block_fp8() -> LayerWeights:
    return assemble(GOLDEN, quantise(synthetic(GOLDEN, seed=3))).layers[1]


def _x(width: int, seed: int, count: int = T) -> Tensor:
    return torch.randn(count, width, generator=generator(seed)).bfloat16().float()


def _positions(count: int = T) -> Tensor:
    return torch.randint(0, GOLDEN.max_seq_len, (count,), generator=generator(99))


def stages(w: LayerWeights, p: Precision, b: StageBounds) -> Iterator[tuple[str, Tensor, Approx]]:
    """(name, computed, bound) of every stage, each from exactly known inputs."""
    c, at = GOLDEN, _positions()
    table = rope_table(c, at)
    x, qr = _x(c.dim, 1), _x(c.q_lora_rank, 2)
    normed, kept = norm.add_rms_norm(x, _x(c.dim, 3), w.attn_norm, c.norm_eps, p)
    bound = b.add_rms_norm(exact(x), exact(_x(c.dim, 3)), w.attn_norm)
    yield "attn_in", normed, bound[0]
    yield "residual", kept, bound[1]
    yield "query latent", mla.query_latent(x, w.attn, c, p), b.query_latent(exact(x), w.attn)
    nope, turned = mla.queries(qr, w.attn, table, c, p)
    bound = b.queries(exact(qr), w.attn, at)
    yield "q nope", nope, bound[0]
    yield "q rope", turned, bound[1]
    yield "latent", mla.latents(x, w.attn, table, c, p), b.latents(exact(x), w.attn, at)
    kv = _x(c.kv_lora_rank + c.qk_rope_head_dim, 4, T * 16).reshape(T, 16, -1)
    valid = torch.rand(T, 16, generator=generator(5)) < 0.8
    valid[:, 0] = True
    qa = _x(c.kv_lora_rank, 6, T * c.n_heads).reshape(T, c.n_heads, -1) * 0.2
    out, lse = mla.attend(qa, turned, kv, valid, c.softmax_scale, p)
    bound = b.attend(exact(qa), exact(turned), exact(kv), valid)
    yield "attend", out, bound[0]
    yield "lse", lse, bound[1]
    heads = mla.absorbed(nope, turned, kv, valid, w.attn, c, p)
    yield "absorbed", heads, b.absorbed(exact(nope), exact(turned), exact(kv), valid, w.attn)
    yield "output", mla.output(heads, w.attn, p), b.output(exact(heads), w.attn)
    q8, scale = indexer.index_queries(qr, w.indexer, table, c, p)
    yield "index query", q8 * scale.unsqueeze(-1), b.index_queries(exact(qr), w.indexer, at)
    k8, k_scale = indexer.index_keys(x, w.indexer, table, c, p)
    yield "index key", k8 * k_scale.unsqueeze(-1), b.index_keys(exact(x), w.indexer, at)
    weights = indexer.head_weights(x, scale, w.indexer, c)
    score = indexer.index_scores(q8, weights, k8, k_scale)
    yield "index score", score, b.index_scores(exact(x), exact(qr), exact(k8), exact(k_scale), w.indexer, at)
    assert isinstance(w.ffn, moe.MoeWeights)
    logits = router.gate_logits(x, w.ffn.gate)
    yield "gate logits", logits, b.gate_logits(exact(x), w.ffn.gate)
    chosen = router.choose_experts(logits, w.ffn.gate.bias, c)
    gate_w = router.expert_weights(logits, chosen, c)
    yield "gate weights", gate_w, b.expert_weights(exact(logits), chosen)
    yield "mlp", moe.mlp(x, w.ffn.experts[0], p), b.mlp(exact(x), w.ffn.experts[0])
    yield "ffn_out", moe.mixture(x, chosen, gate_w, w.ffn, p), b.mixture(exact(x), chosen, exact(gate_w), w.ffn)


@pytest.mark.parametrize("simulated", [False, True])
@pytest.mark.parametrize("name", PRECISIONS)
def test_every_stage_lies_within_its_bound(
    name: str, simulated: bool, plain: LayerWeights, block_fp8: LayerWeights
) -> None:
    precision = PRECISIONS[name]
    w = block_fp8 if precision.linear_fp8 else plain
    seen = 0
    for stage, computed, bound in stages(
        w, precision, StageBounds(config=GOLDEN, precision=precision, simulated=simulated)
    ):
        budget = judge(computed, bound)
        assert budget.passed, budget.describe(stage)
        seen += 1
    assert seen == 17


def test_simulated_bounds_are_far_tighter_than_ideal_ones(plain: LayerWeights) -> None:
    def median(simulated: bool) -> dict[str, float]:
        b = StageBounds(config=GOLDEN, precision=FP32_Q, simulated=simulated)
        return {stage: float(bound.err.median()) for stage, _, bound in stages(plain, FP32_Q, b)}

    ideal, like = median(False), median(True)
    assert like["latent"] < 1e-2 * ideal["latent"]
    assert like["index key"] < 1e-2 * ideal["index key"]


def _judged(stage: str, computed: Tensor, w: LayerWeights, p: Precision, simulated: bool = False) -> float:
    b = StageBounds(config=GOLDEN, precision=p, simulated=simulated)
    bound = next(bound for name, _, bound in stages(w, p, b) if name == stage)
    return judge(computed, bound).worst


def test_faulty_stages_exceed_the_bounds(plain: LayerWeights) -> None:
    """In bf16, against the ideal reference: the gate needs no simulated rounding for these."""
    c, x, at, p = GOLDEN, _x(GOLDEN.dim, 1), _positions(), BF16_ONLY
    table, stale = rope_table(c, at), rope_table(c, (at - 1).clamp_min(0))
    assert _judged("latent", mla.latents(x, plain.attn, stale, c, p), plain, p) > 5
    keys = indexer.index_keys(x, plain.indexer, stale, c, p)[0]
    assert _judged("index key", keys, plain, p) > 1
    no_bias = dataclasses.replace(plain.indexer, k_norm_bias=torch.zeros_like(plain.indexer.k_norm_bias))
    assert _judged("index key", indexer.index_keys(x, no_bias, table, c, p)[0], plain, p) > 1
    assert isinstance(plain.ffn, moe.MoeWeights)
    logits = router.gate_logits(x, plain.ffn.gate)
    assert _judged("gate logits", logits.bfloat16().float(), plain, p) > 20
    chosen = router.choose_experts(logits, plain.ffn.gate.bias, c)
    biased = (logits.sigmoid() + plain.ffn.gate.bias).gather(1, chosen)
    assert _judged("gate weights", biased / biased.sum(-1, keepdim=True) * 2.5, plain, p) > 1000
    unshared = moe.mixture(
        x, chosen, router.expert_weights(logits, chosen, c), dataclasses.replace(plain.ffn, shared=None), p
    )
    assert _judged("ffn_out", unshared, plain, p) > 1


def test_choices_of_the_reference_are_certified(plain: LayerWeights) -> None:
    """fp32 against float64, which both are legal; a bf16 bias is not, wherever it decides."""
    assert isinstance(plain.ffn, moe.MoeWeights)
    b, gate, c = StageBounds(config=GOLDEN), plain.ffn.gate, GOLDEN
    x = _x(c.dim, 8, 400)
    bound = b.biased_scores(b.gate_logits(exact(x), gate), gate)
    wide = router.choose_experts(x.double() @ gate.weight.double().T, gate.bias.double(), c)
    logits = router.gate_logits(x, gate)
    fp32 = router.choose_experts(logits, gate.bias, c)
    certify = {"groups": c.n_expert_groups, "kept": c.n_limited_groups, "arith": b.arith}
    assert certify_router(bound.value, bound.err, wide, fp32, **certify).passed  # type: ignore[arg-type]
    coarse = router.choose_experts(logits, gate.bias.bfloat16().float(), c)
    got = certify_router(bound.value, bound.err, wide, coarse, **certify)  # type: ignore[arg-type]
    flipped = got.flips > 0
    assert int(flipped.sum()) > 5
    assert not bool(got.legal[flipped].any())


def test_index_choices_are_certified(plain: LayerWeights) -> None:
    c, b, at = GOLDEN, StageBounds(config=GOLDEN), _positions()
    x, qr, many = _x(c.dim, 1), _x(c.q_lora_rank, 2), _x(c.dim, 9, S)
    table = rope_table(c, at)
    keys, scale = indexer.index_keys(many, plain.indexer, rope_table(c, torch.arange(S)), c)
    bound = b.index_scores(exact(x), exact(qr), exact(keys), exact(scale), plain.indexer, at)
    q, q_scale = indexer.index_queries(qr, plain.indexer, table, c)
    score = indexer.index_scores(q, indexer.head_weights(x, q_scale, plain.indexer, c), keys, scale)
    ref = bound.value.topk(16, -1).indices
    assert certify_topk(bound.value, bound.err, ref, score.topk(16, -1).indices).passed
    stale = indexer.index_queries(qr, plain.indexer, rope_table(c, (at - 1).clamp_min(0)), c)[0]
    wrong = indexer.index_scores(stale, indexer.head_weights(x, q_scale, plain.indexer, c), keys, scale)
    got = certify_topk(bound.value, bound.err, ref, wrong.topk(16, -1).indices)
    assert int((~got.legal).sum()) >= 3  # the other rows kept their set, or flipped a near tie
