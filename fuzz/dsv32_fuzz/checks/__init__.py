"""Checks: properties over a case and a target.

Every check of a step sequence watches the same run: the target and its always-rebuild twin build each step side by
side, and each check sees both. So a case is built once, however many checks look at it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

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


def run_case(case: Case, target: Target, checks: Iterable[type[Check]]) -> list[Verdict]:
    """Build every step of `case` on the target and on its twin, and let `checks` watch; one verdict each."""
    applicable = [check() for check in checks if target.caches or not check.needs_cache]
    twin = target.open(case.dims, rebuild=True, poison=TWIN_POISON)
    try:
        session = target.open(case.dims, poison=TARGET_POISON)
    except TARGET_ERRORS as error:
        return [_crashed(check, 0, error) for check in checks]
    for index, step in enumerate(case.steps):
        try:
            record = session.build(step)
        except TARGET_ERRORS as error:
            return [_crashed(check, index, error) for check in checks]
        served = step if record.served is None else record.served
        seen = Observation(
            index=index,
            step=served,
            dims=case.dims,
            target=record,
            twin=twin.build(step),
            kv_lens_T=planner_lens(served, case.dims.topk),
        )
        for check in applicable:
            check.measured["steps"] += 1
            check.observe(seen)
    for check in applicable:
        check.finish()
    verdicts = {check.name: check.verdict() for check in applicable}
    return [verdicts.get(check.name) or _skipped(check) for check in checks]


def _crashed(check: type[Check], index: int, error: BaseException) -> Verdict:
    """An exception of the target is a failure of whatever was being checked."""
    summary = f"step {index}: {told(error)}"
    return Verdict(check=check.name, status=Status.FAILED, summary=summary, step=index)


def told(error: BaseException) -> str:
    """An exception of the target in one line."""
    return f"the target raised {type(error).__name__}: {' '.join(str(error).split())}"


def _skipped(check: type[Check]) -> Verdict:
    return Verdict(check=check.name, status=Status.SKIPPED, summary="the target reuses no plan, so there is no cache")


def merge(verdicts: Iterable[Verdict]) -> Verdict:
    """One verdict for many runs of one check: FAILED if any failed, PASSED if any run was trusted; counts add up.

    Raises:
        ValueError: no verdict, or verdicts of different checks.
    """
    verdicts = list(verdicts)
    if len({verdict.check for verdict in verdicts}) != 1:
        raise ValueError("merge needs verdicts of exactly one check")
    by_status = {verdict.status: verdict for verdict in reversed(verdicts)}
    order = (Status.FAILED, Status.PASSED, Status.MISTRUSTED, Status.SKIPPED)
    status = next(status for status in order if status in by_status)
    measured: Counter[str] = Counter()
    for verdict in verdicts:
        measured.update({name: value for name, value in verdict.measured.items() if isinstance(value, int)})
    first = by_status[status]
    return Verdict(check=first.check, status=status, summary=first.summary, measured=dict(measured), step=first.step)
