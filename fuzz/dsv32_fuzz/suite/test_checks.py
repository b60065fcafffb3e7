"""One test per phase, per traffic class and per family of checks; MISTRUSTED fails, what does not apply is skipped."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from dsv32_fast.options import resolve
from dsv32_fuzz.case import save_case
from dsv32_fuzz.events import CounterexampleFound, Event, VerdictReached
from dsv32_fuzz.golden.verdicts import recorded_plans
from dsv32_fuzz.signoff_run import PROFILES, Profile, families, proof, search, search_family, workload_runs
from dsv32_fuzz.strategies.traffic import TRAFFIC
from dsv32_fuzz.targets.intree import InTreeTarget
from dsv32_fuzz.verdict import Status, Verdict


@pytest.fixture(scope="session")
def target(pytestconfig: pytest.Config) -> InTreeTarget:
    """The path under test."""
    torch.set_num_threads(1)  # the tensors are small: more threads only wait for each other
    try:
        return InTreeTarget(
            resolve(pytestconfig.getoption("dsv32_options"), tuple(pytestconfig.getoption("dsv32_set")))
        )
    except ValueError as error:
        raise pytest.UsageError(str(error)) from error


@pytest.fixture(scope="session")
def profile(pytestconfig: pytest.Config) -> Profile:
    """How long each phase may take."""
    name = pytestconfig.getoption("dsv32_profile")
    if name not in PROFILES:
        raise pytest.UsageError(f"unknown profile {name!r}; choose one of {', '.join(PROFILES)}")
    return PROFILES[name]


@pytest.fixture(scope="session")
def run_seed(pytestconfig: pytest.Config) -> int:
    """Seed of everything that is drawn."""
    return int(pytestconfig.getoption("dsv32_seed"))


def judge(events: Iterable[Event], config: pytest.Config) -> None:
    """Fail with every failed or mistrusted verdict and the command that shows it; skip if nothing applied."""
    __tracebackhide__ = True
    verdicts: list[Verdict] = []
    commands: dict[str, str] = {}
    for event in events:
        if isinstance(event, VerdictReached):
            verdicts.append(event.verdict)
        elif isinstance(event, CounterexampleFound):
            folder = Path(config.getoption("dsv32_cases"))
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"{event.case.scope}-{event.case.check}.json"
            save_case(event.case, path)
            commands[event.case.check] = f"\n    {event.summary}\n    dsv32 replay {path}"
    bad = [verdict for verdict in verdicts if verdict.status in (Status.FAILED, Status.MISTRUSTED)]
    if bad or not verdicts:
        lines = [f"{v.status.value} {v.check}: {v.summary}{commands.get(v.check, '')}" for v in bad]
        pytest.fail("\n".join(lines) or "MISTRUSTED: no verdict was reached", pytrace=False)
    if all(verdict.status is Status.SKIPPED for verdict in verdicts):
        pytest.skip(verdicts[0].summary)


def test_recorded_plans(pytestconfig: pytest.Config) -> None:
    """The emulated planner gives AITER's recorded plans."""
    judge(recorded_plans(), pytestconfig)


def test_key_by_exhaustion(target: InTreeTarget, pytestconfig: pytest.Config) -> None:
    """Equal keys never stand for two planner inputs in the small world."""
    judge(proof(target), pytestconfig)


def test_workload(target: InTreeTarget, profile: Profile, run_seed: int, pytestconfig: pytest.Config) -> None:
    """Whole serving runs of the PR's workload."""
    judge(workload_runs(target, profile.workload_seconds, run_seed), pytestconfig)


@pytest.mark.parametrize("scope", sorted(TRAFFIC))
def test_search(scope: str, target: InTreeTarget, profile: Profile, run_seed: int, pytestconfig: pytest.Config) -> None:
    """A search for a failing step sequence in one traffic class."""
    judge(search(target, scope, profile, run_seed), pytestconfig)


@pytest.mark.parametrize("family", sorted(families()))
def test_family(
    family: str, target: InTreeTarget, profile: Profile, run_seed: int, pytestconfig: pytest.Config
) -> None:
    """A search for a failing input of each check of one family."""
    judge(search_family(target, family, profile, run_seed), pytestconfig)
