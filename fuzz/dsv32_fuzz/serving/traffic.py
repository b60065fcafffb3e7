"""Hypothesis strategies of engine actions, and the traffic class `serving`: runs of the engine as step sequences.

Lengths and amounts cluster where a metadata builder changes what it does: around topk, pages and chunks, and at the
number of drafts. Half of all actions are steps, so that a short run already has a few of them.
"""

from __future__ import annotations

from functools import cache

from hypothesis import strategies as st

from dsv32_fast.batch import StepBatch
from dsv32_fuzz.serving.engine import CAPTURE_SIZES, PAGE, Action, ActionKind, Engine, EngineConfig
from dsv32_fuzz.strategies import Steps, booleans, context_lens, integers, sampled_from

MAX_DEPTH = 7
MAX_ACTIONS = 16
BUDGETS = (1024, 1024, 64, 4096)
WEIGHTED: tuple[ActionKind, ...] = (
    *("decode",) * 5,
    *("replay",) * 4,
    *("chunk",) * 3,
    *("admit",) * 3,
    *("speculate",) * 2,
    "draft",
    "finish",
    "abort",
    "preempt",
    "resume",
    "resume",
    "reuse",
    "permute",
    "permute",
    "idle",
    "capture",
    "capture",
    "clear",
)
"""A step as often as anything else, and what makes one more interesting more often than what ends it."""


@cache
def prompts(topk: int) -> st.SearchStrategy[int]:
    """Tokens that a prompt leaves to compute: one, a page, chunks of topk and what lies around them."""
    edges = (1, 2, 15, 16, 17, PAGE - 1, PAGE, PAGE + 1, topk // 2, topk - 1, topk, topk + 1, 2 * topk, 2 * topk + 1)
    return st.one_of(st.just(1), st.just(1), sampled_from(edges), integers(1, 3 * topk))


@cache
def contexts(topk: int) -> st.SearchStrategy[int]:
    """Cached tokens of a new request: mostly so many that the next steps cross topk, or that all rows are full."""
    near = integers(-2 * (MAX_DEPTH + 1), 1).map(lambda d: max(0, topk + d))
    full = integers(topk, 4 * topk)
    return st.one_of(near, full, near, full, context_lens(topk))


@cache
def actions(kind: ActionKind, topk: int) -> st.SearchStrategy[Action]:
    """Actions of one kind."""
    who, drafts = integers(0, 7), integers(0, MAX_DEPTH)
    arguments: dict[ActionKind, dict[str, st.SearchStrategy[int]]] = {
        "admit": {"amount": prompts(topk), "context": contexts(topk), "copies": sampled_from((1, 1, 2, 8))},
        "chunk": {"amount": drafts, "copies": sampled_from((topk, 1, 8, PAGE, topk // 2, topk - 1, topk + 1))},
        "decode": {"amount": drafts, "who": sampled_from((0, 0, 1, 2))},
        "replay": {"amount": drafts, "who": sampled_from((0, 0, 1, 2))},
        "speculate": {"amount": drafts},
        "draft": {"who": who, "amount": drafts},
        "resume": {"amount": st.one_of(sampled_from((0, topk, 1 << 20)), integers(0, 2 * topk))},
        "reuse": {"who": who, "amount": prompts(topk)},
        "permute": {"who": who, "amount": integers(0, 1)},
        "idle": {"amount": sampled_from((1, 2, 64)), "who": integers(0, 1)},
        "capture": {"amount": integers(0, len(CAPTURE_SIZES) - 1)},
        "clear": {},
    }
    return st.builds(Action, kind=st.just(kind), **arguments.get(kind, {"who": who}))


@cache
def any_action(topk: int) -> st.SearchStrategy[Action]:
    """Actions of all kinds, by weight; a decode step is the simplest."""
    return sampled_from(WEIGHTED).flatmap(lambda kind: actions(kind, topk))


def configs(budgets: tuple[int, ...] = BUDGETS) -> st.SearchStrategy[EngineConfig]:
    """Engines: large and small budgets, exact and optimistic bounds."""
    return st.builds(EngineConfig, budget=sampled_from(budgets), optimistic=booleans())


@st.composite
def serving_steps(draw: st.DrawFn, topk: int = 2048) -> Steps:
    """The steps of a run of the engine that starts with a request, perhaps speculating, and ends with two steps."""
    engine = Engine(draw(configs()))
    engine.apply(draw(actions("admit", topk)))
    engine.apply(draw(actions("speculate", topk)))
    ending = Action(kind="decode", amount=MAX_DEPTH)
    drawn = draw(st.lists(any_action(topk), min_size=6, max_size=MAX_ACTIONS))
    return run(engine, (*drawn, ending, ending))


def run(engine: Engine, wanted: tuple[Action, ...]) -> Steps:
    """The step batches that some actions make."""
    made: list[StepBatch | None] = [engine.apply(action) for action in wanted]
    return tuple(step for step in made if step is not None)
