"""Attention through the plan: what every row and head attended, whose query answered, and how close the result is.

The subject is the target's metadata builder (with the plan of the step before in its cache), the path's gather list,
the planner, the decode kernel and the merge of its partials, together. The truth is the draw: which positions each row
was told to attend, and on which pages they lie.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from dsv32_fuzz.checks.decode_inputs import DecodeInput, decode_inputs
from dsv32_fuzz.checks.own_input import InputCheck
from dsv32_fuzz.probes import counting, echo
from dsv32_fuzz.probes.decode_step import DecodeStep
from dsv32_fuzz.probes.expected import Expected, attention
from dsv32_fuzz.targets import Target
from dsv32_fuzz.verdict import Verdict
from dsv32_ref.bounds import Approx, judge

_MOSTLY_ZERO = 0.5


def run_step(drawn: DecodeInput, step: DecodeStep, q_THD: Tensor, kv_SD: Tensor) -> tuple[Tensor, Tensor | None]:
    """Output and LSE by the way that was drawn, at the softmax scale of the model."""
    if drawn.by_path:
        return step.by_path(q_THD, kv_SD), None
    scale = step.engine.shape.config().softmax_scale
    return step.by_kernel(q_THD, kv_SD, scale=scale, scales=drawn.scales, lse=drawn.way == "kernel with LSE")


class TracerCoverage(InputCheck[DecodeInput]):
    """The counting probe on a planned decode step."""

    name = "tracer_coverage"
    meaning = "every row and head attended exactly its own KV slots, each once"
    family = "attention"
    input_type = DecodeInput

    def inputs(self) -> st.SearchStrategy[DecodeInput]:
        """Steps after other steps, in three types, with and without an LSE."""
        return decode_inputs()

    def run(self, drawn: DecodeInput, target: Target) -> Verdict:
        """Count how often each row and head attended each slot of the cache."""
        step = drawn.build(target)
        shape, scales = step.engine.shape, drawn.scales
        marks = counting.Marks(slots=len(step.positions_S), columns=shape.latent)
        q_THD = torch.zeros(step.rows, shape.heads, shape.width)
        tail_SR = torch.ones(marks.slots, shape.rope)
        seen = counting.count_attended(
            lambda values_SC: run_step(drawn, step, q_THD, torch.cat([values_SC, tail_SR], 1)),
            marks,
            step.key_counts,
            value_scale=scales[1],
        )
        violation = counting.difference(seen, step.slots_T, step.names_T)
        live = int(step.live.sum())
        measured: dict[str, float | int | str] = {
            "rows": live,
            "row_heads": live * shape.heads,
            "slots": marks.slots,
            "passes": marks.passes,
        }
        return self.verdict(violation, measured, untested="" if live else "no row had a key to attend")


class TracerRows(InputCheck[DecodeInput]):
    """The echo probe on a planned decode step."""

    name = "tracer_rows"
    meaning = "every row and head answered with its own query, nope and RoPE part, at the softmax scale asked for"
    family = "attention"
    input_type = DecodeInput

    def inputs(self) -> st.SearchStrategy[DecodeInput]:
        """As for the coverage."""
        return decode_inputs()

    def run(self, drawn: DecodeInput, target: Target) -> Verdict:
        """Read from the output what the query held."""
        rows = sum(drawn.query_lens) + drawn.padding
        shape, scales = drawn.shape(target), drawn.scales
        probe = echo.Echo(rows=rows, heads=shape.heads, latent=shape.latent, rope=shape.rope, seed=drawn.seed)
        step = drawn.build(target, kept=probe.probes)
        whole = math.prod(scales)
        scale = shape.config().softmax_scale if drawn.by_path else math.log(2.0) / whole
        q_THD = probe.queries(math.log(2.0) / (scale * whole))
        kv_SD = probe.keys(step.positions_S)
        if drawn.by_path:
            q_THD = q_THD.bfloat16()
            out_THC = step.by_path(q_THD, kv_SD)
        else:
            out_THC, _ = step.by_kernel(q_THD, kv_SD, scale=scale, scales=scales, lse=drawn.way == "kernel with LSE")
        spelt = probe.spelt(q_THD, scale * whole)
        violation = echo.difference(probe, probe.read(out_THC), spelt, step.key_counts, step.names_T)
        read = int((step.key_counts.clamp(max=probe.probes) - 1).clamp(min=0).sum())
        return self.verdict(
            violation,
            {"rows": int(step.live.sum()), "digits": read * shape.heads},
            untested="" if read else "no row had two keys, so no output showed a score",
        )


class AttentionNumerics(InputCheck[DecodeInput]):
    """Random values against attention in real arithmetic."""

    name = "attention_numerics"
    meaning = "output and LSE of every row and head lie within the proven bound of an honest kernel"
    family = "attention"
    input_type = DecodeInput

    def inputs(self) -> st.SearchStrategy[DecodeInput]:
        """Short histories, all types and head counts, flat and peaked softmax."""
        return decode_inputs(most_rows=6, histories=False)

    def run(self, drawn: DecodeInput, target: Target) -> Verdict:
        """Judge every element."""
        step = drawn.build(target)
        q_THD, kv_SD = drawn.values(step)
        output, lse = run_step(drawn, step, q_THD, kv_SD)
        truth = expected(drawn, step, q_THD, kv_SD)
        violation, worst, elements = compare(step, output, lse, truth)
        live = step.live
        empty = not bool(live.any()) or float((output.cpu()[live] == 0).double().mean()) > _MOSTLY_ZERO
        return self.verdict(
            violation,
            {"rows": int(live.sum()), "elements": elements, "worst_budget_used": worst},
            untested="the output is mostly zero" if empty else "",
        )


def expected(drawn: DecodeInput, step: DecodeStep, q_THD: Tensor, kv_SD: Tensor) -> Expected:
    """What a kernel may return for these queries and this cache, as they are stored."""
    shape = step.engine.shape
    q, kv = step.stored(q_THD, kv_SD)
    return attention(
        q.float().cpu(),
        kv.float().cpu(),
        step.slots_T,
        shape.latent,
        shape.config().softmax_scale,
        scales=None if shape.q == shape.kv == "bf16" else drawn.scales,
        fp8_weights=shape.fp8,
    )


def compare(step: DecodeStep, output: Tensor, lse: Tensor | None, truth: Expected) -> tuple[str, float, int]:
    """The first violation in words (empty if none), the largest budget used, and how many elements were judged."""
    live = step.live.nonzero()[:, 0]
    pairs: list[tuple[str, Tensor, Approx]] = [("output", output, truth.output)]
    pairs += [("LSE", lse, truth.lse)] if lse is not None else []
    worst, elements, violation = 0.0, 0, ""
    for what, computed, bound in pairs:
        budget = judge(computed.cpu()[live], bound.map(live))
        worst, elements = max(worst, budget.worst), elements + budget.elements
        if budget.first is not None and not violation:
            row, head, *_ = budget.first
            name = step.names_T[int(live[row])]
            violation = f"{what} of {name}, head {head}: error {budget.error:.3g} > bound {budget.bound:.3g}"
    return violation, worst, elements


CHECKS: tuple[type[InputCheck[Any]], ...] = (TracerCoverage, TracerRows, AttentionNumerics)
