"""A serving engine small enough to shrink: requests, a persistent batch, and one step batch per scheduler step.

It knows what a metadata builder can notice: who is in which row, how many tokens each request has computed, how many
drafts it verifies, and how rows are padded. It is driven by `Action`s, one mechanism for the state machine and for the
traffic class `serving`. An action that does not apply (nobody to finish, no room to admit) does nothing, so any
sequence of actions is a run, and a shorter one is a smaller run.

The rules are those of vLLM v1 as in `dsv32_fuzz.workload`: prompts are computed in chunks within a token budget, a
request whose tokens are all computed gets one new token and those drafts that were accepted, the last request fills the
hole that a finished one leaves, and preemption drops the cache, so that prompt and outputs are computed again. Here the
actions decide what there a seed decides, and a prefix may be reused.

Lengths are in tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import msgspec

from dsv32_fast.batch import StepBatch
from dsv32_fuzz.strategies import MAX_MODEL_LEN, graph_padding

PAGE = 64
"""Tokens per page: a prefix is reused in whole pages."""
MAX_REQUESTS = 64
CAPTURE_SIZES = (1, 2, 4, 8, 16, 32, 64)

ActionKind = Literal[
    "admit",
    "chunk",
    "decode",
    "replay",
    "speculate",
    "draft",
    "finish",
    "abort",
    "preempt",
    "resume",
    "reuse",
    "permute",
    "idle",
    "capture",
    "clear",
]
ACTION_KINDS: tuple[ActionKind, ...] = get_args(ActionKind)


class Action(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What the outside, or the scheduler, does next.

    | kind | who, how many, how much |
    |---|---|
    | admit | `copies` equal requests with `context` tokens cached and `amount` to compute |
    | chunk, decode, replay | one scheduler step; each request accepts `amount` of its drafts, every other one `who` |
    | | less; `replay` pads the rows to a captured size, `chunk` gives nobody more than `copies` rows |
    | speculate | from now on `amount` drafts for each request that decodes |
    | draft | `amount` drafts for request `who`, once |
    | finish, abort | request `who` leaves; the last one takes its row (finish), or all behind it move up (abort) |
    | preempt | request `who` loses its cache and waits |
    | resume | the first that waits comes back, with `amount` of its pages still cached |
    | reuse | a new request with the cached pages of request `who`, and `amount` tokens to compute |
    | permute | the rows are rotated by `who`, and reversed for an odd `amount` |
    | idle | the build of a rank without work: `amount` dummy requests of a token, for an odd `who` rows without any |
    | capture | the dummy build of a graph of `CAPTURE_SIZES[amount]` rows |
    | clear | every request is dropped |
    """

    kind: ActionKind
    who: int = 0
    amount: int = 0
    copies: int = 1
    context: int = 0


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is fixed for the engine's life."""

    budget: int = 4096
    """Rows of a step at most (max_num_batched_tokens)."""
    optimistic: bool = False
    """Whether `max_seq_len` assumes that every draft of the last step was accepted (asynchronous scheduling)."""


class _Request:
    """Lengths of one request; `tokens` are known, the first `computed` of them lie in the cache."""

    __slots__ = ("computed", "drafts", "query", "reach", "tokens")

    def __init__(self, tokens: int, computed: int) -> None:
        self.tokens, self.computed, self.drafts = tokens, computed, 0
        self.reach = computed  # `computed` if every draft of the last step had been accepted
        self.query = 0  # rows in the current step

    @property
    def decodes(self) -> bool:
        """Whether only its newest token is left to compute."""
        return self.tokens - self.computed == 1


class Engine:
    """Requests in rows, and those that wait."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.rows: list[_Request] = []
        self.waiting: list[_Request] = []
        self.depth = 0
        self._kinds: dict[ActionKind, Callable[[Action], StepBatch | None]] = {
            kind: getattr(self, f"_{kind}") for kind in ACTION_KINDS
        }

    def apply(self, action: Action) -> StepBatch | None:
        """Do `action`; the step batch that it makes, if it makes one."""
        return self._kinds[action.kind](action)

    def _admit(self, action: Action) -> None:
        for _ in range(min(action.copies, MAX_REQUESTS - len(self.rows))):
            self._enter(_Request(action.context + max(1, action.amount), action.context))

    def _enter(self, request: _Request) -> None:
        """A sequence that cannot grow any more is not taken in."""
        if len(self.rows) < MAX_REQUESTS and request.tokens < MAX_MODEL_LEN:
            request.drafts = self.depth if request.decodes else 0
            self.rows.append(request)

    def _chunk(self, action: Action) -> StepBatch:
        return self._step(action, chunk=max(1, action.copies))

    def _decode(self, action: Action) -> StepBatch:
        return self._step(action, chunk=self.config.budget)

    def _replay(self, action: Action) -> StepBatch:
        return self._step(action, chunk=self.config.budget, padded=True)

    def _speculate(self, action: Action) -> None:
        self.depth = action.amount
        for request in self.rows:
            request.drafts = self.depth if request.decodes else 0

    def _draft(self, action: Action) -> None:
        request = self._whom(action)
        if request is not None and request.decodes:
            request.drafts = action.amount

    def _finish(self, action: Action) -> None:
        if self.rows:
            at = action.who % len(self.rows)
            self.rows[at] = self.rows[-1]
            self.rows.pop()

    def _abort(self, action: Action) -> None:
        if self.rows:
            del self.rows[action.who % len(self.rows)]

    def _preempt(self, action: Action) -> None:
        request = self._whom(action)
        if request is not None:
            self.rows.remove(request)
            self.waiting.append(_Request(request.tokens, 0))

    def _resume(self, action: Action) -> None:
        if self.waiting and len(self.rows) < MAX_REQUESTS:
            request = self.waiting.pop(0)
            self._enter(_Request(request.tokens, _whole_pages(request.tokens - 1, action.amount)))

    def _reuse(self, action: Action) -> None:
        request = self._whom(action)
        if request is not None:
            cached = _whole_pages(request.computed, request.computed)
            self._enter(_Request(cached + max(1, action.amount), cached))

    def _permute(self, action: Action) -> None:
        if self.rows:
            at = action.who % len(self.rows)
            self.rows = self.rows[at:] + self.rows[:at]
            if action.amount % 2:
                self.rows.reverse()

    def _idle(self, action: Action) -> StepBatch:
        rows = max(1, min(action.amount, self.config.budget))
        ones = () if action.who % 2 else (1,) * rows
        return StepBatch(query_lens=ones, seq_lens=ones, num_tokens=rows)

    def _capture(self, action: Action) -> StepBatch:
        """Every request as long as its query, the bound at the model's maximum."""
        size, q = CAPTURE_SIZES[action.amount % len(CAPTURE_SIZES)], self.depth + 1
        lens = (q,) * max(1, size // q)
        return StepBatch(query_lens=lens, seq_lens=lens, max_seq_len=MAX_MODEL_LEN)

    def _clear(self, _action: Action) -> None:
        self.rows, self.waiting = [], []

    def _whom(self, action: Action) -> _Request | None:
        return self.rows[action.who % len(self.rows)] if self.rows else None

    def _step(self, action: Action, *, chunk: int, padded: bool = False) -> StepBatch:
        """One scheduler step; the dummy build of an idle rank when there is nobody to serve."""
        if not self.rows:
            return self._idle(Action(kind="idle", amount=1))
        room = self.config.budget
        for request in self.rows:
            request.query = min(request.tokens + request.drafts - request.computed, chunk, room)
            room -= request.query
        live = [request for request in self.rows if request.query]
        batch = self._batch(live, padded)
        for place, request in enumerate(live):
            self._advance(request, action.amount - action.who * (place % 2))
        # A sequence at the model's maximum is finished: its successor would not fit.
        self.rows = [r for r in self.rows if r.tokens + self.depth + 1 < MAX_MODEL_LEN]
        return batch

    def _batch(self, live: list[_Request], padded: bool) -> StepBatch:
        """Rows up to a captured size; a uniform batch gets empty requests for them, as in vLLM."""
        query = tuple(r.query for r in live)
        seqs = tuple(r.computed + r.query for r in live)
        rows, total, uniform = sum(query), sum(query), len(set(query)) == 1
        if padded:
            rows = min(graph_padding(total, query[0] if uniform else 1), self.config.budget)
        empty = (0,) * (max(0, rows - total) // query[0] if uniform else 0)
        bound = max(max(r.reach, r.computed) + r.query for r in live) if self.config.optimistic else 0
        return StepBatch(
            query_lens=query + empty, seq_lens=seqs + empty, num_tokens=max(rows, total), max_seq_len=bound
        )

    def _advance(self, request: _Request, wanted: int) -> None:
        end = request.computed + request.query
        request.reach = end
        drafts = end - request.tokens
        if drafts < 0:  # a chunk that leaves a part of the prompt
            request.computed = end
            return
        request.computed = request.tokens + max(0, min(wanted, drafts))
        request.tokens = request.computed + 1
        request.drafts = self.depth


def _whole_pages(length: int, wanted: int) -> int:
    """Tokens in the whole pages of `length`, at most `wanted`, that can be cached and leave a token to compute."""
    return min(length, max(0, wanted)) // PAGE * PAGE
