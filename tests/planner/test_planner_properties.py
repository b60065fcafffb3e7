"""Properties of the planner over generated calls."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from planner_calls import POISON, buffers, decode, indptr

from dsv32_fast.kernels.emulated import UndefinedInAiter, get_mla_metadata_info_v1, get_mla_metadata_v1
from dsv32_fast.kernels.emulated.device import MI300X, MI355X, DeviceProperties, emulated_device
from dsv32_fast.kernels.emulated.launch import LaunchRules, launch_rules
from dsv32_fast.plan import PlanBuffers, allocate, consumer_bytes, consumer_view
from dsv32_fuzz.bench.list_planner import plan_lists
from dsv32_fuzz.bench.plan import compare
from dsv32_fuzz.golden.plans import _environment
from dsv32_fuzz.plan_checker import ZERO_LENGTH, check_plan

SERIAL: dict[str, int | str] = {"AITER_MLA_META_USE_PARALLEL": 0}
BOUNDARIES = (1, 2, 15, 16, 17, 255, 256, 257, 575, 576, 577, 2047, 2048)
lengths = st.sampled_from(BOUNDARIES) | st.integers(1, 2048)
rows = st.lists(lengths, min_size=1, max_size=80) | st.builds(lambda n, v: [v] * n, st.integers(1, 300), lengths)
caps = st.sampled_from([-1, 1, 2, 8, 16, 32])
small = DeviceProperties(arch="gfx950", compute_units=7, lds_bytes=160 * 1024, fp8=torch.float8_e4m3fn)
devices = st.sampled_from([MI355X, MI300X, small])
quick = settings(max_examples=60, deadline=None)


@quick
@given(rows, caps, devices)
def test_parallel_and_serial_planner_agree_without_empty_rows(lens, cap, device):
    with emulated_device(device):
        with _environment({}):
            parallel = decode(lens, cap=cap)
        with _environment(SERIAL):
            serial = decode(lens, cap=cap)
    assert all(a.equal(b) for a, b in zip(parallel[1:], serial[1:], strict=True))


@quick
@given(rows, caps, devices)
def test_decode_plans_compute_every_row_once(lens, cap, device):
    with emulated_device(device):
        plan = decode(lens, cap=cap)
    assert check_plan(plan, indptr(lens)) == []


@quick
@given(st.lists(st.sampled_from([0, 1]) | lengths, min_size=1, max_size=60), caps, st.booleans())
def test_only_the_parallel_planner_drops_empty_rows(lens, cap, parallel):
    with _environment({} if parallel else SERIAL):
        plan = decode(lens, cap=cap)
    found = check_plan(plan, indptr(lens))
    worked = set(consumer_view(plan).work_info_set[:, 0].tolist())
    dropped = [row for row in range(len(lens)) if row not in worked]
    assert [v.row for v in found] == dropped
    assert {v.what for v in found} <= {ZERO_LENGTH}
    assert all(lens[row] == 0 for row in dropped)
    assert parallel or not dropped


@quick
@given(rows, caps)
def test_poison_survives_and_does_not_matter(lens, cap):
    a, b = (decode(lens, cap=cap, plan=buffers(len(lens) + 3, poison=poison)) for poison in (POISON, 2**30))
    assert consumer_bytes(a) == consumer_bytes(b)
    for x, y in zip(a[1:], b[1:], strict=True):
        differs = x != y
        assert (x[differs] == POISON).all()
        assert (y[differs] == 2**30).all()


@st.composite
def any_call(draw: st.DrawFn) -> dict[str, Any]:
    """Every option of v1_2, on rows that AITER can plan."""
    uni = draw(st.sampled_from([1, 1, 1, 2, 3, 4, 5, 8, 9, 17, -1]))
    longest = draw(st.integers(1, 4)) if uni < 0 else uni
    sparse = draw(st.booleans()) if uni == 1 else False
    page_size = draw(st.sampled_from([1, 1, 1, 16, 64]))
    count = draw(st.integers(1, 12))
    per_request = draw(st.integers(1, 4)) if sparse else longest
    queries = [per_request] * count
    if uni < 0:
        queries = draw(st.lists(st.integers(0, longest), min_size=count, max_size=count))
    return {
        "device": draw(devices),
        "queries": queries,
        "lens": draw(st.lists(st.sampled_from([0]) | lengths | st.integers(1, 9000), min_size=count, max_size=count)),
        "pages": draw(st.lists(st.integers(1, page_size), min_size=count, max_size=count)),
        "heads": draw(st.sampled_from([8, 16, 16, 32, 48, 64, 80, 128])),
        "is_causal": draw(st.booleans()),
        "page_size": page_size,
        "kv_granularity": draw(st.sampled_from([16, 16, 1, 64])),
        "max_seqlen_qo": longest,
        "uni_seqlen_qo": uni,
        "topk": draw(st.sampled_from([16, 64, 2048])) if sparse else -1,
        "max_split_per_batch": draw(caps),
        "is_cp_round_robin": draw(st.booleans()),
        "fp8": draw(st.sampled_from([(False, False), (True, True), (False, True)])),
        "parallel": draw(st.booleans()),
    }


OPTIONS = ("page_size", "kv_granularity", "max_seqlen_qo", "uni_seqlen_qo", "topk", "max_split_per_batch")


def options_of(call: dict[str, Any]) -> dict[str, Any]:
    return {name: call[name] for name in (*OPTIONS, "is_cp_round_robin")}


def rules_of(call: dict[str, Any]) -> LaunchRules:
    return launch_rules(
        call["device"],
        len(call["lens"]),
        call["heads"],
        1,
        call["is_causal"],
        **options_of(call),
        q_fp8=call["fp8"][0],
        kv_fp8=call["fp8"][1],
        experimental=False,
        parallel_enabled=call["parallel"],
    )


def plan_of(call: dict[str, Any]) -> PlanBuffers:
    """The plan of a call, which Hypothesis drops if AITER's result is undefined."""
    q, kv = (torch.float8_e4m3fn if flag else torch.bfloat16 for flag in call["fp8"])
    with emulated_device(call["device"]), _environment({} if call["parallel"] else SERIAL):
        plan = allocate(get_mla_metadata_info_v1(96, 17, 128, q, kv, True), POISON)  # enough for every call
        try:
            get_mla_metadata_v1(
                indptr(call["queries"]),
                indptr(call["lens"]),
                torch.tensor(call["pages"], dtype=torch.int32),
                call["heads"],
                1,
                call["is_causal"],
                *plan.call_order(),
                **options_of(call),
                dtype_q=q,
                dtype_kv=kv,
            )
        except UndefinedInAiter:
            reject()
    return plan


@settings(max_examples=150, deadline=None)
@given(any_call())
def test_compiled_planner_and_list_transcription_agree(call):
    plan = plan_of(call)
    lists = plan_lists(
        rules_of(call),
        indptr(call["queries"]).tolist(),
        indptr(call["lens"]).tolist(),
        call["pages"],
        page_size=call["page_size"],
        granularity=call["kv_granularity"],
    )
    compare(plan, lists)
    works = len(lists.work_info_set)
    assert (plan.work_info_set[works:] == POISON).all()
    unsplit = [t for t in range(len(plan.reduce_final_map)) if t not in lists.reduce_final_map]
    assert (plan.reduce_final_map.numpy()[unsplit] == POISON).all()
    assert (plan.reduce_partial_map[len(lists.reduce_partial_map) :] == POISON).all()


@settings(max_examples=80, deadline=None)
@given(any_call())
def test_dense_multi_token_plans_compute_every_row_once(call):
    """Several query tokens and tiles, folded heads, pages, ragged queries: each token sees the keys it needs once."""
    uni, count = call["uni_seqlen_qo"], len(call["lens"])
    call |= {"topk": -1, "is_cp_round_robin": not call["is_causal"]}
    call["queries"] = call["queries"] if uni < 0 else [uni] * count
    call["lens"] = [length + 4 * call["max_seqlen_qo"] for length in call["lens"]]  # a context behind every query
    found = check_plan(
        plan_of(call),
        indptr(call["lens"]),
        indptr(call["queries"]),
        causal=call["is_causal"],
        page_size=call["page_size"],
        q_per_token=rules_of(call).qk_batch_ratio,
        max_seqlen_qo=call["max_seqlen_qo"],
    )
    assert found == []


def test_row_count_decides_between_the_planners():
    """LDS of 160 KiB holds 8191 rows of the parallel planner; only empty rows can tell which one ran."""
    for count, dropped in ((8191, True), (8192, False)):
        lens = np.zeros(count, np.int64)
        lens[: count // 2] = 1
        found = check_plan(decode(lens.tolist()), indptr(lens.tolist()))
        assert bool(found) == dropped
