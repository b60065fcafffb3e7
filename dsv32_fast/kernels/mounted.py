"""The emulation mounted as the module `aiter`, so that code written for AITER runs against it.

    with mounted():
        from aiter.mla import mla_decode_fwd

It holds the functions of `signatures`, in the submodules where AITER has them, plus `aiter.dtypes`. With a release, the
functions have the signatures of that release: in `with mounted("0.1.13")` the top-k takes no `k`.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from dsv32_fast.kernels.emulated import api
from dsv32_fast.kernels.emulated.device import current_device
from dsv32_fast.kernels.emulated.launch import MlaVersion
from dsv32_fast.kernels.protocol import Kernels
from dsv32_fast.kernels.signatures import FUNCTIONS, HOMES, signature

EMULATION: Kernels = api

_TOP = ("QuantType", "ActivationType", "get_hip_quant", "pertoken_quant")
_WITHOUT = {"num_kv_splits": 0}
"""What a release that lacks a required parameter behaves like."""


@contextmanager
def mounted(release: str | None = None) -> Iterator[ModuleType]:
    """Mount the emulation as `aiter` with the signatures of `release` (of the commit if None); yield the module.

    What was imported as `aiter` before is put back afterwards. fp8 is the flavour of the device that is emulated at the
    time of mounting, as AITER fixes it at import.

    Raises:
        ValueError: `release` is no version.
        UnknownSignatureError: the signatures of `release` are not recorded.
    """
    modules = _modules(release)
    hidden = {name: module for name, module in sys.modules.items() if name == "aiter" or name.startswith("aiter.")}
    for name in hidden:
        del sys.modules[name]
    sys.modules.update(modules)
    try:
        yield modules["aiter"]
    finally:
        for name in [name for name in sys.modules if name == "aiter" or name.startswith("aiter.")]:
            del sys.modules[name]
        sys.modules.update(hidden)


def _modules(release: str | None) -> dict[str, ModuleType]:
    modules: dict[str, ModuleType] = {}
    top = _module(modules, "aiter")
    top.__dict__.update(__emulated__=True, __version__=release or "emulated")
    top.__dict__.update({name: getattr(api, name) for name in _TOP})
    for name in FUNCTIONS:
        function = _as_released(name, release)
        if name in HOMES:
            setattr(_module(modules, f"aiter.{HOMES[name][0]}"), name, function)
        else:
            setattr(top, name, function)
    _module(modules, "aiter.dtypes").__dict__.update(_dtypes(), MlaVersion=MlaVersion)
    return modules


def _module(modules: dict[str, ModuleType], name: str) -> ModuleType:
    """The module of that name, made together with its parents on first use."""
    if name not in modules:
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, loader=None, origin="emulated", is_package=True)
        module.__path__ = []
        modules[name] = module
        parent, _, leaf = name.rpartition(".")
        if parent:
            setattr(_module(modules, parent), leaf, module)
    return modules[name]


def _as_released(name: str, release: str | None) -> Callable[..., Any]:
    """The emulated function behind the signature of a release; other arguments are a TypeError, as in Python."""
    function: Callable[..., Any] = getattr(api, name)
    if release is None:
        return function
    ours, kept = inspect.signature(function), {parameter.name for parameter in signature(name, release)}
    theirs = ours.replace(parameters=[p for p in ours.parameters.values() if p.name in kept])
    fixed = {parameter: value for parameter, value in _WITHOUT.items() if parameter in ours.parameters.keys() - kept}

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(**theirs.bind(*args, **kwargs).arguments, **fixed)

    call.__signature__ = theirs  # type: ignore[attr-defined]
    return call


def _dtypes() -> dict[str, Any]:
    names: dict[str, torch.dtype] = {
        "fp8": current_device().fp8,
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
        "fp32": torch.float32,
        "i8": torch.int8,
        "u8": torch.uint8,
        "i32": torch.int32,
        "i64": torch.int64,
        "u64": torch.uint64,
    }
    return {**names, "d_dtypes": dict(names)}
