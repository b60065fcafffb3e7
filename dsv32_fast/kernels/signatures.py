"""Signatures of AITER's functions by release, written by hand.

Names, order and defaults are those of AITER's source at commit e404860 (between v0.1.20.post1 and v0.1.21); `_SINCE`
says which parameters came when, from v0.1.13 on. A release outside this range is refused, never guessed: what an
installation really has is read from its files by `installed`.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

COMMIT = "e404860"
OLDEST_READ = "0.1.13"
NEWEST_READ = "0.1.20.post1"

_AT_COMMIT: dict[str, str] = {
    "get_mla_metadata_info_v1": (
        "batch_size, max_seqlen_qo, num_head_qo, q_dtype, kv_dtype, is_sparse, fast_mode=True, num_kv_splits=32, "
        "intra_batch_mode=False, max_split_per_batch=-1"
    ),
    "get_mla_metadata_v1": (
        "seqlens_qo_indptr, seqlens_kv_indptr, kv_last_page_lens, num_heads_per_head_k, num_heads_k, is_causal, "
        "work_metadata_ptrs, work_info_set, work_indptr, reduce_indptr, reduce_final_map, reduce_partial_map, "
        "page_size=1, kv_granularity=16, max_seqlen_qo=-1, uni_seqlen_qo=-1, fast_mode=True, topk=-1, "
        "max_split_per_batch=-1, intra_batch_mode=False, is_cp_round_robin=False, mla_version=V32, dtype_q_nope=None, "
        "dtype_q_rope=None, dtype_kv_nope=None, dtype_kv_rope=None, dtype_q=None, dtype_kv=None"
    ),
    "mla_decode_fwd": (
        "q, kv_buffer, o, qo_indptr, kv_indptr, kv_indices, kv_last_page_lens, max_seqlen_q, page_size=1, nhead_kv=1, "
        "sm_scale=None, logit_cap=0.0, num_kv_splits=None, num_kv_splits_indptr=None, work_meta_data=None, "
        "work_indptr=None, work_info_set=None, reduce_indptr=None, reduce_final_map=None, reduce_partial_map=None, "
        "q_scale=None, kv_scale=None, intra_batch_mode=False, return_logits=False, return_lse=False, "
        "g_kv_indptr=None, cp_world_size=1, cp_rank=0, causal=True"
    ),
    "mla_reduce_v1": (
        "partial_output, partial_lse, reduce_indptr, reduce_final_map, reduce_partial_map, max_seqlen_q, "
        "num_kv_splits, final_output, final_lse=None"
    ),
    "biased_grouped_topk": (
        "gating_output, correction_bias, topk_weights, topk_ids, num_expert_group, topk_group, need_renorm, "
        "routed_scaling_factor=1.0"
    ),
    "biased_grouped_topk_hip": (
        "gating_output, correction_bias, topk_weights, topk_ids, num_expert_group, topk_grp, need_renorm, "
        "routed_scaling_factor=1.0"
    ),
    "moe_fused_gate": (
        "input, bias, topk_weights, topk_ids, num_expert_group, topk_group, topk, n_share_experts_fusion, "
        "routed_scaling_factor=1.0"
    ),
    "indexer_k_quant_and_cache": "k, kv_cache, slot_mapping, quant_block_size, scale_fmt, preshuffle=False",
    "cp_gather_indexer_k_quant_cache": "kv_cache, dst_k, dst_scale, block_table, cu_seq_lens, preshuffle=False",
    "deepgemm_fp8_paged_mqa_logits": (
        "q_fp8, kv_cache, weights, out_logits, context_lens, kv_indices, max_model_len, Preshuffle=False, "
        "KVBlockSize=1, ChunkK=256, TotalCuCount=None, WavePerEU=2, VarCtxSchedule=None"
    ),
    "fp8_mqa_logits": "Q, KV, kv_scales, weights, cu_starts, cu_ends, clean_logits=True",
    "top_k_per_row_decode": "logits, next_n, seqLens, indices, numRows, stride0, stride1, k=2048, stable=False",
    "top_k_per_row_prefill": (
        "logits, rowStarts, rowEnds, indices, values, numRows, stride0, stride1, k=2048, stable=False"
    ),
    "concat_and_cache_mla": "kv_c, k_pe, kv_cache, slot_mapping, kv_cache_dtype, scale",
    "per_token_quant_hip": "x, scale=None, quant_dtype=i8, num_rows=None, num_rows_factor=1",
    "per_group_quant_hip": (
        "x, scale=None, quant_dtype=i8, group_size=128, transpose_scale=False, num_rows=None, num_rows_factor=1, "
        "scale_type=fp32"
    ),
    "fused_moe": (
        "hidden_states, w1, w2, topk_weight, topk_ids, expert_mask=None, activation=Silu, quant_type=No, "
        "doweight_stage1=False, w1_scale=None, w2_scale=None, a1_scale=None, a2_scale=None, block_size_M=None, "
        "num_local_tokens=None, moe_sorting_dispatch_policy=0, dtype=None, hidden_pad=0, intermediate_pad=0, "
        "bias1=None, bias2=None, splitk=0, swiglu_limit=None, beta=None, linear_beta=None, gate_mode=SEPARATED, "
        "shared_w1=None, shared_w2=None, shared_w1_scale=None, shared_w2_scale=None, shared_expert_id=-1, "
        "stage2_scatter=None"
    ),
}

# Parameter by parameter, the first release that has it; 0.1.21 stands for the commit itself. In 0.1.17 alone
# is_cp_round_robin was the last parameter.
_SINCE: dict[str, dict[str, str]] = {
    "get_mla_metadata_info_v1": {"max_split_per_batch": "0.1.16"},
    "get_mla_metadata_v1": {
        "is_cp_round_robin": "0.1.17",
        **dict.fromkeys(("mla_version", "dtype_q_nope", "dtype_q_rope", "dtype_kv_nope", "dtype_kv_rope"), "0.1.18"),
    },
    "mla_decode_fwd": {**dict.fromkeys(("g_kv_indptr", "cp_world_size", "cp_rank"), "0.1.17"), "causal": "0.1.20"},
    "mla_reduce_v1": {"num_kv_splits": "0.1.16"},
    "fp8_mqa_logits": {"clean_logits": "0.1.15"},
    "top_k_per_row_decode": {"k": "0.1.14", "stable": "0.1.20"},
    "top_k_per_row_prefill": {"k": "0.1.14", "stable": "0.1.20"},
    "per_group_quant_hip": {"scale_type": "0.1.19"},
    "fused_moe": {
        **dict.fromkeys(("swiglu_limit", "gate_mode"), "0.1.14"),
        **dict.fromkeys(("beta", "linear_beta"), "0.1.19"),
        **dict.fromkeys(("shared_w1", "shared_w2", "shared_w1_scale", "shared_w2_scale"), "0.1.19.post1"),
        "shared_expert_id": "0.1.19.post1",
        "stage2_scatter": "0.1.21",
    },
}

HOMES: dict[str, tuple[str, ...]] = {
    "mla_decode_fwd": ("mla",),
    "fused_moe": ("fused_moe",),
    "deepgemm_fp8_paged_mqa_logits": ("ops.triton.attention.pa_mqa_logits", "ops.triton.pa_mqa_logits"),
    "fp8_mqa_logits": ("ops.triton.attention.fp8_mqa_logits", "ops.triton.fp8_mqa_logits"),
}
"""Submodules of AITER that may define a function; the others are found in its `ops` and exported at the top."""

FUNCTIONS = tuple(_AT_COMMIT)


class UnknownSignatureError(LookupError):
    """The signature of a function in a release is not recorded; the message names both."""


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One parameter: `default` is its source text, None if it is required."""

    name: str
    default: str | None = None


def signature(function: str, release: str | None = None) -> tuple[Parameter, ...]:
    """The parameters of `function` in an AITER release ("0.1.16.post2"), or at the commit if it is None.

    Raises:
        UnknownSignatureError: not recorded; read it from the installed files instead (`installed.signatures`).
        ValueError: `release` is no version.
    """
    if function not in _AT_COMMIT:
        raise UnknownSignatureError(f"{function} is not one of the recorded functions: {', '.join(FUNCTIONS)}")
    parameters = parameters_of(f"def f({_AT_COMMIT[function]}): ...") or ()
    if release is None:
        return parameters
    version_key(release)
    if not is_recorded(release):
        raise UnknownSignatureError(f"{function} is recorded for AITER {OLDEST_READ} to {NEWEST_READ}, not {release}")
    since = {name: version_key(first) for name, first in _SINCE.get(function, {}).items()}
    return tuple(p for p in parameters if p.name not in since or since[p.name] <= version_key(release))


def is_recorded(release: str | None) -> bool:
    """Whether the signatures of an AITER release are recorded; those of the commit (None) are."""
    if release is None:
        return True
    try:
        return version_key(OLDEST_READ) <= version_key(release) <= version_key(NEWEST_READ)
    except ValueError:
        return False


def version_key(release: str) -> tuple[int, ...]:
    """Orders releases such as 0.1.13, 0.1.13.post1 and 0.1.7.post2.dev18; local parts ("+rocm7") do not count.

    Raises:
        ValueError: not a version of that form.
    """
    match = re.fullmatch(r"v?(\d+)\.(\d+)\.(\d+)(?:\.?post(\d+))?(?:\.?(dev|rc)\d+)?(?:\+.*)?", release)
    if match is None:
        raise ValueError(f"{release!r} is no AITER release; write it like 0.1.16.post2")
    major, minor, patch, post, early = match.groups()
    return int(major), int(minor), int(patch), int(post or 0), 0 if early else 1


def parameters_of(source: str, function: str = "f") -> tuple[Parameter, ...] | None:
    """Parameters of a function at the top level of some source text; None if it is not defined there."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            return _parameters(node)
    return None


def _parameters(function: ast.FunctionDef) -> tuple[Parameter, ...]:
    names = [*function.args.posonlyargs, *function.args.args]
    defaults: list[ast.expr | None] = [None] * (len(names) - len(function.args.defaults))
    defaults += [*function.args.defaults, *function.args.kw_defaults]
    return tuple(
        Parameter(name=argument.arg, default=None if default is None else ast.unparse(default))
        for argument, default in zip([*names, *function.args.kwonlyargs], defaults, strict=True)
    )
