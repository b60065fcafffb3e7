"""The weights of the model: their names and shapes, their checked assembly into layers, and a synthetic source.

Names are those of DeepSeek's inference code ("layers.3.attn.wq_a.weight"), matrices are [out, in]. A matrix may be
block fp8: "x.weight" in e4m3 with "x.scale" in fp32. MTP layers are numbered behind the main ones.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from dsv32_ref.config import Config
from dsv32_ref.indexer import IndexerWeights
from dsv32_ref.mla import MlaWeights
from dsv32_ref.moe import MlpWeights, MoeWeights
from dsv32_ref.quant import BLOCK, BlockFp8, Matrix, quantise_blocks
from dsv32_ref.router import GateWeights

W = TypeVar("W")
Shapes = dict[str, tuple[int, ...]]
_FP8_LINEARS = ("wq_a", "wq_b", "wkv_a", "wkv_b", "wo", "w1", "w2", "w3", "wk", "eh_proj")
"""The linears that the published checkpoint stores as block fp8; gate, weights_proj, embedding and head are bf16."""


@dataclass(frozen=True, kw_only=True)
class LayerWeights:
    """One decoder layer."""

    attn_norm: Tensor
    attn: MlaWeights
    indexer: IndexerWeights
    ffn_norm: Tensor
    ffn: MlpWeights | MoeWeights


@dataclass(frozen=True, kw_only=True)
class MtpWeights:
    """One multi-token-prediction layer; embedding and head are the main model's."""

    enorm: Tensor
    hnorm: Tensor
    eh_proj: Matrix
    layer: LayerWeights
    norm: Tensor


@dataclass(frozen=True, kw_only=True)
class Weights:
    """The whole model."""

    embed: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Tensor
    mtp: tuple[MtpWeights, ...] = ()


def convert(weights: W, dtype: torch.dtype) -> W:
    """A copy of any weights with plain tensors in `dtype`; block-fp8 matrices keep their bits."""

    def visit(part: Any) -> Any:
        if isinstance(part, Tensor):
            return part.to(dtype)
        if isinstance(part, BlockFp8) or part is None:
            return part
        if isinstance(part, Mapping):
            return {key: visit(value) for key, value in part.items()}
        if isinstance(part, tuple):
            return tuple(visit(value) for value in part)
        fields = dataclasses.fields(part)
        return dataclasses.replace(part, **{field.name: visit(getattr(part, field.name)) for field in fields})

    converted: W = visit(weights)
    return converted


def layer_shapes(config: Config, layer: int) -> Shapes:
    """Names and shapes of one decoder layer."""
    c, prefix = config, f"layers.{layer}."
    attn, ffn = prefix + "attn.", prefix + "ffn."
    shapes: Shapes = {
        prefix + "attn_norm.weight": (c.dim,),
        attn + "wq_a.weight": (c.q_lora_rank, c.dim),
        attn + "q_norm.weight": (c.q_lora_rank,),
        attn + "wq_b.weight": (c.n_heads * c.qk_head_dim, c.q_lora_rank),
        attn + "wkv_a.weight": (c.latent_dim, c.dim),
        attn + "kv_norm.weight": (c.kv_lora_rank,),
        attn + "wkv_b.weight": (c.n_heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank),
        attn + "wo.weight": (c.dim, c.n_heads * c.v_head_dim),
        attn + "indexer.wq_b.weight": (c.index_n_heads * c.index_head_dim, c.q_lora_rank),
        attn + "indexer.wk.weight": (c.index_head_dim, c.dim),
        attn + "indexer.k_norm.weight": (c.index_head_dim,),
        attn + "indexer.k_norm.bias": (c.index_head_dim,),
        attn + "indexer.weights_proj.weight": (c.index_n_heads, c.dim),
        prefix + "ffn_norm.weight": (c.dim,),
    }
    if c.kind(layer) == "dense":
        return shapes | _mlp_shapes(ffn, c.dim, c.inter_dim)
    shapes |= {ffn + "gate.weight": (c.n_routed_experts, c.dim), ffn + "gate.bias": (c.n_routed_experts,)}
    for expert in range(c.n_routed_experts):
        shapes |= _mlp_shapes(f"{ffn}experts.{expert}.", c.dim, c.moe_inter_dim)
    if c.n_shared_experts:
        shapes |= _mlp_shapes(ffn + "shared_experts.", c.dim, c.n_shared_experts * c.moe_inter_dim)
    return shapes


def _mlp_shapes(prefix: str, dim: int, inter: int) -> Shapes:
    return {prefix + "w1.weight": (inter, dim), prefix + "w2.weight": (dim, inter), prefix + "w3.weight": (inter, dim)}


def mtp_shapes(config: Config, layer: int) -> Shapes:
    """Names and shapes of one MTP layer: a decoder layer, two norms, the joining projection and a final norm."""
    prefix = f"layers.{layer}."
    joins: Shapes = {prefix + name + ".weight": (config.dim,) for name in ("enorm", "hnorm", "shared_head.norm")}
    return layer_shapes(config, layer) | joins | {prefix + "eh_proj.weight": (config.dim, 2 * config.dim)}


def weight_shapes(config: Config) -> Shapes:
    """Names and shapes of every tensor of the model."""
    shapes: Shapes = {"embed.weight": (config.vocab_size, config.dim)}
    for layer in range(config.n_layers):
        shapes |= layer_shapes(config, layer)
    for layer in range(config.n_layers, config.n_layers + config.n_mtp_layers):
        shapes |= mtp_shapes(config, layer)
    return shapes | {"norm.weight": (config.dim,), "head.weight": (config.vocab_size, config.dim)}


class _Named:
    """Looks tensors up by name and checks each: there, of the right shape and dtype, finite."""

    def __init__(self, named: Mapping[str, Tensor], shapes: Shapes) -> None:
        self.named, self.shapes = named, shapes

    def matrix(self, name: str) -> Matrix:
        bits = self._find(name + ".weight")
        if bits.dtype != torch.float8_e4m3fn:
            return self.plain(name + ".weight")
        rows, columns = bits.shape
        scale = self._find(name + ".scale", (-(-rows // BLOCK), -(-columns // BLOCK)))
        if not bool((scale.isfinite() & (scale > 0)).all()):
            raise ValueError(
                f"{name}.scale holds a value that is not positive and finite; convert the checkpoint again"
            )
        return BlockFp8(bits=bits, scale=_finite(name + ".weight", bits, scale))

    def plain(self, name: str) -> Tensor:
        tensor = self._find(name)
        if tensor.dtype not in (torch.bfloat16, torch.float32, torch.float64):
            raise ValueError(f"{name} has dtype {tensor.dtype}; use bf16, fp32, or float8_e4m3fn with a scale")
        if not bool(tensor.isfinite().all()):
            raise ValueError(f"{name} holds NaN or infinity; a weight must be finite")
        return tensor

    def _find(self, name: str, shape: tuple[int, ...] | None = None) -> Tensor:
        if name not in self.named:
            raise ValueError(f"{name} is missing; the model needs every tensor that `weight_shapes` lists")
        tensor = self.named[name]
        wanted = self.shapes[name] if shape is None else shape
        if not isinstance(tensor, Tensor) or tuple(tensor.shape) != wanted:
            raise ValueError(f"{name} has shape {list(np.shape(tensor))}; this config needs {list(wanted)}")
        return tensor


def _finite(name: str, bits: Tensor, scale: Tensor) -> Tensor:
    """`scale` in fp32, once the fp8 bits hold no NaN (e4m3fnuz bytes read as e4m3fn turn -0 into NaN)."""
    if bool(bits.to(torch.float32).isnan().any()):
        raise ValueError(f"{name} holds fp8 NaN bytes; e4m3fn weights have none (were they written as e4m3fnuz?)")
    return scale.to(torch.float32)


def assemble_layer(
    config: Config, named: Mapping[str, Tensor], layer: int, experts: Collection[int] | None = None
) -> LayerWeights:
    """One decoder layer from named tensors; only the given routed experts where `experts` is set.

    Raises:
        ValueError: a tensor is missing, misshapen, of a wrong dtype or not finite; the message names it.
    """
    return _layer(config, _Named(named, layer_shapes(config, layer)), layer, experts)


def _layer(config: Config, at: _Named, layer: int, experts: Collection[int] | None) -> LayerWeights:
    prefix = f"layers.{layer}."
    attn, index = prefix + "attn.", prefix + "attn.indexer."
    plain = {"q_norm", "kv_norm"}
    fields = [field.name for field in dataclasses.fields(MlaWeights)]
    mla = {f: at.plain(f"{attn}{f}.weight") if f in plain else at.matrix(attn + f) for f in fields}
    return LayerWeights(
        attn_norm=at.plain(prefix + "attn_norm.weight"),
        attn=MlaWeights(**mla),  # type: ignore[arg-type]
        indexer=IndexerWeights(
            wq_b=at.matrix(index + "wq_b"),
            wk=at.matrix(index + "wk"),
            k_norm_weight=at.plain(index + "k_norm.weight"),
            k_norm_bias=at.plain(index + "k_norm.bias"),
            weights_proj=at.plain(index + "weights_proj.weight"),
        ),
        ffn_norm=at.plain(prefix + "ffn_norm.weight"),
        ffn=_mlp(at, prefix + "ffn.") if config.kind(layer) == "dense" else _moe(config, at, prefix + "ffn.", experts),
    )


def _mlp(at: _Named, prefix: str) -> MlpWeights:
    return MlpWeights(w1=at.matrix(prefix + "w1"), w2=at.matrix(prefix + "w2"), w3=at.matrix(prefix + "w3"))


def _moe(config: Config, at: _Named, prefix: str, experts: Collection[int] | None) -> MoeWeights:
    bias = at.plain(prefix + "gate.bias")
    if bias.dtype == torch.bfloat16:
        raise ValueError(f"{prefix}gate.bias is bf16; keep e_score_correction_bias in fp32, an upcast restores nothing")
    return MoeWeights(
        gate=GateWeights(weight=at.plain(prefix + "gate.weight"), bias=bias),
        experts={e: _mlp(at, f"{prefix}experts.{e}.") for e in (experts or range(config.n_routed_experts))},
        shared=_mlp(at, prefix + "shared_experts.") if config.n_shared_experts else None,
    )


def assemble(config: Config, named: Mapping[str, Tensor], dtype: torch.dtype = torch.float32) -> Weights:
    """The whole model from named tensors, plain ones converted to `dtype`.

    Raises:
        ValueError: a tensor is missing, misshapen, of a wrong dtype or not finite; the message names it.
    """
    at = _Named(named, weight_shapes(config))
    mtp_layers = range(config.n_layers, config.n_layers + config.n_mtp_layers)
    weights = Weights(
        embed=at.plain("embed.weight"),
        layers=tuple(_layer(config, at, layer, None) for layer in range(config.n_layers)),
        norm=at.plain("norm.weight"),
        head=at.plain("head.weight"),
        mtp=tuple(_mtp(config, at, layer) for layer in mtp_layers),
    )
    return convert(weights, dtype)


def _mtp(config: Config, at: _Named, layer: int) -> MtpWeights:
    prefix = f"layers.{layer}."
    return MtpWeights(
        enorm=at.plain(prefix + "enorm.weight"),
        hnorm=at.plain(prefix + "hnorm.weight"),
        eh_proj=at.matrix(prefix + "eh_proj"),
        layer=_layer(config, at, layer, None),
        norm=at.plain(prefix + "shared_head.norm.weight"),
    )


def quantise(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same model with the linears of the published checkpoint in block fp8 (`x.weight` in e4m3 and `x.scale`)."""
    out = dict(named)
    for name, tensor in named.items():
        stem = name.removesuffix(".weight")
        if stem.rsplit(".", 1)[-1] in _FP8_LINEARS:
            block = quantise_blocks(tensor)
            out |= {name: block.bits, stem + ".scale": block.scale}
    return out


def synthetic(config: Config, seed: int, shapes: Shapes | None = None) -> dict[str, Tensor]:
    """Named fp32 weights drawn by seed, each tensor from its own stream (so any subset `shapes` draws the same).

    Matrices are N(0, 1/in) on the bf16 grid. Two statistics of real checkpoints that plain Gaussians lack: the
    correction bias has a large common offset per layer (2..12) and a small spread (0.05), and two rope
    lanes per layer are outliers, in the indexer's keys and queries (only there does a missing Hadamard rotation show)
    and in MLA's keys.
    """
    names = weight_shapes(config) if shapes is None else shapes
    return {name: _draw(name, shape, seed, config) for name, shape in names.items()}


def _outlier_lanes(name: str, seed: int, config: Config) -> Tensor:
    """Two rope lanes, the same for all tensors of a layer."""
    layer = name.split(".")[1] if name.startswith("layers.") else ""
    rng = np.random.default_rng([seed, zlib.crc32(f"outliers {layer}".encode())])
    return torch.from_numpy(rng.choice(config.qk_rope_head_dim, 2, replace=False))


def _draw(name: str, shape: tuple[int, ...], seed: int, config: Config) -> Tensor:
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    z = torch.from_numpy(rng.standard_normal(shape, dtype=np.float32))
    if name.endswith("gate.bias"):
        return 0.05 * z + float(rng.uniform(2.0, 12.0))
    if name.endswith("k_norm.bias"):
        return 0.1 * z
    if name.endswith("norm.weight"):
        z = 1.0 + 0.1 * z
    lanes = _outlier_lanes(name, seed, config)
    if name.endswith("k_norm.weight"):
        z[lanes] *= 12.0
    if name.endswith("norm.weight"):
        return z
    if name.endswith("indexer.wq_b.weight"):
        z.view(config.index_n_heads, config.index_head_dim, -1)[:, lanes] *= 6.0
    if name.endswith("attn.wkv_a.weight"):
        z[config.kv_lora_rank + lanes] *= 8.0
    gain_of = {"embed.weight": 1.0, "gate.weight": 1.5 * shape[-1] ** -0.5}
    scale = next((s for suffix, s in gain_of.items() if name.endswith(suffix)), shape[-1] ** -0.5)
    drawn: Tensor = (z * scale).to(torch.bfloat16).to(torch.float32)
    return drawn
