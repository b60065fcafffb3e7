"""The whole decode step: every stage within its bound, and the same tokens the same however they are batched.

A stage is judged by the bound on the inputs that it really had, so that an early legal rounding excuses nothing later.
Choices are judged by what they were made from: the top-k exactly, experts within the arithmetic of the router.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import torch
from hypothesis import strategies as st
from torch import Tensor

from dsv32_fuzz.checks.own_input import InputCheck
from dsv32_fuzz.stages.bounds import Recording, Values, expert_choices, values
from dsv32_fuzz.stages.recorder import DENSE, MIXED, Recorder, config_for, filled_state, path_of, record_step, recording
from dsv32_fuzz.targets import Target
from dsv32_fuzz.verdict import Verdict
from dsv32_ref.bounds import certify_topk, judge
from dsv32_ref.indexer import select_topk

TOPK = MIXED.index_topk
Counts = dict[str, float | int | str]
Histograms = dict[str, list[int]]


class StageInput(msgspec.Struct, frozen=True, kw_only=True):
    """Some steps: cached tokens of each request, then new tokens of each in every step; rows of padding."""

    contexts: tuple[int, ...]
    steps: tuple[tuple[int, ...], ...]
    padding: int = 0
    seed: int = 0


class StageNumerics(InputCheck[StageInput]):
    """The path as it runs, stage by stage."""

    name = "stage_numerics"
    meaning = "every stage of the decode step lies within its proven bound, and every choice is one its scores call for"
    family = "step"
    input_type = StageInput

    def inputs(self) -> st.SearchStrategy[StageInput]:
        """One to three requests around topk, plain decode and drafts, then steps in which a plan may be reused."""
        contexts = st.one_of(st.integers(TOPK - 4, TOPK + 1), st.sampled_from((1, 15, 31, 40)))
        return st.builds(
            lambda requests, again, padding, seed: StageInput(
                contexts=tuple(c for c, _ in requests),
                steps=(tuple(q for _, q in requests),) * again,
                padding=padding,
                seed=seed,
            ),
            st.lists(st.tuples(contexts, st.sampled_from((1, 2, 3, 5))), min_size=1, max_size=3),
            st.sampled_from((1, 2)),
            st.sampled_from((0, 1)),
            st.integers(0, 2**16),
        )

    def run(self, drawn: StageInput, target: Target) -> Verdict:
        """Record the steps and judge them all; the plan cache lives through them."""
        path = path_of(target, config_for(target, MIXED))
        state = filled_state(path, dict(enumerate(drawn.contexts)), drawn.seed)
        generator, steps = torch.Generator().manual_seed(drawn.seed), []
        for counts in drawn.steps:
            tokens = {r: _tokens(path.config.vocab_size, count, generator) for r, count in enumerate(counts)}
            padded = sum(counts) + drawn.padding if drawn.padding else 0
            steps.append(record_step(path, Recorder(path=path, state=state, tokens=tokens), padded_rows=padded))
        rec = recording(path, steps)
        rows = _row_names(drawn)
        measured: Counts = {"rows": len(rows), "stages": 0, "elements": 0, "worst_budget_used": 0.0}
        histograms: Histograms = {}
        violation = illegal_choice(rec) or _stages(rec, rows, measured, histograms)
        return self.verdict(violation, measured, histograms=histograms)


def _tokens(vocabulary: int, count: int, generator: torch.Generator) -> list[int]:
    return [int(token) for token in torch.randint(0, vocabulary, (count,), generator=generator)]


def _row_names(drawn: StageInput) -> list[str]:
    return [
        f"step {step}, request {request}, token {token}"
        for step, counts in enumerate(drawn.steps)
        for request, count in enumerate(counts)
        for token in range(count)
    ]


def _stages(
    rec: Recording,
    rows: list[str],
    measured: Counts,
    histograms: Histograms,
    seen: Callable[[str, Tensor], Tensor | None] = lambda _s, v: v,
) -> str:
    """The first stage beyond its bound, in words, in the order of computation; `seen` gives the value to judge.

    Counts go to `measured`, and the budget used by the elements of each stage, over its layers, to `histograms`.
    """
    for stage, own, bound in values(rec):
        computed = seen(stage, own)
        if computed is None:
            continue
        budget = judge(computed, bound)
        name = f"budget used: {stage.partition(' ')[0]}"
        known = histograms.get(name, [0] * len(budget.histogram))
        histograms[name] = [a + b for a, b in zip(known, budget.histogram, strict=True)]
        measured["stages"] = int(measured["stages"]) + 1
        measured["elements"] = int(measured["elements"]) + budget.elements
        measured["worst_budget_used"] = max(float(measured["worst_budget_used"]), budget.worst)
        if budget.first is not None:
            where = rows[budget.first[0]] if len(computed) == len(rows) else "a visible position"
            return f"{where}: {budget.describe(stage)}"
    return ""


def illegal_choice(rec: Recording) -> str:
    """The first top-k or expert that the recorded scores do not call for, in words; empty if there is none."""
    lengths_T = rec.of("positions", -1) + 1
    for layer in range(rec.config.n_layers):
        scores_TS = rec.of("index_score", layer)
        inside = torch.arange(scores_TS.shape[1]) < lengths_T[:, None]
        if bool((scores_TS[~inside] != -torch.inf).any()):
            return f"index_score {layer}: a row shows a score beyond its own position"
        best = select_topk(scores_TS, lengths_T, rec.config.index_topk)
        chosen = rec.of("index_topk", layer).long()
        certificate = certify_topk(scores_TS, torch.zeros_like(scores_TS), best, chosen, valid=inside)
        if not certificate.passed:
            return certificate.describe(f"index_topk {layer}")
        if rec.config.kind(layer) == "moe":
            routed = expert_choices(rec, layer)
            if not routed.passed:
                return routed.describe(f"gate_idx {layer}")
    return ""


class Pieces(msgspec.Struct, frozen=True, kw_only=True):
    """The same new tokens of each request, cut into steps in two ways; the second may carry rejected drafts."""

    contexts: tuple[int, ...]
    one: tuple[int, ...]
    other: tuple[int, ...]
    rejected: int = 0
    seed: int = 0


_FREE = ("index_q", "index_q_scale", "index_w", "index_score")
"""Stages of the second run that are not replaced by the first's; all others are, so that inputs are equal."""


class SameTokens(InputCheck[Pieces]):
    """Two runs over the same tokens, the second with the first's value of every stage as its input."""

    family = "step"
    input_type = Pieces

    def run(self, drawn: Pieces, target: Target) -> Verdict:
        """The second run's own values, within the bounds on the first run's values."""
        first = _Run(target, drawn)
        rec = first.go(drawn.one)
        second = _Run(target, drawn, known=first.rows)
        own = second.go(drawn.other, drawn.rejected)
        order = [second.places[key] for key in first.places]

        def seen(stage: str, _own: Tensor) -> Tensor | None:
            name, _, layer = stage.partition(" ")
            return None if name.startswith("index") else own.of(name, int(layer or -1))[order]

        names = [f"request {request}, position {position}" for request, position in first.places]
        measured: Counts = {"rows": len(order), "stages": 0, "elements": 0, "worst_budget_used": 0.0}
        histograms: Histograms = {}
        violation = illegal_choice(rec) or illegal_choice(own) or _stages(rec, names, measured, histograms, seen)
        untested = "" if drawn.one != drawn.other else "both runs are the same"
        return self.verdict(violation, measured, untested=untested, histograms=histograms)


class _Run:
    """One run over the tokens of a `Pieces`; `known`: another run's values by stage, layer and (request, position)."""

    def __init__(self, target: Target, drawn: Pieces, known: dict[Any, Tensor] | None = None) -> None:
        self.path = path_of(target, config_for(target, DENSE))
        self.state = filled_state(self.path, dict(enumerate(drawn.contexts)), drawn.seed)
        generator, total = torch.Generator().manual_seed(drawn.seed), sum(drawn.one)
        vocabulary = self.path.config.vocab_size
        self.tokens = [_tokens(vocabulary, total, generator) for _ in drawn.contexts]
        self.junk = _tokens(vocabulary, 8, generator)
        self.contexts, self.known = drawn.contexts, known or {}
        self.rows: dict[Any, Tensor] = {}
        self.places: dict[tuple[int, int], int] = {}

    def go(self, pieces: tuple[int, ...], rejected: int = 0) -> Recording:
        """Steps of these sizes, each with `rejected` more tokens that are truncated after it."""
        steps, done, rows = [], 0, 0
        for piece in pieces:
            fed = {r: [*ids[done : done + piece], *self.junk[:rejected]] for r, ids in enumerate(self.tokens)}
            tap = Recorder(path=self.path, state=self.state, tokens=fed)
            tap.forced = lambda stage, layer, value, tap=tap: self._forced(stage, layer, value, list(tap.rows()))  # type: ignore[misc]
            steps.append(record_step(self.path, tap))
            done += piece
            places = list(tap.rows())
            self._keep(steps[-1], places, done, rows)
            rows += len(places)
            for request, context in enumerate(self.contexts):
                self.state.truncate(request, context + done)
        return recording(self.path, steps)

    def _forced(self, stage: str, layer: int, value: Tensor, places: list[tuple[int, int]]) -> Tensor:
        if stage in _FREE or not self.known:
            return value
        forced = value.clone()
        for row, place in enumerate(places):
            known = self.known.get((stage, layer, place))
            if known is not None:
                forced[row] = known.to(value)
        return forced

    def _keep(self, step: Values, places: list[tuple[int, int]], done: int, before: int) -> None:
        for row, (request, position) in enumerate(places):
            if position < self.contexts[request] + done:
                self.places[request, position] = before + row
                for (stage, layer), value in step.items():
                    self.rows[stage, layer, (request, position)] = value[row]


class MtpEqualsSequential(SameTokens):
    """Verified drafts beside plain decode."""

    name = "mtp_equals_sequential"
    meaning = "tokens verified as drafts give every stage that they give one by one, rejected drafts leave no trace"

    def inputs(self) -> st.SearchStrategy[Pieces]:
        """Drafts of one to seven, across topk, two requests at most."""
        contexts = st.lists(st.one_of(st.integers(TOPK - 5, TOPK), st.sampled_from((1, 30))), min_size=1, max_size=2)
        cuts = st.sampled_from(((2, 2), (4,), (3, 1), (2, 3), (5,), (8,)))
        return st.builds(
            lambda contexts, other, rejected, seed: Pieces(
                contexts=tuple(contexts), one=(1,) * sum(other), other=other, rejected=rejected, seed=seed
            ),
            contexts,
            cuts,
            st.sampled_from((0, 1, 2)),
            st.integers(0, 2**16),
        )


class Chunking(SameTokens):
    """A prompt in chunks beside the whole prompt."""

    name = "chunking"
    meaning = "a prompt in chunks gives every stage that it gives whole"

    def inputs(self) -> st.SearchStrategy[Pieces]:
        """Chunks above and below the longest that takes the paged kernels, prompts that cross topk or begin beyond."""
        cuts = st.sampled_from(((5, 5), (6, 4), (4, 4, 4), (9, 9), (1, 9), (8, 8, 8)))
        return st.builds(
            lambda context, other, seed: Pieces(contexts=(context,), one=(sum(other),), other=other, seed=seed),
            st.one_of(st.integers(TOPK - 8, TOPK), st.sampled_from((1, 20))),
            cuts,
            st.integers(0, 2**16),
        )


CHECKS: tuple[type[InputCheck[Any]], ...] = (StageNumerics, MtpEqualsSequential, Chunking)
