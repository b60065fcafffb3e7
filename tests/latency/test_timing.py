"""Interval, verdict, budget, pairs and the roofline on known data. Nothing here judges a measured time."""

from __future__ import annotations

import dataclasses
import itertools

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from dsv32_fast.options import PRESETS, resolve
from dsv32_fuzz.latency import attribution, step
from dsv32_fuzz.latency.attribution import Plan, comparisons, time_batch
from dsv32_fuzz.latency.device import device_state, graphed
from dsv32_fuzz.latency.roofline import MI355X_PEAKS, active_weights, host_peaks, step_floor
from dsv32_fuzz.latency.selftest import SelfTest, selftest, spin
from dsv32_fuzz.latency.statistics import FEWEST_PAIRS, Interval, choose_budget, ratio_interval, verdict
from dsv32_fuzz.latency.step import PairSpec, step_subject, time_in_fresh_process
from dsv32_fuzz.latency.timing import (
    ImpossibleTimeError,
    Samples,
    Subject,
    cpu_clock,
    device_clock,
    runs_per_block,
    time_pairs,
    wall_clock,
)
from dsv32_ref.config import Config
from dsv32_reports.cli import app


def draws(effect: float, spread: float, pairs: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).laplace(np.log1p(effect), spread / np.sqrt(2), pairs)


def test_the_interval_on_known_data() -> None:
    found = ratio_interval(draws(0.05, 0.02, 60, 0))
    assert found.low < found.ratio < found.high
    assert found.ratio == pytest.approx(np.exp(draws(0.05, 0.02, 60, 0).mean()))
    assert found.differs
    assert ratio_interval(draws(0.05, 0.02, 60, 0)) == found
    mirrored = ratio_interval(-draws(0.05, 0.02, 60, 0))
    assert mirrored.ratio == pytest.approx(1 / found.ratio)
    assert mirrored.p_value == pytest.approx(found.p_value, abs=1e-3)


def test_false_alarms_and_power_on_heavy_tails() -> None:
    """More than 5 alarms in 100 have a chance of 0.05 %, more than 3 lost in 40 at power 0.995 one of 5e-5."""
    nulls = [ratio_interval(draws(0.0, 0.02, FEWEST_PAIRS, s)).differs for s in range(100)]
    assert sum(nulls) <= 5
    budget = choose_budget(draws(0.0, 0.02, 40, 1000), 0.03, 400)
    assert budget.sufficient
    found = [ratio_interval(draws(0.03, 0.02, budget.pairs, 2000 + s)).differs for s in range(40)]
    assert sum(found) >= 37


def test_equal_sides_without_spread() -> None:
    same = ratio_interval(np.zeros(30))
    assert (same.ratio, same.low, same.high, same.differs) == (1.0, 1.0, 1.0, False)
    assert verdict(same, 0.01) == "no difference"


def interval(low: float, high: float, p: float = 0.0) -> Interval:
    ratio = (low * high) ** 0.5
    return Interval(ratio=ratio, low=low, high=high, p_value=p, pairs=20, alpha=0.01, spread=0.1)


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
    quiet, loud = (choose_budget(draws(0.0, s, 40, 0), 0.03, 400) for s in (0.02, 0.06))
    assert FEWEST_PAIRS <= quiet.pairs < loud.pairs <= 400
    assert loud.pairs / quiet.pairs == pytest.approx(9, rel=0.1)
    hopeless = choose_budget(draws(0.0, 0.5, 40, 0), 0.03, 400)
    assert (hopeless.pairs, hopeless.sufficient) == (400, False)
    assert hopeless.detectable > 0.1
    assert quiet.spread_limit > quiet.spread


def test_bad_statistics_are_refused() -> None:
    for call, message in (
        (lambda: ratio_interval(np.zeros(19)), "19 pairs; an interval needs at least 20"),
        (lambda: ratio_interval(np.array([np.nan] * 20)), "not finite"),
        (lambda: verdict(interval(0.9, 1.1), 0.0), "margin is 0.0"),
        (lambda: choose_budget(np.zeros(40), 0.0, 400), "effect is 0.0"),
        (lambda: choose_budget(np.zeros(10), 0.03, 400), "most_pairs 400 of 10"),
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
    samples = time_pairs(script.subject("A"), script.subject("B"), 40, 2, clock=script.clock, seed=3)
    assert np.exp(samples.log_ratios()) == pytest.approx([2.0] * 40)
    assert samples.medians() == (1.0, 2.0)
    expected = "".join("AABB" if first else "BBAA" for first in samples.a_first)
    assert script.ran == expected
    assert 8 < sum(samples.a_first) < 32
    for name in "AB":
        assert [i for n, i in script.prepared if n == name] == list(range(80))
    assert msgspec.json.decode(msgspec.json.encode(samples), type=Samples) == samples


def test_a_block_lasts_long_enough() -> None:
    script = Script({"A": 0.003})
    assert runs_per_block(script.subject("A"), script.clock) == 7
    assert runs_per_block(Script({"A": 1.0}).subject("A"), lambda _run: 1.0) == 1


def test_times_below_the_floor_are_an_error() -> None:
    script = Script({"A": 1.0, "B": 0.5})
    with pytest.raises(ImpossibleTimeError, match=r"B took 0\.5 s, at or below its roofline floor of 0\.6 s"):
        time_pairs(script.subject("A"), script.subject("B", floor=0.6), 1, 1, clock=script.clock)
    with pytest.raises(ImpossibleTimeError, match="took 0 s"):
        time_pairs(script.subject("A"), script.subject("A"), 1, 1, clock=lambda _run: 0.0)


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
    with pytest.raises(RuntimeError, match="no graphs"):
        graphed(lambda: None)


def test_the_clocks_count_what_they_say() -> None:
    """CPU time of a busy loop is at least its length; a sleep takes wall time that the CPU clock does not see."""
    assert cpu_clock(lambda: spin(0.005)) >= 0.005
    assert wall_clock(lambda: spin(0.005)) >= 0.005


def test_a_timed_step_keeps_its_batch_and_reuses_its_plan() -> None:
    for preset, launches in (("baseline", 4), ("pr47766", 1)):
        subject = step_subject("A", PRESETS[preset], batch=3, layers=2)
        path = subject.run.__closure__[0].cell_contents  # type: ignore[index]
        for number in range(4):
            subject.prepare(number)
            subject.run()
        assert path.builder.counts.plan_launches == launches
    with pytest.raises(ValueError, match="batch is 0"):
        step_subject("A", PRESETS["baseline"], batch=0)


def test_a_fresh_process_gives_samples_or_its_last_line() -> None:
    spec = PairSpec(
        name_a="A", name_b="B", a=PRESETS["baseline"], b=resolve("pr47766"), batch=1, layers=1, pairs=2, block=1
    )
    samples = time_in_fresh_process(spec)
    assert (len(samples.blocks_a), len(samples.blocks_b[0]), samples.a) == (2, 1, "A")
    with pytest.raises(RuntimeError, match=r"timing process ended with 1: .*batch is 0"):
        time_in_fresh_process(msgspec.structs.replace(spec, batch=0))


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


def test_a_difference_between_equal_sides_withholds_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """The A/A run comes first; the budget is made from it; nothing is said where it fails."""
    calls = itertools.count()

    def timer(shift: float):  # type: ignore[no-untyped-def]
        def time_spec(spec: PairSpec) -> Samples:
            null = spec.a == spec.b
            logs = draws(shift if null else -0.5, 0.02, spec.pairs, next(calls))
            blocks = tuple((float(np.exp(v)),) for v in logs)
            ones = ((1.0,),) * spec.pairs
            return Samples(
                a="A", b="B", blocks_a=ones, blocks_b=blocks, a_first=(True,) * spec.pairs, cold=False, seed=0
            )

        return time_spec

    monkeypatch.setattr(attribution, "time_spec", timer(0.0))
    fine = time_batch(resolve("pr47766"), 1, Plan(seconds=600))
    assert [t.verdict for t in fine.compared] == ["faster"]
    assert fine.compared[0].interval.pairs == fine.budget.pairs
    monkeypatch.setattr(attribution, "time_spec", timer(0.3))
    odd = time_batch(resolve("pr47766"), 1, Plan(seconds=600))
    assert odd.null.interval.differs
    assert [t.verdict for t in odd.compared] == ["cannot tell"]


def test_the_selftest_runs_and_its_verdict_can_fail() -> None:
    found = selftest(effect=0.5, null_runs=1, effect_runs=1, most_pairs=20)
    assert (found.null_runs, found.effect_runs) == (1, 1)
    assert found.busy_s == pytest.approx(0.5 * found.step_s)
    good = dataclasses_replace(found, null_runs=200, false_alarms=7, false_alarm_limit=7, effect_runs=50, detected=49)
    assert not good.failures
    assert dataclasses_replace(good, false_alarms=8).failures == ["8 false alarms in 200, limit 7"]
    budget = msgspec.structs.replace(found.budget, detectable=0.4, effect=0.5)
    weak = dataclasses_replace(good, detected=48, budget=budget)
    assert (weak.verdict, weak.failures) == ("FAILED", ["power 0.96, required 0.97"])
    hopeless = msgspec.structs.replace(budget, detectable=0.6)
    assert dataclasses_replace(weak, budget=hopeless).verdict == "UNDETECTABLE"


def dataclasses_replace(found: SelfTest, **changes: object) -> SelfTest:
    return msgspec.structs.replace(found, **changes)


def test_the_limit_is_seven_of_two_hundred() -> None:
    from scipy import stats

    assert stats.binom.ppf(0.998, 200, 0.01) == 7


def test_bench_step_on_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        step,
        "NARROW",
        dataclasses.replace(
            step.NARROW, n_routed_experts=8, n_expert_groups=2, n_limited_groups=1, n_activated_experts=2
        ),
    )
    done = CliRunner().invoke(app, ["bench", "step", "--batches", "1", "--layers", "1", "--seconds", "0.1"])
    assert done.exit_code in (0, 1), done.output
    assert "no latency of a GPU" in done.stdout
    for arguments, message in (
        (["--batches", "1,x"], "--batches is '1,x'"),
        (["--options", "baseline"], "those of the baseline"),
        (["--effect", "0"], "must be positive"),
    ):
        done = CliRunner().invoke(app, ["bench", "step", *arguments])
        assert done.exit_code == 2
        assert message in done.stderr
