"""Effects of faults in key, planner, buffers, drafts and cost: step batches built by the target's own builder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from effect_table import Observe, effect
from torch.utils._python_dispatch import TorchDispatchMode

from dsv32_fast.batch import StepBatch
from dsv32_fuzz.case import Dims
from dsv32_fuzz.targets.intree import InTreeTarget

POISON = 7


def decode(*seqs: int, rows: int = 0, bound: int = 0) -> StepBatch:
    return StepBatch(query_lens=(1,) * len(seqs), seq_lens=seqs, num_tokens=rows, max_seq_len=bound)


def drafts(queries: Sequence[int], seqs: Sequence[int], rows: int = 0) -> StepBatch:
    return StepBatch(query_lens=tuple(queries), seq_lens=tuple(seqs), num_tokens=rows)


class CountsTraffic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """How often a value was read on the host, and a tensor made of host data."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reads = self.uploads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.reads += func is torch.ops.aten._local_scalar_dense.default
        self.uploads += func is torch.ops.aten.lift_fresh.default
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Seen:
    """Copies of what one step left."""

    launched: bool
    lens: list[int]
    ids: list[int]
    indptr: list[int]
    indices: list[int]
    works: list[list[int]]
    plan: dict[str, list[Any]]
    view_rows: int
    address: int
    plan_address: int
    cleared: int
    counted_reads: int
    reads: int
    uploads: int

    def ranges(self) -> dict[int, tuple[int, int]]:
        """KV range of each row, its pieces joined."""
        found: dict[int, tuple[int, int]] = {}
        for work in self.works:
            begin, end = found.get(work[2], (work[4], work[5]))
            found[work[2]] = min(begin, work[4]), max(end, work[5])
        return found

    @property
    def tokens(self) -> int:
        return sum(work[5] - work[4] for work in self.works)


def built(*steps: StepBatch, topk: int = 64, rows: int = 16, units: int = 8) -> Observe:
    dims = Dims(topk=topk, num_heads=16, max_num_batched_tokens=rows, compute_units=units)

    def observe(target: InTreeTarget) -> list[Seen]:
        session: Any = target.open(dims, poison=POISON)
        return [_one(session, step, topk) for step in steps]

    return observe


def _one(session: Any, step: StepBatch, topk: int) -> Seen:
    with CountsTraffic() as counting:
        record = session.build(step)
    record.kv_indices_NK[: step.num_tokens * topk] = 9  # as the attention layers fill the live range
    works = record.plan.work_info_set[: max(0, int(record.plan.work_indptr[-1]))].tolist()
    return Seen(
        launched=record.launched,
        lens=np.diff(record.kv_indptr_N1)[: step.num_tokens].tolist(),
        ids=record.req_ids_N.tolist(),
        indptr=record.kv_indptr_N1.tolist(),
        indices=record.kv_indices_NK.tolist(),
        works=works,
        plan={name: buffer.tolist() for name, buffer in record.plan._asdict().items() if name != "work_metadata_ptrs"},
        view_rows=len(record.metadata.req_id_per_token_T),
        address=record.metadata.paged_kv_indptr_T1.data_ptr(),
        plan_address=record.plan.work_info_set.data_ptr(),
        cleared=session.builder.counts.bytes_cleared,
        counted_reads=session.builder.counts.host_device_reads,
        reads=counting.reads,
        uploads=counting.uploads,
    )


def reuses(clean: list[Seen], faulty: list[Seen]) -> bool:
    """Only the faulty builder takes an old plan for the last step, whose rows are others."""
    changed = clean[-1].plan != clean[-2].plan
    return changed and clean[-1].launched and not faulty[-1].launched and faulty[0].launched


CROSSING = drafts((4,), (64,)), drafts((4,), (67,))

effect("key_of_pr42982", built(*CROSSING), reuses)
effect("key_no_context", built(*CROSSING), reuses)
effect("key_aggregate", built(decode(10, 20), decode(20, 10)), reuses)
effect("key_no_order", built(decode(10, 20), decode(20, 10)), reuses)
effect("key_shape_only", built(decode(10), decode(11)), reuses)
effect("key_pages", built(decode(10), decode(11)), reuses)
effect("key_identity", built(decode(10), decode(10, 20)), reuses)
effect("key_upper_bound", built(decode(10, bound=99), decode(11, bound=99)), reuses)
effect(
    "key_no_rows",  # the rows differ, and on few compute units the plan of empty rows need not
    built(decode(10, rows=2), decode(10, rows=4)),
    lambda c, f: len(c[0].lens) < len(c[1].lens) and (c[1].launched, f[1].launched) == (True, False),
)
effect("key_no_query_lens", built(drafts((3, 2), (65, 64)), drafts((2, 3), (64, 65))), reuses)
effect("key_truncated", built(decode(10), decode(266), topk=1024), reuses)
effect("key_kept_after_dummy", built(decode(10), decode(64, bound=999), decode(10)), reuses)
effect("key_idle_reuses", built(decode(10), StepBatch(query_lens=(), seq_lens=(), num_tokens=1)), reuses)

LONG = built(decode(2048), topk=2048, rows=4)
MIXED = built(decode(5, 2048), topk=2048, rows=4)
PADDED = built(decode(5, 6, rows=4))

effect("plan_gap", LONG, lambda c, f: c[0].tokens - f[0].tokens == len(c[0].works) - 1 > 0)
effect("plan_overlap", LONG, lambda c, f: f[0].tokens - c[0].tokens == len(c[0].works) - 1 > 0)
effect("plan_missing_tail", LONG, lambda c, f: f[0].works == c[0].works[:-1])
effect(
    "plan_trim_by_tiles",
    built(decode(5, 5, 5)),
    lambda c, f: f[0].ranges() == {0: (0, 4), 1: (5, 9), 2: (10, 15)} and c[0].ranges()[0] == (0, 5),
)
effect(
    "plan_compact_final_map",
    MIXED,
    lambda c, f: f[0].plan["reduce_final_map"][0] == [1, 2] == c[0].plan["reduce_final_map"][1],
)
effect("plan_whole_row_in_map", MIXED, lambda _, f: f[0].plan["reduce_final_map"][1] == [0, 1])


def last_partials(seen: list[Seen]) -> list[int]:
    used = seen[0].plan["reduce_indptr"][-1]
    return seen[0].plan["reduce_partial_map"][used - 2 : used]


effect(
    "plan_partial_twice",
    LONG,
    lambda c, f: last_partials(f)[0] == last_partials(f)[1] and last_partials(c)[0] != last_partials(c)[1],
)
effect(
    "plan_rows_exchanged",
    built(decode(5, 6)),
    lambda c, f: f[0].ranges() == {0: (5, 11), 1: (0, 5)} and c[0].ranges() == {0: (0, 5), 1: (5, 11)},
)
effect(
    "plan_units_tail_stale",
    built(decode(5)),
    lambda c, f: f[0].plan["work_indptr"][-1] == POISON and c[0].plan["work_indptr"][-1] == 1,
)
effect(
    "plan_tiles_tail_stale",
    built(decode(5)),
    lambda c, f: f[0].plan["reduce_indptr"][-1] == POISON and c[0].plan["reduce_indptr"][-1] == 0,
)
effect("plan_pad_rows_one", PADDED, lambda c, f: f[0].lens == [5, 6, 1, 1] and c[0].lens == [5, 6, 0, 0])
effect("plan_pad_rows_last", PADDED, lambda _, f: f[0].lens == [5, 6, 6, 6])
effect("plan_whole_blocks", built(decode(17)), lambda c, f: (c[0].lens, f[0].lens) == ([17], [16]))
effect("plan_below_topk", built(decode(63, 64)), lambda c, f: (c[0].lens, f[0].lens) == ([63, 64], [63, 63]))
effect(
    "plan_topk_of_2048",
    built(drafts((2,), (101,)), rows=128),
    lambda c, f: (c[0].lens, f[0].lens) == ([64, 64], [100, 101]),
)

SHRINK = built(decode(5, 5, 5), decode(5))

effect("buffer_empty_ids", built(decode(5)), lambda c, f: not any(c[0].ids[1:]) and min(f[0].ids[1:]) > 1000)
effect("buffer_empty_indices", built(decode(5)), lambda c, f: c[0].indices[-1] == 0 and f[0].indices[-1] > 1000)
effect("buffer_no_clear", SHRINK, lambda c, f: c[1].ids[:3] == [0, 0, 0] and f[1].ids[:3] == [0, 1, 2])
effect(
    "buffer_no_index_clear",
    SHRINK,
    lambda c, f: c[1].indices[64] == 0 and f[1].indices[64] == 9 and f[1].ids == c[1].ids,
)
effect("buffer_clear_late", SHRINK, lambda c, f: c[1].ids[:3] == [0, 0, 0] and f[1].ids[:3] == [0, 1, 2])
effect(
    "buffer_padded_extent",
    built(decode(5, 5, 5, 5), decode(5, rows=2)),
    lambda c, f: c[1].ids[:4] == [0, 0, 0, 0] and f[1].ids[:4] == [0, 1, 0, 0],
)
effect("buffer_indptr_tail_zero", built(decode(5)), lambda c, f: (c[0].indptr[-1], f[0].indptr[-1]) == (5, 0))
effect("buffer_indptr_tail_stale", SHRINK, lambda c, f: c[1].indptr[2] == 5 and f[1].indptr[2] == 10)
effect("buffer_short_view", PADDED, lambda c, f: (c[0].view_rows, f[0].view_rows) == (4, 2))
effect(
    "buffer_dummy_extent",
    built(decode(5, 5, 5, bound=999), decode(5)),
    lambda c, f: c[1].ids[:3] == [0, 0, 0] and f[1].ids[:3] == [0, 1, 2],
)
effect("buffer_ids_one_short", built(decode(5, 5)), lambda c, f: (c[0].ids[1], f[0].ids[1]) == (1, 0))

VERIFY = built(drafts((3, 2), (10, 20)))

effect("mtp_planned_as_one", VERIFY, lambda c, f: f[0].lens == [8, 9, 0, 0, 0] and c[0].lens == [8, 9, 10, 19, 20])
effect("mtp_same_window", VERIFY, lambda _, f: f[0].lens == [10, 10, 10, 20, 20])
effect("mtp_without_itself", VERIFY, lambda _, f: f[0].lens == [7, 8, 9, 18, 19])
effect(
    "mtp_clamped_first",
    built(drafts((3,), (100,))),
    lambda c, f: (c[0].lens, f[0].lens) == ([64, 64, 64], [62, 63, 64]),
)


def open_only(target: InTreeTarget) -> int:
    session: Any = target.open(Dims(num_heads=16, max_num_batched_tokens=64, compute_units=8))
    return len(session.builder.plan.reduce_final_map)


effect("mtp_buffers_for_one", open_only, lambda c, f: (c, f) == (64, 1))

AGAIN = built(decode(10), decode(10))

effect("latency_always_rebuilds", AGAIN, lambda c, f: (c[1].launched, f[1].launched) == (False, True))
effect("latency_full_fill", AGAIN, lambda c, f: f[1].cleared - c[1].cleared >= 2 * 16 * 64 * 4)
effect("latency_counted_read", AGAIN, lambda c, f: (c[1].counted_reads, f[1].counted_reads) == (0, 2))
effect("latency_hidden_read", AGAIN, lambda c, f: f[1].reads == c[1].reads + 1 and f[1].counted_reads == 0)
effect("latency_second_copy", AGAIN, lambda c, f: ([s.uploads for s in c], [s.uploads for s in f]) == ([1, 1], [2, 2]))
effect(
    "latency_split_cap_16",
    built(decode(2048), topk=2048, rows=4, units=256),
    lambda c, f: len(f[0].works) <= 16 < len(c[0].works),
)

THREE = built(decode(10), decode(20), decode(30), decode(30))

effect("graph_stale_address", AGAIN, lambda c, f: c[0].address == c[1].address and f[0].address != f[1].address)
effect(
    "graph_recycled_plan",
    THREE,
    lambda c, f: (
        len({s.plan_address for s in c}) == 1
        and f[0].plan_address == f[2].plan_address == f[3].plan_address != f[1].plan_address
        and not f[3].launched
    ),
)
