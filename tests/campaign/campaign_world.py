"""A campaign over nothing but numbers: properties that cost no time, fail where they are told to, need no target."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import strategies as st

from dsv32_fuzz.campaigns import recorded, shards
from dsv32_fuzz.campaigns.recorded import Recorded
from dsv32_fuzz.campaigns.shards import CampaignSpec, CorpusCase, ShardPlan, run_shard, shard_folder, write_inputs
from dsv32_fuzz.case import AnyCase, InputCase
from dsv32_fuzz.verdict import Status, Verdict

SPEC = CampaignSpec(
    profile="ci",
    seed=0,
    properties={"even": ("even",), "odd": ("odd",)},
    min_examples=20,
    case_seconds=60.0,
)

LONG = 120.0
"""Seconds that no test uses up."""


def number_case(scope: str, number: int) -> InputCase:
    return InputCase(check=scope, input={"number": number})


@dataclass
class Numbers:
    """Numbers of one parity; `judge_number` says what is wrong with one, or does something bad to the process.

    The shard is told to stop when the property has judged `enough` of them: no test waits for a time to pass.
    """

    scope: str
    judge_number: Callable[[int], str] = lambda _: ""
    largest: int = 10**9
    enough: int = 150
    ran: list[int] = field(default_factory=list)

    @property
    def checks(self) -> tuple[str, ...]:
        return (self.scope,)

    def cases(self) -> st.SearchStrategy[AnyCase]:
        odd = int(self.scope == "odd")
        return st.integers(0, self.largest).map(lambda half: number_case(self.scope, 2 * half + odd))

    def judge(self, case: AnyCase, checks: Sequence[str]) -> list[Verdict]:
        assert isinstance(case, InputCase)
        number = case.input["number"]
        self.ran.append(number)
        if len(self.ran) >= self.enough:
            Recorded.stop()
        wrong = self.judge_number(number)
        measured: dict[str, float | int | str] = {"sum": number, "worst": float(number)}
        status = Status.FAILED if wrong else Status.PASSED
        return [Verdict(check=name, status=status, summary=wrong, measured=measured) for name in checks]

    def smaller(self, case: AnyCase, fails: Callable[[AnyCase], bool]) -> AnyCase:
        del fails
        return case


class NoTarget:
    """A target that nothing is asked of."""

    name, evidence, options, kernels, caches = "in-tree", "emulated", None, None, False


def use_numbers(patch: pytest.MonkeyPatch, *found: Numbers) -> None:
    """Make these the properties of every target."""
    patch.setattr(recorded, "properties", lambda _target: list(found))
    patch.setattr(Recorded, "_stop", False)
    patch.setattr(shards, "open_target", lambda *_: NoTarget())


def plan_for(folder: Path, seconds: float, shard: int = 0, of: int = 1) -> ShardPlan:
    return ShardPlan(folder=folder, shard=shard, of=of, until=time.time() + seconds)


def run_numbers(
    folder: Path,
    seconds: float = LONG,
    *,
    shard: int = 0,
    of: int = 1,
    spec: CampaignSpec = SPEC,
    corpus: Sequence[CorpusCase] = (),
) -> Path:
    """One session of one shard, in this process; returns the shard's folder."""
    write_inputs(folder, spec, corpus)
    Recorded._stop = False
    run_shard(plan_for(folder, seconds, shard, of))
    return shard_folder(folder, shard)


def forked(work: Callable[[], None]) -> int:
    """Run `work` in a copy of this process; its process id. It ends without pytest's own clean-up."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return child


def kill_when(child: int, ready: Callable[[], bool], delay: float) -> int:
    """kill -9, some time after `ready` holds; the status that the process left."""
    while not ready():
        time.sleep(0.001)
    time.sleep(delay)
    os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]
