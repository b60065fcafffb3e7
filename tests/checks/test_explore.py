"""The search finds the published defect from nothing, shrinks it, and tells the truth about its verdicts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv32_fast.batch import StepBatch
from dsv32_fast.metadata import MetadataBuilder, SparseMlaMetadata
from dsv32_fast.options import PRESETS
from dsv32_fuzz.case import Case
from dsv32_fuzz.events import CounterexampleFound, VerdictReached
from dsv32_fuzz.search.explore import explore
from dsv32_fuzz.search.properties import StepTraffic
from dsv32_fuzz.search.shrink import reduce_steps
from dsv32_fuzz.strategies import MAX_MODEL_LEN, SCOPES, Steps, dims_for, mixed_steps, mtp_decode_steps
from dsv32_fuzz.strategies.traffic import TRAFFIC
from dsv32_fuzz.targets.intree import InTreeTarget
from dsv32_fuzz.verdict import Status, Verdict


class KeepsItsKeyOverACapture(MetadataBuilder):
    """A capture build overwrites the plan, and leaves the key of the step before (vllm-ascend #17170)."""

    def build(self, step: StepBatch) -> SparseMlaMetadata:
        key = self.last_key
        metadata = super().build(step)
        if step.max_seq_len == MAX_MODEL_LEN and key is not None:
            self.last_key = key
        return metadata


class OnlyWrongWith(MetadataBuilder):
    """Lengths are off by one in one corner of the input space."""

    def _corner(self, step: StepBatch) -> bool:
        raise NotImplementedError

    def _rows(self, step: StepBatch) -> tuple[torch.Tensor, torch.Tensor]:
        req_ids, lens = super()._rows(step)
        if len(lens) and self._corner(step):
            lens[0] -= 1
        return req_ids, lens


class Fp8(OnlyWrongWith):
    def _corner(self, _step: StepBatch) -> bool:
        return self.config.kv_dtype != torch.bfloat16


class SixteenHeads(OnlyWrongWith):
    def _corner(self, _step: StepBatch) -> bool:
        return self.num_heads == 16


class ManyRows(OnlyWrongWith):
    def _corner(self, step: StepBatch) -> bool:
        return set(step.query_lens) <= {0, 1} and step.num_tokens > 384


class LongSequence(OnlyWrongWith):
    def _corner(self, step: StepBatch) -> bool:
        return max(step.seq_lens) > 32767


class PaddingRequest(OnlyWrongWith):
    def _corner(self, step: StepBatch) -> bool:
        return 0 in step.query_lens


@pytest.mark.parametrize("fault", [Fp8, SixteenHeads, ManyRows, LongSequence, PaddingRequest])
def test_every_corner_of_decode_is_visited(fault: type[MetadataBuilder]) -> None:
    target = InTreeTarget(PRESETS["pr47766"], builder=fault)
    events = explore(StepTraffic(target, "decode"), run_seed=0, seconds=ENOUGH, shrink_seconds=0.1)
    assert any(isinstance(event, CounterexampleFound) for event in events)


def test_a_capture_build_must_overwrite_the_key() -> None:
    target = InTreeTarget(PRESETS["pr47766"], builder=KeepsItsKeyOverACapture)
    events = explore(StepTraffic(target, "mixed"), run_seed=0, seconds=ENOUGH)
    found = next(event for event in events if isinstance(event, CounterexampleFound))
    assert [step.max_seq_len == MAX_MODEL_LEN for step in found.case.steps] == [False, True, False]


ENOUGH = 60.0  # the search stops at its first counterexample; this only bounds a search that finds none


def first_counterexample(preset: str, scope: str, seed: int = 0) -> CounterexampleFound:
    events = explore(StepTraffic(InTreeTarget(PRESETS[preset]), scope), run_seed=seed, seconds=ENOUGH)
    return next(event for event in events if isinstance(event, CounterexampleFound))


def by_check(verdicts: list[Verdict]) -> dict[str, Status]:
    return {verdict.check: verdict.status for verdict in verdicts}


def test_mtp_decode_shrinks_to_one_request_and_two_steps() -> None:
    found = first_counterexample("pr42982", "mtp_decode")
    first, second = found.case.steps
    assert len(first.query_lens) == len(second.query_lens) == 1
    assert first.query_lens == second.query_lens
    assert first.query_lens[0] > 1
    assert min(first.seq_lens[0], second.seq_lens[0]) >= 2048  # equal keys: both clamp to topk
    assert by_check(found.verdicts)["plan_coverage"] is Status.FAILED


def test_chunked_prefill_shrinks_to_one_prompt_and_two_chunks() -> None:
    found = first_counterexample("pr42982", "chunked_prefill")
    first, second = found.case.steps
    assert len(first.query_lens) == len(second.query_lens) == 1
    assert first.seq_lens[0] != second.seq_lens[0]


def test_vllm026_meets_another_split_cap() -> None:
    """Equal key, other bound on the sequence length: found, and its coverage is exact."""
    found = first_counterexample("vllm026", "mtp_decode")
    first, second = found.case.steps[-2:]
    assert (first.query_lens, first.seq_lens) == (second.query_lens, second.seq_lens)
    assert first.max_seq_len != second.max_seq_len
    assert by_check(found.verdicts)["plan_coverage"] is Status.PASSED


def test_a_failed_check_does_not_hide_the_others() -> None:
    events = list(
        explore(StepTraffic(InTreeTarget(PRESETS["pr42982"]), "chunked_prefill"), run_seed=0, seconds=0.1, examples=20)
    )
    status = by_check([event.verdict for event in events if isinstance(event, VerdictReached)])
    assert status["key_sufficiency"] is Status.FAILED
    assert status["planner_input"] is Status.PASSED


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(sorted(SCOPES)).flatmap(lambda scope: st.tuples(st.just(scope), SCOPES[scope]())))
def test_scopes_hold_what_they_say(drawn: tuple[str, Steps]) -> None:
    scope, steps = drawn
    assert len(steps) >= 2
    for step in steps:
        if scope == "decode":
            assert set(step.query_lens) <= {0, 1}
        if scope == "mtp_decode":
            assert len({q for q in step.query_lens if q}) == 1
            assert step.query_lens[0] > 1
            assert all(s > q for s, q in zip(step.seq_lens, step.query_lens, strict=True) if q)
            assert step.max_seq_len - max(step.seq_lens) < step.query_lens[0]
    assert Case(check="", scope=scope, dims=dims_for(steps), steps=steps).dims.topk == 2048


@settings(max_examples=50, deadline=None)
@given(st.one_of(mixed_steps(), mtp_decode_steps()), st.integers(1, 3000))
def test_reduction_keeps_the_failure_and_can_drop_nothing_more(steps: Steps, length: int) -> None:
    def fails(candidate: Steps) -> bool:
        return any(seq >= length for step in candidate for seq in step.seq_lens)

    if fails(steps):
        reduced = reduce_steps(steps, fails)
        assert fails(reduced)
        assert len(reduced) == 1
        assert len(reduced[0].query_lens) == 1


def test_reduction_drops_requests_only_together() -> None:
    """A pair that fails because the batch keeps its size is not torn apart."""
    steps = tuple(StepBatch(query_lens=(1, 2, 3), seq_lens=(s, s + 9, s + 5)) for s in (10, 20, 30, 40))

    def fails(candidate: Steps) -> bool:
        return len(candidate) >= 2 and all(3 in step.query_lens for step in candidate)

    reduced = reduce_steps(steps, fails)
    assert [step.query_lens for step in reduced] == [(3,), (3,)]


def test_a_search_that_crosses_no_boundary_is_mistrusted(monkeypatch: pytest.MonkeyPatch) -> None:
    short = StepBatch(query_lens=(1,), seq_lens=(5,))
    monkeypatch.setitem(TRAFFIC, "decode", lambda: st.just((short, short)))
    events = list(explore(StepTraffic(InTreeTarget(PRESETS["pr47766"]), "decode"), run_seed=0, seconds=0.1))
    verdicts = [event.verdict for event in events if isinstance(event, VerdictReached)]
    assert verdicts
    assert all(verdict.status is Status.MISTRUSTED for verdict in verdicts)
    assert any("no row crossed topk" in verdict.summary for verdict in verdicts)
