"""Which rows of a case would read keys that are another row's, because their step got a plan made for other rows."""

from __future__ import annotations

import numpy as np

from dsv32_fuzz.case import Case
from dsv32_fuzz.targets import StepRecord, Target


def told_neighbours(case: Case, target: Target) -> list[str]:
    """A line for each step of the case some of whose rows would, and one of rows that would lose keys of their own.

    Raises:
        RuntimeError: of the target, as in any build.
    """
    session = target.open(case.dims)
    told = []
    for index, step in enumerate(case.steps):
        record = session.build(step)
        beyond, short = misread(record) if record.persistent else ((), ())
        for rows, what in ((beyond, "read a neighbour's keys"), (short, "lose keys of their own")):
            if len(rows):
                total = record.metadata.num_tokens
                told.append(f"step {index}: {len(rows)} of {total} rows {what}: {ranges(list(map(int, rows)))}")
    return told


def misread(record: StepRecord) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Rows with a work outside their own part of the KV indices, and rows whose works leave out some of it.

    A row's works lie in `work_info_set`: query rows [2], [3], positions in the KV indices [4], [5]; one row a tile.
    """
    indptr_T1 = record.metadata.paged_kv_indptr_T1.numpy().astype(np.int64)
    works = record.plan.work_info_set.numpy()[: int(record.plan.work_indptr[-1])].astype(np.int64)
    rows = len(indptr_T1) - 1
    works = works[(works[:, 2] >= 0) & (works[:, 2] < rows)]
    row_W, start_W, stop_W = works[:, 2], works[:, 4], works[:, 5]
    outside_W = (start_W < stop_W) & ((start_W < indptr_T1[row_W]) | (stop_W > indptr_T1[row_W + 1]))
    own_W = np.clip(np.minimum(stop_W, indptr_T1[row_W + 1]) - np.maximum(start_W, indptr_T1[row_W]), 0, None)
    read_T = np.bincount(row_W, own_W, minlength=rows)
    return tuple(np.unique(row_W[outside_W])), tuple(np.flatnonzero(read_T < np.diff(indptr_T1)))


def ranges(rows: list[int]) -> str:
    """Sorted row numbers with runs as `first-last`; long lists are cut."""
    runs: list[list[int]] = []
    for row in rows:
        if runs and row == runs[-1][-1] + 1:
            runs[-1][1:] = [row]
        else:
            runs.append([row])
    parts = ["-".join(map(str, run)) for run in runs]
    return ", ".join(parts[:8]) + (f", ... {len(parts)} runs in all" if len(parts) > 8 else "")
