"""Records decodes of the reference itself in the folder format, so that a defect can be put into a recording."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch

import dsv32_fuzz
from dsv32_fuzz.golden.recipe import recipe_weights
from dsv32_fuzz.golden.recording import load_manifest
from dsv32_ref.config import PRECISIONS, Precision
from dsv32_ref.decode import Trace, decode, prefill
from dsv32_ref.state import Model, State
from dsv32_ref.weights import Weights, assemble

FOLDER = Path(dsv32_fuzz.__file__).parent / "data" / "decodes"
PROMPT, STEPS, REQUESTS = 24, 2, 2
CACHED = {"latent": "kv", "index_key": "ik", "index_scale": "ik_scale"}


def recipe(seed: int = 0) -> Weights:
    config, _, _ = load_manifest(FOLDER)
    return assemble(config, recipe_weights(config, seed))


def record(folder: Path, mode: str, weights: Weights, *, precision: Precision | None = None) -> None:
    """Writes manifest and run `mode`: a prefill of 24 tokens and 2 decode steps of two requests.

    `precision` differs from the mode's where the recording shall be made with other rounding points than it states.
    """
    manifest = json.loads((FOLDER / "manifest.json").read_text())
    config, _, _ = load_manifest(FOLDER)
    manifest["runs"] = {"run": {"mode": mode, "seed": 0}}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    model = Model(config=config, weights=weights, precision=precision or PRECISIONS[mode])
    state, random = State(model, 256), torch.Generator().manual_seed(5)
    tokens = torch.randint(config.vocab_size, (REQUESTS, PROMPT + STEPS), generator=random)
    arrays: dict[str, np.ndarray] = {"tokens": tokens.numpy(), "prompt_len": np.array([PROMPT])}
    cached: dict[str, list[torch.Tensor]] = {}
    for step in range(STEPS + 1):
        trace, start = Trace(), step and PROMPT - 1 + step
        ids = {b: row[start : PROMPT + step].tolist() for b, row in enumerate(tokens)}
        (decode if step else prefill)(model, state, ids, tap=trace)
        for (stage, layer), value in trace.values.items():
            if stage in CACHED:
                rows = value.unflatten(0, (REQUESTS, -1))
                cached.setdefault(f"cache.L{layer}.{CACHED[stage]}", []).append(rows)
            elif step or stage not in ("attn_in", "ffn_in"):  # as in the recordings of the other implementation
                arrays[f"s{step}.L{layer}.{stage}" if layer >= 0 else f"s{step}.{stage}"] = value.numpy()
    for name, parts in cached.items():
        arrays[name] = torch.cat(parts, 1).numpy()
        if name.endswith(".kv"):
            arrays[name.replace(".kv", ".pe")] = arrays[name][..., config.kv_lora_rank :]
            arrays[name] = arrays[name][..., : config.kv_lora_rank]
    np.savez(folder / "run.npz", **arrays)
