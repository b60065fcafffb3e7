"""Plan buffers, what a consumer reads of them, and the benchmark's comparison."""

from __future__ import annotations

import pytest
import torch
from planner_calls import POISON, buffers, decode

from dsv32_fast.kernels.emulated import get_mla_metadata_info_v1
from dsv32_fast.plan import PlanBuffers, allocate, consumer_bytes, consumer_view
from dsv32_fuzz.bench import plan as bench
from dsv32_fuzz.bench.plan import bench_plan, compare

LENS = [10, 300, 2048, 2048]


def test_buffers_come_in_the_order_and_shape_of_info():
    info = get_mla_metadata_info_v1(4, 1, 16, None, None, True)
    plan = allocate(info, fill=-1)
    assert [(tuple(b.shape), b.dtype) for b in plan] == [
        ((2,), torch.uint64),
        ((257,), torch.int32),
        ((259, 8), torch.int32),
        ((5,), torch.int32),
        ((4, 2), torch.int32),
        ((259,), torch.int32),
    ]
    assert all((b == -1).all() for b in plan[1:])
    assert plan.work_metadata_ptrs.tolist() == [2**64 - 1] * 2
    assert allocate(info).work_info_set.shape == (259, 8)
    with pytest.raises(ValueError, match="describes 5 buffers"):
        allocate(info[:5])


def test_call_order_is_the_planners():
    plan = buffers(1)
    names = [
        "work_metadata_ptrs",
        "work_info_set",
        "work_indptr",
        "reduce_indptr",
        "reduce_final_map",
        "reduce_partial_map",
    ]
    assert [b.data_ptr() for b in plan.call_order()] == [getattr(plan, name).data_ptr() for name in names]


def test_consumers_do_not_see_the_rest():
    view = consumer_view(decode(LENS, cap=16))
    assert view.work_info_set.shape == (49, 8)
    assert view.reduce_final_map.tolist() == [[1, 2], [2, 3], [3, 4]]
    assert view.reduce_partial_map.tolist() == list(range(48))
    assert all((part != POISON).all() for part in view)


@pytest.mark.parametrize(
    ("name", "index", "read"),
    [
        ("work_metadata_ptrs", 0, False),
        ("work_indptr", 256, True),
        ("work_info_set", (48, 7), True),
        ("work_info_set", (49, 0), False),
        ("reduce_indptr", 4, True),
        ("reduce_final_map", (0, 0), False),
        ("reduce_final_map", (3, 1), True),
        ("reduce_partial_map", 47, True),
        ("reduce_partial_map", 48, False),
    ],
)
def test_every_entry_that_is_read_counts_and_no_other(name, index, read):
    plan, other = decode(LENS, cap=16), decode(LENS, cap=16)
    assert consumer_bytes(plan) == consumer_bytes(other)
    buffer = getattr(other, name)
    (buffer.view(torch.int64) if name == "work_metadata_ptrs" else buffer)[index] += 1
    assert (consumer_bytes(plan) != consumer_bytes(other)) == read


def test_an_unwritten_plan_has_a_view():
    view = consumer_view(buffers(4, poison=-5))
    assert view.work_info_set.size == view.reduce_partial_map.size == 0
    assert consumer_view(PlanBuffers(*(b[:0] for b in buffers(4)))).work_indptr.size == 0


def test_benchmark_measures_both_forms_of_one_call():
    calls: list[tuple[int, int]] = []
    rates = bench_plan(rows=(1, 8), seconds=0.02, progress=lambda done, total: calls.append((done, total)))
    assert [rate.rows for rate in rates] == [1, 8]
    assert calls == [(n, 18) for n in range(1, 19)]
    for rate in rates:
        assert 0 < rate.planner.lowest <= rate.planner.median <= rate.planner.highest
        assert 0 < rate.lists.lowest <= rate.lists.median <= rate.lists.highest
        assert rate.speedup > 0
        assert rate.works > rate.rows


def test_benchmark_stops_when_the_two_planners_differ(monkeypatch):
    def wrong(*arguments):
        right = list_planner(*arguments)
        right.work_info_set[0][5] += 1
        return right

    list_planner = bench.plan_lists
    monkeypatch.setattr(bench, "plan_lists", wrong)
    with pytest.raises(RuntimeError, match="differ in work_info_set"):
        bench_plan(rows=(2,), seconds=0.01)


@pytest.mark.parametrize("name", ["work_indptr", "reduce_indptr", "reduce_final_map", "reduce_partial_map"])
def test_comparison_sees_each_buffer(name):
    pair = bench._Pair(2)
    pair.by_tensors()
    compare(pair.plan, pair.list_plan)
    getattr(pair.plan, name)[1] += 1
    with pytest.raises(RuntimeError, match="differ in"):
        compare(pair.plan, pair.list_plan)


def test_benchmark_refuses_nonsense():
    for rows, seconds in (((0,), 1.0), ((), 1.0), ((1,), 0.0)):
        with pytest.raises(ValueError, match="must be positive"):
            bench_plan(rows=rows, seconds=seconds)
