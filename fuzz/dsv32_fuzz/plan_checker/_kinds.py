"""What `plan_checker` can say of a plan; the numbers index `KINDS`."""

from __future__ import annotations

KINDS = (
    "work_indptr",  # does not start at 0, decreases, or points beyond work_info_set
    "no work: zero length",  # an empty row without a work: AITER's parallel planner makes these
    "no work",  # a row with KV, and without a work
    "query range",  # works that do not tile the query rows
    "batch_idx",
    "kv_start",  # the row's first key is not where the first work starts
    "kv gap",
    "kv overlap",
    "kv_end",  # a needed key is left out, or a foreign one read, at the row's end
    "kv_offset",
    "whole and partial",  # several works of a tile, one of which writes the final output
    "partial alone",  # the only work of a tile writes a partial
    "partial_qo_loc",  # outside the partial buffer
    "partial shared",  # two works write the same partial row
    "reduce_indptr",  # does not start at 0, decreases, or points beyond reduce_partial_map
    "reduce entry",  # a partial row that no work starts at
    "reduce order",  # partials of a tile out of KV order
    "reduce count",  # a tile's merge does not take exactly the tile's partials
    "reduce_final_map",  # a merge writes other rows than its partials cover
    "partial unread",  # a partial that no merge takes
)
(
    WORK_INDPTR,
    NO_WORK_ZERO,
    NO_WORK,
    Q_RANGE,
    BATCH,
    KV_START,
    KV_GAP,
    KV_OVERLAP,
    KV_END,
    KV_OFFSET,
    WHOLE_AND_PARTIAL,
    PARTIAL_ALONE,
    PARTIAL_LOC,
    PARTIAL_SHARED,
    REDUCE_INDPTR,
    REDUCE_ENTRY,
    REDUCE_ORDER,
    REDUCE_COUNT,
    FINAL_MAP,
    PARTIAL_UNREAD,
) = range(len(KINDS))
