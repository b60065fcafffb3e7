"""Calls of the planner that the tests share."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from dsv32_fast.kernels.emulated import get_mla_metadata_info_v1, get_mla_metadata_v1
from dsv32_fast.plan import PlanBuffers, allocate

POISON = -77


def indptr(lens: Sequence[int]) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lens)], dtype=torch.int32)


def buffers(rows: int, heads: int = 16, poison: int | None = POISON, **info: Any) -> PlanBuffers:
    return allocate(get_mla_metadata_info_v1(rows, 1, heads, None, None, True, **info), poison)


def decode(
    lens: Sequence[int], heads: int = 16, cap: int = -1, plan: PlanBuffers | None = None, **more: Any
) -> PlanBuffers:
    """The plan of vLLM's sparse backend for rows of these lengths."""
    plan = buffers(len(lens), heads) if plan is None else plan
    arguments: dict[str, Any] = {"page_size": 1, "kv_granularity": 16, "max_seqlen_qo": 1, "uni_seqlen_qo": 1}
    arguments |= {"fast_mode": True, "max_split_per_batch": cap} | more
    get_mla_metadata_v1(
        torch.arange(len(lens) + 1, dtype=torch.int32),
        indptr(lens),
        torch.ones(len(lens), dtype=torch.int32),
        heads,
        1,
        True,
        *plan.call_order(),
        **arguments,
    )
    return plan
