"""Effects of faults in RoPE, the indexer, the experts' layer and the batch of a step.

Legend: T rows, J indexer heads, I indexer width, R rotated width, S positions.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from effect_table import Observe, effect, ints
from torch import Tensor

from dsv32_fast import attention, experts, indexing, layers, packing, state
from dsv32_fast import path as decode_path
from dsv32_fast.layers import FP8, Linear, rope_half_split, rope_interleaved
from dsv32_fuzz.targets.intree import InTreeTarget
from dsv32_ref.config import GOLDEN, Config
from dsv32_ref.quant import hadamard_matrix

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


def batch_of_drafts(target: InTreeTarget) -> tuple[list[int], list[int], list[int]]:
    """Lengths, positions and slots: two requests with three and one new tokens, one row of padding."""
    caches = state.CacheState(GOLDEN.replace(n_layers=1, n_dense_layers=0), 32, 4, torch.device("cpu"))
    caches.append({0: [1, 1], 1: [1, 1, 1]})
    batch = caches.append({0: [1, 1, 1], 1: [1]}, 5)
    return batch.lengths.tolist(), batch.positions.tolist(), batch.new_slots.tolist()


effect(
    "mtp_future_keys",
    batch_of_drafts,
    lambda c, f: c[0] == [3, 4, 5, 4, 0] and f == ([5, 5, 5, 4, 0], *c[1:]),
)
effect(
    "mtp_one_position",
    batch_of_drafts,
    lambda c, f: c[1] == [2, 3, 4, 3, 0] and f == (c[0], [2, 2, 2, 3, 0], c[2]),
)
effect(
    "cache_padding_has_a_slot",
    batch_of_drafts,
    lambda c, f: c[2][-1] == -1 and f == (*c[:2], [*c[2][:-1], 0]),
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
    return indexing.index_scores(
        query, caches.index[0], batch, ways, width=2, preshuffle=False, kernels=target.kernels
    ).shape[1]


effect("latency_full_width", score_width, lambda c, f: (c, f) == (2, 4096))
