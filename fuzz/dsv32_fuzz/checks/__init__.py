"""Checks: properties over a case and a target.

Every check of a step sequence watches the same run: the target and its always-rebuild twin build each step side by
side, and each check sees both. So a case is built once, however many checks look at it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np

from dsv32_fast.batch import StepBatch
from dsv32_fuzz.case import Case, Dims
from dsv32_fuzz.oracle import planner_lens
from dsv32_fuzz.targets import IntArray, StepRecord, Target
from dsv32_fuzz.verdict import Status, Verdict

TARGET_ERRORS = (Exception, SystemExit)
"""What a target may raise; a failure of whatever was being checked. Ctrl-C is not among them."""
TARGET_POISON, TWIN_POISON = 0x5A5A5A5, -0x3C3C3C3


@dataclass(frozen=True, kw_only=True)
class Observation:
    """One step of a run: the target's record, its always-rebuild twin's, and the KV lengths that the oracle expects.

    `step` is what the target's sparse path serves of the step batch, as a rule all of it.
    """

    index: int
    step: StepBatch
    dims: Dims
    target: StepRecord
    twin: StepRecord
    kv_lens_T: IntArray

    @cached_property
    def kv_indptr(self) -> IntArray:
        """Row pointers that the oracle expects, int32 [T + 1]."""
        indptr_T1 = np.zeros(len(self.kv_lens_T) + 1, np.int32)
        np.cumsum(self.kv_lens_T, out=indptr_T1[1:])
        return indptr_T1

    @cached_property
    def req_ids(self) -> IntArray:
        """Request of each row, 0 for padding, int32 [T]."""
        ids_T = np.zeros(self.step.num_tokens, np.int32)
        ids_T[: self.step.num_query_tokens] = np.repeat(np.arange(len(self.step.query_lens)), self.step.query_lens)
        return ids_T


class Check(ABC):
    """Watches one run; counts what it compared and keeps the first violation.

    Subclasses count with `self.measured` and report with `self.violation`; a run in which `untested` gives a reason is
    MISTRUSTED.
    """

    name: ClassVar[str]
    meaning: ClassVar[str]
    """One line for the report: what it means that this holds."""
    needs_cache: ClassVar[bool] = False

    def __init__(self) -> None:
        self.measured: Counter[str] = Counter(steps=0)
        self.first_violation = ""
        self.first_violation_step = -1

    @abstractmethod
    def observe(self, seen: Observation) -> None:
        """Look at one step."""

    def finish(self) -> None:  # noqa: B027  # optional, not abstract
        """Look once more at the end of the run; by default there is nothing left to look at."""

    @abstractmethod
    def untested(self) -> str:
        """Why this run tested nothing, empty if it did."""

    def violation(self, seen: Observation, text: str) -> None:
        """Record a violation; the first one is kept in words."""
        self.measured["violations"] += 1
        if not self.first_violation:
            self.first_violation, self.first_violation_step = f"step {seen.index}: {text}", seen.index

    def verdict(self) -> Verdict:
        """The outcome so far."""
        reason = self.untested()
        if self.first_violation:
            status, summary = Status.FAILED, self.first_violation
        elif reason:
            status, summary = Status.MISTRUSTED, reason
        else:
            status, summary = Status.PASSED, self.meaning
        return Verdict(
            check=self.name,
            status=status,
            summary=summary,
            measured=dict(self.measured),
            step=self.first_violation_step,
        )


class Watch:
    """One run under observation: feeds each step to the target and to its always-rebuild twin, and lets checks watch.

    A case is such a run with all its steps known (`run_case`); a state machine feeds the steps as it goes.
    """

    def __init__(self, dims: Dims, target: Target, checks: Iterable[type[Check]]) -> None:
        self._kinds = tuple(checks)
        self._watching = [check() for check in self._kinds if target.caches or not check.needs_cache]
        self._dims, self._steps, self._crash = dims, 0, ""
        self._twin = target.open(dims, rebuild=True, poison=TWIN_POISON)
        try:
            self._session = target.open(dims, poison=TARGET_POISON)
        except TARGET_ERRORS as error:
            self._crash = told(error)

    def feed(self, step: StepBatch) -> None:
        """Build one step on both sides and show it to every check; nothing more happens once the target has raised."""
        if self._crash:
            return
        try:
            record = self._session.build(step)
        except TARGET_ERRORS as error:
            self._crash = told(error)
            return
        served = step if record.served is None else record.served
        seen = Observation(
            index=self._steps,
            step=served,
            dims=self._dims,
            target=record,
            twin=self._twin.build(step),
            kv_lens_T=planner_lens(served, self._dims.topk),
        )
        self._steps += 1
        for check in self._watching:
            check.measured["steps"] += 1
            check.observe(seen)

    def failed(self) -> Verdict | None:
        """The first check that has failed by now, without the last look that the end of a run takes."""
        if self._crash:
            return self._crashed(self._kinds[0])
        return next((check.verdict() for check in self._watching if check.first_violation), None)

    def verdicts(self) -> list[Verdict]:
        """One verdict for each check, at the end of the run."""
        if self._crash:
            return [self._crashed(check) for check in self._kinds]
        for check in self._watching:
            check.finish()
        verdicts = {check.name: check.verdict() for check in self._watching}
        return [verdicts.get(check.name) or _skipped(check) for check in self._kinds]

    def _crashed(self, check: type[Check]) -> Verdict:
        """An exception of the target is a failure of whatever was being checked."""
        summary = f"step {self._steps}: {self._crash}"
        return Verdict(check=check.name, status=Status.FAILED, summary=summary, step=self._steps)


def run_case(case: Case, target: Target, checks: Iterable[type[Check]]) -> list[Verdict]:
    """Build every step of `case` on the target and on its twin, and let `checks` watch; one verdict each."""
    watch = Watch(case.dims, target, checks)
    for step in case.steps:
        watch.feed(step)
    return watch.verdicts()


def told(error: BaseException) -> str:
    """An exception of the target in one line."""
    return f"the target raised {type(error).__name__}: {' '.join(str(error).split())}"


def _skipped(check: type[Check]) -> Verdict:
    return Verdict(check=check.name, status=Status.SKIPPED, summary="the target reuses no plan, so there is no cache")


def merge(verdicts: Iterable[Verdict]) -> Verdict:
    """One verdict for many runs of one check: FAILED if any failed, PASSED if any run was trusted.

    Integers add up, floats are worst values and keep the largest, texts are dropped.

    Raises:
        ValueError: no verdict, or verdicts of different checks.
    """
    verdicts = list(verdicts)
    if len({verdict.check for verdict in verdicts}) != 1:
        raise ValueError("merge needs verdicts of exactly one check")
    by_status = {verdict.status: verdict for verdict in reversed(verdicts)}
    order = (Status.FAILED, Status.PASSED, Status.MISTRUSTED, Status.SKIPPED)
    status = next(status for status in order if status in by_status)
    measured: dict[str, float | int | str] = {}
    for verdict in verdicts:
        for name, value in verdict.measured.items():
            known = measured.get(name)
            if isinstance(value, str):
                continue
            if isinstance(value, float):
                measured[name] = value if not isinstance(known, float) else max(known, value)
            else:
                measured[name] = value + (known if isinstance(known, int) else 0)
    first = by_status[status]
    return Verdict(
        check=first.check,
        status=status,
        summary=first.summary,
        measured=measured,
        histograms=add_histograms([verdict.histograms for verdict in verdicts]),
        step=first.step,
    )


def add_histograms(parts: Iterable[Mapping[str, Sequence[int]]]) -> dict[str, list[int]]:
    """Histograms of the same name added bin by bin.

    Raises:
        ValueError: two of one name have not the same bins.
    """
    total: dict[str, list[int]] = {}
    for part in parts:
        for name, counts in part.items():
            total[name] = [a + b for a, b in zip(total.get(name, [0] * len(counts)), counts, strict=True)]
    return total
