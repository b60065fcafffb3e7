"""Small worlds, and kernels that are wrong on one rank; importable by ranks that are processes."""

from __future__ import annotations

import os
import time
from typing import Any

from dsv32_fast.kernels.emulated import api
from dsv32_fast.parallel.rank import KV_SCALE, SMALL

TINY = SMALL.replace(n_heads=32, index_topk=8)
"""Two ranks have 16 heads each, where AITER ignores the plan from 32 rows on."""
WIDE = TINY.replace(n_heads=64)
"""Two ranks have 32 heads each."""


class Wrong:
    """The emulation with one function followed by a defect."""

    def __init__(self, name: str, defect: Any) -> None:
        self._name, self._defect = name, defect

    def __getattr__(self, name: str) -> Any:
        function = getattr(api, name)
        if name != self._name:
            return function

        def call(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            changed = self._defect(result, *args)
            return result if changed is None else changed

        return call


def experts_swapped(rank: int) -> Any:
    """Rank 1 has the same experts in another order."""

    def defect(result: Any, logits: Any, bias: Any, weights: Any, ids: Any, *rest: Any) -> None:
        ids.copy_(ids.flip(1))
        weights.copy_(weights.flip(1))

    return Wrong("biased_grouped_topk", defect) if rank else api


def topk_swapped(rank: int) -> Any:
    """Rank 1 breaks the order of the top-k: the same set, the other way round."""

    def defect(result: Any, logits: Any, next_n: int, lens: Any, indices: Any, *rest: Any) -> None:
        indices.copy_(indices.flip(1))

    return Wrong("top_k_per_row_decode", defect) if rank else api


def attention_scaled(rank: int) -> Any:
    """Rank 1's attention is off by 5 %."""

    def defect(result: Any, q: Any, kv: Any, o: Any, *rest: Any) -> None:
        o.mul_(1.05)

    return Wrong("mla_decode_fwd", defect) if rank else api


def value_scale_lost(rank: int) -> Any:
    """Rank 1 forgets the scale of an fp8 V."""

    def defect(result: Any, q: Any, kv: Any, o: Any, *rest: Any) -> None:
        o.div_(KV_SCALE)

    return Wrong("mla_decode_fwd", defect) if rank else api


def experts_lost(rank: int) -> Any:
    """Rank 1 contributes nothing from the routed experts."""

    def defect(result: Any, *rest: Any) -> Any:
        return result * 0

    return Wrong("fused_moe", defect) if rank else api


def refuses(rank: int) -> Any:
    """Rank 1 cannot load its kernels."""
    if rank:
        raise ValueError("no kernels\nhere")
    return api


def dies(rank: int) -> Any:
    """Rank 1 ends without a word in the middle of a step, while the other waits for it."""
    return Wrong("biased_grouped_topk", lambda *_: os._exit(7)) if rank else api


def sleeps(rank: int) -> Any:
    """Rank 1 does not get beyond its kernels."""
    if rank:
        time.sleep(600)
    return api


def router_unsteady(rank: int) -> Any:
    """Every third choice of rank 0, which is TP 1's, comes with other weights."""
    calls: list[int] = []

    def defect(result: Any, logits: Any, bias: Any, weights: Any, *rest: Any) -> None:
        calls.append(1)
        if len(calls) % 3 == 0:
            weights.mul_(1.01)

    return api if rank else Wrong("biased_grouped_topk", defect)


class PlannerUnsteady:
    """From the fifth plan on the first row loses a key."""

    def __init__(self) -> None:
        self._calls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(api, name)

    def get_mla_metadata_v1(self, *args: Any, **kwargs: Any) -> None:
        api.get_mla_metadata_v1(*args, **kwargs)
        self._calls += 1
        if self._calls > 4:
            work_info_set = args[7]
            work_info_set[0, 5] -= 1


def planner_unsteady(rank: int) -> Any:
    """A plan made again is not the plan made before."""
    return PlannerUnsteady()
