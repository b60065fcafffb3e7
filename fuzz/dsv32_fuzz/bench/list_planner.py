"""AITER's planner v1_2 on Python lists: the yardstick of the plan benchmark and a second opinion on the compiled one.

It has the shape of the device code, an outer loop over compute units that takes up tiles where the last one stopped,
where the compiled scheduler loops over rows and opens compute units as it needs them. It shares no code with that one
beyond the launch rules.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from dsv32_fast.kernels.emulated.launch import LaunchRules


class ListPlan(NamedTuple):
    """What the planner writes; everything beyond the lists, and final-map entries of unsplit tiles, stays unwritten."""

    work_indptr: list[int]
    work_info_set: list[list[int]]
    reduce_indptr: list[int]
    """Up to the last tile; the last value then repeats to the end of the buffer."""
    reduce_final_map: dict[int, list[int]]
    """By tile, split tiles only."""
    reduce_partial_map: list[int]


class _Tile(NamedTuple):
    batch_idx: int
    q_start: int
    q_stop: int
    step: int
    begin: int
    end: int
    last: int
    blocks: int
    offset: int
    page_len: int


def _tiles(
    rules: LaunchRules, qo_indptr: list[int], kv_indptr: list[int], last_page_lens: list[int], granularity: int
) -> Iterator[_Tile]:
    """Every query tile of every row, in the order of planning."""
    ratio, uni, count = rules.qk_batch_ratio, rules.uni_seqlen_qo, rules.tiles_per_row
    ori = qo_indptr[1] - qo_indptr[0] if rules.is_sparse else 1
    for row in range((len(kv_indptr) - 1) * ratio * ori):
        request = row // (ratio * ori)
        begin, end = kv_indptr[request], kv_indptr[request + 1]
        offset = 0
        if rules.is_sparse:
            length = min(end - begin, rules.topk)
            begin = row // ratio * rules.topk
            end = begin + length
            offset = ori - 1 - row % ori if ratio == 1 else 0
        blocks = -(-(end - begin) // granularity)
        q_begin, q_end = (uni * row, uni * row + uni) if uni else (qo_indptr[row], qo_indptr[row + 1])
        step = rules.tile_size if uni else q_end - q_begin
        for t in range(count):
            q_start = q_begin + t * step
            behind = count - 1 - t
            if ratio > 1 and not rules.is_sparse:
                behind = max(0, count - 1 - q_start // ratio % uni)
            yield _Tile(
                request if rules.is_sparse else row,
                q_start,
                min(q_start + step, q_end),
                step,
                begin,
                end,
                end - behind if rules.trims_tail else end,
                blocks,
                offset,
                last_page_lens[request],
            )


def plan_lists(
    rules: LaunchRules,
    qo_indptr: list[int],
    kv_indptr: list[int],
    last_page_lens: list[int],
    page_size: int = 1,
    granularity: int = 16,
) -> ListPlan:
    """The plan of valid arguments (the compiled planner validates them); lists as in `get_mla_metadata_v1`."""
    plan = ListPlan([0], [], [0], {}, [])
    overhead = rules.overhead
    tiles = list(_tiles(rules, qo_indptr, kv_indptr, last_page_lens, granularity))
    payload = -(-sum(tile.blocks + overhead for tile in tiles) // rules.num_splits) + overhead
    number, done, pieces, next_partial = 0, 0, 0, 0
    for _ in range(rules.num_cu):
        room = payload
        while number < len(tiles):
            tile = tiles[number]
            left = tile.blocks - done
            if rules.parallel and tile.end == tile.begin and room < overhead:
                number += 1
                plan.reduce_indptr.append(plan.reduce_indptr[-1])
                continue
            finishes = room >= left + overhead
            if not finishes and room <= overhead:
                break
            take = left if finishes else room - overhead
            start = tile.begin + done * granularity
            stop = min(start + take * granularity, tile.last)
            if not finishes and page_size == 1 and tile.end - stop < rules.tail_done_threshold:
                finishes, take = True, left
                stop = min(start + take * granularity, tile.last)
            split = pieces > 0 or not finishes
            location = next_partial + pieces * tile.step if split else -1
            if page_size == 1:
                behind = tile.end - stop
            else:
                behind = (tile.end - stop - 1) * page_size + tile.page_len if stop != tile.end else 0
            plan.work_info_set.append(
                [tile.batch_idx, location, tile.q_start, tile.q_stop, start, stop, behind + tile.offset, 0]
            )
            if split:
                plan.reduce_partial_map.append(location)
                pieces += 1
            if not finishes:
                done += take
                break
            room -= take + overhead
            if split:
                plan.reduce_final_map[number] = [tile.q_start, tile.q_stop]
                next_partial += pieces * tile.step
            plan.reduce_indptr.append(len(plan.reduce_partial_map))
            number, done, pieces = number + 1, 0, 0
        plan.work_indptr.append(len(plan.work_info_set))
    return plan
