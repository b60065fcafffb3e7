"""The installed AITER behind `Kernels`: adapts what differs between releases, or refuses by name.

Nothing in this module has run on AMD hardware. It is tested against the emulation mounted as `aiter`, with the recorded
signatures of several releases; what the real kernels compute is for the checks to find out.

Callers write the arguments of commit e404860. An argument that the installed function does not have is dropped when
its value is what that release does anyway, and refused otherwise. Required parameters that nobody knows are refused
when the function is first used. Weights for `fused_moe` must already be shuffled (`aiter.ops.shuffle.shuffle_weight`).
"""

from __future__ import annotations

import enum
import importlib
import inspect
from collections.abc import Callable
from typing import Any, cast

from dsv32_fast.kernels import installed
from dsv32_fast.kernels.protocol import Kernels
from dsv32_fast.kernels.signatures import FUNCTIONS, HOMES, Parameter, signature


class AiterUnavailableError(RuntimeError):
    """AITER cannot be used here; the message says why and what to install."""


class UnsupportedByReleaseError(NotImplementedError):
    """The installed AITER release lacks a function or an argument; the message names it."""


# Arguments that a release without them ignores, whatever their value: they size scratch memory only.
_WITHOUT_EFFECT = {("mla_reduce_v1", "num_kv_splits")}


def load() -> Kernels:
    """The installed AITER (or its mounted emulation).

    Raises:
        AiterUnavailableError: AITER is not installed, is the unrelated package, or does not import.
    """
    installation = installed.find_aiter()
    if installation.kind == "absent":
        raise AiterUnavailableError("AITER is not installed; use a ROCm image that has it, or the emulated kernels")
    if installation.kind == "unrelated":
        raise AiterUnavailableError(
            f"the package `aiter` at {installation.root} is an unrelated async library; replace it by amd-aiter"
        )
    try:
        importlib.import_module("aiter")
    except Exception as error:  # AITER raises RuntimeError, ImportError and others where ROCm is missing or broken
        raise AiterUnavailableError(
            f"AITER is installed but does not import: {type(error).__name__}: {error}"
        ) from error
    return cast(Kernels, AiterKernels(installation))


class AiterKernels:
    """Every function of `signatures.FUNCTIONS` as an attribute, adapted to the installed release."""

    def __init__(self, installation: installed.Installation) -> None:
        self._release = installation.release or "of unknown release"
        self._parsed = {} if installation.root is None else installed.signatures(installation.root)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in FUNCTIONS:
            raise AttributeError(f"AITER's {name} is not one of the kernels of the decode path")
        adapted = self._adapt(name, self._find(name))
        setattr(self, name, adapted)
        return adapted

    def _find(self, name: str) -> Callable[..., Any]:
        homes = [f"aiter.{module}" for module in HOMES[name]] if name in HOMES else ["aiter"]
        for home in homes:
            if (function := _attribute(home, name)) is not None:
                return function
        raise UnsupportedByReleaseError(f"AITER {self._release} has no {name} in {' or '.join(homes)}")

    def _adapt(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        recorded, found = signature(name), self._parsed.get(name) or _live_parameters(function)
        known = {p.name for p in recorded}
        if unknown := [p.name for p in found if p.default is None and p.name not in known]:
            raise self._unsupported(name, f"requires {', '.join(unknown)}, which this adapter does not know")
        have, ours = [p.name for p in found], python_signature(recorded)

        def call(*args: Any, **kwargs: Any) -> Any:
            given = {key: _translate(value) for key, value in ours.bind(*args, **kwargs).arguments.items()}
            for key in [key for key in given if key not in have]:
                self._require_droppable(name, key, given.pop(key), recorded)
            positional = [given.pop(key) for key in _leading(have, given)]
            return function(*positional, **given)

        return call

    def _require_droppable(self, name: str, key: str, value: Any, recorded: tuple[Parameter, ...]) -> None:
        default = next(p.default for p in recorded if p.name == key)
        if (name, key) not in _WITHOUT_EFFECT and _text(value) != default:
            raise self._unsupported(name, f"has no argument {key!r}, so it cannot be {value!r}")

    def _unsupported(self, name: str, what: str) -> UnsupportedByReleaseError:
        return UnsupportedByReleaseError(f"AITER {self._release}: {name} {what}")


def _attribute(module: str, name: str) -> Callable[..., Any] | None:
    try:
        return cast("Callable[..., Any]", getattr(importlib.import_module(module), name))
    except (ImportError, AttributeError):
        return None


def _text(value: Any) -> str:
    """A value as the table of signatures writes it."""
    return value.name if isinstance(value, enum.Enum) else repr(value)


def _leading(have: list[str], given: dict[str, Any]) -> list[str]:
    """The installed parameters that can be passed by position: compiled functions need not know their names."""
    leading = []
    for name in have:
        if name not in given:
            break
        leading.append(name)
    return leading


def python_signature(recorded: tuple[Parameter, ...]) -> inspect.Signature:
    """Recorded parameters as Python's own; defaults stay texts."""
    return inspect.Signature(
        [
            inspect.Parameter(
                p.name,
                inspect.Parameter.POSITIONAL_OR_KEYWORD,
                default=inspect.Parameter.empty if p.default is None else p.default,
            )
            for p in recorded
        ]
    )


def _live_parameters(function: Callable[..., Any]) -> tuple[Parameter, ...]:
    parameters = inspect.signature(function).parameters.values()
    return tuple(
        Parameter(name=p.name, default=None if p.default is inspect.Parameter.empty else repr(p.default))
        for p in parameters
    )


def _translate(value: Any) -> Any:
    """AITER's member of an enumeration for ours of the same name."""
    if isinstance(value, enum.Enum):
        theirs = getattr(importlib.import_module("aiter"), type(value).__name__, None)
        return value if theirs is None else getattr(theirs, value.name)
    return value
