"""The dimensions of DeepSeek-V3.2 and the rounding points of a run.

`Config()` is the published 671B model; smaller worlds replace fields (`GOLDEN` is the one of the recordings).
`Precision` says which roundings of the deployed path are simulated; `FP32` (none) is the ideal reference, in fp32 or
fp64 alike, because every stage computes in the dtype of its inputs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

ScaleFormat = Literal["ue8m0", "fp32"]
LayerKind = Literal["dense", "moe"]

_HF_NAMES = {
    "vocab_size": "vocab_size",
    "hidden_size": "dim",
    "intermediate_size": "inter_dim",
    "moe_intermediate_size": "moe_inter_dim",
    "num_hidden_layers": "n_layers",
    "first_k_dense_replace": "n_dense_layers",
    "num_attention_heads": "n_heads",
    "n_routed_experts": "n_routed_experts",
    "n_shared_experts": "n_shared_experts",
    "num_experts_per_tok": "n_activated_experts",
    "n_group": "n_expert_groups",
    "topk_group": "n_limited_groups",
    "routed_scaling_factor": "route_scale",
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_nope_head_dim",
    "qk_rope_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
    "index_n_heads": "index_n_heads",
    "index_head_dim": "index_head_dim",
    "index_topk": "index_topk",
    "max_position_embeddings": "max_seq_len",
    "rms_norm_eps": "norm_eps",
    "num_nextn_predict_layers": "n_mtp_layers",
}
_HF_ROPE_NAMES = {
    "factor": "rope_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "mscale": "mscale",
    "original_max_position_embeddings": "original_seq_len",
    "rope_theta": "rope_theta",
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Model dimensions under the names of DeepSeek's inference code; the defaults are the 671B model.

    Raises:
        ValueError: a dimension is not positive, or two dimensions contradict each other.
    """

    vocab_size: int = 129280
    dim: int = 7168
    inter_dim: int = 18432
    moe_inter_dim: int = 2048
    n_layers: int = 61
    n_dense_layers: int = 3
    n_mtp_layers: int = 0
    """Multi-token-prediction layers behind the main ones (one in the published checkpoint)."""
    n_heads: int = 128
    n_routed_experts: int = 256
    n_shared_experts: int = 1
    n_activated_experts: int = 8
    n_expert_groups: int = 8
    n_limited_groups: int = 4
    route_scale: float = 2.5
    q_lora_rank: int = 1536
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    index_n_heads: int = 64
    index_head_dim: int = 128
    index_topk: int = 2048
    max_seq_len: int = 163840
    original_seq_len: int = 4096
    rope_theta: float = 10000.0
    rope_factor: float = 40.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        free = {"n_layers", "n_dense_layers", "n_mtp_layers", "n_shared_experts"}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not math.isfinite(value) or value < 0 or (value == 0 and field.name not in free):
                raise ValueError(f"{field.name} is {value}; give a positive number")
        for problem, wrong in self._contradictions().items():
            if wrong:
                raise ValueError(problem)

    def _contradictions(self) -> dict[str, bool]:
        group = self.n_routed_experts // self.n_expert_groups
        rope, index = self.qk_rope_head_dim, self.index_head_dim
        return {
            f"qk_rope_head_dim {rope} is odd; RoPE turns pairs": rope % 2 == 1,
            f"qk_rope_head_dim {rope} exceeds index_head_dim {index}; the indexer turns a part of its head": rope
            > index,
            f"index_head_dim {index} is not a power of two; the Hadamard transform needs one": index & (index - 1) != 0,
            f"n_routed_experts {self.n_routed_experts} is not a multiple of n_expert_groups {self.n_expert_groups}": (
                group * self.n_expert_groups != self.n_routed_experts
            ),
            f"n_limited_groups {self.n_limited_groups} exceeds n_expert_groups {self.n_expert_groups}": (
                self.n_limited_groups > self.n_expert_groups
            ),
            f"n_activated_experts {self.n_activated_experts} exceeds the experts of {self.n_limited_groups} groups": (
                self.n_activated_experts > group * self.n_limited_groups
            ),
        }

    @property
    def qk_head_dim(self) -> int:
        """Width of one attention head's query: nope + rope."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_dim(self) -> int:
        """Width D of one cached MLA token: latent C + rope R (576)."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def yarn(self) -> bool:
        """Whether YaRN stretches the frequencies and the softmax scale."""
        return self.max_seq_len > self.original_seq_len

    @property
    def softmax_scale(self) -> float:
        """qk_head_dim^-0.5, times (0.1 mscale ln(factor) + 1)^2 under YaRN; 0.13523378 for the 671B model."""
        stretch = 0.1 * self.mscale * math.log(self.rope_factor) + 1.0 if self.yarn else 1.0
        return float(self.qk_head_dim**-0.5 * stretch * stretch)

    def kind(self, layer: int) -> LayerKind:
        """Which feed-forward network layer `layer` has; MTP layers, numbered from n_layers on, are mixtures."""
        return "dense" if layer < self.n_dense_layers else "moe"

    def replace(self, **changes: Any) -> Config:
        """A copy with some fields changed, checked again."""
        return dataclasses.replace(self, **changes)

    @classmethod
    def from_mapping(cls, fields: Mapping[str, Any]) -> Config:
        """A config from DeepSeek's field names; unknown names are refused.

        Raises:
            ValueError: an unknown or contradictory field.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(fields) - known)
        if unknown:
            raise ValueError(f"unknown config field {unknown[0]!r}; use the fields of dsv32_ref.config.Config")
        return cls(**fields)

    @classmethod
    def from_hf(cls, fields: Mapping[str, Any]) -> Config:
        """A config from the `config.json` of a checkpoint (keys that do not bear on the mathematics are ignored).

        Raises:
            ValueError: a scoring function, activation or RoPE type other than DeepSeek-V3.2's.
        """
        wanted = {"scoring_func": "sigmoid", "hidden_act": "silu", "topk_method": "noaux_tc", "norm_topk_prob": True}
        for key, value in wanted.items():
            if fields.get(key, value) != value:
                raise ValueError(f"config.json: {key} is {fields[key]!r}; DeepSeek-V3.2 has {value!r}")
        rope: Mapping[str, Any] = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind not in ("yarn", "default"):
            raise ValueError(f"config.json: the RoPE type is {kind!r}; DeepSeek-V3.2 has 'yarn'")
        found = {ours: fields[hf] for hf, ours in _HF_NAMES.items() if hf in fields}
        found |= {ours: {**rope, **fields}[hf] for hf, ours in _HF_ROPE_NAMES.items() if hf in rope or hf in fields}
        if kind == "default":
            found["original_seq_len"] = found.get("max_seq_len", cls.max_seq_len)
        return cls(**found)


GOLDEN = Config(
    vocab_size=512,
    dim=256,
    inter_dim=384,
    moe_inter_dim=128,
    n_layers=3,
    n_dense_layers=1,
    n_heads=4,
    n_routed_experts=16,
    n_activated_experts=4,
    n_expert_groups=4,
    n_limited_groups=2,
    q_lora_rank=128,
    kv_lora_rank=128,
    qk_nope_head_dim=64,
    qk_rope_head_dim=32,
    v_head_dim=64,
    index_n_heads=8,
    index_topk=16,
    max_seq_len=256,
    original_seq_len=32,
    rope_factor=8.0,
)
"""The small world of the recorded decodes: every mechanism of the 671B model, YaRN included."""


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Which roundings of the deployed path the reference simulates; all off is the ideal reference.

    Values stay in the compute dtype (fp32 or fp64); a rounding point only moves them onto a coarser grid.
    """

    bf16: bool = False
    """Every stage output, the attention scores and the softmax are rounded to bf16."""
    index_fp8: bool = False
    """Indexer queries and keys are quantised to e4m3 after the Hadamard rotation, one scale per head."""
    latent_fp8: bool = False
    """The normed KV latent is quantised to e4m3, 1x128, before it is cached and before prefill uses it."""
    linear_fp8: bool = False
    """Activations of the fp8 linears are quantised to e4m3, 1x128 (weights: see `weights.quantise`)."""
    scale_format: ScaleFormat = "ue8m0"
    """Rounding of the activation scales: up to a power of two, or left fp32."""


FP32 = Precision()
FP32_Q = Precision(index_fp8=True, latent_fp8=True)
BF16_Q = Precision(bf16=True, index_fp8=True, latent_fp8=True)
FP8 = Precision(bf16=True, index_fp8=True, latent_fp8=True, linear_fp8=True)
PRECISIONS = {"fp32": FP32, "fp32_q": FP32_Q, "bf16_q": BF16_Q, "fp8": FP8}
"""The precisions by the names that recordings use."""
