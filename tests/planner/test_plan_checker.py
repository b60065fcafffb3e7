"""The plan checker finds each kind of broken plan, and accepts whatever a consumer computes right."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from planner_calls import POISON, buffers, decode, indptr

from dsv32_fast.plan import PlanBuffers
from dsv32_fuzz.plan_checker import KINDS, ZERO_LENGTH, PlanViolation, check_plan

lengths = st.lists(st.integers(1, 2048), min_size=2, max_size=40)
caps = st.sampled_from([-1, 1, 16])


def num_works(plan):
    return int(plan.work_indptr[-1])


def split_works(plan):
    return np.flatnonzero(plan.work_info_set[: num_works(plan), 1].numpy() >= 0)


def split_tiles(plan):
    return np.flatnonzero(np.diff(plan.reduce_indptr.numpy()))


def pick(plan, among, seed):
    """One index of `among`, or no example."""
    assume(len(among) > 0)
    return int(among[seed % len(among)])


def pick_work(plan, seed):
    return seed % num_works(plan)


def drop_work(plan, seed):
    w, end = pick_work(plan, seed), num_works(plan)
    plan.work_info_set[w : end - 1] = plan.work_info_set[w + 1 : end].clone()
    plan.work_indptr[plan.work_indptr > w] -= 1


def double_work(plan, seed):
    w, end = pick_work(plan, seed), num_works(plan)
    plan.work_info_set[w + 1 : end + 1] = plan.work_info_set[w:end].clone()
    plan.work_indptr[plan.work_indptr > w] += 1


def add(column, amount):
    def change(plan, seed):
        plan.work_info_set[pick_work(plan, seed), column] += amount

    return change


def shift_range(amount):
    def change(plan, seed):
        w = pick_work(plan, seed)
        plan.work_info_set[w, 4:6] += amount
        plan.work_info_set[w, 6] -= amount

    return change


def shift_query(plan, seed):
    plan.work_info_set[pick_work(plan, seed), 2:4] += 1


def move_partial(plan, seed):
    plan.work_info_set[pick(plan, split_works(plan), seed), 1] += 1


def far_partial(plan, seed):
    plan.work_info_set[pick(plan, split_works(plan), seed), 1] = len(plan.reduce_partial_map)


def swap_partials(plan, seed):
    w = pick(plan, split_works(plan)[:-1], seed)
    plan.work_info_set[[w, w + 1], 1] = plan.work_info_set[[w + 1, w], 1]


def partial_becomes_whole(plan, seed):
    plan.work_info_set[pick(plan, split_works(plan), seed), 1] = -1


def whole_becomes_partial(plan, seed):
    whole = np.flatnonzero(plan.work_info_set[: num_works(plan), 1].numpy() < 0)
    plan.work_info_set[pick(plan, whole, seed), 1] = int(plan.reduce_indptr[-1])


def swap_reduce_entries(plan, seed):
    first = int(plan.reduce_indptr[pick(plan, split_tiles(plan), seed)])
    plan.reduce_partial_map[[first, first + 1]] = plan.reduce_partial_map[[first + 1, first]]


def repeat_reduce_entry(plan, seed):
    first = int(plan.reduce_indptr[pick(plan, split_tiles(plan), seed)])
    plan.reduce_partial_map[first + 1] = plan.reduce_partial_map[first]


def stale_reduce_entry(plan, seed):
    plan.reduce_partial_map[int(plan.reduce_indptr[pick(plan, split_tiles(plan), seed)])] = POISON


def drop_final_map(plan, seed):
    plan.reduce_final_map[pick(plan, split_tiles(plan), seed)] = POISON


def other_final_map(plan, seed):
    plan.reduce_final_map[pick(plan, split_tiles(plan), seed)] += 1


def one_work_less(plan, seed):
    plan.work_indptr[plan.work_indptr == num_works(plan)] -= 1


def one_work_more(plan, seed):
    plan.work_indptr[-1] += 1
    plan.work_info_set[num_works(plan) - 1] = plan.work_info_set[num_works(plan) - 2]


def one_reduce_less(plan, seed):
    plan.reduce_indptr[pick(plan, split_tiles(plan), seed) + 1] -= 1


def last_reduce_less(plan, seed):
    assume(plan.reduce_indptr[-1] > 0)
    plan.reduce_indptr[plan.reduce_indptr == plan.reduce_indptr[-1].item()] -= 1


def backwards(plan, seed):
    plan.work_indptr[1 + seed % (len(plan.work_indptr) - 2)] = num_works(plan) + 1


def past_the_end(plan, seed):
    plan.work_indptr[-1] = len(plan.work_info_set) + 1


def late_start(plan, seed):
    plan.work_indptr[0] = 1
    plan.work_indptr[1:].clamp_(min=1)


REDUCE = {"reduce order", "reduce count", "reduce entry", "reduce_final_map", "partial unread", "reduce_indptr"}
COVER = {"kv gap", "kv overlap", "kv_start", "kv_end", "no work"}
MUTATIONS = {
    "dropped work": (drop_work, COVER),
    "doubled work": (double_work, {"kv overlap", "kv_start"}),
    "range shifted up": (shift_range(1), COVER),
    "range shifted down": (shift_range(-1), COVER),
    "range starts late": (add(4, 1), {"kv gap", "kv_start"}),
    "range ends early": (add(5, -1), {"kv gap", "kv_end"}),
    "range ends late": (add(5, 1), {"kv overlap", "kv_end"}),
    "other batch_idx": (add(0, 1), {"batch_idx"}),
    "other kv_offset": (add(6, 1), {"kv_offset"}),
    "other query rows": (shift_query, {"query range", "no work", "kv_start", "kv overlap"}),
    "query rows too long": (add(3, 1), {"query range"}),
    "partial moved": (move_partial, {"partial shared", "partial_qo_loc", *REDUCE}),
    "partial outside": (far_partial, {"partial_qo_loc"}),
    "partials swapped": (swap_partials, {"reduce order", "reduce_final_map"}),
    "partial becomes whole": (partial_becomes_whole, {"whole and partial"}),
    "whole becomes partial": (whole_becomes_partial, {"partial alone"}),
    "reduce entries swapped": (swap_reduce_entries, {"reduce order"}),
    "reduce entry repeated": (repeat_reduce_entry, {"reduce order", "partial unread"}),
    "reduce entry stale": (stale_reduce_entry, {"reduce entry"}),
    "final map missing": (drop_final_map, {"reduce_final_map", "partial unread"}),
    "final map of another row": (other_final_map, {"reduce_final_map"}),
    "one work less": (one_work_less, COVER),
    "one work more": (one_work_more, {"kv overlap", "kv_start", "kv_end"}),
    "one partial to the next tile": (one_reduce_less, {"reduce count", "reduce_final_map"}),
    "last partial not merged": (last_reduce_less, {"reduce count", "partial unread"}),
    "work_indptr goes back": (backwards, {"work_indptr"}),
    "work_indptr past the end": (past_the_end, {"work_indptr"}),
    "work_indptr starts late": (late_start, {"work_indptr"}),
}


@pytest.mark.parametrize("name", MUTATIONS)
@settings(max_examples=8, deadline=None)
@given(lens=lengths, cap=caps, seed=st.integers(0, 2**20))
def test_each_mutation_is_found(name, lens, cap, seed):
    mutate, kinds = MUTATIONS[name]
    plan = decode(lens, cap=cap, plan=buffers(len(lens) + 2))
    mutate(plan, seed)
    found = check_plan(plan, indptr(lens))
    assert found
    assert {violation.what for violation in found} & kinds


@settings(max_examples=20, deadline=None)
@given(lens=lengths, cap=caps, seed=st.randoms(use_true_random=False))
def test_order_and_place_of_works_do_not_matter(lens, cap, seed):
    """Which unit does a work, and when, changes nothing that is computed."""
    plan = decode(lens, cap=cap)
    order = list(range(num_works(plan)))
    seed.shuffle(order)
    plan.work_info_set[: len(order)] = plan.work_info_set[order]
    plan.work_indptr[1:-1] = seed.randint(0, len(order))
    assert check_plan(plan, indptr(lens)) == []


@settings(max_examples=20, deadline=None)
@given(lens=lengths, cap=caps, seed=st.integers(0, 2**20))
def test_a_plan_for_other_lengths_is_found(lens, cap, seed):
    """The stale plan: one row has grown by a token since."""
    plan = decode(lens, cap=cap)
    grown = list(lens)
    grown[seed % len(grown)] += 1
    assert check_plan(plan, indptr(grown))


def test_a_clean_plan_of_rows_that_are_split_by_tiles_may_keep_the_tail():
    """A causal tile may leave out the keys behind its last token, and need not; further it must not go."""
    plan = decode([100])
    info = plan.work_info_set
    plan.work_indptr.zero_()
    plan.work_indptr[1:] = 2
    plan.reduce_indptr.zero_()
    for last, clean in ((99, True), (100, True), (98, False), (101, False)):
        info[0] = torch.tensor([0, -1, 0, 1, 0, last, 100 - last, 0])
        info[1] = torch.tensor([0, -1, 1, 2, 0, 100, 0, 0])
        found = check_plan(plan, [0, 100], [0, 2])
        assert (found == []) == clean
    info[0] = torch.tensor([0, -1, 0, 1, 0, 99, 1, 0])
    assert check_plan(plan, [0, 100], [0, 2], causal=False) == [PlanViolation(0, "kv_end", 100, 99)]


@pytest.mark.parametrize(
    ("works", "expected"),
    [
        ([(0, 2, 100), (1, 2, 100)], PlanViolation(0, "query range", 2, 1)),  # token 1 is done twice
        ([(0, 2, 100), (3, 4, 150)], PlanViolation(1, "no work", 2, 3)),  # token 2 is not done
        ([(0, 2, 100), (2, 3, 150)], PlanViolation(1, "no work", 3, 4)),  # token 3 is not done
        ([(0, 4, 100)], PlanViolation(0, "query range", 2, 4)),  # a work of row 0 does the tokens of row 1 too
        ([(0, 2, 100), (2, 4, 150), (4, 5, 150)], PlanViolation(1, "query range", 4, 4)),  # there is no token 4
    ],
)
def test_each_query_token_is_done_once(works, expected):
    """Two rows of two tokens, over keys [0, 100) and [100, 150); works are (qo_start, qo_stop, kv_end)."""
    plan = buffers(5)
    plan.work_indptr.zero_()
    plan.work_indptr[-1] = len(works)
    plan.reduce_indptr.zero_()
    for w, (q_start, q_stop, end) in enumerate(works):
        plan.work_info_set[w] = torch.tensor([end // 150, -1, q_start, q_stop, (end - 50) // 100 * 100, end, 0, 0])
    assert expected in check_plan(plan, [0, 100, 150], [0, 2, 4])
    good = [[0, -1, 0, 2, 0, 100, 0, 0], [1, -1, 2, 4, 100, 150, 0, 0]]
    plan.work_indptr[-1] = 2
    plan.work_info_set[:2] = torch.tensor(good)
    assert check_plan(plan, [0, 100, 150], [0, 2, 4]) == []


def test_zero_length_is_a_kind_of_its_own():
    plan = decode([2048, 2048, 0, 0, 5], cap=1)
    found = check_plan(plan, indptr([2048, 2048, 0, 0, 5]))
    assert [(v.row, v.what) for v in found] == [(2, ZERO_LENGTH), (3, ZERO_LENGTH)]
    assert str(found[0]) == "row 2: no work: zero length: expected 2, found 4"
    assert "no work" in {v.what for v in check_plan(plan, indptr([2048, 2048, 1, 0, 5]))}


def test_an_unwritten_plan_is_found():
    plan = buffers(4)
    assert check_plan(plan, indptr([5, 6, 7, 8]))


def test_findings_are_limited():
    plan = decode([2048] * 200)
    plan.work_info_set[:, 6] += 1
    assert len(check_plan(plan, indptr([2048] * 200))) == 64


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (([0, 5, 3],), "kv_indptr decreases"),
        (([0, 5], [0, 1, 2]), "B rows need"),
        (([0, 5, 6], [0, 2, 1]), "qo_indptr decreases"),
    ],
)
def test_bad_rows_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        check_plan(decode([5]), *arguments)


def test_empty_buffers_are_refused():
    plan = decode([5])._replace(work_indptr=torch.empty(0, dtype=torch.int32))
    with pytest.raises(ValueError, match="work_indptr"):
        check_plan(PlanBuffers(*plan), [0, 5])


def test_kinds_are_distinct():
    assert len(set(KINDS)) == len(KINDS)
    assert ZERO_LENGTH in KINDS
