"""Checks of the metadata builder over a few steps: what a step's metadata may depend on, and what it may cost.

Each one opens sessions of the target, as an engine does, at the true constants. What is compared with is the oracle of
KV lengths, the plan checker, the construction of the input, or the same step in other surroundings (an invariance).
Between builds a writer fills the live index entries, as the attention layers do.

Legend: R requests, T rows, K topk, N max_num_batched_tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec
import numpy as np
from hypothesis import strategies as st

from dsv32_fast.batch import StepBatch
from dsv32_fast.plan import consumer_view
from dsv32_fuzz.case import Dims
from dsv32_fuzz.checks import TARGET_POISON, TWIN_POISON
from dsv32_fuzz.checks.own_input import InputCheck
from dsv32_fuzz.oracle import planner_lens
from dsv32_fuzz.plan_checker import ZERO_LENGTH, check_plan
from dsv32_fuzz.strategies import MAX_MODEL_LEN, dims_for, sampled_from
from dsv32_fuzz.strategies.batch_mixes import TOPK, batch, batch_mix_steps, edge_lens, same_key_neighbour
from dsv32_fuzz.targets import Session, StepRecord, Target
from dsv32_fuzz.verdict import Verdict

Arrays = dict[str, np.ndarray[Any, Any]]


class SessionCheck(InputCheck[Any]):
    """A check that only opens sessions, so any target will do."""

    family = "serving"

    def inapplicable(self, target: Target) -> str:
        """Every target builds steps."""
        del target
        return ""


def build_and_write(session: Session, step: StepBatch) -> StepRecord:
    """Build a step, then fill the live index entries with a slot that is no cleared entry."""
    record = session.build(step)
    record.kv_indices_NK[: int(record.kv_indptr_N1[step.num_tokens])] = 1
    return record


def seen_by_kernels(session: Session, step: StepBatch, topk: int) -> Arrays:
    """Copies of all that the kernels may read after a step is built; of the index entries past its extent, how many."""
    record = session.build(step)
    metadata = record.metadata
    arrays = {
        "req_id_per_token": record.req_ids_N,
        "paged_kv_indptr": record.kv_indptr_N1,
        "stale entries of paged_kv_indices": np.asarray(
            np.count_nonzero(record.kv_indices_NK[step.num_tokens * topk :])
        ),
        "the view of req_id_per_token": metadata.req_id_per_token_T.numpy(),
        "the view of paged_kv_indptr": metadata.paged_kv_indptr_T1.numpy(),
        "the view of qo_indptr": metadata.qo_indptr_T1.numpy(),
        "the view of paged_kv_last_page_len": metadata.paged_kv_last_page_len_T.numpy(),
        "max_query_len": np.asarray([metadata.max_query_len, metadata.num_tokens]),
        **consumer_view(record.plan)._asdict(),
    }
    return {name: array.copy() for name, array in arrays.items()}


def first_difference(found: Arrays, expected: Arrays) -> str:
    """The first array that differs and where, empty if none does."""
    for name, array in found.items():
        other = expected[name]
        if array.shape != other.shape:
            return f"{name} has shape {list(array.shape)} against {list(other.shape)}"
        if not np.array_equal(array, other):
            at = int(np.flatnonzero(array.ravel() != other.ravel())[0])
            return f"{name}[{at}] is {array.ravel()[at]} against {other.ravel()[at]}"
    return ""


def wrong_cover(record: StepRecord, step: StepBatch, topk: int) -> str:
    """The first thing wrong with the record's rows and plan for `step`, by the oracle and the plan checker."""
    lens_T = planner_lens(step, topk)
    found_T = np.diff(record.metadata.paged_kv_indptr_T1.numpy())
    if not np.array_equal(found_T, lens_T):
        return f"rows of {found_T[:8].tolist()} keys where {lens_T[:8].tolist()} were to be expected"
    indptr = np.concatenate(([0], np.cumsum(lens_T))).astype(np.int32)
    wrong = [v for v in check_plan(record.plan, indptr) if v.what != ZERO_LENGTH]
    return f"plan, {wrong[0]}" if wrong else ""


class History(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Steps that ran before, and the step that must not know of them."""

    history: tuple[StepBatch, ...]
    last: StepBatch


def _with_neighbour(steps: tuple[StepBatch, ...], take: bool) -> History:
    neighbour = same_key_neighbour(steps[-1]) if take else None
    if neighbour is not None:
        return History(history=steps, last=neighbour)
    return History(history=steps[:-1] or steps, last=steps[-1])


class HistoryIndependence(SessionCheck):
    """A step after a history, the reversed one, other sizes, itself in more rows, a capture, padding alone."""

    name = "history_independence"
    meaning = "what the kernels may read after a step is the same whatever ran before it: reordered, grown or shrunk"
    input_type = History

    def inputs(self) -> st.SearchStrategy[History]:
        """Batch mixes; the last step is often one that a short key takes for the step before."""
        return st.builds(_with_neighbour, batch_mix_steps(), st.booleans())

    def run(self, drawn: History, target: Target) -> Verdict:
        """One engine for each history, and a fresh one to compare with."""
        large, last = batch([(1, 3)] * 64), drawn.last
        capture = batch([(1, 1)] * 64, bound=MAX_MODEL_LEN)
        histories = {
            "after its history": drawn.history,
            "after the reversed history": drawn.history[::-1],
            "after a larger batch": (*drawn.history, large),
            "after a regrown batch": (large, batch([(1, 5)]), *drawn.history),
            "after the same requests in more rows": (msgspec.structs.replace(last, num_tokens=last.num_tokens + 9),),
            "after itself and a capture": (last, capture),
            "after itself and padding alone": (last, batch([], max(1, last.num_tokens))),
        }
        dims = dims_for((*drawn.history, large, *histories["after the same requests in more rows"]))
        fresh = seen_by_kernels(target.open(dims, poison=TWIN_POISON), drawn.last, dims.topk)
        violation = ""
        for what, history in histories.items():
            session = target.open(dims, poison=TARGET_POISON)
            for step in history:
                build_and_write(session, step)
            found = seen_by_kernels(session, drawn.last, dims.topk)
            difference = first_difference(found, fresh)
            violation = violation or (difference and f"{what}, {difference} in a fresh engine")
        untested = "" if any(step != drawn.last for step in drawn.history) else "nothing else ran before the step"
        return self.verdict(violation, {"histories": len(histories)}, untested=untested)


class Padded(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A step without padding, and padding rows to add to it, in turn."""

    step: StepBatch
    padding: tuple[int, ...]


def _live_steps() -> st.SearchStrategy[StepBatch]:
    pairs = st.tuples(sampled_from((1, 1, 2, 4, 8)), edge_lens(8))
    return st.lists(pairs, min_size=1, max_size=8).map(batch)


class PaddingInvariance(SessionCheck):
    """The same requests in more or fewer rows, one build after another in one engine."""

    name = "padding_invariance"
    meaning = "live rows get the same request, keys and coverage however many rows pad the step; padding reads nothing"
    input_type = Padded

    def inputs(self) -> st.SearchStrategy[Padded]:
        """A few requests, and paddings that grow and shrink."""
        padding = st.lists(sampled_from((1, 0, 7, 32, 64, 3)), min_size=2, max_size=4).map(tuple)
        return st.builds(Padded, step=_live_steps(), padding=padding)

    def run(self, drawn: Padded, target: Target) -> Verdict:
        """Build each padded form, and look at its live rows and at its padding."""
        live = drawn.step.num_query_tokens
        forms = tuple(msgspec.structs.replace(drawn.step, num_tokens=live + extra) for extra in drawn.padding)
        dims = dims_for(forms)
        session = target.open(dims, poison=TARGET_POISON)
        ids_T = np.repeat(np.arange(len(drawn.step.query_lens)), drawn.step.query_lens)
        violation, padded = "", 0
        for form in forms:
            record = build_and_write(session, form)
            padded += form.num_tokens - live
            wrong = wrong_cover(record, form, dims.topk) or _wrong_padding(record, ids_T)
            violation = violation or (wrong and f"{live} live of {form.num_tokens} rows: {wrong}")
        untested = "" if len(set(drawn.padding)) > 1 else "the step was always padded alike"
        return self.verdict(violation, {"builds": len(forms), "padding_rows": padded}, untested=untested)


def _wrong_padding(record: StepRecord, ids_T: np.ndarray[Any, Any]) -> str:
    """What is wrong with the request ids, or with works of rows that are padding."""
    live, ids = len(ids_T), record.metadata.req_id_per_token_T.numpy()
    if not np.array_equal(ids[:live], ids_T):
        return "a live row names another request"
    if ids[live:].any():
        return f"padding row {live + int(np.flatnonzero(ids[live:])[0])} names a request"
    works = consumer_view(record.plan).work_info_set
    reading = works[(works[:, 2] >= live) & (works[:, 5] > works[:, 4])]
    return f"row {reading[0, 2]} is padding, and a work reads its keys" if len(reading) else ""


class Permuted(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Requests, as (query length, sequence length), and another order of them."""

    requests: tuple[tuple[int, int], ...]
    order: tuple[int, ...]


@st.composite
def _permuted_inputs(draw: st.DrawFn) -> Permuted:
    same = draw(sampled_from(("length", "crossing", "")))
    queries = draw(st.lists(sampled_from((2, 4, 8) if same == "crossing" else (1, 2, 4, 8)), min_size=2, max_size=5))
    queries[0] = queries[1] % 8 + 2  # two requests at least differ, so some order is another step
    length, context = draw(edge_lens(10)), TOPK - min(queries)
    if same == "crossing":
        requests = tuple((q, context + q) for q in queries)
    else:
        requests = tuple((q, length if same else draw(edge_lens(10))) for q in queries)
    order = draw(st.permutations(range(len(requests))))
    if [requests[r] for r in order] == list(requests):
        order = [1, 0, *range(2, len(requests))]
    return Permuted(requests=requests, order=tuple(order))


class PermutationInvariance(SessionCheck):
    """The same requests in another order, and back, in one engine."""

    name = "permutation_invariance"
    meaning = "requests that change places take their rows, keys and coverage with them"
    input_type = Permuted

    def inputs(self) -> st.SearchStrategy[Permuted]:
        """Unequal query lengths, often equal sequences, or equal contexts short of topk: only the order tells."""
        return _permuted_inputs()

    def run(self, drawn: Permuted, target: Target) -> Verdict:
        """Every order must give each request the rows that it has alone."""
        there = batch([drawn.requests[r] for r in drawn.order])
        steps = (batch(drawn.requests), there, batch(drawn.requests))
        orders = (range(len(drawn.requests)), drawn.order, range(len(drawn.requests)))
        dims = dims_for(steps)
        session = target.open(dims, poison=TARGET_POISON)
        violation = ""
        for step, order in zip(steps, orders, strict=True):
            record = build_and_write(session, step)
            wrong = wrong_cover(record, step, dims.topk) or self._moved(record, drawn, order, dims)
            violation = violation or (wrong and f"requests in the order {list(order)}: {wrong}")
        untested = "" if steps[0] != there else "the order was the same"
        return self.verdict(violation, {"builds": len(steps)}, untested=untested)

    def _moved(self, record: StepRecord, drawn: Permuted, order: Sequence[int], dims: Dims) -> str:
        """A request whose rows are not those of a step that it has for itself."""
        lens_T = np.diff(record.metadata.paged_kv_indptr_T1.numpy())
        ids_T = record.metadata.req_id_per_token_T.numpy()
        for place, request in enumerate(order):
            alone = planner_lens(batch([drawn.requests[request]]), dims.topk)
            if not np.array_equal(lens_T[ids_T == place], alone):
                return f"request {request} in place {place} has other rows than alone"
        return ""


Shape = Literal["padding", "idle", "holes", "empty prompt", "nothing"]


class Degenerate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A degenerate step between two ordinary ones."""

    around: StepBatch
    shape: Shape
    rows: int

    def middle(self) -> StepBatch:
        """The degenerate step."""
        if self.shape == "holes":
            pairs = list(zip(self.around.query_lens, self.around.seq_lens, strict=True))
            return batch([(0, 0), *pairs[:1], *[(0, 0)] * self.rows, *pairs[1:], (0, 0)], self.around.num_tokens)
        forms: dict[str, Callable[[], StepBatch]] = {
            "padding": lambda: batch([], self.rows),
            "idle": lambda: batch([(1, 1)]),
            "empty prompt": lambda: batch([(0, 0)] * self.rows, self.rows),
            "nothing": lambda: batch([]),
        }
        return forms[self.shape]()


class DegenerateShapes(SessionCheck):
    """Batch 0, padding alone, an idle rank, requests of no row between others: each between two ordinary steps.

    A step of no rows at all is left out where a split cap is set, and on other targets than the in-tree path: AITER
    divides by cap x rows, and vLLM's runner builds none.
    """

    name = "degenerate_batches"
    meaning = "steps without a request or with empty ones are planned as such, and the next step knows nothing of them"
    input_type = Degenerate

    def inputs(self) -> st.SearchStrategy[Degenerate]:
        """Every shape, few rows and many."""
        shapes: tuple[Shape, ...] = ("padding", "idle", "holes", "empty prompt", "nothing")
        return st.builds(Degenerate, around=_live_steps(), shape=sampled_from(shapes), rows=sampled_from((1, 2, 64)))

    def run(self, drawn: Degenerate, target: Target) -> Verdict:
        """Three builds, the middle one degenerate."""
        capped = target.options is None or target.options.split_cap != "unlimited"
        if drawn.shape == "nothing" and capped:
            return self.verdict("", {"builds": 0}, untested="a step of no rows is undefined under a split cap")
        steps = (drawn.around, drawn.middle(), drawn.around)
        dims = dims_for(steps)
        session = target.open(dims, poison=TARGET_POISON)
        violation = ""
        for what, step in zip(("before", drawn.shape, "after"), steps, strict=True):
            record = build_and_write(session, step)
            ids_T = np.repeat(np.arange(len(step.query_lens)), step.query_lens)
            wrong = wrong_cover(record, step, dims.topk) or _wrong_padding(record, ids_T)
            violation = violation or (wrong and f"{what}: {wrong}")
        return self.verdict(violation, {"builds": len(steps)})


CHECKS: tuple[type[InputCheck[Any]], ...] = (
    HistoryIndependence,
    PaddingInvariance,
    PermutationInvariance,
    DegenerateShapes,
)
