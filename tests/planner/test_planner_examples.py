"""Plans worked out by hand, on 256 and 304 compute units."""

from __future__ import annotations

import numpy as np
from planner_calls import POISON, buffers, decode

from dsv32_fast.kernels.emulated.device import MI300X, emulated_device
from dsv32_fast.plan import consumer_view

MIXED = [10, 300, 2048, 2048]


def rows(plan):
    return consumer_view(plan).work_info_set.tolist()


def test_mixed_lengths_with_a_split_cap():
    """64 splits; blocks 1, 19, 128, 128 and 4 overheads of 16 make 340; payload ceil(340 / 64) + 16 = 22."""
    plan = decode(MIXED, cap=16)
    works = rows(plan)
    assert len(works) == 49
    assert works[0] == [0, -1, 0, 1, 0, 10, 0, 0]
    assert [w[4] for w in works[1:5]] == [10, 106, 202, 298]
    assert works[4][5] == 310
    assert [w[1] for w in works[1:]] == list(range(48))
    assert [w[4] for w in works[5:27]] == [310 + 96 * i for i in range(22)]
    assert works[26] == [2, 25, 2, 3, 2326, 2358, 0, 0]
    assert works[27] == [3, 26, 3, 4, 2358, 2454, 1952, 0]
    assert works[48] == [3, 47, 3, 4, 4374, 4406, 0, 0]
    assert plan.work_indptr.tolist() == [*range(50), *[49] * 207]
    assert plan.reduce_indptr.tolist() == [0, 0, 4, 26, 48]
    assert plan.reduce_final_map.tolist() == [[POISON, POISON], [1, 2], [2, 3], [3, 4]]
    assert plan.reduce_partial_map.tolist() == [*range(48), *[POISON] * 211]


def test_mixed_lengths_without_a_cap():
    plan = decode(MIXED)
    assert plan.work_indptr[-1] == 139
    assert plan.reduce_indptr.tolist() == [0, 0, 10, 74, 138]


def test_another_device():
    with emulated_device(MI300X):
        plan = decode([1, 16, 17, 257])
    works = rows(plan)
    assert len(works) == 21
    assert works[:4] == [
        [0, -1, 0, 1, 0, 1, 0, 0],
        [1, -1, 1, 2, 1, 17, 0, 0],
        [2, 0, 2, 3, 17, 33, 1, 0],
        [2, 1, 2, 3, 33, 34, 0, 0],
    ]
    assert works[-1] == [3, 18, 3, 4, 290, 291, 0, 0]
    assert plan.reduce_indptr.tolist() == [0, 0, 0, 2, 19]
    assert len(plan.work_indptr) == 305


def test_saturated_rows_split_evenly():
    """64 rows of 2048: payload 36 + 16, so every row is cut 576, 576, 576, 320."""
    plan = decode([2048] * 64, cap=16)
    works = np.array(rows(plan))
    assert (works[:, 5] - works[:, 4]).tolist() == [576, 576, 576, 320] * 64
    assert plan.reduce_indptr.tolist() == list(range(0, 257, 4))
    assert works[:, 1].tolist() == list(range(256))


def test_short_rows_share_units_and_are_not_split():
    """600 rows of 64: payload ceil(600 * 20 / 256) + 16 = 63, three rows of 20 blocks to a unit."""
    plan = decode([64] * 600, cap=16)
    assert plan.work_indptr.tolist() == [min(3 * c, 600) for c in range(257)]
    assert not plan.reduce_indptr.any()
    assert (plan.reduce_final_map == POISON).all()
    assert (plan.reduce_partial_map == POISON).all()


def test_cap_is_a_budget_of_the_whole_call():
    """One row may get more pieces than max_split_per_batch: 22 where the cap is 16."""
    plan = decode(MIXED, cap=16)
    assert np.diff(plan.reduce_indptr.numpy()).max() == 22


def test_parallel_planner_drops_empty_rows_that_do_not_fit(monkeypatch):
    """Serial: 7 works. Parallel: 5, and the output of rows 2 and 3 is never written."""
    lens = [2048, 2048, 0, 0, 5]
    dropped = decode(lens, cap=1)
    monkeypatch.setenv("AITER_MLA_META_USE_PARALLEL", "0")
    kept = decode(lens, cap=1)
    assert dropped.work_indptr[-1] == 5
    assert kept.work_indptr[-1] == 7
    assert {w[0] for w in rows(dropped)} == {0, 1, 4}
    assert {w[0] for w in rows(kept)} == {0, 1, 2, 3, 4}
    assert [w[4:6] for w in rows(kept) if w[0] in (2, 3)] == [[4096, 4096]] * 2


def test_an_empty_row_that_fits_exactly_is_kept():
    """Two empty rows cost 16 each, 2 splits: payload 16 + 16. The second finds just the overhead left and is kept."""
    plan = decode([0, 0], cap=1)
    assert plan.work_indptr[:3].tolist() == [0, 2, 2]
    assert [w[0] for w in rows(plan)] == [0, 1]


def test_an_empty_row_that_does_not_fit_leaves_the_unit_open():
    """Payload 5 + 16. Row 0 takes 17 of 21, rows 1 and 2 find 4 and are dropped, row 3 opens the next unit."""
    plan = decode([1, 0, 0, 1], cap=4)
    assert plan.work_indptr[:4].tolist() == [0, 1, 2, 2]
    assert [w[0] for w in rows(plan)] == [0, 3]


def test_no_rows():
    plan = decode([], plan=buffers(4))
    assert not plan.work_indptr.any()
    assert not plan.reduce_indptr.any()
    assert (plan.work_info_set == POISON).all()


def test_larger_buffers_keep_their_rest():
    """vLLM sizes the buffers for the largest batch: reduce_indptr is filled to its end, the rest stays as it was."""
    plan = decode([300] * 3, plan=buffers(40))
    alone = decode([300] * 3)
    works = int(alone.work_indptr[-1])
    assert plan.work_info_set[:works].equal(alone.work_info_set[:works])
    assert (plan.work_info_set[works:] == POISON).all()
    assert plan.reduce_indptr.tolist() == alone.reduce_indptr.tolist() + [int(alone.reduce_indptr[-1])] * 37


def test_pointers_are_those_of_the_buffers():
    plan = decode([5])
    assert plan.work_metadata_ptrs.tolist() == [plan.work_indptr.data_ptr(), plan.work_info_set.data_ptr()]
