"""Interval, verdict, budget, pairs and the roofline on known data. Nothing here judges a measured time."""

from __future__ import annotations

import gc
import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from dsv32_fast.graph.model import ModelGraphRunner
from dsv32_fast.kernels.mounted import mounted
from dsv32_fast.kernels.selection import HARDWARE
from dsv32_fast.options import PRESETS, resolve
from dsv32_fast.path import DecodePath
from dsv32_fuzz.latency import attribution, step, timing
from dsv32_fuzz.latency.attribution import Plan, comparisons, time_setting
from dsv32_fuzz.latency.device import device_state
from dsv32_fuzz.latency.evidence import read_evidence
from dsv32_fuzz.latency.roofline import MI355X_PEAKS, active_weights, host_peaks, step_floor
from dsv32_fuzz.latency.statistics import FEWEST_BLOCKS, Interval, choose_budget, ratio_interval, spread_of, verdict
from dsv32_fuzz.latency.step import Part, Setting, TimingSpec, step_subject, time_in_fresh_process
from dsv32_fuzz.latency.timing import (
    ImpossibleTimeError,
    Samples,
    Subject,
    cpu_clock,
    device_clock,
    log_ratios,
    pairs_per_block,
    time_blocks,
    wall_clock,
)
from dsv32_ref.config import Config
from dsv32_reports.cli import app
from dsv32_reports.commands import bench_latency


def draws(effect: float, spread: float, pairs: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).laplace(np.log1p(effect), spread / np.sqrt(2), pairs)


def test_the_interval_on_known_data() -> None:
    found = ratio_interval(draws(0.05, 0.02, 60, 0))
    assert found.low < found.ratio < found.high
    inner = np.sort(draws(0.05, 0.02, 60, 0))[15:-15]
    assert found.ratio == pytest.approx(np.exp(inner.mean()))
    assert found.differs
    assert ratio_interval(draws(0.05, 0.02, 60, 0)) == found
    mirrored = ratio_interval(-draws(0.05, 0.02, 60, 0))
    assert mirrored.ratio == pytest.approx(1 / found.ratio)
    assert mirrored.p_value == pytest.approx(found.p_value, abs=1e-3)


def test_false_alarms_and_power_on_heavy_tails() -> None:
    """More than 3 alarms in 40 have a chance of 0.07 %, more than 2 lost in 20 at power 0.995 one of 0.01 %."""
    nulls = [ratio_interval(draws(0.0, 0.02, FEWEST_BLOCKS, s)).differs for s in range(40)]
    assert sum(nulls) <= 3
    budget = choose_budget(draws(0.0, 0.02, 40, 1000), 0.03, 400)
    assert budget.sufficient
    found = [ratio_interval(draws(0.03, 0.02, budget.blocks, 2000 + s)).differs for s in range(20)]
    assert sum(found) >= 18


def test_blocks_that_were_hit_move_nothing() -> None:
    """One block in twenty off by 60 % on a machine that was quiet when the budget was made."""
    hit = draws(0.03, 0.01, FEWEST_BLOCKS, 0)
    hit[7] = -0.6
    found = ratio_interval(hit)
    assert found.differs
    assert found.ratio == pytest.approx(1.03, abs=0.01)
    assert found.spread < 0.02
    # The efficiency of that mean for normal values is 0.837.
    assert spread_of(np.random.default_rng(0).normal(0, 1, 20_000)) == pytest.approx(0.837**-0.5, rel=0.02)


def test_equal_sides_without_spread() -> None:
    same = ratio_interval(np.zeros(30))
    assert (same.ratio, same.low, same.high, same.differs) == (1.0, 1.0, 1.0, False)
    assert verdict(same, 0.01) == "no difference"


def interval(low: float, high: float, p: float = 0.0) -> Interval:
    ratio = (low * high) ** 0.5
    return Interval(ratio=ratio, low=low, high=high, p_value=p, blocks=20, alpha=0.01, spread=0.1)


@pytest.mark.parametrize(
    ("low", "high", "p", "expected"),
    [
        (0.95, 0.98, 0.001, "faster"),
        (1.02, 1.05, 0.001, "slower"),
        (0.995, 1.005, 0.5, "no difference"),
        (1.002, 1.008, 0.001, "no difference"),  # real, and too small to matter
        (0.98, 1.03, 0.5, "cannot tell"),
        (1.002, 1.05, 0.001, "slower"),
        (1.002, 1.05, 0.02, "cannot tell"),  # the bootstrap alone is not believed
    ],
)
def test_verdicts(low: float, high: float, p: float, expected: str) -> None:
    assert verdict(interval(low, high, p), 0.01) == expected


def test_the_budget_grows_with_the_spread_and_says_when_it_does_not_suffice() -> None:
    quiet, loud = (choose_budget(draws(0.0, s, 40, 0), 0.03, 400) for s in (0.06, 0.12))
    assert FEWEST_BLOCKS <= quiet.blocks < loud.blocks <= 400
    assert loud.blocks / quiet.blocks == pytest.approx(4, rel=0.1)
    hopeless = choose_budget(draws(0.0, 0.5, 40, 0), 0.03, 400)
    assert (hopeless.blocks, hopeless.sufficient) == (400, False)
    assert hopeless.detectable > 0.1
    assert quiet.spread_limit > quiet.spread


def test_bad_statistics_are_refused() -> None:
    for call, message in (
        (lambda: ratio_interval(np.zeros(19)), "19 blocks; an interval needs at least 20"),
        (lambda: ratio_interval(np.array([np.nan] * 20)), "not finite"),
        (lambda: verdict(interval(0.9, 1.1), 0.0), "margin is 0.0"),
        (lambda: choose_budget(np.zeros(40), 0.0, 400), "effect is 0.0"),
        (lambda: choose_budget(np.zeros(10), 0.03, 400), "most_blocks 400, 10 A/A blocks"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


class Script:
    """A clock that reads times from a list, and what ran."""

    def __init__(self, times: dict[str, float]) -> None:
        self.times, self.ran, self.prepared = times, "", list[tuple[str, int]]()

    def subject(self, name: str, floor: float = 0.0) -> Subject:
        def run() -> None:
            self.ran += name

        return Subject(name=name, prepare=lambda i: self.prepared.append((name, i)), run=run, floor=floor)

    def clock(self, run) -> float:  # type: ignore[no-untyped-def]
        run()
        return self.times[self.ran[-1]]


def test_pairs_interleave_in_random_order_with_fresh_inputs() -> None:
    script = Script({"A": 1.0, "B": 2.0})
    samples = time_blocks(script.subject("A"), script.subject("B"), 20, 4, clock=script.clock, seed=3)
    assert np.exp(samples.log_ratios()) == pytest.approx([2.0] * 20)
    assert samples.medians() == (1.0, 2.0)
    firsts = [first for block in samples.a_first for first in block]
    assert script.ran == "".join("AB" if first else "BA" for first in firsts)
    assert 24 < sum(firsts) < 56
    for name in "AB":
        assert [i for n, i in script.prepared if n == name] == list(range(80))
    assert msgspec.json.decode(msgspec.json.encode(samples), type=Samples) == samples


def test_a_block_is_judged_by_the_median_of_its_pairs() -> None:
    """A drift hits both runs of a pair, a hiccup one pair: neither moves the block; blocks may differ in length."""
    found = log_ratios(((1.0, 2.0, 4.0), (1.0,)), ((1.1, 2.2, 40.0), (2.0,)))
    assert np.exp(found) == pytest.approx([1.1, 2.0])
    for a, b in ((((1.0,),), ((1.0, 1.0),)), (((1.0,),), ()), (((0.0,),), ((1.0,),)), (((),), ((),))):
        with pytest.raises(ValueError, match="as many runs of A as of B"):
            log_ratios(a, b)


def test_the_collector_rests_while_pairs_are_timed() -> None:
    seen = []
    subject = Subject(name="A", prepare=lambda _i: None, run=lambda: seen.append(gc.isenabled()))
    time_blocks(subject, subject, 1, 1, clock=lambda run: (run(), 1.0)[1])
    assert (seen, gc.isenabled()) == ([False, False], True)


def test_cold_runs_overwrite_the_caches_outside_the_timed_region(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def flush(device: str) -> Callable[[], None]:
        return lambda: order.append(f"flush {device}")

    def clock(run: Callable[[], None]) -> float:
        order.append("clock")
        run()
        return 1.0

    monkeypatch.setattr(timing, "flush", flush)
    subject = Subject(name="A", prepare=lambda _i: order.append("prepare"), run=lambda: order.append("run"))
    assert time_blocks(subject, subject, 1, 1, clock=clock, cold=True).cold
    assert order == ["prepare", "flush cpu", "clock", "run"] * 2


def test_a_block_lasts_long_enough() -> None:
    script = Script({"A": 0.0003})
    assert pairs_per_block(script.subject("A"), script.clock) == 17
    assert pairs_per_block(Script({"A": 1.0}).subject("A"), lambda _run: 1.0) == 5


def test_times_below_the_floor_are_an_error() -> None:
    script = Script({"A": 1.0, "B": 0.5})
    with pytest.raises(ImpossibleTimeError, match=r"B took 0\.5 s, at or below its roofline floor of 0\.6 s"):
        time_blocks(script.subject("A"), script.subject("B", floor=0.6), 1, 1, clock=script.clock)
    with pytest.raises(ImpossibleTimeError, match="took 0 s"):
        time_blocks(script.subject("A"), script.subject("A"), 1, 1, clock=lambda _run: 0.0)


def test_the_roofline_of_the_real_model() -> None:
    """37 billion active parameters (the V3 report, without the indexer); 8 TB/s read one byte each in 4.6 ms."""
    active = active_weights(Config())
    assert 36.5e9 < active < 38.5e9
    one = step_floor(Config(), [5000])
    assert one == pytest.approx((active + 61 * (2048 * 576 * 2 + 5000 * 132)) / 8e12)
    assert step_floor(Config(), [5000], ranks=4) < one < step_floor(Config(), [5000] * 64)
    assert step_floor(Config(), [0] * 10_000) == pytest.approx(2 * active * 10_000 / MI355X_PEAKS.flop_per_s)
    assert host_peaks().bytes_per_s > 1e11
    with pytest.raises(ValueError, match="at least one request"):
        step_floor(Config(), [])


def test_without_a_gpu_the_device_parts_refuse() -> None:
    assert device_state()["device"].startswith("none: host timing only")
    with pytest.raises(RuntimeError, match="no device events"):
        device_clock(lambda: None)
    with pytest.raises(RuntimeError, match="torch sees no GPU"):
        step_subject("A", PRESETS["baseline"], Setting(batch=1, layers=1, clock="device"))


class Event:
    """A device event of a pretended GPU: the time of everything launched before it, known after a wait."""

    launched_ms = 0.0

    def __init__(self, enable_timing: bool) -> None:
        self.timed, self.waited = enable_timing, False

    def record(self) -> None:
        self.at_ms = Event.launched_ms

    def synchronize(self) -> None:
        self.waited = True

    def elapsed_time(self, end: Event) -> float:
        assert (self.timed, end.timed, end.waited) == (True, True, True)
        return end.at_ms - self.at_ms


def test_device_events_bracket_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock records, runs, records, waits, and turns milliseconds into seconds."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.Event", Event)

    def launch() -> None:
        Event.launched_ms += 1.5

    assert device_clock(launch) == pytest.approx(1.5e-3)


def test_the_state_of_a_device_is_read_or_said_to_be_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise ModuleNotFoundError("amdsmi is not installed")

    known = {"get_device_name": lambda: "MI355X", "clock_rate": lambda: 2400, "power_draw": missing}
    known |= {"temperature": lambda: 40, "utilization": lambda: 7, "is_available": lambda: True}
    for name, reader in known.items():
        monkeypatch.setattr(f"torch.cuda.{name}", reader)
    assert device_state() == {
        "device": "MI355X",
        "clock_rate": "2400",
        "power_draw": "unavailable: ModuleNotFoundError: amdsmi is not installed",
        "temperature": "40",
        "utilization": "7",
    }


def test_on_a_device_the_step_is_the_replay_of_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same subject on the CPU, with a model of graphs in the place of the device's."""
    runners = []

    def runner(sizes: tuple[int, ...]) -> ModelGraphRunner:
        runners.append(ModelGraphRunner(sizes))
        return runners[-1]

    monkeypatch.setattr(step, "CudaGraphRunner", runner)
    monkeypatch.setattr(Setting, "device", "cpu")
    setting = Setting(batch=2, layers=1, clock="device")
    subject = step_subject("A", PRESETS["pr47766"], setting)
    replays = []
    monkeypatch.setattr(runners[0], "replay", lambda size, call: replays.append((size, call.scalars)))
    for number in range(2):
        subject.prepare(number)
        subject.run()
    assert replays == [(2, {"max_model_len": setting.context + setting.page})] * 2


def test_real_kernels_get_shapes_that_they_take() -> None:
    config = Setting(batch=1, kernels="aiter").config
    assert config.n_heads in (HARDWARE.heads or ())
    assert config.index_topk in (HARDWARE.topk or ())
    assert (config.kv_lora_rank, config.qk_rope_head_dim) == (512, 64)
    assert Setting(batch=1, kernels="aiter").context > config.index_topk
    with mounted():
        subject = step_subject("A", PRESETS["pr47766"], Setting(batch=1, layers=1, part="changed", kernels="aiter"))
        subject.prepare(0)
        subject.run()


def test_the_clocks_count_what_they_say() -> None:
    """A busy loop takes at least its length of either clock."""

    def spin() -> None:
        end = time.thread_time() + 0.005
        while time.thread_time() < end:
            pass

    assert min(cpu_clock(spin), wall_clock(spin)) >= 0.005


@pytest.mark.parametrize("part", ["whole", "changed"])
def test_a_timed_step_keeps_its_batch_and_reuses_its_plan(part: Part) -> None:
    for preset, launches in (("baseline", 4), ("pr47766", 1)):
        subject = step_subject("A", PRESETS[preset], Setting(batch=3, layers=2, part=part))
        cells = {type(c.cell_contents): c.cell_contents for c in subject.run.__closure__}  # type: ignore[attr-defined]
        for number in range(4):
            subject.prepare(number)
            subject.run()
        assert cells[DecodePath].builder.counts.plan_launches == launches
    with pytest.raises(ValueError, match="batch is 0"):
        Setting(batch=0)


def test_the_changed_parts_hold_every_mixtures_router() -> None:
    """58 casts at the true depth, none with bf16 logits; and more than one run of the same inputs is never timed."""
    for preset, casts in (("baseline", 58), ("pr42982", 0)):
        subject = step_subject("A", PRESETS[preset], Setting(batch=2, part="changed"))
        cells = [c.cell_contents for c in subject.run.__closure__]  # type: ignore[attr-defined]
        (path,) = (c for c in cells if isinstance(c, DecodePath))
        (hidden,) = (c for c in cells if isinstance(c, torch.Tensor))
        subject.prepare(0)
        before = hidden.clone()
        subject.run()
        assert path.casts.bf16_to_fp32 == casts
        subject.prepare(1)
        assert not torch.equal(before, hidden)


def test_a_fresh_process_gives_samples_or_its_last_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spec = TimingSpec(
        name_a="A",
        name_b="B",
        a=PRESETS["baseline"],
        b=resolve("pr47766"),
        setting=Setting(batch=1, layers=1, part="changed"),
        blocks=2,
        pairs=1,
    )
    samples = time_in_fresh_process(spec)
    assert (len(samples.blocks_a), len(samples.blocks_b[0]), samples.a) == (2, 1, "A")
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho Traceback >&2\necho out of memory >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(broken))
    with pytest.raises(RuntimeError, match="timing process ended with 3: out of memory"):
        time_in_fresh_process(spec)


def test_comparisons_are_each_alone_each_last_and_all() -> None:
    found = {c.name: c for c in comparisons(resolve("pr47766"), attribute=True)}
    assert list(found) == ["all", *(f"{c} {w}" for c in ("router", "cache", "clear") for w in ("alone", "last"))]
    assert found["cache alone"].b == resolve("baseline", ("key=pr47766",))
    assert found["router last"].a == resolve("pr47766", ("logits=fp32", "bias=fp32"))
    assert all(c.b == resolve("pr47766") for name, c in found.items() if "alone" not in name)
    assert [c.name for c in comparisons(resolve("baseline", ("clear=tail",)), attribute=True)] == [
        "all",
        "clear alone",
        "clear last",
    ]
    with pytest.raises(ValueError, match="those of the baseline"):
        comparisons(PRESETS["baseline"], attribute=False)


def fake_timer(monkeypatch: pytest.MonkeyPatch, null: float, other: float) -> None:
    """Samples whose log ratios are drawn around log(1 + null) of equal sides, log(1 + other) of different ones."""
    calls = itertools.count()

    def time_spec(spec: TimingSpec) -> Samples:
        logs = draws(null if spec.a == spec.b else other, 0.02, spec.blocks, next(calls))
        return Samples(
            a="A",
            b="B",
            blocks_a=((1.0,),) * spec.blocks,
            blocks_b=tuple((float(np.exp(v)),) for v in logs),
            a_first=((True,),) * spec.blocks,
            cold=False,
            seed=0,
        )

    monkeypatch.setattr(attribution, "time_spec", time_spec)


def test_a_difference_between_equal_sides_withholds_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """The A/A run comes first; the budget is made from it; nothing is said where it fails."""
    wanted, setting = comparisons(resolve("pr47766"), attribute=False), Setting(batch=1)
    fake_timer(monkeypatch, 0.0, -0.3)
    early, fine = time_setting(wanted, setting, Plan(seconds=600))
    assert (early.compared, early.budget) == ((), fine.budget)
    assert [t.verdict for t in fine.compared] == ["faster"]
    assert fine.compared[0].interval.blocks == fine.budget.blocks
    assert len(fine.states) == 2
    fake_timer(monkeypatch, 0.3, -0.3)
    *_, odd = time_setting(wanted, setting, Plan(seconds=600))
    assert odd.null.interval.differs
    assert [t.verdict for t in odd.compared] == ["cannot tell"]


def test_noise_that_grew_since_the_equal_pair_asks_for_more_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_timer(monkeypatch, 0.0, -0.3)
    quiet, asked = attribution.time_spec, list[tuple[int, int]]()

    def time_spec(spec: TimingSpec) -> Samples:
        asked.append((spec.blocks, spec.seed))
        samples = quiet(spec)
        if spec.a == spec.b:
            return samples
        logs = draws(-0.3, 0.2, spec.blocks, spec.seed)
        return msgspec.structs.replace(samples, blocks_b=tuple((float(np.exp(v)),) for v in logs))

    monkeypatch.setattr(attribution, "time_spec", time_spec)
    wanted = comparisons(resolve("pr47766"), attribute=False)
    *_, found = time_setting(wanted, Setting(batch=1), Plan(seconds=600))
    (_, first, second) = asked
    assert first == (found.budget.blocks, 0)
    assert second[0] > 5 * first[0]
    assert second[1] == attribution.MORE
    assert second[0] + first[0] <= 600 / 2  # of 2 s a pair
    assert found.compared[0].interval.blocks == first[0] + second[0]


def test_an_equal_pair_that_differs_by_chance_is_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_timer(monkeypatch, 0.0, -0.3)
    quiet, asked = attribution.time_spec, list[int]()
    fake_timer(monkeypatch, 0.3, -0.3)
    odd = attribution.time_spec

    def time_spec(spec: TimingSpec) -> Samples:
        asked.append(spec.seed)
        return (odd if len(asked) == 1 else quiet)(spec)

    monkeypatch.setattr(attribution, "time_spec", time_spec)
    wanted = comparisons(resolve("pr47766"), attribute=False)
    *_, found = time_setting(wanted, Setting(batch=1), Plan(seconds=600))
    assert asked == [0, attribution.AGAIN, 0]
    assert not found.null.interval.differs
    assert [t.verdict for t in found.compared] == ["faster"]


def test_bench_step_on_the_command_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One row per comparison of whole step and changed parts; the evidence file says what it is and is not."""
    fake_timer(monkeypatch, 0.0, -0.3)
    out = tmp_path / "evidence.json"
    done = CliRunner().invoke(app, ["bench", "step", "--batches", "1,16", "--attribute", "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert "no latency of a GPU" in done.stdout
    found = read_evidence(out)
    assert (found.kind, found.complete, found.admissible) == ("emulated", True, False)
    assert len(found.null) == 4
    assert [c.name for c in found.compared[:3]] == [
        "batch 1, whole: all",
        "batch 16, whole: all",
        "batch 1, changed: all",
    ]
    assert len(found.compared) == 2 + 2 * 7
    assert {c.verdict for c in found.compared} == {"faster"}
    fake_timer(monkeypatch, 0.0, 0.3)
    slower = CliRunner().invoke(app, ["bench", "step", "--batches", "1", "--json"])
    assert slower.exit_code == 1, slower.output
    assert json.loads(slower.stdout)["timings"][0]["compared"][0]["verdict"] == "slower"


@pytest.mark.parametrize(("usable", "kind"), [(True, "device"), (False, "emulated")])
def test_with_a_gpu_device_events_are_the_default(
    usable: bool, kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Evidence of a device needs AITER's kernels; its state is read after every comparison and shown."""
    fake_timer(monkeypatch, 0.0, -0.3)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(attribution, "device_state", lambda: {"device": "MI355X", "clock_rate": "2400"})
    monkeypatch.setattr(bench_latency, "_aiter_is_usable", lambda: usable)
    out = tmp_path / "evidence.json"
    done = CliRunner().invoke(app, ["bench", "step", "--batches", "1", "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert "device MI355X, clock_rate 2400" in done.stdout
    assert ("no latency of a GPU" in done.stdout) is not usable
    found = read_evidence(out)
    assert (found.kind, found.admissible, len(found.device)) == (kind, usable, 2)


def test_an_interrupt_keeps_what_was_compared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_timer(monkeypatch, 0.0, -0.3)
    timer, calls = attribution.time_spec, itertools.count()

    def stop(spec: TimingSpec) -> Samples:
        if next(calls) == 3:
            raise KeyboardInterrupt
        return timer(spec)

    monkeypatch.setattr(attribution, "time_spec", stop)
    out = tmp_path / "evidence.json"
    done = CliRunner().invoke(app, ["bench", "step", "--batches", "1,16", "--out", str(out)])
    assert done.exit_code == 130, done.output
    assert "0.7" in done.stdout
    found = read_evidence(out)
    assert (found.complete, [c.name for c in found.compared]) == (False, ["batch 1, whole: all"])


def test_a_lost_process_is_inconclusive_and_loses_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_timer(monkeypatch, 0.0, -0.3)
    timer, calls = attribution.time_spec, itertools.count()

    def lose(spec: TimingSpec) -> Samples:
        if next(calls) == 5:
            raise RuntimeError("the timing process ended with -9: no message")
        return timer(spec)

    monkeypatch.setattr(attribution, "time_in_fresh_process", lose)
    out = tmp_path / "evidence.json"
    arguments = ["bench", "step", "--batches", "1,16", "--processes", "2", "--out", str(out)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 3, done.output
    assert "ended with -9" in done.stderr
    assert not read_evidence(out).complete


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batches", "1,x"], "--batches is '1,x'"),
        (["--options", "baseline"], "those of the baseline"),
        (["--effect", "0"], "must be positive"),
        (["--clock", "sun"], "choose cpu, wall or device"),
        (["--clock", "device"], "torch sees no GPU"),
    ],
)
def test_bad_options_of_bench_step(arguments: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["bench", "step", *arguments])
    assert done.exit_code == 2
    assert message in done.stderr
