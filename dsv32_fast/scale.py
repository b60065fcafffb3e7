"""The optimised path at the true shapes of the 671B model, in a few GiB: every matrix is a window of a shared pool.

A matrix is a view that starts somewhere in its pool, and the experts of a layer are windows that start `STEP` values
apart: all matrices of a layer differ, and nearly all of their storage is common. Such weights have every shape and type
of the real ones, and the statistics that keep 61 layers finite (N(0, 1/in), norm gains of one, a router bias with a
large offset). They say nothing about the values of a real checkpoint.

Legend: T rows, E experts, H heads, X nope + value width, C latent, D latent + RoPE width, I indexer width.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from dsv32_fast import attention, indexing
from dsv32_fast.kernels.protocol import Kernels
from dsv32_fast.layers import BLOCK, FP8, Linear
from dsv32_fast.options import Options
from dsv32_fast.packing import Attention, Experts, Gate, Indexer, Layer, Mlp, Moe, Packed
from dsv32_fast.path import DecodePath, PathConfig
from dsv32_fast.state import CacheState
from dsv32_ref.config import Config
from dsv32_ref.weights import Weights

STEP = 4099
"""Values between the starts of experts: a prime, so that no two of 256 experts share a row of 256 or more values."""
_SLACK = 1 << 21
"""Values of a pool beyond the largest matrix: room for the starts of all windows, and for 255 steps."""
_STARTS = _SLACK - 256 * STEP
_DRAWN_AT_ONCE = 1 << 24


class Pool:
    """Windows of shared random values; each call returns the next one.

    Args:
        config: fixes how large the largest window is.
        fp8: whether matrices are e4m3 with block scales, where the published checkpoint has them so.
        seed: of the values.

    Raises:
        ValueError: more than 256 routed experts.
    """

    def __init__(self, config: Config, *, fp8: bool, seed: int = 0) -> None:
        if config.n_routed_experts > 256:
            raise ValueError(f"n_routed_experts {config.n_routed_experts} is above 256; the pool has no room for them")
        self._generator = torch.Generator().manual_seed(seed)
        matrices, plain = (max(map(math.prod, shapes)) for shapes in (_matrix_shapes(config), _plain_shapes(config)))
        self._bits = self._draw(matrices + _SLACK, FP8) if fp8 else None
        self._plain = {1.0: self._draw((plain if fp8 else max(matrices, plain)) + _SLACK, torch.bfloat16)}
        self._calls = 0

    def matrix(self, rows: int, columns: int) -> Linear:
        """A matrix [rows, columns] of standard deviation columns^-0.5, with its block scales if it is fp8."""
        weight, scale = self.stack(1, rows, columns)
        return Linear(weight=weight[0], scale=None if scale is None else scale[0])

    def stack(self, experts: int, rows: int, columns: int) -> tuple[Tensor, Tensor | None]:
        """Overlapping matrices [experts, rows, columns]; if fp8, with fp32 scales that differ from expert to expert."""
        shape = (experts, rows, columns)
        if self._bits is None:
            return self._window(self._scaled(columns**-0.5), shape), None
        blocks = (experts, -(-rows // BLOCK), -(-columns // BLOCK))
        spread = torch.rand(experts, 1, 1, generator=self._generator) * 1.5 + 0.5
        return self._window(self._bits, shape), (spread * columns**-0.5).expand(blocks)

    def plain(self, *shape: int, deviation: float) -> Tensor:
        """A bf16 window of `shape` and standard deviation `deviation`."""
        return self._window(self._scaled(deviation), (1, *shape))[0]

    def vector(self, size: int, deviation: float) -> Tensor:
        """fp32 [size], drawn anew."""
        return torch.randn(size, generator=self._generator) * deviation

    def _scaled(self, deviation: float) -> Tensor:
        if deviation not in self._plain:
            self._plain[deviation] = self._plain[1.0] * deviation
        return self._plain[deviation]

    def _window(self, values: Tensor, shape: tuple[int, ...]) -> Tensor:
        self._calls += 1
        inner = [math.prod(shape[axis + 1 :]) for axis in range(1, len(shape))]
        return values.as_strided(shape, (STEP, *inner), self._calls * 7919 % _STARTS)

    def _draw(self, size: int, dtype: torch.dtype) -> Tensor:
        values = torch.empty(size, dtype=dtype)
        for first in range(0, size, _DRAWN_AT_ONCE):
            count = min(_DRAWN_AT_ONCE, size - first)
            values[first : first + count] = torch.randn(count, generator=self._generator).to(dtype)
        return values


def _matrix_shapes(c: Config) -> Iterator[tuple[int, int]]:
    yield (c.n_heads * c.qk_head_dim, c.q_lora_rank)
    yield (c.n_heads * c.v_head_dim, c.dim)
    yield (c.index_n_heads * c.index_head_dim, c.q_lora_rank)
    yield from ((width, c.dim) for width in (c.q_lora_rank, c.latent_dim, c.index_head_dim, c.inter_dim))
    yield (max(2, c.n_shared_experts) * c.moe_inter_dim, c.dim)


def _plain_shapes(c: Config) -> Iterator[tuple[int, ...]]:
    yield from ((rows, c.dim) for rows in (c.vocab_size, c.n_routed_experts, c.index_n_heads))
    yield (c.n_heads, c.qk_nope_head_dim + c.v_head_dim, c.kv_lora_rank)


def pooled_weights(config: Config, options: Options, *, fp8: bool = False, seed: int = 0) -> Packed:
    """The packed model, all matrices from one `Pool`; on a CPU bf16 ones are several times faster than fp8 ones."""
    pool = Pool(config, fp8=fp8, seed=seed)
    return Packed(
        embed=pool.plain(config.vocab_size, config.dim, deviation=1.0),
        layers=tuple(_layer(config, pool, number, options) for number in range(config.n_layers)),
        norm=torch.ones(config.dim),
        head=pool.plain(config.vocab_size, config.dim, deviation=config.dim**-0.5),
    )


def _layer(c: Config, pool: Pool, number: int, options: Options) -> Layer:
    return Layer(
        attn_norm=torch.ones(c.dim),
        attn=_attention(c, pool),
        indexer=Indexer(
            q_b=pool.matrix(c.index_n_heads * c.index_head_dim, c.q_lora_rank),
            k=pool.matrix(c.index_head_dim, c.dim),
            k_norm_weight=torch.ones(c.index_head_dim),
            k_norm_bias=pool.vector(c.index_head_dim, 0.1),
            head_weights=Linear(weight=pool.plain(c.index_n_heads, c.dim, deviation=c.dim**-0.5)),
        ),
        ffn_norm=torch.ones(c.dim),
        ffn=_mlp(pool, c.dim, c.inter_dim) if c.kind(number) == "dense" else _moe(c, pool, options),
    )


def _attention(c: Config, pool: Pool) -> Attention:
    nope = c.qk_nope_head_dim
    up_HXC = pool.plain(c.n_heads, nope + c.v_head_dim, c.kv_lora_rank, deviation=c.kv_lora_rank**-0.5)
    return Attention(
        q_a=pool.matrix(c.q_lora_rank, c.dim),
        q_norm=torch.ones(c.q_lora_rank),
        q_b=pool.matrix(c.n_heads * c.qk_head_dim, c.q_lora_rank),
        kv_a=pool.matrix(c.latent_dim, c.dim),
        kv_norm=torch.ones(c.kv_lora_rank),
        uk=up_HXC[:, :nope],
        uv=up_HXC[:, nope:],
        o=pool.matrix(c.dim, c.n_heads * c.v_head_dim),
    )


def _mlp(pool: Pool, dim: int, inter: int) -> Mlp:
    return Mlp(gate_up=(pool.matrix(inter, dim), pool.matrix(inter, dim)), down=pool.matrix(dim, inter))


def _moe(c: Config, pool: Pool, options: Options) -> Moe:
    w1, w1_scale = pool.stack(c.n_routed_experts, 2 * c.moe_inter_dim, c.dim)
    w2, w2_scale = pool.stack(c.n_routed_experts, c.dim, c.moe_inter_dim)
    # A checkpoint's correction bias: a large offset common to the layer, a small spread.
    bias_E = pool.vector(c.n_routed_experts, 0.05) + 7.0
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[options.bias]
    return Moe(
        gate=Gate(
            weight=pool.plain(c.n_routed_experts, c.dim, deviation=1.5 * c.dim**-0.5),
            bias=bias_E.to(dtype),
        ),
        experts=Experts(w1=w1, w2=w2, w1_scale=w1_scale, w2_scale=w2_scale),
        shared=_mlp(pool, c.dim, c.n_shared_experts * c.moe_inter_dim) if c.n_shared_experts else None,
    )


def pooled_path(
    config: Config,
    options: Options,
    kernels: Kernels,
    path: PathConfig | None = None,
    *,
    fp8: bool = False,
    seed: int = 0,
) -> DecodePath:
    """The optimised path over `pooled_weights`, on the CPU: on a device each window would become a copy of its own.

    Raises:
        ValueError: another device, or activations other than bf16 (the pool's type).
    """
    path = path or PathConfig(max_num_batched_tokens=64)
    if path.device != "cpu" or path.activations != torch.bfloat16:
        raise ValueError(f"pooled weights are bf16 and on the cpu, not {path.activations} on {path.device}")
    packed = pooled_weights(config, options, fp8=fp8, seed=seed)
    hollow = Weights(embed=packed.embed, layers=(), norm=packed.norm, head=packed.head)
    made = DecodePath(config, hollow, options, kernels, path)
    made.weights = packed
    return made


def admit(path: DecodePath, state: CacheState, lengths: Mapping[int, int], seed: int = 0) -> None:
    """Gives each request `lengths[request]` cached tokens whose latents and index keys are random, without a prefill.

    They are written by the path's own kernels, in every layer, as N(0, 1): what their norms give.

    Raises:
        ValueError: too few free slots.
    """
    generator, config, kernels = torch.Generator().manual_seed(seed), path.config, path.kernels
    batch = state.append({request: [0] * length for request, length in lengths.items()})
    rows = len(batch.new_slots)
    for latent, index in zip(state.latent, state.index, strict=True):
        kv_TD = torch.randn(rows, config.latent_dim, generator=generator).to(torch.bfloat16)
        attention.write_latents(kv_TD, latent, batch.new_slots, config, kernels)
        k_TI = torch.randn(rows, config.index_head_dim, generator=generator).to(torch.bfloat16)
        indexing.write_keys(k_TI, index, batch.new_slots, preshuffle=state.preshuffle, kernels=kernels)


def tensors(part: Any) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of packed weights with the name of its field."""
    for field in dataclasses.fields(part):
        for value in _items(getattr(part, field.name)):
            if isinstance(value, Tensor):
                yield field.name, value
            elif value is not None:
                yield from tensors(value)


def _items(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def parameters(packed: Packed) -> int:
    """Weights of the model, counted as if each were stored once for itself; block scales are not counted."""
    return sum(tensor.numel() for name, tensor in tensors(packed) if not name.endswith("scale"))


def stored_bytes(packed: Packed) -> int:
    """Bytes of the distinct storages behind all tensors."""
    storages = [tensor.untyped_storage() for _, tensor in tensors(packed)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
