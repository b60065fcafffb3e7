"""How many plans a second: the emulated planner beside a transcription on Python lists, in one run.

Both make the call that vLLM's sparse backend makes for `rows` saturated rows: 2048 keys each, 16 heads, bf16, one
query token, the split cap of a long context. The planner is timed through AITER's tensor signature, into buffers that
`get_mla_metadata_info_v1` sized; the lists get their input as lists, so no conversion is charged to them. Repetitions
alternate, and after each pair the two plans are compared, outside the timed region.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import msgspec
import numpy as np
import torch

from dsv32_fast.kernels.emulated import get_mla_metadata_info_v1, get_mla_metadata_v1
from dsv32_fast.kernels.emulated.device import current_device
from dsv32_fast.kernels.emulated.launch import LaunchRules, env_flag, launch_rules
from dsv32_fast.plan import PlanBuffers, allocate, consumer_view
from dsv32_fuzz.bench.list_planner import ListPlan, plan_lists

TOPK, HEADS, GRANULARITY, SPLIT_CAP = 2048, 16, 16, 16
_REPETITIONS = 9

Progress = Callable[[int, int], None]


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Plans per second over the repetitions."""

    median: float
    lowest: float
    highest: float


class PlanRate(msgspec.Struct, frozen=True, kw_only=True):
    """Rates at one batch size; every repetition's two plans were equal."""

    rows: int
    compute_units: int
    works: int
    repetitions: int
    planner: Spread
    lists: Spread
    speedup: float
    """Median over the repetitions of planner rate / list rate, each pair measured back to back."""


def bench_plan(
    rows: tuple[int, ...] = (1, 64, 512), seconds: float = 2.0, progress: Progress | None = None
) -> list[PlanRate]:
    """Measure each batch size for about `seconds` in all; `progress(done, total)` counts repetitions.

    One thread; compilation and caches are warmed up before. Uses the current emulated device.

    Raises:
        ValueError: a row count or time that is not positive.
        RuntimeError: the two plans differ.
    """
    if not rows or min(rows) < 1 or seconds <= 0:
        raise ValueError(f"rows {rows} and seconds {seconds} must be positive")
    total = len(rows) * _REPETITIONS
    rates: list[PlanRate] = []
    for n in rows:
        pair = _Pair(n)
        samples = []
        for _ in range(_REPETITIONS):
            samples.append(pair.sample(seconds / (2 * _REPETITIONS)))
            if progress is not None:
                progress(len(rates) * _REPETITIONS + len(samples), total)
        rates.append(_rate(n, pair, samples))
    return rates


class _Pair:
    """The same call in both forms."""

    def __init__(self, rows: int) -> None:
        self.qo = torch.arange(rows + 1, dtype=torch.int32)
        self.kv, self.last_page_lens = self.qo * TOPK, torch.ones(rows, dtype=torch.int32)
        self.plan = allocate(get_mla_metadata_info_v1(rows, 1, HEADS, None, None, True), fill=-1)
        self.lists = (self.qo.tolist(), self.kv.tolist(), self.last_page_lens.tolist())
        self.rules = _rules(rows)
        self.list_plan = self.by_lists()
        self.by_tensors()
        compare(self.plan, self.list_plan)

    def by_tensors(self) -> None:
        get_mla_metadata_v1(
            self.qo,
            self.kv,
            self.last_page_lens,
            HEADS,
            1,
            True,
            *self.plan.call_order(),
            page_size=1,
            kv_granularity=GRANULARITY,
            max_seqlen_qo=1,
            uni_seqlen_qo=1,
            fast_mode=True,
            max_split_per_batch=SPLIT_CAP,
        )

    def by_lists(self) -> ListPlan:
        return plan_lists(self.rules, *self.lists)

    def sample(self, seconds: float) -> tuple[float, float]:
        """(planner, lists) in plans per second, from one stretch of `seconds` each; then compare the plans."""
        for buffer in self.plan[1:]:
            buffer.fill_(-1)
        planner = _per_second(self.by_tensors, seconds)
        lists = _per_second(self._keep_list_plan, seconds)
        compare(self.plan, self.list_plan)
        return planner, lists

    def _keep_list_plan(self) -> None:
        self.list_plan = self.by_lists()


def compare(plan: PlanBuffers, lists: ListPlan) -> None:
    """Check that both planners say the same to a consumer.

    Raises:
        RuntimeError: names the first buffer that differs.
    """
    view = consumer_view(plan)
    tail = [lists.reduce_indptr[-1]] * (len(view.reduce_indptr) - len(lists.reduce_indptr))
    expected: dict[str, list[int] | list[list[int]]] = {
        "work_indptr": lists.work_indptr,
        "work_info_set": lists.work_info_set,
        "reduce_indptr": lists.reduce_indptr + tail,
        "reduce_final_map": list(lists.reduce_final_map.values()),
        "reduce_partial_map": lists.reduce_partial_map,
    }
    for name, values in expected.items():
        found = getattr(view, name)
        if not np.array_equal(np.reshape(values, (-1, *found.shape[1:])), found):
            raise RuntimeError(f"the planner and the list transcription differ in {name}: trust neither rate")


def _rules(rows: int) -> LaunchRules:
    return launch_rules(
        current_device(),
        rows,
        num_heads_per_head_k=HEADS,
        num_heads_k=1,
        is_causal=True,
        page_size=1,
        kv_granularity=GRANULARITY,
        max_seqlen_qo=1,
        uni_seqlen_qo=1,
        topk=-1,
        max_split_per_batch=SPLIT_CAP,
        is_cp_round_robin=False,
        q_fp8=False,
        kv_fp8=False,
        experimental=env_flag("AITER_ENABLE_EXPERIMENTAL", 0),
        parallel_enabled=env_flag("AITER_MLA_META_USE_PARALLEL", 1),
    )


def _per_second(call: Callable[[], None], seconds: float) -> float:
    """Rate over at least `seconds` and one call; the clock is read once per batch of calls, doubled as it fits."""
    done, batch, start = 0, 1, time.perf_counter()
    while True:
        for _ in range(batch):
            call()
        done += batch
        elapsed = time.perf_counter() - start
        if elapsed >= seconds:
            return done / elapsed
        batch = min(2 * batch, 1024)


def _rate(rows: int, pair: _Pair, samples: list[tuple[float, float]]) -> PlanRate:
    planner, lists = zip(*samples, strict=True)
    return PlanRate(
        rows=rows,
        compute_units=current_device().compute_units,
        works=len(pair.list_plan.work_info_set),
        repetitions=len(samples),
        planner=_spread(planner),
        lists=_spread(lists),
        speedup=statistics.median(p / q for p, q in samples),
    )


def _spread(rates: tuple[float, ...]) -> Spread:
    return Spread(median=statistics.median(rates), lowest=min(rates), highest=max(rates))
