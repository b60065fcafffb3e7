"""The campaign's own promises: trials are independent draws, and an interrupt ends it with what is known."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import strategies as st

from dsv32_fast.options import PRESETS
from dsv32_fuzz.checks.own_input import InputCheck
from dsv32_fuzz.events import CounterexampleFound, Event, PhaseStarted, Progress, RunFinished, VerdictReached
from dsv32_fuzz.signoff_run import OWN_WORKLOAD, PROFILES, campaign, search_family, trial_workload
from dsv32_fuzz.targets import Target
from dsv32_fuzz.targets.intree import InTreeTarget
from dsv32_fuzz.verdict import Status, Verdict
from dsv32_fuzz.workload import PR42982_WORKLOAD, steps


def test_every_trial_depends_on_the_seed() -> None:
    """A trial that two seeds make alike would be counted twice in the bound."""
    for number in range(12):
        shapes = []
        for seed in (1, 2):
            workload, draw, world = trial_workload(seed, number)
            first = tuple(s.batch for s in itertools.islice(steps(workload, draw), 60, 260))
            shapes.append((workload, world, first))
        assert shapes[0] != shapes[1], number


def test_trials_repeat_for_the_same_seed() -> None:
    assert trial_workload(7, 3) == trial_workload(7, 3)


def test_the_own_workload_is_the_prs() -> None:
    assert (OWN_WORKLOAD.input_len, OWN_WORKLOAD.output_len, OWN_WORKLOAD.concurrency) == (5000, 500, 64)
    assert OWN_WORKLOAD.length_spread == PR42982_WORKLOAD.length_spread == 0


def test_an_interrupt_inside_the_stream_ends_it() -> None:
    events = campaign(InTreeTarget(PRESETS["pr47766"]), PROFILES["ci"], run_seed=0)
    seen: list[Event] = [next(events)]
    seen.append(events.throw(KeyboardInterrupt()))
    seen += events
    assert isinstance(seen[0], PhaseStarted)
    assert isinstance(seen[-1], RunFinished)
    assert seen[-1].interrupted
    assert len(seen) == 2


class Input(msgspec.Struct, frozen=True):
    number: int


class SmallNumbers(InputCheck[Input]):
    """Fails from a hundred on."""

    name, meaning, family, input_type = "small_numbers", "numbers are small", "toys", Input

    def inputs(self) -> st.SearchStrategy[Input]:
        return st.builds(Input, st.integers(0, 1000))

    def run(self, drawn: Input, target: Target) -> Verdict:
        del target
        return self.verdict(f"{drawn.number} is too large" if drawn.number >= 100 else "", {"numbers": 1})


class AnyNumbers(SmallNumbers):
    """Never fails."""

    name = "any_numbers"

    def run(self, drawn: Input, target: Target) -> Verdict:
        del drawn, target
        return self.verdict("", {"numbers": 1})


def test_a_family_gives_a_verdict_for_each_check_and_shrinks_what_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsv32_fuzz.signoff_run.INPUT_CHECKS", (SmallNumbers, AnyNumbers))
    events = list(search_family(InTreeTarget(PRESETS["pr47766"]), "toys", PROFILES["ci"], 0))
    reached = [event for event in events if isinstance(event, VerdictReached)]
    assert [(e.phase, e.scope, e.verdict.status) for e in reached] == [
        ("check:toys", "small_numbers", Status.FAILED),
        ("check:toys", "any_numbers", Status.PASSED),
    ]
    assert reached[1].verdict.measured["numbers"] >= PROFILES["ci"].check_examples
    (found,) = [event for event in events if isinstance(event, CounterexampleFound)]
    assert found.case.input == {"number": 100}  # type: ignore[union-attr]
    assert {event.phase for event in events if isinstance(event, Progress)} == {"check:toys"}


def test_the_campaign_searches_every_family(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsv32_fuzz.signoff_run.INPUT_CHECKS", (AnyNumbers,))
    recordings, searches = ("recorded_plans", "reference_self_check"), ("proof", "workload_runs", "search")
    for phase in (*recordings, *searches, "decode_drift", "skip_rates"):
        monkeypatch.setattr(f"dsv32_fuzz.signoff_run.{phase}", lambda *_: iter(()))
    events = list(campaign(InTreeTarget(PRESETS["pr47766"]), PROFILES["ci"], run_seed=0))
    assert [event.phase for event in events if isinstance(event, PhaseStarted)] == ["check:toys"]
