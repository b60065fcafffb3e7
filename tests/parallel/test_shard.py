"""Shards put together are the model; a world that does not divide it is refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from dsv32_fast.parallel.rank import SMALL, TpSpec
from dsv32_fast.parallel.shard import padded_heads, place, shard, shard_config
from dsv32_ref.config import Config
from dsv32_ref.weights import Weights, assemble, quantise, synthetic

FEW = SMALL.replace(n_routed_experts=16, n_expert_groups=4, n_limited_groups=2, n_activated_experts=4)


def model(config: Config = FEW, fp8: bool = False) -> Weights:
    named = synthetic(config, 0)
    return assemble(config, quantise(named) if fp8 else named)


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_parts_are_the_whole(world):
    whole = model()
    parts = [shard(FEW, whole, rank, world) for rank in range(world)]
    for layer in range(FEW.n_layers):
        attn, ours = whole.layers[layer].attn, [part.layers[layer].attn for part in parts]
        assert torch.equal(torch.cat([w.wq_b for w in ours]), attn.wq_b)
        assert torch.equal(torch.cat([w.wkv_b for w in ours]), attn.wkv_b)
        assert torch.equal(torch.cat([w.wo for w in ours], 1), attn.wo)
        for name in ("wq_a", "wkv_a", "q_norm", "kv_norm"):
            assert all(torch.equal(getattr(w, name), getattr(attn, name)) for w in ours)
        ffn, theirs = whole.layers[layer].ffn, [part.layers[layer].ffn for part in parts]
        if FEW.kind(layer) == "dense":
            check_mlp(ffn, theirs)
        else:
            check_mlp(ffn.shared, [w.shared for w in theirs])
            for expert in range(FEW.n_routed_experts):
                check_mlp(ffn.experts[expert], [w.experts[expert] for w in theirs])
            assert all(torch.equal(w.gate.weight, ffn.gate.weight) for w in theirs)
    config = shard_config(FEW, world)
    assert parts[0].layers[0].attn.wq_b.shape == (config.n_heads * config.qk_head_dim, config.q_lora_rank)


def check_mlp(whole, parts):
    for name, axis in (("w1", 0), ("w2", 1), ("w3", 0)):
        assert torch.equal(torch.cat([getattr(p, name) for p in parts], axis), getattr(whole, name))


def test_block_fp8_is_cut_between_blocks():
    config = FEW.replace(inter_dim=512, moe_inter_dim=256, n_heads=32, qk_nope_head_dim=24, v_head_dim=16)
    whole = model(config, fp8=True)
    parts = [shard(config, whole, rank, 2) for rank in range(2)]
    for name, axis in (("wq_b", 0), ("wo", 1)):
        matrix = getattr(whole.layers[0].attn, name)
        joined = torch.cat([getattr(p.layers[0].attn, name).dequantise(torch.float32) for p in parts], axis)
        assert torch.equal(joined, matrix.dequantise(torch.float32))
    with pytest.raises(ValueError, match="wkv_b would be cut every 160, inside its fp8 blocks of 128"):
        shard(config, whole, 0, 8)


def test_heads_of_the_real_model():
    """128 heads; AITER's decode kernel takes 16 or more, so TP 16 would repeat each twice."""
    heads = {world: padded_heads(shard_config(Config(), world).n_heads) for world in (1, 2, 4, 8, 16)}
    assert heads == {1: 128, 2: 64, 4: 32, 8: 16, 16: 16}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"world": 0}, "world is 0"),
        ({"world": 3}, "n_heads 128 is not a multiple of world 3"),
        ({"world": 2, "config": SMALL.replace(moe_inter_dim=33)}, "moe_inter_dim 33 is not a multiple of world 2"),
        ({"world": 2, "config": SMALL.replace(n_heads=12)}, "6 heads on a rank do not divide 16"),
        ({"world": 1, "rows": 0}, "rows is 0"),
        ({"world": 1, "steps": -1}, "steps is -1"),
        ({"world": 1, "kv_cache": "fp16"}, "kv_cache 'fp16': choose bf16 or fp8"),
    ],
)
def test_bad_specs(change, message):
    with pytest.raises(ValueError, match=message):
        TpSpec(**change)


def test_bad_rank():
    with pytest.raises(ValueError, match="rank is 2; give one of 0 to 1"):
        shard(FEW, model(), 2, 2)


def test_placing_keeps_everything():
    whole = model(fp8=True)
    placed = place(whole, torch.device("cpu"))
    assert torch.equal(placed.layers[1].ffn.experts[3].w1.scale, whole.layers[1].ffn.experts[3].w1.scale)
    assert placed.embed.device.type == "cpu"
    assert [f.name for f in dataclasses.fields(placed)] == [f.name for f in dataclasses.fields(whole)]
