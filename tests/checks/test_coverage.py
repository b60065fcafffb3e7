"""Coverage adds up, knows its whole space, and says what was never visited; every mix makes what it is named for."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from dsv32_fast.metadata import metadata_key
from dsv32_fast.options import PRESETS
from dsv32_fuzz.case import Case
from dsv32_fuzz.oracle import planner_lens
from dsv32_fuzz.search.coverage import EVENTS, Coverage, cell_of, events_of, merge_coverage, possible_cells
from dsv32_fuzz.serving.traffic import serving_steps
from dsv32_fuzz.strategies import Steps, dims_for
from dsv32_fuzz.strategies.batch_mixes import MIXES, TOPK, batch, batch_mix_steps, same_key_neighbour

OPTIONS = PRESETS["pr47766"]


def case(*steps: object) -> Case:
    return Case(check="", scope="s", options=OPTIONS, dims=dims_for(tuple(steps)), steps=tuple(steps))  # type: ignore[arg-type]


def covered(*cases: Case) -> Coverage:
    coverage = Coverage()
    for each in cases:
        coverage.add(each)
    return coverage


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.one_of(serving_steps(), batch_mix_steps()), min_size=2, max_size=4))
def test_parts_add_up_in_any_order(sequences: list[Steps]) -> None:
    cases = [case(*steps) for steps in sequences]
    whole = merge_coverage([covered(*cases)])
    parts = [msgspec.json.decode(msgspec.json.encode(covered(each)), type=Coverage) for each in cases]
    assert msgspec.json.encode(merge_coverage(parts)) == msgspec.json.encode(whole)
    assert msgspec.json.encode(merge_coverage(parts[::-1])) == msgspec.json.encode(whole)
    assert sum(whole.cells.values()) == whole.steps == sum(len(steps) for steps in sequences)
    known = {"/".join(cell) for cell in possible_cells()}
    assert {name.rpartition("/")[0] for name in whole.cells} <= known
    assert set(whole.events) <= set(EVENTS)


def test_a_step_lies_in_its_cell() -> None:
    assert cell_of(batch([(1, TOPK + 3)]), TOPK) == ("around topk", "1", "decode", "none")
    assert cell_of(batch([(2, 40), (2, 9)], 8), TOPK) == ("16..63", "2", "uniform drafts", "rows")
    assert cell_of(batch([(4, 90), (1, 9), (0, 0)], 8), TOPK) == ("64..topk-9", "3..4", "ragged drafts", "requests")
    assert cell_of(batch([(TOPK, 9 * TOPK)]), TOPK) == ("beyond", "topk or more", "prefill", "none")
    assert cell_of(batch([(64, 100), (1, 5000)]), TOPK) == ("to 4 topk", "9..topk-1", "prefill and decode", "none")
    assert cell_of(batch([], 4), TOPK) == ("empty", "none", "idle", "rows")
    assert cell_of(batch([(2, 2)] * 2, bound=9999), TOPK) == ("2..15", "2", "capture", "none")


@pytest.mark.parametrize(
    ("event", "steps"),
    [
        ("row crosses topk", (batch([(1, TOPK - 1)]), batch([(1, TOPK)]))),
        ("shrink after grow", (batch([(1, 5)]), batch([(1, 5)] * 2), batch([(1, 5)]))),
        ("regrow after shrink", (batch([(1, 5)] * 2), batch([(1, 5)]), batch([(1, 5)] * 2))),
        ("capture between equal keys", (batch([(1, 5)]), batch([(1, 1)] * 2, bound=999), batch([(1, 5)]))),
        ("zero-length request in the middle", (batch([(1, 5), (0, 0), (1, 6)]),)),
        ("split cap changes with equal lengths", (batch([(1, 1150)]), batch([(1, 1150)], bound=1152))),
        ("same short key, other rows", (batch([(2, TOPK)]), batch([(2, TOPK + 1)]))),
        ("same lengths, other order", (batch([(1, 5), (2, 6)]), batch([(2, 6), (1, 5)]))),
        ("equal step again", (batch([(1, 5)]), batch([(1, 5)]))),
        ("all rows padding", (batch([], 4),)),
        ("draft crosses topk", (batch([(4, TOPK + 1)]),)),
        ("chunk ends at topk", (batch([(64, TOPK)]),)),
        ("batch of one after many", (batch([(1, 5)] * 2), batch([(1, 5)]))),
        ("optimistic bound", (batch([(1, 5)], bound=8),)),
    ],
)
def test_an_event_is_told_once(event: str, steps: Steps) -> None:
    assert events_of(steps, TOPK).count(event) == 1
    assert event not in events_of((batch([(1, 9000)]),), TOPK)


def test_every_event_has_its_example() -> None:
    (mark,) = test_an_event_is_told_once.pytestmark  # type: ignore[attr-defined]
    assert [event for event, _ in mark.args[1]] == list(EVENTS)


def test_what_was_never_visited_is_told() -> None:
    coverage = covered(case(batch([(1, 9000)])))
    visited, never = coverage.cells_of(OPTIONS)
    assert (visited, len(visited) + len(never)) == (["beyond/1/decode/none/pr47766"], len(possible_cells()))
    assert "row crosses topk" in coverage.missing_events()
    assert "crossed topk" in coverage.untested()
    assert "no step" in Coverage().untested()
    assert not covered(case(batch([(1, TOPK - 1)]), batch([(1, TOPK)]))).untested()


@settings(max_examples=100, deadline=None)
@given(batch_mix_steps())
def test_a_neighbour_has_the_short_key_and_other_rows(steps: Steps) -> None:
    for step in steps:
        other = same_key_neighbour(step)
        if other is not None:
            assert metadata_key(other, "pr42982", TOPK, 32) == metadata_key(step, "pr42982", TOPK, 32)
            assert planner_lens(other, TOPK).tolist() != planner_lens(step, TOPK).tolist()


def test_the_mixes_reach_every_rare_event() -> None:
    coverage = Coverage()

    @seed(3)
    @settings(max_examples=200, database=None, deadline=None, phases=(Phase.generate,))
    @given(batch_mix_steps())
    def look(steps: Steps) -> None:
        coverage.add(case(*steps))

    look()
    assert coverage.missing_events() == []


HOLDS = {
    "ramp": lambda steps: any(q == s or q > 8 or s >= TOPK for step in steps for q, s in _pairs(step)),
    "continuation": lambda steps: all(max(step.query_lens) >= 64 for step in steps),
    "decoding": lambda steps: all(set(step.query_lens) <= {0, 1} for step in steps),
    "verifying": lambda steps: all(len({q for q in step.query_lens if q}) == 1 < step.max_query_len for step in steps),
    "mixed": lambda steps: all(len(step.query_lens) >= 2 for step in steps),
    "idle_between": lambda steps: steps[0] == steps[2] == steps[4] and 0 in steps[3].query_lens,
    "captures": lambda steps: steps[0].max_seq_len > 2 * TOPK,
    "preempted": lambda steps: len(steps[1].query_lens) < len(steps[0].query_lens) == len(steps[2].query_lens),
    "prefix_reused": lambda steps: steps[0] == steps[3],
    "permuted": lambda steps: len({tuple(sorted(_pairs(step))) for step in steps}) == 1,
    "churn": lambda steps: all(len(step.seq_lens) >= 1 for step in steps),
}


def _pairs(step: object) -> list[tuple[int, int]]:
    return list(zip(step.query_lens, step.seq_lens, strict=True))  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", MIXES)
def test_a_mix_holds_what_it_says(name: str) -> None:
    @settings(max_examples=20, database=None, deadline=None)
    @given(MIXES[name]())
    def look(steps: Steps) -> None:
        assert len(steps) >= 2
        assert HOLDS[name](steps)
        assert case(*steps).dims.topk == TOPK

    look()
