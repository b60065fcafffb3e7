"""What can be put under test, behind one protocol.

The in-tree path, an installed vLLM and a faulty twin are the same thing to a check: something that is opened for the
dims of a case and then builds one step after another. A check compares a session with its always-rebuild twin.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from dsv32_fast.batch import StepBatch
from dsv32_fast.kernels.protocol import Kernels
from dsv32_fast.metadata import SparseMlaMetadata
from dsv32_fast.options import Options
from dsv32_fast.plan import PlanBuffers
from dsv32_fuzz.case import Dims

IntArray = npt.NDArray[np.int32]


@dataclass(frozen=True)
class PlannerInput:
    """Every value that reaches `get_mla_metadata_v1`: each row's lengths, and all scalars."""

    kv_lens: IntArray
    qo_lens: IntArray
    last_page_lens: IntArray
    scalars: tuple[tuple[str, object], ...]

    def __eq__(self, other: object) -> bool:
        """Equal lengths and equal scalars."""
        return (
            isinstance(other, PlannerInput)
            and self.scalars == other.scalars
            and np.array_equal(self.kv_lens, other.kv_lens)
            and np.array_equal(self.qo_lens, other.qo_lens)
            and np.array_equal(self.last_page_lens, other.last_page_lens)
        )

    __hash__ = None  # type: ignore[assignment]  # holds arrays

    def difference(self, other: PlannerInput) -> str:
        """Where two inputs differ, in words: a scalar, the row count, or the first row."""
        ours, theirs = dict(self.scalars), dict(other.scalars)
        for name in ours.keys() | theirs.keys():
            if ours.get(name) != theirs.get(name):
                return f"{name} {ours.get(name)} against {theirs.get(name)}"
        if len(self.kv_lens) != len(other.kv_lens):
            return f"{len(self.kv_lens)} rows against {len(other.kv_lens)}"
        for what in ("kv_lens", "qo_lens", "last_page_lens"):
            ours_T, theirs_T = getattr(self, what), getattr(other, what)
            if not np.array_equal(ours_T, theirs_T):
                rows = np.flatnonzero(ours_T != theirs_T)
                shown = f"{what.replace('_', ' ')} {ours_T[rows[0]]} against {theirs_T[rows[0]]}"
                return f"{len(rows)} of {len(ours_T)} rows, first row {rows[0]}: {shown}"
        return "no difference"


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """What a target did in one step; the arrays are live views of its buffers, to be read before the next step.

    Attributes:
        launched: whether the planner ran.
        planner_input: what reached it, None if it did not run.
        metadata: what the attention layers receive.
        key: what the target compares between steps, None if it has no cache or does not show it.
        req_ids_N: int32 request id per row, the whole buffer.
        kv_indptr_N1: int32 row pointers, the whole buffer.
        kv_indices_NK: int32 physical slots, the whole buffer.
        plan: the six plan buffers.
        persistent: whether the kernels read `plan` in this step; False where they split by themselves.
        served: the part of the step that the target's sparse path serves, None if it is all of it.
        events: planner calls (`schedule`) and stream synchronisations (`sync`) in order, where the target shows them.
    """

    launched: bool
    planner_input: PlannerInput | None
    metadata: SparseMlaMetadata
    key: Hashable
    req_ids_N: IntArray
    kv_indptr_N1: IntArray
    kv_indices_NK: IntArray
    plan: PlanBuffers
    persistent: bool = True
    served: StepBatch | None = None
    events: tuple[str, ...] = ()


class Session(Protocol):
    """One engine's lifetime of a target."""

    def build(self, step: StepBatch) -> StepRecord:
        """Build the metadata of one step."""


def versions_of(target: Target) -> dict[str, str]:
    """Releases and commits of what the target's own process runs, by name; empty if it has none or tells none."""
    found: dict[str, str] = getattr(target, "versions", {})
    return found


def release_of(target: Target) -> str:
    """Release and commit of the target itself; empty if it does not tell them."""
    versions = versions_of(target)
    release, commit = (versions.get(name, "") for name in (target.name, f"{target.name} commit"))
    return f"{release}, commit {commit}" if commit else release


class Target(Protocol):
    """Something that can be put under test."""

    @property
    def name(self) -> str:
        """Short name, as in a case."""

    @property
    def evidence(self) -> str:
        """`emulated` or `hardware`."""

    @property
    def caches(self) -> bool:
        """Whether the target reuses plans at all; False makes the cache checks SKIPPED."""

    @property
    def options(self) -> Options | None:
        """Options of the in-tree path; None for a target whose options are what its code does."""

    @property
    def kernels(self) -> Kernels | None:
        """The kernels behind AITER's signatures, for checks that call them; None if only plans can be seen."""

    def open(self, dims: Dims, *, rebuild: bool = False, poison: int = 0) -> Session:
        """Start an engine; `rebuild` gives the twin that plans every step, `poison` fills fresh plan buffers."""
