"""What one run of a check over drawn operands finds: exact counts, the worst share of a proven bound, and the first
violation in words."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dsv32_fuzz.targets import Target
from dsv32_ref.bounds import Approx, Certificate, judge


@dataclass
class Findings:
    """Collects what a run compares; the first violation is kept in words, all are counted."""

    counts: Counter[str] = field(default_factory=Counter)
    worst_budget_used: float = 0.0
    violation: str = ""
    histograms: dict[str, list[int]] = field(default_factory=dict)

    def require(self, counted: str, holds: bool, text: str, *, times: int = 1) -> bool:
        """Count `times` comparisons under the name `counted`; where it does not hold, `text` is the violation."""
        self.counts[counted] += times
        if not holds:
            self.counts["violations"] += 1
            self.violation = self.violation or text
        return holds

    def within(self, stage: str, computed: Tensor, bound: Approx) -> None:
        """Every element lies within its proven bound; elements without a finite bound are counted and left out."""
        bounded = torch.isfinite(bound.err) | (computed.double() == bound.value)
        left_out = int((~bounded).sum())
        self.counts["elements_without_bound"] += left_out
        value, err = (part.where(bounded, torch.zeros_like(part)) for part in (bound.value, bound.err))
        budget = judge(computed.double().where(bounded, torch.zeros_like(value)), Approx(value, err))
        self.worst_budget_used = max(self.worst_budget_used, budget.worst)
        self.require("elements", budget.first is None, budget.describe(stage), times=budget.elements - left_out)

    def certified(self, stage: str, certificate: Certificate) -> None:
        """Every choice is one that some scores within the bounds call for."""
        self.counts["rows_flipped"] += int((certificate.flips > 0).sum())
        self.counts["rows_decided"] += int(certificate.decided.sum())
        self.require("rows", certificate.passed, certificate.describe(stage), times=certificate.legal.numel())

    def measured(self) -> dict[str, float | int | str]:
        """For the verdict."""
        return {**self.counts, "worst_budget_used": self.worst_budget_used}


def device_of(target: Target) -> torch.device:
    """Where the operands of the target's kernels live."""
    return torch.device("cuda" if target.evidence == "hardware" else "cpu")


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal byte for byte, NaN included."""
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
