"""The in-tree optimised path as a target: `dsv32_fast.metadata.MetadataBuilder` on the emulated planner."""

from __future__ import annotations

import inspect
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import torch

from dsv32_fast.batch import StepBatch
from dsv32_fast.kernels.emulated.device import MI355X, DeviceProperties, emulated_device
from dsv32_fast.kernels.mounted import EMULATION
from dsv32_fast.kernels.protocol import Kernels, PlannerKernels
from dsv32_fast.metadata import BuilderConfig, MetadataBuilder, max_split_per_batch, metadata_key
from dsv32_fast.options import Options
from dsv32_fuzz.case import Dims
from dsv32_fuzz.targets import PlannerInput, Session, StepRecord

_TENSORS = ("seqlens_qo_indptr", "seqlens_kv_indptr", "kv_last_page_lens")
_BUFFERS = (
    "work_metadata_ptrs",
    "work_info_set",
    "work_indptr",
    "reduce_indptr",
    "reduce_final_map",
    "reduce_partial_map",
)


@dataclass
class RecordingKernels:
    """Passes every call on and keeps what reached the planner since `take` was last called."""

    kernels: PlannerKernels
    _last: PlannerInput | None = None
    _names: tuple[str, ...] = field(init=False)
    _scalars: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        """Read the planner's parameter names once, in order: they name the positional arguments of a call."""
        self._names = tuple(inspect.signature(self.kernels.get_mla_metadata_v1).parameters)
        self._scalars = tuple(name for name in self._names if name not in _TENSORS and name not in _BUFFERS)

    def get_mla_metadata_info_v1(self, *args: Any, **kwargs: Any) -> tuple[tuple[Any, torch.dtype], ...]:
        """Passed on unchanged."""
        return self.kernels.get_mla_metadata_info_v1(*args, **kwargs)

    def get_mla_metadata_v1(self, *args: Any, **kwargs: Any) -> None:
        """Record the input, then plan."""
        arguments = dict(zip(self._names, args, strict=False)) | kwargs
        qo_indptr, kv_indptr, last_page_lens = (arguments[name].cpu().numpy() for name in _TENSORS)
        scalars = tuple([(name, arguments[name]) for name in self._scalars if name in arguments])
        kv_lens, qo_lens = kv_indptr[1:] - kv_indptr[:-1], qo_indptr[1:] - qo_indptr[:-1]
        self._last = PlannerInput(kv_lens, qo_lens, last_page_lens.copy(), scalars)
        self.kernels.get_mla_metadata_v1(*args, **kwargs)

    def take(self) -> PlannerInput | None:
        """The input of the call since the last `take`, None if there was none."""
        taken, self._last = self._last, None
        return taken


@dataclass
class _InTreeSession:
    builder: MetadataBuilder
    kernels: RecordingKernels
    device: DeviceProperties

    def build(self, step: StepBatch) -> StepRecord:
        builder = self.builder
        with emulated_device(self.device):
            metadata = builder.build(step)
        planner_input = self.kernels.take()
        return StepRecord(
            launched=planner_input is not None,
            planner_input=planner_input,
            metadata=metadata,
            key=builder.last_key,
            req_ids_N=builder.req_id_per_token_N.numpy(),
            kv_indptr_N1=builder.paged_kv_indptr_N1.numpy(),
            kv_indices_NK=builder.paged_kv_indices_NK.numpy(),
            plan=builder.plan,
        )


@dataclass(frozen=True)
class InTreeTarget:
    """The optimised path with the given options."""

    options: Options
    name: str = "in-tree"
    evidence: str = "emulated"
    builder: type[MetadataBuilder] = MetadataBuilder
    """A subclass with a fault takes the path's place; its twin is always the faultless builder."""
    kernels: Kernels = EMULATION
    """Kernels with a fault take the place of the emulated ones; the twin always plans with the faultless ones."""

    @property
    def caches(self) -> bool:
        """Every key policy but `none` reuses plans."""
        return self.options.key != "none"

    def key_of(self, step: StepBatch) -> Hashable:
        """The metadata key of one step at the true constants, without building it."""
        config = BuilderConfig()
        return metadata_key(step, self.options.key, config.topk, config.num_heads)

    def scalars_of(self, step: StepBatch) -> tuple[int, ...]:
        """The scalars of the planner input that vary from step to step."""
        return (max_split_per_batch(step, self.options.split_cap, BuilderConfig()),)

    def open(self, dims: Dims, *, rebuild: bool = False, poison: int = 0) -> Session:
        """A fresh builder whose uninitialised plan buffers hold `poison`."""
        kernels = RecordingKernels(EMULATION if rebuild else self.kernels)
        # The twin is for the plan; its buffers are not looked at, so it takes the cheap clear.
        options = msgspec.structs.replace(self.options, key="none", clear="tail") if rebuild else self.options
        kv_dtype = torch.bfloat16 if dims.kv_dtype == "bf16" else torch.float8_e4m3fn
        config = BuilderConfig(
            num_heads=dims.num_heads,
            topk=dims.topk,
            max_num_batched_tokens=dims.max_num_batched_tokens,
            compute_units=dims.compute_units,
            q_dtype=kv_dtype,
            kv_dtype=kv_dtype,
        )
        device = replace(MI355X, compute_units=dims.compute_units)
        with emulated_device(device):
            kind = MetadataBuilder if rebuild else self.builder
            builder = kind(config=config, options=options, kernels=kernels)
        for buffer in builder.plan:
            (buffer.view(torch.int64) if buffer.dtype == torch.uint64 else buffer).fill_(poison)
        return _InTreeSession(builder, kernels, device)
