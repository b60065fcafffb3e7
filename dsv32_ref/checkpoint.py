"""Reads a published DeepSeek-V3.2 checkpoint: a folder of safetensors files in Hugging Face names.

Only the tensors asked for are read, so one layer of the 671B model fits a laptop. Nothing is unpickled. Block-fp8
matrices (`weight` in e4m3 with `weight_scale_inv`) stay fp8; see `weights` for the names and `quant.BlockFp8` for the
meaning.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dsv32_ref.config import Config
from dsv32_ref.weights import LayerWeights, Weights, assemble, assemble_layer, layer_shapes, weight_shapes

_PARTS = {
    "attn": "self_attn",
    "ffn": "mlp",
    "wq_a": "q_a_proj",
    "q_norm": "q_a_layernorm",
    "wq_b": "q_b_proj",
    "wkv_a": "kv_a_proj_with_mqa",
    "kv_norm": "kv_a_layernorm",
    "wkv_b": "kv_b_proj",
    "wo": "o_proj",
    "w1": "gate_proj",
    "w2": "down_proj",
    "w3": "up_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "scale": "weight_scale_inv",
}
_TOP = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}


def hf_name(name: str) -> str:
    """The Hugging Face name of a tensor that DeepSeek's code calls `name`; the indexer's linears keep theirs."""
    if name in _TOP:
        return _TOP[name]
    if name.endswith("ffn.gate.bias"):
        return "model." + name.replace("ffn.gate.bias", "mlp.gate.e_score_correction_bias")
    before, indexer, inside = name.partition(".indexer.")
    parts = [_PARTS.get(part, part) for part in before.split(".")]
    kept = [_PARTS["scale"] if part == "scale" else part for part in inside.split(".")]
    return "model." + ".".join(parts) + (indexer + ".".join(kept) if indexer else "")


class Checkpoint:
    """An opened checkpoint folder.

    Raises:
        ValueError: the folder holds no safetensors files, or its index is damaged.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        index = self.folder / "model.safetensors.index.json"
        self.files = self._from_index(index) if index.is_file() else self._from_files()

    def _from_index(self, index: Path) -> dict[str, str]:
        weight_map = _json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
            raise ValueError(f"{index} has no weight_map of file names; download it again")
        outside = [file for file in weight_map.values() if Path(file).name != file]
        if outside:
            raise ValueError(f"{index} points to {outside[0]!r}; files must lie in the folder itself")
        return weight_map

    def _from_files(self) -> dict[str, str]:
        found = sorted(self.folder.glob("*.safetensors"))
        if not found:
            raise ValueError(f"{self.folder} holds no .safetensors file; pickled weights (.bin, .pt) are not read")
        return {name: path.name for path in found for name in self._names(path)}

    def _names(self, path: Path) -> list[str]:
        with _open(path) as file:
            return list(file.keys())

    def config(self) -> Config:
        """The dimensions from config.json.

        Raises:
            ValueError: missing or damaged, or quantised in another way than 128 x 128 fp8 blocks.
        """
        fields = _json(self.folder / "config.json")
        quantisation = fields.get("quantization_config") or {}
        if list(quantisation.get("weight_block_size", [128, 128])) != [128, 128]:
            size = quantisation["weight_block_size"]
            raise ValueError(f"config.json: weight_block_size is {size}; expected [128, 128]")
        return Config.from_hf(fields)

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """The tensors that DeepSeek's code calls `names`, with ".scale" beside each fp8 ".weight".

        Raises:
            ValueError: a tensor is in no file, or its file is missing, truncated or not safetensors.
        """
        found: dict[str, Tensor] = {}
        for name in names:
            found[name] = self._tensor(name)
            scale = name.removesuffix(".weight") + ".scale"
            if found[name].dtype.itemsize == 1 and hf_name(scale) in self.files:
                found[scale] = self._tensor(scale)
        return found

    def _tensor(self, name: str) -> Tensor:
        stored = hf_name(name)
        if stored in self.files:
            return self._get(stored, name, ...)
        packed = re.fullmatch(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", stored)
        if packed is None:
            raise ValueError(f"{name} ({stored}) is in no file of {self.folder}; download the checkpoint again")
        # transformers 5 saves all experts of a layer as one tensor, gate rows before up rows.
        prefix, expert, kind = packed.groups()
        if kind == "down":
            return self._get(f"{prefix}.down_proj", name, int(expert))
        gate, up = self._get(f"{prefix}.gate_up_proj", name, int(expert)).chunk(2)
        return gate if kind == "gate" else up

    def _get(self, stored: str, name: str, index: Any) -> Tensor:
        if stored not in self.files:
            raise ValueError(f"{name} ({stored}) is in no file of {self.folder}; download the checkpoint again")
        path = self.folder / self.files[stored]
        with _open(path) as file:
            try:
                tensor: Tensor = file.get_slice(stored)[index] if index is not ... else file.get_tensor(stored)
            except SafetensorError as error:
                raise ValueError(f"{path}: {name} ({stored}) cannot be read ({error}); download it again") from None
        return tensor

    def layer(self, config: Config, layer: int, experts: Collection[int] | None = None) -> LayerWeights:
        """One decoder layer, with only the given routed experts where `experts` is set.

        Raises:
            ValueError: as `read` and `weights.assemble_layer`.
        """
        absent = [f".experts.{e}." for e in range(config.n_routed_experts) if experts is not None and e not in experts]
        names = [name for name in layer_shapes(config, layer) if not any(part in name for part in absent)]
        return assemble_layer(config, self.read(names), layer, experts)

    def model(self, config: Config | None = None, dtype: torch.dtype = torch.float32) -> Weights:
        """The whole model, or its first layers where `config` has fewer.

        Raises:
            ValueError: as `read` and `weights.assemble`.
        """
        config = config or self.config()
        return assemble(config, self.read(weight_shapes(config)), dtype)


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is not a readable safetensors file ({error}); download it again") from None


def _json(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not readable JSON ({error}); download it again") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{path} holds no JSON object; download it again")
    return fields
