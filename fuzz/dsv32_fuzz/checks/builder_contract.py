"""Checks of the builder as a neighbour sees it: what it hands to planner and layers, what it refuses, what it costs.

The contract is that of vLLM's ROCm sparse backend and of AITER's planner as that backend calls it (vLLM 0.22 to 0.33,
AITER e404860): one planner row per query token, pages of one token, a KV granularity of 16, int32 throughout, heads
padded up to 16. The budget is that of PR #42982: clears no longer than what a step leaves behind, no read of device
memory on the host, and as many torch operations for 64 requests as for one; and one copy from host to device, which
takes all lengths. On the CPU host and device are one, so copies are counted while a second builder of the same class
builds the same steps on the `meta` device.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import msgspec
import torch
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from dsv32_fast.batch import StepBatch
from dsv32_fast.kernels.protocol import PlannerKernels
from dsv32_fast.metadata import BuilderConfig
from dsv32_fast.options import Options
from dsv32_fuzz.case import Dims
from dsv32_fuzz.checks import TARGET_ERRORS, TARGET_POISON
from dsv32_fuzz.checks.own_input import InputCheck
from dsv32_fuzz.checks.serving import SessionCheck, build_and_write, first_difference, seen_by_kernels
from dsv32_fuzz.latency.accounting import HostData, LaunchCounter
from dsv32_fuzz.latency.seam import HollowKernels, Seam
from dsv32_fuzz.latency.shapes import ShapeMemo
from dsv32_fuzz.strategies import World, dims_for, integers, sampled_from, worlds
from dsv32_fuzz.strategies.batch_mixes import batch, edge_lens
from dsv32_fuzz.targets import StepRecord, Target
from dsv32_fuzz.targets.intree import InTreeTarget
from dsv32_fuzz.verdict import Verdict

PLANNER_SCALARS: dict[str, object] = {
    "num_heads_k": 1,
    "is_causal": True,
    "page_size": 1,
    "kv_granularity": 16,
    "max_seqlen_qo": 1,
    "uni_seqlen_qo": 1,
    "fast_mode": True,
}
"""What the sparse backend always passes; `topk` is never among it, the row lengths say it."""


class Steps(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Steps of one engine, in a world of heads and KV type."""

    steps: tuple[StepBatch, ...]
    world: World


def _few_steps() -> st.SearchStrategy[tuple[StepBatch, ...]]:
    pairs = st.tuples(sampled_from((1, 1, 2, 4)), edge_lens(4))
    copies = st.builds(lambda drawn, n: batch(drawn * n), st.lists(pairs, min_size=1, max_size=4), sampled_from((1, 8)))
    return st.lists(copies, min_size=2, max_size=4).map(tuple)


class InterfaceContract(SessionCheck):
    """What planner and layers receive, and what happens to a step that does not fit."""

    name = "interface_contract"
    meaning = "planner and layers receive the types, views and scalars agreed on; an oversized step is refused in words"
    input_type = Steps

    def inputs(self) -> st.SearchStrategy[Steps]:
        """A few steps in any world."""
        return st.builds(Steps, steps=_few_steps(), world=worlds())

    def run(self, drawn: Steps, target: Target) -> Verdict:
        """Look at every record, then send a step that is one row too large, then the last step again.

        Another target than the in-tree path may refuse by any error, after which its engine need not go on.
        """
        dims = dims_for(drawn.steps, drawn.world)
        session = target.open(dims, poison=TARGET_POISON)
        violation, calls = "", 0
        for index, step in enumerate(drawn.steps):
            record = build_and_write(session, step)
            calls += record.launched
            wrong = _wrong_views(record) or _wrong_scalars(record, dims, target.options)
            violation = violation or (wrong and f"step {index}: {wrong}")
        before = seen_by_kernels(session, drawn.steps[-1], dims.topk)
        oversized = batch([(1, 1)] * (dims.max_num_batched_tokens + 1))
        violation = violation or _refusal(session.build, oversized, in_words=target.options is not None)
        if not violation and target.options is not None:
            difference = first_difference(seen_by_kernels(session, drawn.steps[-1], dims.topk), before)
            violation = difference and f"after a refused step, {difference} before it"
        return self.verdict(violation, {"steps": len(drawn.steps), "planner_calls": calls})


def _wrong_views(record: StepRecord) -> str:
    metadata = record.metadata
    buffers = {
        "req_id_per_token": (metadata.req_id_per_token_T, record.req_ids_N),
        "paged_kv_indptr": (metadata.paged_kv_indptr_T1, record.kv_indptr_N1),
        "paged_kv_indices": (metadata.paged_kv_indices, record.kv_indices_NK),
        "qo_indptr": (metadata.qo_indptr_T1, None),
        "paged_kv_last_page_len": (metadata.paged_kv_last_page_len_T, None),
    }
    for name, (view, buffer) in buffers.items():
        if view.dtype != torch.int32 or view.dim() != 1 or not view.is_contiguous():
            return f"{name} is {view.dtype} {list(view.shape)}, not contiguous int32 of one dimension"
        if buffer is not None and view.numel() and view.data_ptr() != buffer.ctypes.data:
            return f"{name} is no view of the persistent buffer"
    return ""


def _wrong_scalars(record: StepRecord, dims: Dims, options: Options | None) -> str:
    if record.planner_input is None:
        return ""
    scalars = dict(record.planner_input.scalars)
    expected = PLANNER_SCALARS | {"num_heads_per_head_k": max(16, dims.num_heads)}
    if options is not None:  # the in-tree path says the types; releases of vLLM differ in it
        kv_dtype = torch.bfloat16 if dims.kv_dtype == "bf16" else torch.float8_e4m3fn
        expected |= {"dtype_q": kv_dtype, "dtype_kv": kv_dtype}
    for name, value in expected.items():
        if scalars.get(name) != value:
            return f"{name} {scalars.get(name)} reaches the planner where {value} was to be expected"
    return ""


def _refusal(build: Any, step: StepBatch, *, in_words: bool) -> str:
    try:
        build(step)
    except TARGET_ERRORS as error:
        text = str(error)
        told = isinstance(error, ValueError) and "max_num_batched_tokens" in text and "\n" not in text
        return "" if told or not in_words else f"an oversized step is refused: {type(error).__name__}: {text}"
    return f"a step of {step.num_tokens} rows, one too many, is not refused"


class OperationCount(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch does not annotate it
    """Counts torch operations, bytes that fills write, and host reads; `numpy` and `tolist` bypass it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations = self.filled_bytes = self.host_reads = 0
        self.paused = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Against importing torch's compiler for a mode, which takes seconds."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Count one operation and run it."""
        if self.paused:
            return func(*args, **(kwargs or {}))
        self.operations += not func.is_view  # a view launches nothing, and Python leaves out one of the whole
        name = func.overloadpacket.__name__
        if name in ("zero_", "fill_"):
            self.filled_bytes += args[0].nbytes
        self.host_reads += _reads_back(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def _reads_back(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the host needs a value for the result or its shape; of indices only a mask is a matter of data."""
    if torch.Tag.data_dependent_output in func.tags:
        return True
    if torch.Tag.dynamic_output_shape not in func.tags or kwargs.get("output_size") is not None:
        return False
    indices = args[1] if func.overloadpacket.__name__.startswith("index") else None
    return indices is None or any(index is not None and index.dtype == torch.bool for index in indices)


class OneLaunch:
    """Kernels whose planner counts as nothing but itself: what the emulation does inside is no torch operation."""

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels
        self.count = OperationCount()

        @functools.wraps(kernels.get_mla_metadata_v1)  # recorders read its signature
        def launch(*args: Any, **kwargs: Any) -> None:
            self.count.operations += 1
            self.count.paused = True
            try:
                kernels.get_mla_metadata_v1(*args, **kwargs)
            finally:
                self.count.paused = False

        self.get_mla_metadata_v1 = launch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)


class Growing(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sizes of batches that one engine builds one after another: `copies` of some requests each."""

    requests: tuple[tuple[int, int], ...]
    copies: tuple[int, ...]


def copies_to_device(target: InTreeTarget, steps: Sequence[StepBatch], config: BuilderConfig) -> list[int]:
    """Host-to-device copies of each build of the target's builder, on the `meta` device behind hollow kernels."""
    seam, meta, memo = Seam(HollowKernels()), torch.device("meta"), ShapeMemo()
    kernels = cast(PlannerKernels, seam)
    builder = target.builder(config=config, options=target.options, kernels=kernels, device=meta)
    copies = []
    for step in steps:
        counter = LaunchCounter(seam, meta, (), memo)
        with HostData(counter), counter:
            builder.build(step)
        copies.append(counter.host_to_device)
    return copies


class BuildBudget(InputCheck[Growing]):
    """Operations, host reads, copies to the device and cleared bytes of each build."""

    name = "build_budget"
    meaning = (
        "a build reads nothing back, copies the lengths once, clears no more than its policy says, and needs no more "
        "operations for more rows"
    )
    family = "serving"
    input_type = Growing

    def inputs(self) -> st.SearchStrategy[Growing]:
        """Batches that grow and shrink."""
        pairs = st.tuples(sampled_from((1, 1, 2, 4)), edge_lens(4))
        return st.builds(
            Growing,
            requests=st.lists(pairs, min_size=1, max_size=3).map(tuple),
            copies=st.lists(integers(1, 16), min_size=2, max_size=5).map(tuple),
        )

    def inapplicable(self, target: Target) -> str:
        """The budget is that of the in-tree builder's options, and torch sees no operation that a device does alone."""
        if not isinstance(target, InTreeTarget) or target.evidence != "emulated":
            return f"the target {target.name} is not the in-tree path on the CPU"
        return super().inapplicable(target)

    def run(self, drawn: Growing, target: Target) -> Verdict:
        """Build each batch under a counting mode."""
        assert isinstance(target, InTreeTarget)
        kernels: Any = OneLaunch(target.kernels)
        steps = tuple(batch(list(drawn.requests) * copies) for copies in drawn.copies)
        dims = dims_for(steps)
        session: Any = replace(target, kernels=kernels).open(dims, poison=TARGET_POISON)
        violation, operations, last = "", dict[bool, int](), batch([])
        filled = reads = 0
        for index, step in enumerate(steps):
            count = kernels.count = OperationCount()
            with count:
                record = session.build(step)
            filled, reads = filled + count.filled_bytes, reads + count.host_reads
            allowed = _clear_budget(target.options, last, step, dims)
            usual = operations.setdefault(record.launched, count.operations)
            wrong = ""
            if count.host_reads:
                wrong = f"the host reads {count.host_reads} values back, where none is needed"
            elif count.filled_bytes > allowed:
                wrong = f"{count.filled_bytes} bytes are cleared, the policy {target.options.clear} needs {allowed}"
            elif count.operations != usual:
                wrong = f"{count.operations} torch operations for {len(step.seq_lens)} requests, {usual} before"
            violation = violation or (wrong and f"step {index}: {wrong}")
            last = step
        copies = [] if violation else copies_to_device(target, steps, session.builder.config)
        for index, copied in enumerate(copies):
            if copied != 1:
                violation = violation or f"step {index}: {copied} copies from host to device, one takes all lengths"
        untested = "" if len(set(drawn.copies)) > 1 else "the batch never changed its size"
        measured: dict[str, float | int | str] = {
            "steps": len(steps),
            "cleared_bytes": filled,
            "host_reads": reads,
            "copies_to_device": sum(copies),
        }
        return self.verdict(violation, measured, untested=untested)


def _clear_budget(options: Options, last: StepBatch, step: StepBatch, dims: Dims) -> int:
    """Bytes that a build may clear: three whole buffers, or what the step before reaches beyond this one."""
    rows, topk = dims.max_num_batched_tokens, dims.topk
    if options.clear == "full":
        return 4 * (rows + rows * topk + rows + 1)
    requests = max(0, last.num_query_tokens - step.num_query_tokens)
    return 4 * (requests + max(0, last.num_tokens - step.num_tokens) * topk)


CHECKS: tuple[type[InputCheck[Any]], ...] = (InterfaceContract, BuildBudget)
