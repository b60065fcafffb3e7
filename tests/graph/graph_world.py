"""A small world for graphs: 8 compute units, 16 heads, topk 64, and steps drawn by seed."""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec
import torch

from dsv32_fast.batch import StepBatch
from dsv32_fast.graph.attention import GraphedAttention, StepBuffers, allocate, attend
from dsv32_fast.graph.faults import FaultLog
from dsv32_fast.graph.model import ModelGraphRunner
from dsv32_fast.graph.queues import QueuedPlanner, Queues
from dsv32_fast.kernels.emulated.device import MI355X
from dsv32_fast.kernels.mounted import EMULATION
from dsv32_fast.metadata import BuilderConfig, MetadataBuilder
from dsv32_fast.options import PRESETS, Options

SMALL_GPU = replace(MI355X, compute_units=8)
HEADS, LATENT, DIM, TOPK, SLOTS = 16, 16, 24, 64, 400
SIZES = (1, 2, 4, 8)
SCALE = 0.3
CONFIG = BuilderConfig(num_heads=HEADS, topk=TOPK, max_num_batched_tokens=16, compute_units=8)


@dataclass(kw_only=True)
class World:
    """Everything of one graphed layer."""

    layer: GraphedAttention
    log: FaultLog
    queues: Queues
    kv: torch.Tensor

    def step(self, step: StepBatch, inputs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """One step, waited for."""
        out = self.layer.step(step, *inputs)
        self.queues.synchronize("main")
        return out


def make_kv() -> torch.Tensor:
    generator = torch.Generator().manual_seed(11)
    return torch.randn(SLOTS, 1, 1, DIM, generator=generator).bfloat16()


def make(
    options: Options | None = None,
    *,
    strict: bool = True,
    synchronise: bool = True,
    staging_depth: int = 2,
    staging_waits: bool = True,
    capture: bool = True,
) -> World:
    log = FaultLog(strict=strict)
    queues = Queues(log)
    kernels = QueuedPlanner(EMULATION, queues, synchronise=synchronise)
    kv = make_kv()
    layer = GraphedAttention(
        builder=MetadataBuilder(config=CONFIG, options=options or PRESETS["pr47766"], kernels=kernels),
        kernels=kernels,
        runner=ModelGraphRunner(SIZES, log, queues=queues),
        buffers=allocate(max(SIZES), HEADS, DIM, LATENT, TOPK),
        kv=kv,
        sm_scale=SCALE,
        queues=queues,
        staging_depth=staging_depth,
        staging_waits=staging_waits,
    )
    if capture:
        layer.capture()
        queues.synchronize("main")
    return World(layer=layer, log=log, queues=queues, kv=kv)


def decode(*seqs: int, rows: int = 0) -> StepBatch:
    return StepBatch(query_lens=(1,) * len(seqs), seq_lens=seqs, num_tokens=rows)


def inputs(rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Distinct queries and distinct slots within each row."""
    generator = torch.Generator().manual_seed(seed)
    q_THD = torch.randn(rows, HEADS, DIM, generator=generator).bfloat16()
    slots = [torch.randperm(SLOTS, generator=generator)[:TOPK] for _ in range(rows)]
    slots_TK = torch.stack(slots) if slots else torch.empty(0, TOPK)
    return q_THD, slots_TK.int()


def eager(
    step: StepBatch,
    given: tuple[torch.Tensor, torch.Tensor],
    kv: torch.Tensor,
    before: torch.Tensor,
    options: Options | None = None,
) -> tuple[MetadataBuilder, torch.Tensor]:
    """The same padded step without graph, cache or tail clears, on memory that nobody used before."""
    options = msgspec.structs.replace(options or PRESETS["pr47766"], key="none", clear="full")
    builder = MetadataBuilder(config=CONFIG, options=options, kernels=EMULATION)
    metadata = builder.build(step)
    size = step.num_tokens
    buffers = StepBuffers(*allocate(size, HEADS, DIM, LATENT, TOPK)[:2], before[:size].clone())
    buffers.q_NHD[: given[0].shape[0]], buffers.slots_NK[: given[1].shape[0]] = given
    attend(EMULATION, buffers, metadata, kv, SCALE)
    return builder, buffers.o_NHC
