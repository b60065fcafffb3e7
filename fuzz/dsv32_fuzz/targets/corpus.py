"""Step sequences with a purpose, for any target: each tests one assumption of a cached or tail-cleared builder.

They follow from what the planner input is, L(r, j) = min(seq - q + j + 1, topk), and from nothing that a release does:
neighbours whose clamped sequence lengths, row counts and longest queries agree while their rows do not.
"""

from __future__ import annotations

from dataclasses import dataclass

from dsv32_fast.batch import StepBatch
from dsv32_fuzz.case import Case
from dsv32_fuzz.strategies import WORLDS, World, dims_for
from dsv32_fuzz.targets import Target

TOPK = 2048
LONG = 163840


@dataclass(frozen=True)
class Purpose:
    """One sequence, its name, and the traffic class that it belongs to."""

    name: str
    scope: str
    steps: tuple[StepBatch, ...]


def _step(query: tuple[int, ...], seqs: tuple[int, ...], rows: int = 0, bound: int = 0) -> StepBatch:
    return StepBatch(query_lens=query, seq_lens=seqs, num_tokens=rows, max_seq_len=bound)


def _decode(count: int, seq: int, rows: int = 0) -> StepBatch:
    padding = (rows or count) - count
    return _step((1,) * count + (0,) * padding, (seq,) * count + (0,) * padding, rows)


PURPOSES: tuple[Purpose, ...] = (
    Purpose("saturated decode", "decode", tuple(_decode(8, 3000 + i) for i in range(4))),
    Purpose("decode across topk", "decode", tuple(_decode(4, TOPK - 2 + i) for i in range(5))),
    Purpose("requests change places", "decode", (_step((1, 1), (100, 5000)), _step((1, 1), (5000, 100)))),
    Purpose("padded decode shrinks and grows", "decode", tuple(_decode(n, 3000, 64) for n in (32, 3, 5, 2, 32))),
    Purpose(
        "verified drafts cross topk",
        "mtp_decode",
        tuple(_step((4, 4), (s, s)) for s in (TOPK, TOPK + 1, TOPK + 3, TOPK + 4)),
    ),
    Purpose("two drafts at the edge", "mtp_decode", (_step((2,), (TOPK,)), _step((2,), (TOPK + 1,)))),
    Purpose(
        "a bound beyond the lengths",
        "mtp_decode",
        (_step((2,), (1150,), bound=1150), _step((2,), (1150,), bound=1152), _step((2,), (1150,), bound=LONG)),
    ),
    Purpose("a prompt in equal chunks", "chunked_prefill", tuple(_step((TOPK,), (TOPK * i,)) for i in (1, 2, 3, 4))),
    Purpose(
        "chunks beside decodes",
        "chunked_prefill",
        tuple(_step((512, 1, 1), (512 * i, 4000 + i, 5000 + i)) for i in (5, 6, 7)),
    ),
    Purpose(
        "a whole prompt gives way to a continuation",
        "chunked_prefill",
        (_step((1, TOPK), (6000, TOPK)), _step((1, TOPK), (6001, 3 * TOPK)), _step((1, TOPK), (6002, TOPK))),
    ),
    Purpose("permuted query lengths", "mixed", (_step((3, 1, 1), (2049,) * 3), _step((1, 3, 1), (2049,) * 3))),
    Purpose(
        "unequal query lengths, equal clamped lengths",
        "mixed",
        (_step((5, 3, 1), (2050, 2049, 2048)), _step((3, 5, 1), (2050, 2052, 2048)), _step((5, 3, 1), (9000,) * 3)),
    ),
    Purpose("an idle build between", "mixed", (_decode(8, 4000), _step((1,), (1,)), _decode(8, 4001))),
    Purpose(
        "a capture between",
        "mixed",
        (_decode(32, 4000), _step((1,) * 64, (1,) * 64, bound=LONG), _decode(32, 4001, 64), _decode(3, 4002, 64)),
    ),
    Purpose("rows without a request", "mixed", (_step((2, 2), (50, 3000), 8), _step((2, 2), (51, 3001), 8))),
)


def cases(target: Target, world: World = WORLDS[0]) -> list[tuple[str, Case]]:
    """Every purpose as a replayable case of the target, by name."""
    return [
        (
            purpose.name,
            Case(
                check="",
                scope=purpose.scope,
                target=target.name,
                options=target.options,
                dims=dims_for(purpose.steps, world),
                steps=purpose.steps,
                note=purpose.name,
            ),
        )
        for purpose in PURPOSES
    ]
