"""Distributions of budget used and of router margins: counted right, and added up over many runs."""

from __future__ import annotations

import math

import pytest
import torch

from dsv32_fast.options import PRESETS
from dsv32_fuzz.checks import add_histograms, merge
from dsv32_fuzz.checks.router import GateInput, RouterPrecision
from dsv32_fuzz.checks.step_numerics import StageInput, StageNumerics
from dsv32_fuzz.targets.intree import InTreeTarget
from dsv32_fuzz.verdict import MARGIN_EDGES, Status, Verdict
from dsv32_ref.bounds import EDGES, Approx, judge

TARGET = InTreeTarget(PRESETS["pr47766"])


def test_every_element_has_a_bin() -> None:
    error = torch.tensor([0.0, 2.0**-10, 2.0**-9, 0.75, 1.0, 1.5, math.nan], dtype=torch.float64)
    found = judge(error, Approx(torch.zeros(7, dtype=torch.float64), torch.ones(7, dtype=torch.float64)))
    assert found.histogram == (2, 1, 0, 0, 0, 0, 0, 0, 0, 0, 2, 2)
    assert len(found.histogram) == len(EDGES) + 1
    assert found.violations == found.histogram[-1]
    nothing = torch.zeros(0, dtype=torch.float64)
    empty = judge(nothing, Approx(nothing, nothing))
    assert sum(empty.histogram) == 0


def test_merged_they_add_up() -> None:
    parts = [
        Verdict(check="c", status=Status.PASSED, summary="", histograms={"a": [1, 2], "b": [5]}),
        Verdict(check="c", status=Status.FAILED, summary="", histograms={"a": [10, 20]}),
    ]
    assert merge(parts).histograms == {"a": [11, 22], "b": [5]}
    with pytest.raises(ValueError, match="zip"):
        add_histograms([{"a": [1]}, {"a": [1, 2]}])


def test_each_stage_is_counted_element_by_element() -> None:
    verdict = StageNumerics().run(StageInput(contexts=(20,), steps=((2,),)), TARGET)
    assert sum(map(sum, verdict.histograms.values())) == verdict.measured["elements"]
    assert {"budget used: attn_z", "budget used: gate_logits", "budget used: logits"} <= verdict.histograms.keys()


def test_a_flip_of_the_router_is_marked_and_lies_within_the_bound() -> None:
    verdict = RouterPrecision().run(GateInput(tokens=32), TARGET)
    same, flipped = (verdict.histograms[f"router margin: {name}"] for name in ("same choice", "flipped"))
    assert sum(same) + sum(flipped) == 32
    assert sum(flipped) == verdict.measured["rows_flipped"] > 0, "a bias of 7 in bf16 moves some choices"
    assert sum(flipped[MARGIN_EDGES.index(1.0) + 1 :]) == 0
