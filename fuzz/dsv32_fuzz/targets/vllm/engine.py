"""Worker side: the configuration and the step metadata that vLLM's model runner would hand to its builder.

Plain namespaces stand for vLLM's configuration classes, since those validate against a model and a platform. A release
that asks for a field that is not here fails with that field's name. Everything on the host is a copy of its own: on
a CPU `tensor.to("cpu")` is the tensor itself, which would hide a host copy that went stale.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import torch

from dsv32_fast.batch import StepBatch
from dsv32_fuzz.case import Dims

LAYER = "model.layers.0.self_attn.attn"
MAX_MODEL_LEN = 163840


@dataclasses.dataclass(frozen=True)
class Setting:
    """What of an engine is chosen beside the dims of a case."""

    num_speculative_tokens: int = 0
    max_num_seqs: int = 1024
    block_size: int = 1


def engine_config(dims: Dims, setting: Setting) -> Any:
    """The fields of `VllmConfig` that some release's builder reads, with DeepSeek-V3.2's values."""
    hf = SimpleNamespace(
        model_type="deepseek_v32",
        index_topk=dims.topk,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        num_attention_heads=128,
        index_n_heads=64,
        index_head_dim=128,
    )
    heads = dims.num_heads
    model = SimpleNamespace(
        dtype=torch.bfloat16,
        max_model_len=MAX_MODEL_LEN,
        hf_config=hf,
        hf_text_config=hf,
        model_arch_config=SimpleNamespace(total_num_attention_heads=128),
        get_num_attention_heads=lambda _parallel: heads,
        get_num_kv_heads=lambda _parallel: 1,
        get_head_size=lambda: 576,
    )
    speculative = (
        SimpleNamespace(num_speculative_tokens=setting.num_speculative_tokens, parallel_drafting=False, method="mtp")
        if setting.num_speculative_tokens
        else None
    )
    return SimpleNamespace(
        model_config=model,
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            cp_kv_cache_interleave_size=1,
            tensor_parallel_size=1,
        ),
        scheduler_config=SimpleNamespace(
            max_num_batched_tokens=dims.max_num_batched_tokens, max_num_seqs=setting.max_num_seqs
        ),
        cache_config=SimpleNamespace(
            cache_dtype="auto" if dims.kv_dtype == "bf16" else "fp8", block_size=setting.block_size
        ),
        compilation_config=SimpleNamespace(static_forward_context={LAYER: layer(dims)}),
        attention_config=SimpleNamespace(hisparse_config=None, sparse_mla_force_mqa=False),
        speculative_config=speculative,
        kv_transfer_config=None,
    )


def layer(dims: Dims) -> Any:
    """An attention layer as far as a builder looks: no sinks, no dense-prefill backend."""
    del dims
    return SimpleNamespace(impl=SimpleNamespace(sinks=None, use_aiter_sparse_mla=False), prefill_backend=None)


def kv_cache_spec(setting: Setting) -> Any:
    """The fields of `AttentionSpec` that a builder reads."""
    return SimpleNamespace(
        block_size=setting.block_size, num_kv_heads=1, head_size=576, dtype=torch.bfloat16, sliding_window=None
    )


def common_metadata(kind: Any, step: StepBatch) -> Any:
    """vLLM's `CommonAttentionMetadata` of one step, with the fields that this release has."""
    starts = torch.zeros(len(step.query_lens) + 1, dtype=torch.int32)
    torch.cumsum(torch.tensor(step.query_lens, dtype=torch.int32), 0, out=starts[1:])
    seqs = torch.tensor(step.seq_lens, dtype=torch.int32)
    fields = {
        "query_start_loc": starts,
        "query_start_loc_cpu": starts.clone(),
        "seq_lens": seqs,
        "_seq_lens_cpu": seqs.clone(),
        "seq_lens_cpu_upper_bound": seqs.clone(),
        "num_reqs": len(step.query_lens),
        "num_actual_tokens": step.num_tokens,
        "max_query_len": step.max_query_len,
        "max_seq_len": step.max_seq_len,
        "block_table_tensor": torch.zeros((len(step.query_lens), 1), dtype=torch.int32),
        "slot_mapping": torch.zeros(step.num_tokens, dtype=torch.int64),
        "causal": True,
    }
    known = {field.name for field in dataclasses.fields(kind)}
    return kind(**{name: value for name, value in fields.items() if name in known})
