"""Step sequences by mix: each names one thing that happens to a batch in serving, and makes mostly that.

Where the serving engine finds its way into a corner, a mix starts there: lengths lie around 1, 16, 64, a page, a chunk
and topk, and every mix ends with a neighbour that the key of vLLM #42982 cannot tell from the step before
(`same_key_neighbour`). All of them at the true constants; `batch_mix_steps` is the traffic class of them all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hypothesis import strategies as st

from dsv32_fast.batch import StepBatch
from dsv32_fuzz.serving.engine import CAPTURE_SIZES, PAGE
from dsv32_fuzz.strategies import MAX_MODEL_LEN, Steps, graph_padding, integers, sampled_from

TOPK = 2048
CHUNK = 512
EDGES = (1, 2, 15, 16, 17, PAGE - 1, PAGE, PAGE + 1, CHUNK - 1, CHUNK, CHUNK + 1, TOPK - 1, TOPK, TOPK + 1, 4 * TOPK)
"""Sequence lengths at which something changes: one token, a granule, a page, a chunk, topk, far beyond."""
MTP = integers(1, 7)
Pairs = list[tuple[int, int]]
"""(query length, sequence length) of each request."""


def edge_lens(least: int = 1) -> st.SearchStrategy[int]:
    """Sequence lengths at an edge or a token or two beside it, `least` at least."""
    return st.builds(lambda edge, d: max(least, edge + d), sampled_from(EDGES), sampled_from((0, 0, 1, -1, 2)))


def batch(pairs: Sequence[tuple[int, int]], rows: int = 0, bound: int = 0) -> StepBatch:
    """A step of these requests in `rows` rows."""
    return StepBatch(
        query_lens=tuple(q for q, _ in pairs), seq_lens=tuple(s for _, s in pairs), num_tokens=rows, max_seq_len=bound
    )


def same_key_neighbour(step: StepBatch, topk: int = TOPK) -> StepBatch | None:
    """A step with the key of vLLM #42982 of `step`, and other rows; None where there is none.

    Equal keys need equal row counts, longest queries and min(seq, topk). So a request at or beyond topk with a row
    below it moves on until no row is (#47766's chunk, a draft that crosses topk), or two requests of equal length below
    topk change their query lengths.
    """
    pairs = list(zip(step.query_lens, step.seq_lens, strict=True))
    for r, (q, s) in enumerate(pairs):
        if q > 1 and topk <= s < topk + q - 1:
            return batch([*pairs[:r], (q, topk + q - 1), *pairs[r + 1 :]], step.num_tokens)
    for r, (q, s) in enumerate(pairs):
        for other, (q2, s2) in enumerate(pairs[:r]):
            # With one row more than the shorter one below topk, the two differ in the rows that they have there.
            if q != q2 and s == s2 and q and q2 and s - max(q, q2) + 1 < topk:
                pairs[r], pairs[other] = (q2, s), (q, s)
                return batch(pairs, step.num_tokens)
    return None


@st.composite
def ramp(draw: st.DrawFn) -> Steps:
    """Prompts from their first token, in chunks of one size: rows ramp from one key to topk and stay there."""
    chunk = draw(sampled_from((CHUNK, TOPK, PAGE, 1, 16)))
    start = draw(sampled_from((0, max(0, TOPK - chunk))))
    return tuple(batch([(chunk, start + chunk * (i + 1))]) for i in range(draw(integers(2, 5))))


@st.composite
def continuation(draw: st.DrawFn) -> Steps:
    """Later chunks of long prompts, beside requests that decode."""
    chunk, context = draw(sampled_from((CHUNK, PAGE))), draw(edge_lens())
    decoding = draw(st.lists(edge_lens(), max_size=3))
    return tuple(
        batch([(chunk, context + chunk * (i + 1)), *((1, s + i) for s in decoding)])
        for i in range(draw(integers(2, 5)))
    )


@st.composite
def decoding(draw: st.DrawFn) -> Steps:
    """Plain decode in graph-padded rows."""
    seqs = draw(st.lists(edge_lens(), min_size=1, max_size=5))
    return tuple(batch([(1, s + i) for s in seqs], graph_padding(len(seqs))) for i in range(draw(integers(2, 6))))


@st.composite
def verifying(draw: st.DrawFn) -> Steps:
    """Multi-token prediction: q = 2 to 8, from 1 to q tokens accepted, the bound at times optimistic."""
    q = draw(MTP) + 1
    seqs = draw(st.lists(edge_lens(q), min_size=1, max_size=4))
    steps: list[StepBatch] = []
    for _ in range(draw(integers(2, 6))):
        bound = max(seqs) + draw(sampled_from((0, 0, q - 1)))
        steps.append(batch([(q, s) for s in seqs], graph_padding(q * len(seqs), q), bound))
        seqs = [s + draw(integers(1, q)) for s in seqs]
    return tuple(steps)


def _mixed_pairs(draw: st.DrawFn) -> Pairs:
    queries = draw(st.lists(sampled_from((1, 1, 2, 4, 8, 16, PAGE)), min_size=2, max_size=6))
    return [(q, draw(edge_lens(q))) for q in queries]


@st.composite
def mixed(draw: st.DrawFn) -> Steps:
    """Prefill, drafts and decode in one batch that goes on."""
    pairs = _mixed_pairs(draw)
    return tuple(batch([(q, s + i * q) for q, s in pairs]) for i in range(draw(integers(2, 4))))


@st.composite
def idle_between(draw: st.DrawFn) -> Steps:
    """A step, the build of an idle rank or of padding, the step again, and with requests of no row in it."""
    pairs = _mixed_pairs(draw)
    real, rows = batch(pairs), draw(sampled_from((1, 2, 64)))
    idle = draw(sampled_from((batch([(1, 1)]), batch([], rows), batch([(0, 0)] * rows, rows))))
    holes = batch([*pairs[:1], (0, 0), *pairs[1:]], real.num_tokens)
    return real, idle, real, holes, real


@st.composite
def captures(draw: st.DrawFn) -> Steps:
    """The dummy builds of graph capture, largest first, then decode in one of their sizes."""
    q = draw(sampled_from((1, 2, 4)))
    sizes = sorted(draw(st.sets(sampled_from(CAPTURE_SIZES[2:]), min_size=1, max_size=4)), reverse=True)
    dummies = [batch([(q, q)] * (size // q), size, MAX_MODEL_LEN) for size in sizes]
    seqs = draw(st.lists(edge_lens(q), min_size=1, max_size=sizes[-1] // q))
    real = [batch([(q, s + i * q) for s in seqs], sizes[-1]) for i in range(2)]
    return (*dummies, *real, dummies[-1], real[-1])


@st.composite
def preempted(draw: st.DrawFn) -> Steps:
    """A request loses its cache, the others go on, and it comes back as a prompt: from nothing, or from whole pages."""
    seqs = draw(st.lists(edge_lens(2), min_size=2, max_size=4))
    rest, back = seqs[:-1], min(seqs[-1], TOPK + 1)
    cached = draw(sampled_from((0, (back - 1) // PAGE * PAGE)))
    return (
        batch([(1, s) for s in seqs]),
        batch([(1, s + 1) for s in rest]),
        batch([*((1, s + 2) for s in rest), (back - cached, back)]),
        batch([*((1, s + 3) for s in rest), (1, back + 1)]),
        batch([*((1, s + 4) for s in rest), (1, back + 2)]),
    )


@st.composite
def prefix_reused(draw: st.DrawFn) -> Steps:
    """A request is followed by one with its prefix in the cache: the same lengths again, from another context."""
    length, pages = draw(edge_lens(2)), draw(integers(0, 3))
    cached = max(0, (length - 1) // PAGE - pages) * PAGE
    query = min(length - cached, CHUNK)
    first = batch([(query, length)])
    return first, batch([(query, length - cached + query)]), batch([(1, length + 1)]), batch([(query, length)])


@st.composite
def permuted(draw: st.DrawFn) -> Steps:
    """The same requests in another order; at times only their query lengths change places."""
    pairs = _mixed_pairs(draw)
    longest = max(s for _, s in pairs)
    if draw(st.booleans()):
        pairs = [(q, longest) for q, _ in pairs]
    return tuple(batch(draw(st.permutations(pairs))) for _ in range(draw(integers(2, 4))))


@st.composite
def churn(draw: st.DrawFn) -> Steps:
    """The batch shrinks, grows and shrinks again; whoever stays goes on."""
    seqs = draw(st.lists(edge_lens(), min_size=8, max_size=8))
    sizes = draw(st.lists(sampled_from((8, 1, 3, 5, 2)), min_size=3, max_size=7))
    return tuple(batch([(1, s + i) for s in seqs[:size]], graph_padding(size)) for i, size in enumerate(sizes))


MIXES: dict[str, Callable[[], st.SearchStrategy[Steps]]] = {
    "verifying": verifying,
    "ramp": ramp,
    "continuation": continuation,
    "decoding": decoding,
    "mixed": mixed,
    "idle_between": idle_between,
    "captures": captures,
    "preempted": preempted,
    "prefix_reused": prefix_reused,
    "permuted": permuted,
    "churn": churn,
}


@st.composite
def batch_mix_steps(draw: st.DrawFn) -> Steps:
    """One mix, or one after another in the same engine; the same-key neighbour of a step follows it."""
    steps: list[StepBatch] = []
    for name in draw(st.lists(sampled_from(tuple(MIXES)), min_size=1, max_size=2)):
        steps += draw(MIXES[name]())
    at = draw(integers(0, len(steps) - 1))
    neighbour = same_key_neighbour(steps[at])
    if neighbour is not None:
        steps.insert(at + 1, neighbour)
    return tuple(steps)
