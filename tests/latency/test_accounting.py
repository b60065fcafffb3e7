"""Counts of a step against what can be worked out by hand, and counters that cannot agree by accident."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
import torch

from dsv32_fast.batch import StepBatch
from dsv32_fast.kernels.mounted import EMULATION
from dsv32_fast.options import PRESETS, resolve
from dsv32_fast.path import PathConfig
from dsv32_fuzz.latency.accounting import HostData, LaunchCounter, StepCounts, count_step
from dsv32_fuzz.latency.counting import (
    NARROW,
    Event,
    count_schedule,
    count_table,
    decode_schedule,
    meta_path,
    path_of,
    variants,
)
from dsv32_fuzz.latency.seam import HollowKernels, Seam
from dsv32_fuzz.latency.shapes import ShapeMemo

SHALLOW = dataclasses.replace(NARROW, n_layers=2, n_dense_layers=1)
ROWS = 512
MEMO = ShapeMemo()


@functools.cache
def counts(preset: str, name: str) -> tuple[StepCounts, ...]:
    return count_schedule(PRESETS[preset], SCHEDULES[name], SHALLOW, ROWS, memo=MEMO)


def batches(schedule: Sequence[Event]) -> list[StepBatch]:
    """The step batches of a schedule, followed by hand."""
    lengths: dict[int, int] = {}
    found = []
    for event in schedule:
        lengths |= event.admit
        for request, n in event.tokens.items():
            lengths[request] = lengths.get(request, 0) + n
        seqs = tuple(lengths[r] for r in event.tokens)
        found.append(StepBatch(query_lens=tuple(event.tokens.values()), seq_lens=seqs, num_tokens=event.padded_rows))
    return found


def key_changes(schedule: Sequence[Event]) -> list[int]:
    """1 where the key of #47766, written out here, differs from the step before."""
    keys = []
    for b in batches(schedule):
        q, seq = np.array(b.query_lens), np.array(b.seq_lens)
        keys.append((b.num_tokens, q.tolist(), np.minimum(seq, 2048).tolist(), np.minimum(seq - q, 2048).tolist()))
    return [int(i == 0 or keys[i] != keys[i - 1]) for i in range(len(keys))]


SCHEDULES = {"decode": decode_schedule(4, 3000), "drafts": decode_schedule(4, 2100, drafts=3)}


def test_router_casts_go_from_58_to_0_at_the_true_layer_count() -> None:
    """61 layers of which 3 are dense, as published: seen by dispatch between two stages, and by the path's counter."""
    step = decode_schedule(2, 3000)[:1]
    before, after = (count_schedule(PRESETS[name], step, memo=MEMO)[0] for name in ("baseline", "pr42982"))
    assert (before.router_casts, after.router_casts) == (58, 0)
    assert before.casts["bfloat16->float32"] - after.casts["bfloat16->float32"] == 58
    assert before.kernels == after.kernels
    assert before.kernels["biased_grouped_topk"] == before.kernels["fused_moe"] == 58
    assert before.kernels["mla_decode_fwd"] == before.kernels["indexer_k_quant_and_cache"] == 61


def test_the_path_counts_the_same_casts() -> None:
    seam = Seam(HollowKernels())
    path = meta_path(PRESETS["baseline"], seam, SHALLOW, ROWS)
    state = path.new_state(512)
    for _ in range(3):
        assert count_step(path, seam, state, {0: [1], 1: [2]}).router_casts == 1
    assert path.casts.bf16_to_fp32 == 3


@pytest.mark.parametrize("name", SCHEDULES)
def test_plan_launches_equal_key_changes(name: str) -> None:
    schedule = SCHEDULES[name]
    cached = [step.plan_launches for step in counts("pr47766", name)]
    assert cached == key_changes(schedule)
    assert 0 in cached
    assert [step.plan_launches for step in counts("baseline", name)] == [1] * len(schedule)


@pytest.mark.parametrize("name", SCHEDULES)
def test_cleared_bytes_follow_the_formula(name: str) -> None:
    """Tail: 4 (d_req + topk d_tokens) of the shrink; full: 4 (N + topk N + N + 1); both: 4 (N - T) of the indptr."""
    topk, schedule = SHALLOW.index_topk, SCHEDULES[name]
    steps = batches(schedule)
    live, rows = [b.num_query_tokens for b in steps], [b.num_tokens for b in steps]
    shrunk = [
        4 * (max(0, q0 - q1) + topk * max(0, t0 - t1))
        for q0, q1, t0, t1 in zip([0, *live], live, [0, *rows], rows, strict=False)
    ]
    indptr = [4 * (ROWS - t) for t in rows]
    tail = [step.bytes_cleared for step in counts("pr47766", name)]
    full = [step.bytes_cleared for step in counts("baseline", name)]
    assert tail == [a + b for a, b in zip(shrunk, indptr, strict=True)]
    assert full == [4 * (ROWS + topk * ROWS + ROWS + 1) + b for b in indptr]
    assert max(shrunk) > 0


def test_cleared_bytes_agree_with_the_builders_own_count() -> None:
    for preset in ("baseline", "pr47766"):
        seam = Seam(HollowKernels())
        path = meta_path(PRESETS[preset], seam, SHALLOW, ROWS)
        state = path.new_state(512)
        steps = [count_step(path, seam, state, t) for t in ({0: [1], 1: [2]}, {0: [1]}, {0: [1] * 9})]
        assert sum(step.bytes_cleared for step in steps) == path.builder.counts.bytes_cleared
        assert sum(step.plan_launches for step in steps) == path.builder.counts.plan_launches


def test_each_change_alone_changes_only_its_own_count() -> None:
    table = count_table(resolve("pr47766"), SCHEDULES["decode"], SHALLOW, ROWS)
    steps = {v.name: v.steps for v in table.variants}
    assert list(steps) == ["baseline", "logits", "bias", "key", "clear", "all"]
    base = steps["baseline"]

    def changed(name: str) -> set[str]:
        fields = ("router_casts", "plan_launches", "bytes_cleared", "host_to_device", "synchronisations")
        return {f for f in fields for a, b in zip(base, steps[name], strict=True) if getattr(a, f) != getattr(b, f)}

    # A skipped planner call also saves what its arguments cost, so only `key` may touch another count.
    assert {name: changed(name) for name in ("logits", "bias", "clear")} == {
        "logits": {"router_casts"},
        "bias": set(),
        "clear": {"bytes_cleared"},
    }
    assert changed("key") == {"plan_launches"}
    # The wrapper casts a bf16 bias back to the type of fp32 logits, once per mixture layer.
    assert steps["bias"][0].casts["bfloat16->float32"] - base[0].casts["bfloat16->float32"] == table.moe_layers == 1


def test_the_cpu_emulation_launches_the_same_kernels_as_the_hollow_ones() -> None:
    """Counts do not depend on values: real outputs on the CPU, none on the meta device."""
    config = dataclasses.replace(SHALLOW, index_topk=4)
    sizes = PathConfig(max_num_batched_tokens=64, gate_gemm="bf16")
    steps = [{0: [1] * 6, 1: [2]}, {0: [3], 1: [4]}, {1: [5]}]

    def run(kernels: object, device: str) -> list[StepCounts]:
        seam = Seam(kernels)
        path = path_of(resolve("pr47766"), seam, config, dataclasses.replace(sizes, device=device))
        state = path.new_state(256)
        return [count_step(path, seam, state, tokens) for tokens in steps]

    for real, hollow in zip(run(EMULATION, "cpu"), run(HollowKernels(), "cpu"), strict=True):
        assert real == hollow
    assert [s.kernels for s in run(HollowKernels(), "meta")] == [s.kernels for s in run(EMULATION, "cpu")]


def test_the_memo_changes_no_count() -> None:
    class Forgetful(ShapeMemo):
        def __call__(self, func, args, kwargs):  # type: ignore[no-untyped-def]
            return func(*args, **kwargs)

    schedule = SCHEDULES["decode"][:1]
    found = [count_schedule(resolve("pr42982"), schedule, SHALLOW, ROWS, memo=m) for m in (Forgetful(), ShapeMemo())]
    assert found[0] == found[1]


def tally(work, device: str = "cpu", persistent: tuple[torch.Tensor, ...] = ()) -> LaunchCounter:  # type: ignore[no-untyped-def]
    counter = LaunchCounter(Seam(HollowKernels()), torch.device(device), persistent)
    with HostData(counter), counter:
        work()
    return counter


def test_what_waits_for_the_device() -> None:
    x, mask, i = torch.arange(6.0), torch.tensor([True, False] * 3), torch.tensor([0, 2])
    waits = {
        "item": x[0].item,
        "bool": lambda: bool(x[0] > 1),
        "mask": lambda: x[mask],
        "mask write": lambda: x.index_put_((mask,), torch.zeros(3)),
        "nonzero": x.nonzero,
        "repeats": lambda: torch.repeat_interleave(i),
        "equal": lambda: torch.equal(x, x),
    }
    assert {name: tally(work).synchronisations for name, work in waits.items()} == dict.fromkeys(waits, 1)
    free = {
        "index": lambda: x[i],
        "write": lambda: x.index_put_((i,), torch.zeros(2)),
        "arithmetic": lambda: x + 1,
        "where": lambda: torch.where(mask, x, 0.0),
        "repeats": lambda: torch.repeat_interleave(x, 2, output_size=12),
    }
    assert {name: tally(work).synchronisations for name, work in free.items()} == dict.fromkeys(free, 0)


def test_copies_across_and_casts_within() -> None:
    host, device = torch.ones(4), torch.ones(4, device="meta")
    assert tally(lambda: host.to("meta"), "meta").host_to_device == 1
    assert tally(lambda: torch.tensor([1, 2], device="meta"), "meta").host_to_device == 1
    assert tally(lambda: device[torch.tensor([0, 1])], "meta").host_to_device == 1
    assert tally(lambda: device + 1, "meta").host_to_device == 0
    assert tally(lambda: host.to("meta"), "meta").operators == {}
    casts = tally(lambda: (device.bfloat16().float(), device.int(), device.float()), "meta").casts
    assert casts == {"float32->bfloat16": 1, "bfloat16->float32": 1}


def test_views_and_allocations_launch_nothing() -> None:
    x = torch.ones(4, 6)
    quiet = tally(lambda: (x.view(24), x.T, x[1:3], x.expand(2, 4, 6), torch.empty(3), torch.empty_like(x), x.detach()))
    assert quiet.operators == {}
    assert tally(lambda: (x + 1, x.zero_(), torch.zeros(3), x.T.contiguous())).operators == {
        "add": 1,
        "zero_": 1,
        "zeros": 1,
        "clone": 1,
    }


def test_only_persistent_buffers_count_as_cleared() -> None:
    kept, other = torch.ones(8, dtype=torch.int32), torch.ones(8)
    work = lambda: (kept[2:5].zero_(), other.zero_(), kept[6:].copy_(kept[0].expand(2)), kept[:2].copy_(kept[2:4]))  # noqa: E731
    assert tally(work, persistent=(kept,)).bytes_cleared == 4 * 3 + 4 * 2


def test_what_a_kernel_does_inside_is_its_own() -> None:
    seam = Seam(EMULATION)
    counter = LaunchCounter(seam, torch.device("cpu"), ())
    x = torch.ones(2, 128)
    with counter:
        seam.per_group_quant_hip(x, quant_dtype=torch.float8_e4m3fn)
    assert (seam.calls, dict(counter.operators)) == ({"per_group_quant_hip": 1}, {})


def test_a_path_without_the_seam_is_refused() -> None:
    path = meta_path(PRESETS["baseline"], HollowKernels(), SHALLOW, ROWS)
    with pytest.raises(ValueError, match="seam: the path has other kernels"):
        count_step(path, Seam(HollowKernels()), path.new_state(64), {0: [1]})


def test_nothing_to_compare_is_refused() -> None:
    with pytest.raises(ValueError, match="options: they are those of the baseline"):
        variants(PRESETS["baseline"])
    with pytest.raises(ValueError, match="batch 1"):
        decode_schedule(1)


def test_a_table_survives_json() -> None:
    table = count_table(resolve("pr42982"), decode_schedule(2, 10)[:1], SHALLOW, ROWS)
    assert msgspec.json.decode(msgspec.json.encode(table), type=type(table)) == table
