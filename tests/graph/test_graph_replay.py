"""Padded replay is eager execution of the padded step, bit for bit, over growing and shrinking steps."""

from __future__ import annotations

import pytest
import torch
from graph_world import CONFIG, DIM, HEADS, LATENT, SCALE, SIZES, TOPK, decode, eager, inputs, make, make_kv

from dsv32_fast.batch import StepBatch
from dsv32_fast.graph.attention import GraphedAttention, allocate
from dsv32_fast.graph.model import ModelGraphRunner
from dsv32_fast.kernels.mounted import EMULATION
from dsv32_fast.metadata import MetadataBuilder
from dsv32_fast.options import PRESETS
from dsv32_fast.plan import consumer_bytes

LENGTHS = (64, 5, 130, 63, 64, 17, 200, 1)


def drawn(live: int, turn: int, runner) -> StepBatch:
    seqs = [LENGTHS[(r + turn) % len(LENGTHS)] for r in range(live)]
    return decode(*seqs, rows=runner.padded_rows(live))


@pytest.mark.parametrize("preset", ["baseline", "pr42982", "pr47766", "vllm026"])
def test_grow_and_shrink(preset):
    world = make(PRESETS[preset])
    for turn, live in enumerate((3, 8, 5, 1, 2, 2, 7, 1, 8, 3)):
        step = drawn(live, turn, world.layer.runner)
        given, before = inputs(live, turn), world.layer.buffers.o_NHC.clone()
        out = world.step(step, given)
        builder, expected = eager(step, given, world.kv, before, PRESETS[preset])
        assert torch.equal(world.layer.buffers.o_NHC[: step.num_tokens], expected), f"turn {turn}"
        assert torch.equal(out, expected[:live])
        assert not torch.equal(out, before[:live])
        ours = world.layer.builder
        assert torch.equal(ours.paged_kv_indptr_N1, builder.paged_kv_indptr_N1)
        assert torch.equal(ours.req_id_per_token_N, builder.req_id_per_token_N)
        total = int(builder.paged_kv_indptr_N1[-1])
        assert torch.equal(ours.paged_kv_indices_NK[:total], builder.paged_kv_indices_NK[:total])
        assert consumer_bytes(ours.plan) == consumer_bytes(builder.plan)
    assert world.log.faults == []


def test_mtp_rows_replay_like_eager():
    world = make()
    for turn, seqs in enumerate(((66, 40), (70, 44), (130, 64))):
        step = StepBatch(query_lens=(4, 3), seq_lens=seqs, num_tokens=8)
        given, before = inputs(7, turn), world.layer.buffers.o_NHC.clone()
        out = world.step(step, given)
        assert torch.equal(out, eager(step, given, world.kv, before)[1][:7])


def test_capture_runs_nothing():
    world = make(capture=False)
    world.layer.buffers.o_NHC.fill_(3.0)
    world.layer.capture()
    world.queues.synchronize("main")
    assert (world.layer.buffers.o_NHC == 3.0).all()
    assert not world.layer.builder.paged_kv_indices_NK.any()


def test_a_hit_needs_no_synchronisation():
    """The public fix waits for the planner after a recompute only (vLLM #47404)."""
    world = make()
    kernels = world.layer.kernels
    saturated = decode(TOPK + 1, TOPK + 9, rows=2)
    world.step(saturated, inputs(2, 0))
    waits, launches = kernels.synchronisations, world.layer.builder.counts.plan_launches
    world.step(decode(TOPK + 2, TOPK + 10, rows=2), inputs(2, 1))
    assert (kernels.synchronisations, world.layer.builder.counts.plan_launches) == (waits, launches)
    world.step(decode(TOPK + 3, TOPK - 1, rows=2), inputs(2, 2))
    assert kernels.synchronisations == waits + 1


def test_padded_rows():
    runner = make(capture=False).layer.runner
    assert [runner.padded_rows(n) for n in (1, 2, 3, 4, 5, 8)] == [1, 2, 4, 4, 8, 8]
    with pytest.raises(ValueError, match=f"exceed the largest captured size {max(SIZES)}"):
        runner.padded_rows(9)


def test_without_queues_everything_is_done_on_return():
    """As on a real device with its current stream."""
    kv = make_kv()
    layer = GraphedAttention(
        builder=MetadataBuilder(config=CONFIG, options=PRESETS["pr42982"], kernels=EMULATION),
        kernels=EMULATION,
        runner=ModelGraphRunner(SIZES),
        buffers=allocate(max(SIZES), HEADS, DIM, LATENT, TOPK),
        kv=kv,
        sm_scale=SCALE,
    )
    layer.capture()
    for turn, live in enumerate((3, 8, 1)):
        step = drawn(live, turn, layer.runner)
        given, before = inputs(live, turn), layer.buffers.o_NHC.clone()
        assert torch.equal(layer.step(step, *given), eager(step, given, kv, before)[1][:live])


def test_a_capture_leaves_the_key_of_its_own_plan():
    """A step like the last dummy may reuse its plan; any other step must not."""
    world = make()
    builder, launches = world.layer.builder, world.layer.builder.counts.plan_launches
    for turn, (step, planned) in enumerate(((decode(TOPK), 0), (decode(TOPK, TOPK), 1), (decode(TOPK), 2))):
        given, before = inputs(len(step.seq_lens), turn), world.layer.buffers.o_NHC.clone()
        out = world.step(step, given)
        assert builder.counts.plan_launches - launches == planned
        assert torch.equal(out, eager(step, given, world.kv, before)[1])
