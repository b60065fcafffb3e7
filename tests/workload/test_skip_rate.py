"""Skips of the published keys: rightful and wrongful, against a literal count, and the smallest known collisions."""

from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv32_fast.batch import StepBatch
from dsv32_fuzz.oracle import planner_lens, split_cap
from dsv32_fuzz.workload import (
    PR42982_WORKLOAD,
    PURE_DECODE,
    ScheduledStep,
    Traffic,
    Workload,
    steps,
)
from dsv32_fuzz.workload.skip_rate import (
    CLAIMED_RATE,
    Key,
    SkipCount,
    explain_misses,
    outcomes,
    skip_rate,
    skip_table,
    sweep,
)

HEADS = 16


def key_42982(topk: int) -> Key:
    """(rows, largest query length, heads, min(seq, topk)): vLLM 0.23 and 0.24."""

    def key(step: StepBatch) -> bytes:
        head = np.array([step.num_tokens, step.max_query_len, HEADS], dtype=np.int32)
        return head.tobytes() + np.minimum(np.array(step.seq_lens, dtype=np.int32), topk).tobytes()

    return key


def key_47766(topk: int) -> Key:
    """The same, and min(context, topk) and the query lengths: vLLM 0.26 and later."""
    shorter = key_42982(topk)

    def key(step: StepBatch) -> bytes:
        q = np.array(step.query_lens, dtype=np.int32)
        context = np.minimum(np.array(step.seq_lens, dtype=np.int32) - q, topk)
        return shorter(step) + context.astype(np.int32).tobytes() + q.tobytes()

    return key


def batch(query_lens: tuple[int, ...], seq_lens: tuple[int, ...]) -> ScheduledStep:
    step = StepBatch(query_lens=query_lens, seq_lens=seq_lens)
    return ScheduledStep(batch=step, traffic=Traffic.MIXED, requests=tuple(range(len(query_lens))))


COLLISIONS = {
    "Z01 second chunk": (batch((8,), (8,)), batch((8,), (16,)), 4),
    "Z01 at scale": (batch((8192,), (8192,)), batch((8192,), (16384,)), 2048),
    "Z02 MTP crosses topk": (batch((4,), (4,)), batch((4,), (7,)), 4),
    "Z02 at scale": (batch((4,), (2048,)), batch((4,), (2051,)), 2048),
    "Z03 permuted query lengths": (batch((3, 1, 1), (4, 4, 4)), batch((1, 3, 1), (4, 4, 4)), 4),
}


@pytest.mark.parametrize("name", COLLISIONS)
def test_the_smallest_collisions_are_wrongful_skips(name: str) -> None:
    first, second, topk = COLLISIONS[name]
    launch, reuse = outcomes([first, second], key_42982(topk), topk=topk)
    assert (launch.reused, reuse.reused, reuse.rightful) == (None, first.batch, False)
    assert [o.reused for o in outcomes([first, second], key_47766(topk), topk=topk)] == [None, None]


def test_a_repeated_step_is_a_rightful_skip() -> None:
    step = batch((1, 1), (9, 5))
    for key in (key_42982(4), key_47766(4)):
        found = list(outcomes([step, batch((1, 1), (10, 6)), step], key, topk=4))
        assert [(o.reused is not None, o.rightful) for o in found] == [(False, True), (True, True), (True, True)]


def test_a_skip_is_judged_against_the_last_launch_not_the_last_step() -> None:
    ramp, flat = batch((4,), (4,)), batch((4,), (9,))
    found = list(outcomes([ramp, flat, flat, ramp], key_42982(4), topk=4))
    assert [o.rightful for o in found] == [True, False, False, True]


def test_a_key_of_none_always_launches_and_leaves_nothing_to_reuse() -> None:
    step = batch((1,), (9,))
    keys = iter([b"a", None, b"a", b"a", None, None])
    found = list(outcomes([step] * 6, lambda _: next(keys), topk=4))
    assert [o.reused is not None for o in found] == [False, False, False, True, False, False]


def test_idle_steps_neither_count_nor_touch_the_cache() -> None:
    idle = ScheduledStep(batch=StepBatch(query_lens=(), seq_lens=()), traffic=Traffic.IDLE)
    step = batch((1,), (9,))
    found = list(outcomes([step, idle, step], key_42982(4), topk=4))
    assert [o.reused is not None for o in found] == [False, True]


@st.composite
def small_workloads(draw: st.DrawFn, depths: st.SearchStrategy[int]) -> Workload:
    concurrency = draw(st.integers(1, 4))
    return Workload(
        input_len=draw(st.integers(1, 24)),
        output_len=draw(st.integers(1, 12)),
        length_spread=draw(st.sampled_from((0.0, 0.3))),
        concurrency=concurrency,
        num_requests=draw(st.integers(1, 8)),
        max_num_batched_tokens=concurrency + draw(st.integers(0, 24)),
        max_model_len=256,
        mtp_depth=draw(depths),
        capture_sizes=draw(st.sampled_from(((), (1, 2, 4, 8)))),
        decode_first=draw(st.booleans()),
        arrivals=draw(st.sampled_from(("closed", "poisson"))),
        arrival_interval=3.0,
        preempt_rate=draw(st.sampled_from((0.0, 0.1))),
    )


TOPKS = st.sampled_from((1, 4, 8, 16))


def literal_count(workload: Workload, seed: int, key: Key, topk: int) -> dict[str, int]:
    """The definition, on whole lists."""
    built = [s for s in steps(workload, seed) if s.traffic is not Traffic.IDLE]
    keys = [key(s.batch) for s in built]
    counts = dict.fromkeys(("steps", "decode_steps", "skipped", "skipped_decode", "wrongful", "wrongful_decode"), 0)
    for i, step in enumerate(built):
        if step.traffic is Traffic.CAPTURE:
            continue
        launch = i
        while launch and keys[launch - 1] == keys[i]:
            launch -= 1
        old, new = (planner_lens(s.batch, topk).tolist() for s in (built[launch], step))
        for suffix, counted in (("", True), ("_decode", step.traffic in PURE_DECODE)):
            counts["decode_steps" if suffix else "steps"] += counted
            counts["skipped" + suffix] += counted and launch != i
            counts["wrongful" + suffix] += counted and old != new
    return counts


@given(small_workloads(st.integers(0, 3)), st.integers(0, 999), TOPKS, st.sampled_from((key_42982, key_47766)))
@settings(max_examples=200, deadline=None)
def test_counts_equal_the_definition(workload: Workload, seed: int, topk: int, rule: Callable[[int], Key]) -> None:
    found = skip_rate(workload, rule(topk), seed=seed, topk=topk)
    expected = literal_count(workload, seed, rule(topk), topk)
    assert {name: getattr(found, name) for name in expected} == expected
    assert sum(found.wrongful_by_class.values()) == found.wrongful
    assert (found.first_wrongful is not None) == (found.wrongful > 0)
    if found.first_wrongful is not None:
        launched, reused = found.first_wrongful
        assert rule(topk)(launched) == rule(topk)(reused)
        assert planner_lens(launched, topk).tolist() != planner_lens(reused, topk).tolist()


@given(small_workloads(st.integers(0, 3)), st.integers(0, 999), TOPKS)
@settings(max_examples=200, deadline=None)
def test_the_key_of_47766_never_skips_wrongfully_and_stays_below_the_ceiling(
    workload: Workload, seed: int, topk: int
) -> None:
    found = skip_rate(workload, key_47766(topk), seed=seed, topk=topk)
    causes = explain_misses(workload, seed=seed, topk=topk)
    assert found.wrongful == 0
    assert causes.steps == found.steps == causes.unchanged + causes.rows_changed + causes.lengths_changed
    assert found.skipped <= causes.unchanged


@given(small_workloads(st.just(0)), st.integers(0, 999), TOPKS)
@settings(max_examples=200, deadline=None)
def test_one_row_per_request_never_skips_wrongfully(workload: Workload, seed: int, topk: int) -> None:
    found = skip_rate(workload, key_42982(topk), seed=seed, topk=topk)
    assert found.wrongful_decode == 0


def test_mtp_decode_that_starts_below_topk_keeps_the_stale_plan() -> None:
    """The launch falls into the window [topk, topk + q - 2]; every later step of the request has the same key."""
    workload = Workload(input_len=2045, output_len=100, concurrency=1, num_requests=1, mtp_depth=3, acceptance=0.0)
    found = skip_rate(workload, key_42982(2048))
    assert found.first_wrongful is not None
    launched, reused = found.first_wrongful
    assert (launched.seq_lens, reused.seq_lens) == ((2049,), (2050,))
    assert found.wrongful == found.wrongful_decode == found.skipped == 98
    assert found.rate == 98 / 100
    assert found.rate_decode == 98 / 99
    assert found.rightful_rate == 0.0
    assert skip_rate(workload, key_47766(2048)).wrongful == 0
    causes = explain_misses(workload)  # rows below topk: the prompt, then first rows of 2046 and 2047 tokens
    assert (causes.below_topk, causes.unchanged) == (3, 96)


def test_the_second_chunk_of_the_first_prompt_at_budget_2048() -> None:
    found = skip_rate(
        msgspec.structs.replace(PR42982_WORKLOAD, max_num_batched_tokens=2048, num_requests=64), key_42982(2048)
    )
    assert found.first_wrongful is not None
    launched, reused = found.first_wrongful
    assert (launched.query_lens, launched.seq_lens) == ((2048,), (2048,))
    assert (reused.query_lens, reused.seq_lens) == ((2048,), (4096,))
    assert found.wrongful_by_class["chunked_prefill"] >= 1


def test_a_scalar_that_the_key_lacks_makes_a_skip_wrongful() -> None:
    """The capture build of one row has the bound max_model_len; a prompt of one token has the same key, not the cap."""
    workload = Workload(input_len=1, output_len=1, concurrency=1, num_requests=1)
    assert skip_rate(workload, key_47766(2048)).wrongful == 0
    found = skip_rate(workload, key_47766(2048), scalars=lambda step: (split_cap(step),))
    assert (found.skipped, found.wrongful, found.wrongful_by_class) == (1, 1, {"prefill": 1})


def test_contexts_below_topk_cannot_skip_since_every_decode_row_grows() -> None:
    short = msgspec.structs.replace(PR42982_WORKLOAD, input_len=1000, num_requests=128)
    assert skip_rate(short, key_42982(2048)).rate == 0.0
    causes = explain_misses(short)
    assert causes.ceiling == 0.0
    assert causes.below_topk == causes.steps == causes.rows_changed + causes.lengths_changed_below_topk
    long = explain_misses(msgspec.structs.replace(short, input_len=5000))
    assert long.unchanged > long.steps / 2 > long.below_topk


def test_the_table_has_one_row_per_spread_and_budget() -> None:
    workload = Workload(input_len=50, output_len=9, concurrency=4, num_requests=12)
    table = skip_table(key_42982(2048), workload=workload, seed=3, budgets=iter((64, 128)))
    assert [(r.workload.length_spread, r.workload.max_num_batched_tokens) for r in table] == [
        (0.0, 64),
        (0.0, 128),
        (0.1, 64),
        (0.1, 128),
    ]
    again = skip_rate(msgspec.structs.replace(workload, max_num_batched_tokens=128), key_42982(2048), seed=3)
    assert table[1] == again
    assert {r.claimed for r in table} == {CLAIMED_RATE}
    assert msgspec.json.decode(msgspec.json.encode(table), type=list[SkipCount]) == table


def test_the_sweep_covers_the_grid_with_as_many_waves() -> None:
    workload = Workload(output_len=9, concurrency=4, num_requests=12)
    rows = sweep(
        key_42982(2048), workload=workload, input_lens=(50, 3000), concurrencies=iter((1, 2)), mtp_depths=iter((0, 1))
    )
    points = [(r.workload.input_len, r.workload.concurrency, r.workload.mtp_depth) for r in rows]
    assert points == [(i, c, m) for i in (50, 3000) for c in (1, 2) for m in (0, 1)]
    assert [r.workload.num_requests for r in rows] == [3, 3, 6, 6] * 2
    assert all(r.rate == 0 for r in rows[:4])
    assert rows[4].skipped_decode == 3 * 7  # of 8 decode steps per request the first one launches


def test_rates_are_none_where_nothing_was_served() -> None:
    count = skip_rate(Workload(input_len=3, output_len=1, num_requests=1, concurrency=1), key_42982(2048))
    assert (count.steps, count.decode_steps, count.rate, count.rate_decode) == (1, 0, 0.0, None)
