"""Any history of steps leaves each request where one prefill of its tokens would."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from dsv32_ref.cache import CacheFormat
from dsv32_ref.config import GOLDEN
from dsv32_ref.decode import decode, prefill
from dsv32_ref.state import Model, State
from dsv32_ref.weights import assemble, synthetic

SCALE_64 = 2.0**-29
MODEL = Model(config=GOLDEN, weights=assemble(GOLDEN, synthetic(GOLDEN, 2), torch.float64))
LONGEST = 48

step = st.dictionaries(st.integers(0, 2), st.integers(0, 5), min_size=1)
act = st.one_of(
    st.tuples(st.just("decode"), step),
    st.tuples(st.just("decode"), step),
    st.tuples(st.just("prefill"), st.dictionaries(st.integers(0, 2), st.integers(1, 20), min_size=1)),
    st.tuples(st.just("reject"), st.tuples(st.integers(0, 2), st.integers(1, 4))),
    st.tuples(st.just("preempt"), st.integers(0, 2)),
    st.tuples(st.just("fork"), st.tuples(st.integers(0, 2), st.integers(0, 2))),
)


def perform(state: State, kind: str, detail: Any, draw_token: torch.Generator) -> None:
    """One act, where it makes sense in this state."""
    page = state.form.page_size
    if kind in ("decode", "prefill"):
        room = {r: min(n, LONGEST - len(state.tokens.get(r, ()))) for r, n in detail.items()}
        ids = {r: torch.randint(512, (n,), generator=draw_token).tolist() for r, n in room.items() if n >= 0}
        (decode if kind == "decode" else prefill)(MODEL, state, ids)
    elif kind == "preempt" and detail in state.tokens:
        tokens = state.preempt(detail)
        prefill(MODEL, state, {detail: tokens}, chunk=7)
    elif kind == "reject" and len(state.tokens.get(detail[0], ())) > detail[1]:
        keep = len(state.tokens[detail[0]]) - detail[1]
        shared = any(state.table.users[p] > 1 for p in state.table.pages[detail[0]][keep // page :])
        if not shared:
            state.truncate(detail[0], keep)
    elif kind == "fork" and detail[0] not in state.tokens and detail[1] in state.tokens:
        state.fork(detail[0], detail[1], len(state.tokens[detail[1]]) // page * page)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(acts=st.lists(act, min_size=2, max_size=8), page_size=st.sampled_from([1, 4, 64]), seed=st.integers(0, 99))
def test_a_history_equals_one_prefill(acts: list[tuple[str, Any]], page_size: int, seed: int) -> None:
    state = State(MODEL, 4 * 64, CacheFormat(page_size=page_size))
    tokens = torch.Generator().manual_seed(seed)
    for kind, detail in acts:
        perform(state, kind, detail, tokens)
    note(f"tokens {state.tokens}")
    live = sorted(state.tokens)
    last = decode(MODEL, state, {request: [request + 1] for request in live})
    for row, request in enumerate(live):
        alone = State(MODEL, 64)
        wanted = prefill(MODEL, alone, {9: state.tokens[request]}).logits
        torch.testing.assert_close(last.logits[row : row + 1], wanted, rtol=1e-5 * SCALE_64, atol=2e-5 * SCALE_64)
    held = {page for pages in state.table.pages.values() for page in pages}
    assert [users > 0 for users in state.table.users] == [page in held for page in range(state.table.n_pages)]
