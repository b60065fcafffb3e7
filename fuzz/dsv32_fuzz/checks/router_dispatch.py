"""The router in batches of any size: the same rows on both sides of the row count where AITER changes its kernel.

Truth and comparison are those of `dsv32_fuzz.checks.router`.

Legend: T rows, E experts, K chosen experts, N rows of the large batch.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import torch
from hypothesis import strategies as st
from torch import Tensor

from dsv32_fast import router as subject
from dsv32_fast.kernels.emulated.device import MI355X, emulated_device
from dsv32_fuzz.checks.findings import Findings, same_bits
from dsv32_fuzz.checks.own_input import InputCheck
from dsv32_fuzz.checks.router import TORCH, judge_choice, judge_weights, kernel_weights, options_of, well_formed
from dsv32_fuzz.strategies.router import PROBE_BIASES, RouterRows, RowKind, config_of
from dsv32_fuzz.strategies.steps import integers, sampled_from
from dsv32_fuzz.targets import Target
from dsv32_fuzz.verdict import Verdict
from dsv32_ref.config import Config

ROWS_PER_UNIT = 212
"""`biased_grouped_topk` changes to `moe_fused_gate` above so many rows per compute unit (54 272 on MI355X)."""


class DispatchInput(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rows that fill a batch, over and over, near the row count where another kernel takes over."""

    rows: tuple[RowKind, ...] = ("spread",)
    beyond: int = 1
    """Rows more than the last batch of the HIP kernels has."""
    compute_units: int = 1
    bias_offset: float = 0.0
    bias_spread: float = 0.0
    seed: int = 0


class RouterDispatch(InputCheck[DispatchInput]):
    """The same rows in batches on both sides of the switch from the HIP kernels to `moe_fused_gate`.

    Up to the switch a row has the same bits in every batch. Beyond it AITER's kernel leaves the routed scaling factor
    out (ROCm/aiter e404860), so that is counted, not judged: no batch of the path reaches 54 272 rows.
    """

    name = "router_dispatch"
    meaning = "up to the switch a row has the same bits in every batch; beyond it the choice is legal and in proportion"
    family = "router"
    input_type = DispatchInput

    def inapplicable(self, target: Target) -> str:
        """The switch depends on the size of the device, which only an emulated one can change."""
        small = (
            "" if target.evidence == "emulated" else "the switch is at 54 272 rows; only an emulated device is small"
        )
        return super().inapplicable(target) or small

    def inputs(self) -> st.SearchStrategy[DispatchInput]:
        """Row counts next to the switch, and far from it."""

        def made(rows: list[RowKind], beyond: int, band: tuple[float, float], seed: int) -> DispatchInput:
            return DispatchInput(rows=tuple(rows), beyond=beyond, bias_offset=band[0], bias_spread=band[1], seed=seed)

        kinds = st.lists(sampled_from(("spread", "dominant_group", "tied_pairs", "one_far_up")), min_size=1, max_size=3)
        counts = sampled_from((1, 0, 2, -1, -200, 212))
        return st.builds(made, kinds, counts, sampled_from(PROBE_BIASES), integers(0, 1 << 16))

    def run(self, drawn: DispatchInput, target: Target) -> Verdict:
        """One batch of the drawn rows alone, and one that fills the count with copies of them."""
        rows = RouterRows(
            rows=drawn.rows, bias_offset=drawn.bias_offset, bias_spread=drawn.bias_spread, seed=drawn.seed
        )
        found, config, dtype = Findings(), config_of(rows.shape), TORCH[options_of(target).logits]
        logits_TE, bias_E = (part.to(dtype) for part in rows.tensors())
        count = max(1, drawn.compute_units * ROWS_PER_UNIT + drawn.beyond)
        copy_N = torch.arange(count) % len(logits_TE)
        assert target.kernels is not None
        with emulated_device(dataclasses.replace(MI355X, compute_units=drawn.compute_units)):
            few = subject.choose_experts(logits_TE, bias_E, config, target.kernels)
            many = subject.choose_experts(logits_TE[copy_N], bias_E, config, target.kernels)
        if well_formed(found, *many, config):
            self._compare(found, (logits_TE.float(), bias_E.float()), (few, many), copy_N, drawn.beyond > 0, config)
        return self.verdict(found.violation, found.measured())

    def _compare(
        self,
        found: Findings,
        numbers: tuple[Tensor, Tensor],
        made: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]],
        copy_N: Tensor,
        beyond: bool,
        config: Config,
    ) -> None:
        (few_ids, few_weights), (ids_NK, weights_NK) = made
        first = ids_NK[: len(few_ids)], weights_NK[: len(few_weights)]
        base = first if beyond else (few_ids, few_weights)
        text = "copies of a row differ within a batch" if beyond else f"a row differs in a batch of {len(copy_N)} rows"
        rows = copy_N[copy_N < len(base[0])]  # fewer rows than were drawn, where the count is small
        same = all(
            same_bits(part[rows], all_N[: len(rows)]) for part, all_N in zip(base, (ids_NK, weights_NK), strict=True)
        )
        found.require("rows_compared", same, f"gate_idx, gate_w: {text}", times=len(rows))
        judged = len(first[0])
        logits_TE, bias_E = numbers[0][:judged], numbers[1]
        judge_choice(found, (logits_TE, bias_E), first[0], config)
        unscaled = beyond and float(first[1].sum()) < judged * (1 + config.route_scale) / 2
        found.counts["rows_beyond"] += len(copy_N) * beyond
        found.counts["rows_unscaled"] += len(copy_N) * unscaled
        factor = 1.0 if unscaled else config.route_scale
        judge_weights(found, first[1], kernel_weights(logits_TE, bias_E, first[0], factor))


CHECKS: tuple[type[InputCheck[Any]], ...] = (RouterDispatch,)
