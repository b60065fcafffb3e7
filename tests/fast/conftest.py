"""Fixtures of the decode step. The worlds are imported late: their size depends on `--kernels`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from dsv32_fast.kernels.aiter import load
from dsv32_fast.kernels.mounted import EMULATION, mounted
from dsv32_fast.kernels.protocol import Kernels
from dsv32_fast.kernels.selection import current
from dsv32_fast.metadata import BuildCounts
from dsv32_fast.options import Options
from dsv32_fast.path import PathConfig

if TYPE_CHECKING:
    from fast_worlds import Event, Recorded, Values

    from dsv32_fuzz.stages.bounds import Recording

STEPS, STEPS_AT_TRUE_WIDTHS = 50, 20
"""Of the schedule; at the shapes of real kernels a row costs a hundred times as much."""
KEPT_AT_TRUE_WIDTHS = 2
"""Recordings held at a time: there each takes more than a gigabyte."""


@pytest.fixture(params=["emulated", "mounted"])
def kernels(request: pytest.FixtureRequest) -> Iterator[Kernels]:
    """The emulation itself, and the adapter to AITER over the emulation mounted as `aiter`; else what was selected."""
    if current().limits.defined:
        yield current().kernels
    elif request.param == "emulated":
        yield EMULATION
    else:
        with mounted():
            yield load()


@pytest.fixture(scope="session")
def events() -> list[Event]:
    from fast_worlds import schedule

    return schedule(STEPS_AT_TRUE_WIDTHS if current().limits.defined else STEPS)


@pytest.fixture(scope="session")
def reference(events: list[Event]) -> list[Values]:
    from fast_worlds import run_reference

    return run_reference(events)


@pytest.fixture(scope="session")
def recorded(events: list[Event], reference: list[Values]) -> Recorded:
    """The whole schedule under forced decisions, run once per argument while kept; do not change what it returns."""
    from fast_worlds import KERNELS, PATH, path, record

    kept: dict[tuple[bool, Options, PathConfig], tuple[Recording, BuildCounts]] = {}

    def run(kernels: Kernels, options: Options, sizes: PathConfig = PATH) -> tuple[Recording, BuildCounts]:
        key = kernels is KERNELS, options, sizes
        found = kept.pop(key, None)
        if current().limits.defined:
            while len(kept) >= KEPT_AT_TRUE_WIDTHS:
                del kept[next(iter(kept))]
        if found is None:
            made = path(options, kernels, sizes=sizes)
            found = record(made, events, reference), made.builder.counts
        kept[key] = found  # the latest at the end
        return found

    return run
