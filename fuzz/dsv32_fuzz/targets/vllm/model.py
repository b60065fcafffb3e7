"""Worker side: what vLLM's DeepSeek model asks of its router, found by making one of its expert layers.

The layer is vLLM's own class, with vLLM's own gate. What needs weights or a process group (experts, shared experts) is
an empty module; the release believes that AITER's fused experts are on, as they are on ROCm.
"""

from __future__ import annotations

import importlib
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from dsv32_fuzz.targets.vllm.imports import Loaded
from dsv32_fuzz.targets.vllm.probes import Answer, Probe, failed, passed, skipped

MODEL = "vllm.model_executor.models.deepseek_v2"
USERS_OF_PARALLEL_STATE = (MODEL, "vllm.model_executor.layers.linear", "vllm.model_executor.parameter")
HIDDEN = 128

CONFIG = SimpleNamespace(
    model_type="deepseek_v32",
    hidden_act="silu",
    hidden_size=HIDDEN,
    moe_intermediate_size=64,
    n_routed_experts=256,
    n_shared_experts=1,
    num_experts_per_tok=8,
    n_group=8,
    topk_group=4,
    norm_topk_prob=True,
    scoring_func="sigmoid",
    topk_method="noaux_tc",
    routed_scaling_factor=2.5,
)
"""DeepSeek-V3.2's routing (its `config.json`); the widths are small, since no type depends on them."""
PARALLEL = SimpleNamespace(
    use_sequence_parallel_moe=False, eplb_config=SimpleNamespace(num_redundant_experts=0), enable_eplb=False
)


class _Absent(torch.nn.Module):
    """Stands where the experts would be."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        super().__init__()


def _expert_layer(model: Any) -> Any:
    """A `DeepseekV2MoE` in bf16, on one rank, with AITER's fused experts on."""
    group = SimpleNamespace(device_group=SimpleNamespace(size=lambda: 1), rank_in_group=0)
    parts = dict.fromkeys(("FusedMoE", "FusedMoEFactory", "DeepseekV2MLP"), _Absent)
    stand_ins: dict[str, Any] = {
        **parts,
        "get_ep_group": lambda: group,
        "get_tensor_model_parallel_world_size": lambda: 1,
        "get_tensor_model_parallel_rank": lambda: 0,
        "resolve_layer_fused_shared_expert": lambda *_: False,
    }
    before = torch.get_default_dtype()
    with ExitStack() as stack:
        for place in USERS_OF_PARALLEL_STATE:
            module = importlib.import_module(place)
            for name in stand_ins.keys() & vars(module).keys():
                stack.enter_context(mock.patch.object(module, name, stand_ins[name]))
        switches = {"is_fused_moe_enabled": True, "is_fusion_moe_shared_experts_enabled": False}
        for name in switches.keys() & set(dir(model.rocm_aiter_ops)):
            stack.enter_context(mock.patch.object(model.rocm_aiter_ops, name, lambda told=switches[name]: told))
        stack.callback(torch.set_default_dtype, before)
        torch.set_default_dtype(torch.bfloat16)
        return model.DeepseekV2MoE(config=CONFIG, parallel_config=PARALLEL, prefix="model.layers.3.mlp")


def router_logits(_loaded: Loaded) -> Answer:
    """The model's gate gives fp32 logits, and its correction bias keeps its fp32 values."""
    try:
        model = importlib.import_module(MODEL)
    except ModuleNotFoundError as error:
        return skipped(f"the model does not import: no module {error.name}")
    gate = _expert_layer(model).gate
    torch.nn.init.zeros_(gate.weight)
    answered = gate(torch.zeros(2, HIDDEN, dtype=torch.bfloat16))
    logits = answered[0] if isinstance(answered, tuple) else answered
    types = {"logits": logits.dtype, "correction bias": gate.e_score_correction_bias.dtype}
    told = ", ".join(f"{name} in {str(dtype).removeprefix('torch.')}" for name, dtype in types.items())
    return passed(told) if set(types.values()) == {torch.float32} else failed(told)


PROBES: dict[str, Probe] = {"router logits": router_logits}
