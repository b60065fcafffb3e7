"""What the attention layers receive each step: the right values, in views of the right size, at addresses that stay."""

from __future__ import annotations

import numpy as np
import torch

from dsv32_fuzz.checks import Check, Observation
from dsv32_fuzz.targets import IntArray


class StepMetadata(Check):
    """The metadata that `build` returns says what the step asks for, whether or not the plan was reused.

    A captured graph reads the addresses that it recorded, so no buffer may move between steps either.
    """

    name = "step_metadata"
    meaning = "the metadata that the attention layers receive has the step's rows, at addresses that never move"

    def __init__(self) -> None:
        super().__init__()
        self._addresses: dict[str, int] = {}

    def observe(self, seen: Observation) -> None:
        """Compare each view with its definition, and its address with the first step's."""
        metadata, step, rows = seen.target.metadata, seen.step, seen.step.num_tokens
        self.measured["rows"] += rows
        for name, found, expected in (
            ("num_tokens", metadata.num_tokens, rows),
            ("max_query_len", metadata.max_query_len, step.max_query_len),
            ("paged_kv_indices", metadata.paged_kv_indices.numel(), rows * seen.dims.topk),
        ):
            if found != expected:
                self.violation(seen, f"{name}: {found} where {expected} was to be expected")
        self._values(seen, "req_id_per_token", metadata.req_id_per_token_T, seen.req_ids)
        self._values(seen, "paged_kv_indptr", metadata.paged_kv_indptr_T1, seen.kv_indptr)
        self._values(seen, "qo_indptr", metadata.qo_indptr_T1, np.arange(rows + 1, dtype=np.int32))
        self._values(seen, "paged_kv_last_page_len", metadata.paged_kv_last_page_len_T, np.ones(rows, np.int32))
        self._address(seen, "paged_kv_indices", metadata.paged_kv_indices)
        if not seen.target.persistent:  # then no kernel receives a plan
            return
        for name, buffer in metadata.plan._asdict().items():
            self._address(seen, name, buffer)
        plan = metadata.plan
        pointers = [plan.work_indptr.data_ptr(), plan.work_info_set.data_ptr()]
        if plan.work_metadata_ptrs.tolist() != pointers:
            self.violation(seen, "work_metadata_ptrs: does not hold the addresses of work_indptr and work_info_set")

    def _values(self, seen: Observation, name: str, view: torch.Tensor, expected: IntArray) -> None:
        self._address(seen, name, view)
        found = view.numpy()
        if found.shape != expected.shape:
            self.violation(seen, f"{name}: {found.size} entries where {expected.size} were to be expected")
        elif not np.array_equal(found, expected):
            at = int(np.flatnonzero(found != expected)[0])
            self.violation(seen, f"{name}[{at}]: {found[at]} where {expected[at]} was to be expected")

    def _address(self, seen: Observation, name: str, view: torch.Tensor) -> None:
        # An empty view has no address to speak of.
        if view.numel() and self._addresses.setdefault(name, view.data_ptr()) != view.data_ptr():
            self.violation(seen, f"{name}: moved to another address, which a captured graph would not follow")

    def untested(self) -> str:
        """Rows must have been compared."""
        return "" if self.measured["rows"] else "no step had a row"
