"""Worker side: where what vLLM assumes of AITER, or of its own runner, is not what it gets.

A contract difference need not be a defect today: it says on what the release relies. Each is found by driving this
vLLM with this AITER; none is looked up by version.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
from typing import Any

import torch

from dsv32_fast.batch import StepBatch
from dsv32_fast.kernels.emulated import UndefinedInAiter
from dsv32_fast.plan import PlanBuffers
from dsv32_fuzz.case import Dims
from dsv32_fuzz.plan_checker import ZERO_LENGTH, check_plan
from dsv32_fuzz.targets import PlannerInput
from dsv32_fuzz.targets.vllm.engine import Setting, common_metadata
from dsv32_fuzz.targets.vllm.imports import Loaded
from dsv32_fuzz.targets.vllm.probes import Answer, Probe, failed, passed, skipped
from dsv32_fuzz.targets.vllm.sessions import PLAN, make_builder, run_build

DIMS = Dims(max_num_batched_tokens=64)


def _build(loaded: Loaded, *steps: StepBatch, dims: Dims = DIMS) -> tuple[Any, PlannerInput | None]:
    """The last of several steps of one builder, and what it sent to the planner."""
    builder = make_builder(loaded, dims, 0, Setting())
    results = [run_build(loaded, builder, dims, step) for step in steps]
    return results[-1]


def planner_call(loaded: Loaded) -> Answer:
    """The planner's arguments, by position and name, bind to the signature of the AITER release."""
    _, planned = _build(loaded, StepBatch(query_lens=(1,), seq_lens=(3000,)))
    if planned is None:
        return skipped("no plan is made for one decoding request")
    scalars = dict(planned.scalars)
    told = ", ".join(f"{name}={scalars[name]}" for name in ("page_size", "kv_granularity", "max_seqlen_qo"))
    return passed(f"bound: {told}; rows of one token each")


def split_cap_in_key(loaded: Loaded) -> Answer:
    """A plan is not reused when only `max_split_per_batch` differs."""
    first, second = (StepBatch(query_lens=(2,), seq_lens=(300,), max_seq_len=bound) for bound in (300, 2048))
    caps = [
        dict(p.scalars).get("max_split_per_batch", -1) if p else None
        for _, p in (_build(loaded, s) for s in (first, second))
    ]
    _, planned = _build(loaded, first, second)
    if None in caps or caps[0] == caps[1]:
        return passed(f"the cap does not depend on max_seq_len ({caps[0]})")
    if planned is None:
        return failed(
            f"the cap goes from {caps[0]} to {caps[1]} with max_seq_len and the plan is reused: bits depend on history"
        )
    return passed(f"a cap of {caps[1]} after {caps[0]} makes a new plan")


def host_lengths(loaded: Loaded) -> Answer:
    """A plan follows the lengths on the device, also when the host's copy is behind them."""
    kind = loaded.common_metadata
    names = {field.name for field in dataclasses.fields(kind)}
    if "_seq_lens_cpu" not in names:
        return passed("the step metadata holds no host copy of the lengths that could be behind")
    dims, builder = DIMS, make_builder(loaded, DIMS, 0, Setting())
    before, after = (StepBatch(query_lens=(1,), seq_lens=(seq,)) for seq in (1000, 1400))
    run_build(loaded, builder, dims, before)
    stale = dataclasses.replace(
        common_metadata(kind, after), _seq_lens_cpu=torch.tensor(before.seq_lens, dtype=torch.int32)
    )
    loaded.recorder.take()
    builder.build(0, stale)
    if loaded.recorder.take() is None:
        return failed("device lengths 1400 with a host copy still at 1000: the plan of 1000 is reused")
    return passed("the plan is made anew although the host copy did not move")


def synchronised(loaded: Loaded) -> Answer:
    """A new plan is complete on the device before a captured graph may read it: the stream is synchronised after."""
    _, planned = _build(loaded, StepBatch(query_lens=(1,), seq_lens=(3000,)))
    if planned is None:
        return skipped("no plan is made for one decoding request")
    if "sync" in loaded.stream_events:
        return passed("the stream is synchronised after a launch")
    return failed("the planner is launched and the stream is not synchronised before the builder returns")


def padding_rows(loaded: Loaded) -> Answer:
    """Every row that the attention kernel is launched for gets work, also one of length zero."""
    query, seqs = (1,) * 60 + (0,) * 4, (3000,) * 60 + (0,) * 4
    metadata, _ = _build(loaded, StepBatch(query_lens=query, seq_lens=seqs, num_tokens=64))
    if any(getattr(metadata, field, None) is None for field in PLAN.values()):
        return skipped("this step is served without a plan")
    rows = metadata.req_id_per_token.numel()
    plan = PlanBuffers(**{ours: getattr(metadata, theirs) for ours, theirs in PLAN.items()})
    without = [v for v in check_plan(plan, metadata.paged_kv_indptr) if v.what == ZERO_LENGTH]
    if without:
        return failed(f"{len(without)} of {rows} rows get no work, so their output stays as torch.empty left it")
    return passed(
        f"{rows} rows, all with work" if rows == 64 else f"padding rows are left out: {rows} of 64 rows planned"
    )


def empty_step(loaded: Loaded) -> Answer:
    """A step of no rows, as an idle rank might build, either makes no plan or one that AITER can make."""
    try:
        _, planned = _build(loaded, StepBatch(query_lens=(), seq_lens=()))
    except UndefinedInAiter as error:
        return failed(f"0 rows reach the planner: {error}")
    return passed("planned" if planned is not None else "not sent to the planner")


def cache_types(loaded: Loaded) -> Answer:
    """With an fp8 cache, the planner is told the types that the kernel gets: fp8 queries and fp8 keys."""
    _, planned = _build(
        loaded, StepBatch(query_lens=(1,), seq_lens=(3000,)), dims=Dims(max_num_batched_tokens=64, kv_dtype="fp8")
    )
    if planned is None:
        return skipped("no plan is made with an fp8 cache")
    scalars = dict(planned.scalars)
    types = {name: str(scalars.get(name)) for name in ("dtype_q", "dtype_kv")}
    told = ", ".join(f"{name} {value}" for name, value in types.items())
    if all("float8" in value for value in types.values()):
        return passed(told)
    return failed(f"{told}: the planner falls back to its default types, while fp8 attention quantises the queries")


def small_heads(loaded: Loaded) -> Answer:
    """Fewer heads than AITER's kernels take are padded before the planner sees them."""
    _, planned = _build(
        loaded, StepBatch(query_lens=(1,), seq_lens=(3000,)), dims=Dims(max_num_batched_tokens=64, num_heads=8)
    )
    if planned is None:
        return skipped("no plan is made for 8 heads")
    heads = dict(planned.scalars)["num_heads_per_head_k"]
    return passed(f"8 heads become {heads}") if int(str(heads)) >= 16 else failed(f"{heads} heads reach the planner")


def continuation(loaded: Loaded) -> Answer:
    """A chunk that continues a prompt is served with a plan of its own, or told to be served without one."""
    metadata, planned = _build(
        loaded,
        StepBatch(query_lens=(2048,), seq_lens=(2048,)),
        StepBatch(query_lens=(2048,), seq_lens=(4096,)),
        dims=Dims(max_num_batched_tokens=2048),
    )
    if any(getattr(metadata, field, None) is None for field in PLAN.values()):
        return passed("served without a persistent plan: the kernel splits by itself")
    return passed("a new plan") if planned is not None else failed("the plan of the chunk before is reused")


def _topk(tokens: int, bias: torch.Tensor) -> tuple[dict[str, Any], torch.Tensor] | None:
    """What vLLM's wrapper hands to AITER's router kernel, and the weights that come back; None without a wrapper."""
    ops = importlib.import_module("vllm._aiter_ops")
    kernel_call = vars(ops).get("_rocm_aiter_biased_grouped_topk_impl")
    wrapper = getattr(getattr(ops, "rocm_aiter_ops", None), "biased_grouped_topk", None)
    if wrapper is None or kernel_call is None:
        return None
    # vLLM registers the operator only on ROCm; the wrapper looks it up here.
    torch.ops.vllm.rocm_aiter_biased_grouped_topk = kernel_call  # type: ignore[attr-defined]
    module, seen = importlib.import_module("aiter"), dict[str, Any]()
    kernel = module.biased_grouped_topk

    def record(gating: torch.Tensor, correction: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.update(logits=gating.dtype, bias=correction.dtype, distinct=len(set(correction.tolist())))
        return kernel(gating, correction, *args, **kwargs)

    logits_TE = torch.randn(tokens, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    weights_TK, ids_TK = torch.empty(tokens, 8), torch.empty(tokens, 8, dtype=torch.int32)
    module.__dict__["biased_grouped_topk"] = record
    try:
        wrapper(logits_TE, bias, weights_TK, ids_TK, 8, 4, True, 2.5)
    finally:
        module.__dict__["biased_grouped_topk"] = kernel
    return seen, weights_TK


def bias_type(_loaded: Loaded) -> Answer:
    """An fp32 correction bias reaches the router kernel with its values."""
    bias_E = torch.linspace(6.817, 7.063, 256)
    found = _topk(4, bias_E)
    if found is None:
        return skipped("the release has no wrapper of biased_grouped_topk under the known name")
    seen = found[0]
    told = (
        f"bf16 logits meet a bias in {str(seen['bias']).removeprefix('torch.')}: {seen['distinct']} of 256 values left"
    )
    return passed(told) if seen["distinct"] == 256 else failed(told)


def scaling_switch(_loaded: Loaded) -> Answer:
    """The weights of the chosen experts do not depend on how many tokens the batch has."""
    before = os.environ.get("CU_NUM")
    os.environ["CU_NUM"] = "1"  # AITER switches kernels at 212 tokens per compute unit: 54 272 with 256 of them
    try:
        found = [_topk(tokens, torch.zeros(256)) for tokens in (212, 213)]
    finally:
        os.environ.pop("CU_NUM")
        os.environ.update({} if before is None else {"CU_NUM": before})
    if found[0] is None or found[1] is None:
        return skipped("the release has no wrapper of biased_grouped_topk under the known name")
    sums = [float(weights_TK[0].sum()) for _, weights_TK in found if weights_TK is not None]  # type: ignore[misc]
    if abs(sums[0] - sums[1]) > 1e-3:
        return failed(
            f"above 212 tokens per compute unit the weights of a token sum to {sums[1]:.3f}, below to {sums[0]:.3f}"
        )
    return passed(f"weights sum to {sums[0]:.3f} on both sides of the switch")


PROBES: dict[str, Probe] = {
    "planner call": planner_call,
    "split cap and key": split_cap_in_key,
    "host copy of lengths": host_lengths,
    "stream order": synchronised,
    "rows of length zero": padding_rows,
    "step of no rows": empty_step,
    "types with an fp8 cache": cache_types,
    "padding of heads": small_heads,
    "continued prompt": continuation,
    "router bias": bias_type,
    "router batch switch": scaling_switch,
}
