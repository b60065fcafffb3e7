"""Serving workloads: the sequence of step batches that vLLM's scheduler makes out of a stream of requests."""

from dsv32_fuzz.workload.schedule import ScheduledStep, steps
from dsv32_fuzz.workload.spec import (
    DEFAULT_CAPTURE_SIZES,
    PR42982_WORKLOAD,
    PURE_DECODE,
    Arrivals,
    Traffic,
    Workload,
    captured_rows,
    request_lengths,
)

__all__ = [
    "DEFAULT_CAPTURE_SIZES",
    "PR42982_WORKLOAD",
    "PURE_DECODE",
    "Arrivals",
    "ScheduledStep",
    "Traffic",
    "Workload",
    "captured_rows",
    "request_lengths",
    "steps",
]
