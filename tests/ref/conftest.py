"""Small worlds for the tests of the reference."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dsv32_ref.config import GOLDEN, Config
from dsv32_ref.state import Model
from dsv32_ref.weights import assemble, synthetic

SCALE_64 = 2.0**-29
"""u(fp64) / u(fp32): what two fp32 results may differ by, two fp64 results may differ by this much of."""


def same64(a: torch.Tensor, b: torch.Tensor) -> None:
    """Two fp64 results of the same mathematics: the tolerance between fp32 implementations, scaled to fp64."""
    torch.testing.assert_close(a, b, rtol=1e-5 * SCALE_64, atol=2e-5 * SCALE_64)


@pytest.fixture
def same() -> Callable[[torch.Tensor, torch.Tensor], None]:
    return same64


@pytest.fixture(scope="session")
def world() -> Callable[..., Model]:
    """Synthetic models by (seed, config), in fp64, kept for the session."""
    made: dict[tuple[int, Config], Model] = {}

    def make(seed: int = 0, config: Config = GOLDEN) -> Model:
        if (seed, config) not in made:
            weights = assemble(config, synthetic(config, seed), torch.float64)
            made[seed, config] = Model(config=config, weights=weights)
        return made[seed, config]

    return make
