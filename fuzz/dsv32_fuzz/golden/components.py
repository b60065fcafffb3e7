"""Replay of unit vectors recorded at the true dimensions: quantisation, RoPE, router, cache records, index scores.

What the model fixes bit by bit is compared bit by bit (act_quant, Hadamard, the 656-byte record, every chosen set);
values that come out of fp32 sums or library functions are compared with a stated error.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from dsv32_fuzz.golden.recording import load_arrays
from dsv32_ref.cache import CacheFormat, LatentCache, encode_656
from dsv32_ref.config import BF16_Q, FP32, Config
from dsv32_ref.indexer import index_scores, quantise, select_topk
from dsv32_ref.quant import act_quant, hadamard
from dsv32_ref.rope import rope_half_split, rope_interleaved, rope_table
from dsv32_ref.router import GateWeights, choose_experts, expert_weights, gate_logits

Arrays = dict[str, np.ndarray[Any, Any]]
_CONFIG = Config()


class ComponentReplay(msgspec.Struct, frozen=True, kw_only=True):
    """One recorded vector against the reference."""

    name: str
    items: int
    differing: int
    """Items whose bits differ, or that lie beyond `tolerance`."""
    tolerance: float
    """0 where bits must be equal."""
    worst: float
    """Largest error; 0 where bits are compared."""

    @property
    def right(self) -> bool:
        """Something was compared and nothing differs."""
        return self.items > 0 and self.differing == 0

    def __str__(self) -> str:
        kind = "bit for bit" if self.tolerance == 0 else f"within {self.tolerance:.2g}"
        return f"{self.name}: {self.items - self.differing} of {self.items} items equal {kind}"


def _bits(name: str, got: Tensor, want: np.ndarray[Any, Any]) -> ComponentReplay:
    ours = got.contiguous().view(torch.uint8).numpy().ravel()
    theirs = np.ascontiguousarray(want).view(np.uint8).ravel()
    if ours.shape != theirs.shape:
        raise ValueError(f"{name} has shape {want.shape}; the vector is not of the 671B dimensions, record it again")
    differing = (ours != theirs).reshape(want.size, -1).any(1)
    return ComponentReplay(name=name, items=want.size, differing=int(differing.sum()), tolerance=0.0, worst=0.0)


def _near(name: str, got: Tensor, want: np.ndarray[Any, Any], tolerance: float) -> ComponentReplay:
    recorded = torch.from_numpy(want).to(torch.float64)
    if got.shape != recorded.shape:
        raise ValueError(f"{name} has shape {want.shape}; expected {tuple(got.shape)}, record it again")
    error = (got.to(torch.float64) - recorded).abs()
    differing = int((~(error <= tolerance)).sum())
    worst = float(error.max())
    return ComponentReplay(name=name, items=want.size, differing=differing, tolerance=tolerance, worst=worst)


def _bf16(bits: np.ndarray[Any, Any]) -> Tensor:
    return torch.from_numpy(bits.copy()).view(torch.bfloat16).to(torch.float32)


def _act_quant(a: Arrays) -> list[ComponentReplay]:
    found = []
    for name, scale_format in (("fp32scale", "fp32"), ("ue8m0", "ue8m0")):
        values, scale = act_quant(
            _bf16(a["actq.x_bf16bits"]), scale_format="fp32" if scale_format == "fp32" else "ue8m0"
        )
        found += [_bits(f"actq.{name}.y", values, a[f"actq.{name}.y_e4m3bits"])]
        found += [_bits(f"actq.{name}.scale", scale, a[f"actq.{name}.scale"])]
    return found


def _hadamard(a: Arrays) -> list[ComponentReplay]:
    x = _bf16(a["had.x_bf16bits"])
    rounded = hadamard(x, BF16_Q).to(torch.bfloat16)
    return [_bits("had.fp32", hadamard(x, FP32), a["had.y_fp32"]), _bits("had.bf16", rounded, a["had.y_bf16bits"])]


def _rope(a: Arrays) -> list[ComponentReplay]:
    """cos and sin of equal fp32 angles differ by the libraries' ulp, 2^-23; a turn adds two products of it."""
    table = rope_table(_CONFIG, torch.from_numpy(a["rope.pos"]))
    x = torch.from_numpy(a["rope.x"])[0]
    turned = 4 * 2**-23 * float(x.abs().max())
    return [
        _near("rope.cos", table[0], a["rope.cos"], 2**-23),
        _near("rope.sin", table[1], a["rope.sin"], 2**-23),
        _near("rope.interleaved", rope_interleaved(x, table)[None], a["rope.interleaved"], turned),
        _near("rope.halfsplit", rope_half_split(x, table)[None], a["rope.halfsplit"], turned),
        _near(
            "softmax_scale", torch.tensor([_CONFIG.softmax_scale], dtype=torch.float64), a["softmax_scale_671b"], 1e-15
        ),
    ]


def _gate(a: Arrays) -> list[ComponentReplay]:
    """Weights are at most 2.5 and come out of fp32 sums of 64 products and 8 scores: 2.5 x (64 + 8) x 2^-24."""
    gate = GateWeights(weight=torch.from_numpy(a["gate.w"]), bias=torch.from_numpy(a["gate.bias"]))
    logits_TE = gate_logits(torch.from_numpy(a["gate.x"]), gate)
    idx_TK = choose_experts(logits_TE, gate.bias, _CONFIG)
    weights_TK = expert_weights(logits_TE, idx_TK, _CONFIG)
    tolerance = 2.5 * 72 * 2**-24
    return [
        _bits("gate.idx", idx_TK.to(torch.int16), a["gate.idx"]),
        _near("gate.weights", weights_TK, a["gate.weights"], tolerance),
    ]


def _records(a: Arrays) -> list[ComponentReplay]:
    form = CacheFormat(latent="fp8_656", rule="flashmla")
    kv_TD = _bf16(a["flashmla656.kv_bf16bits"])
    parts = [part.contiguous().view(torch.uint8) for part in encode_656(kv_TD, _CONFIG, form)]
    cache, slots_T = LatentCache(_CONFIG, form, 64, torch.float32), torch.arange(len(kv_TD))
    cache.write(slots_T, kv_TD)
    read = cache.gather(slots_T).to(torch.bfloat16)
    return [
        _bits("flashmla656.bytes", torch.cat(parts, -1), a["flashmla656.bytes"]),
        _bits("flashmla656.dequantised", read, a["flashmla656.dequant_bf16bits"]),
    ]


def _index(a: Arrays) -> list[ComponentReplay]:
    """Scores of magnitude 2.2 are sums of 128 and of 64 products; 2 x 192 x 2^-24 x 2.2 would be their worst case."""
    stream = np.random.RandomState(99)
    shapes = ((1, 64, 128), (4096, 128), (1, 64))
    q, k, w = (torch.from_numpy(stream.standard_normal(shape).astype(np.float32)) for shape in shapes)
    q, k = q.to(torch.bfloat16).to(torch.float32), k.to(torch.bfloat16).to(torch.float32)
    q8, q_scale = quantise(hadamard(q, BF16_Q), BF16_Q)
    k8, k_scale = quantise(hadamard(k, BF16_Q), BF16_Q)
    scores_TS = index_scores(q8, w * 64**-0.5 * q_scale * 128**-0.5, k8, k_scale)
    best_K = select_topk(scores_TS, torch.tensor([4096]), 2048)[0].sort().values
    exact = index_scores(q.double(), w.double() * (64**-0.5 * 128**-0.5), k.double(), torch.ones(4096).double())
    return [
        _near("index64x128.score", scores_TS[0], a["index64x128.score"], 2 * 192 * 2**-24 * 2.2),
        _bits("index64x128.top2048", best_K.to(torch.int16), a["index64x128.top2048_sorted"]),
        _near("index64x128.exact", exact[0], a["index64x128.exact_noquant_score"], 1e-12),
    ]


_GROUPS = {
    "actq.": _act_quant,
    "had.": _hadamard,
    "rope.": _rope,
    "gate.": _gate,
    "flashmla656.": _records,
    "index64x128.": _index,
}


def replay_components(path: Path) -> list[ComponentReplay]:
    """Replays every group of vectors that the file holds.

    Raises:
        ValueError: damaged, incomplete, of other dimensions, or without any known vector.
    """
    arrays = load_arrays(path)
    present = [group for prefix, group in _GROUPS.items() if any(name.startswith(prefix) for name in arrays)]
    if not present:
        raise ValueError(f"{path} holds no known vectors; expected names that start with {', '.join(_GROUPS)}")
    try:
        return [replay for group in present for replay in group(arrays)]
    except KeyError as error:
        raise ValueError(f"{path}: {error.args[0]} is missing; record the whole group") from None
