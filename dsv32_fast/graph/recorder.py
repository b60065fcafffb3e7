"""Capture on the CPU: every torch operation and every kernel call of a body, with the tensors it reads and writes.

As in a stream capture, what is recorded are operations on addresses and Python numbers; nothing of the body's own code
runs again at replay. Reading a value on the host (`item`, `bool`, a shape that depends on data) is refused, as a GPU
refuses it; `tolist` and `numpy` bypass torch's dispatch and are not seen.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_PLAN = (
    "work_metadata_ptrs",
    "work_info_set",
    "work_indptr",
    "reduce_indptr",
    "reduce_final_map",
    "reduce_partial_map",
)
WRITTEN: dict[str, tuple[str, ...]] = {
    "get_mla_metadata_v1": _PLAN,
    "mla_decode_fwd": ("o",),
    "mla_reduce_v1": ("final_output", "final_lse"),
    "biased_grouped_topk": ("topk_weights", "topk_ids"),
    "biased_grouped_topk_hip": ("topk_weights", "topk_ids"),
    "moe_fused_gate": ("topk_weights", "topk_ids"),
    "indexer_k_quant_and_cache": ("kv_cache",),
    "cp_gather_indexer_k_quant_cache": ("dst_k", "dst_scale"),
    "deepgemm_fp8_paged_mqa_logits": ("out_logits",),
    "fp8_mqa_logits": (),
    "top_k_per_row_decode": ("indices",),
    "top_k_per_row_prefill": ("indices", "values"),
    "concat_and_cache_mla": ("kv_cache",),
    "per_token_quant_hip": (),
    "per_group_quant_hip": (),
    "fused_moe": (),
}
"""Arguments that a kernel writes in place; the tensors that it returns are new."""


class CaptureError(RuntimeError):
    """A body does something that no graph can hold; the message names the operation and the remedy."""


@dataclass(frozen=True, kw_only=True)
class RecordedOp:
    """One operation: `run` repeats it on the captured tensors and returns new results."""

    name: str
    run: Callable[[], Any]
    reads: tuple[torch.Tensor, ...]
    writes: tuple[torch.Tensor, ...]
    """Arguments written in place."""
    fresh: tuple[torch.Tensor, ...]
    """Results in the graph's own memory."""
    kernel: bool
    """Whether it addresses memory by itself, so that it may write outside its views."""


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch does not annotate it
    """Records while it is entered; `call_kernel` records a kernel as one operation, whatever it does inside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[RecordedOp] = []
        self._inside_kernel = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch's switch against importing its compiler for a mode, which takes seconds; nothing is compiled here."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one torch operation and record it."""
        kwargs = kwargs or {}
        if self._inside_kernel:
            return func(*args, **kwargs)
        _refuse_host_reads(func, args, kwargs)
        writes = _written_by_torch(func, args, kwargs)
        return self._record(str(func), functools.partial(func, *args, **kwargs), (args, kwargs), writes, kernel=False)

    def call_kernel(self, name: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run one kernel and record it."""
        bound = inspect.signature(function).bind(*args, **kwargs).arguments
        writes = [bound[argument] for argument in WRITTEN[name] if bound.get(argument) is not None]
        with self._kernel():
            run = functools.partial(function, *args, **kwargs)
            return self._record(name, run, (args, kwargs), writes, kernel=True)

    @contextmanager
    def _kernel(self) -> Iterator[None]:
        self._inside_kernel = True
        try:
            yield
        finally:
            self._inside_kernel = False

    def _record(self, name: str, run: Callable[[], Any], given: Any, writes: list[torch.Tensor], kernel: bool) -> Any:
        reads = tensors_in(given)
        result = run()
        known = {storage_address(tensor) for tensor in reads}
        fresh = tuple(tensor for tensor in tensors_in(result) if storage_address(tensor) not in known)
        if fresh or writes:  # what only makes views is done once and for all
            self.ops.append(
                RecordedOp(name=name, run=run, reads=reads, writes=tuple(writes), fresh=fresh, kernel=kernel)
            )
        return result


class RecordingKernels:
    """Kernels as a body calls them: recorded as one operation each while `recorder()` gives a recorder."""

    def __init__(self, kernels: Any, recorder: Callable[[], Recorder | None]) -> None:
        self._kernels, self._recorder = kernels, recorder

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._kernels, name)
        if name not in WRITTEN:
            return function

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            recorder = self._recorder()
            return function(*args, **kwargs) if recorder is None else recorder.call_kernel(name, function, args, kwargs)

        return call


def tensors_in(tree: Any) -> tuple[torch.Tensor, ...]:
    """All tensors in nested tuples, lists and dictionaries."""
    return tuple(leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def storage_address(tensor: torch.Tensor) -> int:
    """Where the storage of `tensor` begins; 0 for an empty one."""
    return int(tensor.untyped_storage().data_ptr())


def _written_by_torch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The arguments that the schema marks as mutated."""
    written: list[torch.Tensor] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written += tensors_in(args[place] if place < len(args) else kwargs.get(argument.name))
    return written


def _refuse_host_reads(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    by_data = torch.Tag.data_dependent_output in func.tags
    by_shape = torch.Tag.dynamic_output_shape in func.tags
    if func in (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default):
        # Only a mask is a matter of data, and not even that where one value fills it.
        masked = any(index.dtype == torch.bool for index in tensors_in(args[1]))
        by_shape = masked and (len(args) < 3 or args[2].numel() != 1)
    if by_shape and kwargs.get("output_size") is not None:
        by_shape = False
    if by_data or by_shape:
        raise CaptureError(f"{func} needs a value on the host, which a graph cannot wait for; move it out of the body")
