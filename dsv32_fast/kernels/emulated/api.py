"""All emulated kernels under AITER's names: this module satisfies `dsv32_fast.kernels.protocol.Kernels`."""

from __future__ import annotations

from dsv32_fast.kernels.emulated.attention import mla_decode_fwd
from dsv32_fast.kernels.emulated.cache import (
    concat_and_cache_mla,
    cp_gather_indexer_k_quant_cache,
    indexer_k_quant_and_cache,
)
from dsv32_fast.kernels.emulated.indexer import deepgemm_fp8_paged_mqa_logits, fp8_mqa_logits
from dsv32_fast.kernels.emulated.metadata import get_mla_metadata_v1
from dsv32_fast.kernels.emulated.metadata_info import get_mla_metadata_info_v1
from dsv32_fast.kernels.emulated.moe import fused_moe
from dsv32_fast.kernels.emulated.quant import (
    ActivationType,
    QuantType,
    get_hip_quant,
    per_group_quant_hip,
    per_token_quant_hip,
    pertoken_quant,
)
from dsv32_fast.kernels.emulated.reduce import mla_reduce_v1
from dsv32_fast.kernels.emulated.router import biased_grouped_topk, biased_grouped_topk_hip, moe_fused_gate
from dsv32_fast.kernels.emulated.topk import top_k_per_row_decode, top_k_per_row_prefill

__all__ = [
    "ActivationType",
    "QuantType",
    "biased_grouped_topk",
    "biased_grouped_topk_hip",
    "concat_and_cache_mla",
    "cp_gather_indexer_k_quant_cache",
    "deepgemm_fp8_paged_mqa_logits",
    "fp8_mqa_logits",
    "fused_moe",
    "get_hip_quant",
    "get_mla_metadata_info_v1",
    "get_mla_metadata_v1",
    "indexer_k_quant_and_cache",
    "mla_decode_fwd",
    "mla_reduce_v1",
    "moe_fused_gate",
    "per_group_quant_hip",
    "per_token_quant_hip",
    "pertoken_quant",
    "top_k_per_row_decode",
    "top_k_per_row_prefill",
]
