"""Key sufficiency proved by exhaustion: every step batch of a small world, every pair of equal keys.

The small world keeps the structure (a clamp at topk, unequal query lengths, contexts on both sides of the clamp) and
is small enough that nothing is left out: topk <= 4, q <= 3, context <= 6, at most 2 requests, with and without a
padding row.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator

import msgspec

from dsv32_fast.batch import StepBatch
from dsv32_fuzz.case import Dims
from dsv32_fuzz.checks import TARGET_ERRORS, told
from dsv32_fuzz.oracle import planner_lens
from dsv32_fuzz.targets import PlannerInput, Session, Target
from dsv32_fuzz.verdict import Status, Verdict

NAME = "key_exhaustive"


class SmallWorld(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of the enumeration, all inclusive."""

    topk: int = 4
    max_query: int = 3
    max_context: int = 6
    max_batch: int = 2
    max_padding: int = 1

    def steps(self) -> Iterator[StepBatch]:
        """Every step batch within the limits."""
        requests = list(itertools.product(range(1, self.max_query + 1), range(self.max_context + 1)))
        for batch in range(1, self.max_batch + 1):
            for chosen in itertools.product(requests, repeat=batch):
                query, seqs = tuple(q for q, _ in chosen), tuple(q + c for q, c in chosen)
                for padding in range(self.max_padding + 1):
                    rows = sum(query) + padding
                    yield StepBatch(query_lens=query, seq_lens=seqs, num_tokens=rows)
                    if padding:  # vLLM pads the requests too
                        yield StepBatch(query_lens=(*query, 0), seq_lens=(*seqs, 0), num_tokens=rows)


def prove_key(target: Target, worlds: tuple[SmallWorld, ...]) -> tuple[Verdict, list[tuple[StepBatch, StepBatch]]]:
    """Whether equal keys ever meet different planner inputs in `worlds`, and one colliding pair per world.

    Groups all steps of a world by the key that the target shows, then drives one pair of each colliding key through the
    target itself, to see that the plan really is reused.
    """
    if not target.caches:
        return Verdict(check=NAME, status=Status.SKIPPED, summary="the target reuses no plan, so there is no cache"), []
    try:
        return _prove(target, worlds)
    except TARGET_ERRORS as error:
        return Verdict(check=NAME, status=Status.FAILED, summary=told(error)), []


def _prove(target: Target, worlds: tuple[SmallWorld, ...]) -> tuple[Verdict, list[tuple[StepBatch, StepBatch]]]:
    counts = dict.fromkeys(("steps", "keys", "keys_shared", "keys_colliding", "confirmed_reuses", "hidden_reuses"), 0)
    pairs: list[tuple[StepBatch, StepBatch]] = []
    for world in worlds:
        dims = Dims(topk=world.topk, max_num_batched_tokens=64)
        groups, hidden = _by_key(target, dims, world)
        counts["hidden_reuses"] += hidden
        colliding = [pair for group in groups.values() if (pair := _collision(group)) is not None]
        counts["steps"] += sum(map(len, groups.values()))
        counts["keys"] += len(groups)
        counts["keys_shared"] += sum(len(group) > 1 for group in groups.values())
        counts["keys_colliding"] += len(colliding)
        counts["confirmed_reuses"] += sum(_reuses(target, dims, pair) for pair in colliding)
        pairs += colliding[:1]
    return _verdict(counts, pairs), pairs


def _verdict(counts: dict[str, int], pairs: list[tuple[StepBatch, StepBatch]]) -> Verdict:
    if counts["hidden_reuses"]:
        status = Status.FAILED
        summary = f"{counts['hidden_reuses']} plans were reused although the key had changed"
    elif pairs and not counts["confirmed_reuses"]:
        status = Status.MISTRUSTED
        summary = "equal keys stand for several planner inputs, but no plan is reused: another key must be compared"
    elif pairs:
        status = Status.FAILED
        share = f"{counts['keys_colliding']} of {counts['keys']} keys"
        summary = f"{share} stand for several planner inputs, e.g. {_show(pairs[-1])}"
    elif counts["keys_shared"] == 0:
        status, summary = Status.MISTRUSTED, "no two steps share a key, so the key was never put to the test"
    else:
        status = Status.PASSED
        summary = f"exact: none of {counts['keys']} keys over {counts['steps']} steps stands for two planner inputs"
    return Verdict(check=NAME, status=status, summary=summary, measured=dict(counts))


def _by_key(
    target: Target, dims: Dims, world: SmallWorld
) -> tuple[dict[Hashable, list[tuple[StepBatch, PlannerInput]]], int]:
    """Steps by key, and how often a plan was reused although the key differs from the step's before."""
    session: Session = target.open(dims)
    twin: Session = target.open(dims, rebuild=True)
    groups: dict[Hashable, list[tuple[StepBatch, PlannerInput]]] = {}
    before: Hashable = object()
    hidden = 0
    for step in world.steps():
        record = session.build(step)
        if not record.persistent:
            continue  # no plan is read
        step = record.served or step
        key = record.key
        hidden += not record.launched and key != before
        before = key
        planner_input = twin.build(step).planner_input
        if planner_input is None or (planner_input.kv_lens != planner_lens(step, dims.topk)).any():
            raise RuntimeError(f"the always-rebuild twin planned something else than {step}")
        groups.setdefault(key, []).append((step, planner_input))
    return groups, hidden


def _collision(group: list[tuple[StepBatch, PlannerInput]]) -> tuple[StepBatch, StepBatch] | None:
    first_step, first_input = group[0]
    return next(((first_step, step) for step, planner_input in group[1:] if planner_input != first_input), None)


def _reuses(target: Target, dims: Dims, pair: tuple[StepBatch, StepBatch]) -> bool:
    session = target.open(dims)
    session.build(pair[0])
    return not session.build(pair[1]).launched


def _show(pair: tuple[StepBatch, StepBatch]) -> str:
    return " and ".join(f"q={list(step.query_lens)} seq={list(step.seq_lens)}" for step in pair)


WORLDS_Q1 = tuple(SmallWorld(topk=topk, max_query=1) for topk in range(1, 5))
WORLDS_ANY_Q = tuple(SmallWorld(topk=topk) for topk in range(1, 5))
