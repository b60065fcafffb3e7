"""Weights in the layouts and types that the kernels take, made once from the model's weights.

Matrices become the activation dtype (block fp8 stays fp8), norm gains stay fp32. The two halves of wkv_b are split for
absorption, and the routed experts are stacked, gate rows before up rows, as `fused_moe` wants them. On a GPU AITER also
wants these stacks shuffled: see `shuffle` of `pack`.

Legend: O output width, N input width, H heads, C latent, V value width, E experts, I inner width, M model width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor

from dsv32_fast.layers import BLOCK, Linear, dequantised
from dsv32_fast.options import Options
from dsv32_ref.config import Config
from dsv32_ref.weights import LayerWeights, Weights

T = TypeVar("T")
Shuffle = Callable[[Tensor], Tensor]
_TORCH = {"fp32": torch.float32, "bf16": torch.bfloat16}


def natural(stack: Tensor) -> Tensor:
    """The layout of the emulated kernel: unchanged."""
    return stack


class _BlockFp8(Protocol):
    @property
    def bits(self) -> Tensor: ...
    @property
    def scale(self) -> Tensor: ...


class _Mlp(Protocol):
    @property
    def w1(self) -> Tensor | _BlockFp8: ...
    @property
    def w2(self) -> Tensor | _BlockFp8: ...
    @property
    def w3(self) -> Tensor | _BlockFp8: ...


class _Moe(Protocol):
    @property
    def gate(self) -> _Gate: ...
    @property
    def experts(self) -> Mapping[int, _Mlp]: ...
    @property
    def shared(self) -> _Mlp | None: ...


class _Gate(Protocol):
    @property
    def weight(self) -> Tensor: ...
    @property
    def bias(self) -> Tensor: ...


@dataclass(frozen=True, kw_only=True)
class Mlp:
    """Gate and up stacked [2 I, M], down [M, I]."""

    gate_up: tuple[Linear, Linear]
    down: Linear


@dataclass(frozen=True, kw_only=True)
class Gate:
    """Router matrix [E, M] in the activation dtype, and the bias [E] in the type that the options store it in."""

    weight: Tensor
    bias: Tensor


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Routed experts: w1 [E, 2 I, M] (gate first), w2 [E, M, I], and their block scales where they are fp8."""

    w1: Tensor
    w2: Tensor
    w1_scale: Tensor | None
    w2_scale: Tensor | None


@dataclass(frozen=True, kw_only=True)
class Moe:
    """Router, routed experts, shared expert."""

    gate: Gate
    experts: Experts
    shared: Mlp | None


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Projections of multi-head latent attention; UK [H, N, C] and UV [H, V, C] are plain."""

    q_a: Linear
    q_norm: Tensor
    q_b: Linear
    kv_a: Linear
    kv_norm: Tensor
    uk: Tensor
    uv: Tensor
    o: Linear


@dataclass(frozen=True, kw_only=True)
class Indexer:
    """Projections of the lightning indexer."""

    q_b: Linear
    k: Linear
    k_norm_weight: Tensor
    k_norm_bias: Tensor
    head_weights: Linear


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One decoder layer."""

    attn_norm: Tensor
    attn: Attention
    indexer: Indexer
    ffn_norm: Tensor
    ffn: Mlp | Moe


@dataclass(frozen=True, kw_only=True)
class Packed:
    """The whole model."""

    embed: Tensor
    layers: tuple[Layer, ...]
    norm: Tensor
    head: Tensor


def pack(config: Config, weights: Weights, options: Options, dtype: torch.dtype, shuffle: Shuffle = natural) -> Packed:
    """The model's weights as the path holds them.

    Args:
        config: dimensions.
        weights: the model.
        options: fix the type of the router's bias.
        dtype: of activations, hence of plain matrices.
        shuffle: what the routed experts' kernel wants done to its stacks; `aiter.ops.shuffle.shuffle_weight` on a GPU.

    Raises:
        ValueError: a layer lacks routed experts.
    """
    return Packed(
        embed=weights.embed.to(dtype),
        layers=tuple(_layer(config, w, n, options, dtype, shuffle) for n, w in enumerate(weights.layers)),
        norm=weights.norm.float(),
        head=weights.head.to(dtype),
    )


def moved(part: T, device: torch.device) -> T:
    """A copy of packed weights, or any part of them, on `device`."""

    def visit(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(device)
        if isinstance(value, tuple):
            return tuple(visit(item) for item in value)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return type(value)(**{field.name: visit(getattr(value, field.name)) for field in dataclasses.fields(value)})
        return value

    copied: T = visit(part)
    return copied


def _layer(
    config: Config, w: LayerWeights, number: int, options: Options, dtype: torch.dtype, shuffle: Shuffle
) -> Layer:
    return Layer(
        attn_norm=w.attn_norm.float(),
        attn=_attention(config, w, dtype),
        indexer=Indexer(
            q_b=_linear(w.indexer.wq_b, dtype),
            k=_linear(w.indexer.wk, dtype),
            k_norm_weight=w.indexer.k_norm_weight.float(),
            k_norm_bias=w.indexer.k_norm_bias.float(),
            head_weights=_linear(w.indexer.weights_proj, dtype),
        ),
        ffn_norm=w.ffn_norm.float(),
        ffn=_feed_forward(config, w, number, options, dtype, shuffle),
    )


def _attention(config: Config, w: LayerWeights, dtype: torch.dtype) -> Attention:
    nope = config.qk_nope_head_dim
    up_HXC = _plain(w.attn.wkv_b, dtype).reshape(config.n_heads, nope + config.v_head_dim, -1)
    return Attention(
        q_a=_linear(w.attn.wq_a, dtype),
        q_norm=w.attn.q_norm.float(),
        q_b=_linear(w.attn.wq_b, dtype),
        kv_a=_linear(w.attn.wkv_a, dtype),
        kv_norm=w.attn.kv_norm.float(),
        uk=up_HXC[:, :nope],
        uv=up_HXC[:, nope:],
        o=_linear(w.attn.wo, dtype),
    )


def _feed_forward(
    config: Config, w: LayerWeights, number: int, options: Options, dtype: torch.dtype, shuffle: Shuffle
) -> Mlp | Moe:
    if config.kind(number) == "dense":
        return _mlp(cast(_Mlp, w.ffn), dtype)
    ffn = cast(_Moe, w.ffn)
    missing = sorted(set(range(config.n_routed_experts)) - set(ffn.experts))
    if missing:
        raise ValueError(f"layers.{number}.ffn.experts.{missing[0]} is missing; the optimised path needs all experts")
    return Moe(
        gate=Gate(weight=ffn.gate.weight.to(dtype), bias=ffn.gate.bias.to(_TORCH[options.bias])),
        experts=_experts(ffn.experts, dtype, shuffle),
        shared=None if ffn.shared is None else _mlp(ffn.shared, dtype),
    )


def _mlp(w: _Mlp, dtype: torch.dtype) -> Mlp:
    return Mlp(gate_up=(_linear(w.w1, dtype), _linear(w.w3, dtype)), down=_linear(w.w2, dtype))


def _experts(experts: Mapping[int, _Mlp], dtype: torch.dtype, shuffle: Shuffle) -> Experts:
    packed = [_mlp(experts[e], dtype) for e in range(len(experts))]
    fp8 = packed[0].down.scale is not None
    if fp8 and packed[0].down.weight.shape[1] % BLOCK:
        raise ValueError(
            f"moe_inter_dim {packed[0].down.weight.shape[1]} is no multiple of {BLOCK}; fp8 experts need one"
        )
    return Experts(
        w1=shuffle(torch.stack([torch.cat([part.weight for part in p.gate_up]) for p in packed])),
        w2=shuffle(torch.stack([p.down.weight for p in packed])),
        w1_scale=torch.stack([torch.cat([_scale(part) for part in p.gate_up]) for p in packed]) if fp8 else None,
        w2_scale=torch.stack([_scale(p.down) for p in packed]) if fp8 else None,
    )


def _scale(w: Linear) -> Tensor:
    if w.scale is None:
        raise ValueError("routed experts mix fp8 and plain weights; quantise all of them or none")
    return w.scale


def _linear(matrix: Tensor | _BlockFp8, dtype: torch.dtype) -> Linear:
    if isinstance(matrix, Tensor):
        return Linear(weight=matrix.to(dtype))
    return Linear(weight=matrix.bits, scale=matrix.scale)


def _plain(matrix: Tensor | _BlockFp8, dtype: torch.dtype) -> Tensor:
    return matrix.to(dtype) if isinstance(matrix, Tensor) else dequantised(matrix.bits, matrix.scale).to(dtype)
