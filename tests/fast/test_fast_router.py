"""The router of the optimised path: sets equal to the reference's or legal flips, and the known smallest flips."""

from __future__ import annotations

import math
from typing import Literal

import pytest
import torch
from torch import Tensor

from dsv32_fast.kernels.protocol import Kernels
from dsv32_fast.kernels.selection import Admits, current
from dsv32_fast.packing import Gate
from dsv32_fast.router import Casts, GateGemm, choose_experts, gate_logits, weights_for
from dsv32_ref import router as reference
from dsv32_ref.bounds import BF16, Approx, Arithmetic, certify_router, exact, round_to
from dsv32_ref.bounds.router import logits as logits_bound
from dsv32_ref.bounds.router import router_scores
from dsv32_ref.config import Config


@pytest.fixture
def kernels(kernels: Kernels) -> Kernels:
    """For tensors on the host."""
    return current().from_host if current().limits.defined else kernels


Type = Literal["fp32", "bf16"]
DSV3 = Config()
ARITH = Arithmetic()
TORCH = {"fp32": torch.float32, "bf16": torch.bfloat16}


def _route(
    x_TM: Tensor,
    weight_EM: Tensor,
    bias_E: Tensor,
    types: tuple[Type, Type],
    config: Config,
    kernels: Kernels,
    gemm: GateGemm = "fp32",
) -> tuple[Tensor, Tensor, Tensor]:
    gate = Gate(weight=weight_EM.bfloat16(), bias=bias_E.to(TORCH[types[1]]))
    logits_TE = gate_logits(x_TM.bfloat16(), gate, types[0], gemm, Casts())
    return logits_TE, *choose_experts(logits_TE, gate.bias, config, kernels)


@pytest.mark.parametrize("spread", [0.05, 0.002], ids=["spread", "near ties"])
@pytest.mark.parametrize("types", [("fp32", "fp32"), ("bf16", "fp32"), ("fp32", "bf16"), ("bf16", "bf16")])
def test_sets_equal_the_reference_or_flip_within_the_roundings_asked_for(
    kernels: Kernels, types: tuple[Type, Type], spread: float
) -> None:
    """Against the ideal fp32 router on the same activations: the bound holds the roundings of logits and bias only."""
    g = torch.Generator().manual_seed(7)
    x_TM, weight_EM = (torch.randn(n, 64, generator=g).bfloat16().float() for n in (256, 256))
    weight_EM, bias_E = (weight_EM * 0.125).bfloat16().float(), 7.0 + spread * torch.randn(256, generator=g)
    _, ids_TK, _ = _route(x_TM, weight_EM, bias_E, types, DSV3, kernels)
    ideal_TK = reference.choose_experts(x_TM.double() @ weight_EM.double().T, bias_E.double(), DSV3)
    logits = logits_bound(exact(x_TM), exact(weight_EM), ARITH)
    logits = round_to(logits, BF16) if types[0] == "bf16" else logits
    moved_E = (bias_E.double() - bias_E.bfloat16().double()).abs() * float("bf16" in types)
    biased = router_scores(logits, Approx(bias_E.double(), moved_E), ARITH)[1]
    certificate = certify_router(biased.value, biased.err, ideal_TK, ids_TK.long(), groups=8, kept=4, arith=ARITH)
    assert certificate.passed, certificate.describe("gate_idx")
    flipped = int((certificate.flips > 0).sum())
    assert flipped == 0 if types == ("fp32", "fp32") else flipped > 0


def _in_place(first: tuple[float, float], second: tuple[float, float], config: Config) -> tuple[Tensor, Tensor]:
    """(logit, bias) of two experts, 0 and 1, that compete for the last place among 256 (or for the only one of 2)."""
    logits_E = torch.zeros(config.n_routed_experts)
    bias_E = torch.full((config.n_routed_experts,), -20.0)
    for expert in (32, 33, 34, 64, 65, 96, 97)[: config.n_activated_experts - 1]:
        bias_E[expert] = 20.0
    for expert, (logit, bias) in enumerate((first, second)):
        logits_E[expert], bias_E[expert] = logit, bias
    return logits_E, bias_E


TWO = Config(n_routed_experts=2, n_expert_groups=1, n_limited_groups=1, n_activated_experts=1)
ROUTED_BY_TWO = pytest.param(TWO, marks=pytest.mark.admits(Admits(router=(2, 1, 1, 1))), id="two experts")
WORLDS = pytest.mark.parametrize("config", [ROUTED_BY_TWO, pytest.param(DSV3, id="256 experts")])
ALL_TYPES = pytest.mark.parametrize("types", [("fp32", "fp32"), ("bf16", "fp32"), ("fp32", "bf16"), ("bf16", "bf16")])


def _winner(ids_TK: Tensor) -> int:
    (winner,) = {0, 1} & set(ids_TK[0].tolist())
    return winner


@WORLDS
@ALL_TYPES
def test_biases_that_bf16_makes_equal(kernels: Kernels, config: Config, types: tuple[Type, Type]) -> None:
    """sglang #37133: biases 6.990 and 7.010 are both 7.0 in bf16; scores 0.500 and 0.490, so fp32 picks expert 1.

    bf16 logits bring the bias down with them: the kernel takes one type for both.
    """
    odds = math.log(0.490 / 0.510)
    logits_E, bias_E = _in_place((0.0, 6.990), (odds, 7.010), config)
    bias_E = bias_E.to(TORCH[types[1]])
    ids_TK, _ = choose_experts(logits_E[None].to(TORCH[types[0]]), bias_E, config, kernels)
    assert _winner(ids_TK) == (0 if "bf16" in types else 1)


@WORLDS
@ALL_TYPES
@pytest.mark.parametrize("gemm", ["fp32", "bf16"])
def test_logits_that_bf16_makes_equal(
    kernels: Kernels, config: Config, types: tuple[Type, Type], gemm: GateGemm
) -> None:
    """sglang #34857: logits 1 + 2^-9 and 1 tie in bf16, and then a bias of 1e-4 decides; fp32 picks expert 0.

    A GEMM that stores bf16 loses the difference before anything is cast to fp32.
    """
    _, bias_E = _in_place((0.0, 0.0), (0.0, 1e-4), config)
    weight_EM = torch.zeros(config.n_routed_experts, 2)
    weight_EM[0], weight_EM[1] = torch.tensor([1.0, 2.0**-9]), torch.tensor([1.0, 0.0])
    logits_TE, ids_TK, _ = _route(torch.ones(1, 2), weight_EM, bias_E, types, config, kernels, gemm)
    assert _winner(ids_TK) == (1 if types[0] == "bf16" or gemm == "bf16" else 0)
    assert logits_TE.dtype == TORCH[types[0]]


@pytest.mark.parametrize(
    ("logits", "gemm", "count"), [("fp32", "fp32", 1), ("fp32", "bf16", 1), ("bf16", "fp32", 0), ("bf16", "bf16", 0)]
)
def test_casts_are_counted(logits: Type, gemm: GateGemm, count: int) -> None:
    """One launch of a cast kernel per layer for fp32 logits, none for bf16 (vLLM #42982)."""
    casts = Casts()
    gate = Gate(weight=torch.ones(4, 2, dtype=torch.bfloat16), bias=torch.zeros(4))
    gate_logits(torch.ones(1, 2, dtype=torch.bfloat16), gate, logits, gemm, casts)
    assert casts.bf16_to_fp32 == count
    assert casts.widen(torch.ones(1)).dtype == torch.float32
    assert casts.bf16_to_fp32 == count, "fp32 is not cast"


def test_weights_of_a_replaced_choice(kernels: Kernels) -> None:
    g = torch.Generator().manual_seed(1)
    logits_TE, bias_E = torch.randn(3, 256, generator=g), torch.full((256,), 5.0)
    ids_TK, weights_TK = choose_experts(logits_TE, bias_E, DSV3, kernels)
    other_TK = ids_TK.flip(1).clone()
    other_TK[2, 0] = next(e for e in range(256) if e not in ids_TK[2].tolist())
    found_TK = weights_for(other_TK, ids_TK, weights_TK, logits_TE, DSV3)
    assert torch.equal(found_TK[:2], weights_TK[:2].flip(1))
    expected = reference.expert_weights(logits_TE[2:].double(), other_TK[2:].long(), DSV3)
    torch.testing.assert_close(found_TK[2:].double(), expected, rtol=16 * 2.0**-24, atol=0)
