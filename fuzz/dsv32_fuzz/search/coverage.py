"""Coverage of the input space: which cells a search has visited, and how often rare events happened.

A cell is (length class of the longest request, query class, mix, padding, options) of one step batch. Rare events are
those that defects hide behind; most span two steps. `Coverage` is plain counts: it adds up in any order, survives JSON,
and lists what was never visited, because the space of cells is known beforehand.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from dsv32_fast.batch import StepBatch
from dsv32_fast.metadata import metadata_key
from dsv32_fast.options import Options, describe
from dsv32_fuzz.case import Case
from dsv32_fuzz.oracle import planner_lens, split_cap

LENGTHS = ("empty", "1", "2..15", "16..63", "64..topk-9", "around topk", "to 4 topk", "beyond")
QUERIES = ("none", "1", "2", "3..4", "5..8", "9..topk-1", "topk or more")
MIXES = ("idle", "capture", "decode", "uniform drafts", "ragged drafts", "prefill", "prefill and decode")
PADDINGS = ("none", "rows", "requests")
EVENTS = (
    "row crosses topk",
    "shrink after grow",
    "regrow after shrink",
    "capture between equal keys",
    "zero-length request in the middle",
    "split cap changes with equal lengths",
    "same short key, other rows",
    "same lengths, other order",
    "equal step again",
    "all rows padding",
    "draft crosses topk",
    "chunk ends at topk",
    "batch of one after many",
    "optimistic bound",
)
AROUND = 9
"""Tokens on either side of topk that count as around it: 8 rows of a request and one more."""


class Coverage(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Counts of cases and steps, by cell and by event; `add` a case, `merge` two."""

    cases: int = 0
    steps: int = 0
    cells: dict[str, int] = {}
    """By `length/query/mix/padding/options`."""
    events: dict[str, int] = {}

    def add(self, case: Case) -> None:
        """Count the steps of a judged case."""
        self.cases += 1
        self.steps += len(case.steps)
        named = "unknown" if case.options is None else describe(case.options)
        topk = case.dims.topk
        self._count(self.cells, ("/".join((*cell_of(step, topk), named)) for step in case.steps))
        self._count(self.events, events_of(case.steps, topk))

    @staticmethod
    def _count(table: dict[str, int], names: Iterable[str]) -> None:
        for name in names:
            table[name] = table.get(name, 0) + 1

    def cells_of(self, options: Options) -> tuple[list[str], list[str]]:
        """The cells of the space that were visited under `options`, and those that never were."""
        named = describe(options)
        cells = ["/".join((*cell, named)) for cell in possible_cells()]
        return [c for c in cells if c in self.cells], [c for c in cells if c not in self.cells]

    def missing_events(self) -> list[str]:
        """The rare events that never happened."""
        return [event for event in EVENTS if not self.events.get(event)]

    def untested(self) -> str:
        """Why the cases tested no boundary, empty if they did: such a search is MISTRUSTED."""
        if not self.steps:
            return "no step was judged"
        if not self.events.get("row crosses topk"):
            return "no row crossed topk, the boundary at which plans change"
        return ""


def merge_coverage(parts: Iterable[Coverage]) -> Coverage:
    """The sum of some coverages, whatever their order; names are sorted, so equal sums are equal documents."""
    parts = list(parts)
    cells, events = Counter[str](), Counter[str]()
    for part in parts:
        cells.update(part.cells)
        events.update(part.events)
    return Coverage(
        cases=sum(part.cases for part in parts),
        steps=sum(part.steps for part in parts),
        cells=dict(sorted(cells.items())),
        events=dict(sorted(events.items())),
    )


def length_class(longest: int, topk: int) -> str:
    """Of the longest sequence of a step."""
    edges = (1, 2, 16, 64, topk - AROUND + 1, topk + AROUND, 4 * topk + 1)
    return LENGTHS[sum(longest >= edge for edge in edges)]


def query_class(longest: int, topk: int) -> str:
    """Of the longest query of a step."""
    return QUERIES[sum(longest >= edge for edge in (1, 2, 3, 5, 9, topk))]


def mix_of(step: StepBatch) -> str:
    """What kind of step it is, as far as lengths tell: more than 8 rows of a request are prefill."""
    live = [(q, s) for q, s in zip(step.query_lens, step.seq_lens, strict=True) if q]
    if not live or live == [(1, 1)]:
        return "idle"
    if all(q == s for q, s in live) and step.max_seq_len > max(s for _, s in live) + 8:
        return "capture"
    queries = {q for q, _ in live}
    if max(queries) > 8 or all(q == s for q, s in live):
        return "prefill and decode" if min(queries) <= 8 and len(queries) > 1 else "prefill"
    if queries == {1}:
        return "decode"
    return "uniform drafts" if len(queries) == 1 else "ragged drafts"


def padding_of(step: StepBatch) -> str:
    """Whether there are rows of no request, and requests of no row to account for them."""
    if step.num_tokens == step.num_query_tokens:
        return "none"
    return "requests" if 0 in step.query_lens else "rows"


def cell_of(step: StepBatch, topk: int) -> tuple[str, str, str, str]:
    """The cell of a step, but for the options."""
    longest = max((s for q, s in zip(step.query_lens, step.seq_lens, strict=True) if q), default=0)
    return length_class(longest, topk), query_class(step.max_query_len, topk), mix_of(step), padding_of(step)


def possible_cells() -> list[tuple[str, str, str, str]]:
    """The cells that a step can lie in: those of the product that do not contradict themselves."""
    return [cell for cell in itertools.product(LENGTHS, QUERIES, MIXES, PADDINGS) if _possible(*cell)]


_MIXES_OF_QUERY = {
    "none": ("idle",),
    "1": ("idle", "capture", "decode", "prefill"),
    "2": ("capture", "uniform drafts", "ragged drafts", "prefill", "prefill and decode"),
    "3..4": ("capture", "uniform drafts", "ragged drafts", "prefill", "prefill and decode"),
    "5..8": ("capture", "uniform drafts", "ragged drafts", "prefill", "prefill and decode"),
    "9..topk-1": ("capture", "prefill", "prefill and decode"),
    "topk or more": ("capture", "prefill", "prefill and decode"),
}
_SHORTEST = {"none": 0, "1": 1, "2": 2, "3..4": 2, "5..8": 2, "9..topk-1": 2, "topk or more": 5}
"""The first length class, by place, that a query of the class fits into."""


def _possible(length: str, query: str, mix: str, padding: str) -> bool:
    if mix not in _MIXES_OF_QUERY[query] or (length == "empty") != (query == "none"):
        return False
    if mix == "idle":
        return (query == "none" and padding != "none") or (query == "1" and length == "1")
    place = LENGTHS.index(length)
    if mix in ("capture", "prefill") and query in ("1", "2", "3..4", "5..8"):
        # As long as its query: a class of short queries is one or two classes of lengths.
        return place == {"1": 1}.get(query, 2)
    if mix == "capture":
        return place >= _SHORTEST[query] and (query == "topk or more") == (place >= 5)
    if mix == "decode":
        return place >= 1 if query == "1" else False
    if mix == "prefill and decode" and query in ("2", "3..4", "5..8"):
        return place == 2
    return place >= _SHORTEST[query]


def events_of(steps: Sequence[StepBatch], topk: int) -> list[str]:
    """The rare events of a sequence, one entry each time that one happens."""
    found: list[str] = []
    grown = shrunk = False
    for i, step in enumerate(steps):
        found += _alone(step, topk)
        if not i:
            continue
        last = steps[i - 1]
        found += _between(last, step, topk)
        found += ["shrink after grow"] * (grown and step.num_tokens < last.num_tokens)
        found += ["regrow after shrink"] * (shrunk and step.num_tokens > last.num_tokens)
        grown |= step.num_tokens > last.num_tokens
        shrunk |= step.num_tokens < last.num_tokens
        if i > 1 and mix_of(last) == "capture" and _key(steps[i - 2], topk) == _key(step, topk):
            found.append("capture between equal keys")
    return found


def _alone(step: StepBatch, topk: int) -> list[str]:
    pairs = [(q, s) for q, s in zip(step.query_lens, step.seq_lens, strict=True)]
    last_live = max((r for r, (q, _) in enumerate(pairs) if q), default=0)
    tests = {
        "all rows padding": step.num_tokens > 0 and not step.num_query_tokens,
        "zero-length request in the middle": any(not q for q, _ in pairs[:last_live]),
        "draft crosses topk": any(1 < q <= 8 and s - q + 1 < topk <= s for q, s in pairs),
        "chunk ends at topk": any(q > 8 and s == topk for q, s in pairs),
        "optimistic bound": 0 < step.max_seq_len - max((s for _, s in pairs), default=0) <= 8,
    }
    return [name for name, happened in tests.items() if happened]


def _between(last: StepBatch, step: StepBatch, topk: int) -> list[str]:
    before_T, now_T = planner_lens(last, topk), planner_lens(step, topk)
    same_rows = np.array_equal(before_T, now_T)
    requests = len(step.seq_lens) == len(last.seq_lens) and len(step.seq_lens) > 0
    ordered = step.seq_lens == last.seq_lens and step.query_lens == last.query_lens
    again = sorted(zip(step.seq_lens, step.query_lens, strict=True)) == sorted(
        zip(last.seq_lens, last.query_lens, strict=True)
    )
    tests = {
        "row crosses topk": requests and _crosses(last, step, topk),
        "split cap changes with equal lengths": same_rows and split_cap(last, topk) != split_cap(step, topk),
        "same short key, other rows": not same_rows and _key(last, topk) == _key(step, topk),
        "same lengths, other order": again and not ordered,
        "equal step again": step == last,
        "batch of one after many": len(step.seq_lens) == 1 < len(last.seq_lens),
    }
    return [name for name, happened in tests.items() if happened]


def _crosses(last: StepBatch, step: StepBatch, topk: int) -> bool:
    """Whether the first row of a request was short of topk and is not now, in the same place of the batch."""
    return any(
        q and p and s - q + 1 >= topk > t - p + 1
        for q, s, p, t in zip(step.query_lens, step.seq_lens, last.query_lens, last.seq_lens, strict=True)
    )


def _key(step: StepBatch, topk: int) -> object:
    return metadata_key(step, "pr42982", topk, 16)
