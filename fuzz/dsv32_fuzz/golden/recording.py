"""Recorded decodes of another implementation: a folder with a manifest and one .npz per run, loaded and checked.

manifest.json holds `config` (DeepSeek's field names), `weights_sha256` by seed, and `runs`: name -> mode and seed. A
run holds `tokens` [B, T], `prompt_len`, and stage values "s{step}.L{layer}.{stage}": step 0 is the prefill of
`prompt_len` tokens, step s >= 1 feeds the token at position prompt_len - 1 + s of every request.
`cache.L{layer}.{kv,pe,ik,ik_scale}` hold what was cached. A run whose name starts with NEGATIVE was recorded with a
defect on purpose.
"""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from dsv32_ref.config import FP32, PRECISIONS, Config, Precision

_IGNORED = ("max_batch_size", "score_func")
"""Fields of DeepSeek's config that do not change the mathematics here."""


class _Run(msgspec.Struct):
    mode: str
    seed: int


class _Manifest(msgspec.Struct):
    config: dict[str, Any]
    weights_sha256: dict[str, str]
    runs: dict[str, _Run]


_LOCAL = ("index_score", "attn_out", "residual", "ffn_out")
_ROUTER = ("gate_logits", "gate_idx", "gate_w")


def _cache_names(layer: int) -> list[str]:
    return [f"cache.L{layer}.{name}" for name in ("kv", "pe", "ik", "ik_scale")]


@dataclass(frozen=True, kw_only=True)
class Recording:
    """One recorded run."""

    name: str
    mode: str
    seed: int
    config: Config
    prompt_len: int
    tokens: np.ndarray[Any, Any]
    """[B, T] token ids."""
    arrays: dict[str, np.ndarray[Any, Any]]

    @property
    def negative(self) -> bool:
        """Recorded with a defect: the reference must disagree."""
        return self.name.startswith("NEGATIVE")

    @property
    def precision(self) -> Precision:
        """The rounding points of the mode; a mode that is not known is taken for plain fp32."""
        return PRECISIONS.get(self.mode, FP32)

    @property
    def steps(self) -> int:
        """Prefill and decode steps."""
        return int(self.tokens.shape[1]) - self.prompt_len + 1

    def span(self, step: int) -> tuple[int, int]:
        """First and last + 1 position of the tokens of a step."""
        return (0, self.prompt_len) if step == 0 else (self.prompt_len - 1 + step, self.prompt_len + step)

    def positions(self, step: int) -> Tensor:
        """The position [T] of each row of a step, all requests in a row."""
        return torch.arange(*self.span(step)).repeat(len(self.tokens))

    def stage(self, step: int, layer: int, stage: str) -> Tensor | None:
        """The recorded value in the reference's form, rows of all requests in a row; None if it was not recorded."""
        if stage in ("latent", "index_key", "index_scale"):
            return self._cached(step, layer, stage)
        array = self.arrays.get(f"s{step}.L{layer}.{stage}" if layer >= 0 else f"s{step}.{stage}")
        if array is None:
            return None
        rows = len(self.tokens) if stage == "logits" else len(self.positions(step))
        if array.size % rows:
            raise ValueError(f"{self.name}: s{step}.L{layer}.{stage} has shape {array.shape}; it needs {rows} rows")
        flat = torch.from_numpy(array.reshape(rows, -1))
        if stage == "index_topk":
            return self._visible(flat.to(torch.int64), self.positions(step))
        return flat.to(torch.int64) if stage == "gate_idx" else flat

    def cached(self, layer: int, step: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        """What each request has cached after a step: latents [S, D], index keys [S, I] and their scales [S]."""
        kv, pe, keys, scale = (torch.from_numpy(self.arrays[name]) for name in _cache_names(layer))
        stop = self.span(step)[1]
        rows = zip(torch.cat([kv, pe], -1)[:, :stop], keys[:, :stop], scale[:, :stop], strict=True)
        return [(kv_SD, keys_SI, scale_S.flatten()) for kv_SD, keys_SI, scale_S in rows]

    @property
    def missing(self) -> list[str]:
        """The arrays that are not there and that a comparison layer by layer needs."""
        layers, moe = range(self.config.n_layers), range(self.config.n_dense_layers, self.config.n_layers)
        needed = [name for layer in layers for name in _cache_names(layer)]
        for step in range(self.steps):
            needed += [f"s{step}.L{layer}.{stage}" for layer in layers for stage in _LOCAL]
            needed += [f"s{step}.L{layer}.{stage}" for layer in moe for stage in _ROUTER] + [f"s{step}.final_norm"]
        return [name for name in needed if name not in self.arrays]

    def _cached(self, step: int, layer: int, stage: str) -> Tensor | None:
        names = {"latent": ("kv", "pe"), "index_key": ("ik",), "index_scale": ("ik_scale",)}[stage]
        parts = [self.arrays.get(f"cache.L{layer}.{name}") for name in names]
        if any(part is None for part in parts):
            return None
        start, stop = self.span(step)
        rows = torch.cat([torch.from_numpy(part[:, start:stop]) for part in parts if part is not None], -1).flatten(
            0, 1
        )
        return rows.reshape(-1) if stage == "index_scale" else rows

    def _visible(self, recorded_TK: Tensor, positions_T: Tensor) -> Tensor:
        """The recorded top-k padded to `index_topk` with -1; entries in a row's future are fillers and are dropped."""
        hidden_TK = recorded_TK > positions_T[:, None]
        order_TK = hidden_TK.to(torch.int8).sort(dim=-1, stable=True).indices
        kept_TK = recorded_TK.masked_fill(hidden_TK, -1).gather(1, order_TK)
        return torch.nn.functional.pad(kept_TK, (0, self.config.index_topk - kept_TK.shape[1]), value=-1)


def load_manifest(folder: Path) -> tuple[Config, dict[str, str], list[tuple[str, str, int]]]:
    """The config, the weight hashes by seed, and (name, mode, seed) of each run.

    Raises:
        ValueError: no manifest, or not of the format above.
    """
    path = folder / "manifest.json"
    if not path.is_file():
        raise ValueError(f"{folder} has no manifest.json; give a folder of recorded decodes")
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=_Manifest)
        config = Config.from_mapping({k: v for k, v in manifest.config.items() if k not in _IGNORED})
    except (msgspec.MsgspecError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a manifest of recorded decodes: {error}") from None
    if not manifest.runs:
        raise ValueError(f"{path} lists no runs; record at least one decode")
    return config, manifest.weights_sha256, [(name, run.mode, run.seed) for name, run in manifest.runs.items()]


def load_arrays(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """All arrays of an .npz file; pickled objects are refused.

    Raises:
        ValueError: not there, damaged, or it holds objects.
    """
    if not path.is_file():
        raise ValueError(f"{path} is missing; the manifest lists it, so record it again or drop it there")
    try:
        with np.load(path, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, AttributeError, TypeError) as error:
        raise ValueError(f"{path} is not a readable .npz of plain arrays ({error}); record it again") from None


def load_recording(folder: Path, config: Config, name: str, mode: str, seed: int) -> Recording:
    """One run, with its required keys checked.

    Raises:
        ValueError: tokens, prompt_len, or a step's logits or top-k are missing or misshapen; in a run that quantises,
            any stage that the stages after it are compared by.
    """
    arrays = load_arrays(folder / f"{name}.npz")
    tokens, prompt = arrays.get("tokens"), arrays.get("prompt_len")
    if tokens is None or tokens.ndim != 2 or tokens.dtype.kind not in "iu":
        raise ValueError(f"{name}: tokens must be an integer array [B, T]; record it again")
    if prompt is None or prompt.size != 1 or not 0 < int(prompt.ravel()[0]) <= tokens.shape[1]:
        raise ValueError(f"{name}: prompt_len must be one number in 1..{tokens.shape[1]}; record it again")
    found = Recording(
        name=name,
        mode=mode,
        seed=seed,
        config=config,
        prompt_len=int(prompt.ravel()[0]),
        tokens=tokens,
        arrays=arrays,
    )
    needed = [f"s{s}.logits" for s in range(found.steps)]
    needed += [f"s{s}.L{layer}.index_topk" for s in range(found.steps) for layer in range(config.n_layers)]
    missing = [key for key in needed if key not in arrays]
    if missing:
        raise ValueError(f"{name}: {missing[0]} is missing ({len(missing)} keys in all); record every step")
    if found.precision != FP32 and found.missing:
        missing = found.missing
        raise ValueError(f"{name}: {missing[0]} is missing ({len(missing)} keys in all); a run that quantises needs it")
    return found
