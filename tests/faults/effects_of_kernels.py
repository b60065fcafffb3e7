"""Effects of faults in AITER's functions: each is called by itself on inputs that show the story.

Legend: T tokens, E experts, K chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import torch
from effect_table import Observe, effect
from torch import Tensor

from dsv32_fast import packing, router
from dsv32_fast.parallel import communicator
from dsv32_fuzz.targets.intree import InTreeTarget
from dsv32_ref.config import Config

CONFIG = Config()
SCALE = CONFIG.route_scale


def _routed(target: InTreeTarget, logits: Tensor, bias: Tensor) -> tuple[list[list[int]], list[list[float]]]:
    ids = torch.empty(len(logits), 8, dtype=torch.int32)
    weights = torch.empty(len(logits), 8)
    kernels: Any = target.kernels
    kernels.biased_grouped_topk(logits, bias, weights, ids, 8, 4, True, SCALE)
    return ids.tolist(), weights.tolist()


def routing(rows: Sequence[dict[int, float]], bias: dict[int, float] | None = None, base: float = -8.0) -> Observe:
    """Sets of experts and weights by expert of rows whose logits are `base` but for the given ones."""
    logits, bias_E = torch.full((len(rows), 256), base), torch.zeros(256)
    for row, values in enumerate(rows):
        for expert, logit in values.items():
            logits[row, expert] = logit
    for expert, number in (bias or {}).items():
        bias_E[expert] = number

    def observe(target: InTreeTarget) -> list[dict[int, float]]:
        ids, weights = _routed(target, logits.clone(), bias_E.clone())
        return [dict(zip(i, w, strict=True)) for i, w in zip(ids, weights, strict=True)]

    return observe


# Seven sure experts, and two that compete for the eighth place, in four groups of 32.
SURE = {0: 5.0, 1: 5.0, 32: 5.0, 33: 5.0, 64: 5.0, 65: 5.0, 96: 5.0}
NEAR = SURE | {97: 1.001953125, 98: 1.0}
TIPPED = {98: 1e-4}
FINE_BIAS = dict.fromkeys(SURE, 7.5) | {97: 6.990, 98: 7.010}


def eighth(found: dict[int, float]) -> int:
    (expert,) = set(found) - set(SURE)
    return expert


effect("router_bf16_both", routing([NEAR], TIPPED), lambda c, f: (eighth(c[0]), eighth(f[0])) == (97, 98))
effect(
    "router_bf16_bias",
    routing([SURE | {97: 0.0, 98: -0.04}], FINE_BIAS),  # scores 0.500 and 0.490, biases 0.02 apart
    lambda c, f: (eighth(c[0]), eighth(f[0])) == (98, 97),
)
effect(
    "router_batch_precision",
    lambda target: [routing([NEAR] * rows, TIPPED)(target)[0] for rows in (8, 9)],
    lambda c, f: [eighth(r) for r in c] == [97, 97] and [eighth(r) for r in f] == [97, 98],
)
effect(
    "router_masked_zero",
    routing([SURE | {97: 4.0, 200: 2.0}], dict.fromkeys(range(256), -1.5)),
    lambda c, f: set(c[0]) == {*SURE, 97} and set(c[0]) != set(f[0]) and {e // 32 for e in f[0]} != {0, 1, 2, 3},
)
effect(
    "router_group_max",
    routing([SURE | {97: 4.0, 128: 6.0}]),  # one strong expert, and a group of two
    lambda c, f: 128 not in c[0] and 128 in f[0],
)
effect(
    "router_bf16_groups",
    routing([{0: 5.0, 1: 5.0, 32: 5.0, 33: 5.0, 64: 5.0, 65: 5.0, 96: 0.5, 97: 0.5, 128: 0.502, 129: 0.502}]),
    lambda c, f: {128, 129} <= set(c[0]) and {96, 97} <= set(f[0]),
)
effect(
    "router_no_group_limit",
    routing([SURE | {160: 4.0}]),  # a fifth group
    lambda c, f: 160 not in c[0] and 160 in f[0],
)
PLAIN = routing([SURE | {97: -1.0}], {97: 1.0})
effect("router_biased_weights", PLAIN, lambda c, f: set(c[0]) == set(f[0]) and f[0][97] > 1.2 * c[0][97])
effect(
    "router_not_renormalised",
    PLAIN,
    lambda c, f: abs(sum(c[0].values()) - SCALE) < 1e-4 and sum(f[0].values()) > 2 * SCALE,
)
effect("router_scaled_twice", PLAIN, lambda c, f: abs(f[0][97] / c[0][97] - SCALE) < 1e-4)
effect("moe_no_routed_scale", PLAIN, lambda c, f: abs(sum(f[0].values()) - 1.0) < 1e-4 < sum(c[0].values()) - 1.0)


def nan_row(target: InTreeTarget) -> list[int]:
    return _routed(target, torch.full((1, 256), torch.nan), torch.zeros(256))[0][0]


effect("router_nan_row", nan_row, lambda c, f: len(set(c)) == 8 and f == [0] * 8)
effect(
    "router_ties_by_arrival",
    lambda target: [set(routing([SURE | {97: 1.0, 98: 1.0}])(target)[0]) for _ in range(2)],
    lambda c, f: c[0] == c[1] == f[0] != f[1],
)


def in_kernel_order(target: InTreeTarget) -> tuple[list[int], list[float]]:
    logits = torch.full((1, 256), -8.0)
    logits[0, torch.tensor([0, 1, 32, 33, 64, 65, 96, 97])] = torch.tensor([-3.0, 1, 0, 2, -1, -2, 1, 3])
    ids, weights = _routed(target, logits, torch.zeros(256))
    return ids[0], weights[0]


effect(
    "router_weights_resorted",
    in_kernel_order,
    lambda c, f: c[0] == f[0] and c[1] != f[1] and sorted(c[1]) == sorted(f[1]),
)


def gate_values(target: InTreeTarget) -> Tensor:
    weight = torch.tensor([[1.0, 2**-9], [1.0, 0.0]])
    gate = packing.Gate(weight=weight, bias=torch.zeros(2))
    return router.gate_logits(torch.ones(1, 2), gate, "fp32", "fp32", router.Casts())[0]


def sums_of_ranks(target: InTreeTarget) -> list[float]:
    """1e8, -1e8 and 1 of three ranks, as each of them adds them up: only in this order the 1 is not lost."""
    parts = [torch.tensor([part]) for part in (1e8, -1e8, 1.0)]
    ranks: Any = [SimpleNamespace(rank=rank, world=3, all_gather=lambda _part: parts) for rank in range(3)]
    return [float(communicator.all_sum(part, end)) for part, end in zip(parts, ranks, strict=True)]


effect("router_own_part_first", sums_of_ranks, lambda c, f: (c, f) == ([1.0, 1.0, 1.0], [1.0, 0.0, 0.0]))
effect("router_bf16_logits", gate_values, lambda c, f: c[0] > c[1] and f[0] == f[1] == 1.0)


def cancelling(target: InTreeTarget) -> list[float]:
    gate = packing.Gate(weight=torch.tensor([[256.0, 1.0, -256.0, 1.0]]), bias=torch.zeros(1))
    return [float(router.gate_logits(torch.ones(1, 4), gate, "fp32", "fp32", router.Casts())[0, 0]) for _ in range(4)]


effect("router_bf16_partials", cancelling, lambda c, f: c == [2.0] * 4 and len(set(f)) > 1)
effect(
    "router_bf16_bias_loaded",
    lambda target: float(torch.tensor(7.01).to(packing._TORCH[target.options.bias])),
    lambda c, f: abs(c - 7.01) < 1e-6 and f == 7.0,
)


def casts(target: InTreeTarget) -> int:
    counted = router.Casts()
    gate = packing.Gate(weight=torch.eye(4).bfloat16(), bias=torch.zeros(4))
    router.gate_logits(torch.ones(1, 4).bfloat16(), gate, "bf16", "fp32", counted)
    return counted.bf16_to_fp32


effect("latency_extra_cast", casts, lambda c, f: (c, f) == (0, 1))


def chosen(rows: Sequence[Sequence[float]], lens: Sequence[int], k: int, *, calls: int = 1, pad: int = 0) -> Observe:
    """Indices of each call of the decode kernel; row r has lens[r] columns, the storage `pad` more than the view."""
    width = max(len(row) for row in rows)
    stored = torch.full((len(rows), width + pad), 50.0)
    for number, row in enumerate(rows):
        stored[number, : len(row)] = torch.tensor(row)

    def observe(target: InTreeTarget) -> list[list[list[int]]]:
        kernels, found = target.kernels, []
        for _ in range(calls):
            indices = torch.full((len(rows), k), -1, dtype=torch.int32)
            lengths = torch.tensor(lens, dtype=torch.int32)
            logits = stored[:, :width]
            kernels.top_k_per_row_decode(logits, 1, lengths, indices, len(rows), logits.stride(0), 1, k=k, stable=True)
            found.append(indices.tolist())
        return found

    return observe


TIED = chosen([[9.0] + [0.0] * 20], [21], 8)
effect("topk_tie_cap", TIED, lambda c, f: len(set(c[0][0])) == 8 and f[0][0].count(-1) == 3 and 0 in f[0][0])
effect(
    "topk_sentinel_outranks",
    chosen([[3.0, 2.0] + [-torch.inf] * 8], [10], 4),
    lambda c, f: max(c[0][0]) < 10 <= max(f[0][0]),
)
SHORT = chosen([[3.0, 2.0, 1.0]], [2], 3)
effect("topk_pads_with_zero", SHORT, lambda c, f: c[0][0][2] == -1 and f[0][0][2] == 0)
effect(
    "topk_stale_padding",
    lambda target: [chosen([[3.0, 2.0, 1.0]], [length], 3)(target)[0][0][2] for length in (3, 2)],
    lambda c, f: c == [2, -1] and f == [2, 2],
)


def raised(observe: Observe) -> Observe:
    def run(target: InTreeTarget) -> str:
        try:
            observe(target)
        except (RuntimeError, IndexError, ValueError) as error:
            return type(error).__name__
        return ""

    return run


effect("topk_short_row_raises", raised(SHORT), lambda c, f: (c, f) == ("", "RuntimeError"))


def from_column_five(target: InTreeTarget) -> list[int]:
    indices = torch.full((1, 2), -1, dtype=torch.int32)
    bounds = torch.tensor([5], dtype=torch.int32), torch.tensor([9], dtype=torch.int32)
    logits = torch.arange(10.0)[None]
    target.kernels.top_k_per_row_prefill(logits, *bounds, indices, None, 1, 10, 1, k=2, stable=True)
    return indices[0].tolist()


effect("topk_wrong_base", from_column_five, lambda c, f: (sorted(c), sorted(f)) == ([7, 8], [2, 3]))
effect(
    "topk_by_arrival",
    chosen([[1.0] * 40], [40], 4, calls=2),
    lambda c, f: c[0] == c[1] == [[0, 1, 2, 3]] and f[0] != f[1],
)
effect("topk_without_newest", chosen([[1.0, 2.0, 9.0]], [3], 1), lambda c, f: (c, f) == ([[[2]]], [[[1]]]))
effect(
    "topk_dense_rows",
    chosen([[1.0, 2.0, 3.0], [1.0, 9.0, 3.0]], [3, 3], 1, pad=5),
    lambda c, f: c[0][1] == [1] and f[0][1] != [1],
)
effect("topk_twice", chosen([[4.0, 3.0, 2.0]], [3], 2), lambda c, f: c == [[[0, 1]]] and f == [[[0, 0]]])
effect(
    "topk_compares_bf16",
    chosen([[1.0, 1.001, 0.0]], [3], 1),
    lambda c, f: (c, f) == ([[[1]]], [[[0]]]),
)


FP8, EMPTY = torch.float8_e4m3fn, torch.ones(0, 256)


def experts(rows: int, last_id: int = 1) -> Observe:
    """The output of two experts of ones on `rows` rows of ones, or the error in words."""

    def observe(target: InTreeTarget) -> Any:
        kernels: Any = target.kernels
        ids = torch.tensor([[0, last_id]] * rows, dtype=torch.int32).view(rows, 2)
        w1, w2 = torch.ones(2, 8, 8), torch.ones(2, 8, 4)
        try:
            out: Tensor = kernels.fused_moe(torch.ones(rows, 8), w1, w2, torch.ones(rows, 2), ids)
        except Exception as error:
            return type(error).__name__
        return out.tolist()

    return observe


def raised(run: Any) -> str:
    try:
        run()
    except Exception as error:
        return type(error).__name__
    return ""


effect("interface_no_row_raises", experts(0), lambda c, f: (c, f) == ([], "RuntimeError"))
effect(
    "interface_no_row_is_one",
    lambda target: [len(part) for part in cast(Any, target.kernels).per_group_quant_hip(EMPTY, quant_dtype=FP8)],
    lambda c, f: (c, f) == ([0, 0], [1, 1]),
)
effect(
    "interface_single_row_unwritten",
    lambda target: [experts(rows)(target)[0][0] for rows in (1, 2)],
    lambda c, f: c[0] == c[1] == f[1] and f[0] != f[0],
)
effect("interface_expert_beyond", experts(1, 2), lambda c, f: c == "OutOfBoundsError" and f == [[f[0][0]] * 8])


def wide_ids(target: InTreeTarget) -> tuple[str, list[int]]:
    ids, kernels = torch.full((2, 8), -1), cast(Any, target.kernels)
    logits, bias, weights = torch.zeros(2, 256), torch.zeros(256), torch.empty(2, 8)
    told = raised(lambda: kernels.biased_grouped_topk(logits, bias, weights, ids, 8, 4, True, SCALE))
    return told, ids[1].tolist()


effect("interface_wide_ids", wide_ids, lambda c, f: c[0] == "TypeError" and f == ("", [-1] * 8))


def short_bias(target: InTreeTarget) -> str:
    return raised(lambda: _routed(target, torch.zeros(1, 256), torch.zeros(256).bfloat16()))


effect("interface_short_bias", short_bias, lambda c, f: (c, f) == ("OutOfBoundsError", ""))


def far_slot(target: InTreeTarget) -> tuple[str, float]:
    cache, kernels = torch.zeros(1, 4, 3), cast(Any, target.kernels)
    told = raised(
        lambda: kernels.concat_and_cache_mla(
            torch.ones(2, 2), torch.ones(2, 1), cache, torch.tensor([3, 4]), "auto", torch.ones(1)
        )
    )
    return told, float(cache.sum())


effect("interface_slot_beyond", far_slot, lambda c, f: (c, f) == (("OutOfBoundsError", 0.0), ("", 3.0)))


def kept_groups(target: InTreeTarget) -> list[str]:
    ids, kernels = torch.empty(1, 8, dtype=torch.int32), cast(Any, target.kernels)
    logits, bias, weights = torch.zeros(1, 256), torch.zeros(256), torch.empty(1, 8)
    return [
        raised(lambda kept=kept: kernels.biased_grouped_topk(logits, bias, weights, ids, 8, kept, True, SCALE))
        for kept in (0, 4, 9)
    ]


effect("interface_kept_groups", kept_groups, lambda c, f: (c, f) == (["ValueError", "", "ValueError"], [""] * 3))


def narrow_indices(target: InTreeTarget) -> tuple[str, list[int]]:
    found, kernels = torch.full((1, 2), -7, dtype=torch.int32), cast(Any, target.kernels)
    lens = torch.tensor([3], dtype=torch.int32)
    told = raised(lambda: kernels.top_k_per_row_decode(torch.zeros(1, 9), 1, lens, found, 1, 9, 1, k=4))
    return told, found[0].tolist()


effect("interface_narrow_indices", narrow_indices, lambda c, f: (c, f) == (("ValueError", [-7, -7]), ("", [0, 1])))
