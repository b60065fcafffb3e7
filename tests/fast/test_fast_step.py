"""The step around its stages: casts per step, padding, prompts in chunks, and bad input."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Literal

import pytest
import torch
from fast_worlds import KERNELS, PATH, SMALL, path, weights
from torch import Tensor

from dsv32_fast.kernels.protocol import Kernels
from dsv32_fast.kernels.selection import Admits
from dsv32_fast.options import Options
from dsv32_fast.path import STAGES, DecodePath, PathConfig
from dsv32_ref import decode as reference
from dsv32_ref.config import Config
from dsv32_ref.moe import MoeWeights
from dsv32_ref.state import Model, State
from dsv32_ref.weights import Weights, assemble, synthetic

of_the_small_world = pytest.mark.admits(Admits(topk=16))
"""For sizes and messages that are those of the small world."""
bits_of_a_row = pytest.mark.admits(Admits(emulation="bits of a product may depend on the number of its rows"))
"""In the small world they do not; at larger widths BLAS cuts the sums otherwise for other numbers of rows."""
SLOTS = 4 * PATH.page_size
DEEP = Config(
    vocab_size=16,
    dim=16,
    inter_dim=16,
    moe_inter_dim=8,
    n_heads=1,
    n_routed_experts=4,
    n_expert_groups=2,
    n_limited_groups=1,
    n_activated_experts=2,
    q_lora_rank=8,
    kv_lora_rank=8,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=8,
    index_n_heads=1,
    index_head_dim=8,
    index_topk=4,
)
"""The 61 layers of the real model, three of them dense, as thin as they go."""


@functools.cache
def _deep() -> Weights:
    return assemble(DEEP, synthetic(DEEP, 0))


@of_the_small_world
@pytest.mark.parametrize(("logits", "casts"), [("fp32", 58), ("bf16", 0)])
@pytest.mark.parametrize("gemm", ["fp32", "bf16"])
def test_router_casts_per_step(logits: Literal["fp32", "bf16"], casts: int, gemm: Literal["fp32", "bf16"]) -> None:
    """One bf16-to-fp32 cast per mixture layer: the 58 launches per step that #42982 removed (61 layers less 3)."""
    assert (DEEP.n_layers, DEEP.n_dense_layers) == (61, 3)
    sizes = PathConfig(max_num_batched_tokens=8, page_size=16, gate_gemm=gemm)
    run = DecodePath(DEEP, _deep(), Options(logits=logits), KERNELS, sizes)
    state = run.new_state(32)
    for step, tokens in enumerate(({0: (1, 2), 1: (3,)}, {0: (4,), 1: (5,)}), 1):
        run.decode(state, tokens)
        assert run.casts.bf16_to_fp32 == step * casts


@bits_of_a_row
def test_padding_rows_are_not_seen_and_do_not_act(kernels: Kernels) -> None:
    """Stages hold live rows only, whatever NaN the padding rows carry; up to the attention they are equal bit for bit.

    Behind it the padding may cut the plan, hence the sums, differently; there the bounds of the other tests hold.
    """
    seen: dict[int, dict[tuple[str, int], Tensor]] = {}
    for padded in (0, 8):
        values: dict[tuple[str, int], Tensor] = {}
        run = path(Options(), kernels)
        run.decode(run.new_state(SLOTS), {0: (1, 2, 3), 1: (4,)}, padded_rows=padded, tap=_keep(values))
        seen[padded] = values
    for (stage, layer), value in seen[0].items():
        assert value.shape == seen[8][stage, layer].shape, stage
        assert bool(seen[8][stage, layer].float().isfinite().all()) or stage == "index_score", (stage, layer)
        if layer == 0 and STAGES.index(stage) < STAGES.index("attn_z"):
            assert torch.equal(value, seen[8][stage, layer]), stage


def _keep(values: dict[tuple[str, int], Tensor]) -> Callable[[str, int, Tensor], Tensor]:
    def tap(stage: str, layer: int, value: Tensor) -> Tensor:
        values[stage, layer] = value
        return value

    return tap


def test_stages_are_those_of_the_reference_in_its_order() -> None:
    ours: dict[tuple[str, int], Tensor] = {}
    run = path(Options(), KERNELS)
    run.decode(run.new_state(SLOTS), {0: (1, 2, 3)}, tap=_keep(ours))
    trace = reference.Trace()
    model = Model(config=SMALL, weights=weights())
    reference.decode(model, State(model, SLOTS), {0: (1, 2, 3)}, tap=trace)
    assert {stage for stage, _ in ours} == set(STAGES)
    common = [stage for stage in reference.STAGES if stage in STAGES]
    assert [stage for stage in STAGES if stage in common] == common
    assert set(reference.STAGES) - set(common) == {"index_key", "index_scale"}, "rotated keys have no counterpart"
    for stage, layer in ours:
        if stage in common:
            assert ours[stage, layer].shape == trace.values[stage, layer].shape, stage


@bits_of_a_row
@pytest.mark.parametrize("chunk", [3, 5, 17])
def test_a_prompt_in_chunks_leaves_the_same_caches(kernels: Kernels, chunk: int) -> None:
    """Layer 0 caches what the token and its position say, however the prompt is cut (17: one step, gathered keys)."""
    prompt = tuple(range(1, 18))
    whole, cut = path(Options(), kernels), path(Options(), kernels)
    states = whole.new_state(SLOTS), cut.new_state(SLOTS)
    for token in prompt:
        whole.decode(states[0], {0: (token,)})
    for start in range(0, len(prompt), chunk):
        out = cut.decode(states[1], {0: prompt[start : start + chunk]})
    slots = [state.slots(0) for state in states]
    latents = [state.latent[0].flatten(0, 1)[at].float() for state, at in zip(states, slots, strict=True)]
    assert torch.equal(latents[0], latents[1])
    assert out.logits.shape == (1, SMALL.vocab_size)


@pytest.mark.parametrize(("tokens", "padded"), [({}, 0), ({}, 8), ({0: ()}, 8), ({0: (), 1: (5,)}, 8)])
def test_steps_with_little_or_nothing_in_them(
    kernels: Kernels, tokens: dict[int, tuple[int, ...]], padded: int
) -> None:
    """Idle steps and idle requests (as a data-parallel rank has them) leave the caches alone and give NaN logits."""
    run = path(Options(), kernels)
    state = run.new_state(SLOTS)
    run.decode(state, {0: (1, 2, 3)})
    slots = state.slots(0)
    before = state.latent[0].flatten(0, 1)[slots].clone()
    out = run.decode(state, tokens, padded_rows=padded)
    assert out.final_norm.shape == (sum(len(ids) for ids in tokens.values()), SMALL.dim)
    for row, ids in zip(out.logits, tokens.values(), strict=True):
        assert bool(row.isnan().all()) == (len(ids) == 0)
    assert torch.equal(state.latent[0].flatten(0, 1)[slots], before)


def test_a_stage_can_be_replaced(kernels: Kernels) -> None:
    """The reference's value of a stage goes on in the path, in the path's type."""

    def tap(stage: str, layer: int, value: Tensor) -> Tensor:
        return torch.zeros_like(value, dtype=torch.float64) if (stage, layer) == ("ffn_out", 1) else value

    values: dict[tuple[str, int], Tensor] = {}
    run = path(Options(), kernels)
    out = run.decode(run.new_state(SLOTS), {0: (1, 2)}, tap=lambda *stage: _keep(values)(*stage[:2], tap(*stage)))
    residual_TM = values["residual", 1].float()
    norm_TM = residual_TM * (residual_TM.square().mean(-1, keepdim=True) + SMALL.norm_eps).rsqrt() * weights().norm
    torch.testing.assert_close(out.final_norm.float(), norm_TM, rtol=2.0**-8, atol=0)


def _run(tokens: dict[int, tuple[int, ...]], slots: int = 64, **arguments: int) -> None:
    run = path(Options(), KERNELS)
    state = run.new_state(slots)
    run.decode(state, {0: (1,)})
    before = dict(state.tokens), {r: list(p) for r, p in state.pages.items()}, list(state.free)
    try:
        run.decode(state, tokens, **arguments)
    finally:
        assert (state.tokens, state.pages, state.free) == before, "an error changed the state"


@of_the_small_world
@pytest.mark.parametrize(
    ("tokens", "arguments", "message"),
    [
        ({0: (96,)}, {}, r"request 0 has a token outside \[0, 96\)"),
        ({0: (-1,)}, {}, "token outside"),
        ({5: (1,) * 60}, {"slots": 16}, "n_slots: the step needs 4 pages and 0 are free"),
        ({0: (1,) * 60}, {"padded_rows": 80}, "80 rows, above max_num_batched_tokens 64"),
        ({0: (1,) * 65}, {}, "65 rows, above max_num_batched_tokens 64"),
        ({0: (1, 2)}, {"padded_rows": 1}, "num_tokens 1 is below the 2 query tokens"),
    ],
)
def test_bad_steps_are_refused_and_change_nothing(
    tokens: dict[int, tuple[int, ...]], arguments: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        _run(tokens, **arguments)


@of_the_small_world
def test_a_sequence_beyond_the_model_is_refused() -> None:
    run = path(Options(), KERNELS)
    state = run.new_state(512)
    for _ in range(4):
        run.decode(state, {0: (1,) * 60})
    with pytest.raises(ValueError, match="request 0 would reach 300 tokens; max_seq_len is 256"):
        run.decode(state, {0: (1,) * 60})


@of_the_small_world
def test_other_bad_input_is_refused() -> None:
    run = path(Options(), KERNELS)
    with pytest.raises(ValueError, match=r"tap: attn_in of layer 0 is \(1, 3\); give \(2, 128\)"):
        run.decode(run.new_state(64), {0: (1, 2)}, tap=lambda *_: torch.zeros(1, 3))
    with pytest.raises(ValueError, match=r"choose torch\.bfloat16 or torch\.float32"):
        PathConfig(activations=torch.float16)
    with pytest.raises(ValueError, match="n_slots 0 and page_size 16 must be positive"):
        run.new_state(0)
    state = run.new_state(64)
    for change in (lambda: state.truncate(3, 0), lambda: state.release(3)):
        with pytest.raises(ValueError, match="request 3 is not here"):
            change()
    run.decode(state, {3: (1, 2)})
    with pytest.raises(ValueError, match="length 5: request 3 has 2 tokens"):
        state.truncate(3, 5)
    three = SMALL.replace(n_heads=3)
    odd = DecodePath(three, assemble(three, synthetic(three, 0)), Options(), KERNELS, PATH)
    with pytest.raises(ValueError, match="n_heads 3 does not divide 16"):
        odd.decode(odd.new_state(64), {0: (1,)})


def test_all_experts_are_needed() -> None:
    model = weights()
    ffn = model.layers[1].ffn
    assert isinstance(ffn, MoeWeights)
    fewer = dataclasses.replace(ffn, experts={e: w for e, w in ffn.experts.items() if e != 9})
    layers = (model.layers[0], dataclasses.replace(model.layers[1], ffn=fewer))
    with pytest.raises(ValueError, match=r"layers\.1\.ffn\.experts\.9 is missing"):
        DecodePath(SMALL, dataclasses.replace(model, layers=layers), Options(), KERNELS, PATH)
