"""The check of the fp8 quantisers: AITER's two, and the path's own for index queries.

Truth: `dsv32_ref.bounds.quant`, with each quantiser's own floor under the largest value of a block.

Legend: T rows, N columns, S scales per row.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import torch
from hypothesis import strategies as st
from torch import Tensor

from dsv32_fast import layers
from dsv32_fuzz.checks.findings import Findings, device_of
from dsv32_fuzz.checks.own_input import InputCheck
from dsv32_fuzz.strategies.steps import booleans, integers, sampled_from
from dsv32_fuzz.targets import Target
from dsv32_fuzz.verdict import Verdict
from dsv32_ref.bounds import Arithmetic, exact
from dsv32_ref.bounds.quant import ScaleRule, fake_quant, scale_range

ARITH = Arithmetic()
Values = Literal["normal", "outlier", "zeros", "tiny", "large", "amax_448", "subnormal", "mixed"]
VALUES: tuple[Values, ...] = ("normal", "outlier", "zeros", "tiny", "large", "amax_448", "subnormal", "mixed")


def values_of(kind: Values, rows: int, width: int, g: torch.Generator) -> Tensor:
    """bf16 [rows, width]."""
    x = torch.randn(rows, width, generator=g)
    scales = {"tiny": 2.0**-20, "large": 2.0**12, "subnormal": 2.0**-128}
    if kind == "mixed":
        x = x * torch.exp2(torch.randint(-24, 12, (rows, 1), generator=g).float())
    elif kind == "outlier":
        x[:, 3] *= 300
    elif kind == "zeros":
        x = x * (torch.rand(rows, 1, generator=g) < 0.5)
    elif kind == "amax_448":  # the scale is 1, or its neighbour
        x = x / x.abs().amax(1, keepdim=True).clamp_min(1e-9) * 448
    return (x * scales.get(kind, 1.0)).bfloat16()


class QuantInput(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rows for a quantiser."""

    quantiser: Literal["per_group", "per_token", "ue8m0"] = "per_group"
    rows: int = 2
    groups: int = 2
    group_size: Literal[128, 64, 32] = 128
    transpose_scale: bool = False
    values: Values = "normal"
    done: int = -1
    """Rows that num_rows admits; -1 passes none."""
    seed: int = 0


@st.composite
def quant_inputs(draw: st.DrawFn) -> QuantInput:
    """Any quantiser; subnormal rows only where a floor keeps the reciprocal of the scale finite."""
    quantiser: Literal["per_group", "per_token", "ue8m0"] = draw(sampled_from(("per_group", "per_token", "ue8m0")))
    kinds = tuple(kind for kind in VALUES if kind != "subnormal" or quantiser != "per_token")
    return QuantInput(
        quantiser=quantiser,
        rows=draw(sampled_from((2, 1, 5))),
        groups=draw(sampled_from((2, 1, 3))),
        group_size=draw(sampled_from((128, 64, 32))),
        transpose_scale=draw(booleans()),
        values=draw(sampled_from(kinds)),
        done=draw(sampled_from((-1, -1, 1))),
        seed=draw(integers(0, 1 << 16)),
    )


class Quantisers(InputCheck[QuantInput]):
    """`per_group_quant_hip`, `per_token_quant_hip`, and the path's own quantiser of index queries."""

    name = "quantisers"
    meaning = "every value times its scale is within half a step of the input, and the scale is the rule's"
    family = "cache"
    input_type = QuantInput

    def inputs(self) -> st.SearchStrategy[QuantInput]:
        """Any quantiser."""
        return quant_inputs()

    def run(self, drawn: QuantInput, target: Target) -> Verdict:
        """Quantise, multiply back."""
        found, g = Findings(), torch.Generator().manual_seed(drawn.seed)
        width = drawn.groups * drawn.group_size
        x_TN = values_of(drawn.values, drawn.rows, width, g)
        values_TN, scales_TS, rule = self._call(drawn, x_TN.to(device_of(target)), target)
        blocks = width // rule.block
        text = f"scales have the shape {tuple(scales_TS.shape)}, not {(drawn.rows, blocks)}"
        if found.require("calls", tuple(scales_TS.shape) == (drawn.rows, blocks), text):
            done = drawn.rows if drawn.done < 0 or drawn.quantiser == "ue8m0" else min(drawn.done, drawn.rows)
            # Without a floor a row of zeros has scale 0, and the kernel multiplies it by 1 / 0.
            defined_T = (x_TN[:done] != 0).any(1) if rule.amax_floor == 0 else torch.ones(done, dtype=torch.bool)
            found.counts["rows_of_zeros"] += int((~defined_T).sum())
            parts = (part[:done].cpu().double()[defined_T] for part in (x_TN, values_TN, scales_TS))
            self._compare(found, drawn.quantiser, rule, *parts)
        untested = "" if found.counts["elements"] else "every row is zero, for a quantiser that has no scale for it"
        return self.verdict(found.violation, found.measured(), untested=untested)

    def _compare(
        self, found: Findings, what: str, rule: ScaleRule, x_TN: Tensor, values_TN: Tensor, scales_TS: Tensor
    ) -> None:
        if len(x_TN) == 0:
            return
        wide_TN = scales_TS.repeat_interleave(rule.block, 1)
        found.within(what, values_TN * wide_TN, fake_quant(exact(x_TN), rule, ARITH))
        around = scale_range(exact(x_TN.reshape(*scales_TS.shape, rule.block)), rule, ARITH)
        inside = (scales_TS >= around.low[..., 0]) & (scales_TS <= around.high[..., 0])
        text = f"{what}: a scale is not its block's largest value over 448"
        found.require("scales", bool(inside.all()), text, times=inside.numel())

    def _call(self, drawn: QuantInput, x_TN: Tensor, target: Target) -> tuple[Tensor, Tensor, ScaleRule]:
        kernels, fp8 = target.kernels, torch.float8_e4m3fn
        assert kernels is not None
        named: dict[str, Any] = {"quant_dtype": fp8}
        if drawn.done >= 0:
            named["num_rows"] = torch.tensor([min(drawn.done, drawn.rows)], dtype=torch.int32, device=x_TN.device)
        if drawn.quantiser == "ue8m0":
            values, scales = layers.quantise_ue8m0(x_TN.unflatten(1, (drawn.groups, -1)))  # type: ignore[no-untyped-call]
            return values.flatten(1), scales, ScaleRule(block=drawn.group_size, amax_floor=1e-10)
        if drawn.quantiser == "per_token":
            floor = 1e-10 if x_TN.shape[1] in (32, 64, 128) else 0.0
            return *kernels.per_token_quant_hip(x_TN, **named), ScaleRule(
                block=x_TN.shape[1], ue8m0=False, amax_floor=floor
            )
        values, scales = kernels.per_group_quant_hip(
            x_TN, group_size=drawn.group_size, transpose_scale=drawn.transpose_scale, **named
        )
        if drawn.transpose_scale:  # column by column behind the same shape
            scales = scales.reshape(-1).view(drawn.groups, drawn.rows).T
        return values, scales, ScaleRule(block=drawn.group_size, ue8m0=False, amax_floor=1e-10)


CHECKS: tuple[type[InputCheck[Any]], ...] = (Quantisers,)
