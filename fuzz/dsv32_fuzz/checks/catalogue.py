"""Every check by name: those that watch a sequence of step batches, and those that draw an input of their own."""

from __future__ import annotations

from typing import Any

from dsv32_fuzz.checks import Check, builder_contract, graph, serving
from dsv32_fuzz.checks.hygiene import BufferHygiene
from dsv32_fuzz.checks.metadata import StepMetadata
from dsv32_fuzz.checks.own_input import InputCheck
from dsv32_fuzz.checks.planner import CacheTransparency, KeySufficiency, PlanCoverage, PlannerInputCheck

STEP_CHECKS: tuple[type[Check], ...] = (
    PlannerInputCheck,
    KeySufficiency,
    CacheTransparency,
    PlanCoverage,
    StepMetadata,
    BufferHygiene,
)
STEP_CHECKS_BY_NAME: dict[str, type[Check]] = {check.name: check for check in STEP_CHECKS}

INPUT_CHECKS: tuple[type[InputCheck[Any]], ...] = (
    *serving.CHECKS,
    *builder_contract.CHECKS,
    *graph.CHECKS,
)
INPUT_CHECKS_BY_NAME: dict[str, type[InputCheck[Any]]] = {check.name: check for check in INPUT_CHECKS}
