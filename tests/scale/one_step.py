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
from dsv32_fast.packing import Gate, Moe
from dsv32_fast.path import STAGES, DecodePath
from dsv32_fast.scale import admit, parameters, pooled_path, stored_bytes
from dsv32_ref.bounds import BF16, Arithmetic, certify_router, certify_topk, exact, judge, round_to
from dsv32_ref.bounds.linear import linear
from dsv32_ref.bounds.router import router_scores
from dsv32_ref.config import Config
from dsv32_ref.indexer import select_topk
from dsv32_ref.router import choose_experts

ARITH = Arithmetic()
VOCABULARY = 1024


class Counting:
    """A tap that counts visits, and names the stages that are not finite, beyond their bound, or illegal choices."""

    def __init__(self, path: DecodePath, lengths: list[int]) -> None:
        self.path, self.config, self.lengths = path, path.config, torch.tensor(lengths) + 1
        self.last: dict[str, Tensor] = {}
        self.visits: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.router_shapes: set[tuple[int, ...]] = set()
        self.experts: set[int] = set()
        self.budget = 0.0

    def __call__(self, stage: str, layer: int, value: Tensor) -> Tensor:
        self.visits[stage] += 1
        self.last[stage] = value
        checks = {"index_score": self._scores, "index_topk": self._topk}
        checks |= {"gate_logits": self._logits, "gate_idx": self._choice}
        ok = checks[stage](value, layer) if stage in checks else bool(value.isfinite().all())
        if not ok:
            self.wrong.append(f"{stage} of layer {layer}")
        return value

    def _seen(self, width: int) -> Tensor:
        return torch.arange(width) < self.lengths[:, None]

    def _scores(self, scores_TS: Tensor, _layer: int) -> bool:
        seen_TS = self._seen(scores_TS.shape[1])
        return bool(scores_TS[seen_TS].isfinite().all()) and bool((scores_TS[~seen_TS] == -torch.inf).all())

    def _topk(self, chosen_TK: Tensor, _layer: int) -> bool:
        """Exactly the best positions by the scores of the step."""
        scores_TS = self.last["index_score"]
        best_TK = select_topk(scores_TS, self.lengths, self.config.index_topk)
        none_TS, valid_TS = torch.zeros_like(scores_TS), self._seen(scores_TS.shape[1])
        return certify_topk(scores_TS, none_TS, best_TK, chosen_TK.long(), valid=valid_TS).passed

    def _gate(self, layer: int) -> Gate:
        ffn = self.path.weights.layers[layer].ffn
        assert isinstance(ffn, Moe)
        return ffn.gate

    def _logits(self, logits_TE: Tensor, layer: int) -> bool:
        """Within the proven bound of a product over 7168 in fp32, stored in bf16 where the options say so."""
        self.router_shapes.add(tuple(logits_TE.shape))
        x_TM, w_EM = self.last["ffn_in"].double(), self._gate(layer).weight.double()
        bound = linear(exact(x_TM), exact(w_EM), ARITH)
        budget = judge(logits_TE, round_to(bound, BF16) if logits_TE.dtype == torch.bfloat16 else bound)
        self.budget = max(self.budget, budget.worst)
        return budget.passed

    def _choice(self, ids_TK: Tensor, layer: int) -> bool:
        """What the layer's own logits and bias call for, up to ties within the kernel's rounding."""
        self.experts.update(ids_TK.flatten().tolist())
        logits_TE = self.last["gate_logits"].float()
        bias_E = self._gate(layer).bias.to(self.last["gate_logits"].dtype).float()
        biased = router_scores(exact(logits_TE), exact(bias_E), ARITH)[1]
        groups, kept = self.config.n_expert_groups, self.config.n_limited_groups
        best_TK = choose_experts(logits_TE, bias_E, self.config)
        return certify_router(
            biased.value, biased.err, best_TK, ids_TK.long(), groups=groups, kept=kept, arith=ARITH
        ).passed


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
    tap = Counting(path, lengths)
    path.decode(state, {request: [request] for request in range(len(lengths))}, tap=tap)
    return {
        "budget": tap.budget,
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
