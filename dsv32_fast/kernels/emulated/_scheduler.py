"""The device side of AITER's planner v1_2, compiled: one walk over rows, query tiles and compute units.

The walk has no loop over compute units to search a fit: rows are taken in input order (v1_2 does not sort) and each
compute unit is filled before the next one is opened, so a plan costs O(rows + works + compute units).

Why no compute unit beyond the last is ever opened: a unit is closed only after at least payload - overhead blocks of
the accounted cost are placed on it, and num_splits x (payload - overhead) is at least the whole cost.

Nothing is written outside a buffer: counts go on beyond its end and are returned, for the caller to compare.
Everything is int64 inside, int32 in the buffers.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dsv32_fast.compiled import int32_array, int64_array, njit

Ints = npt.NDArray[np.int32]

OK, KV_START, KV_ORDER, QO_ORDER, QO_OUT_OF_RANGE, TOO_MANY_BLOCKS, TOO_FAR, OUT_OF_UNITS = range(8)
_INT32_MAX = 2**31 - 1


@njit
def _total_blocks(
    qo_indptr: Ints, kv_indptr: Ints, log2_granularity: int, topk: int, overhead: int, repeats: int
) -> tuple[int, int, int]:
    """(status, index of the fault, blocks that all rows cost)."""
    rows = len(kv_indptr) - 1
    if kv_indptr[0] != 0:
        return KV_START, 0, 0
    if qo_indptr[0] < 0:
        return QO_ORDER, 0, 0
    total, shortest, shortest_query = 0, 0, 0
    round_up = (1 << log2_granularity) - 1
    for b in range(rows):
        length = np.int64(kv_indptr[b + 1]) - np.int64(kv_indptr[b])
        shortest = min(shortest, length)
        shortest_query = min(shortest_query, np.int64(qo_indptr[b + 1]) - np.int64(qo_indptr[b]))
        if topk >= 0:
            length = min(length, topk)
        total += ((length + round_up) >> log2_granularity) + overhead
    if shortest < 0:
        return KV_ORDER, _first_decrease(kv_indptr), 0
    if shortest_query < 0:
        return QO_ORDER, _first_decrease(qo_indptr), 0
    return OK, 0, total * repeats


@njit
def _first_decrease(indptr: Ints) -> int:
    for i in range(1, len(indptr)):
        if indptr[i] < indptr[i - 1]:
            return i
    return 0


@njit
def _fill_tail(values: Ints, first: int, value: int) -> None:
    for i in range(first, len(values)):
        values[i] = value


@njit
def _close_unit(work_indptr: Ints, cu: int, works: int) -> int:
    """The next unit; the last one is never closed while a tile is left, and nothing is written if it is."""
    if cu + 2 < len(work_indptr):
        work_indptr[cu + 1] = works
    return cu + 1


@njit
def schedule(
    batches: int,
    qo_address: int,
    kv_address: int,
    last_page_lens_address: int,
    ptrs_address: int,
    works_address: int,
    num_works: int,
    work_indptr_address: int,
    reduce_indptr_address: int,
    reduce_size: int,
    final_map_address: int,
    num_final: int,
    partial_map_address: int,
    num_partial: int,
    num_cu: int,
    num_splits: int,
    ratio: int,
    sparse: bool,
    parallel: bool,
    uni: int,
    topk: int,
    tiles_per_row: int,
    tile_size: int,
    overhead: int,
    tail_done_threshold: int,
    trims_tail: bool,
    page_size: int,
    log2_granularity: int,
) -> tuple[int, int, int, int, int, int]:
    """Fill the plan; (status, index of the fault, works, tiles, last split tile + 1, partials).

    The addresses are of qo_indptr and kv_indptr int32 [batches + 1], last_page_lens int32 [batches] (read for
    page_size > 1) and the buffers of `PlanBuffers`, work_indptr having at least num_cu + 1 entries; the other scalars
    are those of `LaunchRules`. On any status but OK nothing has been written
    (OUT_OF_UNITS, which the argument above excludes, apart).
    """
    qo_indptr = int32_array(qo_address, (batches + 1,))
    kv_indptr = int32_array(kv_address, (batches + 1,))
    last_page_lens = int32_array(last_page_lens_address, (batches,))
    work_info = int32_array(works_address, (num_works, 8))
    work_indptr = int32_array(work_indptr_address, (num_cu + 1,))
    reduce_indptr = int32_array(reduce_indptr_address, (reduce_size,))
    final_map = int32_array(final_map_address, (num_final, 2))
    partial_map = int32_array(partial_map_address, (num_partial,))
    # The sparse planner takes the first request's query length for everyone's.
    ori = np.int64(qo_indptr[1]) - np.int64(qo_indptr[0]) if sparse else 1
    rows_per_batch = ori * ratio
    if uni == 0 and rows_per_batch > 1:
        return QO_OUT_OF_RANGE, 0, 0, 0, 0, 0
    status, where, cost = _total_blocks(
        qo_indptr, kv_indptr, log2_granularity, topk, overhead, rows_per_batch * tiles_per_row
    )
    if status != OK:
        return status, where, 0, 0, 0, 0
    if cost > _INT32_MAX:
        return TOO_MANY_BLOCKS, 0, 0, 0, 0, 0
    if sparse and batches * ori * topk > _INT32_MAX:
        return TOO_FAR, 0, 0, 0, 0, 0

    payload = (cost + num_splits - 1) // num_splits + overhead
    round_up = (1 << log2_granularity) - 1
    room, cu, works, tile, split_end, partials, partial_qo = payload, 0, 0, 0, 0, 0, 0
    ptrs = int64_array(ptrs_address, (2,))
    ptrs[0], ptrs[1] = work_indptr_address, works_address
    work_indptr[0] = 0
    reduce_indptr[0] = 0
    for b in range(batches):
        length = np.int64(kv_indptr[b + 1]) - np.int64(kv_indptr[b])
        begin = np.int64(kv_indptr[b])
        if sparse:
            length = min(length, topk)
        blocks = (length + round_up) >> log2_granularity
        for sub in range(rows_per_batch):
            row = b * rows_per_batch + sub
            if sparse:  # one table of topk entries per query token
                begin = (b * ori + sub // ratio) * topk
            end = begin + length
            batch_idx = b if sparse else row
            q_begin, q_end, step = uni * row, uni * (row + 1), tile_size
            if uni == 0:
                q_begin, q_end = np.int64(qo_indptr[b]), np.int64(qo_indptr[b + 1])
                step = q_end - q_begin
            # A work of a sparse, unfolded row counts the tokens of its request that come after it.
            offset = ori - 1 - sub if sparse and ratio == 1 else 0
            for t in range(tiles_per_row):
                q_start = q_begin + t * step
                q_stop = min(q_start + step, q_end)
                tail = 0
                if trims_tail:
                    tail = tiles_per_row - 1 - t
                    if ratio > 1 and not sparse:
                        tail = max(0, tiles_per_row - 1 - (q_start // ratio) % uni)
                left, kv_start, pieces = blocks, begin, 0
                # The parallel planner gives an empty row that does not fit no work at all; the serial one moves on.
                done = parallel and length == 0 and room < overhead
                while not done:
                    take = room - overhead
                    done = take >= left
                    if not done and take <= 0:
                        cu = _close_unit(work_indptr, cu, works)
                        room = payload
                        continue
                    if not done and page_size == 1:
                        kv_end = min(kv_start + (take << log2_granularity), end - tail)
                        # Too few tokens would remain for another unit: finish here, over budget.
                        done = end - kv_end < tail_done_threshold
                    if done:
                        take = left
                    kv_end = kv_start + (take << log2_granularity)
                    if page_size == 1:
                        kv_end = min(kv_end, end - tail)
                        kv_offset = end - kv_end
                    else:
                        kv_end = min(kv_end, end)
                        kv_offset = 0
                        if kv_end != end:
                            kv_offset = (end - kv_end - 1) * page_size + np.int64(last_page_lens[batch_idx])
                    whole = done and pieces == 0
                    location = -1 if whole else partial_qo + pieces * step
                    if works < len(work_info):
                        work_info[works, 0] = batch_idx
                        work_info[works, 1] = location
                        work_info[works, 2] = q_start
                        work_info[works, 3] = q_stop
                        work_info[works, 4] = kv_start
                        work_info[works, 5] = kv_end
                        work_info[works, 6] = kv_offset + offset
                        work_info[works, 7] = 0
                    if not whole:
                        if partials + pieces < len(partial_map):
                            partial_map[partials + pieces] = location
                        pieces += 1
                    works += 1
                    kv_start += take << log2_granularity
                    left -= take
                    room -= take + overhead
                    if not done:
                        cu = _close_unit(work_indptr, cu, works)
                        room = payload
                if pieces:
                    if tile < len(final_map):
                        final_map[tile, 0] = q_start
                        final_map[tile, 1] = q_stop
                    split_end = tile + 1
                    partials += pieces
                    partial_qo += pieces * step
                tile += 1
                if tile < len(reduce_indptr):
                    reduce_indptr[tile] = partials
    if cu >= num_cu:
        return OUT_OF_UNITS, cu, 0, 0, 0, 0
    _fill_tail(work_indptr, cu + 1, works)
    _fill_tail(reduce_indptr, tile + 1, partials)
    return OK, 0, works, tile, split_end, partials
