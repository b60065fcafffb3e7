"""The vLLM target against a small package in vLLM's place: what the checks must see, and how failures are told."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from fake_vllm import write_fake
from typer.testing import CliRunner

from dsv32_fast.batch import StepBatch
from dsv32_fast.plan import consumer_bytes
from dsv32_fuzz.case import Dims
from dsv32_fuzz.checks import run_case
from dsv32_fuzz.checks.catalogue import STEP_CHECKS
from dsv32_fuzz.targets.corpus import PURPOSES, cases
from dsv32_fuzz.targets.registry import open_target
from dsv32_fuzz.targets.survey import behaviour, compare
from dsv32_fuzz.targets.vllm import VllmTarget
from dsv32_fuzz.verdict import Status
from dsv32_reports.cli import app

SMALL = Dims(topk=16, max_num_batched_tokens=64, compute_units=8)


def open_fake(folder: Path, **defects: object) -> VllmTarget:
    return VllmTarget(path=str(write_fake(folder, **defects)))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmTarget]:
    target = open_fake(tmp_path_factory.mktemp("sound"))
    yield target
    target.close()


@pytest.fixture(scope="module")
def defective(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmTarget]:
    """The old key, no clears, and a view that moves: each is seen by a check of its own."""
    folder = tmp_path_factory.mktemp("defective")
    target = open_fake(folder, key="old", clear=False, moves=True, invalid=0, shift=1, router="bfloat16", guard=False)
    yield target
    target.close()


@pytest.fixture(scope="module")
def partial(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmTarget]:
    """Leaves padding rows out, and plans only steps of one token per request: neither is a defect.

    Its layer converts indices once per epoch and asks for an LSE, which is the probes' matter.
    """
    folder = tmp_path_factory.mktemp("partial")
    target = open_fake(folder, rows="live", persistent="decode", remap="epoch", lse=True)
    yield target
    target.close()


def outcome(target: VllmTarget) -> dict[str, dict[str, Status]]:
    """Status of every check on every purposeful sequence, by name of the sequence."""
    return {name: {v.check: v.status for v in run_case(case, target, STEP_CHECKS)} for name, case in cases(target)}


def failing(target: VllmTarget, check: str) -> set[str]:
    return {name for name, statuses in outcome(target).items() if statuses[check] is Status.FAILED}


def test_a_sound_package_passes_every_check_on_every_purposeful_sequence(sound: VllmTarget) -> None:
    seen = outcome(sound)
    assert len(seen) == len(PURPOSES)
    assert sound.caches
    assert not [(name, s) for name, statuses in seen.items() for s in statuses.items() if s[1] is Status.FAILED]
    passed = {check for statuses in seen.values() for check, status in statuses.items() if status is Status.PASSED}
    assert passed == {check.name for check in STEP_CHECKS}  # each check found something to compare somewhere


def test_each_defect_is_seen_by_its_check(defective: VllmTarget) -> None:
    wrong = {"verified drafts cross topk", "two drafts at the edge", "permuted query lengths"}
    seen = outcome(defective)
    by_check = {
        check.name: {name for name, statuses in seen.items() if statuses[check.name] is Status.FAILED}
        for check in STEP_CHECKS
    }
    assert wrong <= by_check["key_sufficiency"]
    assert by_check["key_sufficiency"] == by_check["cache_transparency"] == by_check["plan_coverage"]
    assert "saturated decode" not in by_check["key_sufficiency"]
    assert "padded decode shrinks and grows" in by_check["buffer_hygiene"]
    assert "saturated decode" in by_check["step_metadata"]  # the moving view
    assert not by_check["planner_input"]


def test_rows_left_out_and_steps_without_a_plan_are_no_failure(partial: VllmTarget) -> None:
    seen = outcome(partial)
    assert not [(name, s) for name, statuses in seen.items() for s in statuses.items() if s[1] is Status.FAILED]
    session = partial.open(SMALL)
    planned = session.build(StepBatch(query_lens=(1, 1, 0), seq_lens=(40, 50, 0), num_tokens=4))
    assert planned.served is not None
    assert planned.served.num_tokens == 2
    split_by_kernel = session.build(StepBatch(query_lens=(3,), seq_lens=(40,)))
    assert not split_by_kernel.persistent
    again = session.build(StepBatch(query_lens=(1, 1, 0), seq_lens=(40, 50, 0), num_tokens=4))
    assert again.persistent
    assert not again.launched  # the plan of two steps ago still lies in the buffers


def test_records_show_live_shared_buffers(sound: VllmTarget) -> None:
    session = sound.open(SMALL, poison=77)
    record = session.build(StepBatch(query_lens=(2, 1), seq_lens=(10, 30)))
    assert record.kv_indptr_N1[:4].tolist() == [0, 9, 19, 35]
    assert record.metadata.paged_kv_indptr_T1.tolist() == [0, 9, 19, 35]
    assert record.planner_input is not None
    assert record.planner_input.kv_lens.tolist() == [9, 10, 16]
    assert record.events == ("sync",)
    pointers = record.plan.work_metadata_ptrs.tolist()
    assert pointers == [record.plan.work_indptr.data_ptr(), record.plan.work_info_set.data_ptr()]
    assert (record.plan.reduce_partial_map[-1:] == 77).all()  # poison where nothing was written
    record.kv_indices_NK[:3] = 5  # as an attention layer would
    later = session.build(StepBatch(query_lens=(1,), seq_lens=(9,)))
    assert later.kv_indices_NK[:3].tolist() == [5, 5, 5]
    assert np.shares_memory(record.kv_indptr_N1, later.kv_indptr_N1)
    assert later.kv_indptr_N1[:3].tolist() == [0, 9, 9]


def test_the_twin_never_reuses_a_plan(defective: VllmTarget) -> None:
    twin = defective.open(SMALL, rebuild=True, poison=1)
    plans = set()
    for seq in (16, 20, 24):  # one old key for all
        record = twin.build(StepBatch(query_lens=(8,), seq_lens=(seq,)))
        assert record.launched
        plans.add(consumer_bytes(record.plan))
    assert len(plans) == 3  # rows of [9 .. 16], of [13 .. 16, 16 ...], and of 16 throughout
    assert record.planner_input is not None


def test_behaviour_differs_where_keys_do(sound: VllmTarget, defective: VllmTarget) -> None:
    assert compare(behaviour(sound), behaviour(sound)) == []
    changes = dict(compare(behaviour(sound), behaviour(defective)))
    assert any("two drafts at the edge" in step for step in changes["launched True -> False"])


def test_an_error_of_the_target_is_told_and_the_worker_lives(sound: VllmTarget) -> None:
    session = sound.open(SMALL)
    with pytest.raises(RuntimeError, match=r"^\w*Error: "):
        session.build(StepBatch(query_lens=(65,), seq_lens=(65,)))
    assert session.build(StepBatch(query_lens=(1,), seq_lens=(5,))).launched


def test_sessions_are_closed_when_nobody_holds_them(sound: VllmTarget) -> None:
    def descriptors() -> int:
        return len(os.listdir(f"/proc/{sound.worker._process.pid}/fd"))

    keep = sound.open(SMALL)
    before = descriptors()
    for _ in range(5):
        sound.open(SMALL)
    keep.build(StepBatch(query_lens=(1,), seq_lens=(5,)))
    assert descriptors() <= before + 1  # the last one is forgotten with the next message


def answers(target: VllmTarget) -> dict[str, tuple[str, str]]:
    return {answer["name"]: (answer["status"], answer["summary"]) for answer in target.probe()}


def test_probes_of_a_sound_package(sound: VllmTarget) -> None:
    found = answers(sound)
    converters = ("converter", "converter of an invalid index", "ragged gather")
    held = (
        *converters,
        "split cap and key",
        "host copy of lengths",
        "stream order",
        "padding of heads",
        "continued prompt",
        "indices of sharing layers",
        "LSE of the decode kernel",
        "step of no rows",
        "router logits",
        "rows of the indexer",
    )
    assert {name: found[name][0] for name in held} == dict.fromkeys(held, "PASSED")
    assert "256" in found["converter"][1]
    assert found["router bias"][0] == "FAILED"  # the fake has no vllm._aiter_ops: an error of the target, told
    assert "ModuleNotFoundError" in found["router bias"][1]
    assert found["row lengths"] == (
        "SKIPPED",
        "the release has no generate_sparse_seqlen_kernel; its rows are judged by the check planner_input",
    )


def test_probes_see_their_defects(defective: VllmTarget) -> None:
    found = answers(defective)
    assert found["converter"][0] == found["ragged gather"][0] == "FAILED"
    assert found["converter of an invalid index"] == (
        "FAILED",
        "-1 becomes slot 0: the kernel attends whatever lies there, instead of nothing",
    )
    assert found["continued prompt"] == ("FAILED", "the plan of the chunk before is reused")
    assert found["types with an fp8 cache"][0] == "FAILED"  # it passes no types
    assert found["router logits"] == ("FAILED", "logits in bfloat16, correction bias in bfloat16")
    assert found["step of no rows"][0] == "FAILED"
    assert "AITER divides by it" in found["step of no rows"][1]
    assert found["rows of the indexer"] == ("FAILED", "q (64, 100), seq (64, 300): row 3 has 5 keys, expected 4")


def test_probes_of_a_layer_see_its_defects(partial: VllmTarget) -> None:
    found = answers(partial)
    assert found["indices of sharing layers"] == (
        "FAILED",
        "a layer without an indexer still attends slot 0 after the indices moved to 300: one pass a step",
    )
    assert found["LSE of the decode kernel"][0] == "FAILED"


@pytest.mark.parametrize(
    ("prologue", "told"),
    [
        ("import a_module_that_nobody_has\n", "No module named 'a_module_that_nobody_has'"),
        ("import os\nos._exit(7)\n", "the worker ended with code 7"),
    ],
)
def test_what_cannot_be_driven_says_why(tmp_path: Path, prologue: str, told: str) -> None:
    with pytest.raises(ValueError, match="vLLM cannot be driven") as raised:
        open_fake(tmp_path, prologue=prologue)
    assert told in str(raised.value)
    assert "\n" not in str(raised.value)


def test_an_interpreter_that_has_vllm_needs_no_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(write_fake(tmp_path, key=None)))
    target = VllmTarget(python=sys.executable)
    assert not target.caches
    assert target.versions["aiter"] == "emulated"
    target.close()


def test_usage_errors_of_the_target_options(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no package vllm"):
        open_target("vllm", path=str(tmp_path))
    with pytest.raises(ValueError, match="unknown target 'sglang'; choose one of in-tree, vllm"):
        open_target("sglang")
    with pytest.raises(ValueError, match="the in-tree path takes no path"):
        open_target("in-tree", path="x")
    with pytest.raises(ValueError, match="cannot be started"):
        open_target("vllm", python=str(tmp_path / "python"))
    done = CliRunner().invoke(app, ["signoff", "--target", "vllm", "--options", "pr42982"])
    assert done.exit_code == 2
    assert "the options of vllm are what its code does" in done.output
