"""Checks of capture and replay: a padded replay is the eager step, whatever was captured, replayed or freed before.

The subject is one attention layer under `dsv32_fast.graph`: the target's builder and kernels, the staging of inputs,
the gather list and the runner. Its truth is the same padded step run eagerly by the always-rebuild builder on the
faultless kernels, on memory that nobody used before; the gather list also follows from the drawn slots alone. Between
steps free memory is filled with garbage and unused cache slots hold NaN, so a read of either shows.

Legend: T live rows, S rows of the graph, H heads, D latent + RoPE, C latent, K topk.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch
from hypothesis import strategies as st
from torch import Tensor

import dsv32_fast.attention as path_attention
from dsv32_fast.batch import StepBatch
from dsv32_fast.graph import attention, queues
from dsv32_fast.graph.arena import Arena
from dsv32_fast.graph.faults import FaultLog
from dsv32_fast.graph.model import ModelGraphRunner
from dsv32_fast.graph.runner import GraphRunner
from dsv32_fast.kernels.emulated.device import MI355X, emulated_device
from dsv32_fast.kernels.mounted import EMULATION
from dsv32_fast.metadata import BuilderConfig, MetadataBuilder
from dsv32_fast.options import Options
from dsv32_fast.plan import consumer_view
from dsv32_fuzz.checks.own_input import InputCheck
from dsv32_fuzz.strategies import integers, sampled_from
from dsv32_fuzz.targets import Target
from dsv32_fuzz.verdict import Verdict

HEADS, LATENT, DIM, TOPK, SLOTS = 16, 16, 24, 16, 96
SIZES = (2, 4, 8)
SCALE, OTHER_SCALE = 0.3, 0.7
GPU = replace(MI355X, compute_units=4)
CONFIG = BuilderConfig(num_heads=HEADS, topk=TOPK, max_num_batched_tokens=max(SIZES), compute_units=4)
HUGE = 1 << 30


class Replays(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Decode steps, each as the sequence lengths of its requests, `q` rows each; a seed for queries and slots."""

    steps: tuple[tuple[int, ...], ...]
    q: int
    seed: int

    def batches(self, runner: GraphRunner) -> list[StepBatch]:
        """The steps in the padded rows of their graphs."""
        return [
            StepBatch(
                query_lens=(self.q,) * len(seqs), seq_lens=seqs, num_tokens=runner.padded_rows(self.q * len(seqs))
            )
            for seqs in self.steps
        ]


@st.composite
def replays(draw: st.DrawFn) -> Replays:
    """Batches that go on, with or without some requests, and batches of other size; lengths mostly around topk."""
    q = draw(sampled_from((1, 2, 2)))
    lens = st.one_of(integers(TOPK - 2, TOPK + 2), integers(1, TOPK + 3), sampled_from((3 * TOPK, 4 * TOPK)))
    steps: list[tuple[int, ...]] = []
    for size in draw(st.lists(sampled_from((1, 0, 3, 0, 4, 2)), min_size=2, max_size=4)):
        on = [s + q for s in steps[-1]] if steps else []
        kept = on if not size else on[: draw(integers(0, size))]
        steps.append((*kept, *(max(q, draw(lens)) for _ in range((size or len(on) or 1) - len(kept)))))
    shrunk = steps[-1][1:] or (*steps[-1], TOPK)  # at least one batch of another size
    return Replays(steps=(*steps, shrunk), q=q, seed=draw(integers(0, 1 << 16)))


def inputs(drawn: Replays, turn: int, rows: int) -> tuple[Tensor, Tensor]:
    """Queries [T, H, D] bf16, and distinct slots [T, K] int32 of the lower half of the cache for each row."""
    generator = torch.Generator().manual_seed(drawn.seed * 64 + turn)
    q_THD = torch.randn(rows, HEADS, DIM, generator=generator).bfloat16()
    slots_TK = torch.stack([torch.randperm(SLOTS // 2, generator=generator)[:TOPK] for _ in range(rows)])
    return q_THD, slots_TK.int()


def cache(seed: int) -> Tensor:
    """Latents bf16 [slots, 1, 1, D]; nobody selects the upper half, which holds NaN."""
    kv = torch.randn(SLOTS, 1, 1, DIM, generator=torch.Generator().manual_seed(seed)).bfloat16()
    kv[SLOTS // 2 :] = torch.nan
    return kv


@dataclass(kw_only=True)
class Layer:
    """The captured layer, what its runner has complained of, and where its work waits."""

    graphed: attention.GraphedAttention
    log: FaultLog
    queues: queues.Queues
    arena: Arena
    kv: Tensor

    def churn(self, turn: int) -> None:
        """Another owner takes all free memory of the arena, fills it with garbage and gives it back."""
        taken: list[Tensor] = []
        for size in (2048, 256):
            while (block := self._block(size)) is not None:
                taken.append(block.fill_(0x7F - turn % 2))
        for tensor in taken:
            self.arena.free(tensor)

    def _block(self, size: int) -> Tensor | None:
        """So many bytes of the arena, None where there is no gap for them."""
        try:
            return self.arena.allocate((size,), torch.uint8)
        except MemoryError:
            return None


def in_arena(arena: Arena, tensor: Tensor) -> Tensor:
    """A copy of `tensor` in memory that somebody else may get once it is freed."""
    return arena.allocate(tensor.shape, tensor.dtype).copy_(tensor)


def captured(target: Target, seed: int, scales: tuple[float, ...] = (SCALE,)) -> Layer:
    """A layer of the target's builder and kernels, captured for every size with each softmax scale."""
    log = FaultLog(strict=False)
    work = queues.Queues(log)
    arena = Arena(1 << 15)
    kernels = queues.QueuedPlanner(target.kernels, work, synchronise=True)
    kv = in_arena(arena, cache(seed))
    blank = attention.allocate(max(SIZES), HEADS, DIM, LATENT, TOPK)
    kind: type[MetadataBuilder] = getattr(target, "builder", MetadataBuilder)
    graphed = attention.GraphedAttention(
        builder=kind(config=CONFIG, options=_options(target), kernels=kernels),
        kernels=kernels,
        runner=ModelGraphRunner(SIZES, log, arena=arena, queues=work),
        buffers=attention.StepBuffers(*(in_arena(arena, buffer) for buffer in blank)),
        kv=kv,
        sm_scale=SCALE,
        queues=work,
    )
    for scale in scales:
        graphed.sm_scale = scale
        graphed.capture()
    work.synchronize("main")
    return Layer(graphed=graphed, log=log, queues=work, arena=arena, kv=kv)


def _options(target: Target) -> Options:
    assert target.options is not None
    return target.options


def eager(step: StepBatch, given: tuple[Tensor, Tensor], kv: Tensor, options: Options, scale: float = SCALE) -> Tensor:
    """The padded step without graph, cache or tail clears; rows [T, H, C] of its result.

    The definition of the gather is written out here: row t takes its first L_t slots.
    """
    whole = msgspec.structs.replace(options, key="none", clear="full")
    metadata = MetadataBuilder(config=CONFIG, options=whole, kernels=EMULATION).build(step)
    live, (q_THD, slots_TK) = step.num_query_tokens, given
    buffers = attention.allocate(step.num_tokens, HEADS, DIM, LATENT, TOPK)
    buffers.q_NHD[:live] = q_THD
    lens = metadata.paged_kv_indptr_T1.diff().tolist()
    packed = torch.cat([slots[:length] for slots, length in zip(slots_TK, lens, strict=False)])
    metadata.paged_kv_indices[: len(packed)] = packed
    _decode(EMULATION, buffers.q_NHD, kv, buffers.o_NHC, metadata, scale)
    return buffers.o_NHC[:live]


def _decode(kernels: Any, q_NHD: Tensor, kv: Tensor, o_NHC: Tensor, metadata: Any, scale: float = SCALE) -> None:
    plan = metadata.plan
    kernels.mla_decode_fwd(
        q_NHD,
        kv,
        o_NHC,
        metadata.qo_indptr_T1,
        metadata.paged_kv_indptr_T1,
        metadata.paged_kv_indices,
        metadata.paged_kv_last_page_len_T,
        1,
        sm_scale=scale,
        work_meta_data=plan.work_metadata_ptrs,
        work_indptr=plan.work_indptr,
        work_info_set=plan.work_info_set,
        reduce_indptr=plan.reduce_indptr,
        reduce_final_map=plan.reduce_final_map,
        reduce_partial_map=plan.reduce_partial_map,
    )


def first_wrong_row(found: Tensor, expected: Tensor) -> str:
    """The first row and head whose bits differ, empty if none does."""
    if torch.equal(found, expected):
        return ""
    differs = (found != expected) | found.isnan()
    row, head, column = differs.nonzero()[0].tolist()
    values = f"{found[row, head, column]:.6g} against {expected[row, head, column]:.6g}"
    return f"row {row}, head {head}, column {column} is {values} of the eager step"


class GraphCheck(InputCheck[Replays]):
    """A check on the CPU model of graphs."""

    family = "graph"
    input_type = Replays

    def inapplicable(self, target: Target) -> str:
        """The model records what torch does on the CPU."""
        if target.evidence != "emulated" or target.options is None:
            return "graphs are modelled on the CPU; on a GPU dsv32_fast.graph.cuda captures real ones"
        return super().inapplicable(target)

    def inputs(self) -> st.SearchStrategy[Replays]:
        """A few steps."""
        return replays()

    def _judged(self, drawn: Replays, violation: str, layer: Layer, **measured: int) -> Verdict:
        fault = f"the runner reports {layer.log.faults[0]}" if layer.log.faults else ""
        sizes = {len(seqs) for seqs in drawn.steps}
        untested = "" if len(sizes) > 1 else "the batch never changed its size"
        counts: dict[str, float | int | str] = {"replays": len(drawn.steps), **measured}
        return self.verdict(violation or fault, counts, untested=untested)


class GraphReplay(GraphCheck):
    """Each replay, waited for, against its eager step; free memory is overwritten in between.

    Every size is captured with two softmax scales, which steps use in turn: a scalar is baked into a graph.
    """

    name = "graph_replay"
    meaning = (
        "a padded replay gives the bits of the eager step, at captured addresses, over growing and shrinking steps"
    )

    def run(self, drawn: Replays, target: Target) -> Verdict:
        """Capture every size with both scales, replay every step."""
        scales = SCALE, OTHER_SCALE
        with emulated_device(GPU):
            layer = captured(target, drawn.seed, scales)
            violation, rows = "", 0
            for turn, step in enumerate(drawn.batches(layer.graphed.runner)):
                layer.churn(turn)
                scale = layer.graphed.sm_scale = scales[turn % 2]
                given = inputs(drawn, turn, step.num_query_tokens)
                out = layer.graphed.step(step, *given)
                layer.queues.synchronize("main")
                wrong = first_wrong_row(out, eager(step, given, layer.kv, _options(target), scale))
                rows += len(out)
                violation = violation or (wrong and f"step {turn}: {wrong}")
        return self._judged(drawn, violation, layer, rows=rows)


class LazyCopies(GraphCheck):
    """All steps are launched before any has run: a copy reads its source when it is drained, a replay its inputs."""

    name = "graph_lazy_copies"
    meaning = (
        "steps launched ahead of the device give the bits of their eager steps, every access ordered, without a wait"
    )

    def run(self, drawn: Replays, target: Target) -> Verdict:
        """Launch every step, each followed by a copy of its result on the same queue; then wait, once."""
        with emulated_device(GPU):
            layer = captured(target, drawn.seed)
            batches = drawn.batches(layer.graphed.runner)
            given = [inputs(drawn, turn, step.num_query_tokens) for turn, step in enumerate(batches)]
            kept: list[Tensor] = []
            waits = _count_waits(layer.queues)
            for step, rows in zip(batches, given, strict=True):
                _keep(layer, layer.graphed.step(step, *rows), kept)
            violation = f"the host waited {len(waits)} times for the queue of the steps" if waits else ""
            layer.queues.synchronize_all()
            for turn, (step, rows, out) in enumerate(zip(batches, given, kept, strict=True)):
                wrong = first_wrong_row(out, eager(step, rows, layer.kv, _options(target)))
                violation = violation or (wrong and f"step {turn}, launched ahead: {wrong}")
        return self._judged(drawn, violation, layer, rows=sum(len(out) for out in kept))


def _count_waits(work: queues.Queues) -> list[str]:
    """Grows by one whenever the host waits for the queue `main`."""
    waits: list[str] = []
    wait = work.synchronize

    def counted(queue: str) -> None:
        if queue == "main":
            waits.append(queue)
        wait(queue)

    work.synchronize = counted  # type: ignore[method-assign]
    return waits


def _keep(layer: Layer, out: Tensor, kept: list[Tensor]) -> None:
    layer.queues.launch("main", "result", lambda: kept.append(out.clone()), reads=(out,))


class PoisonedPlan(GraphCheck):
    """The eager step with poison in all that it must not read: NaN slots, huge ids, unread plan entries."""

    name = "attention_poison"
    meaning = "what lies past a row's keys, a plan's works or a batch's rows has no influence on any result"

    def run(self, drawn: Replays, target: Target) -> Verdict:
        """Each step twice in one engine of the target: as it is, and with everything unread poisoned."""
        with emulated_device(GPU):
            kind: type[MetadataBuilder] = getattr(target, "builder", MetadataBuilder)
            builder = kind(config=CONFIG, options=_options(target), kernels=target.kernels)  # type: ignore[arg-type]
            kv, runner, violation, words = cache(drawn.seed), ModelGraphRunner(SIZES), "", 0
            for turn, step in enumerate(drawn.batches(runner)):
                given = inputs(drawn, turn, step.num_query_tokens)
                buffers = attention.allocate(step.num_tokens, HEADS, DIM, LATENT, TOPK)
                buffers.q_NHD[: len(given[0])], buffers.slots_NK[: len(given[1])] = given
                metadata = builder.build(step)
                path_attention.gather_indices(buffers.slots_NK, metadata.paged_kv_indptr_T1, metadata.paged_kv_indices)
                words += poison(metadata, buffers, step.num_query_tokens)
                _decode(target.kernels, buffers.q_NHD, kv, buffers.o_NHC, metadata)
                wrong = first_wrong_row(buffers.o_NHC[: len(given[0])], eager(step, given, kv, _options(target)))
                violation = violation or (wrong and f"step {turn}, with poison in what is not read: {wrong}")
        measured: dict[str, float | int | str] = {"replays": len(drawn.steps), "poisoned_words": words}
        return self.verdict(violation, measured, untested="" if words else "nothing was left to poison")


def poison(metadata: Any, buffers: attention.StepBuffers, live: int) -> int:
    """Overwrite what a consumer must not read; returns the number of words."""
    plan, view = metadata.plan, consumer_view(metadata.plan)
    unread = [
        metadata.paged_kv_indices[int(metadata.paged_kv_indptr_T1[-1]) :],
        plan.work_info_set[len(view.work_info_set) :],
        plan.reduce_partial_map[len(view.reduce_partial_map) :],
    ]
    for part in unread:
        part.fill_(HUGE)
    buffers.q_NHD[live:] = torch.nan
    return sum(part.numel() for part in unread)


CHECKS: tuple[type[InputCheck[Any]], ...] = (GraphReplay, LazyCopies, PoisonedPlan)
