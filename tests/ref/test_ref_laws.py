"""Laws that hold between runs of the reference, in fp64 where rounding hides nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dsv32_ref import indexer, mla
from dsv32_ref.cache import CacheFormat
from dsv32_ref.config import GOLDEN
from dsv32_ref.decode import Trace, decode, prefill
from dsv32_ref.mtp import draft
from dsv32_ref.rope import rope_half_split, rope_interleaved, rope_table
from dsv32_ref.router import choose_experts, expert_weights
from dsv32_ref.state import Model, State

Same = Callable[[Tensor, Tensor], None]
World = Callable[..., Model]
MTP = GOLDEN.replace(n_mtp_layers=1)


def ids(seed: int, n: int) -> list[int]:
    return torch.randint(GOLDEN.vocab_size, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("n_slots", [9, 33])
def test_absorbed_is_unabsorbed(world: World, same: Same, n_slots: int) -> None:
    model = world()
    w = model.weights.layers[1].attn
    q_nope, q_pe, kv = random(3, 4, 64), random(3, 4, 32, seed=1), random(n_slots, 160, seed=2)
    topk = torch.stack([torch.randperm(n_slots, generator=torch.Generator().manual_seed(i))[:7] for i in range(3)])
    topk[2, 3:] = -1
    gathered = kv[topk.clamp_min(0)]
    a = mla.absorbed(q_nope, q_pe, gathered, topk >= 0, w, model.config)
    b = mla.unabsorbed(q_nope, q_pe, kv, indexer.allowed(topk, n_slots), w, model.config)
    same(a, b)


@pytest.mark.parametrize("chunk", [1, 7, 16, 39])
def test_chunked_prefill_is_whole_prefill(world: World, same: Same, chunk: int) -> None:
    model, prompts = world(), {0: ids(0, 40), 1: ids(1, 23)}
    whole_state, part_state = State(model, 256), State(model, 256)
    whole, part = prefill(model, whole_state, prompts), prefill(model, part_state, prompts, chunk=chunk)
    same(whole.logits, part.logits)
    nxt = {0: [5], 1: [6]}
    same(decode(model, whole_state, nxt).logits, decode(model, part_state, nxt).logits)


def test_prefill_is_decode_token_by_token(world: World, same: Same) -> None:
    model, prompt = world(), ids(3, 30)
    state, other = State(model, 64), State(model, 64)
    whole = prefill(model, state, {0: prompt})
    for token in prompt:
        last = decode(model, other, {0: [token]})
    same(whole.logits, last.logits)


@pytest.mark.parametrize("q", [2, 4])
def test_verifying_drafts_is_sequential_decode(world: World, same: Same, q: int) -> None:
    # 14 cached tokens: the drafts cross the top-k boundary of 16.
    model, new = world(), ids(9, q)
    one, many = State(model, 128), State(model, 128)
    for state in (one, many):
        prefill(model, state, {0: ids(4, 14), 1: ids(5, 33)})
    verified = decode(model, many, {0: new, 1: new[:1]}, all_logits=True)
    sequential = [decode(model, one, {0: [token]}).logits[0] for token in new]
    same(verified.logits[:q], torch.stack(sequential))
    many.truncate(0, 15)
    one.truncate(0, 15)
    same(decode(model, many, {0: [3]}).logits, decode(model, one, {0: [3]}).logits)


def test_rows_do_not_see_their_company(world: World, same: Same) -> None:
    model = world()
    prompts = {7: ids(0, 20), 3: ids(1, 35), 5: ids(2, 5)}
    nxt = {7: [1, 2], 3: [4], 5: []}
    together = State(model, 512)
    prefill(model, together, prompts)
    out = decode(model, together, nxt)
    permuted = State(model, 512)
    prefill(model, permuted, {r: prompts[r] for r in (5, 7, 3)})
    again = decode(model, permuted, {r: nxt[r] for r in (3, 5, 7)})
    same(out.logits[:2], again.logits[[2, 0]])
    for row, request in enumerate((7, 3)):
        alone = State(model, 64, CacheFormat(page_size=1))
        prefill(model, alone, {request: prompts[request]})
        same(out.logits[row : row + 1], decode(model, alone, {request: nxt[request]}).logits)
    assert bool(out.logits[2].isnan().all())  # a request without tokens predicts nothing


def test_history_prefix_reuse_and_preemption_leave_no_trace(world: World, same: Same) -> None:
    model, form, long = world(), CacheFormat(page_size=8), ids(6, 40)
    fresh = State(model, 64, form)
    prefill(model, fresh, {0: long[:37]})
    wanted = decode(model, fresh, {0: [11]}).logits
    state = State(model, 80, form)
    prefill(model, state, {1: long[:30], 2: ids(8, 20)})
    state.fork(0, 1, 24)
    prefill(model, state, {0: long[24:37]})
    assert state.table.pages[0][:3] == state.table.pages[1][:3]
    state.preempt(1)
    same(decode(model, state, {0: [11]}).logits, wanted)
    tokens = state.preempt(0)
    assert tokens == [*long[:37], 11]
    prefill(model, state, {3: ids(1, 9)})
    prefill(model, state, {0: tokens[:37]})
    same(decode(model, state, {0: [11]}).logits, wanted)


def test_below_topk_sparse_is_dense(world: World, same: Same) -> None:
    """With at most 16 cached tokens, what the indexer says does not matter."""
    model, prompt = world(), ids(2, 15)
    state, dense = State(model, 64), State(model, 64)
    prefill(model, state, {0: prompt})
    out = decode(model, state, {0: [9]})
    config = GOLDEN.replace(index_topk=64)
    everything = Model(config=config, weights=model.weights)
    prefill(everything, dense, {0: prompt})
    forced = {("index_topk", i): torch.cat([torch.arange(16), torch.full((48,), -1)])[None] for i in range(3)}
    same(out.logits, decode(everything, dense, {0: [9]}, tap=Trace(forced=forced)).logits)


def test_above_topk_sparse_is_not_dense(world: World) -> None:
    model, state, dense = world(), State(world(), 64), State(world(), 64)
    everything = Model(config=GOLDEN.replace(index_topk=64), weights=model.weights)
    a, b = prefill(model, state, {0: ids(2, 40)}), prefill(everything, dense, {0: ids(2, 40)})
    assert float((a.logits - b.logits).abs().max()) > 1e-3


def test_a_common_bias_offset_changes_nothing() -> None:
    logits, bias = random(50, 16, seed=3), 0.05 * random(16, seed=4)
    for offset in (-3.0, 0.1, 7.0, 34.5):
        assert torch.equal(choose_experts(logits, bias + offset, GOLDEN), choose_experts(logits, bias, GOLDEN))


@pytest.mark.parametrize("turn", [rope_interleaved, rope_half_split])
def test_scores_depend_on_relative_positions(turn: Callable[..., Tensor], same: Same) -> None:
    """Without YaRN and with angles that fp32 holds exactly (theta 1 turns every pair by the position itself)."""
    config = GOLDEN.replace(rope_theta=1.0, max_seq_len=4096, original_seq_len=4096)
    q, k = random(1, 32), random(1, 32, seed=1)

    def score(p: int, s: int) -> Tensor:
        tables = [rope_table(config, torch.tensor([at]), torch.float64) for at in (p, s)]
        return (turn(q, tables[0]) * turn(k, tables[1])).sum()

    same(score(9, 4), score(2009, 2004))
    assert abs(float(score(9, 4) - score(9, 5))) > 1e-3


def test_mixed_layouts_break_relative_positions() -> None:
    config = GOLDEN.replace(max_seq_len=4096, original_seq_len=4096)
    q, k = random(1, 32), random(1, 32, seed=1)
    tables = [rope_table(config, torch.tensor([at]), torch.float64) for at in (9, 4, 2009, 2004)]
    near = (rope_interleaved(q, tables[0]) * rope_half_split(k, tables[1])).sum()
    far = (rope_interleaved(q, tables[2]) * rope_half_split(k, tables[3])).sum()
    assert abs(float(near - far)) > 1e-2


def test_mtp_drafts_do_not_depend_on_the_step_size(world: World, same: Same) -> None:
    model, tokens = world(0, MTP), ids(5, 25)
    whole, steps = State(model, 64), State(model, 64)
    first = draft(model, whole, prefill(model, whole, {0: tokens[:-1]}), torch.tensor(tokens[1:]))
    for token, following in itertools.pairwise(tokens):
        last = draft(model, steps, decode(model, steps, {0: [token]}), torch.tensor([following]))
    same(first.logits, last.logits)
    other = draft(model, whole, decode(model, whole, {0: [tokens[-1]]}), torch.tensor([1])).logits
    assert float((other - first.logits).abs().max()) > 1e-2


def test_mtp_joins_the_embedding_first(world: World, same: Same) -> None:
    from dsv32_ref.mtp import join

    w = world(0, MTP).weights.mtp[0]
    e, h = random(2, 256), random(2, 256, seed=1)
    halves = w.eh_proj[:, :256], w.eh_proj[:, 256:]  # type: ignore[index]

    def rms(x: Tensor, gain: Tensor) -> Tensor:
        return gain * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    same(join(e, h, w, MTP), rms(e, w.enorm) @ halves[0].T + rms(h, w.hnorm) @ halves[1].T)
    state = State(world(0, MTP), 64)
    out = prefill(world(0, MTP), state, {0: [1, 2]})
    with pytest.raises(ValueError, match="one token per row"):
        draft(world(0, MTP), state, out, torch.tensor([1]))


def test_weights_follow_a_forced_choice(world: World, same: Same) -> None:
    model, state = world(), State(world(), 64)
    trace = Trace()
    prefill(model, state, {0: ids(1, 20)}, tap=trace)
    state.preempt(0)
    chosen = trace.values["gate_idx", 1].flip(-1)
    again = Trace(forced={("gate_idx", 1): chosen})
    prefill(model, state, {0: ids(1, 20)}, tap=again)
    same(again.values["gate_w", 1], trace.values["gate_w", 1].flip(-1))
    same(again.values["ffn_out", 1], trace.values["ffn_out", 1])
    same(expert_weights(trace.values["gate_logits", 1], chosen, GOLDEN), again.values["gate_w", 1])


def test_fp32_and_fp64_choose_alike(world: World) -> None:
    from dsv32_ref.weights import convert

    model = world()
    single = Model(config=GOLDEN, weights=convert(model.weights, torch.float32))
    traces = Trace(), Trace()
    prompts = {0: ids(0, 40), 1: ids(1, 40)}
    a = prefill(model, State(model, 128), prompts, tap=traces[0])
    b = prefill(single, State(single, 128), prompts, tap=traces[1])
    assert (a.logits.dtype, b.logits.dtype) == (torch.float64, torch.float32)
    torch.testing.assert_close(b.logits.double(), a.logits, rtol=1e-5, atol=2e-5)
