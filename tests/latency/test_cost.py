"""Predictions against counts of the builder itself, costs, budgets, the plot, and the commands around them."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from dsv32_fast.metadata import BuilderConfig, MetadataBuilder
from dsv32_fast.options import PRESETS
from dsv32_fuzz.latency import counting
from dsv32_fuzz.latency.budget import exceeded, shipped_budget
from dsv32_fuzz.latency.cost import Costs, claim_rows, costs_of, key_of, predict, sweep
from dsv32_fuzz.latency.seam import HollowKernels
from dsv32_fuzz.traces.kineto import read_trace
from dsv32_fuzz.workload import PR42982_WORKLOAD, Traffic, Workload, steps
from dsv32_fuzz.workload.skip_rate import skip_rate
from dsv32_reports.cli import app
from dsv32_reports.skip_plot import skip_plot

SMALL = Workload(input_len=2040, output_len=12, concurrency=3, num_requests=5, max_num_batched_tokens=512, mtp_depth=1)


@pytest.mark.parametrize("preset", ["baseline", "pr42982", "pr47766"])
def test_predictions_are_what_the_builder_does(preset: str) -> None:
    options = PRESETS[preset]
    sizes = BuilderConfig(max_num_batched_tokens=SMALL.max_num_batched_tokens)
    builder = MetadataBuilder(config=sizes, options=options, kernels=HollowKernels())
    launches = cleared = served = 0
    for step in steps(SMALL, 0):
        if step.traffic is Traffic.IDLE:
            continue
        before = (builder.counts.plan_launches, builder.counts.bytes_cleared)
        builder.build(step.batch)
        if step.traffic is not Traffic.CAPTURE:
            served += 1
            launches += builder.counts.plan_launches - before[0]
            cleared += builder.counts.bytes_cleared - before[1]
    found = predict(SMALL, options.key)
    assert (found.steps, found.plan_launches) == (served, launches)
    assert cleared == (found.bytes_tail if options.clear == "tail" else found.bytes_full)
    assert found.casts_before == 58 * served


def test_skips_agree_with_the_skip_rate() -> None:
    for policy in ("pr42982", "pr47766"):
        found, known = predict(SMALL, policy), skip_rate(SMALL, key_of(policy))
        assert found.steps - found.plan_launches == known.skipped
        assert found.wrongful == known.wrongful


def test_time_saved_is_count_times_cost() -> None:
    found = predict(SMALL, "pr47766", Costs(plan_us=(10, 20), cast_us=(1, 2), clear_us_per_mb=(0, 0)))
    assert found.saved_us["router"] == (58, 116)
    assert found.saved_us["cache"] == pytest.approx((10 * found.skip_rate, 20 * found.skip_rate))
    assert found.saved_ms == pytest.approx((0.058 + 0.01 * found.skip_rate, 0.116 + 0.02 * found.skip_rate))
    with pytest.raises(ValueError, match="plan_us is 3:2; give a range"):
        Costs(plan_us=(3, 2))


def test_published_costs_do_not_explain_the_claim() -> None:
    """At most 100 us of planner, 250 us of casts, 20 us of clears: 0.37 ms of 1.288."""
    rows = claim_rows([predict(msgspec.structs.replace(PR42982_WORKLOAD, num_requests=64), "pr42982")])
    assert rows[-1].status.startswith("not explained: ")
    assert "only by a trace" in rows[0].status
    assert rows[2].status == "not confirmed"


def test_the_claimed_skip_rate_is_confirmed_by_budget() -> None:
    some = predict(SMALL, "pr42982")
    served = {"steps": 100, "wrongful": 3}
    predictions = [msgspec.structs.replace(some, plan_launches=launches, **served) for launches in (30, 6, 5)]
    status = claim_rows(predictions)[1].status
    assert status.startswith("confirmed at 512 (3 of them wrongful), 512 (3 of them wrongful), for equal lengths")
    assert claim_rows(predictions[:1])[1].status.startswith("not reached under these budgets")


def test_a_sweep_and_its_plot() -> None:
    rows = sweep((100, 3000), (1, 2), (0, 1), workload=msgspec.structs.replace(SMALL, output_len=30))
    assert [(p.workload.input_len, p.workload.concurrency, p.workload.mtp_depth) for p in rows] == [
        (i, c, m) for i in (100, 3000) for c in (1, 2) for m in (0, 1)
    ]
    assert all(p.skip_rate == 0 for p in rows[:4])
    assert all(p.skip_rate > 0 for p in rows[4:])
    tree = ElementTree.fromstring(skip_plot(rows))
    space = "{http://www.w3.org/2000/svg}"
    assert len(tree.findall(f"{space}polyline")) == 4
    points = [c for c in tree.findall(f"{space}circle") if c.get("stroke")]
    assert sum(c.get("fill") == "white" for c in points) == sum(p.skip_rate < 0.5 for p in rows) >= 4
    with pytest.raises(ValueError, match="none to plot"):
        skip_plot([])


def test_costs_from_a_trace(tmp_path: Path) -> None:
    events = [
        {"ph": "X", "cat": "kernel", "name": f"{name}<x>", "ts": i, "dur": dur}
        for i, (name, dur) in enumerate(
            [("bfloat16tofloat32_copy_kernel_cuda", 2.0)] * 3
            + [("kn_get_mla_metadata_v1_2", d) for d in (40.0, 50.0, 90.0)]
        )
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(events))
    costs = costs_of(read_trace(path))
    assert (costs.plan_us, costs.cast_us) == ((50.0, 50.0), (2.0, 2.0))
    path.write_text(json.dumps(events[:3]))
    with pytest.raises(ValueError, match="no device work for plan launches; give the trace of a baseline run"):
        costs_of(read_trace(path))


def test_the_shipped_budget_is_that_of_the_true_model() -> None:
    budget = shipped_budget()
    assert (budget.layers, budget.moe_layers, budget.topk, budget.max_num_batched_tokens) == (61, 58, 2048, 8192)
    assert budget.schedule == counting.decode_schedule()
    found = {v.name: v for v in budget.variants}
    assert {name: v.options for name, v in found.items()} == counting.variants(PRESETS["pr47766"])
    assert [s.router_casts for s in found["baseline"].steps] == [58] * 7
    assert [s.router_casts for s in found["all"].steps] == [0] * 7
    assert [s.plan_launches for s in found["all"].steps] == [1, 0, 0, 1, 1, 1, 1]


def test_a_step_of_the_true_model_keeps_the_shipped_budget() -> None:
    """What CI compares exactly: the first two steps of the recorded schedule, all changes, 61 layers."""
    budget = shipped_budget()
    known = {v.name: v for v in budget.variants}["all"]
    counted = counting.count_schedule(PRESETS["pr47766"], budget.schedule[:2])
    for now, then in zip(counted, known.steps, strict=False):
        fields = ("kernels", "router_casts", "plan_launches", "bytes_cleared", "host_to_device", "synchronisations")
        assert {f: getattr(now, f) for f in fields} == {f: getattr(then, f) for f in fields}


def test_what_exceeds_a_budget_is_named() -> None:
    budget = shipped_budget()
    assert exceeded(budget, budget) == []
    variant = budget.variants[0]
    casts = variant.steps[3].casts
    worse = msgspec.structs.replace(
        variant.steps[3],
        plan_launches=2,
        kernels={**variant.steps[3].kernels, "moe_fused_gate": 1},
        casts={**casts, "bfloat16->float32": 2000},
    )
    steps_ = (*variant.steps[:3], worse, *variant.steps[4:])
    table = msgspec.structs.replace(
        budget, variants=(msgspec.structs.replace(variant, steps=steps_), *budget.variants[1:])
    )
    assert exceeded(table, budget) == [
        "budget exceeded: baseline, step 3: plan_launches 2, budget 1",
        "budget exceeded: baseline, step 3: kernel moe_fused_gate 1, budget 0",
        f"budget exceeded: baseline, step 3: cast bfloat16->float32 2000, budget {casts['bfloat16->float32']}",
    ]
    assert len(exceeded(msgspec.structs.replace(table, torch="1.0"), budget)) == 2  # operators are not comparable then
    assert exceeded(budget, table) == []  # fewer is fine
    with pytest.raises(ValueError, match="another topk; record it again"):
        exceeded(msgspec.structs.replace(budget, topk=1), budget)


def test_commands(tmp_path: Path) -> None:
    svg = tmp_path / "plot.svg"
    arguments = ["bench", "workload", "--isl", "100,3000", "--concurrency", "2", "--mtp", "0", "--osl", "20"]
    done = CliRunner().invoke(app, [*arguments, "--svg", str(svg)])
    assert done.exit_code == 0, done.output
    assert "concurrency 2, MTP 0: the cache skips at least half from 3000 input tokens on" in done.stdout
    assert svg.read_text().startswith("<svg")
    priced = CliRunner().invoke(app, [*arguments, "--json", "--plan-us", "50", "--cast-us", "1:2"])
    costs = json.loads(priced.stdout)["costs"]
    assert (costs["plan_us"], costs["cast_us"]) == ([50.0, 50.0], [1.0, 2.0])
    broken = tmp_path / "budget.json"
    broken.write_text("{}")
    for bad, message in (
        (["bench", "workload", "--plan-us", "fast"], "--plan-us is 'fast'; write LOW:HIGH"),
        (["bench", "workload", "--isl", "0"], "--isl is '0'"),
        (["bench", "workload", "--key", "none"], "choose pr42982 or pr47766"),
        (["bench", "claims", "--key", "x"], "--key is 'x'"),
        (["bench", "step", "--budget", str(broken)], "no table of `dsv32 bench step --counts-only --json`"),
    ):
        done = CliRunner().invoke(app, bad)
        assert done.exit_code == 2, done.output
        assert message in done.stderr
