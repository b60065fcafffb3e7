"""Hypothesis strategies for step sequences, one per traffic class, at the true constants.

Lengths cluster where the planner input changes its form: around topk, around one granule of 16, where vLLM's split
cap doubles, and far beyond topk.
Groups of identical requests keep large batches cheap to draw and easy to shrink: the shrunk case has one request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Literal, TypeVar

from hypothesis import strategies as st

from dsv32_fast.batch import StepBatch
from dsv32_fuzz.case import Dims
from dsv32_fuzz.workload import DEFAULT_CAPTURE_SIZES

Steps = tuple[StepBatch, ...]
T = TypeVar("T")

# A strategy is validated when it is first drawn from, so one that is drawn often is made once.
integers = cache(st.integers)
booleans = cache(st.booleans)
_SAMPLED: dict[str, st.SearchStrategy[Any]] = {}


def sampled_from(values: Sequence[T]) -> st.SearchStrategy[T]:
    """One of some values, the first one the simplest; made once for each list of values."""
    key = repr(values)  # not the values themselves: (0, 1) equals (False, True)
    if key not in _SAMPLED:
        _SAMPLED[key] = st.sampled_from(values)
    return _SAMPLED[key]


MAX_STEPS = 8
MAX_MODEL_LEN = 163840
SPLIT_CAP_EDGES = (256, 384, 640, 1152)  # where next_pow2(max_seq_len / 128) doubles


def graph_padding(rows: int, multiple: int = 1) -> int:
    """Rows of the smallest captured graph that holds `rows`, a multiple of `multiple`; unpadded above the largest."""
    return next((size for size in DEFAULT_CAPTURE_SIZES if size >= rows and size % multiple == 0), rows)


def _uniform(q: int, seqs: tuple[int, ...], rows: int, bound: int = 0) -> StepBatch:
    """A step of equal query lengths; as in vLLM, padding rows are those of padding requests without a token."""
    padding = (0,) * (rows // q - len(seqs))
    return StepBatch(query_lens=(q,) * len(seqs) + padding, seq_lens=seqs + padding, num_tokens=rows, max_seq_len=bound)


@cache
def context_lens(topk: int) -> st.SearchStrategy[int]:
    """Context lengths in tokens: small ones, a granule's edges, around topk, and long ones."""
    return st.one_of(
        integers(0, 64),
        sampled_from((15, 16, 17, 127, 128, 1024)),
        st.builds(lambda edge, before: edge - before, sampled_from(SPLIT_CAP_EDGES), integers(0, 15)),
        integers(-12, 12).map(lambda d: max(0, topk + d)),
        integers(topk, MAX_MODEL_LEN - 16384),
    )


@cache
def _mtp_context_lens(topk: int, q: int, around: int) -> st.SearchStrategy[int]:
    """Anything, or (for `around` > 0) lengths that the next steps take across `around`, beside saturated ones."""
    if not around:
        return context_lens(topk).map(lambda c: max(1, c))
    crossing = integers(-2 * q, 0).map(lambda d: around - q + d + q // 2)
    return st.one_of(crossing, crossing, crossing, integers(around, 8 * topk)) if around == topk else crossing


@st.composite
def decode_steps(draw: st.DrawFn, topk: int = 2048) -> Steps:
    """Pure decode, q = 1 throughout: lengths grow by one, requests finish and new ones join, rows are graph-padded."""
    seqs = draw(st.lists(context_lens(topk).map(lambda c: c + 1), min_size=1, max_size=4))
    copies = draw(sampled_from((1, 1, 2, 16, 64, 128)))
    padded = draw(booleans())
    steps: list[StepBatch] = []
    for _ in range(draw(integers(2, MAX_STEPS))):
        live = tuple(s for s in seqs for _ in range(copies))
        rows = graph_padding(len(live)) if padded else len(live)
        steps.append(_uniform(1, live, rows))
        seqs = [s + 1 for s in seqs]
        match draw(sampled_from(("go on", "go on", "finish", "join", "replace", "reorder", "repeat"))):
            case "finish" if len(seqs) > 1:
                last = seqs.pop()  # it fills the hole that the finished request leaves
                seqs[draw(integers(0, len(seqs) - 1))] = last
            case "join" if len(seqs) < 6:
                seqs.append(draw(context_lens(topk)) + 1)
            case "replace":
                seqs[draw(integers(0, len(seqs) - 1))] = draw(context_lens(topk)) + 1
            case "reorder":
                seqs = draw(st.permutations(seqs))
            case "repeat":
                seqs = [s - 1 for s in seqs]
    return tuple(steps)


@st.composite
def mtp_decode_steps(draw: st.DrawFn, topk: int = 2048) -> Steps:
    """Pure speculative decode: q = depth + 1 for every request, sequences grow by what was accepted.

    The bound `max_seq_len` is at times the optimistic one of asynchronous scheduling, as if all drafts of the last step
    had been accepted. A finished request may give way to one of the same length (a cached prefix, or one that resumes),
    for which nothing was rejected: exact lengths repeat, the bound does not.
    """
    q = draw(integers(1, 7)) + 1
    optimistic, padded = draw(booleans()), draw(booleans())
    around = draw(sampled_from((0, *SPLIT_CAP_EDGES) if optimistic else (0, topk)))
    contexts = draw(st.lists(_mtp_context_lens(topk, q, around), min_size=1, max_size=4))
    copies = draw(sampled_from((1, 1, 2, 16)))
    often = "same lengths" if optimistic else "go on"
    changes = (often, often, often, "go on", "replace one", "finish", "join")
    steps: list[StepBatch] = []
    rejected = 0
    for _ in range(draw(integers(2, MAX_STEPS))):
        seqs = tuple(c + q for c in contexts for _ in range(copies))
        bound = max(seqs) + rejected if optimistic else 0
        rows = graph_padding(q * len(seqs), q) if padded else q * len(seqs)
        steps.append(_uniform(q, seqs, rows, bound))
        change = draw(sampled_from(changes))
        if change == "same lengths":
            rejected = 0
            continue
        accepted = [draw(integers(1, q)) for _ in contexts]
        rejected = q - max(accepted)
        contexts = [c + a for c, a in zip(contexts, accepted, strict=True)]
        match change:
            case "replace one":
                contexts[draw(integers(0, len(contexts) - 1))] = max(1, draw(context_lens(topk)))
            case "finish" if len(contexts) > 1:
                contexts.pop()
            case "join" if len(contexts) < 6:
                contexts.append(max(1, draw(context_lens(topk))))
    return tuple(steps)


@st.composite
def chunked_prefill_steps(draw: st.DrawFn, topk: int = 2048, budget: int = 8192) -> Steps:
    """Prompts longer than a chunk: equal chunks one after another, at times beside decoding requests."""
    chunk = draw(st.one_of(sampled_from((topk, topk // 2, budget // 2)), integers(1, budget // 2)))
    prompts = draw(integers(1, 2)) if chunk <= budget // 4 else 1
    decoding = draw(st.lists(context_lens(topk).map(lambda c: c + 1), max_size=2))
    steps: list[StepBatch] = []
    done = 0
    for _ in range(draw(integers(2, 6))):
        rest = draw(integers(1, chunk)) if draw(integers(0, 4)) == 4 else chunk  # the last chunk is shorter
        query = (rest,) * prompts + (1,) * len(decoding)
        seqs = (done + rest,) * prompts + tuple(decoding)
        steps.append(StepBatch(query_lens=query, seq_lens=seqs))
        decoding = [s + 1 for s in decoding]
        done = 0 if rest < chunk or draw(integers(0, 3)) == 3 else done + chunk
    return tuple(steps)


def _permuted(draw: st.DrawFn, step: StepBatch, topk: int) -> StepBatch:
    del topk
    order = draw(st.permutations(range(len(step.query_lens))))
    return _with(step, [step.query_lens[i] for i in order], [step.seq_lens[i] for i in order])


def _queries_permuted(draw: st.DrawFn, step: StepBatch, topk: int) -> StepBatch:
    del topk
    query = draw(st.permutations(step.query_lens))
    return _with(step, query, [max(s, q) for s, q in zip(step.seq_lens, query, strict=True)])


def _same_key_other_lengths(draw: st.DrawFn, step: StepBatch, topk: int) -> StepBatch:
    moved = [s + draw(integers(0, 3 * topk)) if s >= topk else s for s in step.seq_lens]
    return _with(step, step.query_lens, moved)


def _advanced(draw: st.DrawFn, step: StepBatch, topk: int) -> StepBatch:
    del topk
    return _with(step, step.query_lens, [s + draw(integers(0, max(1, q))) for q, s in zip(*_both(step), strict=True)])


def _bound_raised(draw: st.DrawFn, step: StepBatch, topk: int) -> StepBatch:
    """The optimistic bound of asynchronous scheduling: up to 7 drafts of the last step may have been rejected."""
    del topk
    bound = max(step.seq_lens) + draw(integers(1, 7))
    return StepBatch(query_lens=step.query_lens, seq_lens=step.seq_lens, num_tokens=step.num_tokens, max_seq_len=bound)


def _idle(draw: st.DrawFn, step: StepBatch, topk: int) -> StepBatch:
    """The dummy build of an idle rank: one row of one token."""
    del draw, step, topk
    return StepBatch(query_lens=(1,), seq_lens=(1,))


def _capture(draw: st.DrawFn, step: StepBatch, topk: int) -> StepBatch:
    """A dummy build of a graph capture: every request as long as its query, bound by the model's maximum."""
    del topk
    q = draw(sampled_from((1, 2, 4)))
    requests = max(1, min(64, len(step.query_lens)))
    return StepBatch(query_lens=(q,) * requests, seq_lens=(q,) * requests, max_seq_len=MAX_MODEL_LEN)


def _repadded(draw: st.DrawFn, step: StepBatch, topk: int) -> StepBatch:
    """The same requests in the rows of another graph."""
    del topk
    rows = step.num_query_tokens + draw(sampled_from((1, 0, 7, 64)))
    return StepBatch(query_lens=step.query_lens, seq_lens=step.seq_lens, num_tokens=rows, max_seq_len=step.max_seq_len)


def _both(step: StepBatch) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return step.query_lens, step.seq_lens


def _with(step: StepBatch, query: Sequence[int], seqs: Sequence[int]) -> StepBatch:
    return StepBatch(query_lens=tuple(query), seq_lens=tuple(seqs), num_tokens=step.num_tokens)


_NEIGHBOURS: tuple[Callable[[st.DrawFn, StepBatch, int], StepBatch], ...] = (
    _advanced,
    _same_key_other_lengths,
    _permuted,
    _queries_permuted,
    _bound_raised,
    _repadded,
    _idle,
    _capture,
)


@st.composite
def mixed_steps(draw: st.DrawFn, topk: int = 2048, budget: int = 8192) -> Steps:
    """Anything a scheduler may send: unequal query lengths, padding, idle and capture builds, same-key neighbours."""

    def fresh() -> StepBatch:
        pairs = draw(st.lists(st.tuples(integers(1, 8), context_lens(topk)), min_size=1, max_size=6))
        if draw(integers(0, 3)) == 3:
            pairs.append((draw(integers(1, budget // 2)), draw(context_lens(topk))))
        rows = sum(q for q, _ in pairs)
        padded = graph_padding(rows) if draw(booleans()) else rows
        return StepBatch(
            query_lens=tuple(q for q, _ in pairs), seq_lens=tuple(q + c for q, c in pairs), num_tokens=padded
        )

    steps = [fresh()]
    for _ in range(draw(integers(1, MAX_STEPS))):
        kind = draw(integers(0, len(_NEIGHBOURS) + 2))
        if kind < len(_NEIGHBOURS):
            steps.append(_NEIGHBOURS[kind](draw, steps[-1], topk))
        else:  # the step before last comes back: a capture or an idle build must not have left its plan behind
            steps.append(steps[-2] if kind == len(_NEIGHBOURS) and len(steps) > 1 else fresh())
    return tuple(steps)


SCOPES: dict[str, Callable[[], st.SearchStrategy[Steps]]] = {
    "decode": decode_steps,
    "mtp_decode": mtp_decode_steps,
    "chunked_prefill": chunked_prefill_steps,
    "mixed": mixed_steps,
}


World = tuple[int, Literal["bf16", "fp8"]]
"""Attention heads on the rank, and the type of the KV cache: the first one is the PR's own (TP 4)."""
WORLDS: tuple[World, ...] = (
    (32, "bf16"),
    (16, "bf16"),
    (32, "fp8"),
    (128, "fp8"),
    (8, "bf16"),
    (64, "bf16"),
    (128, "bf16"),
)


def worlds() -> st.SearchStrategy[World]:
    """Any world, simplest first."""
    return sampled_from(WORLDS)


def dims_for(steps: Steps, world: World = WORLDS[0]) -> Dims:
    """The true constants, with buffers for the largest step: a power of two of rows, so shrinking stays stable."""
    rows = max((step.num_tokens for step in steps), default=1)
    capacity = max(64, 1 << (rows - 1).bit_length()) if rows else 64
    return Dims(max_num_batched_tokens=capacity, num_heads=world[0], kv_dtype=world[1])
