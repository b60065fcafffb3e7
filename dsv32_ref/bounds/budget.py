"""Budget used: the share of a proven bound that an observed error takes, with attribution.

Contract: budget used = |error| / bound, unit-free; 0 / 0 = 0, x / 0 = inf. NaN never passes, and neither does an
infinite bound: where nothing is promised nothing was checked (counted as `unbounded`; exclude such elements
beforehand, knowingly).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv32_ref.bounds.arith import Approx

EDGES = (*(2.0**-power for power in range(10, 0, -1)), 1.0)
"""Upper edges, inclusive, of the bins of `Budget.histogram`; behind them is a bin for what is above 1."""


def budget_used(error: Tensor, bound: Tensor) -> Tensor:
    """|error| / bound element by element in float64, inf for NaN on either side and for an infinite bound.

    Raises ValueError where a bound is negative or the shapes differ.
    """
    if error.shape != bound.shape:
        raise ValueError(f"bound: shape {tuple(bound.shape)} differs from error's {tuple(error.shape)}")
    if bool((bound < 0).any()):
        raise ValueError("bound: negative; an error bound is a number >= 0")
    error, bound = error.to(torch.float64).abs(), bound.to(torch.float64)
    used = torch.where((error == 0) & (bound == 0), 0.0, error / bound)
    return torch.where(torch.isnan(used) | torch.isinf(bound), math.inf, used)


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Outcome of one comparison. `first`: index of the first violation, None if none; error and bound are those
    there, else at the worst. histogram: elements by budget used, in the bins of `EDGES`.
    """

    elements: int
    worst: float
    median: float
    violations: int
    unbounded: int
    first: tuple[int, ...] | None
    error: float
    bound: float
    histogram: tuple[int, ...] = (0,) * (len(EDGES) + 1)

    @property
    def passed(self) -> bool:
        """Something was compared, and every element lies within a finite bound."""
        return self.elements > 0 and self.violations == 0

    def describe(self, stage: str) -> str:
        """One line for a report."""
        if self.elements == 0:
            return f"{stage}: nothing was compared"
        if self.first is None:
            return f"{stage}: {self.elements} elements, budget used {self.worst:.3g} (median {self.median:.3g})"
        where = f"{self.violations} of {self.elements} elements, first at {list(self.first)}"
        return f"{stage}: {where}: error {self.error:.3g} > bound {self.bound:.3g} ({self.unbounded} without a bound)"


def judge(computed: Tensor, bound: Approx) -> Budget:
    """Compares a computed tensor (any dtype) with a pair of its shape. Equal infinities (masked scores) count as no
    error.

    Raises ValueError where the shapes differ.
    """
    if computed.shape != bound.value.shape:
        raise ValueError(f"computed: shape {tuple(computed.shape)} differs from the bound's {tuple(bound.value.shape)}")
    computed = computed.to(torch.float64)
    error = torch.where(computed == bound.value, 0.0, computed - bound.value)
    return _summary(error, bound.err, budget_used(error, bound.err))


def _summary(error: Tensor, bound: Tensor, used: Tensor) -> Budget:
    if used.numel() == 0:
        empty = {"violations": 0, "unbounded": 0, "error": 0.0, "bound": 0.0}
        return Budget(elements=0, worst=0.0, median=0.0, first=None, **empty)  # type: ignore[arg-type]
    flat = used.flatten()
    over = flat > 1
    position = int(over.int().argmax()) if bool(over.any()) else int(flat.argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(position), used.shape))
    return Budget(
        elements=used.numel(),
        worst=float(flat.max()),
        median=float(flat.median()),
        violations=int(over.sum()),
        unbounded=int(torch.isinf(bound).sum()),
        first=index if bool(over.any()) else None,
        error=float(error.flatten()[position]),
        bound=float(bound.flatten()[position]),
        histogram=binned(flat, EDGES),
    )


def binned(values: Tensor, edges: tuple[float, ...]) -> tuple[int, ...]:
    """How many of some numbers (NaN not among them) lie up to each edge, and above the last."""
    places = torch.bucketize(values.flatten(), torch.tensor(edges, dtype=values.dtype))
    return tuple(torch.bincount(places, minlength=len(edges) + 1).tolist())
