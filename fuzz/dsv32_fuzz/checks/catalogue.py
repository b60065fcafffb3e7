"""Every check by name: those that watch a sequence of step batches, and those that draw an input of their own."""

from __future__ import annotations

from typing import Any

from dsv32_fuzz.checks import (
    Check,
    addresses,
    attention,
    attention_invariance,
    budgets,
    builder_contract,
    cache,
    converters,
    graph,
    indexer,
    indexer_stages,
    interface,
    moe,
    quantisers,
    router,
    router_dispatch,
    serving,
    step_independence,
    step_numerics,
    topk,
    tp_agreement,
)
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
    *attention.CHECKS,
    *attention_invariance.CHECKS,
    *converters.CHECKS,
    *router.CHECKS,
    *router_dispatch.CHECKS,
    *tp_agreement.CHECKS,
    *topk.CHECKS,
    *indexer.CHECKS,
    *indexer_stages.CHECKS,
    *cache.CHECKS,
    *quantisers.CHECKS,
    *addresses.CHECKS,
    *moe.CHECKS,
    *interface.CHECKS,
    *budgets.CHECKS,
    *builder_contract.CHECKS,
    *graph.CHECKS,
    *serving.CHECKS,
    *step_numerics.CHECKS,
    *step_independence.CHECKS,
)
INPUT_CHECKS_BY_NAME: dict[str, type[InputCheck[Any]]] = {check.name: check for check in INPUT_CHECKS}

if len(INPUT_CHECKS_BY_NAME) != len(INPUT_CHECKS) or INPUT_CHECKS_BY_NAME.keys() & STEP_CHECKS_BY_NAME.keys():
    raise ValueError("two checks have one name")
