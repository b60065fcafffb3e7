"""The checks of experts and interfaces pass on the faultless path and see each fault."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from check_trials import faultless, faulty, killed
from torch import Tensor

from dsv32_fast import experts
from dsv32_fast.kernels.emulated import api
from dsv32_fast.options import PRESETS
from dsv32_fuzz.checks.interface import (
    DEGENERATE,
    REFUSED,
    ArgumentErrors,
    DegenerateInput,
    DegenerateShapes,
    RefusedInput,
)
from dsv32_fuzz.checks.moe import FusedExperts, Mixture, MoeInput
from dsv32_fuzz.targets.intree import InTreeTarget
from dsv32_fuzz.verdict import Status

TARGET = InTreeTarget(PRESETS["pr47766"])
Fault = Callable[..., Any]


@pytest.mark.parametrize("check", [FusedExperts, Mixture])
def test_faultless(check: Any) -> None:
    found = faultless(check)
    assert 0.3 < found.worst_budget_used <= 1


def test_foreign_experts_alone_are_mistrusted() -> None:
    drawn = MoeInput(tokens=1, experts=4, chosen=1, remote=2, ids="one_expert_each")
    assert FusedExperts().run(drawn, TARGET).status is Status.MISTRUSTED


def _moe(change: Callable[[list[Any], dict[str, Any]], None]) -> Fault:
    def moe(*args: Any, **named: Any) -> Tensor:
        given = list(args)
        change(given, named)
        return api.fused_moe(*given, **named)

    return moe


def _unweighted(args: list[Any], named: dict[str, Any]) -> None:
    args[3] = torch.ones_like(args[3])


def _scaled_again(args: list[Any], named: dict[str, Any]) -> None:
    args[3] = args[3] * 2.5


def _weights_of_the_neighbour(args: list[Any], named: dict[str, Any]) -> None:
    args[3] = args[3].roll(1, 0)


def _up_before_gate(args: list[Any], named: dict[str, Any]) -> None:
    gate, up = args[1].chunk(2, 1)
    args[1] = torch.cat([up.view(torch.uint8), gate.view(torch.uint8)], 1).view(args[1].dtype)


def _last_expert_lost(args: list[Any], named: dict[str, Any]) -> None:
    """The sorting of tokens by expert stops one short."""
    last = len(args[1]) - 1 if named.get("expert_mask") is None else len(named["expert_mask"]) - 1
    args[3] = args[3].masked_fill(args[4] == last, 0.0)


@pytest.mark.parametrize(
    "change", [_unweighted, _scaled_again, _weights_of_the_neighbour, _up_before_gate, _last_expert_lost]
)
def test_experts_kill(change: Any) -> None:
    assert "routed experts: " in killed(FusedExperts, faulty(fused_moe=_moe(change)))


def _mask_ignored(args: list[Any], named: dict[str, Any]) -> None:
    """Foreign experts are computed with the weights of the first own one."""
    mask = named.pop("expert_mask", None)
    if mask is not None:
        args[4] = (args[4] - int((mask == 0).sum())).clamp_min(0)


def test_experts_kill_foreign_experts() -> None:
    assert "routed experts: " in killed(FusedExperts, faulty(fused_moe=_moe(_mask_ignored)))


def _tokens_mixed(*args: Any, **named: Any) -> Tensor:
    """A row more than one is added to its neighbour."""
    out = api.fused_moe(*args, **named)
    return out + 2.0**-4 * out.roll(1, 0)


def test_experts_kill_mixed_tokens() -> None:
    assert "routed experts" in killed(FusedExperts, faulty(fused_moe=_tokens_mixed))


def _shared_twice(x: Tensor, weights: Tensor, ids: Tensor, w: Any, kernels: Any) -> Tensor:
    routed = experts.routed(x, weights, ids, w, kernels)
    return routed if w.shared is None else routed + 2 * experts.mlp(x, w.shared, kernels)


def _shared_lost(x: Tensor, weights: Tensor, ids: Tensor, w: Any, kernels: Any) -> Tensor:
    return experts.routed(x, weights, ids, w, kernels)


def _shared_scaled(x: Tensor, weights: Tensor, ids: Tensor, w: Any, kernels: Any) -> Tensor:
    """sglang #28237: the shared expert at 1 / 2.5."""
    routed = experts.routed(x, weights, ids, w, kernels)
    return routed if w.shared is None else routed + experts.mlp(x, w.shared, kernels) / 2.5


@pytest.mark.parametrize("fault", [_shared_twice, _shared_lost, _shared_scaled])
def test_mixture_kills(monkeypatch: pytest.MonkeyPatch, fault: Any) -> None:
    monkeypatch.setattr(experts, "mixture", fault)
    assert "ffn_out: " in killed(Mixture, TARGET)


def test_mixture_kills_a_missing_activation(monkeypatch: pytest.MonkeyPatch) -> None:
    def mlp(x: Tensor, w: Any, kernels: Any) -> Tensor:
        gate, up = (experts.linear(x, part, kernels).float() for part in w.gate_up)
        return experts.linear((gate * up).to(x.dtype), w.down, kernels)

    monkeypatch.setattr(experts, "mlp", mlp)
    assert "ffn_out: " in killed(Mixture, TARGET)


@pytest.mark.parametrize("kernel", sorted(DEGENERATE))
@pytest.mark.parametrize("rows", [0, 1, 2])
def test_degenerate_shapes_pass(kernel: str, rows: Any) -> None:
    verdict = DegenerateShapes().run(DegenerateInput(kernel=kernel, rows=rows), TARGET)
    assert verdict.status is Status.PASSED, verdict.summary


@pytest.mark.parametrize("call", sorted(REFUSED))
def test_bad_arguments_are_refused(call: str) -> None:
    verdict = ArgumentErrors().run(RefusedInput(call=call), TARGET)
    assert verdict.status is Status.PASSED, verdict.summary


def _writes_nothing(*args: Any, **named: Any) -> None:
    """Returns at once where there is one row."""
    if len(args[0]) != 1:
        api.biased_grouped_topk(*args, **named)


def _fp32_output(*args: Any, **named: Any) -> Tensor:
    return api.fused_moe(*args, **named).float()


def test_degenerate_shapes_kill() -> None:
    assert "is not written for 1 rows" in killed(DegenerateShapes, faulty(biased_grouped_topk=_writes_nothing))
    assert "fused_moe: output" in killed(DegenerateShapes, faulty(fused_moe=_fp32_output))


def _accepts_any_id(x: Tensor, w1: Tensor, w2: Tensor, weights: Tensor, ids: Tensor, **named: Any) -> Tensor:
    return api.fused_moe(x, w1, w2, weights, ids.clamp(0, len(w1) - 1), **named)


def _says_nothing(*args: Any, **named: Any) -> None:
    try:
        api.biased_grouped_topk(*args, **named)
    except (TypeError, ValueError, IndexError) as error:
        raise ValueError("invalid argument") from error


def test_argument_errors_kill() -> None:
    assert "accepted" in killed(ArgumentErrors, faulty(fused_moe=_accepts_any_id))
    assert "does not name" in killed(ArgumentErrors, faulty(biased_grouped_topk=_says_nothing))


@pytest.mark.parametrize("check", [DegenerateShapes, ArgumentErrors])
def test_an_unknown_name_is_bad_input(check: Any) -> None:
    field = "kernel" if check is DegenerateShapes else "call"
    with pytest.raises(ValueError, match="is unknown; choose one of"):
        check().run(check.input_type(**{field: "nothing"}), TARGET)
