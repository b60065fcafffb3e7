"""Effects of faults in AITER's functions: each is called by itself on inputs that show the story.

Legend: T tokens, E experts, K chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from effect_table import Observe, effect
from torch import Tensor

from dsv32_fast import packing, router
from dsv32_fast.kernels.emulated import cache as emulated_cache
from dsv32_fast.kernels.emulated import indexer as emulated_indexer
from dsv32_fast.layers import FP8
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

SLOTS = 32


def keys(count: int, dims: int = 16) -> Tensor:
    return torch.randn(count, dims, generator=torch.Generator().manual_seed(3)) * torch.arange(1, count + 1)[:, None]


def stored_keys(page: int, preshuffle: bool, slots: Sequence[int], dims: int = 16) -> Observe:
    """Keys that are written to `slots` and read back at them, dequantised."""

    def observe(target: InTreeTarget) -> Tensor:
        cache = torch.full((SLOTS // page, page, dims + 4), 0xFF, dtype=torch.uint8)
        where = torch.tensor(slots)
        written = keys(len(slots), dims)
        target.kernels.indexer_k_quant_and_cache(written, cache, where, dims, "ue8m0", preshuffle=preshuffle)
        raw, scales = emulated_cache.read_keys(cache, where // page, where % page, dims, preshuffle)
        return (raw.view(FP8).float() * scales - written).abs() / written.abs().amax(1, keepdim=True)

    return observe


def wrong_rows(error: Tensor) -> list[int]:
    """Rows that are further off than e4m3 allows: half a step of 1/8 of a value, and half of it when saturated."""
    return (~(error <= 1 / 16 + 1e-6).all(1)).nonzero().flatten().tolist()


FLAT = stored_keys(16, False, (1, 2, 17))
effect("cache_interleaved_page", FLAT, lambda c, f: wrong_rows(c) == [] and len(wrong_rows(f)) == 3)
effect(
    "cache_flat_writer",
    stored_keys(16, True, (1, 2, 17), 32),  # two tiles
    lambda c, f: wrong_rows(c) == [] and len(wrong_rows(f)) == 3,
)
effect("cache_scale_rounded_down", FLAT, lambda c, f: wrong_rows(c) == [] and wrong_rows(f) != [])
effect("cache_index_page_missing", FLAT, lambda c, f: wrong_rows(c) == [] and wrong_rows(f) == [2])


def read_back_by(function: str) -> Observe:
    """Keys 0 to 23 of one request, two pages of 16 in the order 1, 0, by the gather or by the paged kernel's reader."""

    def observe(target: InTreeTarget) -> Tensor:
        cache = torch.zeros(SLOTS // 16, 16, 20, dtype=torch.uint8)
        position = torch.arange(24)
        slots = torch.where(position < 16, position + 16, position - 16)
        emulated_cache.indexer_k_quant_and_cache(keys(24), cache, slots, 16, "ue8m0")
        table = torch.tensor([1, 0], dtype=torch.int32)
        if function == "gather":
            raw, scales = torch.empty(24, 16, dtype=torch.uint8), torch.empty(24, 1)
            ends = torch.tensor([0, 24], dtype=torch.int32)
            for _ in range(2):  # a second chunk of the same request
                target.kernels.cp_gather_indexer_k_quant_cache(cache, raw, scales, table[None], ends)
        else:
            raw, flat = emulated_indexer._paged_keys(cache, table, 24, 16, False)
            scales = flat[:, None]
        return (raw.view(FP8).float() * scales - keys(24)).abs() / keys(24).abs().amax(1, keepdim=True)

    return observe


GATHERED = read_back_by("gather")
effect("cache_gather_scales_shifted", GATHERED, lambda c, f: wrong_rows(c) == [] and wrong_rows(f) != [])
effect("indexer_gather_skipped", GATHERED, lambda c, f: wrong_rows(c) == [] and len(wrong_rows(f)) == 24)
effect(
    "cache_table_per_token",
    read_back_by("paged"),
    lambda c, f: wrong_rows(c) == [] and wrong_rows(f) == [*range(1, 16)],
)


def one_logit(target: InTreeTarget) -> float:
    """q and k are 1 in the first dim, bytes of e4m3fn."""
    q = torch.zeros(1, 1, 16)
    q[..., 0] = 1.0
    k = q[0].to(FP8)
    out = target.kernels.fp8_mqa_logits(
        q.to(FP8), k, torch.ones(1), torch.ones(1, 1), torch.tensor([0]), torch.tensor([1])
    )
    return float(out[0, 0])


effect("cache_fnuz_reader", one_logit, lambda c, f: (c, f) == (1.0, 0.25))
effect(
    "cache_e8m0_scales",
    lambda target: float(
        target.kernels.per_group_quant_hip(torch.full((1, 128), 0.3 * 448), quant_dtype=FP8, group_size=128)[1]
    ),
    lambda c, f: abs(c - 0.3) < 1e-6 and f == 0.5,
)


def latent_rows(slots: Sequence[int]) -> Observe:
    """The first and the last value of every slot, of tokens whose latents are 1, 2, ... and RoPE keys negative."""

    def observe(target: InTreeTarget) -> list[tuple[float, float]]:
        cache = torch.zeros(1, 6, 6, dtype=torch.bfloat16)
        values = torch.arange(1.0, len(slots) + 1)[:, None]
        latent, rope = values.repeat(1, 4), -values.repeat(1, 2)
        where = torch.tensor(slots)
        target.kernels.concat_and_cache_mla(latent, rope, cache, where, "auto", torch.ones(1))
        return [(float(row[0]), float(row[-1])) for row in cache[0]]

    return observe


effect("cache_padding_to_slot_zero", latent_rows((2, -1)), lambda c, f: (c[0], f[0]) == ((0.0, 0.0), (2.0, -2.0)))
effect("cache_rope_first", latent_rows((2,)), lambda c, f: (c[2], f[2]) == ((1.0, -1.0), (-1.0, 1.0)))
effect("cache_slot_late", latent_rows((2,)), lambda c, f: c[2] == f[3] == (1.0, -1.0) and f[2] == (0.0, 0.0))

FAR = 3_728_271
"""The first slot whose offset slot x 576 does not fit into int32 (2^31 / 576 = 3 728 270.2)."""
FAR_KEY = 2**31 // 132 + 1


def far_slots(kernel: str, slot: int, width: int) -> Observe:
    """What is stored at a far slot and at the one before the wrap, in a sparse file."""

    def observe(target: InTreeTarget) -> list[bool]:
        kernels: Any = target.kernels
        where = torch.tensor([slot - 2, slot])
        with TemporaryDirectory() as folder:
            size = (slot + 1) * width
            dtype = torch.bfloat16 if kernel == "latent" else torch.uint8
            cache = torch.from_file(str(Path(folder) / "sparse"), shared=True, size=size, dtype=dtype)
            cache = cache.view(-1, 1, width)
            if kernel == "latent":
                ones = torch.ones(2, 512), torch.ones(2, 64)
                kernels.concat_and_cache_mla(*ones, cache, where, "auto", torch.ones(1))
            else:
                kernels.indexer_k_quant_and_cache(torch.ones(2, 128), cache, where, 128, "ue8m0")
            return [bool(cache[number].any()) for number in where.tolist()]

    return observe


effect(
    "cache_int32_latent_write",
    far_slots("latent", FAR, 576),
    lambda c, f: (c, f) == ([True, True], [True, False]),
)
effect(
    "cache_int32_index_write",
    far_slots("index", FAR_KEY, 132),
    lambda c, f: (c, f) == ([True, True], [True, False]),
)


def decode_arguments(target: InTreeTarget) -> list[int]:
    """1 where the read of a far slot is a wild access; all slots share the storage of one."""
    q = torch.zeros(1, 16, 576, dtype=torch.bfloat16)
    cache = torch.zeros(1, 1, 1, 576, dtype=torch.bfloat16).expand(FAR + 1, 1, 1, 576)
    indptr = torch.tensor([0, 1], dtype=torch.int32)
    found = []
    for slot in (FAR - 1, FAR):
        indices = torch.tensor([slot], dtype=torch.int32)
        out = torch.empty(1, 16, 512, dtype=torch.bfloat16)
        try:
            target.kernels.mla_decode_fwd(q, cache, out, indptr, indptr, indices, indptr[1:], 1, sm_scale=1.0)
            found.append(0)
        except IndexError:
            found.append(1)
    return found


effect("cache_int32_latent_read", decode_arguments, lambda c, f: (c, f) == ([0, 0], [0, 1]))


def moe_output(target: InTreeTarget) -> list[float]:
    """Two experts, the second of which gives three times as much; gate and up differ, w2 is no symmetric tile."""
    generator = torch.Generator().manual_seed(1)
    w1, w2 = torch.randn(2, 32, 16, generator=generator), torch.randn(2, 16, 16, generator=generator)
    w2[1] *= 3
    x = torch.randn(1, 16, generator=generator)
    weights, ids = torch.tensor([[1.0, 0.5]]), torch.tensor([[1, 0]], dtype=torch.int32)
    kernels: Any = target.kernels
    out: list[float] = kernels.fused_moe(x, w1, w2, weights, ids)[0].tolist()
    return out


def by_hand(*, swapped: bool = False, chosen: Sequence[tuple[float, int]]) -> list[float]:
    generator = torch.Generator().manual_seed(1)
    w1, w2 = torch.randn(2, 32, 16, generator=generator), torch.randn(2, 16, 16, generator=generator)
    w2[1] *= 3
    x = torch.randn(1, 16, generator=generator)
    out = torch.zeros(1, 16)
    for weight, expert in chosen:
        gate, up = (x @ w1[expert].T).chunk(2, 1)
        gate, up = (up, gate) if swapped else (gate, up)
        out += weight * ((torch.nn.functional.silu(gate) * up) @ w2[expert].T)
    return out[0].tolist()


def near(a: list[float], b: list[float]) -> bool:
    return torch.allclose(torch.tensor(a), torch.tensor(b), rtol=1e-4, atol=1e-5)


RIGHT = by_hand(chosen=((1.0, 1), (0.5, 0)))
effect(
    "moe_up_before_gate",
    moe_output,
    lambda c, f: near(c, RIGHT) and near(f, by_hand(swapped=True, chosen=((1.0, 1), (0.5, 0)))),
)
effect("moe_one_expert_short", moe_output, lambda c, f: near(c, RIGHT) and near(f, by_hand(chosen=((1.0, 1),))))
effect(
    "moe_next_expert",
    moe_output,
    lambda c, f: near(c, RIGHT) and near(f, by_hand(chosen=((1.0, 0), (0.5, 1)))),
)


def across_tiles(target: InTreeTarget) -> list[float]:
    """Row 0 of w2 picks column 16, the first element of the second tile."""
    x = torch.ones(1, 32)
    w1 = torch.zeros(1, 64, 32)
    w1[0, 16, 0], w1[0, 48, 0] = 1.0, 1.0
    w2 = torch.zeros(1, 32, 32)
    w2[0, 0, 16] = 1.0
    kernels: Any = target.kernels
    ids = torch.zeros(1, 1, dtype=torch.int32)
    out: list[float] = kernels.fused_moe(x, w1, w2, torch.ones(1, 1), ids)[0].tolist()
    return out


effect("moe_tiles_transposed", across_tiles, lambda c, f: c[0] > 0.5 and f[0] == 0.0)
