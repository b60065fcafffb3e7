"""Worker side: the metadata builder of vLLM's indexer, asked against how many keys it scores every row of a step."""

from __future__ import annotations

import importlib
import inspect
from types import SimpleNamespace
from typing import Any

import torch

from dsv32_fast.batch import StepBatch
from dsv32_fuzz.case import Dims
from dsv32_fuzz.targets.vllm.engine import LAYER, Setting, common_metadata, engine_config, kv_cache_spec
from dsv32_fuzz.targets.vllm.imports import Loaded
from dsv32_fuzz.targets.vllm.probes import Answer, Probe, failed, passed, skipped

MODULE = "vllm.v1.attention.backends.mla.indexer"
DIMS = Dims(max_num_batched_tokens=256)
DRAFTS = (0, 1, 3)
"""Speculative tokens: one row per request, two (which the scoring kernels take as they are), four."""


def _builder(module: Any, drafts: int) -> Any:
    """A new builder of this vLLM, for an fp8 index cache and the given number of speculative tokens."""
    setting = Setting(num_speculative_tokens=drafts, block_size=64)
    config = engine_config(DIMS, setting)
    config.num_speculative_tokens = drafts
    config.attention_config.use_fp4_indexer_cache = False
    config.attention_config.sparse_mla_prefill_workspace_factor = 5
    config.compilation_config.cudagraph_mode = None
    config.attention_config.resolve_indexer_kv_dtype = lambda default: default
    if config.speculative_config is not None:
        config.speculative_config.enable_adaptive_verification = False
    spec = SimpleNamespace(**vars(kv_cache_spec(setting)), storage_block_size=64)
    kind = module.DeepseekV32IndexerMetadataBuilder
    extra = {"block_table_width": 8} if "block_table_width" in inspect.signature(kind.__init__).parameters else {}
    return kind(spec, [LAYER], config, torch.device("cpu"), **extra)


def _lengths(metadata: Any) -> list[int]:
    """Keys per row, in the order of the step's rows: decoding requests first, then the chunks of prompts."""
    decode, prefill = metadata.decode, metadata.prefill
    found: list[int] = decode.seq_lens.reshape(-1).tolist() if decode is not None else []
    for chunk in prefill.chunks if prefill is not None else ():
        found += (chunk.cu_seqlen_ke - chunk.cu_seqlen_ks).tolist()
    return found


def _steps(drafts: int) -> tuple[StepBatch, ...]:
    q = drafts + 1
    decode = StepBatch(query_lens=(q,) * 3, seq_lens=(2047, 2048, 2048 + q))
    prompts = StepBatch(query_lens=(64, 100), seq_lens=(64, 300))
    mixed = StepBatch(query_lens=(q, q, 70), seq_lens=(300, 2049, 2100))
    shorter = StepBatch(query_lens=(q,) * 2, seq_lens=(q, 2049))
    return decode, prompts, mixed, shorter


def indexer_lengths(loaded: Loaded) -> Answer:
    """Row j of a request of q rows and sequence length seq is scored against its first seq - q + j + 1 keys."""
    try:
        module = importlib.import_module(MODULE)
    except ModuleNotFoundError as error:
        return skipped(f"the indexer does not import: no module {error.name}")
    rows = 0
    for drafts in DRAFTS:
        builder = _builder(module, drafts)
        for step in _steps(drafts):
            found = _lengths(builder.build(0, common_metadata(loaded.common_metadata, step)))
            expected = [
                seq - q + j + 1 for q, seq in zip(step.query_lens, step.seq_lens, strict=True) for j in range(q)
            ]
            rows += len(expected)
            if found != expected:
                told = f"q {step.query_lens}, seq {step.seq_lens}"
                if len(found) != len(expected):
                    return failed(f"{told}: {len(found)} rows, expected {len(expected)}")
                at = next(i for i, pair in enumerate(zip(found, expected, strict=True)) if pair[0] != pair[1])
                return failed(f"{told}: row {at} has {found[at]} keys, expected {expected[at]}")
    return passed(f"{rows} rows, with 0, 1 and 3 drafts: decoding, prompts, both, and fewer again")


PROBES: dict[str, Probe] = {"rows of the indexer": indexer_lengths}
