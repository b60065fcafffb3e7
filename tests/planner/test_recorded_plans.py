"""The planner against recordings of AITER's, and the replay against itself."""

from __future__ import annotations

import gzip
import json
import os

import msgspec
import numpy as np
import pytest

from dsv32_fast.kernels.emulated import UndefinedInAiter, UnsupportedPlanner
from dsv32_fast.kernels.emulated import metadata as metadata_module
from dsv32_fast.kernels.emulated.device import emulated_device
from dsv32_fast.kernels.emulated.launch import LaunchRules, env_flag, launch_rules
from dsv32_fast.plan import allocate
from dsv32_fuzz.golden import plans
from dsv32_fuzz.plan_checker import ZERO_LENGTH, check_plan

CASES = plans.load_cases(plans.DEFINED)[1]
V1_2 = [case for case in CASES if case.inputs.fast_mode]
OTHERS = [case for case in CASES if not case.inputs.fast_mode]
UNDEFINED = plans.load_cases(plans.UNDEFINED)[1]


def by_id(case: plans.Case) -> str:
    return case.id


def rules_of(case: plans.Case) -> LaunchRules:
    i = case.inputs
    with plans._environment(i.env):
        return launch_rules(
            i.device(),
            len(i.qo_indptr) - 1,
            i.num_heads_per_head_k,
            i.num_heads_k,
            i.is_causal,
            i.page_size,
            i.kv_granularity,
            i.max_seqlen_qo,
            i.uni_seqlen_qo,
            i.topk,
            i.max_split_per_batch,
            i.is_cp_round_robin,
            i.dtype_q == "fp8",
            i.dtype_kv == "fp8",
            env_flag("AITER_ENABLE_EXPERIMENTAL", 0),
            env_flag("AITER_MLA_META_USE_PARALLEL", 1),
        )


@pytest.mark.parametrize("case", V1_2, ids=by_id)
def test_plan_is_aiters(case):
    assert plans.replay_case(case) == ""


@pytest.mark.parametrize("case", OTHERS, ids=by_id)
def test_other_planners_are_refused_by_name(case):
    with pytest.raises(UnsupportedPlanner, match=r"v1_0" if case.inputs.intra_batch_mode else r"v1_1"):
        plans.replay_case(case)


@pytest.mark.parametrize("case", UNDEFINED, ids=by_id)
def test_undefined_results_are_refused(case):
    with plans._environment({}), emulated_device(case.inputs.device()):
        plan = allocate(plans.info_of(case.inputs), -1)
        with pytest.raises(UndefinedInAiter, match="AITER"):
            plans.plan_case(case.inputs, plan)
    assert all((buffer == -1).all() for buffer in plan[1:])


@pytest.mark.parametrize("case", V1_2, ids=by_id)
def test_launch_rules_are_aiters(case):
    rules, derived = rules_of(case), case.derived
    assert rules.num_cu == derived["num_cu"]
    assert rules.num_splits == derived["num_splits"]
    assert rules.qk_batch_ratio == derived["qk_batch_ratio"]
    assert rules.num_heads == derived["num_heads"]
    assert rules.packed_qo_len_per_wg == derived["kPackedQoLenPerWg"]
    assert rules.qo_splits == derived["kQoSplits"]
    assert rules.is_sparse == derived["kIsSparse"]
    assert rules.parallel == derived["kernel"].endswith("parallel")
    assert rules.topk == derived["topk"]
    assert rules.overhead == derived["fixed_over_head_num_blocks"]
    assert rules.tail_done_threshold == derived["tail_done_threshold"]


@pytest.mark.parametrize("case", V1_2, ids=by_id)
def test_checker_agrees_with_the_recorder(case):
    """Clean, except rows of length zero that the parallel planner drops: as many as the recorder's checker counted."""
    i, rules = case.inputs, rules_of(case)
    with plans._environment(i.env), emulated_device(i.device()):
        plan = allocate(plans.info_of(i), -1)
        plans.plan_case(i, plan)
    kv, qo, begins = np.array(i.kv_indptr), np.array(i.qo_indptr), None
    if rules.is_sparse:  # one row per query token, each with a table of topk entries
        tokens = np.diff(qo)
        kv = np.concatenate([[0], np.cumsum(np.repeat(np.minimum(np.diff(kv), rules.topk), tokens))])
        qo, begins = np.arange(len(kv)), np.arange(len(kv) - 1) * rules.topk
    found = check_plan(
        plan,
        kv,
        qo,
        causal=i.is_causal,
        page_size=i.page_size,
        q_per_token=rules.qk_batch_ratio,
        kv_begins=begins,
        max_seqlen_qo=i.max_seqlen_qo,
    )
    assert [v for v in found if v.what != ZERO_LENGTH] == []
    assert len(found) == min(case.check["num_violations"], 64)


RULE_CHANGES = {
    "num_cu": lambda r: r._replace(num_cu=r.num_cu - 1),
    "num_splits": lambda r: r._replace(num_splits=max(1, r.num_splits - 1)),
    "qk_batch_ratio": lambda r: r._replace(qk_batch_ratio=1),
    "is_sparse": lambda r: r._replace(is_sparse=False, topk=-1),
    "parallel": lambda r: r._replace(parallel=not r.parallel),
    "topk": lambda r: r._replace(topk=r.topk - 1) if r.is_sparse else r,
    "tiles_per_row": lambda r: r._replace(tiles_per_row=1),
    "tile_size": lambda r: r._replace(tile_size=r.tile_size + 1),
    "overhead": lambda r: r._replace(overhead=r.overhead + 1),
    "tail_done_threshold": lambda r: r._replace(tail_done_threshold=0),
    "tail_done_threshold + 1": lambda r: r._replace(tail_done_threshold=r.tail_done_threshold + 1),
    "trims_tail": lambda r: r._replace(trims_tail=not r.trims_tail),
    "read qo_indptr": lambda r: r._replace(uni_seqlen_qo=1, tile_size=1) if r.uni_seqlen_qo == 0 else r,
}


@pytest.mark.parametrize("name", RULE_CHANGES)
def test_recordings_pin_each_launch_rule(name, monkeypatch):
    """A planner that got one rule wrong is told apart by at least one recording."""
    change = RULE_CHANGES[name]
    monkeypatch.setattr(metadata_module, "launch_rules", lambda *scalars: change(launch_rules(*scalars)))
    assert any(plans.replay_case(case) for case in V1_2)


def write(path, document):
    path.write_bytes(gzip.compress(json.dumps(document).encode(), 1))
    return path


def document(*cases):
    return {"meta": {"source": "a test"}, "cases": [msgspec.to_builtins(case) for case in cases]}


SMALL = next(case for case in V1_2 if case.id == "A04_b2_bound_h32_cap1")
SPLIT = next(case for case in V1_2 if case.id == "A01_b1_u2048_h32_cap16")


def test_replay_counts_every_case():
    calls = []
    replay = plans.replay_plans(plans.DEFINED, lambda done, total: calls.append((done, total)))
    assert (replay.passed, replay.failed, replay.skipped, replay.refused) == (111, 0, 11, 0)
    assert sum(replay.skip_reasons.values()) == 11
    assert not replay.first_difference
    assert not replay.compared_nothing
    assert calls == [(n, 122) for n in range(1, 123)]


def test_replay_counts_refusals_as_agreement():
    replay = plans.replay_plans(plans.UNDEFINED)
    assert (replay.passed, replay.failed, replay.skipped, replay.refused) == (4, 0, 0, 4)


def test_replay_of_skipped_cases_compares_nothing(tmp_path):
    replay = plans.replay_plans(write(tmp_path / "v1_1.json.gz", document(*OTHERS)))
    assert replay.skipped == 11
    assert replay.compared_nothing


def put(buffer, *path, value):
    """An edit of a recorded buffer: `value` at `path`, one past the end to append."""

    def edit(outputs):
        *parents, last = path
        target = outputs[buffer]
        for step in parents:
            target = target[step]
        if isinstance(target, list) and last == len(target):
            target.append(value)
        else:
            target[last] = value

    return edit


DIFFERENCES = {
    "work_indptr[3]: expected 9, found 3": put("work_indptr", 3, value=9),
    "work_info_set[2, 5]: expected 7, found 432": put("work_info_set", 2, 5, value=7),
    "work_info_set[15, 0]: expected 1, found unwritten": put("work_info_set", 15, value=[1] * 8),
    "work_info_set[14, 0]: expected unwritten, found 0": put("work_info_set", 14, value=None),
    "work_info_set[14, 7]: expected unwritten, found 0": put("work_info_set", 14, 7, value=None),
    "reduce_indptr[1]: expected 14, found 15": put("reduce_indptr", 1, value=14),
    "reduce_indptr[2]: expected 1, found 15": put("reduce_indptr_tail", "value", value=1),
    "reduce_final_map[0, 0]: expected unwritten, found 0": put("reduce_final_map", 0, value=None),
    "reduce_partial_map[15]: expected 15, found unwritten": put("reduce_partial_map", 15, value=15),
}


@pytest.mark.parametrize("words", DIFFERENCES)
def test_replay_names_the_first_difference(tmp_path, words):
    wrong = document(SPLIT, SMALL)
    DIFFERENCES[words](wrong["cases"][0]["outputs"])
    replay = plans.replay_plans(write(tmp_path / "wrong.json.gz", wrong))
    assert (replay.passed, replay.failed) == (1, 1)
    assert replay.first_difference == f"{SPLIT.id}: {words}"


def test_replay_compares_buffer_sizes(tmp_path):
    wrong = document(SMALL)
    wrong["cases"][0]["buffer_sizes"]["reduce_partial_map"] += 1
    replay = plans.replay_plans(write(tmp_path / "sizes.json.gz", wrong))
    assert replay.failed == 1
    assert "get_mla_metadata_info_v1" in replay.first_difference


def test_a_plan_for_an_undefined_call_is_a_failure(tmp_path):
    replay = plans.replay_plans(
        write(tmp_path / "bad.json.gz", document(msgspec.structs.replace(SMALL, group="known_bad")))
    )
    assert replay.failed == 1
    assert "expected a refusal" in replay.first_difference


def test_a_refusal_of_a_defined_call_is_a_failure(tmp_path):
    case = msgspec.structs.replace(UNDEFINED[0], group="dense", outputs=SMALL.outputs)
    replay = plans.replay_plans(write(tmp_path / "refused.json.gz", document(case)))
    assert replay.failed == 1
    assert "refused" in replay.first_difference


def test_replay_takes_other_devices(tmp_path):
    """A partition of 32 compute units: the recording's device decides, not the default one."""
    case = document(SPLIT)
    case["cases"][0]["inputs"]["multiProcessorCount"] = 32
    case["cases"][0].pop("buffer_sizes")
    case["cases"][0]["outputs"]["work_indptr"] = [*range(16), *[15] * 17]
    replay = plans.replay_plans(write(tmp_path / "cpx.json.gz", case))
    assert replay.first_difference == ""
    assert replay.passed == 1


def zipped(content: bytes) -> bytes:
    """Without the time of day, which would give the workers of a parallel run different test names."""
    return gzip.compress(content, mtime=0)


@pytest.mark.parametrize(
    ("content", "remedy"),
    [
        (b"{}", "copy the recording again"),
        (b"", "holds no case|no complete gzip|no recording"),
        (zipped(b'{"meta": {}, "cases": []}')[:-12], "copy the recording again"),
        (zipped(b'{"meta": {}, "cases": []}'), "record at least one plan"),
        (zipped(b'{"cases": 3}'), "README"),
        (zipped(b"\xff\xfe no json"), "README"),
        (zipped(json.dumps(document(SMALL)).replace("gfx950", "gfx90a").encode()), "README"),
        (zipped(json.dumps(document(SMALL)).replace("[0, 15, 31]", "[0, 15, 4294967296]").encode()), "README"),
    ],
)
def test_bad_files_are_refused_in_one_line(tmp_path, content, remedy):
    path = tmp_path / "bad.json.gz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=remedy) as caught:
        plans.replay_plans(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c.update(outputs=None),
        lambda c: c["outputs"]["work_info_set"].__setitem__(0, [1, 2]),
        lambda c: c["outputs"]["work_indptr"].append(1),
        lambda c: (c["inputs"].update(alloc_batch=2**30), c.pop("buffer_sizes")),
    ],
)
def test_inconsistent_cases_are_refused(tmp_path, change):
    wrong = document(SMALL)
    change(wrong["cases"][0])
    with pytest.raises(ValueError, match=SMALL.id):
        plans.replay_plans(write(tmp_path / "odd.json.gz", wrong))


def test_replay_sets_the_environment_and_puts_it_back(monkeypatch):
    """AITER's switches of the caller neither reach a recording nor get lost."""
    monkeypatch.setenv("AITER_MLA_META_USE_PARALLEL", "0")
    dropped = next(case for case in V1_2 if case.id == "A_zero_b5_zero")  # serial and parallel differ
    assert plans.replay_case(dropped) == ""
    assert os.environ["AITER_MLA_META_USE_PARALLEL"] == "0"
