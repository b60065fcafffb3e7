"""One decode step at the true shapes in a process of its own; prints what it counted as one line of JSON.

The argument is a JSON object: options (a preset), heads, layers, dense, fp8, and lengths (tokens cached per request).
"""

from __future__ import annotations

import json
import resource
import sys
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from dsv32_fast.kernels.mounted import EMULATION
from dsv32_fast.options import PRESETS
from dsv32_fast.path import STAGES
from dsv32_fast.scale import admit, parameters, pooled_path, stored_bytes
from dsv32_ref.config import Config

VOCABULARY = 1024


class Counting:
    """A tap that counts visits and the stages that are not finite, and looks at every router."""

    def __init__(self, config: Config, lengths: list[int]) -> None:
        self.config, self.lengths = config, torch.tensor(lengths)
        self.visits: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.router_shapes: set[tuple[int, ...]] = set()
        self.experts: set[int] = set()

    def __call__(self, stage: str, layer: int, value: Tensor) -> Tensor:
        self.visits[stage] += 1
        if stage == "index_score":
            seen_TS = torch.arange(value.shape[1]) <= self.lengths[:, None]
            ok = value[seen_TS].isfinite().all() and (value[~seen_TS] == -torch.inf).all()
        elif stage == "index_topk":
            ok = all(self._whole_set(row, int(n) + 1) for row, n in zip(value, self.lengths, strict=True))
        elif stage == "gate_idx":
            ok = all(self._legal(row.tolist()) for row in value)
        else:
            ok = value.isfinite().all()
        if stage == "gate_logits":
            self.router_shapes.add(tuple(value.shape))
        if not ok:
            self.wrong.append(f"{stage} of layer {layer}")
        return value

    def _whole_set(self, row_K: Tensor, length: int) -> bool:
        """min(length, topk) different cached positions, then -1."""
        count = min(length, self.config.index_topk)
        chosen = set(row_K[:count].tolist())
        return len(chosen) == count and chosen <= set(range(length)) and bool((row_K[count:] == -1).all())

    def _legal(self, ids: list[int]) -> bool:
        """Eight different experts of at most four groups."""
        self.experts.update(ids)
        size = self.config.n_routed_experts // self.config.n_expert_groups
        groups = {i // size for i in ids}
        inside = all(0 <= i < self.config.n_routed_experts for i in ids)
        distinct = len(set(ids)) == self.config.n_activated_experts
        return inside and distinct and len(groups) <= self.config.n_limited_groups


def peak_bytes() -> int:
    """The largest resident set of this process so far; ru_maxrss is in KiB on Linux, in bytes on macOS."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def run(case: dict[str, Any]) -> dict[str, Any]:
    config = Config(vocab_size=VOCABULARY, n_heads=case["heads"], n_layers=case["layers"], n_dense_layers=case["dense"])
    path = pooled_path(config, PRESETS[case["options"]], EMULATION, fp8=case["fp8"])
    lengths: list[int] = case["lengths"]
    state = path.new_state(sum(-(-(n + 1) // 64) * 64 for n in lengths))
    admit(path, state, dict(enumerate(lengths)))
    tap = Counting(config, lengths)
    path.decode(state, {request: [request] for request in range(len(lengths))}, tap=tap)
    return {
        "casts": path.casts.bf16_to_fp32,
        "experts": len(tap.experts),
        "parameters": parameters(path.weights),
        "peak_bytes": peak_bytes(),
        "plan_launches": path.builder.counts.plan_launches,
        "router_shapes": sorted(tap.router_shapes),
        "stored_bytes": stored_bytes(path.weights),
        "visits": [tap.visits[stage] for stage in STAGES],
        "wrong": tap.wrong,
    }


if __name__ == "__main__":
    print(json.dumps(run(json.loads(sys.argv[1]))))
