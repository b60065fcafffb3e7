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
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dsv32_ref.checkpoint import Checkpoint

_GATE = re.compile(r"model\.layers\.(\d+)\.mlp\.gate\.weight")
ACTIVATION = "layers.{layer}.gate_input"
"""Name of a recorded gate input, [T, M], in the file of `--activations`."""


@dataclass(frozen=True)
class Gate:
    """One router as stored: weight [E, M] and bias [E], in the checkpoint's dtypes."""

    layer: int
    weight_EM: Tensor
    bias_E: Tensor


def gate_layers(checkpoint: Checkpoint) -> list[int]:
    """Layers that have a gate, in order.

    Raises:
        ValueError: none has.
    """
    layers = sorted(int(match[1]) for name in checkpoint.files if (match := _GATE.fullmatch(name)))
    if not layers:
        raise ValueError(
            f"{checkpoint.folder} holds no model.layers.N.mlp.gate.weight; give a DeepSeek-V3.2 checkpoint"
        )
    return layers


def gates(checkpoint: Checkpoint, layers: list[int]) -> Iterator[Gate]:
    """The gates of `layers`, one at a time.

    Raises:
        ValueError: a tensor is missing, damaged, of a wrong shape, or not finite; the message names it.
    """
    for layer in layers:
        names = (f"layers.{layer}.ffn.gate.weight", f"layers.{layer}.ffn.gate.bias")
        found = checkpoint.read(names)
        weight_EM, bias_E = (found[name] for name in names)
        if weight_EM.ndim != 2 or bias_E.shape != weight_EM.shape[:1]:
            shapes = f"{tuple(weight_EM.shape)} and {tuple(bias_E.shape)}"
            raise ValueError(
                f"layer {layer}: gate weight and bias are {shapes}; expected [experts, width] and [experts]"
            )
        for name, tensor in zip(names, (weight_EM, bias_E), strict=True):
            if not tensor.is_floating_point() or not bool(tensor.float().isfinite().all()):
                raise ValueError(f"{name} holds values that are not finite numbers; download the checkpoint again")
        yield Gate(layer, weight_EM, bias_E)


class Activations:
    """Recorded gate inputs, by layer.

    Raises:
        ValueError: the file is no safetensors file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} is not a readable safetensors file ({error}); record it again") from None
        self._names = set(self._file.keys())

    def of(self, layer: int, width: int, tokens: int) -> Tensor:
        """The first `tokens` recorded inputs of a layer, [T, M] in the recorded dtype.

        Raises:
            ValueError: not recorded, or of another width.
        """
        name = ACTIVATION.format(layer=layer)
        if name not in self._names:
            raise ValueError(f"{self.path} has no {name}; record every mixture layer, or name others with --layers")
        x_TM: Tensor = self._file.get_slice(name)[:tokens]
        if x_TM.ndim != 2 or x_TM.shape[1] != width or not len(x_TM):
            raise ValueError(f"{self.path}: {name} is {tuple(x_TM.shape)}; expected [tokens, {width}]")
        return x_TM


def synthetic(layer: int, width: int, tokens: int, seed: int) -> Tensor:
    """Gate inputs drawn where none were recorded: independent standard normal channels, rounded to bf16, [T, M].

    A layer's input is normalised to a mean square of one, which these have; its correlations they do not have.
    """
    generator = torch.Generator().manual_seed(seed * 1000 + layer)
    return torch.randn(tokens, width, generator=generator).to(torch.bfloat16)
