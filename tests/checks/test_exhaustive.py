"""The proof by exhaustion gives the published counts, and sees a key that only a few steps refute."""

from __future__ import annotations

from collections.abc import Hashable

from dsv32_fast.batch import StepBatch
from dsv32_fast.metadata import MetadataBuilder, SparseMlaMetadata
from dsv32_fast.options import PRESETS
from dsv32_fuzz.checks.exhaustive import WORLDS_ANY_Q, WORLDS_Q1, SmallWorld, prove_key
from dsv32_fuzz.targets.intree import InTreeTarget
from dsv32_fuzz.verdict import Status


def test_pr42982_merges_35_of_73_keys_at_topk_4() -> None:
    """The count of an independent enumeration: at most 2 requests, q <= 3, context <= 6, no padding."""
    verdict, pairs = prove_key(InTreeTarget(PRESETS["pr42982"]), (SmallWorld(topk=4, max_padding=0),))
    assert verdict.status is Status.FAILED
    assert (verdict.measured["keys"], verdict.measured["keys_colliding"]) == (73, 35)
    assert verdict.measured["confirmed_reuses"] == 35
    assert len(pairs) == 1


def test_pr42982_is_exact_for_decode() -> None:
    verdict, pairs = prove_key(InTreeTarget(PRESETS["pr42982"]), WORLDS_Q1)
    assert (verdict.status, pairs) == (Status.PASSED, [])
    assert verdict.measured["keys_shared"] > 0


def test_pr47766_is_exact_for_any_query_lengths() -> None:
    verdict, _ = prove_key(InTreeTarget(PRESETS["pr47766"]), WORLDS_ANY_Q)
    assert verdict.status is Status.PASSED
    assert verdict.measured["steps"] == 4 * 3 * (21 + 21**2)


class KeyWithoutPadding(MetadataBuilder):
    """Leaves the row count out: only padded steps refute it."""

    def _key(self, step: StepBatch) -> Hashable:
        return step.query_lens, step.seq_lens


class KeyOfEverything(MetadataBuilder):
    """No two steps share it, so it is never put to the test."""

    def _key(self, step: StepBatch) -> Hashable:
        return step


def test_a_key_that_only_padding_refutes_is_refuted() -> None:
    target = InTreeTarget(PRESETS["pr47766"], builder=KeyWithoutPadding)
    assert prove_key(target, (SmallWorld(topk=2, max_padding=0),))[0].status is Status.MISTRUSTED
    assert prove_key(target, (SmallWorld(topk=2),))[0].status is Status.FAILED


def test_a_key_that_is_never_shared_is_mistrusted() -> None:
    target = InTreeTarget(PRESETS["pr47766"], builder=KeyOfEverything)
    assert prove_key(target, (SmallWorld(topk=2),))[0].status is Status.MISTRUSTED


class ReusesOnASecretRule(MetadataBuilder):
    """Shows one key, and reuses the plan by another."""

    def build(self, step: StepBatch) -> SparseMlaMetadata:
        metadata = super().build(step)
        self.last_key = (step, self.counts.builds)
        return metadata

    def _key(self, step: StepBatch) -> Hashable:
        del step
        return self.last_key if self.counts.builds % 2 == 0 else object()


class Raises(MetadataBuilder):
    """Fails on its first step."""

    def build(self, step: StepBatch) -> SparseMlaMetadata:
        raise RuntimeError(f"no plan for {step.num_tokens} rows")


def test_a_plan_reused_by_another_rule_than_the_shown_key_is_refuted() -> None:
    target = InTreeTarget(PRESETS["pr47766"], builder=ReusesOnASecretRule)
    verdict, _ = prove_key(target, (SmallWorld(topk=2),))
    assert verdict.status is Status.FAILED
    assert verdict.measured["hidden_reuses"] > 0


def test_a_target_that_raises_is_a_failure() -> None:
    verdict, _ = prove_key(InTreeTarget(PRESETS["pr47766"], builder=Raises), WORLDS_Q1)
    assert verdict.status is Status.FAILED
    assert "RuntimeError: no plan for 1 rows" in verdict.summary


def test_without_a_cache_there_is_nothing_to_prove() -> None:
    assert prove_key(InTreeTarget(PRESETS["baseline"]), WORLDS_Q1)[0].status is Status.SKIPPED
