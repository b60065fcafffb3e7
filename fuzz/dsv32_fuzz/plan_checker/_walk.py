"""The compiled loops of `plan_checker`: what stage 1 and the reduction would do with a plan, on intervals.

Findings are rows of (kind, row, expected, found) in int64; the count goes on beyond the table's end.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from dsv32_fast.compiled import njit
from dsv32_fuzz.plan_checker._kinds import (
    BATCH,
    FINAL_MAP,
    KV_END,
    KV_GAP,
    KV_OFFSET,
    KV_OVERLAP,
    KV_START,
    NO_WORK,
    NO_WORK_ZERO,
    PARTIAL_ALONE,
    PARTIAL_LOC,
    PARTIAL_SHARED,
    PARTIAL_UNREAD,
    Q_RANGE,
    REDUCE_COUNT,
    REDUCE_ENTRY,
    REDUCE_ORDER,
    WHOLE_AND_PARTIAL,
)

Ints = npt.NDArray[Any]


@njit
def _note(table: Ints, count: int, kind: int, row: int, expected: int, found: int) -> int:
    if count < len(table):
        table[count, 0], table[count, 1], table[count, 2], table[count, 3] = kind, row, expected, found
    return count + 1


@njit
def check_indptr(table: Ints, count: int, kind: int, indptr: Ints, capacity: int) -> int:
    """Note what is wrong with an indptr; `row` of a finding is the index in it."""
    if indptr[0] != 0:
        count = _note(table, count, kind, 0, 0, indptr[0])
    for i in range(1, len(indptr)):
        if indptr[i] < indptr[i - 1]:
            count = _note(table, count, kind, i, indptr[i - 1], indptr[i])
    if indptr[-1] > capacity:
        count = _note(table, count, kind, len(indptr) - 1, capacity, indptr[-1])
    return count


@njit
def _missing_rows(
    table: Ints, count: int, q_from: int, q_to: int, row: int, qo: Ints, kv_lens: Ints, q_per_token: int
) -> int:
    """Note query rows [q_from, q_to) that no work covers, once per row of the batch; starts to look at `row`."""
    while q_from < q_to:
        while qo[row + 1] * q_per_token <= q_from:
            row += 1
        kind = NO_WORK_ZERO if kv_lens[row] == 0 else NO_WORK
        count = _note(table, count, kind, row, q_from, q_to)
        q_from = qo[row + 1] * q_per_token
    return count


@njit
def check_cover(
    table: Ints,
    count: int,
    works: Ints,
    order: Ints,
    qo: Ints,
    kv_begins: Ints,
    kv_lens: Ints,
    tile_works: Ints,
    q_per_token: int,
    causal: bool,
    page_size: int,
    plain: bool,
) -> int:
    """Follow the works in (query, KV) order; fills tile_works[w] with the number of works of w's tile."""
    row, q_next, i = 0, 0, 0
    q_last = qo[-1] * q_per_token
    while i < len(order):
        w = order[i]
        q_start, q_stop = np.int64(works[w, 2]), np.int64(works[w, 3])
        j = i + 1
        while j < len(order) and works[order[j], 2] == q_start and works[order[j], 3] == q_stop:
            j += 1
        for k in range(i, j):
            tile_works[order[k]] = j - i
        if q_start == q_stop:  # a row without queries: its works write nothing
            i = j
            continue
        if q_start < q_next or q_stop < q_start or q_stop > q_last:
            count = _note(table, count, Q_RANGE, row, q_next, q_start)
            i = j
            continue
        count = _missing_rows(table, count, q_next, q_start, row, qo, kv_lens, q_per_token)
        while qo[row + 1] * q_per_token <= q_start:
            row += 1
        row_stop = qo[row + 1] * q_per_token
        if q_stop > row_stop:
            count = _note(table, count, Q_RANGE, row, row_stop, q_stop)
        q_next = q_stop
        cursor = np.int64(kv_begins[row])
        row_end = cursor + kv_lens[row]
        for k in range(i, j):
            w = order[k]
            start, stop = np.int64(works[w, 4]), np.int64(works[w, 5])
            if start != cursor:
                kind = KV_START if k == i else (KV_GAP if start > cursor else KV_OVERLAP)
                count = _note(table, count, kind, row, cursor, start)
            cursor = max(start, stop)
            if plain and works[w, 0] != row:
                count = _note(table, count, BATCH, row, row, works[w, 0])
            if plain and page_size == 1 and works[w, 6] != row_end - stop:
                count = _note(table, count, KV_OFFSET, row, row_end - stop, works[w, 6])
            if j - i > 1 and works[w, 1] < 0:
                count = _note(table, count, WHOLE_AND_PARTIAL, row, j - i, works[w, 1])
            if j - i == 1 and works[w, 1] >= 0:
                count = _note(table, count, PARTIAL_ALONE, row, -1, works[w, 1])
        # The tile's last query token attends to all keys but those of the tokens after it.
        after = (row_stop - q_stop) // q_per_token if causal and page_size == 1 else 0
        needed = max(np.int64(kv_begins[row]), row_end - after)
        if cursor < needed or cursor > row_end:
            count = _note(table, count, KV_END, row, needed, cursor)
        i = j
    return _missing_rows(table, count, q_next, q_last, row, qo, kv_lens, q_per_token)


@njit
def check_reduce(
    table: Ints,
    count: int,
    works: Ints,
    tile_works: Ints,
    owner: Ints,
    reduce_indptr: Ints,
    final_map: Ints,
    partial_map: Ints,
) -> int:
    """Follow partials from the works that write them to the merges that read them; owner is -1 filled scratch."""
    reads = np.zeros(len(works), np.int64)
    for w in range(len(works)):
        location, rows = np.int64(works[w, 1]), np.int64(works[w, 3]) - np.int64(works[w, 2])
        if location < 0 or rows <= 0:
            continue
        if location + rows > len(owner):
            count = _note(table, count, PARTIAL_LOC, works[w, 0], len(owner) - rows, location)
            continue
        for r in range(location, location + rows):
            if owner[r] >= 0:
                count = _note(table, count, PARTIAL_SHARED, works[w, 0], works[owner[r], 0], r)
            owner[r] = w
    for t in range(len(reduce_indptr) - 1):
        first, last = np.int64(reduce_indptr[t]), np.int64(reduce_indptr[t + 1])
        if last <= first:
            continue
        if t >= len(final_map):
            count = _note(table, count, FINAL_MAP, t, len(final_map), t)
            continue
        if final_map[t, 0] == final_map[t, 1]:  # a row without queries merges nothing
            continue
        previous = np.int64(-1)
        for i in range(first, last):
            location = np.int64(partial_map[i])
            w = owner[location] if 0 <= location < len(owner) else -1
            if w < 0 or works[w, 1] != location:
                count = _note(table, count, REDUCE_ENTRY, t, -1, location)
                continue
            reads[w] += 1
            if works[w, 4] <= previous:
                count = _note(table, count, REDUCE_ORDER, works[w, 0], previous, works[w, 4])
            previous = np.int64(works[w, 4])
            if final_map[t, 0] != works[w, 2] or final_map[t, 1] != works[w, 3]:
                count = _note(table, count, FINAL_MAP, works[w, 0], works[w, 2], final_map[t, 0])
            if tile_works[w] != last - first:
                count = _note(table, count, REDUCE_COUNT, works[w, 0], tile_works[w], last - first)
    for w in range(len(works)):
        if works[w, 1] >= 0 and works[w, 3] > works[w, 2] and reads[w] != 1:
            count = _note(table, count, PARTIAL_UNREAD, works[w, 0], 1, reads[w])
    return count
