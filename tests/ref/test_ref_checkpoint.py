"""Checkpoints in Hugging Face names: what is read, and what is refused with the tensor named."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from dsv32_ref.checkpoint import Checkpoint, hf_name
from dsv32_ref.config import FP8, GOLDEN, Config, Precision
from dsv32_ref.decode import prefill
from dsv32_ref.quant import BlockFp8
from dsv32_ref.state import Model, State
from dsv32_ref.weights import assemble, assemble_layer, layer_shapes, quantise, synthetic, weight_shapes

SMALL = GOLDEN.replace(n_layers=2, n_mtp_layers=1)
IDS = {0: list(range(30))}


def logits(weights: Any, precision: Precision | None = None) -> Tensor:
    model = Model(config=SMALL, weights=weights, precision=precision or Precision())
    return prefill(model, State(model, 64), IDS).logits


def write(folder: Path, named: dict[str, Tensor], shards: int = 3) -> None:
    """Several files and an index, as published."""
    names = sorted(named)
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {hf_name(name): named[name].contiguous() for name in names[shard::shards]}
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def hf_config() -> dict[str, Any]:
    return {
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 384,
        "moe_intermediate_size": 128,
        "num_hidden_layers": 2,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 1,
        "num_attention_heads": 4,
        "n_routed_experts": 16,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "q_lora_rank": 128,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "index_n_heads": 8,
        "index_head_dim": 128,
        "index_topk": 16,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000,
        "rope_scaling": {
            "type": "yarn",
            "factor": 8,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 32,
        },
        "scoring_func": "sigmoid",
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"},
    }


@pytest.fixture(scope="module")
def named() -> dict[str, Tensor]:
    return synthetic(SMALL, 4)


def test_names_follow_the_published_map() -> None:
    assert hf_name("layers.3.attn.wkv_a.scale") == "model.layers.3.self_attn.kv_a_proj_with_mqa.weight_scale_inv"
    assert hf_name("layers.3.ffn.gate.bias") == "model.layers.3.mlp.gate.e_score_correction_bias"
    assert hf_name("layers.3.ffn.experts.7.w3.weight") == "model.layers.3.mlp.experts.7.up_proj.weight"
    assert hf_name("layers.3.attn.indexer.wq_b.scale") == "model.layers.3.self_attn.indexer.wq_b.weight_scale_inv"
    assert hf_name("layers.3.attn.indexer.k_norm.bias") == "model.layers.3.self_attn.indexer.k_norm.bias"
    assert hf_name("layers.61.shared_head.norm.weight") == "model.layers.61.shared_head.norm.weight"
    assert hf_name("head.weight") == "lm_head.weight"
    assert len({hf_name(name) for name in weight_shapes(SMALL)}) == len(weight_shapes(SMALL))


def test_round_trip_with_an_index(tmp_path: Path, named: dict[str, Tensor]) -> None:
    write(tmp_path, named)
    (tmp_path / "config.json").write_text(json.dumps(hf_config()))
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.config() == SMALL
    assert torch.equal(logits(checkpoint.model()), logits(assemble(SMALL, named)))


def test_fp8_matrices_stay_fp8(tmp_path: Path, named: dict[str, Tensor]) -> None:
    write(tmp_path, quantise(named))
    weights = Checkpoint(tmp_path).model(SMALL)
    assert isinstance(weights.layers[0].attn.wkv_a, BlockFp8)
    assert isinstance(weights.layers[1].indexer.wk, BlockFp8)
    assert isinstance(weights.layers[0].indexer.weights_proj, Tensor)
    assert torch.equal(logits(weights), logits(assemble(SMALL, quantise(named))))
    assert not torch.equal(logits(weights, FP8), logits(weights))


def test_only_what_is_needed_is_read(tmp_path: Path, named: dict[str, Tensor]) -> None:
    """One layer with two experts: everything else may be absent."""
    wanted = [n for n in layer_shapes(SMALL, 1) if ".experts." not in n or any(f".experts.{e}." in n for e in (2, 9))]
    write(tmp_path, {name: named[name] for name in wanted})
    layer = Checkpoint(tmp_path).layer(SMALL, 1, experts=(2, 9))
    assert set(layer.ffn.experts) == {2, 9}  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=r"layers\.1\.ffn\.experts\.0\.w1\.weight"):
        Checkpoint(tmp_path).layer(SMALL, 1)


def test_packed_experts_of_transformers(tmp_path: Path, named: dict[str, Tensor]) -> None:
    state = {hf_name(name): tensor.contiguous() for name, tensor in named.items() if ".ffn.experts." not in name}
    for layer in (1, 2):
        parts = {
            w: torch.stack([named[f"layers.{layer}.ffn.experts.{e}.{w}.weight"] for e in range(16)])
            for w in ("w1", "w2", "w3")
        }
        state[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = torch.cat([parts["w1"], parts["w3"]], 1)
        state[f"model.layers.{layer}.mlp.experts.down_proj"] = parts["w2"]
    save_file(state, tmp_path / "model.safetensors")
    assert torch.equal(logits(Checkpoint(tmp_path).model(SMALL)), logits(assemble(SMALL, named)))


def test_truncated_and_pickled_files_are_refused(tmp_path: Path, named: dict[str, Tensor]) -> None:
    write(tmp_path, named, shards=1)
    (file,) = tmp_path.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ValueError, match="not a readable safetensors file"):
        Checkpoint(tmp_path).model(SMALL)
    file.write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(ValueError, match="not a readable safetensors file"):
        Checkpoint(tmp_path).model(SMALL)
    pickled = tmp_path / "other"
    pickled.mkdir()
    (pickled / "pytorch_model.bin").write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(ValueError, match="pickled weights"):
        Checkpoint(pickled)


def test_damaged_folders_are_refused(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text("{")
    with pytest.raises(ValueError, match="not readable JSON"):
        Checkpoint(tmp_path)
    index.write_text('{"weight_map": {"a": "../../secret.safetensors"}}')
    with pytest.raises(ValueError, match="must lie in the folder itself"):
        Checkpoint(tmp_path)
    index.write_text('{"weight_map": 3}')
    with pytest.raises(ValueError, match="no weight_map"):
        Checkpoint(tmp_path)
    index.write_text('{"weight_map": {"lm_head.weight": "gone.safetensors"}}')
    with pytest.raises(ValueError, match=r"gone\.safetensors is not a readable"):
        Checkpoint(tmp_path).read(["head.weight"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ({"rope_scaling": {"type": "linear"}}, "RoPE type is 'linear'"),
        ({"quantization_config": {"weight_block_size": [64, 64]}}, r"weight_block_size is \[64, 64\]"),
        ({"n_group": 3}, "not a multiple of n_expert_groups 3"),
    ],
)
def test_other_models_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(hf_config() | change))
    save_file({"lm_head.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        Checkpoint(tmp_path).config()


BAD: dict[str, tuple[str, Any, str]] = {
    "missing": ("layers.1.ffn.gate.bias", None, r"layers\.1\.ffn\.gate\.bias is missing"),
    "shape": ("layers.0.attn.wo.weight", torch.zeros(3, 3), r"layers\.0\.attn\.wo\.weight has shape \[3, 3\]"),
    "nan": ("layers.0.attn_norm.weight", torch.full((256,), torch.nan), r"layers\.0\.attn_norm\.weight holds NaN"),
    "no tensor": ("head.weight", [1, 2], r"head\.weight has shape \[2\]"),
    "bias in bf16": (
        "layers.1.ffn.gate.bias",
        torch.ones(16, dtype=torch.bfloat16),
        "keep e_score_correction_bias in fp32",
    ),
    "integers": ("norm.weight", torch.ones(256, dtype=torch.int32), r"norm\.weight has dtype torch\.int32"),
    "no scale": ("layers.0.attn.wq_a.scale", None, r"layers\.0\.attn\.wq_a\.scale is missing"),
    "scale shape": (
        "layers.0.attn.wkv_a.scale",
        torch.ones(1, 2),
        r"wkv_a\.scale has shape \[1, 2\]; this config needs \[2, 2\]",
    ),
    "scale nan": (
        "layers.0.attn.wkv_a.scale",
        torch.full((2, 2), torch.nan),
        r"wkv_a\.scale holds a value that is not",
    ),
    "fnuz": (
        "layers.0.attn.wq_a.weight",
        torch.zeros(128, 256).to(torch.float8_e4m3fnuz),
        "dtype torch.float8_e4m3fnuz",
    ),
    "fnuz bytes": (
        "layers.0.attn.wq_a.weight",
        torch.full((128, 256), 0xFF, dtype=torch.uint8).view(torch.float8_e4m3fn),
        "wq_a.weight holds fp8 NaN bytes",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_tensor_is_named(named: dict[str, Tensor], case: str) -> None:
    name, value, message = BAD[case]
    tensors = quantise(named)
    del tensors[name]
    with pytest.raises(ValueError, match=message):
        assemble(SMALL, tensors if value is None else tensors | {name: value})


def test_one_layer_from_named_tensors(named: dict[str, Tensor]) -> None:
    layer = assemble_layer(SMALL, named, 1, experts=(3,))
    assert list(layer.ffn.experts) == [3]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n_heads": 0}, "n_heads is 0"),
        ({"route_scale": float("nan")}, "route_scale is nan"),
        ({"index_head_dim": 96}, "not a power of two"),
        ({"qk_rope_head_dim": 33}, "is odd"),
        ({"n_limited_groups": 9}, "exceeds n_expert_groups"),
        ({"n_activated_experts": 200}, "exceeds the experts of 4 groups"),
    ],
)
def test_bad_dimensions(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Config(**fields)


def test_synthetic_statistics() -> None:
    """A common bias offset of 2..12 with a small spread, and lanes that stand out in index queries and keys alike."""
    for seed in range(5):
        drawn = synthetic(GOLDEN, seed)
        bias = drawn["layers.1.ffn.gate.bias"]
        assert 1.8 < float(bias.mean()) < 12.2
        assert float(bias.std()) < 0.2
        gain = drawn["layers.1.attn.indexer.k_norm.weight"].abs()
        rows = drawn["layers.1.attn.indexer.wq_b.weight"].view(8, 128, -1).norm(dim=-1).mean(0)
        assert set(gain.topk(2).indices.tolist()) == set(rows.topk(2).indices.tolist())
        assert float(gain.max()) > 5 * float(gain.median())
    once = synthetic(GOLDEN, 1, layer_shapes(GOLDEN, 2))
    assert all(torch.equal(tensor, synthetic(GOLDEN, 1)[name]) for name, tensor in list(once.items())[:5])
