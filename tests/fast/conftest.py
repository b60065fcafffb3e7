from __future__ import annotations

from collections.abc import Iterator

import pytest
from fast_worlds import KERNELS, PATH, Event, Recorded, Values, path, record, run_reference, schedule
from stage_bounds import Recording

from dsv32_fast.kernels.aiter import load
from dsv32_fast.kernels.mounted import EMULATION, mounted
from dsv32_fast.kernels.protocol import Kernels
from dsv32_fast.kernels.selection import current
from dsv32_fast.metadata import BuildCounts
from dsv32_fast.options import Options
from dsv32_fast.path import PathConfig

STEPS = 50


@pytest.fixture(params=["emulated", "mounted"])
def kernels(request: pytest.FixtureRequest) -> Iterator[Kernels]:
    """The emulation itself, and the adapter to AITER over the emulation mounted as `aiter`; else what was selected."""
    if current().limits.defined:
        yield KERNELS
        return
    if request.param == "emulated":
        yield EMULATION
        return
    with mounted():
        yield load()


@pytest.fixture(scope="session")
def events() -> list[Event]:
    return schedule(STEPS)


@pytest.fixture(scope="session")
def reference(events: list[Event]) -> list[Values]:
    return run_reference(events)


@pytest.fixture(scope="session")
def recorded(events: list[Event], reference: list[Values]) -> Recorded:
    """The whole schedule under forced decisions, run once per argument; do not change what it returns."""
    kept: dict[tuple[bool, Options, PathConfig], tuple[Recording, BuildCounts]] = {}

    def run(kernels: Kernels, options: Options, sizes: PathConfig = PATH) -> tuple[Recording, BuildCounts]:
        key = kernels is KERNELS, options, sizes
        if key not in kept:
            made = path(options, kernels, sizes=sizes)
            kept[key] = record(made, events, reference), made.builder.counts
        return kept[key]

    return run
