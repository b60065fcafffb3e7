"""Worker side: one builder of vLLM under test, or its always-rebuild twin, told step by step.

The twin is a new builder for every step: it has no history, so nothing that it gives can depend on one. That needs no
knowledge of how a release caches. Memory that a release leaves uninitialised is filled with poison.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from dataclasses import replace as dataclass_replace
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from dsv32_fast.batch import StepBatch
from dsv32_fast.kernels.emulated.device import MI355X, emulated_device
from dsv32_fuzz.case import Dims
from dsv32_fuzz.targets import PlannerInput
from dsv32_fuzz.targets.vllm.arena import Arena
from dsv32_fuzz.targets.vllm.engine import LAYER, Setting, common_metadata, engine_config, kv_cache_spec
from dsv32_fuzz.targets.vllm.imports import Loaded
from dsv32_fuzz.targets.vllm.wire import pack

PLAN = {
    "work_metadata_ptrs": "work_meta_data",
    "work_indptr": "work_indptr",
    "work_info_set": "work_info_set",
    "reduce_indptr": "reduce_indptr",
    "reduce_final_map": "reduce_final_map",
    "reduce_partial_map": "reduce_partial_map",
}
"""Our names of the plan's buffers, and the fields of vLLM's metadata that the attention layers read them from."""
VIEWS = ("req_id_per_token", "qo_indptr", "paged_kv_indptr", "paged_kv_last_page_len", "paged_kv_indices")
_LENGTHS = ("paged_kv_indptr", "qo_indptr", "paged_kv_last_page_len")


_LAZY_ZEROS = 1 << 18


class _Poisoned(TorchFunctionMode):
    """Fills integer memory that is left uninitialised; large zeros are pages that cost nothing until they are used."""

    def __init__(self, poison: int) -> None:
        super().__init__()
        self.poison = poison

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.zeros and _elements(args) > _LAZY_ZEROS:
            dtype = (kwargs or {}).get("dtype") or torch.float32
            return torch.from_numpy(np.zeros(_elements(args) * dtype.itemsize, np.uint8)).view(dtype).view(*args)
        result = func(*args, **(kwargs or {}))
        if func in (torch.empty, torch.empty_strided, torch.Tensor.new_empty) and not result.is_floating_point():
            (result.view(torch.int64) if result.dtype == torch.uint64 else result).fill_(self.poison)
        return result


def _elements(shape: tuple[Any, ...]) -> int:
    sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape
    return math.prod(sizes)


@dataclass
class BuilderSession:
    """A builder that lives from step to step, its integer buffers shared with the suite."""

    loaded: Loaded
    dims: Dims
    poison: int
    setting: Setting
    builder: Any = None
    arena: Arena | None = None

    def open(self) -> dict[str, Any]:
        """Make the builder and share its buffers."""
        self.builder = make_builder(self.loaded, self.dims, self.poison, self.setting)
        self.arena = Arena.adopt(_integer_buffers(self.builder))
        return {"arena": self.arena.describe()}

    def build(self, step: StepBatch) -> dict[str, Any]:
        """One step: what reached the planner, what the attention layers receive, and where it lies."""
        metadata, planned = run_build(self.loaded, self.builder, self.dims, step)
        assert self.arena is not None
        views = {name: _place(self.arena, getattr(metadata, name, None)) for name in (*VIEWS, *PLAN.values())}
        return {**tell(metadata, planned, step, self.loaded), "key": key_of(self.builder), "views": views}

    def close(self) -> None:
        """Give the memory back."""
        if self.arena is not None:
            self.arena.close()


@dataclass
class TwinSession:
    """Builds every step with a new builder; only its planner input and plan are of interest."""

    loaded: Loaded
    dims: Dims
    poison: int
    setting: Setting
    arena: Arena | None = None
    _plan: dict[str, torch.Tensor] = field(default_factory=dict)

    def open(self) -> dict[str, Any]:
        """Nothing is made before the first step."""
        return {"arena": None}

    def build(self, step: StepBatch) -> dict[str, Any]:
        """One step of a builder without a past."""
        builder = make_builder(self.loaded, self.dims, self.poison, self.setting)
        metadata, planned = run_build(self.loaded, builder, self.dims, step)
        told = tell(metadata, planned, step, self.loaded)
        if told["persistent"]:
            plan = {field: getattr(metadata, field) for field in PLAN.values()}
            if self.arena is None:
                self._plan = {name: torch.empty_like(tensor) for name, tensor in plan.items()}
                self.arena = Arena.adopt(self._plan)
                told["arena"] = self.arena.describe()
            for name, tensor in plan.items():
                self._plan[name].copy_(tensor)
        views = {name: _place(self.arena, self._plan.get(name)) if self.arena else None for name in PLAN.values()}
        views |= dict.fromkeys(VIEWS)
        return {**told, "key": None, "views": views}

    def close(self) -> None:
        """Give the memory back."""
        if self.arena is not None:
            self.arena.close()


def make_builder(loaded: Loaded, dims: Dims, poison: int, setting: Setting) -> Any:
    """A new builder of this vLLM for an engine of the given dims."""
    loaded.compute_units = dims.compute_units
    device = dataclass_replace(MI355X, compute_units=dims.compute_units)
    with emulated_device(device), _Poisoned(poison):
        return loaded.builder_class()(
            kv_cache_spec(setting), [LAYER], engine_config(dims, setting), torch.device("cpu")
        )


def run_build(loaded: Loaded, builder: Any, dims: Dims, step: StepBatch) -> tuple[Any, PlannerInput | None]:
    """One call of `build`: the metadata, and what reached the planner if it ran."""
    loaded.recorder.take()
    loaded.stream_events.clear()
    loaded.compute_units = dims.compute_units
    with emulated_device(dataclass_replace(MI355X, compute_units=dims.compute_units)):
        metadata = builder.build(0, common_metadata(loaded.common_metadata, step))
    return metadata, loaded.recorder.take()


def tell(metadata: Any, planned: PlannerInput | None, step: StepBatch, loaded: Loaded) -> dict[str, Any]:
    """The part of a reply that says what happened.

    A step without a persistent plan is one whose kernel splits by itself: its planner input is what the kernel gets.
    """
    persistent = all(getattr(metadata, field, None) is not None for field in PLAN.values())
    rows = metadata.req_id_per_token.numel()
    return {
        "launched": planned is not None,
        "persistent": persistent,
        "num_tokens": int(metadata.num_actual_tokens),
        "max_query_len": int(metadata.max_query_len),
        "rows": rows,
        "requests": _requests(metadata, step, rows),
        "events": list(loaded.stream_events),
        "planner_input": _packed(planned or (None if persistent else _kernel_input(metadata))),
    }


def _requests(metadata: Any, step: StepBatch, rows: int) -> int | None:
    """How many requests of the step this path serves; None if its rows are those of the step or of nothing known.

    A release may leave out padding rows, and prompts that its dense path serves instead; it says so in its metadata.
    """
    if rows == step.num_tokens:
        return None
    prefill = getattr(metadata, "prefill", None)
    dense = prefill is not None and getattr(prefill, "use_dense_mha", False)
    served = int(metadata.num_decodes) if dense else len(step.query_lens)
    return served if sum(step.query_lens[:served]) == rows else None


def _kernel_input(metadata: Any) -> PlannerInput:
    kv, qo, last = (getattr(metadata, name).numpy() for name in _LENGTHS)
    return PlannerInput((kv[1:] - kv[:-1]), (qo[1:] - qo[:-1]), last.copy(), (("persistent", False),))


def _packed(planned: PlannerInput | None) -> dict[str, Any] | None:
    if planned is None:
        return None
    scalars = {name: value if isinstance(value, int | bool) else str(value) for name, value in planned.scalars}
    arrays = {name: pack(getattr(planned, name)) for name in ("kv_lens", "qo_lens", "last_page_lens")}
    return {**arrays, "scalars": scalars}


def key_of(builder: Any) -> str | None:
    """What the builder compares between steps, as text: an attribute that is called a key, tuple or bytes."""
    keys = {n: v for n, v in vars(builder).items() if "key" in n.lower() and isinstance(v, tuple | bytes)}
    return repr(sorted(keys.items())) if keys else None


def _integer_buffers(builder: Any) -> dict[str, torch.Tensor]:
    """Every integer tensor that the builder holds as an attribute, each storage once."""
    found: dict[str, torch.Tensor] = {}
    storages: set[int] = set()
    for name, value in vars(builder).items():
        if not isinstance(value, torch.Tensor) or value.is_floating_point() or not value.is_contiguous():
            continue
        if value.untyped_storage().data_ptr() not in storages:
            found[name] = value
            storages.add(value.untyped_storage().data_ptr())
    return found


def _place(arena: Arena, view: torch.Tensor | None) -> dict[str, Any] | None:
    """Where a view lies: in a shared buffer, or nowhere that is shared, then with its values."""
    if view is None:
        return None
    buffer = arena.locate(view.data_ptr())
    if buffer is None or not view.is_contiguous():
        return {"buffer": None, "values": pack(view.numpy())}
    start = view.data_ptr() - arena.memory.data_ptr() - arena.placed[buffer].offset
    return {"buffer": buffer, "start": start // view.itemsize, "shape": list(view.shape)}
