"""One rank's part of the model, cut as vLLM cuts it without expert parallelism.

Query and value heads are divided among the ranks (wq_b and wkv_b by rows, wo by columns), and so is the inner width of
every MLP: dense, shared, and each routed expert (w1 and w3 by rows, w2 by columns). All else is on every rank: the
latent projections, the norms, the gate, the whole indexer, embedding and head (vLLM also divides the last two, which
changes no sum). What a rank computes for `attn_out` and `ffn_out` is then a summand of the whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from dsv32_fast.metadata import MIN_HEADS
from dsv32_ref.config import Config
from dsv32_ref.weights import LayerWeights, Weights

BLOCK = 128  # block fp8 scales cover 128 x 128


def shard_config(config: Config, world: int) -> Config:
    """The dimensions that a rank sees.

    Raises:
        ValueError: `world` is not positive, or does not divide the heads or an inner width.
    """
    if world < 1:
        raise ValueError(f"world is {world}; give a positive number of ranks")
    cut = ("n_heads", "inter_dim", "moe_inter_dim")
    for name in cut:
        if getattr(config, name) % world:
            raise ValueError(f"{name} {getattr(config, name)} is not a multiple of world {world}; choose another world")
    return config.replace(**{name: getattr(config, name) // world for name in cut})


def padded_heads(heads: int) -> int:
    """Heads that a rank gives to AITER's decode kernel: fewer than 16 are repeated up to 16.

    Raises:
        ValueError: fewer than 16 that do not divide 16.
    """
    if heads < MIN_HEADS and MIN_HEADS % heads:
        raise ValueError(f"{heads} heads on a rank do not divide {MIN_HEADS}; choose another world")
    return max(MIN_HEADS, heads)


def shard(config: Config, weights: Weights, rank: int, world: int) -> Weights:
    """The weights of one rank, for `shard_config(config, world)`; MTP layers are left out.

    Raises:
        ValueError: a rank outside the world, a world that does not divide, or block-fp8 scales that a cut would split.
    """
    shard_config(config, world)
    if not 0 <= rank < world:
        raise ValueError(f"rank is {rank}; give one of 0 to {world - 1}")
    layers = tuple(_layer(config, w, number, rank, world) for number, w in enumerate(weights.layers))
    return dataclasses.replace(weights, layers=layers, mtp=())


def _layer(config: Config, w: LayerWeights, number: int, rank: int, world: int) -> LayerWeights:
    attn = dataclasses.replace(
        w.attn,
        wq_b=_cut(w.attn.wq_b, 0, rank, world, "wq_b"),
        wkv_b=_cut(w.attn.wkv_b, 0, rank, world, "wkv_b"),
        wo=_cut(w.attn.wo, 1, rank, world, "wo"),
    )
    ffn: Any = w.ffn
    if config.kind(number) == "dense":
        return dataclasses.replace(w, attn=attn, ffn=_mlp(ffn, rank, world))
    experts = {number: _mlp(expert, rank, world) for number, expert in ffn.experts.items()}
    shared = None if ffn.shared is None else _mlp(ffn.shared, rank, world)
    return dataclasses.replace(w, attn=attn, ffn=dataclasses.replace(ffn, experts=experts, shared=shared))


def _mlp(w: Any, rank: int, world: int) -> Any:
    axes = {"w1": 0, "w2": 1, "w3": 0}
    return dataclasses.replace(w, **{n: _cut(getattr(w, n), axis, rank, world, n) for n, axis in axes.items()})


def _cut(matrix: Any, axis: int, rank: int, world: int, name: str) -> Any:
    """The rank's rows (axis 0) or columns (axis 1) of a plain or block-fp8 matrix."""
    if isinstance(matrix, torch.Tensor):
        return matrix.chunk(world, axis)[rank]
    size = matrix.bits.shape[axis] // world
    if world > 1 and size % BLOCK:
        raise ValueError(f"{name} would be cut every {size}, inside its fp8 blocks of {BLOCK}; choose another world")
    bits, scale = matrix.bits.narrow(axis, rank * size, size), matrix.scale.chunk(world, axis)[rank]
    return dataclasses.replace(matrix, bits=bits, scale=scale)


def place(weights: Weights, device: torch.device) -> Weights:
    """The same weights on a device."""

    def visit(part: Any) -> Any:
        if isinstance(part, torch.Tensor):
            return part.to(device)
        if isinstance(part, Mapping):
            return {key: visit(value) for key, value in part.items()}
        if isinstance(part, tuple):
            return tuple(visit(value) for value in part)
        if part is None:
            return None
        return dataclasses.replace(part, **{f.name: visit(getattr(part, f.name)) for f in dataclasses.fields(part)})

    placed: Weights = visit(weights)
    return placed
