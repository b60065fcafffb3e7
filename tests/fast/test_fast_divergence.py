"""A free-running path leaves the reference at a certified flip, and an uncertified one is called a bug."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fast_worlds import KERNELS, SMALL, Event, Values, path, record

from dsv32_fast.kernels.selection import Admits
from dsv32_fast.options import PRESETS, Options
from dsv32_fuzz.stages.bounds import Recording
from dsv32_fuzz.stages.divergence import divergence, first_flip

MOE_LAYER = 1
pytestmark = pytest.mark.admits(Admits(topk=16))
"""Margins and flips of the small world: the harness is under test here."""


@pytest.mark.parametrize("name", ["baseline", "pr47766"])
def test_the_first_difference_is_a_certified_flip(name: str, events: list[Event], reference: list[Values]) -> None:
    events, reference = events[:20], reference[:20]
    found = divergence(record(path(PRESETS[name], KERNELS), events, None), reference)
    assert found.first is not None, "20 steps with random weights flip somewhere"
    assert found.first.certified, found.first
    assert found.first.margin >= 0
    # The pair changed places, so its scores moved by the margin or more; the kernel's fp32 scores of at most 16 may
    # differ from those formed here in double by an ulp (2^-20) each.
    assert found.first.moved >= found.first.margin - 2 * 2.0**-20
    assert len(found.logits) == len(events)


def test_forced_decisions_leave_no_flip(events: list[Event], reference: list[Values]) -> None:
    rec = record(path(Options(), KERNELS), events[:8], reference[:8])
    for step, forced in zip(rec.steps, reference, strict=False):
        for key in forced:
            if key[0] in ("index_topk", "gate_idx"):
                step[key] = forced[key]
    assert first_flip(rec, reference[:8]) is None


def _spoilt(rec: Recording, stage: str) -> Recording:
    """The recording with the best member of one sparse row replaced by the worst candidate."""
    steps = [dict(step) for step in rec.steps]
    long = [
        (n, r) for n, step in enumerate(steps) for r, p in enumerate(step["positions", -1]) if p >= SMALL.index_topk
    ]
    number, row = long[0]
    chosen = steps[number][stage, MOE_LAYER].clone()
    scores = steps[number]["index_score" if stage == "index_topk" else "gate_logits", MOE_LAYER][row]
    outside = [e for e in range(len(scores)) if e not in chosen[row].tolist() and bool(scores[e].isfinite())]
    best = max(chosen[row].tolist(), key=lambda e: float(scores[e]))
    chosen[row][chosen[row] == best] = min(outside, key=lambda e: float(scores[e]))
    steps[number][stage, MOE_LAYER] = chosen
    return replace(rec, steps=steps)


@pytest.mark.parametrize("stage", ["index_topk", "gate_idx"])
def test_a_wrong_choice_is_not_certified(stage: str, events: list[Event]) -> None:
    """The best member of a row exchanged for the worst candidate, against the path's own decisions as reference."""
    rec = record(path(Options(), KERNELS), events[:12], None)
    flip = first_flip(_spoilt(rec, stage), rec.steps)
    assert flip is not None
    assert not flip.certified
    assert flip.slack < 0
    assert flip.kind in {"index_topk": ("key",), "gate_idx": ("expert", "group")}[stage]


def test_identical_runs_have_no_flip(events: list[Event]) -> None:
    rec = record(path(Options(), KERNELS), events[:6], None)
    found = divergence(rec, rec.steps)
    assert found.first is None
    assert set(found.logits) == {0.0}
    assert not torch.equal(rec.of("logits", -1), torch.zeros_like(rec.of("logits", -1)))
