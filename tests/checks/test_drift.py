"""The long decode: passes on the path, and each of its two halves fails on defects that it is there for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from dsv32_fast.options import PRESETS
from dsv32_fuzz.events import Event, TableMade, VerdictReached
from dsv32_fuzz.faults import FAULTS
from dsv32_fuzz.stages.bounds import Recording
from dsv32_fuzz.stages.drift import FORCED, FREE, TRAFFIC, decode_drift, judge_forced, judge_free
from dsv32_fuzz.stages.long_decode import schedule
from dsv32_fuzz.stages.recorder import MIXED, weights
from dsv32_fuzz.targets import Target
from dsv32_fuzz.targets.intree import InTreeTarget
from dsv32_fuzz.verdict import Status, Verdict

TARGET = InTreeTarget(PRESETS["pr47766"])
Found = dict[tuple[str, str], Verdict]


def ran(target: Target, steps: int = 10) -> tuple[Found, list[Event]]:
    events = list(decode_drift(target, steps, 2, 0))
    return {(e.scope, e.verdict.check): e.verdict for e in events if isinstance(e, VerdictReached)}, events


def test_the_path_stays_beside_the_reference() -> None:
    found, events = ran(TARGET)
    assert list(found) == [(traffic, check) for traffic in TRAFFIC for check in (FORCED, FREE)]
    assert {verdict.status for verdict in found.values()} == {Status.PASSED}
    for traffic in TRAFFIC:
        forced, free = found[traffic, FORCED], found[traffic, FREE]
        assert forced.measured["steps_judged"] == 2
        assert 0 < float(forced.measured["worst_budget_used"]) <= 1
        assert sum(map(sum, forced.histograms.values())) == forced.measured["elements"]
        assert free.measured["choices"] == 3 * int(forced.measured["rows"])
        assert float(forced.measured["largest_logits_error"]) > 0
    (table,) = [event for event in events if isinstance(event, TableMade)]
    assert [(row["traffic"], row["step"]) for row in table.rows] == [(t, s) for t in TRAFFIC for s in range(10)]


@pytest.mark.parametrize(
    ("fault", "check", "traffic", "told"),
    [
        ("attention_lost_key", FORCED, TRAFFIC, "attn_z 0"),
        ("topk_pads_with_zero", FREE, TRAFFIC, "keys of layer 0: row 0: malformed choice"),
        ("mtp_same_window", FORCED, ("mixed",), "access to row -1"),
    ],
)
def test_a_defect_is_seen_where_it_is(fault: str, check: str, traffic: tuple[str, ...], told: str) -> None:
    with FAULTS[fault].inject() as target:
        found, _ = ran(target, 11)
    assert {scope for scope, name in found if name == check and found[scope, name].status is Status.FAILED} == {
        *traffic
    }
    assert told in found[traffic[0], check].summary


class NoKernels:
    name, evidence, caches, options, kernels = "plans only", "emulated", True, None, None

    def open(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError


class Broken:
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"no {name}")


def test_what_shows_no_kernels_is_skipped_and_what_raises_fails() -> None:
    found, _ = ran(NoKernels())
    assert {verdict.status for verdict in found.values()} == {Status.SKIPPED}
    found, _ = ran(replace(TARGET, kernels=Broken()), 2)  # type: ignore[arg-type]
    assert {verdict.status for verdict in found.values()} == {Status.FAILED}
    assert "no " in found["decode", FORCED].summary


def test_nothing_recorded_is_mistrusted() -> None:
    rec = Recording(config=MIXED, weights=weights(MIXED), options=PRESETS["pr47766"], steps=[])
    assert judge_forced(rec, [], 8).status is judge_free(rec, []).status is Status.MISTRUSTED


def lengths_after(traffic: str) -> Iterator[tuple[int, int]]:
    """Tokens of each live request after each step, before drafts are rejected, and its new ones."""
    lengths: dict[int, int] = {}
    for event in schedule(200, 0, MIXED, traffic=traffic):
        for request, ids in event.tokens.items():
            lengths[request] = lengths.get(request, 0) + len(ids)
            yield lengths[request], len(ids)
        lengths |= dict(event.truncate)


def test_the_schedules_hold_what_they_promise() -> None:
    decode, mixed = list(lengths_after("decode")), list(lengths_after("mixed"))
    assert {new for _, new in decode} == {1}
    assert {0, 1, 2, 3, 4, 9} <= {new for _, new in mixed}
    for seen in (decode, mixed):
        assert {MIXED.index_topk - 1, MIXED.index_topk, MIXED.index_topk + 1} <= {length for length, _ in seen}
        assert max(length for length, _ in seen) > 3 * MIXED.index_topk
    assert schedule(30, 1, MIXED) == schedule(30, 1, MIXED) != schedule(30, 2, MIXED)
