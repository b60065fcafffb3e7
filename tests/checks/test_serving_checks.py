"""The checks of the builder over a few steps: faultless targets pass, two or more faults of each kind are killed."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from checks_drawn import killed, passes, run_one

from dsv32_fast.batch import StepBatch
from dsv32_fast.kernels.mounted import EMULATION
from dsv32_fast.metadata import MetadataBuilder, SparseMlaMetadata
from dsv32_fast.options import PRESETS
from dsv32_fuzz.checks.builder_contract import BuildBudget, Growing, InterfaceContract
from dsv32_fuzz.checks.serving import (
    CHECKS,
    Degenerate,
    DegenerateShapes,
    History,
    HistoryIndependence,
    Padded,
    PaddingInvariance,
    PermutationInvariance,
    Permuted,
)
from dsv32_fuzz.strategies.batch_mixes import batch
from dsv32_fuzz.targets.intree import InTreeTarget
from dsv32_fuzz.verdict import Status

GOOD = InTreeTarget(PRESETS["pr47766"])
ALL = (*CHECKS, InterfaceContract, BuildBudget)


class Kernels:
    """The emulation with one function replaced."""

    def __init__(self, **replaced: Any) -> None:
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(EMULATION, name)


@pytest.mark.parametrize("check", ALL)
def test_the_faultless_path_passes(check: type) -> None:
    passes(check, GOOD, examples=17)


@pytest.mark.parametrize("check", ALL)
def test_the_baseline_passes(check: type) -> None:
    passes(check, InTreeTarget(PRESETS["baseline"]), examples=8, seeds=range(1))


class NeverClears(MetadataBuilder):
    def _clear(self, step: StepBatch) -> None:
        del step


class KeyForgetsOrder(MetadataBuilder):
    """A key of sorted lengths."""

    def _key(self, step: StepBatch) -> Hashable:
        return step.num_tokens, tuple(sorted(zip(step.query_lens, step.seq_lens, strict=True)))


class KeyForgetsPadding(MetadataBuilder):
    def _key(self, step: StepBatch) -> Hashable:
        return step.query_lens, step.seq_lens


class PadsWithLengthOne(MetadataBuilder):
    def _rows(self, step: StepBatch) -> tuple[torch.Tensor, torch.Tensor]:
        req_ids, lens = super()._rows(step)
        lens[step.num_query_tokens :] = 1
        return req_ids, lens


class PaddingNamesTheLastRequest(MetadataBuilder):
    def build(self, step: StepBatch) -> SparseMlaMetadata:
        metadata = super().build(step)
        metadata.req_id_per_token_T[step.num_query_tokens :] = max(0, len(step.query_lens) - 1)
        return metadata


class SortsRequests(MetadataBuilder):
    """Lengths by length, ids by arrival."""

    def _rows(self, step: StepBatch) -> tuple[torch.Tensor, torch.Tensor]:
        req_ids, lens = super()._rows(step)
        lens[: len(req_ids)] = lens[: len(req_ids)].sort().values
        return req_ids, lens


class SkipsEmptySteps(MetadataBuilder):
    """Returns what the step before had where nobody is served (sglang #15227)."""

    before: SparseMlaMetadata | None = None

    def build(self, step: StepBatch) -> SparseMlaMetadata:
        if not step.num_query_tokens and self.before is not None:
            return replace(self.before, num_tokens=step.num_tokens)
        self.before = super().build(step)
        return self.before


class CannotServeNobody(MetadataBuilder):
    def build(self, step: StepBatch) -> SparseMlaMetadata:
        assert max(step.query_lens) > 0
        return super().build(step)


class SkipsHoles(MetadataBuilder):
    """Requests without a row are dropped before they are numbered."""

    def _rows(self, step: StepBatch) -> tuple[torch.Tensor, torch.Tensor]:
        live = [(q, s) for q, s in zip(step.query_lens, step.seq_lens, strict=True) if q]
        return super()._rows(batch(live, step.num_tokens))


class KeepsStateOfARefusedStep(MetadataBuilder):
    """The clear comes before the size is looked at, with a wrong error."""

    def build(self, step: StepBatch) -> SparseMlaMetadata:
        self.paged_kv_indptr_N1[-1] = 7
        self.last_key = None
        if step.num_tokens > self.config.max_num_batched_tokens:
            self.req_id_per_token_N.fill_(3)
        return super().build(step)


class TakesAnySize(MetadataBuilder):
    def build(self, step: StepBatch) -> SparseMlaMetadata:
        if step.num_tokens > self.config.max_num_batched_tokens:
            step = batch([(1, 1)])
        return super().build(step)


class LongIds(MetadataBuilder):
    def build(self, step: StepBatch) -> SparseMlaMetadata:
        metadata = super().build(step)
        return replace(metadata, req_id_per_token_T=metadata.req_id_per_token_T.long())


class CopiesIndptr(MetadataBuilder):
    def build(self, step: StepBatch) -> SparseMlaMetadata:
        metadata = super().build(step)
        return replace(metadata, paged_kv_indptr_T1=metadata.paged_kv_indptr_T1.clone())


class ReadsALength(MetadataBuilder):
    """A device read before the key is compared (vLLM #54369)."""

    def _key(self, step: StepBatch) -> Hashable:
        assert int(self.paged_kv_indptr_N1[step.num_tokens].item()) >= 0
        return super()._key(step)


class ClearsEverything(MetadataBuilder):
    """The full-width clear comes back (vLLM #55373)."""

    def _clear(self, step: StepBatch) -> None:
        self.paged_kv_indices_NK.zero_()
        super()._clear(step)


class CopiesForItself(MetadataBuilder):
    """A copy that is none where host and device are one."""

    def _rows(self, step: StepBatch) -> tuple[torch.Tensor, torch.Tensor]:
        torch.from_numpy(np.array(step.seq_lens, np.int32)).to(self.device)
        return super()._rows(step)


class LoopsOverRequests(MetadataBuilder):
    def _rows(self, step: StepBatch) -> tuple[torch.Tensor, torch.Tensor]:
        req_ids, lens = super()._rows(step)
        for r in range(len(step.query_lens)):
            lens += torch.zeros_like(lens) * r
        return req_ids, lens


@functools.wraps(EMULATION.get_mla_metadata_v1)
def forgets_a_work(*args: Any, **kwargs: Any) -> None:
    """A planner whose last work is lost."""
    EMULATION.get_mla_metadata_v1(*args, **kwargs)
    indptr = args[8]
    indptr[indptr == indptr[-1].clone()] = max(0, int(indptr[-1]) - 1)


@functools.wraps(EMULATION.get_mla_metadata_v1)
def plans_only_the_first(*args: Any, **kwargs: Any) -> None:
    """A planner that keeps the plan that it finds."""
    if not 0 < int(args[8][-1]) < 1 << 16:
        EMULATION.get_mla_metadata_v1(*args, **kwargs)


@pytest.mark.parametrize(
    ("check", "builder", "said"),
    [
        (HistoryIndependence, NeverClears, "stale|req_id_per_token|beyond the extent"),
        (HistoryIndependence, KeyForgetsOrder, "work_|reduce_"),
        (PaddingInvariance, PadsWithLengthOne, "live of|rows of"),
        (PaddingInvariance, PaddingNamesTheLastRequest, "padding row"),
        (PaddingInvariance, KeyForgetsPadding, "live of"),
        (PermutationInvariance, KeyForgetsOrder, "in the order"),
        (PermutationInvariance, SortsRequests, "in the order"),
        (DegenerateShapes, SkipsEmptySteps, "padding|empty prompt|nothing"),
        (DegenerateShapes, CannotServeNobody, "raised"),
        (DegenerateShapes, SkipsHoles, "holes"),
        (InterfaceContract, TakesAnySize, "not refused"),
        (InterfaceContract, KeepsStateOfARefusedStep, "after a refused step"),
        (InterfaceContract, LongIds, "req_id_per_token is torch.int64"),
        (InterfaceContract, CopiesIndptr, "paged_kv_indptr is no view"),
        (BuildBudget, ReadsALength, "host reads"),
        (BuildBudget, ClearsEverything, "cleared"),
        (BuildBudget, LoopsOverRequests, "torch operations"),
        (BuildBudget, CopiesForItself, "2 copies from host to device"),
    ],
)
def test_a_faulty_builder_is_killed(check: type, builder: type[MetadataBuilder], said: str) -> None:
    summary = killed(check, InTreeTarget(PRESETS["pr47766"], builder=builder))
    assert any(part in summary for part in said.split("|")), summary


@pytest.mark.parametrize(
    ("check", "planner"),
    [
        *((check, forgets_a_work) for check in CHECKS[1:]),
        *((check, plans_only_the_first) for check in CHECKS),
    ],
)
def test_a_faulty_planner_is_killed(check: type, planner: Any) -> None:
    kernels: Any = Kernels(get_mla_metadata_v1=planner)
    summary = killed(check, InTreeTarget(PRESETS["pr47766"], kernels=kernels))
    assert "raised" not in summary
    assert "plan," in summary or "work" in summary


def test_the_published_key_is_killed() -> None:
    summary = killed(HistoryIndependence, InTreeTarget(PRESETS["pr42982"]))
    assert "in a fresh engine" in summary
    assert killed(PermutationInvariance, InTreeTarget(PRESETS["pr42982"]))


@pytest.mark.parametrize(
    ("check", "drawn"),
    [
        (HistoryIndependence, History(history=(batch([(1, 9)]),), last=batch([(1, 9)]))),
        (PaddingInvariance, Padded(step=batch([(1, 9)]), padding=(2, 2))),
        (PermutationInvariance, Permuted(requests=((1, 9), (1, 9)), order=(1, 0))),
        (BuildBudget, Growing(requests=((1, 9),), copies=(2, 2))),
    ],
)
def test_an_input_that_tests_nothing_is_mistrusted(check: type, drawn: Any) -> None:
    assert run_one(check, drawn, GOOD).status is Status.MISTRUSTED


def test_no_rows_under_a_split_cap_are_not_claimed() -> None:
    drawn = Degenerate(around=batch([(1, 9)]), shape="nothing", rows=1)
    assert run_one(DegenerateShapes, drawn, InTreeTarget(PRESETS["vllm026"])).status is Status.MISTRUSTED
    assert run_one(DegenerateShapes, drawn, GOOD).status is Status.PASSED
