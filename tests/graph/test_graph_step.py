"""The whole decode step replayed: the bits of the eager step, through growing, shrinking and mixed batches."""

from __future__ import annotations

import copy

import pytest
import torch

from dsv32_fast.graph.faults import GraphFaultError
from dsv32_fast.graph.model import ModelGraphRunner
from dsv32_fast.graph.step import GraphedDecode
from dsv32_fast.kernels.mounted import EMULATION
from dsv32_fast.options import PRESETS, Options
from dsv32_fast.path import DecodePath, PathConfig
from dsv32_fast.state import CacheState
from dsv32_ref.config import Config
from dsv32_ref.weights import assemble, synthetic

TINY = Config(
    vocab_size=64,
    dim=64,
    inter_dim=64,
    moe_inter_dim=16,
    n_layers=2,
    n_dense_layers=1,
    n_heads=16,
    q_lora_rank=32,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=16,
    index_n_heads=2,
    index_head_dim=32,
    index_topk=16,
    max_seq_len=256,
    original_seq_len=32,
    rope_factor=8.0,
)
WEIGHTS = assemble(TINY, synthetic(TINY, 0))
MODEL_LEN = 64
PROMPTS = {0: tuple(range(1, 15)), 1: (3, 4, 5), 2: tuple(range(20, 40))}
STEPS = (
    {0: (1,), 1: (2,), 2: (3,)},
    {0: (4, 5, 6, 7), 1: (8,), 2: (9, 10)},  # verified drafts: request 0 crosses topk, seven rows of eight
    {0: (11,), 2: (12,)},
    {1: (13,)},
    {0: (), 1: (14, 15, 16), 2: (17,)},  # request 0 idles
    {0: (18,), 1: (19,), 2: (20, 21)},
    {3: (5,), 0: (22,)},  # a new request
    {3: (6, 7), 0: (23, 24), 1: (25, 26), 2: (27, 28)},
)


def make(options: Options, kv_cache: str, max_model_len: int) -> tuple[DecodePath, CacheState]:
    sizes = PathConfig(
        max_num_batched_tokens=64,
        page_size=8,
        compute_units=8,
        max_model_len=max_model_len,
        kv_cache=kv_cache,  # type: ignore[arg-type]
        kv_scale=0.11,
    )
    path = DecodePath(TINY, WEIGHTS, options, EMULATION, sizes)
    state = path.new_state(256)
    path.decode(state, PROMPTS)
    return path, state


@pytest.mark.parametrize(("preset", "kv_cache"), [("baseline", "bf16"), ("vllm026", "fp8")])
def test_replayed_steps_have_the_bits_of_eager_ones(preset: str, kv_cache: str) -> None:
    """Eager steps score up to their longest sequence, graphs up to max_model_len: the width changes no bit."""
    path, state = make(PRESETS[preset], kv_cache, MODEL_LEN)
    graphed = GraphedDecode(path=path, state=state, runner=ModelGraphRunner((2, 4, 8)))
    graphed.capture()
    eager, other = make(PRESETS[preset], kv_cache, 0)
    casts = path.casts.bf16_to_fp32
    for number, tokens in enumerate(STEPS):
        rows = graphed.runner.padded_rows(max(sum(len(ids) for ids in tokens.values()), len(tokens)))
        got = graphed.decode(tokens)
        expected = eager.decode(other, tokens, padded_rows=rows, all_logits=True)
        assert torch.equal(got.final_norm, expected.final_norm), f"step {number}"
        assert torch.equal(got.logits, expected.logits), f"step {number}"
        for ours, theirs in ((state.latent, other.latent), (state.index, other.index)):
            for a, b in zip(ours, theirs, strict=True):
                assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), f"caches after step {number}"
        if number == 1:
            for each in (state, other):
                each.truncate(0, 16)
    assert path.casts.bf16_to_fp32 == casts, "a replay runs none of the path's own code"
    assert path.builder.counts.builds == eager.builder.counts.builds + 3, "one build per step, and one per capture"


def test_a_capture_changes_no_cache() -> None:
    path, state = make(PRESETS["vllm026"], "bf16", MODEL_LEN)
    before = copy.deepcopy((state.latent, state.index))
    GraphedDecode(path=path, state=state, runner=ModelGraphRunner((2,))).capture()
    for was, now in zip(before[0] + before[1], state.latent + state.index, strict=True):
        assert torch.equal(was.view(torch.uint8), now.view(torch.uint8))


def test_a_step_that_was_not_staged_is_reported() -> None:
    path, state = make(PRESETS["vllm026"], "bf16", MODEL_LEN)
    graphed = GraphedDecode(path=path, state=state, runner=ModelGraphRunner((4,)))
    graphed.capture()
    graphed.decode({0: (1,), 1: (2,)})
    batch = state.append({0: (3,), 1: (4,)}, 4)
    metadata = path.builder.build(batch.step)
    with pytest.raises(GraphFaultError, match="not renewed: tokens"):
        graphed.runner.replay(4, graphed._call(4, metadata))


def test_a_cache_that_moved_is_reported() -> None:
    path, state = make(PRESETS["vllm026"], "bf16", MODEL_LEN)
    graphed = GraphedDecode(path=path, state=state, runner=ModelGraphRunner((4,)))
    graphed.capture()
    state.latent[1] = state.latent[1].clone()
    with pytest.raises(GraphFaultError, match="moved: latent 1"):
        graphed.decode({0: (1,)})


def test_what_no_graph_can_take_is_refused() -> None:
    path, state = make(PRESETS["vllm026"], "bf16", MODEL_LEN)
    graphed = GraphedDecode(path=path, state=state, runner=ModelGraphRunner((2,)))
    with pytest.raises(ValueError, match="no graph was captured for 2 rows"):
        graphed.runner.replay(2, graphed._call(2, path.builder.build(state.append({}, 2).step)))
    before = dict(state.tokens)
    for tokens, message in (
        ({0: (1,) * 5}, "request 0 has 5 tokens, above longest_paged 4"),
        ({0: (1, 1, 1)}, "3 rows exceed the largest captured size 2"),
        ({9: (64,)}, "request 9 has a token outside"),
    ):
        with pytest.raises(ValueError, match=message):
            graphed.decode(tokens)
        assert state.tokens == before
    path.decode(state, {2: (1,) * 40})
    with pytest.raises(ValueError, match="request 2 would reach 65 tokens; max_model_len is 64"):
        path.decode(state, {2: (1,) * 5})
    dynamic, empty = make(PRESETS["vllm026"], "bf16", 0)
    with pytest.raises(ValueError, match="max_model_len is not set"):
        GraphedDecode(path=dynamic, state=empty, runner=ModelGraphRunner((2,)))
    with pytest.raises(ValueError, match="max_num_batched_tokens 64 is below the size 65"):
        GraphedDecode(path=path, state=state, runner=ModelGraphRunner((65,)))
