"""The state machine: Hypothesis as the outside of a serving engine, the optimised target and its twin side by side.

Each rule is one action of the engine. Every step batch that an action makes is built by the target and by its
always-rebuild twin, every step check watches, and the first violation ends the run. The failure carries the run as a
case, so what Hypothesis has shrunk is replayed like any other counterexample.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import ClassVar

import msgspec
from hypothesis import HealthCheck, Phase, Verbosity, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st
from hypothesis.errors import Flaky
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from dsv32_fast.batch import StepBatch
from dsv32_fuzz.case import Case, Dims
from dsv32_fuzz.checks import Watch
from dsv32_fuzz.checks.catalogue import STEP_CHECKS
from dsv32_fuzz.events import CounterexampleFound
from dsv32_fuzz.search.explore import counterexample
from dsv32_fuzz.search.properties import StepTraffic
from dsv32_fuzz.serving.engine import Action, ActionKind, Engine, EngineConfig
from dsv32_fuzz.serving.traffic import actions, configs
from dsv32_fuzz.strategies import World, worlds
from dsv32_fuzz.targets import Target
from dsv32_fuzz.verdict import Status, Verdict

SCOPE = "serving"
TOPK = Dims().topk
BUDGETS = (1024, 64)  # a chunk still crosses topk in its second step, and the buffers are quick to scan
SHRINK_SECONDS = 10.0


def one_of(*kinds: ActionKind) -> st.SearchStrategy[Action]:
    """Actions of some kinds; rules are few, so that a third of them are steps."""
    return st.one_of(*(actions(kind, TOPK) for kind in kinds))


class ServingFailure(AssertionError):  # noqa: N818  # a failed assertion, not an error of the suite
    """A check failed on a run; `case` replays it, `verdict` says what was found."""

    def __init__(self, case: Case, verdict: Verdict) -> None:
        shown = msgspec.json.encode(case).decode()
        super().__init__(f"{verdict.check}: {verdict.summary}; as a case for dsv32 replay: {shown}")
        self.case, self.verdict = case, verdict


class ServingMachine(RuleBasedStateMachine):
    """One run of the engine; subclasses say what the target is (`machine_for`)."""

    target: Target
    smallest: ClassVar[ServingFailure | None] = None
    """The failure with the fewest steps so far, for a search that stops shrinking early."""
    deadline: ClassVar[float] = float("inf")
    """Set by the first failure: past it nothing new is tried."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[StepBatch] = []
        self.failure: ServingFailure | None = None

    @initialize(
        config=configs(BUDGETS), world=worlds(), first=actions("admit", TOPK), drafts=actions("speculate", TOPK)
    )
    def start(self, config: EngineConfig, world: World, first: Action, drafts: Action) -> None:
        """An engine with one request, perhaps speculating."""
        heads, kv_dtype = world
        self.dims = Dims(max_num_batched_tokens=config.budget, num_heads=heads, kv_dtype=kv_dtype)
        self.engine = Engine(config)
        self.watch = Watch(self.dims, self.target, STEP_CHECKS)
        self.act(first, drafts)

    def act(self, *wanted: Action) -> None:
        """Do some actions; the steps that they make must leave every check content."""
        for action in wanted:
            step = self.engine.apply(action)
            if step is not None and time.monotonic() < self.deadline:
                self.steps.append(step)
                self.watch.feed(step)
                self._judge(self.watch.failed())

    def _judge(self, verdict: Verdict | None) -> None:
        if verdict is None or verdict.status is not Status.FAILED:
            return
        case = Case(
            check=verdict.check,
            scope=SCOPE,
            target=self.target.name,
            options=self.target.options,
            dims=self.dims,
            steps=tuple(self.steps),
        )
        kind = type(self)
        self.failure = ServingFailure(case, verdict)
        if kind.smallest is None:
            kind.deadline = time.monotonic() + SHRINK_SECONDS
        if kind.smallest is None or len(case.steps) <= len(kind.smallest.case.steps):
            kind.smallest = self.failure
        raise self.failure

    def serving(self) -> bool:
        """Whether somebody is in a row."""
        return bool(self.engine.rows)

    def waits(self) -> bool:
        """Whether somebody was preempted."""
        return bool(self.engine.waiting)

    @rule(wanted=st.lists(one_of("decode"), min_size=1, max_size=4))
    def decode(self, wanted: list[Action]) -> None:
        """Unpadded steps; so many drafts are accepted, the others rejected."""
        self.act(*wanted)

    @rule(wanted=st.lists(one_of("replay"), min_size=1, max_size=4))
    def replay(self, wanted: list[Action]) -> None:
        """Steps padded to a captured size."""
        self.act(*wanted)

    @rule(wanted=st.lists(one_of("chunk"), min_size=1, max_size=3))
    def chunk(self, wanted: list[Action]) -> None:
        """Steps in which nobody gets more than a chunk."""
        self.act(*wanted)

    @rule(action=one_of("admit", "reuse"))
    def admit(self, action: Action) -> None:
        """New requests, with nothing cached, a cached context, or the cached prefix of another request."""
        self.act(action)

    @rule(action=one_of("speculate", "draft"))
    def speculate(self, action: Action) -> None:
        """Another number of drafts for all, or for one."""
        self.act(action)

    @precondition(serving)
    @rule(action=one_of("finish", "abort", "preempt"))
    def leave(self, action: Action) -> None:
        """A request is done, is given up, or loses its cache and waits."""
        self.act(action)

    @precondition(waits)
    @rule(action=one_of("resume"))
    def resume(self, action: Action) -> None:
        """A preempted request comes back."""
        self.act(action)

    @precondition(serving)
    @rule(action=one_of("permute"))
    def permute(self, action: Action) -> None:
        """The rows change places."""
        self.act(action)

    @rule(action=one_of("idle", "capture", "clear"))
    def interrupt(self, action: Action) -> None:
        """The dummy build of an idle rank or of a graph, or everybody leaves at once."""
        self.act(action)

    def teardown(self) -> None:
        """The last look of every check, unless one has failed already."""
        if self.steps and self.failure is None:
            failed = [verdict for verdict in self.watch.verdicts() if verdict.status is Status.FAILED]
            self._judge(failed[0] if failed else None)


def machine_for(target: Target) -> type[ServingMachine]:
    """The state machine of one target; `machine_for(target).TestCase` is what pytest collects."""
    return type("ServingMachineOfTarget", (ServingMachine,), {"target": target})


def falsify(target: Target, *, seed: int, examples: int = 100, steps: int = 12) -> CounterexampleFound | None:
    """Let the machine search; the shrunk failure, None if `examples` runs of at most `steps` rules had none."""
    chosen = settings(
        max_examples=examples,
        stateful_step_count=steps,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        verbosity=Verbosity.quiet,
        print_blob=False,
    )
    machine = machine_for(target)
    # Flaky is what Hypothesis makes of a failure when the deadline ends its shrinking.
    with suppress(ServingFailure, Flaky):
        run_state_machine_as_test(seeded(seed)(machine), settings=chosen)
    if machine.smallest is None:
        return None
    return counterexample(StepTraffic(target, SCOPE), machine.smallest.case)
