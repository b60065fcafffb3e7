"""Does a plan make the decode kernels compute every row once, over exactly its keys?

Written from what the consumers do with the six buffers, not from how a planner fills them: a workgroup does the works
between two entries of work_indptr, each for query rows [qo_start, qo_stop) over keys [kv_start, kv_end), into the
final output (partial_qo_loc -1) or into rows of the partial buffer; a merge reads the partials between two entries of
reduce_indptr and writes the rows in reduce_final_map. Neither checks bounds. So a plan is right when

- the works tile the query rows, and for each tile its works tile the row's keys, from the first one to the last that
  the tile's last token attends to (a causal tile may, and need not, leave out the keys of the tokens behind it);
- several works of a tile all write partials, each at rows of its own inside the buffer; one work writes the output;
- each merge takes all partials of one tile, in KV order, and writes that tile's rows.

Any correct plan passes, also one that AITER would not have made. A row of length zero without a work is reported
under a kind of its own: AITER's parallel planner makes such plans, and the row's output is then never written.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from dsv32_fast.plan import PlanBuffers
from dsv32_fuzz.plan_checker._kinds import KINDS, REDUCE_INDPTR, WORK_INDPTR

__all__ = ["KINDS", "ZERO_LENGTH", "PlanViolation", "check_plan"]

ZERO_LENGTH = "no work: zero length"
_MAX_FINDINGS = 64
Lengths = torch.Tensor | npt.NDArray[Any]


class PlanViolation(msgspec.Struct, frozen=True):
    """One thing that a consumer would do wrong with a plan."""

    row: int
    """Batch entry; for `work_indptr`, `reduce_indptr` and `reduce entry` the index in that buffer."""
    what: str
    """One of `KINDS`."""
    expected: int
    found: int

    def __str__(self) -> str:
        return f"row {self.row}: {self.what}: expected {self.expected}, found {self.found}"


def check_plan(
    plan: PlanBuffers,
    kv_indptr: Lengths,
    qo_indptr: Lengths | None = None,
    *,
    causal: bool = True,
    page_size: int = 1,
    q_per_token: int = 1,
    kv_begins: Lengths | None = None,
    max_seqlen_qo: int | None = None,
) -> list[PlanViolation]:
    """What is wrong with `plan` for the given rows; an empty list is a plan that computes every row right.

    kv_indptr int [B + 1] in pages, qo_indptr int [B + 1] in tokens (None: one token per row). `q_per_token` is the
    number of query rows that a token becomes when heads are folded. `kv_begins` int [B] replaces the rows' first
    positions where kv_indptr only gives lengths (AITER's topk table); batch_idx and kv_offset are then not checked.
    `max_seqlen_qo` scales the partial buffer as `mla_decode_fwd` allocates it (None: the longest query).
    At most 64 violations are returned.

    Raises:
        ValueError: kv_indptr, qo_indptr and kv_begins of different row counts, or decreasing; an empty indptr buffer.
    """
    from dsv32_fuzz.plan_checker import _walk as walk  # numba takes half a second to import

    kv, qo, begins = _rows(kv_indptr, qo_indptr, kv_begins)
    indptr, info, reduce_indptr, final_map, partial_map = (b.cpu().numpy() for b in plan[1:])
    if not len(indptr) or not len(reduce_indptr):
        raise ValueError(
            "work_indptr or reduce_indptr is empty; allocate the plan with get_mla_metadata_info_v1's sizes"
        )
    table = np.empty((_MAX_FINDINGS, 4), np.int64)
    count = walk.check_indptr(table, 0, WORK_INDPTR, indptr, len(info))
    count = walk.check_indptr(table, count, REDUCE_INDPTR, reduce_indptr, len(partial_map))
    if count == 0:
        works = info[: indptr[-1]]
        order = np.lexsort((works[:, 4], works[:, 3], works[:, 2]))
        sizes = np.zeros(len(works), np.int64)
        plain = kv_begins is None and q_per_token == 1
        count = walk.check_cover(
            table, count, works, order, qo, begins, kv[1:] - kv[:-1], sizes, q_per_token, causal, page_size, plain
        )
        longest = max_seqlen_qo if max_seqlen_qo is not None else int((qo[1:] - qo[:-1]).max(initial=1))
        owner = np.full(len(partial_map) * longest, -1, np.int64)
        count = walk.check_reduce(table, count, works, sizes, owner, reduce_indptr, final_map, partial_map)
    return [
        PlanViolation(int(row), KINDS[kind], int(expected), int(found))
        for kind, row, expected, found in table[: min(count, _MAX_FINDINGS)]
    ]


def _rows(kv_indptr: Lengths, qo_indptr: Lengths | None, kv_begins: Lengths | None) -> tuple[Any, Any, Any]:
    kv = np.asarray(kv_indptr)
    qo = np.arange(len(kv), dtype=np.int32) if qo_indptr is None else np.asarray(qo_indptr)
    begins = kv[:-1] if kv_begins is None else np.asarray(kv_begins)
    if len(kv) < 1 or len(qo) != len(kv) or len(begins) != len(kv) - 1:
        raise ValueError(
            f"kv_indptr, qo_indptr and kv_begins have {len(kv)}, {len(qo)} and {len(begins)} entries; "
            "B rows need B + 1, B + 1 and B"
        )
    for name, values in (("kv_indptr", kv), ("qo_indptr", qo)):
        if (values[1:] < values[:-1]).any():
            raise ValueError(f"{name} decreases; pass a cumulative sum")
    return kv, qo, begins
