"""Which kernels a test session runs, the shapes that they take, and what was left out because of that.

A check fixes some shapes (`Admits`) and takes the others from the `Limits` of the kernels, so that its small world
becomes the smallest one that these kernels take. What they do not take is left out with a reason, and counted:
`skipped()` is for whoever judges the run.

`aiter` is the installed AITER, or where there is none its adapter over the mounted emulation, with the limits of the
real kernels all the same: a rehearsal of the run on hardware, check by check.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any, Literal, cast

import torch
from torch import Tensor

from dsv32_fast.graph.recorder import WRITTEN
from dsv32_fast.kernels import installed
from dsv32_fast.kernels.aiter import load, python_signature
from dsv32_fast.kernels.mounted import EMULATION, mounted
from dsv32_fast.kernels.protocol import Kernels
from dsv32_fast.kernels.signatures import signature
from dsv32_fast.packing import Shuffle, natural

Name = Literal["emulated", "aiter"]


@dataclass(frozen=True, kw_only=True)
class Admits:
    """The shapes that a check fixes; what is None follows the kernels' limits."""

    heads: int | None = None
    latent: int | None = None
    rope: int | None = None
    query_rows: int | None = None
    """Query rows of one planner row."""
    page: int | None = None
    """Tokens per page of the latent cache, as the decode kernel sees it."""
    router: tuple[int, int, int, int] | None = None
    """Experts, groups, kept groups, chosen experts."""
    topk: int | None = None
    emulation: str = ""
    """Why only the emulation can answer, for example since it tells what a GPU leaves undefined."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What kernels take; None takes everything, else the values listed, smallest first."""

    heads: tuple[int, ...] | None = None
    latent: tuple[int, ...] | None = None
    rope: tuple[int, ...] | None = None
    query_rows: tuple[int, ...] | None = None
    page: tuple[int, ...] | None = None
    router: tuple[tuple[int, int, int, int], ...] | None = None
    topk: tuple[int, ...] | None = None
    defined: bool = False
    """Whether only defined behaviour can be observed."""

    def smallest(self, name: str, wanted: int) -> int:
        """The smallest value of at least `wanted` that the field `name` takes.

        Raises:
            ValueError: there is none.
        """
        taken: tuple[int, ...] | None = getattr(self, name)
        found = wanted if taken is None else next((value for value in taken if value >= wanted), None)
        if found is None:
            raise ValueError(f"{name} {wanted}: these kernels take at most {max(taken or ())}")
        return found

    def why_not(self, admits: Admits) -> str | None:
        """Why these kernels cannot run a check; None if they can."""
        if self.defined and admits.emulation:
            return f"only the emulation: {admits.emulation}"
        for name in (each.name for each in fields(admits) if each.name != "emulation"):
            value, taken = getattr(admits, name), cast("tuple[Any, ...] | None", getattr(self, name))
            if value is not None and taken is not None and value not in taken:
                shown = taken if len(taken) < 5 else (*taken[:2], "...", taken[-1])
                return f"{name} {value}: real kernels take {', '.join(map(str, shown))}"
        return None


ANY = Limits()
HARDWARE = Limits(
    heads=tuple(range(16, 129, 16)),
    latent=(512,),
    rope=(64,),
    query_rows=(1,),
    page=(1,),
    router=((256, 8, 4, 8),),
    topk=tuple(range(128, 2049, 128)),
    defined=True,
)
"""AITER on gfx950 as vLLM drives it for DeepSeek-V3.2."""


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Kernels of a session."""

    kernels: Kernels = EMULATION
    limits: Limits = ANY
    device: str = "cpu"
    shuffle: Shuffle = natural
    """What `fused_moe` wants done to its weights."""
    title: str = "emulated"
    left_out: Counter[str] = field(default_factory=Counter)

    @property
    def from_host(self) -> Kernels:
        """The kernels for tensors on the host."""
        return self.kernels if self.limits is ANY else cast(Kernels, FromHost(self.kernels, self.device))


_current = Selection()


def current() -> Selection:
    """The selection of this session; the emulation unless `selected` says otherwise."""
    return _current


def skipped() -> Mapping[str, int]:
    """How many checks of this session were left out, by reason."""
    return dict(_current.left_out)


@contextmanager
def selected(name: Name) -> Iterator[Selection]:
    """Make `name` the current selection inside the block.

    Raises:
        ValueError: an unknown name.
        AiterUnavailableError: AITER is installed and does not import.
    """
    global _current  # noqa: PLW0603 - one selection per session, as there is one module `aiter`
    before = _current
    try:
        if name == "emulated":
            _current = Selection()
            yield _current
        elif name != "aiter":
            raise ValueError(f"kernels {name!r}: choose emulated or aiter")
        elif installed.find_aiter().kind == "aiter":
            kernels, shuffle = load(), importlib.import_module("aiter.ops.shuffle").shuffle_weight
            title = "aiter (installed)"
            _current = Selection(kernels=kernels, limits=HARDWARE, device="cuda", shuffle=shuffle, title=title)
            yield _current
        else:
            with mounted():
                _current = Selection(kernels=load(), limits=HARDWARE, title="aiter (the mounted emulation)")
                yield _current
    finally:
        _current = before


class FromHost:
    """Kernels for tensors on the host: each call copies them to the device, and what it writes back.

    Only the views themselves are copied, with their strides, so that nothing outside them can be seen or changed.
    """

    def __init__(self, kernels: Kernels, device: str) -> None:
        self._kernels, self._device = kernels, device

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(self._kernels, name)
        if name not in WRITTEN:
            return cast("Callable[..., Any]", function)
        ours = python_signature(signature(name))

        def call(*args: Any, **kwargs: Any) -> Any:
            given = ours.bind(*args, **kwargs).arguments
            there = {key: self._there(value) if isinstance(value, Tensor) else value for key, value in given.items()}
            if name == "mla_decode_fwd" and there.get("work_meta_data") is not None:
                pointers = [there[key].data_ptr() for key in ("work_indptr", "work_info_set")]
                there["work_meta_data"].copy_(torch.tensor(pointers, dtype=torch.uint64))  # of these copies
            result = function(**there)
            for key in WRITTEN[name]:
                if isinstance(given.get(key), Tensor):
                    given[key].copy_(there[key])
            same = {id(there[key]): value for key, value in given.items() if isinstance(value, Tensor)}
            return _back(result, same)

        return call

    def _there(self, tensor: Tensor) -> Tensor:
        if 0 in tensor.stride() and tensor.numel() > 1:
            tensor = tensor.contiguous()
        copied = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self._device)
        return copied.copy_(tensor)


def _back(result: Any, same: Mapping[int, Tensor]) -> Any:
    """A result on the host; where a kernel returns an argument, the caller's own tensor."""
    if isinstance(result, tuple):
        return tuple(_back(item, same) for item in result)
    return same.get(id(result), result.cpu()) if isinstance(result, Tensor) else result
