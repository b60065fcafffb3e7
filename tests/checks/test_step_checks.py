"""Checks of the whole step: each sees different faults in the right place, and no fault in none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from input_checks import assert_faultless, failure, faulty
from torch import Tensor

from dsv32_fast import attention as path_attention
from dsv32_fast import experts, layers
from dsv32_fast.batch import StepBatch
from dsv32_fast.kernels.mounted import EMULATION
from dsv32_fast.metadata import MetadataBuilder, SparseMlaMetadata
from dsv32_fast.options import PRESETS
from dsv32_fuzz.checks.budgets import LaunchBudget
from dsv32_fuzz.checks.own_input import InputCheck
from dsv32_fuzz.checks.step_numerics import TOPK, Chunking, MtpEqualsSequential, StageInput, StageNumerics
from dsv32_fuzz.targets.intree import InTreeTarget
from dsv32_fuzz.verdict import Status

CHECKS: tuple[type[InputCheck[Any]], ...] = (StageNumerics, MtpEqualsSequential, Chunking, LaunchBudget)
REPAIRED = InTreeTarget(PRESETS["pr47766"])


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_no_fault_no_failure(check: type[InputCheck[Any]]) -> None:
    for seed, options in enumerate(("pr47766", "baseline", "vllm026")):
        assert_faultless(check, InTreeTarget(PRESETS[options]), seed, 4)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_no_fault_no_failure_at_length(check: type[InputCheck[Any]], seed: int) -> None:
    assert_faultless(check, REPAIRED, 100 + seed, 60)


def experts_exchanged(x: Tensor, w1: Tensor, w2: Tensor, weights: Tensor, ids: Tensor, **kwargs: Any) -> Tensor:
    return EMULATION.fused_moe(x, w1, w2, weights, ids.roll(1, 1), **kwargs)


def sees_the_future(q: Tensor, keys: Tensor, scales: Tensor, weights: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
    return EMULATION.fp8_mqa_logits(q, keys, scales, weights, starts, torch.full_like(ends, int(ends.max())))


def positions_of_the_last_row(logits: Tensor, next_n: int, lens: Tensor, indices: Tensor, *args: Any, **k: Any) -> None:
    EMULATION.top_k_per_row_decode(logits, next_n, lens, indices, *args, **k)
    if len(indices) > 1:
        indices[0] = indices[1]


@pytest.mark.parametrize(
    ("check", "replaced", "place"),
    [
        (StageNumerics, {"fused_moe": experts_exchanged}, "ffn_out 1"),
        (StageNumerics, {"top_k_per_row_decode": positions_of_the_last_row}, "index_topk"),
        (Chunking, {"fp8_mqa_logits": sees_the_future}, "a row shows a score beyond its own position"),
    ],
)
def test_a_faulty_kernel_is_seen(check: type[InputCheck[Any]], replaced: dict[str, Any], place: str) -> None:
    assert place in failure(check, faulty(**replaced))


def test_a_key_that_is_too_short_is_seen() -> None:
    """A draft that crosses topk: rows of 15 and 16 keys, then two of 16 under the same key."""
    crossing = StageInput(contexts=(TOPK - 2,), steps=((2,), (2,)))
    verdict = StageNumerics().run(crossing, InTreeTarget(PRESETS["pr42982"]))
    assert verdict.status is Status.FAILED
    assert verdict.summary.startswith("step 1, request 0, token 0: attn_z 0")


def test_rope_of_the_wrong_layout_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(path_attention, "rope_interleaved", layers.rope_half_split)
    assert "latent 0" in failure(StageNumerics, REPAIRED)


def test_a_missing_shared_expert_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "mixture", experts.routed)
    assert "ffn_out 1" in failure(StageNumerics, REPAIRED)


class PlannedForTheLast(MetadataBuilder):
    """Every row of a request has the length of its last one: drafts would see each other's future."""

    def _rows(self, step: StepBatch) -> tuple[Tensor, Tensor]:
        req_ids, lens = super()._rows(step)
        last = torch.tensor(step.query_lens).cumsum(0) - 1
        lens[: len(req_ids)] = lens[last[req_ids.long()]]
        return req_ids, lens


class OneRowShort(MetadataBuilder):
    """The first row of a longer query loses its newest key."""

    def _rows(self, step: StepBatch) -> tuple[Tensor, Tensor]:
        req_ids, lens = super()._rows(step)
        if step.max_query_len > 1:
            lens[0] = (lens[0] - 1).clamp_min(1)
        return req_ids, lens


@pytest.mark.parametrize("check", [MtpEqualsSequential, Chunking], ids=lambda check: check.name)
@pytest.mark.parametrize("builder", [PlannedForTheLast, OneRowShort])
def test_rows_of_wrong_length_are_seen(check: type[InputCheck[Any]], builder: type[MetadataBuilder]) -> None:
    told = failure(check, InTreeTarget(PRESETS["baseline"], builder=builder))
    assert "attn_z" in told or "raised" in told


class PlansAlways(MetadataBuilder):
    """Forgets its key."""

    def build(self, step: StepBatch) -> SparseMlaMetadata:
        self.last_key = None
        return super().build(step)


class ClearsAlways(MetadataBuilder):
    """Clears one buffer whole whatever the policy."""

    def build(self, step: StepBatch) -> SparseMlaMetadata:
        self.paged_kv_indices_NK.zero_()
        self.counts.bytes_cleared += self.paged_kv_indices_NK.nbytes
        return super().build(step)


@pytest.mark.parametrize(
    ("builder", "place"), [(PlansAlways, "get_mla_metadata_v1: 1, not 0"), (ClearsAlways, "bytes cleared: ")]
)
def test_launches_and_clears_beyond_the_budget_are_seen(builder: type[MetadataBuilder], place: str) -> None:
    assert place in failure(LaunchBudget, InTreeTarget(PRESETS["pr47766"], builder=builder))


def test_a_kernel_launched_twice_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    write: Any = path_attention.write_latents

    def twice(*args: Any) -> None:
        write(*args)
        write(*args)

    monkeypatch.setattr(path_attention, "write_latents", twice)
    assert "concat_and_cache_mla: 4, not 2" in failure(LaunchBudget, REPAIRED)
