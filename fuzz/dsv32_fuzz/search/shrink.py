"""Shrinking of step sequences that Hypothesis did not draw, or left larger than need be: drop steps, then requests."""

from __future__ import annotations

from collections.abc import Callable

from dsv32_fast.batch import StepBatch

Steps = tuple[StepBatch, ...]


def reduce_steps(steps: Steps, fails: Callable[[Steps], bool]) -> Steps:
    """A sequence no longer than `steps` on which `fails` still holds; nothing more can be dropped from it singly.

    `fails(steps)` must hold. Half of the steps or requests is tried before single ones, so long runs shrink quickly.
    """
    while True:
        before = steps
        steps = _drop(steps, len(steps), lambda s, i, n: s[:i] + s[i + n :], fails)
        width = min((len(step.query_lens) for step in steps), default=0)
        if width and all(len(step.query_lens) == width for step in steps):
            steps = _drop(steps, width, _without_requests, fails)
        if steps == before:
            return steps


def _drop(steps: Steps, size: int, remove: Callable[[Steps, int, int], Steps], fails: Callable[[Steps], bool]) -> Steps:
    """Remove runs of half the size, a quarter, ... one, wherever the rest still fails."""
    chunk = size // 2
    while chunk:
        start = 0
        while start + chunk <= size and size > chunk:
            candidate = remove(steps, start, chunk)
            if fails(candidate):
                steps, size = candidate, size - chunk
            else:
                start += chunk
        chunk //= 2
    return steps


def _without_requests(steps: Steps, start: int, count: int) -> Steps:
    return tuple(_without(step, start, count) for step in steps)


def _without(step: StepBatch, start: int, count: int) -> StepBatch:
    query = step.query_lens[:start] + step.query_lens[start + count :]
    seqs = step.seq_lens[:start] + step.seq_lens[start + count :]
    padding = step.num_tokens - step.num_query_tokens
    exact = step.max_seq_len == max(step.seq_lens, default=0)
    return StepBatch(
        query_lens=query, seq_lens=seqs, num_tokens=sum(query) + padding, max_seq_len=0 if exact else step.max_seq_len
    )
