"""Continuous batching as vLLM v1 does it: a workload and a seed in, one labelled step batch per scheduler step out.

Rules (facts of vLLM v1's scheduler and model runner, 0.23 to 0.33):
- There are no phases. A request has `tokens` known tokens, of which `computed` are in the KV cache; a step gives it
  min(tokens + drafts - computed, what is left of the budget) rows. Running requests come first, in order of admission,
  then waiting ones while there is budget and a free place; a prompt that does not fit is cut into chunks.
- A request whose known tokens are all computed by the step gets one new token plus one for each accepted draft. Tokens
  beyond its output length are discarded, so every request that is not aborted gets exactly its output length.
- Preemption drops the cache of the request admitted last; it goes to the head of the queue, and its prompt and outputs
  are recomputed as one prompt. Nothing is admitted in a step that preempts.
- The order of rows is that of the persistent batch (order.py), not that of admission.
- The host knows the accepted drafts one step late: `max_seq_len` assumes that all of the last step's were accepted.
- A step where every request has `mtp_depth + 1` rows replays the smallest captured graph that holds it; the batch is
  padded with empty requests (query length 0, sequence length 0). Other steps are not padded.
Not modelled: prefix caching, KV block limits (preemption comes from the seed), pipeline parallelism.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator

import msgspec

from dsv32_fast.batch import StepBatch
from dsv32_fuzz.workload.order import Row, place, reorder_decode_first
from dsv32_fuzz.workload.spec import Traffic, Workload, below, captured_rows, request_lengths, stream


class ScheduledStep(msgspec.Struct, frozen=True, kw_only=True):
    """One scheduler step: the batch, its traffic class, and per live request its number and the tokens it got."""

    batch: StepBatch
    traffic: Traffic
    requests: tuple[int, ...] = ()
    """Request numbers in batch order; padding requests, which follow, have none."""
    new_tokens: tuple[int, ...] = ()
    """Output tokens that each of these requests got from this step; 0 while its prompt is not yet computed."""


def classify(live: Iterable[tuple[int, int, int]]) -> Traffic:
    """The traffic class of requests given as (query length, context, prompt length)."""
    first = continued = decoding = drafts = False
    for query_len, context, prompt in live:
        if context >= prompt:
            decoding = True
            drafts |= query_len > 1
        elif context:
            continued = True
        else:
            first = True
    if decoding:
        if first or continued:
            return Traffic.MIXED
        return Traffic.MTP_DECODE if drafts else Traffic.DECODE
    if continued:
        return Traffic.CHUNKED_PREFILL
    return Traffic.PREFILL if first else Traffic.IDLE


def steps(workload: Workload, seed: int) -> Iterator[ScheduledStep]:
    """Every step of `workload`: the capture builds, then scheduler steps until all requests are served or aborted."""
    yield from _captures(workload)
    engine = _Engine(workload, seed)
    while not engine.done:
        yield engine.step()


def _captures(workload: Workload) -> Iterator[ScheduledStep]:
    """One dummy build per captured graph, largest first as vLLM captures them: contexts 0, bound max_model_len."""
    q = workload.mtp_depth + 1
    for size in reversed(captured_rows(workload)):
        lens = (q,) * (size // q)
        batch = StepBatch(query_lens=lens, seq_lens=lens, num_tokens=size, max_seq_len=workload.max_model_len)
        yield ScheduledStep(batch=batch, traffic=Traffic.CAPTURE)


class _Engine:
    """Scheduler and model runner; one call of `step` is one iteration."""

    def __init__(self, workload: Workload, seed: int) -> None:
        self._w = workload
        self._sizes = captured_rows(workload)
        self._due = deque(Row(i, *lens) for i, lens in enumerate(request_lengths(workload, seed)))
        self._waiting: deque[Row] = deque()
        self._running: list[Row] = []
        self._rows: list[Row] = []  # the persistent batch
        self._clock = 0
        self._arrival_rng, self._event_rng = stream(seed, "arrivals"), stream(seed, "events")
        self._draft_rng = stream(seed, "acceptance")

    @property
    def done(self) -> bool:
        return not (self._due or self._waiting or self._running)

    def step(self) -> ScheduledStep:
        self._arrive()
        self._abort()
        preempted = self._preempt()
        admitted = self._schedule(admit=not preempted)
        self._rows = place(self._rows, self._running, admitted)
        if self._w.decode_first:
            self._rows = reorder_decode_first(self._rows, self._w.mtp_depth + 1)
        rows = self._rows
        batch = self._batch(rows)
        traffic = classify((r.query_len, r.computed, r.prompt) for r in rows)
        new_tokens = tuple([self._run(r) for r in rows])
        self._running = [r for r in self._running if r.left > 0]
        self._clock += 1
        return ScheduledStep(
            batch=batch, traffic=traffic, requests=tuple([r.number for r in rows]), new_tokens=new_tokens
        )

    def _arrive(self) -> None:
        if not self._due:
            return
        if self._w.arrivals == "closed":
            count = self._w.concurrency - len(self._running) - len(self._waiting)
        elif self._w.arrivals == "staggered":
            next_number = self._due[0].number
            count = math.floor(self._clock / self._w.arrival_interval) + 1 - next_number
        else:
            count = _poisson(self._arrival_rng, 1 / self._w.arrival_interval)
        for _ in range(min(count, len(self._due))):
            self._waiting.append(self._due.popleft())

    def _abort(self) -> None:
        if self._w.abort_rate and self._running and self._event_rng.random() < self._w.abort_rate:
            self._running.pop(below(self._event_rng, len(self._running))).query_len = 0

    def _preempt(self) -> bool:
        """Preempt the request admitted last; never the only one, which would not free memory for another."""
        if not self._w.preempt_rate or len(self._running) < 2 or self._event_rng.random() >= self._w.preempt_rate:
            return False
        row = self._running.pop()
        row.evict()
        self._waiting.appendleft(row)
        return True

    def _schedule(self, *, admit: bool) -> list[Row]:
        """Set every request's query length within the budget; returns the requests admitted in this step."""
        budget = self._w.max_num_batched_tokens
        for r in self._running:
            r.query_len = min(r.tokens + r.drafts - r.computed, budget)
            budget -= r.query_len
        admitted: list[Row] = []
        while admit and self._waiting and budget and len(self._running) < self._w.concurrency:
            r = self._waiting.popleft()
            r.query_len = min(r.tokens, budget)
            budget -= r.query_len
            self._running.append(r)
            admitted.append(r)
        return admitted

    def _batch(self, rows: list[Row]) -> StepBatch:
        query_lens = [r.query_len for r in rows]
        seq_lens = [r.computed + r.query_len for r in rows]
        bound = max([r.reach + r.query_len for r in rows], default=0)
        num_tokens, padding = sum(query_lens), 0
        q = self._w.mtp_depth + 1
        if rows and min(query_lens) == max(query_lens) == q and self._sizes and num_tokens <= self._sizes[-1]:
            num_tokens = self._sizes[bisect_left(self._sizes, num_tokens)]
            padding = num_tokens // q - len(rows)
        empty = (0,) * padding
        return StepBatch(
            query_lens=(*query_lens, *empty),
            seq_lens=(*seq_lens, *empty),
            num_tokens=num_tokens,
            max_seq_len=bound,
        )

    def _run(self, r: Row) -> int:
        """Advance a request by its rows; returns the output tokens that it gets."""
        end = r.computed + r.query_len
        r.reach = end
        drafts = end - r.tokens
        if drafts < 0:  # a chunk that leaves a part of the prompt
            r.computed = end
            return 0
        accepted = self._accept(drafts) if drafts else 0
        r.computed = r.tokens + accepted
        r.tokens = r.computed + 1
        r.drafts = self._w.mtp_depth
        new = min(accepted + 1, r.left)
        r.left -= new
        if not r.left:
            r.query_len = 0  # leaves a hole in the persistent batch
        return new

    def _accept(self, drafts: int) -> int:
        accepted = 0
        while accepted < drafts and self._draft_rng.random() < self._w.acceptance:
            accepted += 1
        return accepted


def _poisson(rng: random.Random, mean: float) -> int:
    """A Poisson draw by multiplying uniforms until they fall below exp(-mean) (Knuth, TAOCP 2, 3.4.1)."""
    limit, product, count = math.exp(-mean), rng.random(), 0
    while product > limit:
        product *= rng.random()
        count += 1
    return count
