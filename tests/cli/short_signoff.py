"""Short sign-offs: all phases in the least of time, or some phases; as a script, `dsv32` with those few."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from msgspec.structs import replace

from dsv32_fuzz import signoff_run
from dsv32_fuzz.events import Event
from dsv32_reports.cli import main

LEAST = {"workload_seconds": 0.5, "fuzz_seconds": 0.0, "check_seconds": 0.0, "shrink_seconds": 0.5, "drift_steps": 6}
"""Profile `ci` with as many examples and next to no time: every check runs, and gets what it needs to be trusted."""
SOME = ("proof", "fuzz:mtp_decode", "workload", "drift")
"""Phases of a sign-off that is interrupted: a counterexample comes early, and two phases follow it."""


def take_the_least(patch: pytest.MonkeyPatch) -> None:
    """Every phase, in little time."""
    patch.setitem(signoff_run.PROFILES, "ci", replace(signoff_run.PROFILES["ci"], **LEAST))


def run_some(patch: pytest.MonkeyPatch) -> None:
    """The phases in `SOME` alone."""
    genuine = signoff_run.phases

    def some(*given: object) -> dict[str, Callable[[], Iterator[Event]]]:
        found = genuine(*given)  # type: ignore[arg-type]
        return {name: found[name] for name in SOME}

    patch.setattr(signoff_run, "phases", some)


if __name__ == "__main__":
    run_some(pytest.MonkeyPatch())
    main()
