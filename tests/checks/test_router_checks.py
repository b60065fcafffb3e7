"""The router checks pass on the faultless path and see each fault, at the place where it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from check_trials import faultless, faulty, killed, trial
from torch import Tensor

from dsv32_fast import packing, router
from dsv32_fast.kernels.emulated import api
from dsv32_fast.kernels.emulated import router as emulated
from dsv32_fast.options import PRESETS
from dsv32_fuzz.checks.router import RouterChoice, RouterPrecision
from dsv32_fuzz.checks.router_dispatch import DispatchInput, RouterDispatch
from dsv32_fuzz.strategies.router import SHAPES, RouterRows
from dsv32_fuzz.targets.intree import InTreeTarget
from dsv32_fuzz.verdict import Status


@pytest.mark.parametrize("preset", ["baseline", "pr47766"])
def test_choice_passes(preset: str) -> None:
    found = faultless(RouterChoice, preset)
    assert 0.1 < found.worst_budget_used <= 1
    if preset == "pr47766":  # its ties do fall another way than in the reference
        assert found.measured["rows_flipped"] > 0
    assert found.measured["rows_decided"] > found.measured["rows"] // 3


@pytest.mark.parametrize("preset", ["baseline", "pr47766"])
def test_precision_passes(preset: str) -> None:
    """With fp32 nothing flips; with bf16 certified flips are measured, and bias values are lost."""
    found = faultless(RouterPrecision, preset)
    lossless = preset == "baseline"
    assert (found.measured["rows_flipped"] == 0) == lossless
    assert (found.measured["bias_values_left"] == found.measured["bias_values"]) == lossless
    assert (found.measured["slots_moved"] == 0) == lossless


def test_dispatch_passes_and_counts_rows_without_the_factor() -> None:
    found = faultless(RouterDispatch)
    assert found.measured["rows_unscaled"] == found.measured["rows_beyond"] > 0


def test_rows_of_nan_alone_are_mistrusted() -> None:
    verdict = RouterChoice().run(RouterRows(rows=("all_nan", "one_nan")), InTreeTarget(PRESETS["baseline"]))
    assert verdict.status is Status.MISTRUSTED


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_is_admitted(shape: Any) -> None:
    verdict = RouterChoice().run(RouterRows(shape=shape), InTreeTarget(PRESETS["baseline"]))
    assert verdict.status is Status.PASSED


Call = tuple[Tensor, Tensor, Tensor, Tensor, int, int, bool, float]
Fault = Callable[..., None]


def _scores(gating: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    scores = gating.float().sigmoid()
    return scores, scores + bias.float()


def biased_weights(gating: Tensor, bias: Tensor, weights: Tensor, ids: Tensor, *rest: Any) -> None:
    """vLLM #12002: the biased score is used as the weight."""
    api.biased_grouped_topk(gating, bias, weights, ids, *rest)
    picked = _scores(gating, bias)[1].gather(1, ids.long())
    weights.copy_(picked / picked.sum(1, keepdim=True) * rest[3])


def unscaled(gating: Tensor, bias: Tensor, weights: Tensor, ids: Tensor, *rest: Any) -> None:
    api.biased_grouped_topk(gating, bias, weights, ids, *rest[:3], 1.0)


def scaled_twice(gating: Tensor, bias: Tensor, weights: Tensor, ids: Tensor, *rest: Any) -> None:
    api.biased_grouped_topk(gating, bias, weights, ids, *rest)
    weights.mul_(rest[3])


def masked_with_zero(gating: Tensor, bias: Tensor, weights: Tensor, ids: Tensor, *rest: Any) -> None:
    """vLLM #13474: experts of dropped groups count as 0, not as -inf."""
    api.biased_grouped_topk(gating, bias, weights, ids, *rest)
    groups, kept, scores_biased = rest[0], rest[1], _scores(gating, bias)
    grouped = scores_biased[1].unflatten(1, (groups, -1))
    worth = grouped.topk(min(2, grouped.shape[2]), 2).values.sum(2).nan_to_num(-9.0)
    dropped = torch.ones_like(worth, dtype=torch.bool).scatter(1, worth.topk(kept, 1).indices, False)
    masked = grouped.masked_fill(dropped[..., None], 0.0).flatten(1)
    _write(scores_biased[0], masked, weights, ids, rest[3])


def best_of_each_group(gating: Tensor, bias: Tensor, weights: Tensor, ids: Tensor, *rest: Any) -> None:
    """Groups ranked by their best expert instead of their two best."""
    groups, kept, scores_biased = rest[0], rest[1], _scores(gating, bias)
    grouped = scores_biased[1].nan_to_num(-9.0).unflatten(1, (groups, -1))
    dropped = torch.ones(grouped.shape[:2], dtype=torch.bool).scatter(1, grouped.amax(2).topk(kept, 1).indices, False)
    _write(scores_biased[0], grouped.masked_fill(dropped[..., None], -9e9).flatten(1), weights, ids, rest[3])


def _write(scores: Tensor, ranked: Tensor, weights: Tensor, ids: Tensor, factor: float) -> None:
    ids.copy_(ranked.sort(dim=1, descending=True, stable=True).indices[:, : ids.shape[1]])
    picked = scores.gather(1, ids.long())
    weights.copy_(picked / picked.sum(1, keepdim=True) * factor)


def one_expert_twice(gating: Tensor, bias: Tensor, weights: Tensor, ids: Tensor, *rest: Any) -> None:
    """vLLM #39391: a row of NaN gives one expert over and over."""
    api.biased_grouped_topk(gating, bias, weights, ids, *rest)
    ids[gating.isnan().all(1)] = 0


def batch_mates(gating: Tensor, bias: Tensor, weights: Tensor, ids: Tensor, *rest: Any) -> None:
    """More than one row: another order of the sum, so another last bit."""
    api.biased_grouped_topk(gating, bias, weights, ids, *rest)
    if len(gating) > 1:
        weights.mul_(1 + 2.0**-23)


def one_row_more(gating: Tensor, bias: Tensor, weights: Tensor, ids: Tensor, *rest: Any) -> None:
    """Writes the row behind the last one, where the buffer has one."""
    api.biased_grouped_topk(gating, bias, weights, ids, *rest)
    if ids.untyped_storage().nbytes() > ids.nbytes:
        ids.as_strided((len(ids) + 1, ids.shape[1]), ids.stride())[-1] = 0


def adds_to_its_output(gating: Tensor, bias: Tensor, weights: Tensor, ids: Tensor, *rest: Any) -> None:
    """Relies on a buffer of zeros; only where the check filled it, since what `torch.empty` holds is left to chance."""
    held = weights.clone() if weights.untyped_storage().nbytes() > weights.nbytes else torch.zeros_like(weights)
    api.biased_grouped_topk(gating, bias, weights, ids, *rest)
    weights.add_(held)


CHOICE_FAULTS: list[tuple[Fault, str]] = [
    (biased_weights, "gate_w"),
    (unscaled, "sum of gate_w"),
    (scaled_twice, "sum of gate_w"),
    (masked_with_zero, "gate_idx"),
    (best_of_each_group, "gate_idx"),
    (one_expert_twice, "distinct experts"),
    (batch_mates, "alone in its batch"),
    (one_row_more, "behind the last one"),
    (adds_to_its_output, "not empty"),
]


@pytest.mark.parametrize(("fault", "place"), CHOICE_FAULTS, ids=[fault.__name__ for fault, _ in CHOICE_FAULTS])
def test_choice_kills(fault: Fault, place: str) -> None:
    assert place in killed(RouterChoice, faulty("baseline", biased_grouped_topk=fault))


def test_choice_kills_an_argument_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path passes no scaling factor on."""
    genuine = router.choose_experts

    def forgets(logits: Tensor, bias: Tensor, config: Any, kernels: Any) -> tuple[Tensor, Tensor]:
        return genuine(logits, bias, config.replace(route_scale=1.0), kernels)

    monkeypatch.setattr(router, "choose_experts", forgets)
    assert "sum of gate_w" in killed(RouterChoice, InTreeTarget(PRESETS["pr47766"]))


def test_precision_kills_a_bias_rounded_while_packing(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM #41760: the bias loses its bits at load and gets its type back afterwards."""
    genuine = packing.Gate

    def rounded(*, weight: Tensor, bias: Tensor) -> packing.Gate:
        return genuine(weight=weight, bias=bias.bfloat16().to(bias.dtype))

    monkeypatch.setattr(packing, "Gate", rounded)
    assert "bias at the kernel's door" in killed(RouterPrecision, InTreeTarget(PRESETS["baseline"]), examples=10)


def _stores_bf16(x: Tensor, gate: packing.Gate, logits: str, gemm: str, casts: router.Casts) -> Tensor:
    stored = (x.float() @ gate.weight.float().T).bfloat16()
    return stored if logits == "bf16" else casts.widen(stored)


def _casts_twice(x: Tensor, gate: packing.Gate, logits: str, gemm: str, casts: router.Casts) -> Tensor:
    casts.widen(x)
    return router_gate_logits(x, gate, logits, gemm, casts)  # type: ignore[arg-type]


def _other_row(x: Tensor, gate: packing.Gate, logits: str, gemm: str, casts: router.Casts) -> Tensor:
    shifted = dataclasses.replace(gate, weight=gate.weight.roll(1, 0))
    return router_gate_logits(x, shifted, logits, gemm, casts)  # type: ignore[arg-type]


router_gate_logits = router.gate_logits


@pytest.mark.parametrize(
    ("fault", "preset", "place"),
    [
        (_stores_bf16, "baseline", "gate_logits"),
        (_casts_twice, "pr47766", "1 casts"),
        (_casts_twice, "baseline", "2 casts"),
        (_other_row, "pr47766", "gate_logits"),
    ],
)
def test_precision_kills(monkeypatch: pytest.MonkeyPatch, fault: Any, preset: str, place: str) -> None:
    monkeypatch.setattr(router, "gate_logits", fault)
    assert place in killed(RouterPrecision, InTreeTarget(PRESETS[preset]), examples=10)


def test_precision_kills_a_flip_that_no_rounding_explains() -> None:
    assert "ideal router" in killed(RouterPrecision, faulty(biased_grouped_topk=best_of_each_group), examples=30)


def _switching_at(limit: int) -> Fault:
    def route(gating: Tensor, bias: Tensor, weights: Tensor, ids: Tensor, *rest: Any) -> None:
        if len(gating) <= limit:
            emulated.biased_grouped_topk_hip(gating, bias, weights, ids, *rest)
        else:
            emulated.moe_fused_gate(gating, bias, weights, ids, rest[0], rest[1], ids.shape[1], 0)

    return route


def _drops_best_groups(gating: Tensor, bias: Tensor, weights: Tensor, ids: Tensor, *rest: Any) -> None:
    if len(gating) <= 212:
        emulated.biased_grouped_topk_hip(gating, bias, weights, ids, *rest)
    else:
        best_of_each_group(gating, bias, weights, ids, *rest)


def _forgets_to_renormalise(gating: Tensor, bias: Tensor, weights: Tensor, ids: Tensor, *rest: Any) -> None:
    api.biased_grouped_topk(gating, bias, weights, ids, *rest)
    if len(gating) > 212:
        weights.copy_(gating.float().sigmoid().gather(1, ids.long()))


@pytest.mark.parametrize(
    ("fault", "place"),
    [
        (_switching_at(211), "212 rows"),
        (_switching_at(0), "gate_w"),
        (_drops_best_groups, "gate_idx"),
        (_forgets_to_renormalise, "sum of gate_w"),
    ],
)
def test_dispatch_kills(fault: Fault, place: str) -> None:
    assert place in killed(RouterDispatch, faulty(biased_grouped_topk=fault))


def test_dispatch_names_the_row_count() -> None:
    target = faulty(biased_grouped_topk=_switching_at(211))
    verdict = RouterDispatch().run(DispatchInput(beyond=0), target)
    assert verdict.status is Status.FAILED
    assert "a batch of 212 rows" in verdict.summary


def test_dispatch_needs_a_device_whose_size_can_change() -> None:
    hardware = dataclasses.replace(InTreeTarget(PRESETS["baseline"]), evidence="hardware")
    assert "54 272" in RouterDispatch().inapplicable(hardware)
    assert RouterDispatch().inapplicable(InTreeTarget(PRESETS["baseline"])) == ""


def test_trials_are_repeatable() -> None:
    target = InTreeTarget(PRESETS["pr47766"])
    assert trial(RouterChoice, target, examples=10) == trial(RouterChoice, target, examples=10)
