"""The gates of a checkpoint: matrix and correction bias of each mixture layer, and nothing else of it.

Reads safetensors only, tensor by tensor, so a checkpoint of any size costs the memory of one gate (4 MB in bf16).
Legend: E experts, M model width, T tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dsv32_fuzz.router_study.ranges import TensorFile

_GATE = re.compile(r"model\.layers\.(\d+)\.mlp\.gate\.weight")
ACTIVATION = "layers.{layer}.gate_input"
"""Name of a recorded gate input, [T, M], in the file of `--activations`."""


@dataclass(frozen=True)
class Gate:
    """One router as stored: weight [E, M] and bias [E], in the checkpoint's dtypes."""

    layer: int
    weight_EM: Tensor
    bias_E: Tensor


def gate_layers(files: dict[str, Path]) -> list[int]:
    """Layers that have a gate, in order; `files` is that of `tensor_files`.

    Raises:
        ValueError: none has.
    """
    layers = sorted(int(match[1]) for name in files if (match := _GATE.fullmatch(name)))
    if not layers:
        raise ValueError(
            "no file holds a model.layers.N.mlp.gate.weight; give the folder of a DeepSeek-V3.2 checkpoint"
        )
    return layers


def gates(files: dict[str, Path], layers: list[int]) -> Iterator[Gate]:
    """The gates of `layers`, one at a time.

    Raises:
        ValueError: a tensor is missing, damaged, of a wrong shape, or not finite; the message names it.
    """
    opened: dict[Path, TensorFile] = {}
    for layer in layers:
        names = (f"model.layers.{layer}.mlp.gate.weight", f"model.layers.{layer}.mlp.gate.e_score_correction_bias")
        weight_EM, bias_E = (_read(files, opened, name) for name in names)
        if weight_EM.ndim != 2 or bias_E.shape != weight_EM.shape[:1]:
            shapes = f"{tuple(weight_EM.shape)} and {tuple(bias_E.shape)}"
            raise ValueError(
                f"layer {layer}: gate weight and bias are {shapes}; expected [experts, width] and [experts]"
            )
        yield Gate(layer, weight_EM, bias_E)


def _read(files: dict[str, Path], opened: dict[Path, TensorFile], name: str) -> Tensor:
    path = files.get(name)
    if path is not None and path not in opened:
        opened[path] = TensorFile(path)
    if path is None or name not in opened[path].tensors:
        raise ValueError(f"{name} is in no file of the checkpoint; download it again")
    tensor = opened[path].read(name)
    if not bool(tensor.float().isfinite().all()):
        raise ValueError(f"{path}: {name} holds values that are not finite numbers; download the checkpoint again")
    return tensor


class Activations:
    """Recorded gate inputs, by layer.

    Raises:
        ValueError: the file is no safetensors file.
    """

    def __init__(self, path: Path) -> None:
        self.file = TensorFile(path)

    def of(self, layer: int, width: int, tokens: int) -> Tensor:
        """The first `tokens` recorded inputs of a layer, [T, M] in the recorded dtype.

        Raises:
            ValueError: not recorded, or of another width.
        """
        name, path = ACTIVATION.format(layer=layer), self.file.path
        if name not in self.file.tensors:
            raise ValueError(f"{path} has no {name}; record every mixture layer, or name others with --layers")
        x_TM = self.file.read(name, tokens)
        if x_TM.ndim != 2 or x_TM.shape[1] != width or not len(x_TM):
            raise ValueError(f"{path}: {name} is {tuple(x_TM.shape)}; expected [tokens, {width}]")
        return x_TM


def synthetic(layer: int, width: int, tokens: int, seed: int) -> Tensor:
    """Gate inputs drawn where none were recorded: independent standard normal channels, rounded to bf16, [T, M].

    A layer's input is normalised to a mean square of one, which these have; its correlations they do not have.
    """
    generator = torch.Generator().manual_seed(seed * 1000 + layer)
    return torch.randn(tokens, width, generator=generator).to(torch.bfloat16)
