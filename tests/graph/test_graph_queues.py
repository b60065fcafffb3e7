"""Queues: pending work runs in a legal order, and vector clocks agree with reachability in the graph of orders."""

from __future__ import annotations

import itertools

import pytest
import torch
from graph_world import TOPK, eager, inputs, make
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv32_fast.batch import StepBatch
from dsv32_fast.graph.faults import FaultLog
from dsv32_fast.graph.queues import HOST, Queues, Staging

QUEUES = ("a", "b", "c")
COMMANDS = st.one_of(
    st.tuples(st.just("launch"), st.sampled_from(QUEUES), st.sampled_from(("read", "write"))),
    st.tuples(st.just("host"), st.just(HOST), st.sampled_from(("read", "write"))),
    st.tuples(st.just("wait"), st.sampled_from((*QUEUES, HOST)), st.sampled_from(QUEUES)),
)


def reachable(edges: dict[int, set[int]], start: int, end: int) -> bool:
    seen, todo = {start}, [start]
    while todo:
        node = todo.pop()
        if node == end:
            return True
        new = edges.get(node, set()) - seen
        seen |= new
        todo += new
    return False


def first_race(program) -> int | None:
    """Number of the first command that conflicts with an earlier one without a path of orders between them.

    Nodes are commands. Edges: program order of each queue; from the host's last command to every launch; from the last
    launch of a queue to whoever waits for it.
    """
    edges: dict[int, set[int]] = {}
    last: dict[str, int] = {}
    accesses: list[tuple[int, bool]] = []

    def edge(queue: str, node: int) -> None:
        if queue in last:
            edges.setdefault(last[queue], set()).add(node)

    for node, (command, queue, argument) in enumerate(program):
        edge(queue, node)
        if command == "wait":
            edge(argument, node)
        else:
            edge(HOST, node)
            writes = argument == "write"
            for earlier, wrote in accesses:
                if (writes or wrote) and not reachable(edges, earlier, node):
                    return node
            accesses.append((node, writes))
        last[queue] = node
    return None


def first_fault(program) -> int | None:
    log = FaultLog(strict=False)
    queues, x = Queues(log), torch.zeros(1)
    for number, (command, queue, argument) in enumerate(program):
        if command == "wait":
            queues.wait(queue, queues.record(argument))
        elif command == "host":
            (queues.host_read if argument == "read" else queues.host_write)("x", x)
        else:
            queues.launch(queue, "op", lambda: None, **{f"{argument}s": (x,)})
        if log.faults:
            return number
    return None


@settings(deadline=None, max_examples=300)
@given(st.lists(COMMANDS, max_size=14))
def test_a_fault_is_reported_exactly_where_no_order_exists(program):
    assert first_fault(program) == first_race(program)


def test_both_verdicts_occur_among_all_short_programs():
    """Exhaustive over three commands on two queues: 1000 programs."""
    commands = [("launch", q, a) for q in "ab" for a in ("read", "write")]
    commands += [("host", HOST, "read"), ("host", HOST, "write")]
    commands += [("wait", q, w) for q, w in (("a", "b"), ("b", "a"), (HOST, "a"), (HOST, "b"))]
    verdicts = [(first_fault(p), first_race(p)) for p in itertools.product(commands, repeat=3)]
    assert all(fault == race for fault, race in verdicts)
    found = {race for _, race in verdicts}
    assert found == {None, 1, 2}


def test_pending_work_runs_when_waited_for_and_in_order():
    queues, ran = Queues(FaultLog()), []
    queues.launch("a", "1", lambda: ran.append(1))
    event = queues.record("a")
    queues.launch("a", "2", lambda: ran.append(2))
    queues.wait("b", event)
    queues.launch("b", "3", lambda: ran.append(3))
    assert ran == []
    queues.synchronize("b")
    assert ran == [1, 3]
    queues.synchronize_all()
    assert ran == [1, 3, 2]


def test_an_operation_that_runs_at_once_runs_after_its_queue():
    queues, ran = Queues(FaultLog()), []
    queues.launch("a", "1", lambda: ran.append(1))
    assert queues.run_now("a", "2", lambda: [*ran, 2]) == [1, 2]


def test_a_copy_counts_as_a_write_when_it_is_launched():
    queues, x = Queues(FaultLog()), torch.zeros(2)
    version = x._version
    queues.copy("main", x, torch.ones(2))
    launched = x._version
    queues.synchronize("main")
    assert launched == version + 1 == x._version
    assert x.tolist() == [1.0, 1.0]


def test_staging_needs_a_buffer():
    with pytest.raises(ValueError, match="depth is 0"):
        Staging(torch.zeros(2), Queues(FaultLog()), depth=0)


REQUESTS = st.lists(st.tuples(st.integers(1, 3), st.integers(0, 2 * TOPK)), max_size=4).filter(
    lambda requests: sum(q for q, _ in requests) <= 8
)


@settings(deadline=None, max_examples=15)
@given(st.lists(REQUESTS, min_size=1, max_size=6), st.sampled_from((1, 2)))
def test_any_sequence_of_steps_replays_like_eager(sequence, depth):
    """Ragged MTP steps and idle ones, through one world with a cached plan and tail clears."""
    world = make(staging_depth=depth)
    for turn, requests in enumerate(sequence):
        queries = tuple(q for q, _ in requests)
        rows = world.layer.runner.padded_rows(sum(queries))
        step = StepBatch(query_lens=queries, seq_lens=tuple(q + c for q, c in requests), num_tokens=rows)
        given_, before = inputs(step.num_query_tokens, turn), world.layer.buffers.o_NHC.clone()
        world.step(step, given_)
        assert torch.equal(world.layer.buffers.o_NHC[:rows], eager(step, given_, world.kv, before)[1])
