"""transformers' DeepseekV32ForCausalLM, run live on fresh random worlds, agrees with the reference in fp32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from dsv32_ref.bounds import Certificate, approx, certify_router, certify_topk
from dsv32_ref.bounds.stages import StageBounds
from dsv32_ref.config import GOLDEN, Config
from dsv32_ref.decode import decode, prefill
from dsv32_ref.moe import MoeWeights
from dsv32_ref.rope import rope_interleaved
from dsv32_ref.state import Model, State
from dsv32_ref.weights import assemble, synthetic

pytest.importorskip("transformers", reason="needs the oracle extra")
from dsv32_fuzz.golden.decodes import tolerance
from dsv32_fuzz.golden.oracle import hf_model

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore::FutureWarning")]


@st.composite
def worlds(draw: st.DrawFn) -> Config:
    groups = draw(st.sampled_from([1, 2, 4]))
    experts = groups * draw(st.sampled_from([2, 4]))
    kept = draw(st.integers(1, groups))
    return Config(
        vocab_size=97,
        dim=draw(st.sampled_from([32, 96])),
        inter_dim=48,
        moe_inter_dim=draw(st.sampled_from([16, 40])),
        n_layers=draw(st.integers(1, 3)),
        n_dense_layers=draw(st.integers(0, 1)),
        n_heads=draw(st.integers(1, 5)),
        n_routed_experts=experts,
        n_shared_experts=draw(st.integers(1, 2)),
        n_activated_experts=draw(st.integers(1, experts // groups * kept)),
        n_expert_groups=groups,
        n_limited_groups=kept,
        q_lora_rank=draw(st.sampled_from([24, 64])),
        kv_lora_rank=draw(st.sampled_from([32, 64])),
        qk_nope_head_dim=draw(st.sampled_from([8, 16])),
        qk_rope_head_dim=draw(st.sampled_from([4, 16])),
        v_head_dim=draw(st.sampled_from([8, 24])),
        index_n_heads=draw(st.integers(1, 4)),
        index_head_dim=draw(st.sampled_from([16, 64])),
        index_topk=draw(st.integers(1, 24)),
        max_seq_len=256,
        original_seq_len=draw(st.sampled_from([32, 256])),
        rope_factor=8.0,
    )


class Choices:
    """transformers' choices of one forward pass, and a tap that holds the reference's against them.

    Where the two differ it must be by a certified tie: scores that the fp32 tolerance may exchange (ReLU makes exact
    ties: a score of 0 for every token that no head likes). The reference then goes on with transformers' choice, so
    that values compare.
    """

    def __init__(self, oracle: Any, model: Model) -> None:
        self.model = model
        self.topk: list[Tensor] = []
        self.experts: list[Tensor] = []
        self.last: dict[str, Tensor] = {}
        self.compared = self.ties = 0
        for name, module in oracle.named_modules():
            if name.endswith(".indexer"):
                module.register_forward_hook(lambda _m, _i, out: self.topk.append(out.flatten(0, 1).long()))
            if name.endswith(".mlp.gate"):
                module.register_forward_hook(lambda _m, _i, out: self.experts.append(out[2]))

    def start(self, positions: Tensor) -> None:
        self.positions = positions
        self.topk.clear()
        self.experts.clear()

    def __call__(self, stage: str, layer: int, value: Tensor) -> Tensor:
        self.last[stage] = value
        if stage == "index_topk":
            theirs = self.topk[layer]
            hidden = theirs > self.positions[:, None]
            theirs = theirs.masked_fill(hidden, -1).sort(-1, descending=True).values
            theirs = torch.nn.functional.pad(theirs, (0, value.shape[1] - theirs.shape[1]), value=-1)
            scores = self.last["index_score"]
            valid = torch.arange(scores.shape[1]) <= self.positions[:, None]
            err = tolerance(scores).masked_fill(~valid, 0.0)
            return self.accept(stage, layer, theirs, certify_topk(scores, err, value, theirs, valid=valid))
        if stage == "gate_idx":
            ffn = self.model.weights.layers[layer].ffn
            assert isinstance(ffn, MoeWeights)
            theirs, logits = self.experts[layer - self.model.config.n_dense_layers], self.last["gate_logits"]
            config, bounds = self.model.config, StageBounds(config=self.model.config)
            biased = bounds.biased_scores(approx(logits, tolerance(logits)), ffn.gate)
            groups = {"groups": config.n_expert_groups, "kept": config.n_limited_groups}
            found = certify_router(biased.value, biased.err, value, theirs, **groups, arith=bounds.arith)
            return self.accept(stage, layer, theirs, found)
        return value

    def accept(self, stage: str, layer: int, theirs: Tensor, certificate: Certificate) -> Tensor:
        assert certificate.passed, f"{stage} of layer {layer}: {certificate.describe(stage)}"
        self.compared += len(theirs)
        self.ties += int((certificate.flips > 0).sum())
        return theirs


def check(config: Config, prompt: int, seed: int) -> None:
    named = synthetic(config, seed)
    model, oracle = Model(config=config, weights=assemble(config, named)), hf_model(config, named)
    choices, state = Choices(oracle, model), State(model, 256)
    tokens = torch.randint(config.vocab_size, (2, prompt + 3), generator=torch.Generator().manual_seed(seed))
    past = None
    for start, stop in ((0, prompt), (prompt, prompt + 1), (prompt + 1, prompt + 2), (prompt + 2, prompt + 3)):
        choices.start(torch.arange(start, stop).repeat(2))
        with torch.no_grad():
            out = oracle(tokens[:, start:stop], cache=past, use_cache=True)
        past, ids = out.past_key_values, {b: row[start:stop].tolist() for b, row in enumerate(tokens)}
        ours = (decode if start else prefill)(model, state, ids, tap=choices).logits
        torch.testing.assert_close(ours, out.logits[:, -1], rtol=1e-5, atol=2e-5)
    n_moe = max(config.n_layers - config.n_dense_layers, 0)
    assert choices.compared == 2 * (prompt + 3) * (config.n_layers + n_moe)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow], phases=[Phase.generate])
@given(config=worlds(), prompt=st.integers(2, 40), seed=st.integers(0, 10_000))
def test_logits_and_every_choice_agree(config: Config, prompt: int, seed: int) -> None:
    check(config, prompt, seed)


@pytest.mark.nightly
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(config=worlds(), prompt=st.integers(2, 40), seed=st.integers(0, 10_000))
def test_logits_and_every_choice_agree_in_many_worlds(config: Config, prompt: int, seed: int) -> None:
    check(config, prompt, seed)


def test_the_oracle_sees_a_wrong_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison can fail: with interleaved indexer RoPE a set differs by more than a tie."""
    monkeypatch.setattr("dsv32_ref.indexer.rope_half_split", rope_interleaved)
    with pytest.raises(AssertionError, match="index_topk of layer 0"):
        check(GOLDEN, 40, 0)
