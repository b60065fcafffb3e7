"""The check of the path's indexer, from activations to selected positions.

Truth: `dsv32_ref.bounds` on the operands that each stage received: which half of a head is turned and how, the bias of
the key's norm, the scales of heads and keys, the ReLU, and a selection that the scores call for.

Legend: T tokens, M model width, L query latent, J heads, I index width, S positions, K top-k.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from hypothesis import strategies as st
from torch import Tensor

from dsv32_fast import indexing as subject
from dsv32_fast import layers
from dsv32_fast.layers import Linear
from dsv32_fast.packing import Indexer
from dsv32_fast.state import Batch, CacheState
from dsv32_fuzz.checks.cache import key_places, scale_places
from dsv32_fuzz.checks.findings import Findings, device_of
from dsv32_fuzz.checks.own_input import InputCheck
from dsv32_fuzz.strategies.steps import integers, sampled_from
from dsv32_fuzz.targets import Target
from dsv32_fuzz.verdict import Verdict
from dsv32_ref.bounds import Approx, Arithmetic, certify_topk, exact
from dsv32_ref.bounds import indexer as bounds
from dsv32_ref.bounds import norm as norm_bounds
from dsv32_ref.bounds.elementary import mul, scale_by
from dsv32_ref.bounds.quant import ScaleRule, fake_quant
from dsv32_ref.bounds.stages import StageBounds
from dsv32_ref.config import Config, Precision
from dsv32_ref.indexer import select_topk

ARITH = Arithmetic()
FP8 = torch.float8_e4m3fn


class StagesInput(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A step of the path's indexer: cached contexts, new tokens, padding."""

    contexts: tuple[int, ...] = (20,)
    queries: tuple[int, ...] = (1,)
    padding: int = 0
    topk: int = 8
    page_size: int = 16
    first_position: int = 0
    """RoPE position of every request's first token."""
    longest_paged: int = 4
    """Requests with more new tokens gather their keys first."""
    spare: int = 0
    """Columns of the scores behind the longest sequence."""
    seed: int = 0


@st.composite
def stages_inputs(draw: st.DrawFn) -> StagesInput:
    """One to three requests."""
    requests = draw(
        st.lists(st.tuples(sampled_from((20, 0, 7, 8, 40)), sampled_from((1, 2, 6))), min_size=1, max_size=3)
    )
    return StagesInput(
        contexts=tuple(context for context, _ in requests),
        queries=tuple(query for _, query in requests),
        padding=draw(sampled_from((0, 1, 2))),
        topk=draw(sampled_from((8, 4, 16))),
        page_size=draw(sampled_from((16, 64, 1))),
        first_position=draw(sampled_from((0, 1, 4095, 100_000))),
        spare=draw(sampled_from((0, 1, 24))),
        seed=draw(integers(0, 1 << 16)),
    )


SMALL = Config(
    dim=48,
    q_lora_rank=40,
    kv_lora_rank=16,
    qk_rope_head_dim=16,
    index_n_heads=4,
    index_head_dim=32,
    n_layers=1,
    n_heads=1,
)


@dataclass(frozen=True)
class _World:
    """Weights, and the activations of all tokens, contexts first."""

    config: Config
    w: Indexer
    a_TM: Tensor
    qr_TL: Tensor

    @classmethod
    def drawn(cls, drawn: StagesInput, hardware: bool) -> _World:
        sizes = {"index_n_heads": 64, "index_head_dim": 128, "qk_rope_head_dim": 64} if hardware else {}
        config = SMALL.replace(index_topk=drawn.topk if not hardware else 128, **sizes)
        g = torch.Generator().manual_seed(drawn.seed)
        M, L, J, width = config.dim, config.q_lora_rank, config.index_n_heads, config.index_head_dim

        def matrix(rows: int, columns: int) -> Linear:
            return Linear(weight=(torch.randn(rows, columns, generator=g) * columns**-0.5).bfloat16())

        w = Indexer(
            q_b=matrix(J * width, L),
            k=matrix(width, M),
            k_norm_weight=1 + 0.5 * torch.randn(width, generator=g),
            k_norm_bias=torch.randn(width, generator=g),
            head_weights=matrix(J, M),
        )
        tokens = sum(drawn.contexts) + sum(drawn.queries) + drawn.padding
        a_TM, qr_TL = (torch.randn(tokens, n, generator=g).bfloat16() for n in (M, L))
        return cls(config, w, a_TM, qr_TL)


@dataclass(frozen=True)
class _Step:
    """What the stages of one step made."""

    batch: Batch
    positions: Tensor
    q: Tensor
    scale: Tensor
    weights: Tensor
    scores: Tensor
    topk: Tensor


class IndexerStages(InputCheck[StagesInput]):
    """The path's indexer, stage by stage, each judged from what the stage before it made."""

    name = "indexer_stages"
    meaning = "keys, queries, head weights and scores lie within their bounds, and the selection is one they call for"
    family = "indexer"
    input_type = StagesInput

    def inputs(self) -> st.SearchStrategy[StagesInput]:
        """Contexts around topk, at small and large positions."""
        return stages_inputs()

    def run(self, drawn: StagesInput, target: Target) -> Verdict:
        """Cache the contexts, then run one step."""
        found, world = Findings(), _World.drawn(drawn, target.evidence == "hardware")
        assert target.kernels is not None
        slots = sum(drawn.contexts) + sum(drawn.queries) + 64 * (len(drawn.contexts) + 1)
        state = CacheState(world.config, slots, drawn.page_size, device_of(target))
        before = sum(drawn.contexts)
        if before:
            batch = state.append({r: [0] * n for r, n in enumerate(drawn.contexts) if n})
            self._write(drawn, world, slice(0, before), batch, state, target)
        new = {r: [0] * n for r, n in enumerate(drawn.queries)}
        batch = state.append(new, sum(drawn.queries) + drawn.padding)
        rows = slice(before, before + batch.step.num_tokens)
        step = self._step(drawn, world, rows, batch, state, target)
        keys, scales = self._cached(drawn, state)
        self._judge_keys(found, drawn, world, keys, scales)
        self._judge_queries(found, world, rows, step)
        self._judge_scores(found, step, keys, scales)
        return self.verdict(found.violation, found.measured())

    def _write(
        self, drawn: StagesInput, world: _World, rows: slice, batch: Batch, state: CacheState, target: Target
    ) -> layers.Table:
        kernels, device = target.kernels, state.device
        assert kernels is not None
        table = layers.rope_table(world.config, batch.positions + drawn.first_position)
        keys = subject.index_keys(world.a_TM[rows].to(device), world.w, table, world.config, kernels)
        subject.write_keys(keys, state.index[0], batch.new_slots, preshuffle=state.preshuffle, kernels=kernels)
        return table

    def _step(
        self, drawn: StagesInput, world: _World, rows: slice, batch: Batch, state: CacheState, target: Target
    ) -> _Step:
        kernels, device, config = target.kernels, state.device, world.config
        assert kernels is not None
        table = self._write(drawn, world, rows, batch, state, target)
        q, scale = subject.index_queries(world.qr_TL[rows].to(device), world.w, table, config, kernels)
        weights = subject.head_weights(world.a_TM[rows].to(device), scale, world.w, config, kernels)
        query, ways = subject.IndexQuery(q=q, weights=weights), subject.split_rows(batch, drawn.longest_paged)
        cache = state.index[0]
        width = max(batch.step.seq_lens) + drawn.spare
        scores = subject.index_scores(
            query, cache, batch, ways, width=width, preshuffle=state.preshuffle, kernels=kernels
        )
        topk = subject.select(scores, batch, ways, config.index_topk, kernels)
        positions = batch.positions + drawn.first_position
        made = (part.cpu() for part in (positions, q, scale, weights, scores, topk))
        return _Step(batch, *made)

    def _cached(self, drawn: StagesInput, state: CacheState) -> tuple[list[Tensor], list[Tensor]]:
        """Keys and scales of each request's tokens in order, read byte by byte."""
        raw, width = state.index[0].cpu(), state.index[0].shape[-1] - 4
        keys, scales = [], []
        for request in range(len(drawn.queries)):
            slots = state.slots(request)
            at = key_places(slots, drawn.page_size, width, state.preshuffle)
            keys.append(raw.flatten()[at].view(FP8).double())
            scales.append(raw.flatten()[scale_places(slots, drawn.page_size, width)].view(torch.float32)[:, 0].double())
        return keys, scales

    def _fp8_head(self, world: _World, x: Approx, positions_T: Tensor, floor: float) -> Approx:
        """RoPE on the first part, half-split, then e4m3 with one power-of-two scale per head."""
        rope = world.config.qk_rope_head_dim
        turned = _stages(world).turned(x.apply(lambda t: t[..., :rope]), positions_T, "half-split")
        whole = Approx(
            torch.cat([turned.value, x.value[..., rope:]], -1), torch.cat([turned.err, x.err[..., rope:]], -1)
        )
        return fake_quant(whole, ScaleRule(block=world.config.index_head_dim, amax_floor=floor), ARITH)

    def _judge_keys(
        self, found: Findings, drawn: StagesInput, world: _World, keys: list[Tensor], scales: list[Tensor]
    ) -> None:
        before = [sum(drawn.contexts[:r]) for r in range(len(drawn.contexts))]
        own = [sum(drawn.contexts) + sum(drawn.queries[:r]) for r in range(len(drawn.queries))]
        for request, (context, query) in enumerate(zip(drawn.contexts, drawn.queries, strict=True)):
            tokens = [*range(before[request], before[request] + context), *range(own[request], own[request] + query)]
            positions = torch.arange(context + query) + drawn.first_position
            linear = _stages(world).linear(exact(world.a_TM[tokens]), world.w.k.weight)
            gain, bias = exact(world.w.k_norm_weight), exact(world.w.k_norm_bias)
            normed = norm_bounds.layer_norm(linear, gain, bias, world.config.norm_eps, ARITH)
            bound = self._fp8_head(world, _stages(world).stored(normed), positions, 1e-4)
            found.within(f"index_key of request {request}", keys[request] * scales[request][:, None], bound)

    def _judge_queries(self, found: Findings, world: _World, rows: slice, step: _Step) -> None:
        config, b, live = world.config, _stages(world), step.batch.live
        qr, a = exact(world.qr_TL[rows][:live]), exact(world.a_TM[rows][:live])
        q = b.linear(qr, world.w.q_b.weight).apply(lambda t: t.reshape(len(t), config.index_n_heads, -1))
        computed = step.q[:live].double() * step.scale[:live].double()[..., None]
        found.within("index_q", computed, self._fp8_head(world, q, step.positions[:live].cpu(), 1e-10))
        weights = b.linear(a, world.w.head_weights.weight)
        for width in (config.index_head_dim, config.index_n_heads):
            weights = scale_by(weights, width**-0.5, ARITH)
        found.within("index_w", step.weights[:live], mul(weights, exact(step.scale[:live]), ARITH))

    def _judge_scores(self, found: Findings, step: _Step, keys: list[Tensor], scales: list[Tensor]) -> None:
        """Each row against the keys of its own request; then its selection."""
        for row in range(step.batch.live, len(step.scores)):
            text = f"index_score, index_topk: padding row {row} is not empty"
            empty = bool((step.scores[row] == -torch.inf).all()) and bool((step.topk[row] == -1).all())
            found.require("rows_of_padding", empty, text)
        for request, rows in enumerate(step.batch.spans()):
            q, w = (exact(part[rows].float()) for part in (step.q, step.weights))
            bound = bounds.index_scores(q, w, exact(keys[request]), exact(scales[request]), ARITH)
            for row in range(rows.start, rows.stop):
                self._judge_row(found, step, row, bound.map(slice(row - rows.start, row - rows.start + 1)))

    def _judge_row(self, found: Findings, step: _Step, row: int, bound: Approx) -> None:
        length = int(step.batch.lengths[row])
        hidden = bool((step.scores[row, length:] == -torch.inf).all())
        found.require("rows_masked", hidden, f"index_score: row {row} shows a position from {length} on")
        scores_1S = step.scores[row : row + 1, :length]
        found.within(f"index_score of row {row}", scores_1S, bound.apply(lambda t: t[:, :length]))
        self._selected(found, row, scores_1S, step.topk[row : row + 1].long())

    def _selected(self, found: Findings, row: int, scores_1S: Tensor, topk_1K: Tensor) -> None:
        if bool(scores_1S.isnan().any()):
            return  # reported already
        length = torch.tensor([scores_1S.shape[1]])
        ideal_1K = select_topk(scores_1S, length, topk_1K.shape[1])
        certificate = certify_topk(scores_1S, torch.zeros_like(scores_1S), ideal_1K, topk_1K)
        found.certified(f"index_topk of row {row}", certificate)
        found.counts["rows_longer_than_topk"] += int(length) > topk_1K.shape[1]


def _stages(world: _World) -> StageBounds:
    return StageBounds(config=world.config, precision=Precision(bf16=True), arith=ARITH)


CHECKS: tuple[type[InputCheck[Any]], ...] = (IndexerStages,)
