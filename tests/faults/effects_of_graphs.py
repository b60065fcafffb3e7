"""Effects of faults in graph replay, each at the one part that it alters."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from effect_table import effect

from dsv32_fast.batch import StepBatch
from dsv32_fast.graph import attention as graphed
from dsv32_fast.graph.faults import FaultLog
from dsv32_fast.graph.model import ModelGraphRunner
from dsv32_fast.graph.queues import QueuedPlanner, Queues, Staging
from dsv32_fast.graph.runner import StepCall
from dsv32_fast.kernels.emulated.device import MI355X, emulated_device
from dsv32_fast.metadata import BuilderConfig, MetadataBuilder
from dsv32_fuzz.targets.intree import InTreeTarget


def synchronisations(target: InTreeTarget) -> int:
    queues = Queues(FaultLog(strict=False))
    planner = QueuedPlanner(SimpleNamespace(get_mla_metadata_v1=lambda *_: None), queues, synchronise=True)
    planner.get_mla_metadata_v1(*[torch.zeros(2)] * 12)
    return planner.synchronisations


effect("graph_unordered_plan", synchronisations, lambda c, f: (c, f) == (1, 0))


def staged(target: InTreeTarget) -> list[float]:
    """What a device tensor holds when the first of two copies runs after the host prepared the second."""
    log = FaultLog(strict=False)
    queues = Queues(log)
    device = torch.zeros(2)
    staging = Staging(device, queues)
    staging.put("x", torch.tensor([1.0, 1.0]))
    first = queues.record("main")
    staging.put("x", torch.tensor([2.0, 2.0]))
    queues.wait("host", first)
    return device.tolist()


effect("graph_staging_reused", staged, lambda c, f: (c, f) == ([1.0, 1.0], [2.0, 2.0]))


def view_rows(target: InTreeTarget) -> int:
    return len(graphed.allocate(8, 16, 24, 16, 4).rows(4).o_NHC)


effect("graph_short_view", view_rows, lambda c, f: (c, f) == (4, 3))


def layer(target: InTreeTarget) -> graphed.GraphedAttention:
    config = BuilderConfig(num_heads=16, topk=64, max_num_batched_tokens=16, compute_units=8)
    with emulated_device(MI355X):
        builder = MetadataBuilder(config=config, options=target.options, kernels=target.kernels)
    buffers = graphed.allocate(8, 16, 24, 16, 64)
    runner = ModelGraphRunner((2, 4, 8))
    return graphed.GraphedAttention(
        builder=builder, kernels=target.kernels, runner=runner, buffers=buffers, kv=torch.zeros(4), sm_scale=1.0
    )


def row_pointers(target: InTreeTarget) -> list[int]:
    """After a full step of four rows, two live rows of four."""
    one = layer(target)
    one.build(StepBatch(query_lens=(1,) * 4, seq_lens=(10,) * 4))
    return one.build(StepBatch(query_lens=(1, 1), seq_lens=(3, 3), num_tokens=4)).paged_kv_indptr_T1.tolist()


effect("graph_unpadded_metadata", row_pointers, lambda c, f: (c, f) == ([0, 3, 6, 6, 6], [0, 3, 6, 30, 40]))


def complaints_about_a_scalar(target: InTreeTarget) -> tuple[str, ...]:
    log = FaultLog(strict=False)
    runner = ModelGraphRunner((2,), log)
    out = torch.zeros(2)
    body = lambda: out.add_(1.0)  # noqa: E731
    runner.capture(2, body, StepCall(rows=2, tensors={"out": out}, scalars={"chunks": 1}))
    runner.replay(2, StepCall(rows=2, tensors={"out": out}, scalars={"chunks": 2}))
    return log.kinds


effect("graph_baked_scalar", complaints_about_a_scalar, lambda c, f: (c, f) == (("baked scalar",), ()))


def second_input(target: InTreeTarget) -> int:
    one = layer(target)
    for number in (1, 2):
        one.put("slots", torch.full((2, 64), number, dtype=torch.int32))
    return int(one.buffers.slots_NK[0, 0])


effect("graph_input_not_copied", second_input, lambda c, f: (c, f) == (2, 1))


def packed(target: InTreeTarget) -> list[int]:
    paged = torch.zeros(8, dtype=torch.int32)
    slots = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]], dtype=torch.int32)
    graphed.gather_indices(slots, torch.tensor([0, 2, 5], dtype=torch.int32), paged)
    return paged.tolist()


effect("graph_late_gather", packed, lambda c, f: (c[:6], f[:6]) == ([1, 2, 5, 6, 7, 0], [0, 1, 2, 5, 6, 7]))


def waits(target: InTreeTarget) -> int:
    """Waits of the host for two builds, of which the second is a hit."""
    calls: list[str] = []

    def run_now(queue: str, what: str, run: Any, writes: Any) -> Any:
        return run()

    one = layer(target)
    one.queues = SimpleNamespace(synchronize=calls.append, run_now=run_now)  # type: ignore[assignment]
    for _ in range(2):
        one.build(StepBatch(query_lens=(1,), seq_lens=(10,)))
    return len(calls)


effect("latency_waits_on_hits", waits, lambda c, f: (c, f) == (0, 2))
