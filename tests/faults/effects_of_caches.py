"""Effects of faults in the kernels of caches, fp8 and experts.

Legend: T tokens, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from effect_table import Observe, effect
from torch import Tensor

from dsv32_fast.kernels.emulated import cache as emulated_cache
from dsv32_fast.kernels.emulated import indexer as emulated_indexer
from dsv32_fast.layers import FP8
from dsv32_fuzz.targets.intree import InTreeTarget

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
