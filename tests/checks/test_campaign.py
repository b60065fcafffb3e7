"""The campaign's own promises: trials are independent draws, and an interrupt ends it with what is known."""

from __future__ import annotations

import itertools

from dsv32_fast.options import PRESETS
from dsv32_fuzz.campaign import OWN_WORKLOAD, PROFILES, campaign, trial_workload
from dsv32_fuzz.events import Event, PhaseStarted, RunFinished
from dsv32_fuzz.targets.intree import InTreeTarget
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
