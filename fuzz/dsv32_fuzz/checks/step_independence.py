"""The whole decode step of a request is the same alone and among others, in any order, padding and history.

Each request is taken through the step alone, unpadded, by an engine that has done nothing else: that is the truth. One
engine then does it in turn after turn: strangers come and go and leave their pages and plans behind, requests change
places, the batch grows and shrinks, rows are padded. Every stage goes on with the truth's value, so that one legal
rounding excuses nothing later. The same numbers must come out, bit for bit where a kernel promises it (caches, choices,
attention over the same pieces of keys), elsewhere at least within the proven bound: a product's bits may depend on its
number of rows, and a row that is split otherwise is added up otherwise.

Legend: S positions, D latent + RoPE, I indexer width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch
from hypothesis import strategies as st
from torch import Tensor

from dsv32_fast.kernels.emulated.cache import read_keys
from dsv32_fast.kernels.emulated.device import MI355X, emulated_device
from dsv32_fast.path import DecodePath
from dsv32_fast.plan import consumer_view
from dsv32_fast.scale import admit
from dsv32_fast.state import CacheState
from dsv32_fuzz.checks.findings import Findings, same_bits
from dsv32_fuzz.checks.own_input import InputCheck
from dsv32_fuzz.checks.step_numerics import illegal_choice
from dsv32_fuzz.stages.bounds import Values, attended, values
from dsv32_fuzz.stages.recorder import MIXED, Recorder, config_for, path_of, record_step, recording
from dsv32_fuzz.strategies import integers, sampled_from
from dsv32_fuzz.targets import Target
from dsv32_fuzz.verdict import Verdict

WORLD = MIXED.replace(index_topk=48)
"""Three granules of keys at most, so that a row is split as long as there are compute units to spare."""
GPU = replace(MI355X, compute_units=8)
TOPK, STRANGER = WORLD.index_topk, 1000
"""Request numbers from STRANGER on are those of strangers."""
EXACT = ("gate_idx", "gate_w", "cached")
"""Stages whose bits follow from replaced inputs, row by row."""
OWN = ("keys", "key_scales", "index_topk", "gate_idx")
"""What a step has of its own where all else is replaced."""
INPUTS = ("keys", "key_scales", "kv", "attended", "routed", "positions", "tokens")
"""What is recorded beside the stages."""
Place = tuple[int, int]
"""(request, position)."""
Pieces = tuple[tuple[int, int], ...]
"""The first key and the end of each piece that a row's keys are cut into, counted from the row's first."""


class Turn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Strangers by their query lengths, who come and go; then some requests in an order, and rows of padding."""

    strangers: tuple[int, ...] = ()
    order: tuple[int, ...]
    padding: int = 0


class Surroundings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Requests as (cached tokens, new tokens), and what one engine does to them."""

    requests: tuple[tuple[int, int], ...]
    turns: tuple[Turn, ...]
    seed: int = 0

    def ids(self, request: int, vocabulary: int) -> list[int]:
        """The new tokens of a request."""
        generator = torch.Generator().manual_seed(self.seed * 64 + request)
        count = self.requests[request][1]
        return [int(token) for token in torch.randint(0, vocabulary, (count,), generator=generator)]


@st.composite
def surroundings(draw: st.DrawFn) -> Surroundings:
    """One to three requests around topk, in two or three turns; mostly all of them, in changing order and padding."""
    contexts = st.one_of(integers(TOPK - 4, TOPK + 1), sampled_from((1, 15, 31, 60)))
    requests = draw(st.lists(st.tuples(contexts, sampled_from((1, 2, 3))), min_size=1, max_size=3))
    orders = st.permutations(range(len(requests)))
    turns = [
        Turn(
            strangers=tuple(draw(st.lists(sampled_from((1, 2, 5)), max_size=4))),
            order=tuple(draw(orders)[: draw(sampled_from((3, 3, 1, 2)))]),
            padding=draw(sampled_from((1, 0, 6))),
        )
        for _ in range(draw(sampled_from((2, 1, 3))))
    ]
    return Surroundings(requests=tuple(requests), turns=tuple(turns), seed=draw(integers(0, 1 << 16)))


class StepIndependence(InputCheck[Surroundings]):
    """The path as it runs, caches included."""

    name = "step_independence"
    meaning = "a request's step gives the same alone and in any batch, order and padding, whatever ran before it"
    family = "step"
    input_type = Surroundings

    def inputs(self) -> st.SearchStrategy[Surroundings]:
        """Few requests in some turns of one engine."""
        return surroundings()

    def run(self, drawn: Surroundings, target: Target) -> Verdict:
        """Every request alone, then every turn."""
        found = Findings()
        with emulated_device(GPU):
            alone = {
                request: _Engine(drawn, target).step(Turn(order=(request,)))
                for request in sorted({request for turn in drawn.turns for request in turn.order})
            }
            truth = {place: run for run in alone.values() for place in run.places}
            engine = _Engine(drawn, target)
            for number, turn in enumerate(drawn.turns):
                engine.meet(turn.strangers)
                _compare(found, f"turn {number}", engine.step(turn, truth), [alone[request] for request in turn.order])
        other = any(turn.strangers or turn.padding or len(turn.order) > 1 for turn in drawn.turns)
        return self.verdict(found.violation, found.measured(), untested="" if other else "every request was alone")


@dataclass(frozen=True, kw_only=True)
class _Run:
    """One step as it was recorded, and what the caches hold behind it."""

    path: DecodePath
    places: list[Place]
    values: Values
    pieces: list[Pieces]
    """Of each row."""
    latents: dict[int, list[Tensor]]
    """By request, of each layer [S, D]."""
    keys: dict[int, list[tuple[Tensor, Tensor]]]
    """By request, of each layer the fp8 bits [S, I] and scales [S, 1] that were there before the step."""

    def row(self, stage: str, layer: int, place: Place) -> Tensor:
        return self.values[stage, layer][self.places.index(place)]


class _Engine:
    """A path with its plan and its caches; requests are admitted for a step and leave behind it."""

    def __init__(self, drawn: Surroundings, target: Target) -> None:
        self.drawn, self.path = drawn, path_of(target, config_for(target, WORLD))
        page = self.path.path.page_size
        pages = sum(-(-(context + query) // page) for context, query in drawn.requests)
        self.state = self.path.new_state(max(pages, *(len(turn.strangers) for turn in drawn.turns)) * page)

    def meet(self, strangers: tuple[int, ...]) -> None:
        """A step of strangers, a page each."""
        tokens = {STRANGER + number: [1] * query for number, query in enumerate(strangers)}
        if tokens:
            self._admit(dict.fromkeys(tokens, 5))
            self.path.decode(self.state, tokens)
            self._leave(tokens)

    def step(self, turn: Turn, truth: dict[Place, _Run] | None = None) -> _Run:
        """One step of the requests of a turn; stages go on with the values of `truth`."""
        drawn, path, state = self.drawn, self.path, self.state
        tokens = {request: drawn.ids(request, path.config.vocab_size) for request in turn.order}
        self._admit({request: drawn.requests[request][0] for request in turn.order})
        tap = Recorder(path=path, state=state, tokens=tokens)
        tap.forced = lambda stage, layer, value: _forced(truth or {}, stage, layer, value, list(tap.rows()))
        rows = sum(len(ids) for ids in tokens.values())
        recorded = record_step(path, tap, padded_rows=rows + turn.padding if turn.padding else 0)
        run = _Run(
            path=path,
            places=list(tap.rows()),
            values=recorded,
            pieces=_pieces(path, rows),
            latents={r: [part.flatten(0, 1)[state.slots(r)] for part in state.latent] for r in turn.order},
            keys={r: _keys(path, state, r, drawn.requests[r][0]) for r in turn.order},
        )
        self._leave(tokens)
        return run

    def _admit(self, contexts: dict[int, int]) -> None:
        """Each request's cache has the same contents wherever it lies; pages are dealt from the first one on."""
        self.state.free.sort(reverse=True)
        for request, context in contexts.items():
            admit(self.path, self.state, {request: context}, self.drawn.seed * 64 + request)

    def _leave(self, requests: dict[int, list[int]]) -> None:
        for request in requests:
            self.state.release(request)


def _forced(truth: dict[Place, _Run], stage: str, layer: int, value: Tensor, places: list[Place]) -> Tensor:
    if not truth:
        return value
    forced = value.clone()
    for row, place in enumerate(places):
        known = truth[place].row(stage, layer, place).to(value)
        forced[row, : len(known)] = known  # a row of scores may be wider here
    return forced


def _keys(path: DecodePath, state: CacheState, request: int, context: int) -> list[tuple[Tensor, Tensor]]:
    slots, width = state.slots(request)[:context], path.config.index_head_dim
    page, slot = slots // state.page_size, slots % state.page_size
    return [read_keys(cache.cpu(), page, slot, width, state.preshuffle) for cache in state.index]


def _pieces(path: DecodePath, rows: int) -> list[Pieces]:
    """How the plan cuts the keys of each row."""
    first = path.builder.paged_kv_indptr_N1.tolist()
    works = consumer_view(path.builder.plan).work_info_set
    return [
        tuple(sorted((int(w[4]) - first[row], int(w[5]) - first[row]) for w in works if w[0] == row))
        for row in range(rows)
    ]


def _compare(found: Findings, turn: str, run: _Run, alone: list[_Run]) -> None:
    """Caches, bits, and where these may differ the bounds."""
    _caches(found, turn, run, alone)
    truth = {place: other for other in alone for place in other.places}
    differing: set[tuple[str, int]] = set()
    for row, place in enumerate(run.places):
        other = truth[place]
        cut_alike = run.pieces[row] == other.pieces[other.places.index(place)]
        found.counts["rows"] += 1
        found.counts["rows_cut_alike"] += cut_alike
        for stage, layer in run.values:
            if stage in INPUTS:
                continue
            same = _same_row(stage, run.values[stage, layer][row], other.row(stage, layer, place))
            if stage in EXACT or (stage == "attn_z" and cut_alike):
                text = f"{turn}: {stage} {layer}: request {place[0]}, position {place[1]}, has other bits than alone"
                found.require("rows_of_equal_bits", same, text)
            differing |= set() if same else {(stage, layer)}
    if differing and not found.violation:
        _within(found, turn, run, alone, differing)


def _caches(found: Findings, turn: str, run: _Run, alone: list[_Run]) -> None:
    for (request, latents), other in zip(run.latents.items(), alone, strict=True):
        for layer, latent_SD in enumerate(latents):
            same = same_bits(latent_SD, other.latents[request][layer])
            found.require("caches", same, f"{turn}: latents of request {request}, layer {layer}, are not its own")
            pairs = zip(run.keys[request][layer], other.keys[request][layer], strict=True)
            same = all(same_bits(*pair) for pair in pairs)
            found.require("caches", same, f"{turn}: index keys of request {request}, layer {layer}, are not its own")


def _same_row(stage: str, own: Tensor, expected: Tensor) -> bool:
    if stage == "index_topk":  # a set
        own, expected = own.sort().values, expected.sort().values
    if stage == "index_score":  # as wide as the longest request of the batch
        return same_bits(own[: len(expected)], expected) and bool((own[len(expected) :] == -torch.inf).all())
    return same_bits(own, expected)


def _within(found: Findings, turn: str, run: _Run, alone: list[_Run], differing: set[tuple[str, int]]) -> None:
    """Stages lie within the bound on the inputs that they had: the truth's, and keys of their own.

    Attention comes first and most often alone: the bounds of all stages take longer than the step.
    """
    given, row = [], 0
    for other in alone:
        rows = slice(row, row + len(other.places))
        given.append({**other.values, **{key: value[rows] for key, value in run.values.items() if key[0] in OWN}})
        row = rows.stop
    inputs, own = recording(run.path, given), recording(run.path, [run.values])
    for layer in sorted(layer for stage, layer in differing if stage == "attn_z"):
        found.within(f"{turn}: attn_z {layer}", own.of("attn_z", layer), attended(inputs, layer))
    if all(stage == "attn_z" for stage, _ in differing):
        return
    illegal = illegal_choice(inputs)
    found.require("choices", not illegal, f"{turn}: {illegal}")
    for (stage, _, bound), (_, computed, _) in zip(values(inputs), values(own), strict=True):
        found.within(f"{turn}: {stage}", computed, bound)


CHECKS: tuple[type[InputCheck[Any]], ...] = (StepIndependence,)
