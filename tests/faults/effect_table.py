"""The effect of every fault at its seam, seen without any check: what is observed, and what must differ and how."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dsv32_fuzz.targets.intree import InTreeTarget

Observe = Callable[[InTreeTarget], Any]


@dataclass(frozen=True)
class Effect:
    """`observe` is run on the faultless target and on the faulty one; `shows(clean, faulty)` is the story."""

    observe: Observe
    shows: Callable[[Any, Any], bool]


EFFECTS: dict[str, Effect] = {}


def effect(name: str, observe: Observe, shows: Callable[[Any, Any], bool]) -> None:
    assert name not in EFFECTS
    EFFECTS[name] = Effect(observe, shows)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)
