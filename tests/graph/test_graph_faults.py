"""Every fault of graph replay is reported; left alone it gives wrong numbers; its control does neither.

The numbers Zxx are those of the public reports that the suite collects: Z07 aprender #2030, Z08 sglang #15227, Z09
vllm-ascend #17170, Z24 vLLM #42810, Z28 vLLM #47404, Z29 AITER #5193, Z32 xllm #1939, Z33 vLLM #36013.
"""

from __future__ import annotations

import pytest
import torch
from graph_world import TOPK, decode, eager, inputs, make

from dsv32_fast.batch import StepBatch
from dsv32_fast.graph.arena import Arena
from dsv32_fast.graph.attention import RENEWED, StepBuffers, allocate, attend, step_call
from dsv32_fast.graph.faults import FaultLog, GraphFaultError
from dsv32_fast.graph.model import ModelGraphRunner
from dsv32_fast.graph.queues import Queues, Staging
from dsv32_fast.graph.runner import StepCall


def collect(kind: str, sizes=(4,)) -> tuple[ModelGraphRunner, FaultLog]:
    """A runner that raises when the test is about raising, and collects otherwise."""
    log = FaultLog(strict=kind == "raise")
    return ModelGraphRunner(sizes, log), log


def test_moved_tensor():
    world = make(strict=False)
    step, given = decode(70, 9, rows=2), inputs(2, 0)
    for name, rows in zip(("q", "slots"), given, strict=True):
        world.layer.put(name, rows)
    metadata = world.layer.build(step)
    elsewhere = world.layer.buffers._replace(o_NHC=world.layer.buffers.o_NHC.clone()).rows(2)
    call = step_call(elsewhere, metadata, world.kv, world.layer.sm_scale, RENEWED)
    world.layer.runner.replay(2, call)
    world.queues.synchronize("main")
    assert [(f.kind, f.what) for f in world.log.faults] == [("moved", "o")]
    assert not elsewhere.o_NHC.any()
    assert world.layer.buffers.o_NHC[:2].any()
    world.log.strict = True
    with pytest.raises(GraphFaultError, match=r"moved: o: captured as \[2, 16, 16\] at 0x"):
        world.layer.runner.replay(2, call)


def test_a_tensor_that_is_not_passed_is_moved():
    runner, log = collect("report")
    x, out = torch.ones(4), torch.zeros(4)
    runner.capture(4, lambda: out.copy_(x), StepCall(rows=4, tensors={"x": x, "out": out}))
    runner.replay(4, StepCall(rows=4, tensors={"out": out}))
    assert [(f.kind, f.what) for f in log.faults] == [("moved", "x")]


class LruCache:
    """Row offsets [0, s, 2s, ...] on the device, by s: what AITER #5193 caches."""

    def __init__(self, size: int, arena: Arena) -> None:
        self.size, self.arena, self.held = size, arena, {}

    def offsets(self, s: int) -> torch.Tensor:
        if s in self.held:
            self.held[s] = self.held.pop(s)
            return self.held[s]
        if len(self.held) == self.size:
            self.arena.free(self.held.pop(next(iter(self.held))))
        self.held[s] = self.arena.allocate((5,), torch.int32)
        return self.held[s].copy_(torch.arange(5) * s)


@pytest.mark.parametrize(("cache_size", "expected"), [(2, [0, 9, 18, 27, 36]), (3, [0, 5, 10, 15, 20])])
def test_z29_captured_entry_of_an_lru_cache(cache_size, expected):
    arena = Arena(1 << 12)
    log = FaultLog(strict=False)
    runner = ModelGraphRunner((4,), log, arena=arena)
    cache, out = LruCache(cache_size, arena), torch.zeros(5, dtype=torch.int32)
    captured = cache.offsets(5)
    call = StepCall(rows=4, tensors={"out": out, "offsets": captured})
    runner.capture(4, lambda: out.copy_(captured), call)
    for s in (7, 9):
        cache.offsets(s)
    runner.replay(4, call)
    assert out.tolist() == expected
    assert [(f.kind, f.what) for f in log.faults] == [("freed", "offsets")] * (cache_size == 2)
    if cache_size == 2:
        log.strict = True
        with pytest.raises(GraphFaultError, match="was allocation 1 at capture and is allocation 3 now"):
            runner.replay(4, call)


def test_z29_freed_and_not_yet_recycled():
    arena = Arena(1 << 12)
    runner = ModelGraphRunner((4,), arena=arena)
    x, out = arena.allocate((4,), torch.float32), torch.zeros(4)
    runner.capture(4, lambda: out.copy_(x * 2), StepCall(rows=4, tensors={"out": out}))
    arena.free(x)
    with pytest.raises(GraphFaultError, match=r"freed: an argument of aten\.mul\.Tensor: .* is free now"):
        runner.replay(4, StepCall(rows=4, tensors={"out": out}))


@pytest.mark.parametrize(
    ("depth", "wait", "seen"),
    [(1, False, [0, 1, 2]), (1, True, [0, 2, 5]), (2, False, [0, 2, 5]), (2, True, [0, 2, 5])],
)
def test_z33_staging_buffer_written_before_its_copy_ran(depth, wait, seen):
    log = FaultLog(strict=False)
    queues = Queues(log)
    target, consumer = torch.zeros(3, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    staging = Staging(target, queues, depth=depth, wait=wait)
    staging.put("prefix", torch.tensor([0, 2, 5]))
    queues.launch("main", "consumer", lambda: consumer.copy_(target), reads=(target,), writes=(consumer,))
    staging.put("prefix", torch.tensor([0, 1, 2]))
    queues.synchronize("main")
    assert consumer.tolist() == seen
    assert target.tolist() == [0, 1, 2]
    assert log.kinds == (("staging reused",) if (depth, wait) == (1, False) else ())


@pytest.mark.parametrize("wait", [False, True])
def test_z33_in_the_decode_step(wait):
    world = make(strict=False, staging_depth=1, staging_waits=wait)
    step, first, second = decode(70, 90, rows=2), inputs(2, 0), inputs(2, 1)
    before = world.layer.buffers.o_NHC.clone()
    world.layer.step(step, *first)
    for name, rows in zip(("q", "slots"), second, strict=True):
        world.layer.put(name, rows)
    world.queues.synchronize("main")
    right = torch.equal(world.layer.buffers.o_NHC[:2], eager(step, first, world.kv, before)[1])
    assert right == wait
    assert set(world.log.kinds) == (set() if wait else {"staging reused"})


def test_z33_is_raised():
    """On a hit: a recompute waits for the planner, which waited for the copies, and so hides the fault."""
    world = make(staging_depth=1, staging_waits=False)
    world.layer.step(decode(70, 90, rows=2), *inputs(2, 0))
    with pytest.raises(GraphFaultError, match="staging reused: staging of q: written while the asynchronous copy"):
        world.layer.step(decode(71, 91, rows=2), *inputs(2, 1))


@pytest.mark.parametrize("synchronise", [False, True])
def test_z28_plan_not_ordered_before_the_replay(synchronise):
    world = make(strict=False, synchronise=synchronise)
    steps = decode(70, 90, rows=2), decode(3, 200, rows=2)
    right = []
    for turn, step in enumerate(steps):
        given, before = inputs(2, turn), world.layer.buffers.o_NHC.clone()
        out = world.step(step, given)
        right.append(torch.equal(out, eager(step, given, world.kv, before)[1][:2]))
    assert all(right) == synchronise
    faults = {(f.kind, f.what) for f in world.log.faults}
    if synchronise:
        assert faults == set()
    else:
        assert ("unordered", "graph replay on main") in faults


def test_z28_an_event_orders_as_well_as_a_synchronisation():
    log = FaultLog()
    queues = Queues(log)
    plan, seen = torch.zeros(1), torch.zeros(1)

    def replay_after(wait: bool) -> None:
        queues.launch("planner", "plan", lambda: plan.fill_(1), writes=(plan,))
        if wait:
            queues.wait("main", queues.record("planner"))
        queues.launch("main", "graph replay", lambda: seen.copy_(plan), reads=(plan,), writes=(seen,))
        queues.synchronize("main")

    replay_after(True)
    assert seen.item() == 1
    with pytest.raises(GraphFaultError, match="unordered: graph replay on main: not ordered after plan on planner"):
        replay_after(False)


def short_world(rows: int):
    """Four padded rows planned, and buffers of which the caller passes `rows`; row 3 behind them is a canary."""
    world = make(capture=False, strict=False)
    metadata = world.layer.build(decode(70, 90, 100, 64, rows=4))
    buffers, kernels = world.layer.buffers, world.layer.runner.recording(world.layer.kernels)
    buffers.o_NHC.fill_(7.0)
    views = StepBuffers(buffers.q_NHD[:rows], buffers.slots_NK[:4], buffers.o_NHC[:rows])
    call = step_call(views, metadata, world.kv, 0.3, ())
    return world, call, lambda: attend(kernels, views, metadata, world.kv, 0.3)


@pytest.mark.parametrize("rows", [3, 4])
def test_z24_output_view_shorter_than_the_padded_rows(rows):
    world, call, body = short_world(rows)
    world.layer.runner.capture(4, body, call)
    assert world.log.kinds == (("short view",) if rows == 3 else ())
    world.log.faults.clear()
    world.layer.runner.replay(4, call)
    world.queues.synchronize("main")
    assert (world.layer.buffers.o_NHC[3] != 7.0).any()  # the kernel writes the padded rows whatever it was given
    written = [(f.kind, f.what) for f in world.log.faults if f.kind == "write outside view"]
    assert written == ([("write outside view", "o")] if rows == 3 else [])


def test_z07_graph_keyed_by_size_only():
    """Captured for 2 chunks, replayed at a length of 3."""
    runner, log = collect("report", sizes=(2,))
    keys, out = torch.arange(48.0), torch.zeros(1)

    def call(chunks: int) -> StepCall:
        return StepCall(rows=2, tensors={"keys": keys, "out": out}, scalars={"chunks": chunks})

    runner.capture(2, lambda: torch.sum(keys[:32], 0, keepdim=True, out=out), call(2))
    runner.replay(2, call(3))
    assert (out.item(), log.kinds) == (float(sum(range(32))), ("baked scalar",))
    log.faults.clear()
    runner.capture(2, lambda: torch.sum(keys[:48], 0, keepdim=True, out=out), call(3))
    for chunks, length in ((3, 48), (2, 32)):
        runner.replay(2, call(chunks))
        assert out.item() == float(sum(range(length)))
    assert log.faults == []
    log.strict = True
    with pytest.raises(GraphFaultError, match="baked scalar: chunks: captured as 2, now 4"):
        runner.replay(2, call(4))


def test_z32_metadata_for_fewer_rows_than_the_graph():
    world = make()
    step, given = decode(70, 90, 30, 64, 65), inputs(5, 0)
    for name, rows in zip(("q", "slots"), given, strict=True):
        world.layer.put(name, rows)
    metadata = world.layer.build(step)
    with pytest.raises(GraphFaultError, match="row count: metadata: describes 5 rows, the graph runs 8"):
        world.layer.replay(metadata, 8)
    padded = decode(70, 90, 30, 64, 65, rows=8)
    world.step(padded, given)
    assert world.layer.builder.paged_kv_indptr_N1[5:].unique().numel() == 1


def test_metadata_for_more_rows_than_the_graph_writes_outside_the_view():
    world = make(strict=False)
    step, given = decode(70, 90, 30, 64, rows=4), inputs(4, 0)
    for name, rows in zip(("q", "slots"), given, strict=True):
        world.layer.put(name, rows)
    world.layer.replay(world.layer.build(step), 2)
    world.queues.synchronize("main")
    assert {"row count", "write outside view"} <= set(world.log.kinds)


def test_z08_idle_rank_with_the_metadata_of_the_last_batch():
    world = make(strict=False)
    busy = decode(70, 90, 30, 64, 65, rows=8)
    world.step(busy, inputs(5, 0))
    stale = world.layer.builder.build(busy)
    world.log.faults.clear()
    world.layer.replay(stale, 1)
    assert "row count" in world.log.kinds
    world.log.faults.clear()
    idle = StepBatch(query_lens=(), seq_lens=(), num_tokens=1)
    world.step(idle, inputs(0, 0))
    assert world.log.faults == []
    assert world.layer.builder.paged_kv_indptr_N1[:2].tolist() == [0, 0]


def test_z08_nothing_was_built_at_all():
    world = make(strict=False)
    step = decode(70, 90, rows=2)
    world.step(step, inputs(2, 0))
    metadata = world.layer.build(step)
    world.layer.replay(metadata, 2)
    world.log.faults.clear()
    world.layer.replay(metadata, 2)
    assert {(f.kind, f.what) for f in world.log.faults} == {("not renewed", name) for name in RENEWED}


@pytest.mark.parametrize("rewrites_positions", [False, True])
def test_z09_dummy_batch_keeps_old_positions(rewrites_positions):
    runner, log = collect("report", sizes=(1,))
    positions, seq_lens, visible = (torch.zeros(1, dtype=torch.int32) for _ in range(3))
    tensors = {"positions": positions, "seq_lens": seq_lens, "visible": visible}
    call = StepCall(rows=1, tensors=tensors, renewed=("positions", "seq_lens"))
    runner.capture(1, lambda: torch.add(positions, 1, out=visible), call)
    positions.fill_(115)
    seq_lens.fill_(116)
    runner.replay(1, call)
    assert visible.item() == 116
    seq_lens.fill_(1)
    if rewrites_positions:
        positions.fill_(0)
    runner.replay(1, call)
    assert visible.item() == (1 if rewrites_positions else 116)
    assert [(f.kind, f.what) for f in log.faults] == [("not renewed", "positions")] * (not rewrites_positions)


def test_a_new_layer_with_wrong_rows_is_refused():
    world = make(capture=False)
    with pytest.raises(ValueError, match="no graph was captured for 2 rows"):
        world.layer.step(decode(70, rows=2), *inputs(1, 0))
    with pytest.raises(ValueError, match="q has 1 rows, the step has 2 query tokens"):
        world.layer.step(decode(70, 71), *inputs(1, 0))


def test_buffers_have_one_row_for_each_row_of_the_largest_graph():
    buffers = allocate(8, 16, 24, 16, TOPK)
    assert [tuple(b.shape) for b in buffers.rows(3)] == [(3, 16, 24), (3, TOPK), (3, 16, 16)]
