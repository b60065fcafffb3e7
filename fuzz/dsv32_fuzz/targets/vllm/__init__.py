"""vLLM as a target: its ROCm sparse-MLA metadata builder, whatever its release, driven in a process of its own.

The target's options are what its code does. A session is one builder of that vLLM with AITER emulated; its index and
plan buffers are shared memory, so the checks read the buffers that the next step will use, and write into them as the
attention layers would. The twin is a new builder for every step: it cannot have remembered anything.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from dsv32_fast.batch import StepBatch
from dsv32_fast.metadata import SparseMlaMetadata
from dsv32_fast.plan import PlanBuffers
from dsv32_fuzz.case import Dims
from dsv32_fuzz.targets import PlannerInput, StepRecord
from dsv32_fuzz.targets.vllm.arena import MappedArena
from dsv32_fuzz.targets.vllm.process import Worker, default_python
from dsv32_fuzz.targets.vllm.wire import Message, unpack

_PROBE_DIMS = Dims(topk=256, max_num_batched_tokens=64)
_PROBE_STEP = StepBatch(query_lens=(1, 1), seq_lens=(300, 700))
_PLAN = dict(
    zip(
        PlanBuffers._fields,
        (
            "work_meta_data",
            "work_indptr",
            "work_info_set",
            "reduce_indptr",
            "reduce_final_map",
            "reduce_partial_map",
        ),
        strict=True,
    )
)


class VllmTarget:
    """An installed vLLM, a prepared folder of one, or a source tree.

    Attributes:
        versions: releases and commits of vLLM, AITER, torch, ROCm and Python in the worker, and whether those of vLLM
            and AITER are known (`identity.versions`).
        import_seconds: how long vLLM took to import.
        caches: whether two equal steps led to one plan.
    """

    name = "vllm"
    evidence = "emulated"
    options = None
    kernels = None

    def __init__(
        self,
        *,
        path: str | None = None,
        python: str | None = None,
        aiter_release: str | None = None,
        num_speculative_tokens: int = 0,
    ) -> None:
        """Start the worker, import vLLM there, and look whether it reuses plans.

        Args:
            path: folder that holds the package `vllm`; None for what the interpreter has installed.
            python: interpreter that has vLLM's dependencies; None for the suite's own.
            aiter_release: AITER release whose signatures the emulation shows; None for the newest that was read.
            num_speculative_tokens: drafts per step that the engine is configured for.

        Raises:
            ValueError: vLLM cannot be imported or driven there; the message says what is missing.
        """
        if path is not None and not (Path(path) / "vllm" / "__init__.py").is_file():
            raise ValueError(f"{path} holds no package vllm; give the folder that contains vllm/__init__.py")
        self.worker = Worker(python or default_python())
        self._numbers = iter(range(1 << 62))
        self.setting = {"num_speculative_tokens": num_speculative_tokens}
        try:
            loaded = self.worker.ask(op="load", path=path, aiter_release=aiter_release)
            self.versions: dict[str, str] = loaded["versions"]
            self.import_seconds: float = loaded["seconds"]
            self.caches = self._reuses()
        except RuntimeError as error:
            self.worker.close()
            remedy = "name a release with --vllm-path, prepared by dsv32 target install"
            raise ValueError(f"vLLM cannot be driven: {error}; {remedy}") from error

    def _reuses(self) -> bool:
        session = self.open(_PROBE_DIMS)
        return session.build(_PROBE_STEP).launched and not session.build(_PROBE_STEP).launched

    def open(self, dims: Dims, *, rebuild: bool = False, poison: int = 0) -> VllmSession:
        """A builder; or, for `rebuild`, a new builder for every step."""
        number = next(self._numbers)
        plain = msgspec.to_builtins(dims)
        answer = self.worker.ask(
            op="open", session=number, dims=plain, rebuild=rebuild, poison=poison, setting=self.setting
        )
        session = VllmSession(self.worker, number, _map(answer["arena"]))
        weakref.finalize(session, self.worker.forget, number)
        return session

    def probe(self) -> list[dict[str, str]]:
        """The answers of every probe of kernels and contracts: name, status (of `Status`) and summary."""
        answers: list[dict[str, str]] = self.worker.ask(op="probe")["answers"]
        return answers

    def close(self) -> None:
        """End the worker."""
        self.worker.close()


def _map(described: dict[str, Any] | None) -> MappedArena | None:
    return None if described is None else MappedArena.map(described)


@dataclass
class VllmSession:
    """One engine's lifetime."""

    worker: Worker
    number: int
    arena: MappedArena | None
    _pointers: torch.Tensor = field(default_factory=lambda: torch.zeros(2, dtype=torch.uint64))
    _strays: list[torch.Tensor] = field(default_factory=list)
    _plan: PlanBuffers | None = None

    def build(self, step: StepBatch) -> StepRecord:
        """Build one step in the worker; the record's arrays are live."""
        plain: Message = {"query_lens": step.query_lens, "seq_lens": step.seq_lens}
        plain |= {"num_tokens": step.num_tokens, "max_seq_len": step.max_seq_len}
        answer = self.worker.ask(op="build", session=self.number, step=plain)
        if answer.get("arena"):
            self.arena = _map(answer["arena"])
        views = {name: self._view(placed) for name, placed in answer["views"].items()}
        plan = self._plan_buffers(views) if answer["persistent"] else self._plan or _no_plan()
        metadata = SparseMlaMetadata(
            num_tokens=answer["num_tokens"] if answer["requests"] is None else answer["rows"],
            max_query_len=answer["max_query_len"],
            req_id_per_token_T=views["req_id_per_token"],
            qo_indptr_T1=views["qo_indptr"],
            paged_kv_indptr_T1=views["paged_kv_indptr"],
            paged_kv_last_page_len_T=views["paged_kv_last_page_len"],
            paged_kv_indices=views["paged_kv_indices"],
            plan=plan,
        )
        return StepRecord(
            launched=answer["launched"],
            planner_input=_planner_input(answer["planner_input"]),
            metadata=metadata,
            key=_key(answer["key"]),
            req_ids_N=self._whole(answer["views"]["req_id_per_token"], views["req_id_per_token"]),
            kv_indptr_N1=self._whole(answer["views"]["paged_kv_indptr"], views["paged_kv_indptr"]),
            kv_indices_NK=self._whole(answer["views"]["paged_kv_indices"], views["paged_kv_indices"]),
            plan=plan,
            persistent=answer["persistent"],
            served=_served(step, answer),
            events=tuple(answer["events"]),
        )

    def _view(self, placed: dict[str, Any] | None) -> torch.Tensor:
        """The tensor that the worker told of; one outside the shared buffers moves with every step."""
        if placed is None:
            return torch.zeros(0, dtype=torch.int32)
        if placed["buffer"] is None:
            self._strays.append(torch.from_numpy(unpack(placed["values"])))
            return self._strays[-1]
        assert self.arena is not None
        size = int(np.prod(placed["shape"], dtype=np.int64))
        flat = self.arena.array(placed["buffer"]).reshape(-1)[placed["start"] : placed["start"] + size]
        return torch.from_numpy(flat.reshape(placed["shape"]))

    def _whole(self, placed: dict[str, Any] | None, view: torch.Tensor) -> Any:
        if placed is None or placed["buffer"] is None:
            return view.numpy()
        assert self.arena is not None
        return self.arena.array(placed["buffer"]).reshape(-1)

    def _plan_buffers(self, views: dict[str, torch.Tensor]) -> PlanBuffers:
        """The plan, with the two addresses that it holds told as this process sees them."""
        plan = PlanBuffers(**{ours: views[theirs] for ours, theirs in _PLAN.items()})
        arena = self.arena
        pointers = plan.work_metadata_ptrs.tolist()
        self._pointers.copy_(torch.tensor([arena.here(p) if arena else p for p in pointers], dtype=torch.uint64))
        self._plan = plan._replace(work_metadata_ptrs=self._pointers)
        return self._plan


def _no_plan() -> PlanBuffers:
    return PlanBuffers(torch.zeros(2, dtype=torch.uint64), *(torch.zeros(1, dtype=torch.int32) for _ in range(5)))


def _key(text: str | None) -> Hashable:
    return text


def _planner_input(packed: Message | None) -> PlannerInput | None:
    if packed is None:
        return None
    kv, qo, last = (unpack(packed[name]) for name in ("kv_lens", "qo_lens", "last_page_lens"))
    return PlannerInput(kv, qo, last, tuple(sorted(packed["scalars"].items())))


def _served(step: StepBatch, answer: Message) -> StepBatch | None:
    """The part of the step that this path serves, if not all: without padding rows, or only its first requests."""
    count = answer["requests"]
    if count is None:
        return None
    query, seqs = step.query_lens[:count], step.seq_lens[:count]
    return StepBatch(query_lens=query, seq_lens=seqs, num_tokens=answer["rows"], max_seq_len=step.max_seq_len)
