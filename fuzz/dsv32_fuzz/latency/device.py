"""What the device was doing while it was timed: clocks, power, temperature; and a graph's replay as a subject's run.

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


def graphed(run: Callable[[], None]) -> Callable[[], None]:
    """A replay of what `run` launches on the current device, captured once after a run aside.

    `run` must not synchronise and must read its inputs from fixed addresses.

    Raises:
        RuntimeError: torch sees no GPU.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("torch sees no GPU, so there are no graphs to replay; time the run itself")
    aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        run()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    replay: Callable[[], None] = graph.replay
    return replay
