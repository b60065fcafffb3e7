"""What a search looks for a counterexample of: a source of cases and a judge of them, one form for every check.

`StepTraffic` draws step sequences of one traffic class and lets every step check watch the same run; `OwnInput` draws
the inputs of one check. Search, shrinking, replay and campaigns know only `Property`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
from hypothesis import strategies as st

from dsv32_fuzz.case import AnyCase, Case, InputCase
from dsv32_fuzz.checks import TARGET_ERRORS, run_case, told
from dsv32_fuzz.checks.catalogue import INPUT_CHECKS, INPUT_CHECKS_BY_NAME, STEP_CHECKS
from dsv32_fuzz.checks.own_input import InputCheck
from dsv32_fuzz.search.shrink import reduce_steps
from dsv32_fuzz.strategies import Steps, World, dims_for, worlds
from dsv32_fuzz.strategies.traffic import TRAFFIC
from dsv32_fuzz.targets import Target
from dsv32_fuzz.verdict import Status, Verdict


class Property(Protocol):
    """Cases of one scope, and what the checks say of them."""

    @property
    def scope(self) -> str:
        """The traffic class, or the name of the check that draws its own input."""

    @property
    def checks(self) -> tuple[str, ...]:
        """Names of the checks that judge every case."""

    def cases(self) -> st.SearchStrategy[AnyCase]:
        """Cases, simplest first, saved for no check yet."""

    def judge(self, case: AnyCase, checks: Sequence[str]) -> list[Verdict]:
        """One verdict for each of `checks`, in that order."""

    def smaller(self, case: AnyCase, fails: Callable[[AnyCase], bool]) -> AnyCase:
        """A failing case that is no larger, by other means than drawing again."""


@dataclass(frozen=True)
class StepTraffic:
    """Step sequences of one traffic class."""

    target: Target
    scope: str

    @property
    def checks(self) -> tuple[str, ...]:
        """Every step check."""
        return tuple(check.name for check in STEP_CHECKS)

    def cases(self) -> st.SearchStrategy[AnyCase]:
        """Sequences at the true constants, over all worlds."""
        return st.builds(self._case, TRAFFIC[self.scope](), worlds())

    def _case(self, steps: Steps, world: World) -> Case:
        dims = dims_for(steps, world)
        return Case(
            check="", scope=self.scope, target=self.target.name, options=self.target.options, dims=dims, steps=steps
        )

    def judge(self, case: AnyCase, checks: Sequence[str]) -> list[Verdict]:
        """Run the sequence once and let `checks` watch."""
        if not isinstance(case, Case):
            raise TypeError("step checks watch a sequence of step batches")
        return run_case(case, self.target, [check for check in STEP_CHECKS if check.name in checks])

    def smaller(self, case: AnyCase, fails: Callable[[AnyCase], bool]) -> AnyCase:
        """Drop steps, then requests, wherever the rest still fails."""
        if not isinstance(case, Case):
            raise TypeError("step checks watch a sequence of step batches")
        steps = reduce_steps(case.steps, lambda steps: fails(msgspec.structs.replace(case, steps=steps)))
        return msgspec.structs.replace(case, steps=steps)


@dataclass(frozen=True)
class OwnInput:
    """The inputs of one check that draws its own."""

    target: Target
    check: type[InputCheck[Any]]

    @property
    def scope(self) -> str:
        """The check's name."""
        return self.check.name

    @property
    def checks(self) -> tuple[str, ...]:
        """The one check."""
        return (self.check.name,)

    def cases(self) -> st.SearchStrategy[AnyCase]:
        """Its inputs, as cases."""
        return self.check().inputs().map(self._case)

    def _case(self, drawn: msgspec.Struct) -> InputCase:
        return InputCase(
            check=self.check.name,
            target=self.target.name,
            options=self.target.options,
            input=msgspec.to_builtins(drawn),
        )

    def judge(self, case: AnyCase, checks: Sequence[str]) -> list[Verdict]:
        """Run the check on the input.

        Raises:
            ValueError: the input of the case is not one of this check's.
        """
        if not isinstance(case, InputCase):
            raise TypeError(f"{self.check.name} draws inputs of its own")
        if not checks:
            return []
        check = self.check()
        reason = check.inapplicable(self.target)
        if reason:
            return [Verdict(check=check.name, status=Status.SKIPPED, summary=reason)]
        drawn = msgspec.convert(case.input, check.input_type)
        try:
            return [check.run(drawn, self.target)]
        except TARGET_ERRORS as error:
            return [Verdict(check=check.name, status=Status.FAILED, summary=told(error))]

    def smaller(self, case: AnyCase, fails: Callable[[AnyCase], bool]) -> AnyCase:
        """Hypothesis has shrunk the input already."""
        del fails
        return case


def properties(target: Target) -> list[Property]:
    """Everything that a search can be made for: the traffic classes, then the checks with inputs of their own."""
    return [
        *(StepTraffic(target, scope) for scope in TRAFFIC),
        *(OwnInput(target, check) for check in INPUT_CHECKS),
    ]


def property_of(case: AnyCase, target: Target) -> Property:
    """The property that judges a saved case.

    Raises:
        ValueError: the case names a check that is not known.
    """
    if isinstance(case, Case):
        known = [check.name for check in STEP_CHECKS]
        if case.check in known:
            return StepTraffic(target, case.scope)
    else:
        known = list(INPUT_CHECKS_BY_NAME)
        if case.check in known:
            return OwnInput(target, INPUT_CHECKS_BY_NAME[case.check])
    raise ValueError(f"the case names the unknown check {case.check!r}; known are {', '.join(known)}")
