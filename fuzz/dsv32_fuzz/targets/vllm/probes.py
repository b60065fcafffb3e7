"""Worker side: single questions to vLLM's kernels and wrappers, each answered by driving them.

A probe returns a status and one line. PASSED: as the contract says. FAILED: something else, which the line tells.
SKIPPED: this release has no such thing, or it cannot be driven, with the reason. The converters get tracers: every
physical block has a number that no other has, so an output tells which request, block and offset it was read from, and
everything that must not be written holds a mark.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch

from dsv32_fast.batch import StepBatch
from dsv32_fuzz.case import Dims
from dsv32_fuzz.targets.vllm.engine import Setting
from dsv32_fuzz.targets.vllm.imports import Loaded
from dsv32_fuzz.targets.vllm.kernels import NAME as ROW_LENGTHS
from dsv32_fuzz.targets.vllm.kernels import SampledRowLengths, row_lengths
from dsv32_fuzz.targets.vllm.sessions import make_builder, run_build

MARK = -7777
TOPK = 256  # the converter wants a multiple of 128
CONVERTER, GATHER = "triton_convert_req_index_to_global_index", "fetch_id_to_ragged_triton"


@dataclass
class Answer:
    """What one probe found."""

    name: str
    status: str
    summary: str


Probe = Callable[[Loaded], Answer]


def run(loaded: Loaded, message: dict[str, Any]) -> dict[str, Any]:
    """All probes, or those named in the message; an exception of the target is a FAILED answer."""
    from dsv32_fuzz.targets.vllm import contract, indexer, model

    del message
    probes = PROBES | contract.PROBES | model.PROBES | indexer.PROBES
    answers = [_ask(name, probe, loaded) for name, probe in probes.items()]
    return {"answers": [vars(answer) for answer in answers]}


def _ask(name: str, probe: Probe, loaded: Loaded) -> Answer:
    try:
        answer = probe(loaded)
    except (Exception, SystemExit) as error:
        return Answer(name, "FAILED", f"raised {type(error).__name__}: {' '.join(str(error).split())}")
    answer.name = name
    return answer


def passed(summary: str) -> Answer:
    """As the contract says."""
    return Answer("", "PASSED", summary)


def failed(summary: str) -> Answer:
    """Otherwise than the contract says."""
    return Answer("", "FAILED", summary)


def skipped(reason: str) -> Answer:
    """Not there, or not to be driven."""
    return Answer("", "SKIPPED", reason)


@dataclass
class _Trace:
    """Rows of all lengths, over two requests and a padding row, whose blocks all have numbers of their own."""

    block_size: int
    req_T: torch.Tensor
    table_RB: torch.Tensor
    tokens_TK: torch.Tensor
    indptr_T1: torch.Tensor

    @classmethod
    def make(cls, block_size: int) -> _Trace:
        lengths = torch.tensor([0, 1, 127, 128, 129, 255, TOPK, 0], dtype=torch.int32)
        req_T = torch.tensor([0, 1, 0, 1, 1, 0, 1, 0], dtype=torch.int32)
        blocks = -(-600 // block_size)
        generator = torch.Generator().manual_seed(block_size)
        table_RB = (torch.randperm(2 * blocks, generator=generator) + 3).to(torch.int32).reshape(2, blocks)
        limit = blocks * block_size
        tokens_TK = torch.stack([torch.randperm(limit, generator=generator)[:TOPK] for _ in lengths]).to(torch.int32)
        tokens_TK[1, 0] = limit - 1  # the last slot of the last block
        for row, length in enumerate(lengths.tolist()):
            tokens_TK[row, length:] = 2**30  # past the length: whoever reads it shows
        indptr_T1 = torch.zeros(len(lengths) + 1, dtype=torch.int32)
        torch.cumsum(lengths, 0, out=indptr_T1[1:])
        return cls(block_size, req_T, table_RB, tokens_TK, indptr_T1)

    def expected(self) -> torch.Tensor:
        """Slots in ragged order, then marks."""
        out = torch.full((len(self.req_T) * TOPK,), MARK, dtype=torch.int32)
        for row in range(len(self.req_T)):
            start, end = (int(v) for v in self.indptr_T1[row : row + 2])
            tokens = self.tokens_TK[row, : end - start].long()
            blocks = self.table_RB[int(self.req_T[row])][tokens // self.block_size]
            out[start:end] = blocks * self.block_size + tokens.int() % self.block_size
        return out

    def converted(self, loaded: Loaded) -> torch.Tensor:
        """What vLLM's converter writes."""
        out = torch.full((len(self.req_T) * TOPK,), MARK, dtype=torch.int32)
        convert = vars(loaded.backend)[CONVERTER]
        extra = {"BLOCK_STRIDE_ROWS": self.block_size}
        extra = {name: value for name, value in extra.items() if name in inspect.signature(convert).parameters}
        convert(
            self.req_T,
            self.table_RB,
            self.tokens_TK,
            self.indptr_T1,
            out,
            BLOCK_SIZE=self.block_size,
            NUM_TOPK_TOKENS=TOPK,
            **extra,
        )
        return out


def converter(loaded: Loaded) -> Answer:
    """Logical token indices become physical slots of the right request, packed by row, and nothing else is written."""
    if CONVERTER not in vars(loaded.backend):
        return skipped(f"the release has no {CONVERTER}")
    compared = 0
    for block_size in (1, 64):
        trace = _Trace.make(block_size)
        found, expected = trace.converted(loaded), trace.expected()
        compared += len(found)
        if not torch.equal(found, expected):
            at = int((found != expected).nonzero()[0])
            return failed(f"block size {block_size}, entry {at}: slot {int(found[at])}, expected {int(expected[at])}")
    return passed(f"{compared} entries, block sizes 1 and 64, rows of 0 to {TOPK} keys")


def converter_invalid(loaded: Loaded) -> Answer:
    """A token index of -1 inside the live range must not become a slot that holds somebody's keys."""
    if CONVERTER not in vars(loaded.backend):
        return skipped(f"the release has no {CONVERTER}")
    trace = _Trace.make(1)
    trace.tokens_TK[6, 5] = -1
    slot = int(trace.converted(loaded)[int(trace.indptr_T1[6]) + 5])
    if slot >= 0:
        return failed(f"-1 becomes slot {slot}: the kernel attends whatever lies there, instead of nothing")
    return passed(f"-1 stays {slot}")


def ragged_gather(loaded: Loaded) -> Answer:
    """Rows of a padded table are packed by their lengths, and nothing else is written."""
    gather = vars(loaded.backend).get(GATHER)
    if gather is None:
        return skipped(f"the release has no {GATHER}")
    trace = _Trace.make(1)
    rows = len(trace.req_T)
    table_TK = (torch.arange(rows * TOPK, dtype=torch.int32) + 11).reshape(rows, TOPK)
    found = torch.full((rows * TOPK,), MARK, dtype=torch.int32)
    gather(table_TK, trace.indptr_T1, found, TOPK)
    expected = torch.full_like(found, MARK)
    for row in range(rows):
        start, end = (int(v) for v in trace.indptr_T1[row : row + 2])
        expected[start:end] = table_TK[row, : end - start]
    if not torch.equal(found, expected):
        at = int((found != expected).nonzero()[0])
        return failed(f"entry {at}: {int(found[at])}, expected {int(expected[at])}")
    return passed(f"{len(found)} entries, rows of 0 to {TOPK} keys")


def _batches() -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
    topk = 128
    for q in (1, 2, 3, 4, 6, 8, 63, 64, 65, 129):
        edges = [max(q, topk + d) for d in (-1, 0, 1, 2, 3, q, q + 1)]
        yield torch.tensor([q] * len(edges)), torch.tensor(edges), topk
    yield torch.tensor([3, 1, 0, 65, 0]), torch.tensor([130, 128, 0, 400, 0]), topk
    yield torch.tensor([5]), torch.tensor([5]), topk


def row_length_kernel(loaded: Loaded) -> Answer:
    """The kernel itself, never the stand-in, writes min(seq - q + j + 1, topk), also where a block of rows ends."""
    kernel = vars(loaded.backend).get(ROW_LENGTHS)
    kernel = kernel.kernel if isinstance(kernel, SampledRowLengths) else kernel
    if kernel is None:
        return skipped(f"the release has no {ROW_LENGTHS}; its rows are judged by the check planner_input")
    rows = 0
    for query_B, seqs_B, topk in _batches():
        starts_B1 = torch.zeros(len(query_B) + 1, dtype=torch.int32)
        torch.cumsum(query_B, 0, out=starts_B1[1:])
        found, expected = (torch.zeros(int(query_B.sum()) + 3, dtype=torch.int32) for _ in range(2))
        blocks = -(-int(query_B.max()) // 64)
        kernel[(len(query_B), blocks)](seqs_B.int(), starts_B1, found, topk, 64)
        row_lengths(seqs_B.int(), starts_B1, expected, topk)
        rows += len(found)
        if not torch.equal(found, expected):
            at = int((found != expected).nonzero()[0])
            return failed(
                f"q {query_B.tolist()} seq {seqs_B.tolist()}: row {at} is {int(found[at])}, not {int(expected[at])}"
            )
    return passed(f"{rows} rows, lengths on both sides of topk, queries on both sides of a block of 64")


def shared_indices(loaded: Loaded) -> Answer:
    """Every pass of a layer attends the indices that the indexer wrote last, also a layer that has no indexer.

    Drives `forward_mqa` up to the attention kernel, twice on the metadata of one step, with other indices in between.
    """
    layer, call = _decode_step(loaded)
    layer._forward_mla = lambda *_args, **_kwargs: (None, None)
    metadata, seen = call[2], []
    for first in (0, 300):
        layer.topk_indices_buffer.copy_(torch.arange(first, first + TOPK, dtype=torch.int32))
        layer.forward_mqa(*call)
        seen.append(int(metadata.paged_kv_indices[0]))
    if seen == [0, 300]:
        return passed("converted in each of two passes over one step's metadata")
    if seen[0] != 0:
        return failed(f"the first pass attends slot {seen[0]}, expected 0")
    return failed(
        f"a layer without an indexer still attends slot {seen[1]} after the indices moved to 300: one pass a step"
    )


def lse(loaded: Loaded) -> Answer:
    """The layer asks AITER for no LSE: some of its kernels do not write that of a row that is not split.

    Drives `forward_mqa` down to vLLM's wrappers of the decode kernel. DeepSeek-V3.2 has no sinks, which need one.
    """
    ops = getattr(loaded.backend, "rocm_aiter_ops", None)
    kernels = [name for name in ("mla_decode_fwd", "mla_decode_fwd_lse") if hasattr(ops, name)]
    if not kernels:
        return skipped("the backend has no wrapper of mla_decode_fwd under the known name")
    layer, call = _decode_step(loaded)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(sys.modules, {"vllm.platforms.rocm": _mi355x()}))
        wrappers = {name: stack.enter_context(mock.patch.object(ops, name)) for name in kernels}
        answered = layer.forward_mqa(*call)
    called = {name: wrapper.call_args.kwargs for name, wrapper in wrappers.items() if wrapper.called}
    if not called:
        return skipped("the layer calls neither wrapper of mla_decode_fwd in a decode step")
    asked = "mla_decode_fwd_lse" in called or any(kwargs.get("return_lse") for kwargs in called.values())
    if asked or answered[1] is not None:
        return failed("an LSE is asked for, which some of AITER's kernels do not write for a row that is not split")
    return passed("none is asked for in decode without sinks, and none is returned")


def _mi355x() -> ModuleType:
    """In place of vLLM's module of that platform, which asks for a ROCm torch when it is imported."""
    module = ModuleType("vllm.platforms.rocm")
    for name, answer in {"on_gfx942": False, "on_gfx950": True, "on_mi3xx": True}.items():
        setattr(module, name, lambda told=answer: told)
    return module


def _decode_step(loaded: Loaded) -> tuple[Any, tuple[Any, ...]]:
    """A layer, and what its `forward_mqa` takes for a request of 200 tokens: queries, cache, metadata, scales."""
    dims = Dims(topk=TOPK, max_num_batched_tokens=64)
    builder = make_builder(loaded, dims, 0, Setting())
    metadata, _ = run_build(loaded, builder, dims, StepBatch(query_lens=(1,), seq_lens=(200,)))
    metadata.block_table = torch.arange(1000, dtype=torch.int32).reshape(1, -1)
    layer = _layer(loaded, torch.arange(TOPK, dtype=torch.int32).reshape(1, -1).repeat(64, 1))
    q, cache = torch.zeros(1, 16, 576, dtype=torch.bfloat16), torch.zeros(1000, 1, 576, dtype=torch.bfloat16)
    return layer, (q, cache, metadata, SimpleNamespace(_q_scale=None, _k_scale=None))


def _layer(loaded: Loaded, indices_TK: torch.Tensor) -> Any:
    """An attention layer of this vLLM without an indexer and without sinks, of 16 heads."""
    kind = loaded.backend_class().get_impl_cls()
    layer = object.__new__(kind)
    fields = {"num_heads": 16, "kv_lora_rank": 512, "kv_cache_dtype": "auto", "scale": 1.0, "sinks": None}
    fields |= {"topk_indices_buffer": indices_TK, "owns_indexer": False, "index_epoch": 1}
    fields["use_aiter_sparse_mla"] = False
    for name, value in fields.items():
        with contextlib.suppress(AttributeError):  # a property of this release, set through another field
            setattr(layer, name, value)
    return layer


PROBES: dict[str, Probe] = {
    "converter": converter,
    "converter of an invalid index": converter_invalid,
    "ragged gather": ragged_gather,
    "row lengths": row_length_kernel,
    "indices of sharing layers": shared_indices,
    "LSE of the decode kernel": lse,
}
