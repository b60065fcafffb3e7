"""Tensor-parallel runs: what holds is said to hold, each defect of one rank is found, and a lost rank is named."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from parallel_worlds import (
    TINY,
    WIDE,
    attention_scaled,
    dies,
    experts_lost,
    experts_swapped,
    planner_unsteady,
    refuses,
    router_unsteady,
    sleeps,
    topk_swapped,
    value_scale_lost,
)

from dsv32_fast.options import PRESETS
from dsv32_fast.parallel.communicator import ThreadCommunicator, Threads, all_sum
from dsv32_fast.parallel.rank import RankReport, TpSpec, workload
from dsv32_fast.parallel.run import PEER_LOST, _cache, _lost, _silent, run_tp

AGREE, EQUAL, CACHE = range(3)


def spec(world: int = 2, **changes) -> TpSpec:
    return TpSpec(**{"world": world, "rows": 3, "steps": 3, "config": TINY, **changes})


def statuses(result):
    return tuple(claim.status for claim in result.claims)


@pytest.mark.parametrize("kv_cache", ["bf16", "fp8"])
@pytest.mark.parametrize("world", [2, 4])
def test_what_holds_is_passed(world, kv_cache):
    result = run_tp(spec(world, kv_cache=kv_cache), threads=True)
    assert statuses(result) == ("PASSED",) * 3, result.claims
    assert result.status == "PASSED"
    assert result.lost == ()
    assert set(result.budget_used) == {"attn_q", "attn_z", "attn_out", "ffn_out"}
    assert 0 < max(result.budget_used.values()) <= 1
    rows = sum(len(ids) for step in workload(spec(world)) for ids in step.values())
    # index_topk of two layers and gate_idx of one, each compared with every other rank
    assert result.claims[AGREE].summary == f"{rows * 3 * (world - 1)} rows of choices compared over {world} ranks"


def test_tp_1_claims_only_what_it_can():
    result = run_tp(spec(1), threads=True)
    assert statuses(result) == ("SKIPPED", "SKIPPED", "PASSED")


def test_without_a_key_nothing_is_claimed_of_the_cache():
    result = run_tp(spec(1, options=PRESETS["baseline"]), threads=True)
    assert result.claims[CACHE].status == result.status == "MISTRUSTED"
    assert "no step used a cached plan" in result.claims[CACHE].summary


@pytest.mark.parametrize(
    ("config", "kv_cache", "status"),
    [(TINY, "bf16", "SKIPPED"), (WIDE, "bf16", "PASSED"), (TINY, "fp8", "PASSED")],
)
def test_the_cache_claim_is_skipped_where_aiter_ignores_the_plan(config, kv_cache, status):
    """bf16, 16 heads and 32 rows; the controls have 32 heads, or fp8. TP 8 of the real model has 16, TP 4 has 32."""
    result = run_tp(spec(2, rows=32, steps=2, config=config, kv_cache=kv_cache), threads=True)
    assert statuses(result) == ("PASSED", "PASSED", status), result.claims
    if status == "SKIPPED":
        assert "AITER ignores the plan with bf16, 16 heads and 32 rows" in result.claims[CACHE].summary


def test_a_difference_by_the_cache_is_a_failure():
    claim = _cache(spec(), [RankReport(reused=2), RankReport(reused=2, cache_unequal=1)])
    assert (claim.status, claim.summary) == ("FAILED", "1 steps differ on rank 1")


@pytest.mark.parametrize(("kernels", "stage"), [(experts_swapped, "gate_idx"), (topk_swapped, "index_topk")])
def test_a_rank_that_chooses_in_another_order(kernels, stage):
    result = run_tp(spec(kernels=kernels, steps=1), threads=True)
    assert result.claims[AGREE].status == result.status == "FAILED"
    assert f"rank 1 differs from rank 0 in {stage} of layer " in result.claims[AGREE].summary


@pytest.mark.parametrize(
    ("kernels", "kv_cache", "stage"),
    [(attention_scaled, "bf16", "attn_z"), (value_scale_lost, "fp8", "attn_z"), (experts_lost, "bf16", "ffn_out")],
)
def test_a_rank_that_computes_something_else(kernels, kv_cache, stage):
    result = run_tp(spec(kernels=kernels, kv_cache=kv_cache, steps=1), threads=True)
    assert result.claims[AGREE].status == "PASSED"
    assert result.claims[EQUAL].status == "FAILED"
    assert result.budget_used[stage] > 1
    assert all(used <= 1 for other, used in result.budget_used.items() if other != stage)


def test_a_stage_on_all_ranks_that_differs_from_tp_1():
    claim = run_tp(spec(kernels=router_unsteady, steps=1), threads=True).claims[EQUAL]
    assert claim.status == "FAILED"
    assert claim.summary.startswith("stages that are not divided differ: gate_w (")


def test_a_plan_that_is_not_the_same_when_made_again():
    """The first two steps plan twice each; in the third only the path without a cache does."""
    claim = run_tp(spec(1, kernels=planner_unsteady, steps=2), threads=True).claims[CACHE]
    assert (claim.status, claim.summary) == ("FAILED", "1 steps differ on rank 0")


def test_a_rank_that_fails_is_named():
    result = run_tp(spec(kernels=refuses), threads=True)
    assert result.lost == ("rank 1: ValueError: no kernels here",)
    assert [(c.name, c.status) for c in result.claims] == [("all ranks finish", "MISTRUSTED")]


def test_processes_find_what_threads_find():
    """The same steps on the same shards: the same numbers, over torch.distributed."""
    assert run_tp(spec(steps=2)) == run_tp(spec(steps=2), threads=True)


@pytest.mark.parametrize(
    ("kernels", "reason"),
    [(dies, "exit code 7"), pytest.param(refuses, "ValueError: no kernels here", marks=pytest.mark.nightly)],
)
def test_a_process_that_is_lost_is_named(kernels, reason):
    result = run_tp(spec(kernels=kernels))
    assert result.lost == (f"rank 1: {reason}",)
    assert result.status == "MISTRUSTED"


@pytest.mark.nightly
def test_a_silent_process_is_named_and_ends():
    result = run_tp(spec(kernels=sleeps, timeout_s=40))
    assert result.lost == ("rank 1: no answer within 40 s",)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("world", "rows", "kv_cache", "cache"),
    [
        (2, 8, "bf16", "PASSED"),
        (4, 32, "bf16", "PASSED"),
        (8, 8, "bf16", "PASSED"),
        (8, 32, "bf16", "SKIPPED"),
        (8, 32, "fp8", "PASSED"),
    ],
)
def test_heads_of_the_real_model(world, rows, kv_cache, cache):
    result = run_tp(TpSpec(world=world, rows=rows, kv_cache=kv_cache, timeout_s=280))
    assert statuses(result) == ("PASSED", "PASSED", cache), result.claims


def test_a_sum_is_rounded_once_in_rank_order():
    class Three:
        rank, world = 0, 3

        def all_gather(self, _):
            return [torch.tensor([v], dtype=torch.bfloat16) for v in (256.0, 1.0, 1.0)]

    assert all_sum(torch.zeros(1, dtype=torch.bfloat16), Three()).item() == 258.0  # 256 + 1 rounds back to 256 in bf16


def test_one_rank_alone_exchanges_nothing():
    alone = ThreadCommunicator(0, Threads(1, 1.0))
    x = torch.ones(2)
    assert all_sum(x, alone) is x


@pytest.mark.parametrize(
    ("exit_code", "why"),
    [
        (-9, "rank 3: killed by signal 9"),
        (2, "rank 3: exit code 2"),
        (0, "rank 3: ended without a report"),
        (PEER_LOST, ""),
    ],
)
def test_why_a_rank_is_lost(tmp_path, exit_code, why):
    """A rank that ends since an exchange failed is not to blame."""
    assert _lost(3, SimpleNamespace(exitcode=exit_code), tmp_path) == why


def test_only_the_rank_that_is_behind_is_silent():
    assert _silent([0, 1, 3], [7, 6, 0, 7], 9.0) == ["rank 1: no answer within 9 s"]
