"""The least time of a decode step: what must be read over the memory bandwidth, or computed over the peak rate.

Every term is a lower bound, so that a measured time below the floor is impossible, not fast: of the routed experts
only as many count as one token chooses, of the cache only what the chosen tokens need, activations count nothing.

Peaks: MI355X, 8 TB/s of HBM3E, 2.5 PFLOP/s dense bf16 and 5 PFLOP/s dense fp8 (AMD's data sheet). A host core is
credited with 128 bytes and 2048 bf16 operations (AMX) per cycle at 5 GHz, beyond any processor on sale.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import msgspec

from dsv32_ref.config import Config


class Peaks(msgspec.Struct, frozen=True, kw_only=True):
    """What hardware does at most, in bytes and operations per second."""

    name: str
    bytes_per_s: float
    flop_per_s: float


MI355X_PEAKS = Peaks(name="MI355X", bytes_per_s=8e12, flop_per_s=5e15)


def host_peaks() -> Peaks:
    """The processor of this machine, all cores, generously."""
    cores = os.cpu_count() or 1
    return Peaks(name=f"host, {cores} cores", bytes_per_s=cores * 128 * 5e9, flop_per_s=cores * 2048 * 5e9)


def active_weights(config: Config) -> int:
    """Weights that one token passes through: attention, indexer, dense or chosen and shared experts, head."""
    c = config
    attention = c.dim * c.q_lora_rank + c.q_lora_rank * c.n_heads * c.qk_head_dim + c.dim * c.latent_dim
    attention += c.n_heads * (c.qk_nope_head_dim + c.v_head_dim) * c.kv_lora_rank + c.n_heads * c.v_head_dim * c.dim
    attention += c.q_lora_rank * c.index_n_heads * c.index_head_dim + c.dim * (c.index_head_dim + c.index_n_heads)
    dense = 3 * c.dim * c.inter_dim
    chosen = c.n_activated_experts + c.n_shared_experts
    moe = 3 * c.dim * c.moe_inter_dim * chosen + c.dim * c.n_routed_experts
    kinds = [c.kind(layer) for layer in range(c.n_layers)]
    return len(kinds) * attention + kinds.count("dense") * dense + kinds.count("moe") * moe + c.dim * c.vocab_size


def step_floor(
    config: Config, contexts: Sequence[int], peaks: Peaks = MI355X_PEAKS, *, ranks: int = 1, bytes_per_weight: float = 1
) -> float:
    """Seconds that a decode step of one token per request takes at least.

    Args:
        config: dimensions of the model.
        contexts: cached tokens per request.
        peaks: of one rank's hardware.
        ranks: tensor-parallel ranks that share the weights; caches are on every rank.
        bytes_per_weight: 1 for fp8, 2 for bf16.

    Raises:
        ValueError: no request, a negative context, or no rank.
    """
    if not contexts or min(contexts) < 0 or ranks < 1:
        raise ValueError(f"contexts {list(contexts)[:3]} and ranks {ranks}: give at least one request and one rank")
    weights = active_weights(config) / ranks
    latents = sum(min(n, config.index_topk) for n in contexts) * config.latent_dim * 2
    keys = sum(contexts) * (config.index_head_dim + 4)
    bytes_read = weights * bytes_per_weight + config.n_layers * (latents + keys)
    return max(bytes_read / peaks.bytes_per_s, 2 * weights * len(contexts) / peaks.flop_per_s)
