"""Checks of the experts: AITER's fused kernel, and the path's mixture with the shared expert.

Truth: the sum over a token's experts in real arithmetic with `dsv32_ref.bounds.moe`, from the operands that the kernel
received. Weights of the choice arrive scaled, so a factor that is applied once more shows at once.

Legend: T tokens, M model width, F inner width, E experts, K chosen experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import torch
from hypothesis import strategies as st
from torch import Tensor

from dsv32_fast import experts as subject
from dsv32_fast.kernels.emulated.quant import QuantType
from dsv32_fast.layers import Linear
from dsv32_fast.packing import Experts, Gate, Mlp, Moe
from dsv32_fuzz.checks.findings import Findings, device_of, same_bits
from dsv32_fuzz.checks.own_input import InputCheck
from dsv32_fuzz.strategies.steps import booleans, integers, sampled_from
from dsv32_fuzz.targets import Target
from dsv32_fuzz.verdict import Verdict
from dsv32_ref.bounds import BF16, Approx, Arithmetic, exact, round_to
from dsv32_ref.bounds import moe as bounds
from dsv32_ref.bounds.elementary import add, mul, silu
from dsv32_ref.bounds.linear import linear
from dsv32_ref.bounds.quant import ScaleRule, fake_quant
from dsv32_ref.quant import quantise_blocks

ARITH = Arithmetic()
GROUP = ScaleRule(ue8m0=False, amax_floor=1e-10)
"""How the kernel quantises activations with `QuantType.per_1x128`."""
Ids = Literal["random", "same", "first_and_last", "one_expert_each"]


class MoeInput(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tokens and their experts."""

    tokens: int = 2
    experts: int = 8
    chosen: int = 2
    fp8: bool = False
    remote: int = 0
    """The first so many experts are on another rank (expert parallelism); 0 passes no mask."""
    ids: Ids = "random"
    shared: bool = True
    seed: int = 0


@st.composite
def moe_inputs(draw: st.DrawFn) -> MoeInput:
    """Few tokens; fp8 blocks now and then."""
    chosen = draw(sampled_from((2, 1, 4)))
    return MoeInput(
        tokens=draw(sampled_from((2, 1, 5))),
        experts=draw(sampled_from((8, 4))),
        chosen=chosen,
        fp8=draw(sampled_from((False, False, True))),
        remote=draw(sampled_from((0, 0, 1, 2))),
        ids=draw(sampled_from(("random", "same", "first_and_last", "one_expert_each"))),
        shared=draw(booleans()),
        seed=draw(integers(0, 1 << 16)),
    )


@dataclass(frozen=True)
class _World:
    """Operands on the host; `w1` and `w2` hold the values that the packed weights stand for."""

    x_TM: Tensor
    ids_TK: Tensor
    weights_TK: Tensor
    packed: Moe
    w1_EFM: Tensor
    w2_EMF: Tensor

    @classmethod
    def drawn(cls, drawn: MoeInput, hardware: bool) -> _World:
        g = torch.Generator().manual_seed(drawn.seed)
        M, F = (128, 128) if drawn.fp8 or hardware else (64, 32)  # more than one tile of 16 both ways

        def matrix(rows: int, columns: int) -> Tensor:
            drawn_RC: Tensor = torch.randn(rows, columns, generator=g) * columns**-0.5
            return drawn_RC.bfloat16()

        w1, w2 = [matrix(2 * F, M) for _ in range(drawn.experts)], [matrix(M, F) for _ in range(drawn.experts)]
        if drawn.fp8:
            blocks = [[quantise_blocks(w.float()) for w in stack] for stack in (w1, w2)]
            parts = [torch.stack([b.bits for b in stack]) for stack in blocks]
            scales = [torch.stack([b.scale for b in stack]) for stack in blocks]
            values = [torch.stack([b.dequantise(torch.float64) for b in stack]) for stack in blocks]
            packed = Experts(w1=parts[0], w2=parts[1], w1_scale=scales[0], w2_scale=scales[1])
        else:
            values = [torch.stack(w1), torch.stack(w2)]
            packed = Experts(w1=values[0], w2=values[1], w1_scale=None, w2_scale=None)
        shared = Mlp(
            gate_up=(Linear(weight=matrix(F, M)), Linear(weight=matrix(F, M))), down=Linear(weight=matrix(M, F))
        )
        gate = Gate(weight=matrix(drawn.experts, M), bias=torch.zeros(drawn.experts))
        moe = Moe(gate=gate, experts=packed, shared=shared if drawn.shared else None)
        ids_TK = _ids(drawn, g)
        weights_TK = 2.5 * torch.rand(ids_TK.shape, generator=g)
        x_TM = torch.randn(drawn.tokens, M, generator=g).bfloat16()
        return cls(x_TM, ids_TK, weights_TK, moe, *values)


def _ids(drawn: MoeInput, g: torch.Generator) -> Tensor:
    """int32 [T, K], distinct within a row."""
    T, E, K = drawn.tokens, drawn.experts, drawn.chosen
    if drawn.ids == "same":
        ids_TK = torch.randperm(E, generator=g)[:K].expand(T, K)
    elif drawn.ids == "first_and_last":
        ids_TK = torch.tensor([E - 1, 0, *range(1, E - 1)])[:K].expand(T, K)
    elif drawn.ids == "one_expert_each":
        ids_TK = (torch.arange(T)[:, None] + torch.arange(K)) % E
    else:
        ids_TK = torch.stack([torch.randperm(E, generator=g)[:K] for _ in range(T)])
    return ids_TK.int().contiguous()


def routed_bound(world: _World, fp8: bool, first_own: int) -> Approx:
    """sum_k weight_k expert_k(x) [T, M], stored in bf16: silu(gate) x up stored in bf16, gate, up and the experts'
    outputs in fp32. With fp8 both activations are quantised 1 x 128 and every term carries two scales.
    """
    shape = (*world.ids_TK.shape, world.x_TM.shape[1])
    value, err = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)

    def part(x: Approx, weight: Tensor) -> Approx:
        x = fake_quant(x, GROUP, ARITH) if fp8 else x
        return linear(x, exact(weight), ARITH, roundings=2 if fp8 else 0)

    for expert in sorted(set(world.ids_TK.flatten().tolist())):
        if expert < first_own:
            continue
        rows, ranks = torch.where(world.ids_TK == expert)
        gate, up = (part(exact(world.x_TM[rows]), w) for w in world.w1_EFM[expert].chunk(2))
        inner = round_to(mul(silu(gate, ARITH), up, ARITH), BF16)
        out = part(inner, world.w2_EMF[expert])
        value[rows, ranks], err[rows, ranks] = out.value, out.err
    return round_to(bounds.combine(Approx(value, err), exact(world.weights_TK), None, ARITH), BF16)


class FusedExperts(InputCheck[MoeInput]):
    """AITER's `fused_moe`, bf16 or block fp8, all experts or one rank's."""

    name = "fused_experts"
    meaning = "each token is the weighted sum of its own experts, and a token's result does not depend on the others"
    family = "moe"
    input_type = MoeInput

    def inputs(self) -> st.SearchStrategy[MoeInput]:
        """Few tokens."""
        return moe_inputs()

    def run(self, drawn: MoeInput, target: Target) -> Verdict:
        """The whole batch, then its last token alone."""
        found, world = Findings(), _World.drawn(drawn, target.evidence == "hardware")
        before = world.x_TM.clone()
        out_TM = self._call(drawn, world, target, slice(None))
        found.require("calls", same_bits(before, world.x_TM), "fused_moe changed its input")
        text = f"fused_moe gives {tuple(out_TM.shape)} {out_TM.dtype}"
        if found.require("calls", out_TM.shape == before.shape and out_TM.dtype == before.dtype, text):
            bound = routed_bound(world, drawn.fp8, drawn.remote)
            found.within("routed experts", out_TM, bound)
            alone = self._call(drawn, world, target, slice(drawn.tokens - 1, drawn.tokens))
            # Another batch may take another tile order on a GPU; both are held to the bound of the whole.
            found.within("routed experts of the last token alone", alone, bound.map(slice(drawn.tokens - 1, None)))
        foreign = bool((world.ids_TK < drawn.remote).all())
        untested = "every chosen expert is on another rank" if foreign else ""
        return self.verdict(found.violation, found.measured(), untested=untested)

    def _call(self, drawn: MoeInput, world: _World, target: Target, rows: slice) -> Tensor:
        device, e = device_of(target), world.packed.experts
        assert target.kernels is not None
        mask = None
        if drawn.remote:
            mask = torch.tensor([expert >= drawn.remote for expert in range(drawn.experts)], dtype=torch.int32)
        w1_scale, w2_scale = (
            None if scale is None else scale[drawn.remote :].to(device) for scale in (e.w1_scale, e.w2_scale)
        )
        out: Tensor = target.kernels.fused_moe(
            world.x_TM[rows].to(device),
            e.w1[drawn.remote :].to(device),
            e.w2[drawn.remote :].to(device),
            world.weights_TK[rows].to(device),
            world.ids_TK[rows].to(device),
            expert_mask=None if mask is None else mask.to(device),
            quant_type=QuantType.per_1x128 if drawn.fp8 else QuantType.No,
            w1_scale=w1_scale,
            w2_scale=w2_scale,
        )
        return out.cpu()


class Mixture(InputCheck[MoeInput]):
    """The path's mixture: routed experts, and the shared expert once and unweighted."""

    name = "mixture"
    meaning = "routed experts by their weights plus the shared expert once, each sum within its bound"
    family = "moe"
    input_type = MoeInput

    def inapplicable(self, target: Target) -> str:
        """On a GPU the stacks of the experts are shuffled while they are packed."""
        shuffled = "" if target.evidence == "emulated" else "needs experts in natural layout; a GPU wants them shuffled"
        return super().inapplicable(target) or shuffled

    def inputs(self) -> st.SearchStrategy[MoeInput]:
        """All experts on this rank."""
        return moe_inputs().map(lambda drawn: msgspec.structs.replace(drawn, remote=0))

    def run(self, drawn: MoeInput, target: Target) -> Verdict:
        """One call of `experts.mixture`."""
        found, world = Findings(), _World.drawn(drawn, hardware=False)
        assert target.kernels is not None
        out_TM = subject.mixture(world.x_TM, world.weights_TK, world.ids_TK, world.packed, target.kernels)
        routed = routed_bound(world, drawn.fp8, 0)
        if world.packed.shared is None:
            found.within("ffn_out without a shared expert", out_TM, routed)
        else:
            found.within("ffn_out", out_TM, round_to(add(routed, _shared(world), ARITH), BF16))
        found.counts["tokens"] += drawn.tokens
        return self.verdict(found.violation, found.measured())


def _shared(world: _World) -> Approx:
    """The shared expert: every linear and the product stored in bf16."""
    mlp = world.packed.shared
    assert mlp is not None
    w1, w3, w2 = (exact(part.weight) for part in (*mlp.gate_up, mlp.down))
    return bounds.mlp(exact(world.x_TM), w1, w2, w3, ARITH, storage=BF16)


CHECKS: tuple[type[InputCheck[Any]], ...] = (FusedExperts, Mixture)
