"""What may not change the result of attention: the plan's cuts, the company of a row, a second run, unread memory.

Where the same cuts of a row are merged in the same order, its bits must be the same; where the cuts differ, each result
must lie within the proven bound of the truth, so that any two differ by at most the sum of two bounds.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
import torch
from hypothesis import strategies as st
from torch import Tensor

from dsv32_fast.plan import consumer_view
from dsv32_fuzz.checks.attention import compare, expected, run_step
from dsv32_fuzz.checks.decode_inputs import DecodeInput, decode_inputs
from dsv32_fuzz.checks.own_input import InputCheck
from dsv32_fuzz.probes.decode_step import UNREAD, DecodeStep, kernels_of
from dsv32_fuzz.probes.expected import ARITH, Expected
from dsv32_fuzz.targets import Target
from dsv32_fuzz.verdict import Verdict
from dsv32_ref.bounds import BF16, Approx, SoftmaxForm, attend, exact, judge, round_to

Result = tuple[Tensor, Tensor | None]
Counts = dict[str, float | int | str]


class Cut(msgspec.Struct, frozen=True, kw_only=True):
    """One step, run under two plans: other split caps (-1: none), other company, other order."""

    step: DecodeInput
    caps: tuple[int, int]


class SplitInvariance(InputCheck[Cut]):
    """The same rows under two plans."""

    name = "split_invariance"
    meaning = "a row whose KV range was cut alike has the same bits; cut otherwise, it stays within the bound"
    family = "attention"
    input_type = Cut

    def inputs(self) -> st.SearchStrategy[Cut]:
        """Rows long enough to be cut, fewer than the batch size from which a plan is ignored."""
        steps = decode_inputs(most_rows=6, topks=(256, 64), histories=False)
        return st.builds(lambda step, caps: Cut(step=step, caps=caps), steps, st.sampled_from(_CAPS))

    def run(self, drawn: Cut, target: Target) -> Verdict:
        """All rows in order under one cap, then in reverse, one of them twice, under the other."""
        step = drawn.step.build(target)
        q_THD, kv_SD = drawn.step.values(step)
        truth = expected(drawn.step, step, q_THD, kv_SD)
        rows = [int(row) for row in step.live.nonzero()[:, 0]]
        orders = rows, [*rows[::-1], *rows[:1]]
        seen: dict[int, list[tuple[list[int], Tensor, Tensor]]] = {row: [] for row in rows}
        measured: Counts = {"rows": len(rows), "alike": 0, "otherwise": 0, "worst_budget_used": 0.0}
        for order, cap in zip(orders, drawn.caps, strict=True):
            violation, listed, (output, lse) = _run_listed(
                drawn.step, step, order, cap, (q_THD, kv_SD), truth, measured
            )
            if violation:
                return self.verdict(f"{violation} (split cap {cap})", measured)
            cuts = _cuts(listed)
            for place, row in enumerate(order):
                seen[row].append((cuts[place], output[place], lse[place]))
        return self.verdict(_unlike(step, seen, measured), measured, untested="" if rows else "no row had a key")


_CAPS = ((-1, 1), (1, -1), (2, -1), (-1, -1), (16, 2))


def _run_listed(
    drawn: DecodeInput,
    step: DecodeStep,
    order: list[int],
    cap: int,
    values: tuple[Tensor, Tensor],
    truth: Expected,
    measured: Counts,
) -> tuple[str, DecodeStep, tuple[Tensor, Tensor]]:
    """Rows `order` in a batch of their own: a violation of the bound, the step, and (output, LSE) on the host."""
    listed = step.engine.listed(step, order, cap)
    scale = step.engine.shape.config().softmax_scale
    output, lse = listed.by_kernel(values[0][order], values[1], scale=scale, scales=drawn.scales)
    if lse is None:
        raise TypeError("mla_decode_fwd returned no LSE although return_lse=True")
    bound = Expected(output=truth.output.map(order), lse=truth.lse.map(order))
    violation, worst, _ = compare(listed, output, lse, bound)
    measured["worst_budget_used"] = max(float(measured["worst_budget_used"]), worst)
    return violation, listed, (output.cpu(), lse.cpu())


def _cuts(step: DecodeStep) -> list[list[int]]:
    """Lengths of the pieces of each row in the plan, in order; those of folded heads one after the other."""
    works = consumer_view(step.metadata.plan).work_info_set
    pseudo = max(1, (int(works[:, 2].max(initial=0)) + 1) // max(step.rows, 1))
    cuts: list[list[int]] = [[] for _ in range(step.rows)]
    for work in sorted(works.tolist(), key=lambda work: (work[2], work[4])):
        if work[2] // pseudo < step.rows:
            cuts[work[2] // pseudo].append(work[5] - work[4])
    return cuts


def _unlike(step: DecodeStep, seen: dict[int, list[tuple[list[int], Tensor, Tensor]]], measured: Counts) -> str:
    alike = otherwise = 0
    violation = ""
    for row, results in seen.items():
        cuts, output, lse = results[0]
        for other_cuts, other_output, other_lse in results[1:]:
            if cuts != other_cuts:
                otherwise += 1
                continue
            alike += 1
            if not violation and not (same_bits(output, other_output) and same_bits(lse, other_lse)):
                violation = f"{step.names_T[row]} was cut alike {cuts} in two batches, and its bits differ"
    measured.update(alike=alike, otherwise=otherwise)
    return violation


def same_bits(one: Tensor | None, other: Tensor | None) -> bool:
    """Equal, NaN being equal to NaN."""
    if one is None or other is None:
        return one is other
    return torch.equal(one.nan_to_num(nan=1.5e30), other.nan_to_num(nan=1.5e30))


class Partials(msgspec.Struct, frozen=True, kw_only=True):
    """What is merged: partials of each tile (0 and 1 are left alone), share of empty ones, spread of the LSEs."""

    counts: tuple[int, ...]
    hollow: bool = False
    """Whether every second head of the first tile has empty partials only."""
    empty: float = 0.0
    spread: float = 1.0
    heads: int = 16
    seed: int = 0


class ReduceMerge(InputCheck[Partials]):
    """The merge of partials by itself, its maps permuted and its buffers larger than they need to be."""

    name = "reduce_merge"
    meaning = (
        "split rows are the LSE-weighted mean of their partials, base e, empty ones without weight; others are left"
    )
    family = "attention"
    input_type = Partials

    def inputs(self) -> st.SearchStrategy[Partials]:
        """Both merge algorithms (below and from four partials), unsplit tiles between split ones, up to 64 partials."""
        count = st.sampled_from((2, 3, 4, 0, 1, 5, 16, 33, 64))
        return st.builds(
            Partials,
            counts=st.lists(count, min_size=1, max_size=5).map(tuple),
            hollow=st.booleans(),
            empty=st.sampled_from((0.0, 0.4)),
            spread=st.sampled_from((1.0, 0.0, 20.0)),
            heads=st.sampled_from((16, 32)),
            seed=st.integers(0, 2**16),
        )

    def run(self, drawn: Partials, target: Target) -> Verdict:
        """Merge, and judge by the bound of a softmax over the LSEs."""
        device = torch.device("cuda" if target.evidence == "hardware" else "cpu")
        outputs, lses, index = _partials(drawn)
        ends = torch.tensor([0, *drawn.counts]).cumsum(0)
        tiles = len(drawn.counts)
        rows = torch.randperm(tiles, generator=torch.Generator().manual_seed(drawn.seed))
        final = torch.full((tiles + 1, drawn.heads, outputs.shape[-1]), 768.0, dtype=torch.bfloat16, device=device)
        final_lse = torch.full((tiles + 1, drawn.heads), 768.0, device=device)
        kernels_of(target).mla_reduce_v1(
            outputs[:, None].to(device),
            lses[:, None, :, None].to(device),
            ends.int().to(device),
            torch.stack([rows, rows + 1], 1).int().to(device),
            torch.cat([index, torch.full((3,), UNREAD)]).int().to(device),
            1,
            0,
            final,
            final_lse,
        )
        measured: Counts = {"tiles": tiles, "split": sum(c > 1 for c in drawn.counts), "worst_budget_used": 0.0}
        violation = ""
        for tile, count in enumerate(drawn.counts):
            part = index[int(ends[tile]) : int(ends[tile + 1])]
            row = int(rows[tile])
            merged = _judged(final[row].cpu(), final_lse[row].cpu(), outputs[part], lses[part], measured)
            violation = violation or (f"tile {tile} of {count} partials (row {row}): {merged}" if merged else "")
        if not violation and not bool((final[tiles] == 768).all()):
            violation = f"row {tiles} belongs to no tile and was written"
        return self.verdict(violation, measured, untested="" if measured["split"] else "no tile was split")


def _partials(drawn: Partials) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs [P, H, C] and LSEs [P, H], NaN where no tile looks; and the place of each partial, in tile order."""
    total, latent, generator = sum(drawn.counts), 512, torch.Generator().manual_seed(drawn.seed)
    index = torch.randperm(total + 3, generator=generator)[:total]
    outputs = torch.full((total + 3, drawn.heads, latent), torch.nan)
    lses = torch.full((total + 3, drawn.heads), torch.nan)
    outputs[index] = torch.randn(total, drawn.heads, latent, generator=generator)
    lses[index] = drawn.spread * torch.randn(total, drawn.heads, generator=generator) + 5
    firsts = torch.tensor([sum(drawn.counts[:tile]) for tile in range(len(drawn.counts))])
    empty = torch.rand(total, drawn.heads, generator=generator) < drawn.empty
    empty[firsts[firsts < total]] = False
    if drawn.hollow:
        empty[: drawn.counts[0], ::2] = True
    outputs[index] = outputs[index].masked_fill(empty[..., None], 0.0)
    lses[index] = lses[index].masked_fill(empty, -math.inf)
    return outputs, lses, index


def _judged(output_HC: Tensor, lse_H: Tensor, outputs: Tensor, lses: Tensor, measured: Counts) -> str:
    """A tile's result against the softmax of its LSEs over its outputs: a merge is attention over the partials."""
    if len(lses) < 2:
        kept = bool((output_HC == 768).all()) and bool((lse_H == 768).all())
        return "" if kept else "it has nothing to merge and was written"
    hollow_H = (lses == -math.inf).all(0)
    if bool((lse_H[hollow_H] != math.inf).any()):  # NaN is unequal too
        return "no partial of a head has a key, and its LSE is not the inf that says so"
    heads = (~hollow_H).nonzero()[:, 0]  # the others have no output to speak of
    output_HC, lse_H, outputs, lses = output_HC[heads], lse_H[heads], outputs[:, heads], lses[:, heads]
    form = SoftmaxForm(splits=len(lses), rescales=len(lses))
    output, lse = attend(exact(lses.T[:, None]), exact(outputs.transpose(0, 1)), ARITH, form)
    pairs: list[tuple[str, Tensor, Approx]] = [
        ("output", output_HC, round_to(output.apply(lambda t: t[:, 0]), BF16)),
        ("LSE", lse_H, lse.apply(lambda t: t[:, 0])),
    ]
    for what, computed, bound in pairs:
        budget = judge(computed, bound)
        measured["worst_budget_used"] = max(float(measured["worst_budget_used"]), budget.worst)
        if budget.first is not None:
            return f"{what} of head {int(heads[budget.first[0]])}: error {budget.error:.3g} > bound {budget.bound:.3g}"
    return ""


class Determinism(InputCheck[DecodeInput]):
    """The same call three times."""

    name = "determinism"
    meaning = "the same step on the same values gives the same bits each time"
    family = "attention"
    input_type = DecodeInput

    def inputs(self) -> st.SearchStrategy[DecodeInput]:
        """Any step."""
        return decode_inputs(most_rows=12, histories=False)

    def run(self, drawn: DecodeInput, target: Target) -> Verdict:
        """Run, run again, and run on an engine of its own."""
        step, again = drawn.build(target), drawn.build(target)
        q_THD, kv_SD = drawn.values(step)
        results = [_live(other, run_step(drawn, other, q_THD, kv_SD)) for other in (step, step, again)]
        names = [name for name, live in zip(step.names_T, step.live, strict=True) if live]
        violation = _changed(names, results[0], results[1], "a second run") or _changed(
            names, results[0], results[2], "a fresh engine"
        )
        return self.verdict(violation, {"rows": len(names)}, untested="" if names else "no row had a key to attend")


class Poison(InputCheck[DecodeInput]):
    """Memory that the step has no business to read."""

    name = "poison"
    meaning = "NaN in unread slots and padding queries, and huge ids behind the gather list, change no bit"
    family = "attention"
    input_type = DecodeInput

    def inputs(self) -> st.SearchStrategy[DecodeInput]:
        """Steps with padding more often than not."""
        return decode_inputs(most_rows=12).map(
            lambda drawn: msgspec.structs.replace(drawn, padding=drawn.padding or drawn.seed % 4)
        )

    def run(self, drawn: DecodeInput, target: Target) -> Verdict:
        """One run with zeros in everything unread, one with poison there."""
        step = drawn.build(target)
        q_THD, kv_SD = drawn.values(step)
        unread_S, unread_T = step.positions_S < 0, ~step.live
        clean = _live(step, run_step(drawn, step, _filled(q_THD, unread_T, 0.0), _filled(kv_SD, unread_S, 0.0)))
        end = int(step.metadata.paged_kv_indptr_T1[-1])
        step.metadata.paged_kv_indices[end:] = UNREAD
        poisoned = _filled(q_THD, unread_T, torch.nan), _filled(kv_SD, unread_S, torch.nan)
        dirty = _live(step, run_step(drawn, step, *poisoned))
        names = [name for name, live in zip(step.names_T, step.live, strict=True) if live]
        violation = _changed(names, clean, dirty, "poison in unread memory")
        if not violation and names and not bool(clean[0].isfinite().all()):
            violation = "an output is not finite, although every value that was to be read is"
        measured: Counts = {"rows": len(names), "unread_slots": int(unread_S.sum()), "padding": int(unread_T.sum())}
        return self.verdict(violation, measured, untested="" if names else "no row had a key to attend")


def _filled(x: Tensor, where: Tensor, value: float) -> Tensor:
    return x.masked_fill(where.view(-1, *[1] * (x.dim() - 1)), value)


def _live(step: DecodeStep, result: Result) -> Result:
    output, lse = result
    return output.cpu()[step.live], None if lse is None else lse.cpu()[step.live]


def _changed(names: list[str], one: Result, other: Result, by: str) -> str:
    for what, a, b in (("output", one[0], other[0]), ("LSE", one[1], other[1])):
        if not same_bits(a, b) and a is not None and b is not None:
            row, head, *_ = (a.nan_to_num(nan=1.5e30) != b.nan_to_num(nan=1.5e30)).nonzero()[0].tolist()
            return f"{by} changed the {what} of {names[row]}, head {head}"
    return ""


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """The rows of one step, repeated to batches of two sizes."""

    step: DecodeInput
    rows: tuple[int, int]


class DispatchConsistency(InputCheck[Sizes]):
    """The same row in batches on both sides of a gate."""

    name = "dispatch_consistency"
    meaning = "a row's result is within the bound in a batch of any size, whichever kernel runs"
    family = "attention"
    input_type = Sizes

    def inputs(self) -> st.SearchStrategy[Sizes]:
        """Few rows, repeated; 16 heads in bf16 most often, as AITER's gate is there."""
        steps = decode_inputs(most_rows=4, topks=(64, 16), histories=False).map(
            lambda drawn: msgspec.structs.replace(drawn, padding=0, **_gated(drawn))
        )
        sizes = st.sampled_from(((31, 32), (1, 32), (32, 33), (2, 31), (1, 64)))
        return st.builds(lambda step, rows: Sizes(step=step, rows=rows), steps, sizes)

    def run(self, drawn: Sizes, target: Target) -> Verdict:
        """Repeat the live rows until the batch has the size."""
        step = drawn.step.build(target)
        q_THD, kv_SD = drawn.step.values(step)
        truth = expected(drawn.step, step, q_THD, kv_SD)
        live = [int(row) for row in step.live.nonzero()[:, 0]]
        measured: Counts = {"rows": 0, "worst_budget_used": 0.0}
        if not live:
            return self.verdict("", measured, untested="no row had a key to attend")
        for size in drawn.rows:
            order = [live[place % len(live)] for place in range(size)]
            violation, _, _ = _run_listed(drawn.step, step, order, -1, (q_THD, kv_SD), truth, measured)
            measured["rows"] = int(measured["rows"]) + size
            if violation:
                return self.verdict(f"in a batch of {size} rows: {violation}", measured)
        return self.verdict("", measured)


def _gated(drawn: DecodeInput) -> dict[str, Any]:
    """But for one input in four, the shape that AITER's gate looks for; a row that is cut lies beside one that is not.

    AITER cuts 16 heads of bf16 from 64 keys on.
    """
    if drawn.seed % 4 == 3:
        return {"heads": min(drawn.heads, 32)}
    other = 2 if drawn.contexts[0] > 64 else 200
    rows = {"query_lens": (*drawn.query_lens, 1), "contexts": (*drawn.contexts, other)}
    return {"heads": 16, "q": "bf16", "kv": "bf16", "topk": 256, **rows}


CHECKS: tuple[type[InputCheck[Any]], ...] = (SplitInvariance, ReduceMerge, Determinism, Poison, DispatchConsistency)
