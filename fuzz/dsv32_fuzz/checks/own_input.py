"""Checks that draw their own input: a kernel, a layer or the whole step instead of a sequence of step batches.

The input is a small frozen record of numbers (shapes, seeds, lengths), never tensors: it shrinks well, and as JSON it
replays anywhere. What a check compares with comes from the reference, from an invariant, or from the input itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Generic, TypeVar

import msgspec
from hypothesis import strategies as st

from dsv32_fuzz.targets import Target
from dsv32_fuzz.verdict import Status, Verdict

Input = TypeVar("Input", bound=msgspec.Struct)


class InputCheck(ABC, Generic[Input]):
    """A property over one drawn input and a target.

    `run` returns PASSED, FAILED (the summary names request, head, row or stage of the first violation) or MISTRUSTED
    (this input gave nothing to compare), with counts and figures in `measured`.
    """

    name: ClassVar[str]
    meaning: ClassVar[str]
    """One line for the report: what it means that this holds."""
    family: ClassVar[str]
    """What it looks at: attention, router, indexer, cache, graph, serving, step..."""
    input_type: ClassVar[type[Any]]

    @abstractmethod
    def inputs(self) -> st.SearchStrategy[Input]:
        """Inputs, simplest first; equal seeds must give equal runs."""

    @abstractmethod
    def run(self, drawn: Input, target: Target) -> Verdict:
        """Look at one input. What the target raises is told by the caller as a failure of this check."""

    def inapplicable(self, target: Target) -> str:
        """Why this check cannot look at `target`, empty if it can: it is SKIPPED then, with this reason."""
        return "" if target.kernels is not None else f"the target {target.name} offers no kernels, only its plans"

    def verdict(
        self,
        violation: str,
        measured: dict[str, float | int | str],
        *,
        untested: str = "",
        histograms: dict[str, list[int]] | None = None,
    ) -> Verdict:
        """FAILED with `violation` if there is one, else MISTRUSTED with `untested` if there is one, else PASSED."""
        status = Status.FAILED if violation else Status.MISTRUSTED if untested else Status.PASSED
        summary = violation or untested or self.meaning
        return Verdict(check=self.name, status=status, summary=summary, measured=measured, histograms=histograms or {})
