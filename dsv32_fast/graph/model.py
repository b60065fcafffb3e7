"""A model of graph capture and replay on the CPU, faithful in what it reads, writes and keeps.

Capture leaves outside memory as it was and the graph's own memory uninitialised (NaN or the smallest integer), since a
capture runs nothing. Replay repeats the recorded operations on the current contents of the captured addresses. Beyond
the checks of every runner it reports memory of an `Arena` that was freed or has another owner since the capture, and
kernels that write outside the views they were given. Tensors outside an arena are kept alive by the graph, which a GPU
would not do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar, cast

import torch

from dsv32_fast.graph.arena import Arena
from dsv32_fast.graph.faults import FaultLog, Span, span_of
from dsv32_fast.graph.queues import Queues
from dsv32_fast.graph.recorder import CaptureError, RecordedOp, Recorder, RecordingKernels, storage_address, tensors_in
from dsv32_fast.graph.runner import GraphRunner, StepCall

K = TypeVar("K")


class ModelGraphRunner(GraphRunner):
    """Graphs of recorded operations.

    Args:
        sizes: padded row counts for which graphs are captured.
        log: where faults go; a strict one of its own if None.
        arena: memory that may be handed out again.
        queues: replays are launched on their queue `main`; without, a replay is done when `replay` returns.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        log: FaultLog | None = None,
        arena: Arena | None = None,
        queues: Queues | None = None,
    ) -> None:
        super().__init__(sizes, log)
        self._arena, self._queues = arena, queues
        self._recorder: Recorder | None = None

    def recording(self, kernels: K) -> K:
        """The same kernels, recorded during a capture."""
        return cast(K, RecordingKernels(kernels, lambda: self._recorder))

    def _record(self, body: Callable[[], None], call: StepCall) -> Callable[[], None]:
        if self._queues is not None:
            self._queues.synchronize_all()  # as torch does before a capture
        self._recorder = Recorder()
        saved = {storage_address(t): (raw_bytes(t), raw_bytes(t).clone()) for t in call.tensors.values()}
        try:
            with self._recorder:
                body()
            ops = self._recorder.ops
        finally:
            self._recorder = None
            for memory, before in saved.values():
                memory.copy_(before)
        unnamed = [t for t in _outside(ops)[1] if storage_address(t) not in saved]
        if unnamed:
            raise CaptureError(f"the body writes a {list(unnamed[0].shape)} tensor that the call does not name; add it")
        _uninitialise([tensor for op in ops for tensor in op.fresh])
        return self._replayer(ops, self._names(ops, call))

    def _names(self, ops: list[RecordedOp], call: StepCall) -> dict[int, str]:
        """Names of the outside addresses that the operations use; unnamed ones are called after their operation."""
        own = {storage_address(tensor) for op in ops for tensor in op.fresh}
        names = {t.data_ptr(): name for name, t in call.tensors.items()}
        for op in ops:
            for tensor in op.reads:
                if storage_address(tensor) not in own:
                    names.setdefault(tensor.data_ptr(), f"an argument of {op.name}")
        return names

    def _replayer(self, ops: list[RecordedOp], names: dict[int, str]) -> Callable[[], None]:
        owners = self._owners(names)
        reads, writes = _outside(ops)

        def run() -> None:
            for op in ops:
                self._run(op, names)

        def replay() -> None:
            self._check_owners(owners, names)
            if self._queues is None:
                run()
            else:
                self._queues.launch("main", "graph replay", run, reads=reads, writes=writes)

        return replay

    def _owners(self, names: dict[int, str]) -> dict[int, int | None]:
        """Who owns each address that lies in the arena."""
        arena = self._arena
        return {} if arena is None else {address: arena.owner(address) for address in names if arena.owns(address)}

    def _check_owners(self, owners: dict[int, int | None], names: dict[int, str]) -> None:
        for address, now in self._owners(names).items():
            owner = owners[address]
            if now != owner:
                state = "free" if now is None else f"allocation {now}"
                detail = (
                    f"{address:#x} was allocation {owner} at capture and is {state} now; keep what a graph captured"
                )
                self.log.report("freed", names[address], detail)

    def _run(self, op: RecordedOp, names: dict[int, str]) -> None:
        """One operation; the results go where the captured ones were."""
        memory = {storage_address(t): raw_bytes(t) for t in op.writes} if op.kernel else {}
        before = {start: block.clone() for start, block in memory.items()}
        results = tensors_in(op.run())
        # A result that shares memory with an argument is a view and already where it belongs.
        known = {storage_address(tensor) for tensor in op.reads}
        new = [tensor for tensor in results if storage_address(tensor) not in known]
        for tensor, result in zip(op.fresh, new, strict=True):
            tensor.copy_(result)
        spans = [span_of(tensor) for tensor in op.writes]
        for start, block in memory.items():
            strays = _strays(start, before[start] != block, spans)
            if strays:
                name = names.get(op.writes[0].data_ptr(), op.name)
                detail = (
                    f"{op.name} wrote {strays} bytes of its storage outside the captured view; pass the padded view"
                )
                self.log.report("write outside view", name, detail)


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage of `tensor` as bytes; writing them counts as no write of `tensor`."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _strays(start: int, changed: torch.Tensor, spans: list[Span]) -> int:
    """How many changed bytes of a storage lie outside all spans."""
    for span in spans:
        changed[max(0, span.start - start) : max(0, span.stop - start)] = False
    return int(changed.sum())


def _outside(ops: list[RecordedOp]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What a graph reads and writes outside its own memory."""
    own = {storage_address(tensor) for op in ops for tensor in op.fresh}
    reads = [t for op in ops for t in op.reads if storage_address(t) not in own]
    writes = [t for op in ops for t in op.writes if storage_address(t) not in own]
    return reads, writes


def _uninitialise(tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        if tensor.is_floating_point():
            tensor.fill_(float("nan"))
        elif tensor.dtype != torch.bool:
            tensor.fill_(torch.iinfo(tensor.dtype).min)
