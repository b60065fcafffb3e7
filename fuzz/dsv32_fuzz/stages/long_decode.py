"""Hundreds of decode steps of mixed traffic, taken by the reference and by the optimised path.

The schedule is drawn by seed: prompts in chunks, plain decode, drafts of which some are rejected, requests that come
and go, lengths on both sides of topk, and padded steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from dsv32_fast.path import DecodePath
from dsv32_fast.state import CacheState
from dsv32_fuzz.stages.bounds import Values
from dsv32_fuzz.stages.recorder import Recorder, record_step, weights
from dsv32_ref import decode as reference
from dsv32_ref.config import Config
from dsv32_ref.state import Model, State

DECISIONS = ("index_topk", "gate_idx")


@dataclass(frozen=True, kw_only=True)
class Event:
    """One step, and what happens after it: drafts rejected, requests finished."""

    tokens: Mapping[int, tuple[int, ...]]
    padded_rows: int = 0
    truncate: Mapping[int, int] = field(default_factory=dict)
    release: tuple[int, ...] = ()

    @property
    def rows(self) -> int:
        """Live rows of the step."""
        return sum(len(ids) for ids in self.tokens.values())


def schedule(steps: int, seed: int, config: Config, *, traffic: str = "mixed") -> list[Event]:
    """Steps of `mixed` traffic, or of plain `decode`, in which every request has one token a step from its first on.

    Mixed traffic comes in turns of ten steps: prompts in chunks beside decode and drafts; then only requests at or
    beyond topk, one token each, so that a plan may be reused; then two drafts each with one rejected, so that lengths
    cross topk by one while the batch stays as it is. At most four requests at a time, of lengths up to some 4 topk.
    """
    rng, unit, mixed = np.random.default_rng(seed), config.index_topk // 16, traffic == "mixed"
    lengths: dict[int, int] = {}
    waiting: dict[int, int] = {}
    events: list[Event] = []
    newest = 0
    for number in range(steps):
        turn = ("busy", "calm", "drafts")[number // 10 % 3] if mixed else ("busy", "calm")[number // 10 % 2]
        if not lengths or (len(lengths) < 4 and turn == "busy" and rng.random() < 0.7):
            lengths[newest] = 0
            if mixed:
                waiting[newest] = int(rng.integers(1, 30)) * unit
            newest += 1
        counts = {r: _count(r, lengths, waiting, turn, rng, config) if mixed else 1 for r in lengths}
        tokens = {r: tuple(rng.integers(0, config.vocab_size, n).tolist()) for r, n in counts.items() if n or mixed}
        truncate = {}
        for r, n in counts.items():
            lengths[r] += n
            if r not in waiting and n > 1 and (turn == "drafts" or rng.random() < 0.6):
                lengths[r] -= 1 if turn == "drafts" else int(rng.integers(1, n))
                truncate[r] = lengths[r]
        ended = tuple(r for r in lengths if r not in waiting and (lengths[r] > 60 * unit or rng.random() < 0.04))
        release = ended if turn == "busy" else ()
        rows = sum(counts.values())
        padded = -(-max(rows, 1) // 8) * 8 if turn == "calm" or rng.random() < 0.5 else 0
        events.append(Event(tokens=tokens, padded_rows=padded, truncate=truncate, release=release))
        for r in release:
            del lengths[r]
    return events


def _count(
    request: int, lengths: dict[int, int], waiting: dict[int, int], turn: str, rng: np.random.Generator, config: Config
) -> int:
    """New tokens of a request: a chunk of its prompt while there is one, else one, some drafts, now and then none."""
    unit = config.index_topk // 16
    if turn == "calm":
        return int(lengths[request] >= config.index_topk)
    if turn == "drafts":
        return 2 * int(request not in waiting)
    if request in waiting:
        chunk = min(waiting[request], 9 * unit)
        waiting[request] -= chunk
        if not waiting[request]:
            del waiting[request]
        return chunk
    return int(rng.choice([0, 1, 1, 1, 2, 3, 4]))


def slots(config: Config) -> int:
    """Cache slots that the schedule needs at most, with room for whole pages."""
    return 40 * config.index_topk


def follow(event: Event, state: CacheState | State) -> None:
    """What happens after a step."""
    for request, length in event.truncate.items():
        state.truncate(request, length)
    for request in event.release:
        state.release(request) if isinstance(state, CacheState) else state.preempt(request)


def decisions(values: Values) -> Values:
    """The chosen keys and experts of one step."""
    return {key: value for key, value in values.items() if key[0] in DECISIONS}


def run_reference(events: list[Event], config: Config) -> list[Values]:
    """Every stage of the fp32 reference, free-running; steps without a live row are taken and left out."""
    model = Model(config=config, weights=weights(config))
    state, found = State(model, slots(config)), []
    for event in events:
        trace = reference.Trace()
        reference.decode(model, state, event.tokens, tap=trace, all_logits=True)
        if event.rows:
            found.append(trace.values)
        follow(event, state)
    return found


def run_path(path: DecodePath, events: list[Event], forced: list[Values] | None = None) -> list[Values]:
    """Every stage of the optimised path, with the decisions of the reference's run `forced` where given; steps without
    a live row are taken and left out.
    """
    state, found = path.new_state(slots(path.config)), []
    answers = iter(forced or [])
    for event in events:
        if event.rows:
            given = decisions(next(answers)) if forced else {}
            tap = Recorder(path=path, state=state, tokens=event.tokens)
            tap.forced = lambda stage, layer, value, given=given: given.get((stage, layer), value)  # type: ignore[misc]
            found.append(record_step(path, tap, padded_rows=event.padded_rows))
        else:
            path.decode(state, event.tokens, padded_rows=event.padded_rows)
        follow(event, state)
    return found


def logits_error(ours: Values, theirs: Values) -> float:
    """Relative L2 error of the logits of the worst row of a step."""
    a, b = (values["logits", -1].double() for values in (ours, theirs))
    return float(((a - b).norm(dim=-1) / b.norm(dim=-1)).max())
