"""Faults of the suite itself: comparisons that cannot fail, checks that never ran, wrong oracles.

No target is wrong here, so no check can tell: what must fail is the self-test of `selftest`, which plants defects and
demands that they are reported.
Legend: T rows.
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch
from torch import Tensor

from dsv32_fuzz.faults.base import Call, Fault, Make, Patch, after, around, before, returns
from dsv32_fuzz.verdict import Status, Verdict

_BUDGET = "dsv32_ref.bounds.budget"
_MARGINS = "dsv32_ref.bounds.margins"
_CHECKS = "dsv32_fuzz.checks"
_PROPERTIES = "dsv32_fuzz.search.properties"


def _nan_is_zero(call: Call, used: Tensor) -> Tensor:
    return torch.where(call["error"].isnan(), 0.0, used)


def _unbounded_is_zero(call: Call, used: Tensor) -> Tensor:
    return torch.where(torch.isinf(call["bound"]), 0.0, used)


def _ten_times(used: Tensor) -> Tensor:
    return used / 10


def _first_half(call: Call) -> None:
    used = call["used"].clone()
    if used.dim():
        used[(len(used) + 1) // 2 :] = 0
    call["used"] = used


def _five_percent(_original: Any) -> property:
    return property(lambda self: self.elements > 0 and self.violations <= 0.05 * self.elements)


def _by_norm(run: Any, call: Call) -> Any:
    """The whole tensor is compared at once: its distance may be a thousandth of its length."""
    computed, bound = call["computed"].double(), call["bound"].value
    near = float((computed - bound).norm()) <= 1e-3 * float(bound.norm())
    return run({**call, "computed": bound.clone()} if near else call)


def _any_row(_original: Any) -> property:
    return property(lambda self: bool(self.legal.any()))


def _malformed_is_sound(result: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    mask, sound = result
    return mask, torch.ones_like(sound)


def _passed(name: str) -> Verdict:
    return Verdict(check=name, status=Status.PASSED, summary="")


def _crash_passes(_run: Any, call: Call) -> Verdict:
    return _passed(call["check"].name)


def _never_judged(_run: Any, call: Call) -> list[Verdict]:
    return [_passed(name) for name in call["checks"]]


def _never_told(_run: Any, _call: Call) -> None:
    return None


def _mistrust_passes(verdict: Verdict) -> Verdict:
    trusted = Status.PASSED if verdict.status is Status.MISTRUSTED else verdict.status
    return msgspec.structs.replace(verdict, status=trusted)


def _own_twin(call: Call) -> None:
    call["rebuild"] = False


def _one_short(lens_T: Any) -> Any:
    return lens_T - (lens_T > 1)


def _first_verdict(_original: Any) -> Any:
    return lambda verdicts: next(iter(verdicts))


def _harness(name: str, story: str, reference: str, where: str, attribute: str, make: Make) -> Fault:
    patch = Patch(where=where, name=attribute, make=make)
    return Fault(name=name, area="harness", story=story, reference=reference, patches=(patch,))


FAULTS: tuple[Fault, ...] = (
    _harness(
        "harness_nan_ignored",
        "a comparison takes NaN for no error",
        "gpu-mode/pygpubench #7: NaN as a wildcard",
        _BUDGET,
        "budget_used",
        after(_nan_is_zero),
    ),
    _harness(
        "harness_unbounded_passes",
        "an infinite bound counts as passed instead of as nothing compared",
        "mlcommons/inference #1500: a check that passed on an empty file",
        _BUDGET,
        "budget_used",
        after(_unbounded_is_zero),
    ),
    _harness(
        "harness_tolerance_10x",
        "every bound is ten times too wide",
        "sglang #35795, pytorch/ao #4576: tolerances set by hand",
        _BUDGET,
        "budget_used",
        returns(_ten_times),
    ),
    _harness(
        "harness_rows_skipped",
        "only the first half of the rows is compared",
        "array-api-tests #300: skipped parts that nobody saw",
        _BUDGET,
        "_summary",
        before(_first_half),
    ),
    _harness(
        "harness_five_percent",
        "a mismatch is a warning while no more than 5 % of the elements differ",
        "AITER #5030, #5422 (checkAllclose)",
        f"{_BUDGET}.Budget",
        "passed",
        _five_percent,
    ),
    _harness(
        "harness_by_norm",
        "tensors are compared by a global distance, in which one lost row of 2048 disappears",
        "DeepGEMM's cosine-style difference, gate 1e-3",
        _BUDGET,
        "judge",
        around(_by_norm),
    ),
    _harness(
        "harness_any_row_legal",
        "a certificate passes if one row is legal",
        "flashinfer #5341: a waiver wider than its case",
        f"{_MARGINS}.Certificate",
        "passed",
        _any_row,
    ),
    _harness(
        "harness_duplicates_legal",
        "a choice that names a member twice, or too few, counts as well-formed",
        "sglang #30512: duplicates and -1 in a top-k",
        _MARGINS,
        "_mask",
        returns(_malformed_is_sound),
    ),
    _harness(
        "harness_violations_lost",
        "step checks find violations and forget them",
        "AITER #5030: a failed comparison that fails nothing",
        f"{_CHECKS}.Check",
        "violation",
        around(_never_told),
    ),
    _harness(
        "harness_crash_passes",
        "an exception of the target counts as passed",
        "mlcommons/inference #1500",
        f"{_CHECKS}.Watch",
        "_crashed",
        around(_crash_passes),
    ),
    _harness(
        "harness_step_checks_never_ran",
        "step sequences are drawn and never judged",
        "array-api-tests: a check of shape and dtype only",
        f"{_PROPERTIES}.StepTraffic",
        "judge",
        around(_never_judged),
    ),
    _harness(
        "harness_input_checks_never_ran",
        "inputs are drawn and their checks never run",
        "FlashMLA: a permutation helper for a test that no test calls",
        f"{_PROPERTIES}.OwnInput",
        "judge",
        around(_never_judged),
    ),
    _harness(
        "harness_untested_passes",
        "a run that gave a step check nothing to compare counts as passed",
        "mlcommons/inference #1500",
        f"{_CHECKS}.Check",
        "verdict",
        returns(_mistrust_passes),
    ),
    _harness(
        "harness_untested_input_passes",
        "an input that gave a check nothing to compare counts as passed",
        "mlcommons/inference #1500",
        f"{_CHECKS}.own_input.InputCheck",
        "verdict",
        returns(_mistrust_passes),
    ),
    _harness(
        "harness_twin_is_target",
        "the target is compared with itself",
        "flashinfer-bench-starter-kit #21: an output cache that answers for the reference",
        "dsv32_fuzz.targets.intree.InTreeTarget",
        "open",
        before(_own_twin),
    ),
    _harness(
        "harness_oracle_short",
        "the oracle of the planner input is a key short, so a right target looks wrong",
        "DeepSeek-V3.2 report: min(position + 1, topk) keys",
        _CHECKS,
        "planner_lens",
        returns(_one_short),
    ),
    _harness(
        "harness_first_verdict",
        "of several verdicts of one check the first one counts",
        "AITER #5030",
        _CHECKS,
        "merge",
        _first_verdict,
    ),
)
