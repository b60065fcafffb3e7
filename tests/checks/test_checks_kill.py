"""Every check kills a fault, passes its control, and is MISTRUSTED when a run gave it nothing to compare."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch

from dsv32_fast.batch import StepBatch
from dsv32_fast.metadata import MetadataBuilder, SparseMlaMetadata
from dsv32_fast.options import PRESETS, resolve
from dsv32_fast.plan import PlanBuffers
from dsv32_fuzz.case import Case, Dims
from dsv32_fuzz.checks import merge, run_case
from dsv32_fuzz.checks.catalogue import STEP_CHECKS, STEP_CHECKS_BY_NAME
from dsv32_fuzz.targets.intree import InTreeTarget
from dsv32_fuzz.verdict import Status, Verdict, worst


def decode(*seqs: int, rows: int = 0) -> StepBatch:
    return StepBatch(query_lens=(1,) * len(seqs), seq_lens=seqs, num_tokens=rows)


# Hits, misses, splits, growth, a shrink, a reordering and a padded step: enough for every check.
STEPS = (
    decode(*[4096] * 8, rows=16),
    decode(*[4097] * 8, rows=16),
    decode(300, 2050, 5000),
    decode(2050, 300, 5000),
    decode(*[9000] * 2, rows=4),
    StepBatch(query_lens=(4, 4), seq_lens=(2048, 30)),
    StepBatch(query_lens=(4, 4), seq_lens=(2051, 33)),
)


def verdicts(target: InTreeTarget, steps: tuple[StepBatch, ...] = STEPS) -> dict[str, Verdict]:
    dims = Dims(max_num_batched_tokens=64)
    case = Case(check="", scope="mixed", options=target.options, dims=dims, steps=steps)
    return {verdict.check: verdict for verdict in run_case(case, target, STEP_CHECKS)}


def target_of(builder: type[MetadataBuilder], preset: str = "pr47766") -> InTreeTarget:
    return InTreeTarget(PRESETS[preset], builder=builder)


def test_control_passes_every_check() -> None:
    for preset in ("pr47766", "vllm026"):
        assert {v.status for v in verdicts(InTreeTarget(PRESETS[preset])).values()} == {Status.PASSED}


def test_without_a_cache_the_cache_checks_are_skipped() -> None:
    found = verdicts(InTreeTarget(PRESETS["baseline"]))
    skipped = {name for name, verdict in found.items() if verdict.status is Status.SKIPPED}
    assert skipped == {"key_sufficiency", "cache_transparency"}
    assert {v.status for name, v in found.items() if name not in skipped} == {Status.PASSED}


class ForgetsTheLastRequest(MetadataBuilder):
    """A row of the last request is one key short."""

    def _rows(self, step: StepBatch) -> tuple[torch.Tensor, torch.Tensor]:
        req_ids, lens = super()._rows(step)
        lens[step.num_query_tokens - 1] -= 1
        return req_ids, lens


class PadsWithLengthOne(MetadataBuilder):
    """Padding rows look valid (vLLM #53906)."""

    def _rows(self, step: StepBatch) -> tuple[torch.Tensor, torch.Tensor]:
        req_ids, lens = super()._rows(step)
        lens[step.num_query_tokens :] = 1
        return req_ids, lens


class KeyIsTheRowCount(MetadataBuilder):
    """A shape-only guard, as FlashMLA documents for its cached metadata."""

    def _key(self, step: StepBatch) -> Hashable:
        return step.num_tokens


class KeyIsTheTotal(MetadataBuilder):
    """An aggregate key: rows and total KV length."""

    def _key(self, step: StepBatch) -> Hashable:
        return step.num_tokens, sum(min(s, self.config.topk) for s in step.seq_lens)


class WorksDropped(MetadataBuilder):
    """The plan loses its last work after each launch."""

    def _launch(self, step: StepBatch, metadata: SparseMlaMetadata) -> None:
        super()._launch(step, metadata)
        last = self.plan.work_indptr[-1].clone()
        self.plan.work_indptr[self.plan.work_indptr == last] = last - 1


class ReadsUnwrittenEntries(MetadataBuilder):
    """The merge count reaches one entry past what the planner wrote."""

    def _launch(self, step: StepBatch, metadata: SparseMlaMetadata) -> None:
        super()._launch(step, metadata)
        self.plan.reduce_indptr[step.num_tokens :] += 1


class NeverClears(MetadataBuilder):
    """The dropped fill."""

    def _clear(self, step: StepBatch) -> None:
        del step


class ClearsRequestsOnly(MetadataBuilder):
    """One of the two extents is not tracked."""

    def _clear(self, step: StepBatch) -> None:
        indices = self.paged_kv_indices_NK.clone()
        super()._clear(step)
        self.paged_kv_indices_NK.copy_(indices)


class EmptyRequestIds(MetadataBuilder):
    """torch.empty instead of zeros (review of vLLM #42982)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.req_id_per_token_N.fill_(1 << 30)


class WritesBeyondEverything(MetadataBuilder):
    """One stray entry where no step reaches: only the scan at the end sees it."""

    def build(self, step: StepBatch) -> SparseMlaMetadata:
        metadata = super().build(step)
        self.paged_kv_indices_NK[-1] = 7
        return metadata


class IndptrTailZero(MetadataBuilder):
    """A padded row past the step gets a negative length."""

    def build(self, step: StepBatch) -> SparseMlaMetadata:
        metadata = super().build(step)
        self.paged_kv_indptr_N1[step.num_tokens + 1 :] = 0
        return metadata


class ReturnsWrongViews(MetadataBuilder):
    """The buffers are right, what the layers receive is not."""

    def build(self, step: StepBatch) -> SparseMlaMetadata:
        metadata = super().build(step)
        return replace(metadata, paged_kv_indptr_T1=metadata.paged_kv_indptr_T1[:-1], max_query_len=99)


class ReturnsTheFirstMetadata(MetadataBuilder):
    """An idle rank goes on with the last batch's metadata (sglang #15227)."""

    first: SparseMlaMetadata | None = None

    def build(self, step: StepBatch) -> SparseMlaMetadata:
        metadata = super().build(step)
        self.first = self.first or metadata
        return self.first


class IndptrLeftOnAHit(MetadataBuilder):
    """The rows' pointers are not rewritten where the plan is reused."""

    def build(self, step: StepBatch) -> SparseMlaMetadata:
        launches = self.counts.plan_launches
        metadata = super().build(step)
        if self.counts.plan_launches == launches:
            metadata.paged_kv_indptr_T1[1:-1] = 0
        return metadata


class ReallocatesThePlan(MetadataBuilder):
    """New plan buffers at each launch: a captured graph keeps reading the old ones."""

    def _launch(self, step: StepBatch, metadata: SparseMlaMetadata) -> None:
        self.plan = PlanBuffers(*(torch.empty_like(buffer) for buffer in self.plan))
        super()._launch(step, replace(metadata, plan=self.plan))

    def build(self, step: StepBatch) -> SparseMlaMetadata:
        return replace(super().build(step), plan=self.plan)


class PointersToNowhere(MetadataBuilder):
    """work_metadata_ptrs does not point at the plan."""

    def build(self, step: StepBatch) -> SparseMlaMetadata:
        metadata = super().build(step)
        self.plan.work_metadata_ptrs.view(torch.int64).fill_(64)
        return metadata


class LastPageEmpty(MetadataBuilder):
    """The planner gets pages without a token."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.paged_kv_last_page_len_N.zero_()


class RaisesAtStart(MetadataBuilder):
    """Never comes up."""

    def __post_init__(self) -> None:
        raise SystemExit("no device")


class Crashes(MetadataBuilder):
    """Raises on the third step."""

    def build(self, step: StepBatch) -> SparseMlaMetadata:
        if self.counts.builds == 2:
            raise RuntimeError("out of blocks")
        return super().build(step)


@pytest.mark.parametrize(
    ("builder", "killers"),
    [
        (ForgetsTheLastRequest, {"planner_input", "cache_transparency", "plan_coverage"}),
        (PadsWithLengthOne, {"planner_input"}),
        (KeyIsTheRowCount, {"key_sufficiency", "cache_transparency", "plan_coverage"}),
        (KeyIsTheTotal, {"key_sufficiency"}),
        (WorksDropped, {"cache_transparency", "plan_coverage"}),
        (ReadsUnwrittenEntries, {"cache_transparency", "plan_coverage"}),
        (NeverClears, {"buffer_hygiene"}),
        (ClearsRequestsOnly, {"buffer_hygiene"}),
        (EmptyRequestIds, {"buffer_hygiene"}),
        (WritesBeyondEverything, {"buffer_hygiene"}),
        (IndptrTailZero, {"buffer_hygiene"}),
        (ReturnsWrongViews, {"step_metadata"}),
        (ReturnsTheFirstMetadata, {"step_metadata"}),
        (IndptrLeftOnAHit, {"step_metadata"}),
        (ReallocatesThePlan, {"step_metadata"}),
        (PointersToNowhere, {"step_metadata"}),
        (LastPageEmpty, {"planner_input", "step_metadata"}),
        (RaisesAtStart, set(STEP_CHECKS_BY_NAME)),
        (Crashes, set(STEP_CHECKS_BY_NAME)),
    ],
)
def test_fault_is_killed(builder: type[MetadataBuilder], killers: set[str]) -> None:
    found = verdicts(target_of(builder))
    failed = {name for name, verdict in found.items() if verdict.status is Status.FAILED}
    assert killers <= failed
    for name in failed:
        assert found[name].summary.startswith("step ")


def test_every_check_kills_a_fault() -> None:
    (mark,) = test_fault_is_killed.pytestmark  # type: ignore[attr-defined]
    assert set().union(*(killers for fault, killers in mark.args[1] if fault not in (Crashes, RaisesAtStart))) == set(
        STEP_CHECKS_BY_NAME
    )


@pytest.mark.parametrize(
    ("steps", "mistrusted"),
    [
        ((), set(STEP_CHECKS_BY_NAME)),
        ((decode(rows=4), decode(rows=4)), {"key_sufficiency", "cache_transparency", "buffer_hygiene"}),
        ((decode(300), decode(301)), {"key_sufficiency", "cache_transparency", "buffer_hygiene"}),
        ((decode(4096), decode(4097)), {"buffer_hygiene"}),
        ((decode(300, 300), decode(300)), {"key_sufficiency", "cache_transparency"}),
    ],
)
def test_a_run_that_tests_nothing_is_mistrusted(steps: tuple[StepBatch, ...], mistrusted: set[str]) -> None:
    found = verdicts(InTreeTarget(PRESETS["pr47766"]), steps)
    assert {name for name, verdict in found.items() if verdict.status is Status.MISTRUSTED} == mistrusted


SMALLEST = {
    "Z01 ramp against uniform": (([8], [8]), ([8], [16])),
    "Z02 MTP crosses topk": (([4], [4]), ([4], [7])),
    "Z03 permuted query lengths": (([3, 1, 1], [4, 4, 4]), ([1, 3, 1], [4, 4, 4])),
}


@pytest.mark.parametrize("name", SMALLEST)
def test_published_collisions_in_a_small_world(name: str) -> None:
    """vLLM #47766 and what follows from it, at topk 4: the key of #42982 reuses the plan, that of #47766 does not."""
    steps = tuple(StepBatch(query_lens=tuple(q), seq_lens=tuple(s)) for q, s in SMALLEST[name])
    for preset, status in (("pr42982", Status.FAILED), ("pr47766", Status.MISTRUSTED)):
        target = InTreeTarget(PRESETS[preset])
        case = Case(check="", scope="mixed", options=target.options, dims=Dims(topk=4), steps=steps)
        (found,) = run_case(case, target, [STEP_CHECKS_BY_NAME["key_sufficiency"]])
        assert found.status is status


def test_merge_adds_counts_and_keeps_the_worst() -> None:
    def verdict(status: Status, **measured: Any) -> Verdict:
        return Verdict(check="c", status=status, summary=status.value, measured=measured)

    merged = merge([verdict(Status.MISTRUSTED, n=1), verdict(Status.PASSED, n=2), verdict(Status.MISTRUSTED, n=3)])
    assert (merged.status, merged.measured) == (Status.PASSED, {"n": 6})
    failed = merge([merged, verdict(Status.FAILED, n=1), verdict(Status.FAILED, n=1, where="later")])
    assert (failed.status, failed.summary, failed.measured["n"]) == (Status.FAILED, "FAILED", 8)
    with pytest.raises(ValueError, match="exactly one check"):
        merge([verdict(Status.PASSED), msgspec.structs.replace(merged, check="other")])
    assert worst([]) is Status.MISTRUSTED
    assert worst([Status.PASSED, Status.SKIPPED]) is Status.PASSED


def test_split_cap_is_told_apart_from_stale_rows() -> None:
    """Equal key, other split cap (vLLM 0.26): the plan differs, its coverage does not."""
    same = {"query_lens": (4,), "seq_lens": (1151,)}
    steps = (StepBatch(**same, max_seq_len=1154), StepBatch(**same))
    found = verdicts(InTreeTarget(PRESETS["vllm026"]), steps)
    key = found["key_sufficiency"]
    assert (key.status, key.measured["wrongful"], key.measured["wrongful_split_cap_only"]) == (Status.FAILED, 1, 1)
    assert "max_split_per_batch" in key.summary
    assert found["cache_transparency"].status is Status.FAILED
    assert found["plan_coverage"].status is Status.PASSED
    assert verdicts(InTreeTarget(resolve("vllm026", ("split_cap=unlimited",))), steps)["key_sufficiency"].status is (
        Status.PASSED
    )


def test_merged_figures_add_up_or_keep_the_worst() -> None:
    parts = [
        Verdict(check="c", status=Status.PASSED, summary="", measured={"rows": rows, "worst": worst, "word": "x"})
        for rows, worst in ((2, 0.5), (3, 0.25))
    ]
    assert merge(parts).measured == {"rows": 5, "worst": 0.5}
