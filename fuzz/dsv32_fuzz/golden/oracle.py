"""transformers' DeepseekV32ForCausalLM on the reference's weights: an independent implementation, run live.

It always attends unabsorbed over every cached token with a mask, skips the Hadamard rotation and has no fp8: in fp32
its results equal the ideal reference's up to rounding. Needs the `oracle` extra.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dsv32_ref.checkpoint import hf_name
from dsv32_ref.config import Config


def hf_config(config: Config) -> Any:
    """The DeepseekV32Config of the same dimensions."""
    from transformers import DeepseekV32Config

    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.yarn:
        rope |= {"rope_type": "yarn", "factor": config.rope_factor, "beta_fast": config.beta_fast}
        rope |= {"beta_slow": config.beta_slow, "mscale": config.mscale, "mscale_all_dim": config.mscale}
        rope |= {"original_max_position_embeddings": config.original_seq_len}
    same: tuple[str, ...] = (
        "vocab_size",
        "n_routed_experts",
        "n_shared_experts",
        "q_lora_rank",
        "kv_lora_rank",
        "qk_nope_head_dim",
    )
    same += ("qk_rope_head_dim", "v_head_dim", "index_n_heads", "index_head_dim", "index_topk")
    return DeepseekV32Config(
        **{name: getattr(config, name) for name in same},
        hidden_size=config.dim,
        intermediate_size=config.inter_dim,
        moe_intermediate_size=config.moe_inter_dim,
        num_hidden_layers=config.n_layers,
        first_k_dense_replace=config.n_dense_layers,
        num_attention_heads=config.n_heads,
        num_key_value_heads=config.n_heads,
        num_experts_per_tok=config.n_activated_experts,
        n_group=config.n_expert_groups,
        topk_group=config.n_limited_groups,
        routed_scaling_factor=config.route_scale,
        max_position_embeddings=config.max_seq_len,
        rms_norm_eps=config.norm_eps,
        rope_parameters=rope,
    )


def packed(config: Config, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights in transformers' names, all experts of a layer in one tensor, gate rows before up rows."""
    state = {hf_name(name): tensor for name, tensor in named.items() if ".ffn.experts." not in name}
    for layer in range(config.n_dense_layers, config.n_layers):

        def stack(which: str, layer: int = layer) -> Tensor:
            experts = range(config.n_routed_experts)
            return torch.stack([named[f"layers.{layer}.ffn.experts.{e}.{which}.weight"] for e in experts])

        prefix = f"model.layers.{layer}.mlp.experts."
        state[prefix + "gate_up_proj"] = torch.cat([stack("w1"), stack("w3")], 1)
        state[prefix + "down_proj"] = stack("w2")
    return state


def hf_model(config: Config, named: Mapping[str, Tensor], attention: str = "eager") -> Any:
    """DeepseekV32ForCausalLM in fp32, in evaluation mode, holding exactly the given weights.

    Raises:
        ValueError: transformers names other tensors than the weights hold.
    """
    from transformers import DeepseekV32ForCausalLM

    chosen = hf_config(config)
    chosen._attn_implementation = attention
    model: Any = DeepseekV32ForCausalLM(chosen)
    model.eval()
    missing, unexpected = model.load_state_dict(packed(config, named), strict=False)
    if missing or unexpected:
        raise ValueError(f"transformers' tensors differ: missing {missing[:3]}, unexpected {list(unexpected)[:3]}")
    return model
