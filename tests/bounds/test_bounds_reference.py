"""The reference's own stages, run in fp32 under each precision, lie within their bounds; faulty ones do not."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from bounds_inputs import generator
from torch import Tensor

from dsv32_ref import indexer, mla, moe, router
from dsv32_ref.bounds import Approx, Arithmetic, certify_router, certify_topk, exact, judge
from dsv32_ref.bounds.stages import StageBounds
from dsv32_ref.bounds.utilisation import _Inputs, compare_stages, utilisation
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


def stages(w: LayerWeights, b: StageBounds) -> dict[str, tuple[Tensor, Approx]]:
    return {stage: (computed, bound) for stage, computed, bound in compare_stages(w, b, seed=1, tokens=T)}


def _drawn() -> tuple[Tensor, Tensor, Tensor]:
    """x, query latent and positions of `stages`."""
    draw = _Inputs(1, T)
    return draw.rows(GOLDEN.dim), draw.rows(GOLDEN.q_lora_rank), draw.positions(GOLDEN.max_seq_len)


@pytest.mark.parametrize("simulated", [False, True])
@pytest.mark.parametrize("name", PRECISIONS)
def test_every_stage_lies_within_its_bound(
    name: str, simulated: bool, plain: LayerWeights, block_fp8: LayerWeights
) -> None:
    precision = PRECISIONS[name]
    w = block_fp8 if precision.linear_fp8 else plain
    found = stages(w, StageBounds(config=GOLDEN, precision=precision, simulated=simulated))
    assert len(found) == 18
    for stage, (computed, bound) in found.items():
        budget = judge(computed, bound)
        assert budget.passed, budget.describe(stage)


def test_simulated_bounds_are_far_tighter_than_ideal_ones(plain: LayerWeights) -> None:
    def median(simulated: bool) -> dict[str, float]:
        b = StageBounds(config=GOLDEN, precision=FP32_Q, simulated=simulated)
        return {stage: float(bound.err.median()) for stage, (_, bound) in stages(plain, b).items()}

    ideal, like = median(False), median(True)
    assert like["latent"] < 1e-2 * ideal["latent"]
    assert like["index_key"] < 1e-2 * ideal["index_key"]


def test_faulty_stages_exceed_the_bounds(plain: LayerWeights) -> None:
    """In bf16, against the ideal reference: the gate needs no simulated rounding for these."""
    c, p = GOLDEN, BF16_ONLY
    bounds = stages(plain, StageBounds(config=c, precision=p))

    def used(stage: str, computed: Tensor) -> float:
        return judge(computed, bounds[stage][1]).worst

    x, _, at = _drawn()
    table, stale = rope_table(c, at), rope_table(c, (at - 1).clamp_min(0))
    assert used("latent", mla.latents(x, plain.attn, stale, c, p)) > 1
    keys = indexer.index_keys(x, plain.indexer, stale, c, p)[0]
    assert used("index_key", keys) > 1
    no_bias = dataclasses.replace(plain.indexer, k_norm_bias=torch.zeros_like(plain.indexer.k_norm_bias))
    assert used("index_key", indexer.index_keys(x, no_bias, table, c, p)[0]) > 1
    assert isinstance(plain.ffn, moe.MoeWeights)
    logits = router.gate_logits(x, plain.ffn.gate)
    assert used("gate_logits", logits.bfloat16().float()) > 1
    chosen = router.choose_experts(logits, plain.ffn.gate.bias, c)
    biased = (logits.sigmoid() + plain.ffn.gate.bias).gather(1, chosen)
    assert used("gate_w", biased / biased.sum(-1, keepdim=True) * 2.5) > 1
    unshared = moe.mixture(
        x, chosen, router.expert_weights(logits, chosen, c), dataclasses.replace(plain.ffn, shared=None), p
    )
    assert used("ffn_out", unshared) > 1


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
    c, b, many = GOLDEN, StageBounds(config=GOLDEN), _x(GOLDEN.dim, 9, S)
    x, qr, at = _drawn()
    table = rope_table(c, at)
    keys, scale = indexer.index_keys(many, plain.indexer, rope_table(c, torch.arange(S)), c)
    bound = b.index_scores(exact(x), exact(qr), exact(keys), exact(scale), plain.indexer, at)
    q, q_scale = indexer.index_queries(qr, plain.indexer, table, c)
    score = indexer.index_scores(q, indexer.head_weights(x, q_scale, plain.indexer, c), keys, scale)
    ref = bound.value.topk(16, -1).indices
    assert certify_topk(bound.value, bound.err, ref, score.topk(16, -1).indices).passed
    for wrong in (rope_table(c, (at - 1).clamp_min(0)), rope_table(c, torch.zeros_like(at))):
        q, q_scale = indexer.index_queries(qr, plain.indexer, wrong, c)
        score = indexer.index_scores(q, indexer.head_weights(x, q_scale, plain.indexer, c), keys, scale)
        got = certify_topk(bound.value, bound.err, ref, score.topk(16, -1).indices)
        assert not got.passed
        assert int(got.flips[got.first_illegal]) > 0  # type: ignore[index]


def test_utilisation_reports_every_stage_with_something_used() -> None:
    """In bf16 the rounding points alone use a visible share of every stage's bound, and the alarm form uses more."""
    hard = utilisation(GOLDEN, BF16_ONLY, tokens=8)
    assert len(hard) == 18
    assert all(0 < u.median <= u.worst <= 1 and u.elements > 0 for u in hard if u.stage != "gate_w")
    alarm = utilisation(GOLDEN, FP32, Arithmetic(delta=1e-9), tokens=8)
    fp32 = {u.stage: u.median for u in utilisation(GOLDEN, FP32, tokens=8)}
    assert all(u.median >= fp32[u.stage] and u.worst <= 1 for u in alarm)
    with pytest.raises(ValueError, match="mixture"):
        utilisation(dataclasses.replace(GOLDEN, n_layers=1), FP32)
