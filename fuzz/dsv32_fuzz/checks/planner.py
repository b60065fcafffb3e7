"""Checks of what goes into the planner and of the plan that comes out, on every step of a run."""

from __future__ import annotations

import numpy as np

from dsv32_fast.plan import consumer_bytes, consumer_view
from dsv32_fuzz.checks import Check, Observation
from dsv32_fuzz.plan_checker import ZERO_LENGTH, check_plan
from dsv32_fuzz.targets import IntArray, PlannerInput


class PlannerInputCheck(Check):
    """The rows that reach the planner are the ones the step asks for."""

    name = "planner_input"
    meaning = "every row's KV length at the planner equals min(seq - q + j + 1, topk), zero for padding"

    def observe(self, seen: Observation) -> None:
        """The twin plans every step, so its input is always there to compare with the oracle."""
        planned = seen.twin.planner_input
        self.measured["rows"] += len(seen.kv_lens_T)
        if planned is None:
            self.violation(seen, "the always-rebuild twin did not plan")
            return
        ones_T = np.ones_like(seen.kv_lens_T)
        expected = PlannerInput(seen.kv_lens_T, ones_T, ones_T, planned.scalars)
        if planned != expected:
            self.violation(seen, f"planner input against the oracle: {planned.difference(expected)}")
        launched = seen.target.planner_input
        if launched is not None and launched != planned:
            self.violation(seen, f"target against its always-rebuild twin: {launched.difference(planned)}")

    def untested(self) -> str:
        """Rows must have been compared."""
        return "" if self.measured["rows"] else "no row reached the planner"


class KeySufficiency(Check):
    """Equal key implies equal planner input, seen from outside: a plan is reused only for the input it was made for."""

    name = "key_sufficiency"
    meaning = "whenever the plan was reused, the planner input was the one it had been made for"
    needs_cache = True

    def __init__(self) -> None:
        super().__init__()
        self._planned: PlannerInput | None = None
        self.measured.update(hits=0, misses=0, wrongful=0, wrongful_split_cap_only=0)

    def observe(self, seen: Observation) -> None:
        """A hit is rightful iff this step's input equals that of the last launch."""
        if not seen.target.persistent:
            self.measured["steps_without_plan"] += 1
            return
        if seen.target.launched:
            self.measured["misses"] += 1
            self._planned = seen.target.planner_input
            return
        self.measured["hits"] += bool(seen.kv_lens_T.any())  # reusing a plan for no key at all tests nothing
        needed = seen.twin.planner_input
        if needed is None or self._planned is None:
            self.violation(seen, "a plan was reused before any was made")
        elif needed != self._planned:
            self.measured["wrongful"] += 1
            if np.array_equal(needed.kv_lens, self._planned.kv_lens):
                self.measured["wrongful_split_cap_only"] += 1
            self.violation(seen, f"plan reused, but its input differs: {needed.difference(self._planned)}")

    def untested(self) -> str:
        """A run without a hit says nothing about the key."""
        return "" if self.measured["hits"] else "no plan was reused in this run"


class CacheTransparency(Check):
    """The cached run equals the always-rebuild run, bit for bit, in every plan entry that a consumer reads."""

    name = "cache_transparency"
    meaning = "every plan entry that a kernel reads equals the always-rebuild run's, bit for bit"
    needs_cache = True

    def observe(self, seen: Observation) -> None:
        """The twins start from different poison, so an unwritten entry that is read shows as a difference."""
        if not (seen.target.persistent and seen.twin.persistent):
            return
        self.measured["hits"] += not seen.target.launched and bool(seen.kv_lens_T.any())
        if consumer_bytes(seen.target.plan) == consumer_bytes(seen.twin.plan):
            return
        ours, theirs = consumer_view(seen.target.plan), consumer_view(seen.twin.plan)
        name = next(n for n, a, b in zip(ours._fields, ours, theirs, strict=True) if not np.array_equal(a, b))
        where = _first_word(getattr(ours, name), getattr(theirs, name))
        self.violation(seen, f"{name} differs from the always-rebuild run's: {where}")

    def untested(self) -> str:
        """A run without a hit compared two rebuilds."""
        return "" if self.measured["hits"] else "no plan was reused in this run"


def _first_word(mine: IntArray, other: IntArray) -> str:
    if mine.shape != other.shape:
        return f"{len(mine)} entries against {len(other)}"
    a, b = mine.ravel(), other.ravel()
    word = int(np.flatnonzero(a != b)[0])
    return f"word {word} is {a[word]} against {b[word]}"


class PlanCoverage(Check):
    """The plan in the buffers covers every row's KV range exactly once; read by a checker that is not the planner."""

    name = "plan_coverage"
    meaning = "the work items cover every row's KV range exactly once, and the reduce map is consistent"

    def observe(self, seen: Observation) -> None:
        """Holds the plan that the target would hand to the kernel against this step's rows."""
        if not seen.target.persistent:
            return
        self.measured["rows"] += len(seen.kv_lens_T)
        found = check_plan(seen.target.plan, seen.kv_indptr)
        wrong = [violation for violation in found if violation.what != ZERO_LENGTH]
        # Only padding rows are empty, and AITER's parallel planner gives some of them no work: its own behaviour.
        self.measured["padding_rows_without_work"] += len(found) - len(wrong)
        if wrong:
            # A wrong range also has a wrong kv_offset; the range says more.
            telling = [violation for violation in wrong if violation.what != "kv_offset"] or wrong
            self.violation(seen, f"{telling[0]} (the first of {len(wrong)} or more)")

    def untested(self) -> str:
        """Rows must have been covered."""
        return "" if self.measured["rows"] else "no row was planned"
