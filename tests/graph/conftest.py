"""Every test of graphs runs on the small emulated GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from graph_world import SMALL_GPU

from dsv32_fast.kernels.emulated.device import emulated_device


@pytest.fixture(autouse=True)
def small_gpu() -> Iterator[None]:
    with emulated_device(SMALL_GPU):
        yield
