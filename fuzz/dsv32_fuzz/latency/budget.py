"""A budget of counts that no step may exceed: a recorded table, compared variant by variant and step by step.

Kernels, casts, plan launches, cleared bytes, copies and synchronisations are compared exactly as upper limits. How a
release of torch spells an operator is its own affair: operators and total casts are compared only for the release
that recorded the table. Fewer than the budget is fine; record the table again to keep the gain.
"""

from __future__ import annotations

import functools
from importlib import resources

import msgspec

from dsv32_fuzz.latency.accounting import StepCounts
from dsv32_fuzz.latency.counting import Table

SHIPPED = "data/latency/pr47766.json"
_ALWAYS = ("router_casts", "plan_launches", "bytes_cleared", "host_to_device", "synchronisations")


@functools.cache
def shipped_budget() -> Table:
    """The table of `dsv32 bench step --counts-only --json` with default options."""
    return msgspec.json.decode(resources.files("dsv32_fuzz").joinpath(SHIPPED).read_bytes(), type=Table)


def exceeded(table: Table, budget: Table) -> list[str]:
    """One line per count above the budget, empty if it is kept.

    Raises:
        ValueError: the budget was recorded for another schedule, model or set of variants.
    """
    same = ("layers", "moe_layers", "max_num_batched_tokens", "topk", "gate_gemm", "schedule")
    for name in same:
        if getattr(table, name) != getattr(budget, name):
            raise ValueError(f"budget: it was recorded with another {name}; record it again")
    limits = {variant.name: variant for variant in budget.variants}
    if missing := [variant.name for variant in table.variants if variant.name not in limits]:
        raise ValueError(f"budget: it has no variant {', '.join(missing)}; record it again")
    spelt = table.torch == budget.torch
    return [
        f"budget exceeded: {variant.name}, step {i}: {name} {value}, budget {limit}"
        for variant in table.variants
        for i, (step, allowed) in enumerate(zip(variant.steps, limits[variant.name].steps, strict=True))
        for name, value, limit in _pairs(step, allowed, spelt)
        if value > limit
    ]


def _pairs(step: StepCounts, allowed: StepCounts, spelt: bool) -> list[tuple[str, int, int]]:
    found = [(name, getattr(step, name), getattr(allowed, name)) for name in _ALWAYS]
    found += [(f"kernel {name}", n, allowed.kernels.get(name, 0)) for name, n in step.kernels.items()]
    if spelt:
        found.append(("operators", sum(step.operators.values()), sum(allowed.operators.values())))
        found += [(f"cast {name}", n, allowed.casts.get(name, 0)) for name, n in step.casts.items()]
    return found
