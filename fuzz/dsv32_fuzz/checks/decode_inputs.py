"""What the attention checks draw: a decode step of few rows, at the corners where plans, gates and windows change.

A drawn step is numbers only: lengths of its requests, those of a step before it (whose plan may wrongly live on), the
sizes of the world, how the kernel is reached, and a seed for pages, positions and values.
"""

from __future__ import annotations

from typing import Literal

import msgspec
import torch
from hypothesis import strategies as st
from torch import Tensor

from dsv32_fast.batch import StepBatch
from dsv32_fuzz.probes.decode_step import DecodeEngine, DecodeStep, DType, Shape, admitted
from dsv32_fuzz.targets import Target

Way = Literal["path", "kernel", "kernel with LSE"]
SCALES = (0.37, 0.21)
"""Of an fp8 Q and KV: no powers of two, so that a scale which is forgotten or applied twice shows."""


class DecodeInput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One decode step; `before` are the context lengths of the step before, none if there was none."""

    query_lens: tuple[int, ...]
    contexts: tuple[int, ...]
    before: tuple[int, ...] = ()
    before_query_lens: tuple[int, ...] = ()
    """Query lengths of the step before, where they were others."""
    padding: int = 0
    heads: int = 16
    topk: int = 64
    q: DType = "bf16"
    kv: DType = "bf16"
    way: Way = "kernel with LSE"
    amplitude: float = 1.0
    """Standard deviation of the scores, about."""
    seed: int = 0

    def shape(self, target: Target) -> Shape:
        """The sizes, as far as the target's kernels admit them."""
        return admitted(Shape(heads=self.heads, topk=self.topk, q=self.q, kv=self.kv), target)

    @property
    def scales(self) -> tuple[float, float]:
        """Of Q and KV; 1 where it is bf16."""
        return SCALES[0] if self.q == "fp8" else 1.0, SCALES[1] if self.kv == "fp8" else 1.0

    @property
    def by_path(self) -> bool:
        """Whether the step goes through the path's own `attention.decode`, which takes bf16 only."""
        return self.way == "path" and self.q == self.kv == "bf16"

    def build(self, target: Target, *, kept: int = 0) -> DecodeStep:
        """The step on a fresh engine, after the one before it."""
        earlier = self.before_query_lens or self.query_lens
        most = max(sum(self.query_lens), sum(earlier)) + self.padding
        engine = DecodeEngine(target, self.shape(target), max_rows=most)
        if self.before:
            engine.build(_batch(earlier, self.before, self.padding), seed=self.seed + 1)
        return engine.build(_batch(self.query_lens, self.contexts, self.padding), seed=self.seed, kept=kept)

    def values(self, step: DecodeStep) -> tuple[Tensor, Tensor]:
        """Random queries [T, H, D] and cache [S, D]; slots that no row attends are NaN, the RoPE part is strong."""
        shape, generator = step.engine.shape, torch.Generator().manual_seed(self.seed)
        q_THD = torch.randn(step.rows, shape.heads, shape.width, generator=generator)
        kv_SD = torch.randn(len(step.positions_S), shape.width, generator=generator)
        q_THD[..., shape.latent :] *= (shape.latent / shape.rope) ** 0.5
        kv_SD[step.positions_S < 0] = torch.nan
        return q_THD * self.amplitude / self.scales[0] / 2**0.5, kv_SD / self.scales[1]


def _batch(query_lens: tuple[int, ...], contexts: tuple[int, ...], padding: int) -> StepBatch:
    seqs = tuple(q + c for q, c in zip(query_lens, contexts, strict=True))
    return StepBatch(query_lens=query_lens, seq_lens=seqs, num_tokens=sum(query_lens) + padding)


_DTYPES: tuple[tuple[DType, DType], ...] = (("bf16", "bf16"), ("fp8", "fp8"), ("bf16", "fp8"))


@st.composite
def decode_inputs(
    draw: st.DrawFn, *, most_rows: int = 24, topks: tuple[int, ...] = (64, 16, 256), histories: bool = True
) -> DecodeInput:
    """Steps of one to four requests; contexts around one granule, around topk, and beyond; drafts of up to seven."""
    topk = draw(st.sampled_from(topks))
    q, room = draw(st.sampled_from((1, 1, 2, 3, 4, 6, 8))), most_rows
    queries, contexts = [], []
    for _ in range(draw(st.integers(1, 4))):
        query = min(draw(st.sampled_from((q, q, q, 1, 5))), room)
        if query:
            queries.append(query)
            contexts.append(draw(_contexts(topk, query)))
            room -= query
    before: tuple[int, ...] = ()
    earlier: tuple[int, ...] = ()
    match draw(st.sampled_from(("crossing", "shift", "crossing", "permuted", "none"))) if histories else "none":
        case "shift":
            shift = draw(st.sampled_from((-1, -2, -3, -7, 1, 3, 0)))
            before = tuple(max(0, c + shift) for c in contexts)
        case "crossing":  # every sequence at or beyond topk, before and after: keys of sequence lengths are equal
            contexts = [draw(_crossing(topk, query)) for query in queries]
            before = tuple(draw(_crossing(topk, query)) for query in queries)
        case "permuted":
            seqs = [q + c for q, c in zip(queries, contexts, strict=True)]
            earlier = tuple(draw(st.permutations(queries)))
            before = tuple(max(0, seq - q) for seq, q in zip(seqs, earlier, strict=True))
    dtypes = draw(st.sampled_from(_DTYPES))
    return DecodeInput(
        query_lens=tuple(queries),
        contexts=tuple(contexts),
        before=before,
        before_query_lens=earlier,
        padding=draw(st.sampled_from((0, 0, 1, 5))),
        heads=draw(st.sampled_from((16, 16, 32, 64, 128))),
        topk=topk,
        q=dtypes[0],
        kv=dtypes[1],
        way=draw(st.sampled_from(("kernel with LSE", "path", "kernel"))),
        amplitude=draw(st.sampled_from((1.0, 0.1, 4.0, 30.0))),
        seed=draw(st.integers(0, 2**16)),
    )


def _crossing(topk: int, query: int) -> st.SearchStrategy[int]:
    """Contexts with which a sequence has topk tokens or more, most often so that its first rows see fewer."""
    return st.sampled_from((*range(max(0, topk - query), topk), topk, topk + 1, topk + 9))


def _contexts(topk: int, query: int) -> st.SearchStrategy[int]:
    """Context lengths: none, one granule's edges, rows on both sides of topk, and up to twice topk."""
    return st.one_of(
        st.sampled_from((0, 1, 14, 15, 16, 17, 33)),
        st.integers(-query - 1, 2).map(lambda d: max(0, topk + d)),
        st.integers(0, 2 * topk),
    )
