"""The GPU that the emulation pretends to be.

AITER reads these properties from the current device, not from its arguments, so the emulation keeps them as ambient
state: `with emulated_device(MI300X): ...`. The figures are those of AITER's own table (ROCm/aiter e404860).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class DeviceProperties:
    """What AITER's launchers ask a device for."""

    arch: str
    """ISA name: gfx950 or gfx942."""
    compute_units: int
    """`multiProcessorCount`; smaller on a partitioned GPU."""
    lds_bytes: int
    """Local data share per compute unit, in bytes."""
    fp8: torch.dtype
    """The e4m3 flavour of the architecture."""


MI355X = DeviceProperties(arch="gfx950", compute_units=256, lds_bytes=160 * 1024, fp8=torch.float8_e4m3fn)
MI300X = DeviceProperties(arch="gfx942", compute_units=304, lds_bytes=64 * 1024, fp8=torch.float8_e4m3fnuz)

_current: ContextVar[DeviceProperties] = ContextVar("emulated_device", default=MI355X)


def current_device() -> DeviceProperties:
    """Properties of the emulated device; MI355X unless `emulated_device` says otherwise."""
    return _current.get()


@contextmanager
def emulated_device(properties: DeviceProperties) -> Iterator[DeviceProperties]:
    """Emulate `properties` inside the `with` block."""
    token = _current.set(properties)
    try:
        yield properties
    finally:
        _current.reset(token)
