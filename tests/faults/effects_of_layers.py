"""Effects of faults in attention, reduction, RoPE, the indexer and the experts' layer.

Legend: T rows, H heads, C latent, D latent + RoPE, J indexer heads, I indexer width, S positions.
"""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from effect_table import Observe, effect
from torch import Tensor

from dsv32_fast import attention, experts, indexing, layers, packing, state
from dsv32_fast import path as decode_path
from dsv32_fast.kernels.emulated import attention as emulated_attention
from dsv32_fast.kernels.emulated import pieces, reduce, splitkv
from dsv32_fast.layers import FP8, Linear, rope_half_split, rope_interleaved
from dsv32_fuzz.targets.intree import InTreeTarget
from dsv32_ref.config import GOLDEN, Config
from dsv32_ref.quant import hadamard_matrix

HEADS, LATENT, DIM = 16, 16, 24


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def attended(lens: tuple[int, ...], *, lse: bool = False, heads: int = HEADS) -> Observe:
    """Which values each row averages: every query is zero but in its RoPE part, key s holds s in all latent dims.

    The index list is 0, 1, 2, ...: row t owns the next lens[t] entries. Unsplit plan, so the gather alone is seen.
    """
    total = sum(lens)
    indptr = ints(0, *np.cumsum(lens).tolist())
    works = torch.zeros(len(lens), 8, dtype=torch.int32)
    for row in range(len(lens)):
        works[row] = ints(row, -1, row, row + 1, int(indptr[row]), int(indptr[row + 1]), 0, 0)

    def observe(target: InTreeTarget) -> tuple[Tensor, Tensor | None]:
        kernels: Any = target.kernels
        q = torch.zeros(len(lens), heads, DIM, dtype=torch.bfloat16)
        q[..., LATENT] = torch.arange(len(lens))[:, None] * 4.0  # row t prefers keys with a large RoPE part
        q[..., LATENT] += torch.arange(heads) / 4
        kv = torch.arange(float(total))[:, None].repeat(1, DIM).bfloat16()
        kv[:, LATENT:] = (torch.arange(total) % 3 == 0)[:, None]
        out = torch.full((len(lens), heads, LATENT), torch.nan, dtype=torch.bfloat16)
        _, found = kernels.mla_decode_fwd(
            q,
            kv[:, None, None],
            out,
            torch.arange(len(lens) + 1, dtype=torch.int32),
            indptr,
            torch.arange(total, dtype=torch.int32),
            torch.ones(len(lens), dtype=torch.int32),
            1,
            sm_scale=1.0,
            work_meta_data=torch.zeros(2, dtype=torch.uint64),
            work_indptr=ints(0, len(lens)),
            work_info_set=works,
            reduce_indptr=ints(*[0] * (len(lens) + 1)),
            reduce_final_map=torch.zeros(len(lens), 2, dtype=torch.int32),
            reduce_partial_map=ints(0),
            return_lse=lse,
        )
        return out.float()[..., 0], found

    return observe


EVEN = attended((3, 3))
effect(
    "attention_lost_key",
    EVEN,  # of row 0's head 0, which weighs keys 0, 1, 2 alike, key 2 becomes key 0
    lambda c, f: abs(float(c[0][0, 0]) - 1.0) < 1e-2 and abs(float(f[0][0, 0]) - 1 / 3) < 1e-2,
)
effect("attention_shifted_window", EVEN, lambda _, f: abs(float(f[0][0, 0]) - (5 + 0 + 1) / 3) < 2e-2)
effect(
    "attention_rows_exchanged",
    EVEN,  # row 0 gets the query that prefers key 0, row 1 the even-handed one
    lambda _, f: float(f[0][0, 0]) < 0.2 and abs(float(f[0][1, 0]) - 4.0) < 2e-2,
)
effect("attention_heads_rotated", EVEN, lambda c, f: torch.equal(f[0], c[0].roll(1, 1)))
effect(
    "attention_no_rope_part",
    EVEN,
    lambda c, f: abs(float(f[0][1, 0]) - 4.0) < 2e-2 and float(c[0][1, 0]) < 3.2,
)
effect(
    "reduce_unsplit_lse",
    attended((3, 3), lse=True),
    lambda c, f: bool(c[1].isfinite().all()) and bool(f[1].isnan().all()),
)


class _SeenError(Exception):
    pass


def _scale_seen(target: InTreeTarget) -> float | None:
    """The scale at the last stop before the scores, 1 / sqrt(width) standing for none."""
    seen: list[float] = []

    def operands(*args: Any) -> Any:
        seen.append(args[4])
        raise _SeenError

    original = emulated_attention._operands
    emulated_attention._operands = operands
    try:
        attended((3, 3))(target)
    except _SeenError:
        pass
    finally:
        emulated_attention._operands = original
    return seen[0]


effect("scale_kernel_default", _scale_seen, lambda c, f: (c, f) == (1.0, None))


class _Table(SimpleNamespace):
    """The metadata of rows with the given keys and owners."""


def gathered(topk: list[list[int]], table: list[list[int]], owner: list[int], lens: list[int]) -> Observe:
    def observe(target: InTreeTarget) -> list[int]:
        paged = torch.full((sum(lens),), -7, dtype=torch.int32)
        metadata: Any = _Table(
            paged_kv_indptr_T1=ints(0, *np.cumsum(lens).tolist()),
            req_id_per_token_T=ints(*owner),
            paged_kv_indices=paged,
        )
        attention.fill_gather_list(torch.tensor(topk, dtype=torch.int32), metadata, torch.tensor(table), 4)
        return paged.tolist()

    return observe


TWO = gathered([[5, 0, -1], [1, 4, 2]], [[3, 6], [9, 2]], [0, 1], [3, 3])
CLEAN_LIST = [25, 12, -1, 37, 8, 38]
effect("attention_slot_zero", TWO, lambda c, f: c == CLEAN_LIST and f == [25, 12, 0, 37, 8, 38])
effect("attention_logical_slots", TWO, lambda c, f: c == CLEAN_LIST and f == [5, 0, -1, 1, 4, 2])
effect("attention_first_table", TWO, lambda c, f: c == CLEAN_LIST and f == [25, 12, -1, 13, 24, 14])
effect("attention_page_start", TWO, lambda c, f: c == CLEAN_LIST and f == [24, 12, -1, 36, 8, 36])


def layer_output(live: tuple[int, ...] = (3, 1), heads: int = 4) -> Observe:
    """What the layer's decode makes of a kernel that returns row and head numbers; requests have live[r] rows."""

    def kernel(q: Tensor, kv: Tensor, out: Tensor, *args: Any, **kwargs: Any) -> None:
        rows, count = out.shape[:2]
        out[:] = (torch.arange(rows)[:, None] + torch.arange(count) / 32)[..., None]
        seen["scale"] = kwargs["sm_scale"]

    seen: dict[str, float] = {}

    def observe(target: InTreeTarget) -> tuple[list[float], list[float], float]:
        rows = sum(live)
        config = GOLDEN.replace(n_heads=heads)
        owner = [request for request, count in enumerate(live) for _ in range(count)]
        metadata: Any = SimpleNamespace(
            qo_indptr_T1=None,
            paged_kv_indptr_T1=torch.arange(rows + 1),
            req_id_per_token_T=ints(*owner),
            paged_kv_indices=None,
            paged_kv_last_page_len_T=None,
            plan=SimpleNamespace(
                work_metadata_ptrs=None,
                work_indptr=None,
                work_info_set=None,
                reduce_indptr=None,
                reduce_final_map=None,
                reduce_partial_map=None,
            ),
        )
        kernels: Any = SimpleNamespace(mla_decode_fwd=kernel)
        q = torch.zeros(rows, heads, config.latent_dim)
        out = attention.decode(q, torch.zeros(1, 1, config.latent_dim), metadata, config, kernels)
        return out[:, 0, 0].tolist(), (out[0, :, 0] * 32).tolist(), seen["scale"]

    return observe


effect(
    "attention_unpads_wrongly",
    layer_output(),
    lambda c, f: (c[1], f[1]) == ([0.0, 4.0, 8.0, 12.0], [0.0, 0.0, 0.0, 0.0]),
)
effect(
    "mtp_identical_rows",
    layer_output((3, 2)),
    lambda c, f: (c[0], f[0]) == ([0.0, 1.0, 2.0, 3.0, 4.0], [0.0, 0.0, 0.0, 3.0, 4.0]),
)
effect(
    "scale_no_mscale",
    layer_output(),
    lambda c, f: abs(f[2] - GOLDEN.qk_head_dim**-0.5) < 1e-9 < c[2] - f[2],
)

LSES = torch.tensor([[[0.0], [0.0], [0.0], [-math.inf]]])
OUTPUTS = torch.tensor([1.0, 2.0, 4.0, 9.0]).view(1, 4, 1, 1)


def merged(target: InTreeTarget) -> list[float]:
    """Three partials online, then four (the last one empty) in two passes."""
    few = reduce.merge_online(OUTPUTS[:, :3], LSES[:, :3])[0]
    many = reduce.merge_two_pass(OUTPUTS, LSES)[0]
    uneven = reduce.merge_two_pass(OUTPUTS, torch.tensor([[[0.0], [0.0], [0.0], [3.0]]]))[0]
    return [float(value) for value in (few, many, uneven)]


def close(a: list[float], b: list[float]) -> bool:
    return all(abs(x - y) < 1e-5 for x, y in zip(a, b, strict=True))


WEIGHTED = (7 + 9 * math.exp(3)) / (3 + math.exp(3))
CLEAN_MERGE = [7 / 3, 7 / 3, WEIGHTED]
effect("reduce_averages", merged, lambda c, f: close(c, CLEAN_MERGE) and close(f, [7 / 3, 4.0, 4.0]))
effect("reduce_last_lost", merged, lambda c, f: close(c, CLEAN_MERGE) and close(f, [7 / 3, 7 / 3, 7 / 3]))
effect("reduce_empty_counts", merged, lambda c, f: close(c, CLEAN_MERGE) and close(f, [7 / 3, 4.0, WEIGHTED]))
effect(
    "reduce_bf16_partials",
    lambda _: float(reduce.merge_online(torch.full((1, 2, 1, 1), 1.001), LSES[:, :2])[0]),
    lambda c, f: abs(c - 1.001) < 1e-6 and f == 1.0,
)
effect(
    "reduce_empty_tile",
    lambda _: float(reduce.merge_two_pass(torch.zeros(1, 4, 1, 1), torch.full((1, 4, 1), -math.inf))[1]),
    lambda c, f: math.isinf(c) and math.isnan(f),
)


def piece_lse(target: InTreeTarget) -> float:
    """Two keys of score 0: ln 2."""
    return float(pieces._softmax_times_values(torch.zeros(1, 1, 2), torch.zeros(1, 2, 1), torch.bfloat16)[1])


effect("reduce_lse_base_2", piece_lse, lambda c, f: abs(c - math.log(2)) < 1e-6 and abs(f - 1.0) < 1e-6)


def split_counts(target: InTreeTarget) -> list[int]:
    """Rows of three and of one piece."""
    made = pieces.Pieces(
        q_start=np.array([0, 0, 0, 1]),
        q_count=np.ones(4, dtype=np.int64),
        kv_start=np.zeros(4, dtype=np.int64),
        tokens=np.ones(4, dtype=np.int64),
        slack=np.zeros(4, dtype=np.int64),
    )
    found: list[int] = splitkv._splits_per_row(made, np.array([0, 1, 2, 0]), 2).tolist()
    return found


effect("reduce_stale_split_count", split_counts, lambda c, f: (c, f) == ([3, 1], [3, 3]))


def scattered(target: InTreeTarget) -> list[float]:
    lses = torch.full((2, 1), 5.0)
    values = torch.tensor([[[1.0]], [[2.0]]])
    emulated_attention._scatter("partial_lse", lses, np.array([0, 1]), values, np.array([True, True]))
    return lses.flatten().tolist()


effect("reduce_unwritten_partial", scattered, lambda c, f: c == [1.0, 2.0] and f[0] == 1.0 and math.isnan(f[1]))

POSITIONS = torch.tensor([1, 2, 3])
SMALL_TABLE = layers.rope_table(GOLDEN, POSITIONS)
R = GOLDEN.qk_rope_head_dim


def turned(target: InTreeTarget) -> tuple[Tensor, Tensor, Tensor]:
    """The RoPE parts of cached keys and of queries of ones, and the queries' table at their own positions."""
    generator = torch.Generator().manual_seed(0)
    made = make_attention(generator)
    x = torch.randn(3, GOLDEN.dim, generator=generator)
    table = decode_path.rope_table(GOLDEN, POSITIONS)
    keys = attention.latents(x, made, table, GOLDEN, target.kernels)[:, GOLDEN.kv_lora_rank :]
    qr = torch.randn(3, GOLDEN.q_lora_rank, generator=generator)
    queries = attention.absorbed_queries(qr, made, table, GOLDEN, target.kernels)[:, :, GOLDEN.kv_lora_rank :]
    return keys, queries, table[0]


def make_attention(generator: torch.Generator) -> packing.Attention:
    c = GOLDEN

    def matrix(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) / shape[-1] ** 0.5

    return packing.Attention(
        q_a=Linear(weight=matrix(c.q_lora_rank, c.dim)),
        q_norm=torch.ones(c.q_lora_rank),
        q_b=Linear(weight=matrix(c.n_heads * c.qk_head_dim, c.q_lora_rank)),
        kv_a=Linear(weight=matrix(c.latent_dim, c.dim)),
        kv_norm=torch.ones(c.kv_lora_rank),
        uk=matrix(c.n_heads, c.qk_nope_head_dim, c.kv_lora_rank),
        uv=matrix(c.n_heads, c.v_head_dim, c.kv_lora_rank),
        o=Linear(weight=matrix(c.dim, c.n_heads * c.v_head_dim)),
    )


def as_half_split(turned_right: Tensor) -> Tensor:
    """What half-split turning gives, from what interleaved turning gave."""
    return rope_half_split(unturned(turned_right), SMALL_TABLE)


def unturned(x: Tensor) -> Tensor:
    return rope_interleaved(x, (SMALL_TABLE[0], -SMALL_TABLE[1]))


def same(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, atol=1e-5)


effect(
    "rope_mla_half_split",
    turned,
    lambda c, f: same(f[0], as_half_split(c[0])) and same(f[1], as_half_split(c[1])) and not same(c[0], f[0]),
)
effect(
    "rope_layouts_mixed",
    turned,
    lambda c, f: same(f[0], c[0]) and same(f[1], as_half_split(c[1])) and not same(f[1], c[1]),
)
effect(
    "rope_key_not_turned", turned, lambda c, f: same(f[0], unturned(c[0])) and same(f[1], c[1]) and not same(f[0], c[0])
)
effect(
    "rope_row_behind",
    turned,
    lambda c, f: (
        same(f[0], c[0])
        and same(f[1][1], rope_interleaved(unturned(c[1])[1:2], tuple(p[:1] for p in SMALL_TABLE))[0])  # type: ignore[arg-type]
        and not same(f[1], c[1])
    ),
)


def table_of(config: Config, *positions: int) -> Observe:
    return lambda _: decode_path.rope_table(config, torch.tensor(positions))


effect(
    "rope_next_position",
    table_of(GOLDEN, 1, 2),
    lambda c, f: same(f[0][0], c[0][1]) and same(f[1][0], c[1][1]) and not same(f[0], c[0]),
)
effect(
    "rope_backwards", table_of(GOLDEN, 3), lambda c, f: same(f[0], c[0]) and same(f[1], -c[1]) and not same(f[1], c[1])
)
effect(
    "rope_no_yarn",
    table_of(GOLDEN, 1),
    lambda c, f: (
        same(f[0][0, -1:], torch.cos(GOLDEN.rope_theta ** torch.tensor([2 / R - 1])))
        and torch.atan2(c[1], c[0])[0, -1] < 0.5 * torch.atan2(f[1], f[0])[0, -1]
    ),
)
effect(
    "rope_bf16_angles",
    table_of(GOLDEN, 4, 257),
    lambda c, f: (
        same(f[0][0, :1], c[0][0, :1]) and abs(float(f[0][1, 0] - math.cos(256.0))) < 1e-4 and not same(c[0], f[0])
    ),
)


def index_parts(target: InTreeTarget) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keys, queries, query scales and head weights of an indexer whose key norm has a bias and whose inputs a mean."""
    c, generator = GOLDEN, torch.Generator().manual_seed(2)
    made = packing.Indexer(
        q_b=Linear(weight=torch.randn(c.index_n_heads * c.index_head_dim, c.q_lora_rank, generator=generator)),
        k=Linear(weight=torch.randn(c.index_head_dim, c.dim, generator=generator)),
        k_norm_weight=torch.ones(c.index_head_dim),
        k_norm_bias=torch.full((c.index_head_dim,), 0.5),
        head_weights=Linear(weight=torch.randn(c.index_n_heads, c.dim, generator=generator)),
    )
    x, qr = torch.randn(3, c.dim, generator=generator), torch.randn(3, c.q_lora_rank, generator=generator)
    keys = indexing.index_keys(x, made, SMALL_TABLE, c, target.kernels)
    queries, scales = indexing.index_queries(qr, made, SMALL_TABLE, c, target.kernels)
    weights = indexing.head_weights(x, scales, made, c, target.kernels)
    return keys, queries.float() * scales[..., None], scales, weights


I_WIDTH, J_HEADS = GOLDEN.index_head_dim, GOLDEN.index_n_heads


def index_unturned(x: Tensor) -> Tensor:
    back = rope_half_split(x[..., :R], (SMALL_TABLE[0], -SMALL_TABLE[1]))
    return torch.cat([back, x[..., R:]], -1)


effect(
    "indexer_rope_interleaved",
    index_parts,
    lambda c, f: (
        same(f[0][:, :R], rope_interleaved(index_unturned(c[0])[:, :R], SMALL_TABLE))
        and same(f[0][:, R:], c[0][:, R:])
        and not same(f[0], c[0])
    ),
)
effect(
    "indexer_turns_last",
    index_parts,
    lambda c, f: (
        same(f[0][:, :-R], index_unturned(c[0])[:, :-R])
        and same(f[0][:, -R:], rope_half_split(index_unturned(c[0])[:, -R:], SMALL_TABLE))
        and not same(f[0], c[0])
    ),
)
effect(
    "indexer_no_norm_bias",
    index_parts,
    lambda c, f: same(index_unturned(f[0]), index_unturned(c[0]) - 0.5),
)
effect(
    "indexer_mean_kept",
    index_parts,
    lambda c, f: (
        float((index_unturned(c[0]) - 0.5).mean(1).abs().max())
        < 1e-5
        < float((index_unturned(f[0]) - 0.5).mean(1).abs().max())
    ),
)


def rotated(x: Tensor) -> Tensor:
    return x @ hadamard_matrix(I_WIDTH).float() * I_WIDTH**-0.5


effect(
    "indexer_hadamard_query",
    index_parts,  # two quantisations apart: each value is off by at most 1/16 of itself, 0.2 of all is far above
    lambda c, f: (
        same(f[0], c[0])
        and float((f[1] - rotated(c[1])).norm() / c[1].norm()) < 0.2 < float((f[1] - c[1]).norm() / c[1].norm())
    ),
)
effect("indexer_no_query_scale", index_parts, lambda c, f: same(f[3] * c[2], c[3]) and not same(f[3], c[3]))
effect("indexer_scaled_twice", index_parts, lambda c, f: same(f[3], c[3] * I_WIDTH**-0.5) and not same(f[3], c[3]))


def ragged(target: InTreeTarget) -> Tensor:
    """Two heads of weights 1 and 2; key u is u + 1 in the first dim with scale 3, but the first key is negative."""
    q = torch.zeros(2, 2, 16)
    q[..., 0] = 1.0
    k = torch.zeros(4, 16)
    k[:, 0] = torch.tensor([-1.0, 2.0, 3.0, 4.0])
    starts, ends = ints(0, 2), ints(2, 4)
    weights = torch.tensor([[1.0, 2.0]] * 2)
    return target.kernels.fp8_mqa_logits(q.to(FP8), k.to(FP8), torch.full((4,), 3.0), weights, starts, ends)


INF = math.inf
CLEAN_LOGITS = torch.tensor([[0.0, 18.0, -INF, -INF], [-INF, -INF, 27.0, 36.0]])


def logits_are(first: list[float], second: list[float]) -> Any:
    wanted = torch.tensor([first, second])
    return lambda c, f: torch.equal(c, CLEAN_LOGITS) and torch.equal(f, wanted)


effect("indexer_no_relu", ragged, logits_are([-9.0, 18.0, -INF, -INF], [-INF, -INF, 27.0, 36.0]))
effect("indexer_one_head", ragged, logits_are([0.0, 6.0, -INF, -INF], [-INF, -INF, 9.0, 12.0]))
effect("indexer_no_key_scales", ragged, logits_are([0.0, 6.0, -INF, -INF], [-INF, -INF, 9.0, 12.0]))
effect("indexer_length_for_end", ragged, logits_are([0.0, 18.0, -INF, -INF], [-INF] * 4))


def paged_tail(target: InTreeTarget) -> list[list[float]]:
    """Logits of 2051 keys around position 2048, of a kernel call with page size 64."""
    cache = torch.zeros(33, 64, 1, 20, dtype=torch.uint8)
    kernels: Any = target.kernels
    keys = torch.zeros(2051, 16)
    keys[:, 0] = torch.arange(2051) % 7 + 1
    kernels.indexer_k_quant_and_cache(keys, cache.view(33, 64, 20), torch.arange(2051), 16, "ue8m0")
    q = torch.zeros(1, 1, 1, 16)
    q[..., 0] = 1.0
    out = torch.zeros(1, 2051)
    table = torch.arange(33, dtype=torch.int32)[None]
    kernels.deepgemm_fp8_paged_mqa_logits(
        q.to(FP8), cache, torch.ones(1, 1), out, ints(2051), table, 2051, KVBlockSize=64
    )
    return [out[0, :2048].tolist(), out[0, 2048:].tolist()]


effect("indexer_broken_from_2049", paged_tail, lambda c, f: c[0] == f[0] and c[1] == f[1][::-1] and c[1] != f[1])


def mixture(target: InTreeTarget) -> float:
    """Routed experts give 2, the shared one 1 (silu(a) b = 1 by construction)."""
    one = 1.2784645  # silu(one) = 1
    up = Linear(weight=torch.tensor([[1.0]]))
    shared = packing.Mlp(gate_up=(Linear(weight=torch.tensor([[one]])), up), down=up)
    w: Any = packing.Moe(gate=None, experts=None, shared=shared)  # type: ignore[arg-type]
    original = experts.routed
    experts.routed = lambda *_: torch.full((1, 1), 2.0)  # type: ignore[assignment]
    try:
        return float(experts.mixture(torch.ones(1, 1), torch.ones(1, 1), ints(0)[None], w, target.kernels))
    finally:
        experts.routed = original


effect("moe_no_shared", mixture, lambda c, f: abs(c - 3.0) < 1e-4 and f == 2.0)
effect("moe_shared_divided", mixture, lambda c, f: abs(c - 3.0) < 1e-4 and abs(f - 2.4) < 1e-4)


def batch_of_drafts(target: InTreeTarget) -> tuple[list[int], list[int]]:
    """Two requests with three and one new tokens, one row of padding."""
    caches = state.CacheState(GOLDEN.replace(n_layers=1, n_dense_layers=0), 32, 4, torch.device("cpu"))
    caches.append({0: [1, 1], 1: [1, 1, 1]})
    batch = caches.append({0: [1, 1, 1], 1: [1]}, 5)
    return batch.lengths.tolist(), batch.positions.tolist()


effect(
    "mtp_future_keys",
    batch_of_drafts,
    lambda c, f: c[0] == [3, 4, 5, 4, 0] and f == ([5, 5, 5, 4, 0], c[1]),
)
effect(
    "mtp_one_position",
    batch_of_drafts,
    lambda c, f: c[1] == [2, 3, 4, 3, 0] and f == (c[0], [2, 2, 2, 3, 0]),
)


def score_width(target: InTreeTarget) -> int:
    """Scores of a step of one short request."""
    config = dataclasses.replace(GOLDEN, n_layers=1, n_dense_layers=0)
    caches = state.CacheState(config, 32, 16, torch.device("cpu"))
    batch = caches.append({0: [1, 1]})
    query = indexing.IndexQuery(
        q=torch.zeros(2, config.index_n_heads, config.index_head_dim).to(FP8),
        weights=torch.ones(2, config.index_n_heads),
    )
    ways = indexing.split_rows(batch, 4)
    return indexing.index_scores(query, caches.index[0], batch, ways, preshuffle=False, kernels=target.kernels).shape[1]


effect("latency_full_width", score_width, lambda c, f: (c, f) == (2, 4096))
