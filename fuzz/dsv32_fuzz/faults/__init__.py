"""The fault catalogue: what really went wrong in decode paths of this kind, to be injected and counted."""

from __future__ import annotations

from dsv32_fuzz.faults import (
    attention,
    buffers,
    cache,
    graph,
    harness,
    indexer,
    interface,
    key,
    latency,
    moe,
    mtp,
    planner,
    reduce,
    rope,
    router,
    topk,
)
from dsv32_fuzz.faults.base import AREAS, Area, Fault, Patch

CATALOGUE: tuple[Fault, ...] = (
    *key.FAULTS,
    *planner.FAULTS,
    *reduce.FAULTS,
    *attention.FAULTS,
    *buffers.FAULTS,
    *graph.FAULTS,
    *router.FAULTS,
    *topk.FAULTS,
    *indexer.FAULTS,
    *cache.FAULTS,
    *rope.FAULTS,
    *moe.FAULTS,
    *mtp.FAULTS,
    *latency.FAULTS,
    *interface.FAULTS,
    *harness.FAULTS,
)
FAULTS: dict[str, Fault] = {fault.name: fault for fault in CATALOGUE}

__all__ = ["AREAS", "CATALOGUE", "FAULTS", "Area", "Fault", "Patch", "of_area", "rotating"]


def of_area(area: str) -> tuple[Fault, ...]:
    """The faults of one area.

    Raises:
        ValueError: no such area.
    """
    if area not in AREAS:
        raise ValueError(f"unknown area {area!r}; choose one of {', '.join(AREAS)}")
    return tuple(fault for fault in CATALOGUE if fault.area == area)


def rotating(number: int, parts: int) -> tuple[str, ...]:
    """Every `parts`-th fault of each area, so that `parts` successive numbers cover the catalogue.

    Raises:
        ValueError: `parts` is not positive.
    """
    if parts < 1:
        raise ValueError(f"parts is {parts}; give a positive number")
    by_area: dict[str, list[str]] = {}
    for fault in FAULTS.values():
        by_area.setdefault(fault.area, []).append(fault.name)
    return tuple(name for names in by_area.values() for name in names[number % parts :: parts])
