"""The engine's rules, its traffic class and its state machine."""

from __future__ import annotations

from collections.abc import Hashable

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsv32_fast.batch import StepBatch
from dsv32_fast.metadata import MetadataBuilder
from dsv32_fast.options import PRESETS
from dsv32_fuzz.case import decode_case
from dsv32_fuzz.checks import Watch, run_case
from dsv32_fuzz.checks.catalogue import STEP_CHECKS
from dsv32_fuzz.events import CounterexampleFound, InputSpaceCovered, VerdictReached
from dsv32_fuzz.search.explore import explore
from dsv32_fuzz.search.properties import StepTraffic, properties
from dsv32_fuzz.search.replay import replay_case
from dsv32_fuzz.serving.engine import ACTION_KINDS, Action, ActionKind, Engine, EngineConfig
from dsv32_fuzz.serving.machine import ServingFailure, falsify, machine_for
from dsv32_fuzz.serving.traffic import any_action, configs, run, serving_steps
from dsv32_fuzz.strategies import MAX_MODEL_LEN, dims_for
from dsv32_fuzz.targets.intree import InTreeTarget
from dsv32_fuzz.verdict import Status

GOOD = InTreeTarget(PRESETS["pr47766"])


def do(*kinds: Action, budget: int = 64, optimistic: bool = False) -> list[StepBatch]:
    return list(run(Engine(EngineConfig(budget=budget, optimistic=optimistic)), kinds))


def act(kind: ActionKind, **arguments: int) -> Action:
    return Action(kind=kind, **arguments)


def lens(step: StepBatch) -> list[tuple[int, int]]:
    return list(zip(step.query_lens, step.seq_lens, strict=True))


def test_a_prompt_is_cut_into_chunks_and_then_decoded() -> None:
    steps = do(act("admit", amount=10), act("chunk", copies=4), act("chunk", copies=4), *[act("decode")] * 3)
    assert [lens(step) for step in steps] == [[(4, 4)], [(4, 8)], [(2, 10)], [(1, 11)], [(1, 12)]]


def test_the_budget_leaves_the_last_requests_out() -> None:
    steps = do(act("admit", amount=60, copies=2), act("decode"), act("decode"))
    assert [lens(step) for step in steps] == [[(60, 60), (4, 4)], [(1, 61), (56, 60)]]


def test_drafts_are_verified_and_some_are_rejected() -> None:
    told = (act("speculate", amount=3), act("admit", amount=1, context=100))
    steps = do(*told, act("decode", amount=2), act("decode", amount=9), act("decode"), optimistic=True)
    assert [lens(step) for step in steps] == [[(4, 104)], [(4, 107)], [(4, 111)]]
    assert [step.max_seq_len for step in steps] == [104, 108, 111]


def test_a_replay_is_padded_to_a_captured_size() -> None:
    uniform, ragged = do(
        act("admit", amount=1, context=9, copies=3), act("replay"), act("draft", who=1, amount=2), act("replay")
    )
    assert (uniform.num_tokens, uniform.query_lens) == (4, (1, 1, 1, 0))
    assert (ragged.num_tokens, ragged.query_lens) == (8, (1, 3, 1))


def test_a_preempted_request_is_computed_again() -> None:
    told = (act("admit", amount=200), *[act("decode")] * 2, act("preempt"))
    assert lens(do(*told, act("resume"), act("decode"), budget=512)[-1]) == [(202, 202)]
    assert lens(do(*told, act("resume", amount=1 << 20), act("decode"), budget=512)[-1]) == [(10, 202)]


def test_a_prefix_is_reused_in_whole_pages() -> None:
    steps = do(act("admit", amount=70), act("decode"), act("reuse", amount=5), act("decode"), budget=128)
    assert lens(steps[-1]) == [(1, 71), (5, 69)]


def test_a_finished_request_leaves_its_row_to_the_last_one_an_aborted_one_does_not() -> None:
    told = [act("admit", amount=1, context=c) for c in (10, 20, 30)]
    assert lens(do(*told, act("finish"), act("decode"))[0]) == [(1, 31), (1, 21)]
    assert lens(do(*told, act("abort"), act("decode"))[0]) == [(1, 21), (1, 31)]
    assert lens(do(*told, act("permute", who=1, amount=1), act("decode"))[0]) == [(1, 11), (1, 31), (1, 21)]


def test_dummy_builds() -> None:
    capture, idle, padding, nobody = do(
        act("speculate", amount=1),
        act("capture", amount=2),
        act("idle", amount=2),
        act("idle", amount=4, who=1),
        act("admit", amount=3),
        act("clear"),
        act("decode"),
    )
    assert (lens(capture), capture.max_seq_len) == ([(2, 2), (2, 2)], MAX_MODEL_LEN)
    assert (lens(idle), lens(padding), padding.num_tokens) == ([(1, 1), (1, 1)], [], 4)
    assert lens(nobody) == [(1, 1)]


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(configs(), st.lists(any_action(2048), max_size=25))
def test_any_actions_make_steps_that_fit(config: EngineConfig, wanted: list[Action]) -> None:
    for step in run(Engine(config), tuple(wanted)):
        assert 0 < step.num_tokens <= config.budget or step.max_seq_len == MAX_MODEL_LEN
        assert max(step.seq_lens, default=0) <= MAX_MODEL_LEN


def test_every_kind_of_action_is_drawn() -> None:
    seen: set[str] = set()

    @settings(max_examples=600, database=None, deadline=None, derandomize=True)
    @given(any_action(2048))
    def look(action: Action) -> None:
        seen.add(action.kind)

    look()
    assert seen == set(ACTION_KINDS)


class KeepsItsKeyOverACapture(MetadataBuilder):
    """A capture overwrites the plan, and leaves the key of the step before (vllm-ascend #17170)."""

    def build(self, step: StepBatch) -> object:  # type: ignore[override]
        key = self.last_key
        metadata = super().build(step)
        if step.max_seq_len == MAX_MODEL_LEN and key is not None:
            self.last_key = key
        return metadata


class KeyIsTheRowCount(MetadataBuilder):
    def _key(self, step: StepBatch) -> Hashable:
        return step.num_tokens


class NeverClears(MetadataBuilder):
    def _clear(self, step: StepBatch) -> None:
        del step


@pytest.fixture(autouse=True)
def little_shrinking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enough of it for the faults of this file."""
    monkeypatch.setattr("dsv32_fuzz.search.explore.SHRINK_SECONDS", 2.0)
    monkeypatch.setattr("dsv32_fuzz.serving.machine.SHRINK_SECONDS", 0.5)


def found_in(target: InTreeTarget, number: int = 0) -> CounterexampleFound:
    """The first counterexample of 400 cases; the search ends with it."""
    events = explore(StepTraffic(target, "serving"), run_seed=number, seconds=0.1, examples=400)
    return next(event for event in events if isinstance(event, CounterexampleFound))


@pytest.mark.parametrize("builder", [KeepsItsKeyOverACapture, KeyIsTheRowCount, NeverClears])
def test_the_search_kills_faults_in_serving_traffic(builder: type[MetadataBuilder]) -> None:
    found = found_in(InTreeTarget(PRESETS["pr47766"], builder=builder))
    assert found.case.scope == "serving"
    assert len(found.case.steps) <= 3


def test_the_search_finds_the_published_defect() -> None:
    found = found_in(InTreeTarget(PRESETS["pr42982"]))
    assert (found.case.check, len(found.case.steps)) == ("key_sufficiency", 2)
    assert max(len(step.query_lens) for step in found.case.steps) <= 2


def test_a_correct_path_has_no_counterexample() -> None:
    events = list(explore(StepTraffic(GOOD, "serving"), run_seed=0, seconds=0.1, examples=30))
    verdicts = [event.verdict for event in events if isinstance(event, VerdictReached)]
    assert {verdict.status for verdict in verdicts} == {Status.PASSED}
    assert len(verdicts) == len(STEP_CHECKS)
    (covered,) = [event.coverage for event in events if isinstance(event, InputSpaceCovered)]
    assert (covered.cases, covered.steps) == (30, verdicts[0].measured["steps"])
    assert not covered.untested()


def test_the_machine_fails_with_a_case_that_replays() -> None:
    target = InTreeTarget(PRESETS["pr47766"], builder=NeverClears)
    found = falsify(target, seed=0, examples=40)
    assert found is not None
    assert (found.case.check, found.case.scope) == ("buffer_hygiene", "serving")
    assert len(found.case.steps) <= 3
    again = decode_case(msgspec.json.encode(found.case))
    assert run_case(again, target, STEP_CHECKS)[-1].status is Status.FAILED  # type: ignore[arg-type]
    assert replay_case(again)[0].status is Status.PASSED


def test_the_machine_shrinks_the_published_defect() -> None:
    """Fed by hand, so that it takes no luck: a draft crosses topk, the machine says so with the case."""
    machine = machine_for(InTreeTarget(PRESETS["pr42982"]))()
    admit, drafts = act("admit", amount=1, context=2046), act("speculate", amount=1)
    with pytest.raises(ServingFailure, match=r"key_sufficiency: step 1: plan reused.*dsv32 replay"):  # noqa: PT012
        machine.start(config=EngineConfig(budget=64), world=(32, "bf16"), first=admit, drafts=drafts)
        machine.decode(wanted=[act("decode"), act("decode", amount=9), act("decode", amount=9)])
    machine.teardown()


TestServingOfTheRepairedKey = machine_for(GOOD).TestCase
TestServingOfTheRepairedKey.settings = settings(
    max_examples=8, stateful_step_count=10, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)


def test_a_watch_is_a_case_step_by_step() -> None:
    steps = do(act("admit", amount=1, context=4000, copies=2), *[act("decode")] * 3, act("finish"), act("decode"))
    case_steps = tuple(steps)
    target = InTreeTarget(PRESETS["pr47766"])
    watch = Watch(dims_for(case_steps), target, STEP_CHECKS)
    for step in case_steps:
        watch.feed(step)
        assert watch.failed() is None
    case = StepTraffic(target, "serving")._case(case_steps, (32, "bf16"))
    assert watch.verdicts() == run_case(case, target, STEP_CHECKS)


def test_serving_is_a_property_of_every_target() -> None:
    assert {"serving", "batch_mixes"} <= {searched.scope for searched in properties(GOOD)}
    assert serving_steps() is not None
