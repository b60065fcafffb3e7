"""The seam between the decode path and its kernels: every call counted by AITER's name, and kernels that do nothing.

`Seam` wraps any object that satisfies `dsv32_fast.kernels.protocol.Kernels` and passes every call on. `HollowKernels`
returns at once with outputs of the right shape and type: what is left of a step is what the host does. Index outputs
are zero, so that the path goes on with legal positions; no value of such a run means anything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from dsv32_fast.kernels.emulated import api
from dsv32_fast.kernels.signatures import FUNCTIONS

HOST_ONLY = frozenset({"get_mla_metadata_info_v1"})
"""Functions of AITER that compute on the host and launch nothing."""
PLANNER = "get_mla_metadata_v1"


class Seam:
    """Any kernels, with their calls counted.

    Args:
        kernels: what calls are passed on to.
        annotate: whether each call is a `torch.profiler.record_function` range of its name, so that a trace shows it.

    Attributes:
        calls: launches by AITER's name since the seam was made.
        inside: whether a kernel is running; what torch does then belongs to the emulation of that kernel.
    """

    def __init__(self, kernels: object, *, annotate: bool = False) -> None:
        self.calls: Counter[str] = Counter()
        self.inside = False
        self._kernels, self._annotate = kernels, annotate

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._kernels, name)
        if name not in FUNCTIONS or name in HOST_ONLY:
            return function
        counted = self._counted(name, function)
        setattr(self, name, counted)
        return counted

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] += 1
            outer, self.inside = self.inside, True
            try:
                with self._range(name):
                    return function(*args, **kwargs)
            finally:
                self.inside = outer

        return call

    def _range(self, name: str) -> AbstractContextManager[Any]:
        return torch.profiler.record_function(name) if self._annotate else nullcontext()


class HollowKernels:
    """Kernels that launch nothing; they satisfy `Kernels` for one decode path of bf16 weights.

    Outputs that the path uses as indices are zeroed, all others stay as they were allocated.

    Raises:
        AttributeError: a kernel that the path with bf16 weights does not call.
    """

    get_mla_metadata_info_v1 = staticmethod(api.get_mla_metadata_info_v1)

    def get_mla_metadata_v1(self, *args: Any, **kwargs: Any) -> None:
        """No plan is written."""

    def concat_and_cache_mla(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is cached."""

    def indexer_k_quant_and_cache(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is cached."""

    def cp_gather_indexer_k_quant_cache(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is gathered."""

    def deepgemm_fp8_paged_mqa_logits(self, *args: Any, **kwargs: Any) -> None:
        """The scores stay -inf."""

    def fp8_mqa_logits(self, Q: Tensor, KV: Tensor, *_: Any, **__: Any) -> Tensor:
        """Zeros, fp32 [rows, keys]."""
        return torch.zeros(len(Q), len(KV), device=Q.device)

    def top_k_per_row_decode(
        self, _logits: Tensor, _next_n: int, _lengths: Tensor, indices: Tensor, *_: Any, **__: Any
    ) -> None:
        """Position 0 everywhere."""
        indices.zero_()

    def top_k_per_row_prefill(
        self, _logits: Tensor, _starts: Tensor, _ends: Tensor, indices: Tensor, *_: Any, **__: Any
    ) -> None:
        """Position 0 everywhere."""
        indices.zero_()

    def mla_decode_fwd(self, _q: Tensor, _cache: Tensor, o: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        """Zeros in `o`."""
        return o.zero_(), None

    def biased_grouped_topk(self, _logits: Tensor, _bias: Tensor, weights: Tensor, ids: Tensor, *_: Any) -> None:
        """Expert 0, weight 0."""
        weights.zero_()
        ids.zero_()

    def fused_moe(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """Zeros like the hidden states."""
        return torch.zeros_like(hidden_states)
