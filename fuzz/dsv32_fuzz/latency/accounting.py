"""Exact accounting of one decode step: what it launches, casts, clears, copies and waits for.

Two observers that know nothing of each other's counters: the seam sees AITER's kernels by name, a `TorchDispatchMode`
sees every torch operator outside them. Rules, for a path whose tensors live on one device:
- an operator launches if it gives or changes a tensor of the device and is neither a view nor an allocation; one
  operator may launch several kernels on a GPU, so operators are counted as operators;
- a cast is a copy between two floating-point types on the device; a router cast is one between the stages `ffn_in` and
  `gate_logits` of a mixture layer;
- cleared bytes are those that zero_, fill_ or a broadcast copy write into the metadata builder's persistent buffers;
- a host-to-device copy is a tensor made on the device from host data, a copy of a host tensor to it, or a host tensor
  that indexes one of the device;
- a synchronisation is an operator whose result the host must know before it can go on: reading a value, a boolean
  mask as index, nonzero and its kin, and a copy from device to host.

On the `meta` device nothing is computed or stored, so that the real sizes cost nothing; the operators are those of a
GPU. On the `cpu` device some are spelt differently (products in fp32), and host and device are one.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.fx.experimental import _config as fx_config
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from dsv32_fast.path import DecodePath
from dsv32_fast.state import CacheState, Tokens
from dsv32_fuzz.latency.seam import PLANNER, Seam
from dsv32_fuzz.latency.shapes import ShapeMemo

_ALLOCATIONS = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
_NO_WORK = _ALLOCATIONS | {"_unsafe_view"}
_CLEARS = frozenset({"zero_", "fill_"})
_READS = frozenset({"_local_scalar_dense", "item", "equal", "nonzero", "masked_select", "_unique2", "unique_dim"})
_INDEXED = frozenset({"index", "index_put", "index_put_", "_index_put_impl_"})


class StepCounts(msgspec.Struct, frozen=True, kw_only=True):
    """What one step did; counts are of launches or operators, sizes in bytes."""

    kernels: dict[str, int]
    """Launches of AITER's kernels by name."""
    operators: dict[str, int]
    """torch operators on the device that launch something, by name."""
    casts: dict[str, int]
    """By "from->to", for instance "bfloat16->float32"."""
    router_casts: int
    plan_launches: int
    bytes_cleared: int
    host_to_device: int
    synchronisations: int

    @property
    def launches(self) -> int:
        """Kernels and operators together."""
        return sum(self.kernels.values()) + sum(self.operators.values())


class LaunchCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tallies torch's operators on `device` while active; `tap` tells it where a stage ends."""

    def __init__(
        self, seam: Seam, device: torch.device, persistent: Iterable[Tensor], memo: ShapeMemo | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seam, self._device, self._memo = seam, device.type, memo or ShapeMemo()
        # The buffers must outlive the counter: an address in use cannot be given to another storage.
        self._kept = list(persistent)
        self._storages = {_storage(tensor) for tensor in self._kept}
        self.operators: Counter[str] = Counter()
        self.casts: Counter[str] = Counter()
        self.router_casts = 0
        self.bytes_cleared = self.host_to_device = self.synchronisations = 0
        self._since_tap: Counter[str] = Counter()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Against importing torch's compiler for a mode, which takes seconds."""
        return False

    def tap(self, stage: str, _layer: int, value: Tensor) -> Tensor:
        """A tap for `DecodePath.decode`."""
        if stage == "gate_logits":
            self.router_casts += self._since_tap.total()
        self._since_tap.clear()
        return value

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = self._memo(func, args, kwargs or {})
        if not self._seam.inside:
            self._note(func, args, kwargs or {}, result)
        return result

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        name, launches = _facts(func)
        inputs = list(_tensors((args, tuple(kwargs.values()))))
        if not any(t.device.type == self._device for t in (*inputs, *_tensors(result))):
            return
        copied = self._copy(name, args, result)
        indices = list(_tensors(args[1])) if name in _INDEXED else []
        self.synchronisations += _waits(name, indices, kwargs) or copied == "to host"
        self.host_to_device += sum(t.device.type != self._device for t in indices)
        if copied is not None:
            self.host_to_device += copied == "to device"
        elif launches:
            self.operators[name] += 1
            self._clear(name, inputs)

    def _copy(self, name: str, args: tuple[Any, ...], result: Any) -> str | None:
        """ "to device" or "to host" where data cross, None elsewhere; notes a cast within the device."""
        if name == "lift_fresh":
            return "to device"
        if name not in ("_to_copy", "copy_"):
            return None
        source, target = (args[0], result) if name == "_to_copy" else (args[1], args[0])
        if source.device.type != target.device.type:
            return "to device" if target.device.type == self._device else "to host"
        if source.dtype != target.dtype and source.is_floating_point() and target.is_floating_point():
            cast = f"{_short(source.dtype)}->{_short(target.dtype)}"
            self.casts[cast] += 1
            self._since_tap[cast] += 1
        return None

    def _clear(self, name: str, inputs: list[Tensor]) -> None:
        target = inputs[0] if inputs else None
        broadcast = name == "copy_" and len(inputs) > 1 and 0 in inputs[1].stride()
        if target is not None and (name in _CLEARS or broadcast) and _storage(target) in self._storages:
            self.bytes_cleared += target.nbytes


class HostData(TorchFunctionMode):
    """Notes tensors that `torch.tensor` makes on `meta` from host data: torch does not dispatch those."""

    def __init__(self, counter: LaunchCounter) -> None:
        super().__init__()
        self._counter = counter

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.tensor, torch.as_tensor) and result.is_meta:
            self._counter.host_to_device += 1
        return result


def count_step(
    path: DecodePath,
    seam: Seam,
    state: CacheState,
    tokens: Tokens,
    *,
    padded_rows: int = 0,
    memo: ShapeMemo | None = None,
) -> StepCounts:
    """Take one step and return what it did; `path.kernels` must be `seam`, and `memo` serves a path on `meta`.

    Raises:
        ValueError: the path does not call its kernels through `seam`, or the step itself is refused.
    """
    if path.kernels is not seam or path.builder.kernels is not seam:
        raise ValueError("seam: the path has other kernels; make it with the seam as its kernels")
    builder, before = path.builder, seam.calls.copy()
    buffers = (builder.req_id_per_token_N, builder.paged_kv_indices_NK, builder.paged_kv_indptr_N1)
    counter = LaunchCounter(seam, path.device, buffers, memo)
    # Without data a boolean mask cannot choose: let it choose everything on `meta`, where torch would refuse it.
    with (
        HostData(counter),
        counter,
        fx_config.patch(  # type: ignore[attr-defined]
            meta_nonzero_assume_all_nonzero=True
        ),
    ):
        path.decode(state, tokens, padded_rows=padded_rows, tap=counter.tap)
    kernels = seam.calls - before
    return StepCounts(
        kernels=dict(sorted(kernels.items())),
        operators=dict(sorted(counter.operators.items())),
        casts=dict(sorted(counter.casts.items())),
        router_casts=counter.router_casts,
        plan_launches=kernels[PLANNER],
        bytes_cleared=counter.bytes_cleared,
        host_to_device=counter.host_to_device,
        synchronisations=counter.synchronisations,
    )


@functools.cache
def _facts(func: Any) -> tuple[str, bool]:
    """The operator's name, and whether it does work: a view's result aliases an input that it does not write."""
    name: str = func._schema.name.removeprefix("aten::")
    view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
    return name, not view and name not in _NO_WORK


def _waits(name: str, indices: list[Tensor], kwargs: dict[str, Any]) -> bool:
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None
    return name in _READS or any(t.dtype in (torch.bool, torch.uint8) for t in indices)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
