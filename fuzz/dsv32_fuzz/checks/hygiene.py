"""Buffer hygiene: what lies past the extent of a step is zero, so that a padded or replayed row reads nothing stale."""

from __future__ import annotations

import numpy as np

from dsv32_fuzz.checks import Check, Observation
from dsv32_fuzz.targets import IntArray


class BufferHygiene(Check):
    """Everything past the extent is zero after each build, although a writer fills the live range between builds.

    As the attention layers do, the check writes non-zero slot ids into the live range of `paged_kv_indices` after each
    build. Each step scans as far as anything non-zero can lie; the end of a run scans the buffers whole (`finish`).
    """

    name = "buffer_hygiene"
    meaning = "after each build, everything past the step's extent is zero in every index buffer"

    def __init__(self) -> None:
        super().__init__()
        self.measured.update(shrinks=0, words_scanned=0)
        self._dirty_indices = self._dirty_req_ids = 0  # first element from which on all is known to be zero
        self._last: Observation | None = None

    def observe(self, seen: Observation) -> None:
        """Scan the three buffers, then write as the attention layers do."""
        step, record = seen.step, seen.target
        rows, live = step.num_tokens, step.num_query_tokens
        extent = rows * seen.dims.topk
        self.measured["shrinks"] += extent < self._dirty_indices or live < self._dirty_req_ids
        self._scan(seen, "paged_kv_indices", record.kv_indices_NK[extent : self._dirty_indices], extent)
        self._scan(seen, "req_id_per_token", record.req_ids_N[live : max(self._dirty_req_ids, rows)], live)
        if not np.array_equal(record.req_ids_N[:live], seen.req_ids[:live]):
            self.violation(seen, "req_id_per_token: a live row names another request")
        total = int(seen.kv_indptr[-1])
        if (record.kv_indptr_N1[rows:] != total).any() or record.kv_indptr_N1[0] != 0:
            self.violation(seen, f"paged_kv_indptr: the tail is not the total of {total}, so a padded row has a length")
        record.kv_indices_NK[:total] = 1  # any slot but 0, which would look like a cleared entry
        # Past the extent all was just seen to be zero; below it an older step's entries may still lie past `total`.
        self._dirty_indices = max(total, min(self._dirty_indices, extent))
        self._dirty_req_ids = live
        self._last = seen

    def _scan(self, seen: Observation, name: str, words: IntArray, offset: int) -> None:
        self.measured["words_scanned"] += len(words)
        if words.any():
            (stale,) = np.nonzero(words)
            self.violation(
                seen, f"{name}: {len(stale)} stale entries past the extent {offset}, first at {offset + int(stale[0])}"
            )

    def finish(self) -> None:
        """Scan both buffers whole, once: nothing may have been written where no step ever reached."""
        if self._last is not None:
            record, start = self._last.target, self._last.step.num_query_tokens
            self._scan(self._last, "paged_kv_indices", record.kv_indices_NK[self._dirty_indices :], self._dirty_indices)
            self._scan(self._last, "req_id_per_token", record.req_ids_N[start:], start)

    def untested(self) -> str:
        """Only a step that shrinks after a write can leave something behind."""
        return "" if self.measured["shrinks"] else "no step shrank after a write, so nothing could be left behind"
