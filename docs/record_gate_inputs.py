"""Records the inputs of DeepSeek-V3.2's gates while vLLM serves, for `dsv32 router --activations`.

Run it where vLLM serves the model, on one rank, with graphs off, since a captured graph runs no hooks:

    python record_gate_inputs.py MODEL PROMPTS.txt inputs.safetensors --tokens 4096

PROMPTS.txt has one prompt a line; take prompts of your own traffic. The file holds `layers.N.gate_input`, bf16
[tokens, width], for every mixture layer. Not run by the suite's tests: it needs the model and its hardware.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

GATE = re.compile(r"model\.layers\.(\d+)\.mlp\.gate")


def hook(model: Any, tokens: int, path: str) -> list[str]:
    """Runs in vLLM's worker: keeps the first `tokens` inputs of each gate, and writes them when all are full."""
    kept: dict[int, list[torch.Tensor]] = {}
    layers = {int(m[1]): module for name, module in model.named_modules() if (m := GATE.fullmatch(name))}

    def keep(layer: int, x_TM: torch.Tensor) -> None:
        have = sum(map(len, kept.setdefault(layer, [])))
        if have < tokens:
            kept[layer].append(x_TM[: tokens - have].detach().to("cpu", torch.bfloat16))
        elif len(kept) == len(layers) and not Path(path).exists():
            save_file({f"layers.{n}.gate_input": torch.cat(parts) for n, parts in kept.items()}, path)

    for layer, module in layers.items():
        module.register_forward_pre_hook(lambda _module, args, layer=layer: keep(layer, args[0]))
    return [str(layer) for layer in layers]


def main() -> None:
    """Serve the prompts and record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("prompts", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--tp", type=int, default=4)
    arguments = parser.parse_args()
    from vllm import LLM, SamplingParams

    engine = LLM(arguments.model, tensor_parallel_size=arguments.tp, enforce_eager=True)
    engine.apply_model(lambda model: hook(model, arguments.tokens, str(arguments.output)))
    engine.generate(arguments.prompts.read_text().splitlines(), SamplingParams(max_tokens=64))


if __name__ == "__main__":
    main()
