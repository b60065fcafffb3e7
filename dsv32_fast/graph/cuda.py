"""Real graphs: `torch.cuda.CUDAGraph`, which is CUDA's on NVIDIA and HIP's on ROCm.

Nothing in this module has run on a GPU yet; it is tested only to refuse a machine without one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dsv32_fast.graph.faults import FaultLog
from dsv32_fast.graph.runner import GraphRunner, StepCall


class CudaGraphRunner(GraphRunner):
    """Captures on the current device; all graphs share one memory pool, so capture the largest size first.

    Raises:
        RuntimeError: torch sees no GPU.
    """

    def __init__(self, sizes: Sequence[int], log: FaultLog | None = None) -> None:
        super().__init__(sizes, log)
        if not torch.cuda.is_available():
            raise RuntimeError("torch sees no GPU, so there are no real graphs; use ModelGraphRunner on a CPU")
        self._pool: Any = torch.cuda.graph_pool_handle()

    def _record(self, body: Callable[[], None], call: StepCall) -> Callable[[], None]:  # noqa: ARG002
        """Run once aside, since what initialises itself at first use cannot be captured; then capture."""
        current, aside = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(current)
        with torch.cuda.stream(aside):
            body()
        current.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            body()
        replay: Callable[[], None] = graph.replay
        return replay
