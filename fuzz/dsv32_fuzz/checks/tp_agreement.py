"""Agreement of tensor-parallel ranks: each one routes and selects by itself, so all must have the same bits.

The ranks are played one after another in this process. Each has its columns of one output projection; the path's own
`all_sum` completes the partial sums, and the path's own norm, router and top-k go on from there, as `dsv32 tp` does
with whole shards. One rank's large part is cancelled by another's, so that a sum in any other order than the others'
has other bits; experts come in threes of one matrix row, so that equal biases tie at the cut. Nothing is compared by
tolerance.

Legend: T rows, M model width, W input width of the projection, E experts, K chosen entries, S positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import torch
from hypothesis import strategies as st
from torch import Tensor

from dsv32_fast import indexing
from dsv32_fast import router as subject
from dsv32_fast.batch import StepBatch
from dsv32_fast.layers import add_rms_norm, product
from dsv32_fast.packing import Gate
from dsv32_fast.parallel import communicator
from dsv32_fast.router import Casts
from dsv32_fast.state import Batch
from dsv32_fuzz.checks.findings import Findings, device_of, same_bits
from dsv32_fuzz.checks.own_input import InputCheck
from dsv32_fuzz.checks.router import TORCH, options_of
from dsv32_fuzz.checks.topk import admitted_k
from dsv32_fuzz.strategies.router import PROBE_BIASES, bias, config_of
from dsv32_fuzz.strategies.scores import KINDS, ScoreBatch, ScoreKind, ScoreRow
from dsv32_fuzz.strategies.steps import integers, sampled_from
from dsv32_fuzz.targets import Target
from dsv32_fuzz.verdict import Verdict

M, COLUMNS, EPS = 64, 32, 1e-6
"""Model width, columns of the projection on each rank, epsilon of the norm."""
CONFIG = config_of("256/8/4/8")
Stages = dict[str, Tensor]


class RanksInput(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Ranks, rows, and how far the cancelling parts lie above the others, in powers of two.

    Two ranks add up to the same bits in either order, so there are more. A bf16 part has 8 significant bits and the sum
    24: parts that lie 16 powers of two apart are the first whose order matters.
    """

    world: Literal[4, 8, 16] = 4
    scores: tuple[ScoreKind, ...] = ("normal",)
    """Index scores of each row."""
    large: int = 16
    bias_offset: float = 7.0
    bias_spread: float = 0.05
    seed: int = 0


@dataclass(frozen=True)
class _Rank:
    """One rank's end of an exchange whose tensors are all there already."""

    rank: int
    parts: list[Tensor]

    @property
    def world(self) -> int:
        return len(self.parts)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's part; `tensor` is this rank's own."""
        return [*self.parts[: self.rank], tensor, *self.parts[self.rank + 1 :]]


class TpAgreement(InputCheck[RanksInput]):
    """Ranks with the same replicated weights, and partial sums of their own."""

    name = "tp_agreement"
    meaning = (
        "all ranks complete a sum to the same bits, route to the same experts and select the same top-k in one order"
    )
    family = "router"
    input_type = RanksInput

    def inputs(self) -> st.SearchStrategy[RanksInput]:
        """Four ranks or more; rows of index scores with and without ties."""
        return st.builds(
            lambda world, scores, large, band, seed: RanksInput(
                world=world, scores=tuple(scores), large=large, bias_offset=band[0], bias_spread=band[1], seed=seed
            ),
            sampled_from((4, 8, 16)),
            st.lists(sampled_from(KINDS), min_size=1, max_size=5),
            sampled_from((16, 18, 20)),
            sampled_from(PROBE_BIASES),
            integers(0, 1 << 16),
        )

    def run(self, drawn: RanksInput, target: Target) -> Verdict:
        """Play every rank, and compare all stages of each with those of rank 0."""
        found, world = Findings(), _World(drawn, target)
        ranks = [world.rank(rank) for rank in range(drawn.world)]
        for rank, stages in enumerate(ranks[1:], 1):
            for stage, value in stages.items():
                row = _first_row(value, ranks[0][stage])
                text = f"{stage}: row {row} of rank {rank} differs from that of rank 0, {drawn.world} ranks"
                found.require(f"rows_of_{stage}", row < 0, text, times=len(value))
        moved_T, rerouted_T = world.in_another_order(ranks[0])
        found.counts["rows_that_depend_on_the_order"] = int(moved_T.sum())
        found.counts["rows_that_another_order_reroutes"] = int(rerouted_T.sum())
        untested = "" if bool(moved_T.any()) else "the sum has the same bits in another order"
        return self.verdict(found.violation, found.measured(), untested=untested)


class _World:
    """What the ranks share, and each one's summand."""

    def __init__(self, drawn: RanksInput, target: Target) -> None:
        assert target.kernels is not None
        self.kernels, self.options = target.kernels, options_of(target)
        g, device, rows = torch.Generator().manual_seed(drawn.seed), device_of(target), len(drawn.scores)
        z_TW, weight_MW = torch.randn(rows, drawn.world * COLUMNS, generator=g), torch.randn(M, COLUMNS, generator=g)
        parts = [torch.randn(M, COLUMNS, generator=g) for _ in range(drawn.world - 2)]
        large = 2.0**drawn.large * weight_MW
        z_TW[:, -COLUMNS:] = z_TW[:, :COLUMNS]  # the last rank's part is the first one's with the other sign
        columns = zip(z_TW.bfloat16().chunk(drawn.world, 1), [large, *parts, -large], strict=True)
        self.parts = [product(z.to(device), w.bfloat16().to(device)) for z, w in columns]
        self.residual_TM = torch.randn(rows, M, generator=g).bfloat16().to(device)
        self.gain_M = torch.ones(M, device=device)
        weight_EM = (torch.randn(CONFIG.n_routed_experts, M, generator=g) * M**-0.5).bfloat16()
        weight_EM = weight_EM[torch.arange(len(weight_EM)) // 3 * 3]
        bias_E = bias(g, CONFIG.n_routed_experts, drawn.bias_offset, drawn.bias_spread)
        self.gate = Gate(weight=weight_EM.to(device), bias=bias_E.to(TORCH[self.options.bias]).to(device))
        scores = ScoreBatch(rows=tuple(ScoreRow(kind=kind, times=2) for kind in drawn.scores), seed=drawn.seed)
        self.k = admitted_k(scores.k, target)
        self.scores_TS = torch.stack(scores.values(self.k)).to(device)

    def rank(self, rank: int) -> Stages:
        """The stages of one rank, in the order of computation."""
        summed_TM = communicator.all_sum(self.parts[rank], _Rank(rank, self.parts))
        batch = _decode_batch(self.scores_TS)
        topk_TK = indexing.select(self.scores_TS, batch, indexing.split_rows(batch, 4), self.k, self.kernels)
        return {"attn_out": summed_TM, **self.routed(summed_TM), "index_topk": topk_TK}

    def routed(self, summed_TM: Tensor) -> Stages:
        """From a complete sum to experts."""
        f_TM, residual_TM = add_rms_norm(summed_TM, self.residual_TM, self.gain_M, EPS)
        logits_TE = subject.gate_logits(f_TM, self.gate, self.options.logits, "fp32", Casts())
        ids_TK, weights_TK = subject.choose_experts(logits_TE, self.gate.bias, CONFIG, self.kernels)
        return {"residual": residual_TM, "gate_logits": logits_TE, "gate_idx": ids_TK, "gate_w": weights_TK}

    def in_another_order(self, own: Stages) -> tuple[Tensor, Tensor]:
        """Rows that have other bits, and other experts, if the sum begins with the second rank's part; bool [T]."""
        total_TM = sum((part.float() for part in self.parts[1:]), torch.zeros_like(self.parts[0].float()))
        other_TM = (total_TM + self.parts[0].float()).to(self.parts[0].dtype)
        experts = (ids.sort(-1).values for ids in (own["gate_idx"], self.routed(other_TM)["gate_idx"]))
        return (other_TM != own["attn_out"]).any(-1), torch.ne(*experts).any(-1)


def _decode_batch(scores_TS: Tensor) -> Batch:
    """A request for each row of scores, of which it may see all."""
    rows, width = scores_TS.shape
    counted = torch.arange(rows, device=scores_TS.device)
    lengths = torch.full_like(counted, width)
    return Batch(
        requests=tuple(range(rows)),
        step=StepBatch(query_lens=(1,) * rows, seq_lens=(width,) * rows),
        tokens=counted,
        positions=lengths - 1,
        lengths=lengths.int(),
        new_slots=counted,
        block_table=counted[:, None].int(),
        owner=counted,
    )


def _first_row(found: Tensor, expected: Tensor) -> int:
    """The first row whose bits differ, -1 if none does."""
    return next((row for row, pair in enumerate(zip(found, expected, strict=True)) if not same_bits(*pair)), -1)


CHECKS: tuple[type[InputCheck[Any]], ...] = (TpAgreement,)
