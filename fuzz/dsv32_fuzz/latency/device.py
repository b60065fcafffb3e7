"""What the device was doing while it was timed: clocks, power, temperature.

Nothing in this module has run on a GPU yet. torch reads the state through amdsmi on ROCm and through NVML on CUDA;
what cannot be read is recorded as unavailable, with the reason, never left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_READERS = ("clock_rate", "power_draw", "temperature", "utilization")
"""torch.cuda's functions; MHz, mW, degrees Celsius, percent."""


def device_state() -> dict[str, str]:
    """Name and state of the current device; one entry says so where there is none."""
    if not torch.cuda.is_available():
        return {"device": "none: host timing only, clocks and power are not recorded"}
    return {"device": torch.cuda.get_device_name(), **{name: _read(name) for name in _READERS}}


def _read(name: str) -> str:
    reader: Callable[[], Any] = getattr(torch.cuda, name)
    try:
        return str(reader())
    except Exception as error:  # amdsmi and NVML raise their own types, also for a missing driver or library
        return f"unavailable: {type(error).__name__}: {error}"
