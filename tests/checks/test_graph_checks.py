"""The graph checks: a faultless path passes; faults of builder, kernels, gather and staging are killed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from checks_drawn import killed, passes, run_one

from dsv32_fast.batch import StepBatch
from dsv32_fast.graph import attention, queues
from dsv32_fast.kernels.mounted import EMULATION
from dsv32_fast.metadata import MetadataBuilder, SparseMlaMetadata
from dsv32_fast.options import PRESETS
from dsv32_fast.plan import PlanBuffers
from dsv32_fuzz.checks.graph import CHECKS, GraphReplay, LazyCopies, PoisonedPlan, Replays
from dsv32_fuzz.targets.intree import InTreeTarget
from dsv32_fuzz.verdict import Status

GOOD = InTreeTarget(PRESETS["pr47766"])


class Kernels:
    """The emulation with one function replaced."""

    def __init__(self, **replaced: Any) -> None:
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(EMULATION, name)


@pytest.mark.parametrize("check", CHECKS)
def test_the_faultless_path_passes(check: type) -> None:
    passes(check, GOOD, examples=8)


class ReallocatesThePlan(MetadataBuilder):
    """The graph goes on with the plan that it captured."""

    def _launch(self, step: StepBatch, metadata: SparseMlaMetadata) -> None:
        self.plan = PlanBuffers(*(torch.zeros_like(buffer) for buffer in self.plan))
        object.__setattr__(metadata, "plan", self.plan)
        super()._launch(step, metadata)


class KeyIsTheRowCount(MetadataBuilder):
    def _key(self, step: StepBatch) -> Any:
        return step.num_tokens


class PlansLiveRowsOnly(MetadataBuilder):
    """Metadata for the rows that are served, not for those that the graph runs (xllm #1939)."""

    def build(self, step: StepBatch) -> SparseMlaMetadata:
        return super().build(StepBatch(query_lens=step.query_lens, seq_lens=step.seq_lens))


def swaps_two_rows(*args: Any, **kwargs: Any) -> Any:
    result = EMULATION.mla_decode_fwd(*args, **kwargs)
    if args[2].shape[0] > 2:
        args[2].copy_(torch.cat((args[2][1:2], args[2][:1], args[2][2:])))
    return result


def reads_one_slot_too_many(*args: Any, **kwargs: Any) -> Any:
    """The first work of the last row reads past its keys."""
    args = list(args)
    kv_indptr = args[4].clone()
    works, indptr = kwargs["work_info_set"].clone(), kwargs["work_indptr"]
    works[int(indptr[-1]) - 1, 5] += 1
    kwargs["work_info_set"] = works
    args[4] = kv_indptr
    return EMULATION.mla_decode_fwd(*args, **kwargs)


def adds_what_is_past_the_keys(*args: Any, **kwargs: Any) -> Any:
    """A kernel that prefetches an index past the last one and lets it count."""
    result = EMULATION.mla_decode_fwd(*args, **kwargs)
    total, indices = int(args[4][-1]), args[5]
    if total < len(indices) and not 0 <= int(indices[total]) < len(args[1]):
        raise IndexError(f"slot {int(indices[total])} of {len(args[1])}")
    return result


@pytest.mark.parametrize("check", [GraphReplay, LazyCopies])
@pytest.mark.parametrize("builder", [ReallocatesThePlan, KeyIsTheRowCount, PlansLiveRowsOnly])
def test_a_faulty_builder_is_killed(check: type, builder: type[MetadataBuilder]) -> None:
    assert killed(check, InTreeTarget(PRESETS["pr47766"], builder=builder), examples=20)


@pytest.mark.parametrize(
    ("check", "kernel", "said"),
    [
        (GraphReplay, swaps_two_rows, "of the eager step"),
        (LazyCopies, swaps_two_rows, "launched ahead"),
        (PoisonedPlan, adds_what_is_past_the_keys, "slot"),
        (PoisonedPlan, reads_one_slot_too_many, ""),
        (PoisonedPlan, swaps_two_rows, "of the eager step"),
    ],
)
def test_a_faulty_kernel_is_killed(check: type, kernel: Any, said: str) -> None:
    kernels: Any = Kernels(mla_decode_fwd=kernel)
    assert said in killed(check, InTreeTarget(PRESETS["pr47766"], kernels=kernels), examples=20)


def test_a_gather_that_keeps_what_was_there_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are packed as if all had topk keys."""

    def careless(slots: torch.Tensor, _indptr: torch.Tensor, paged: torch.Tensor) -> None:
        paged.copy_(slots.flatten())

    monkeypatch.setattr(attention, "gather_indices", careless)
    assert "of the eager step" in killed(GraphReplay, GOOD, examples=20)


def test_a_staging_that_does_not_wait_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM #36013: the host overwrites the source of a copy that has not run."""
    kind = queues.Staging

    def careless(*args: Any, depth: int, wait: bool) -> queues.Staging:
        return kind(*args, depth=1, wait=False)

    monkeypatch.setattr(attention, "Staging", careless)
    assert "staging reused" in killed(LazyCopies, GOOD, examples=20)


def test_a_planner_without_an_order_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM #47404: nothing orders the plan before the replay."""
    kind = queues.QueuedPlanner

    def unordered(kernels: Any, work: Any, *, synchronise: bool) -> Any:
        return kind(kernels, work, synchronise=False)

    monkeypatch.setattr(queues, "QueuedPlanner", unordered)
    for check in (GraphReplay, LazyCopies):
        assert killed(check, GOOD, examples=20)


def test_memory_that_a_graph_captured_and_somebody_freed_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """AITER #5193: captured storage is handed out again."""
    capture = attention.GraphedAttention.capture

    def frees(self: attention.GraphedAttention) -> None:
        capture(self)
        self.runner._arena.free(self.kv)  # type: ignore[attr-defined]

    monkeypatch.setattr(attention.GraphedAttention, "capture", frees)
    assert killed(GraphReplay, GOOD, examples=20)


def test_the_published_key_is_killed() -> None:
    assert "of the eager step" in killed(GraphReplay, InTreeTarget(PRESETS["pr42982"]), examples=80)


@pytest.mark.parametrize("check", [GraphReplay, LazyCopies])
def test_a_batch_of_one_size_is_mistrusted(check: type) -> None:
    assert run_one(check, Replays(steps=((5,), (6,)), q=1, seed=0), GOOD).status is Status.MISTRUSTED
