"""The self-test of the timing: its trials, its file, and a verdict that can fail. No measured time is judged here."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
from scipy import stats
from typer.testing import CliRunner

from dsv32_fuzz.latency import selftest
from dsv32_fuzz.latency.selftest import SelfTestSpec, Trial, builder_subject, keep_trial, kept_trials, summary, trials
from dsv32_fuzz.latency.statistics import choose_budget, ratio_interval, verdict
from dsv32_fuzz.latency.timing import Samples, Subject
from dsv32_reports.cli import app


def timed(effect: float, number: int, slowed: bool, spread: float = 0.01) -> Trial:
    """A trial of 20 blocks with known ratios."""
    rng = np.random.default_rng(number)
    budget = choose_budget(rng.normal(0, spread, 100), 0.03, 100)
    ratios = np.exp(rng.normal(np.log1p(effect), spread, 20)).tolist()
    samples = Samples(
        a="A",
        b="B",
        blocks_a=((1e-4,),) * 20,
        blocks_b=tuple((1e-4 * ratio,) for ratio in ratios),
        a_first=((True,),) * 20,
        cold=False,
        seed=0,
    )
    interval = ratio_interval(samples.log_ratios())
    return Trial(
        number=number,
        slowed=slowed,
        budget=budget,
        interval=interval,
        verdict=verdict(interval, 0.01),
        samples=(samples,),
    )


SPEC = SelfTestSpec(null_runs=8, effect_runs=2)


def all_trials(null: float = 0.0, slowed: float = 0.03) -> list[Trial]:
    return [timed(slowed if SPEC.slowed(i) else null, i, SPEC.slowed(i)) for i in range(SPEC.trials)]


def test_the_two_kinds_take_turns() -> None:
    spec = SelfTestSpec()
    slowed = [spec.slowed(i) for i in range(spec.trials)]
    assert (spec.trials, sum(slowed)) == (250, 50)
    assert slowed[:10] == [False, False, False, False, True] * 2


def test_the_limit_is_seven_of_two_hundred() -> None:
    assert stats.binom.ppf(0.998, 200, 0.01) == 7


def test_verdicts_can_fail() -> None:
    good = summary(SPEC, all_trials())
    assert (good.verdict, good.null_runs, good.false_alarms, good.effect_runs, good.detected) == ("PASSED", 8, 0, 2, 2)
    alarming = summary(SPEC, all_trials(null=0.03))
    assert (alarming.verdict, alarming.failures) == ("FAILED", ["8 false alarms in 8, limit 2"])
    blind = summary(SPEC, all_trials(slowed=0.0))
    assert (blind.verdict, blind.failures) == ("FAILED", ["power 0.00, required 0.97"])
    # Equal sides that differ by less than the margin are no alarm, and are counted.
    small = summary(SPEC, [timed(0.005, i, False, spread=0.001) for i in range(8)])
    assert (small.false_alarms, small.small_differences) == (0, 8)
    # Faster is no detection of a slowdown.
    assert summary(SPEC, all_trials(slowed=-0.03)).detected == 0
    assert summary(SPEC, all_trials()[:7]).verdict == "INCOMPLETE"
    hopeless = [timed(0.0, i, SPEC.slowed(i), spread=0.5) for i in range(SPEC.trials)]
    assert summary(SPEC, hopeless).verdict == "UNDETECTABLE"
    with pytest.raises(ValueError, match="no trial was finished"):
        summary(SPEC, [])


def test_budgets_follow_the_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the A/A runs before a trial, and of the trial itself; one with the slowdown never feeds a later budget."""
    asked: list[tuple[str, int]] = []

    def time_blocks(_a: Subject, b: Subject, blocks: int, pairs: int, *, clock: object, seed: int) -> Samples:
        asked.append((b.name, blocks))
        spread = 0.12 if b.name == "slower" else 0.06
        ratios = np.exp(np.random.default_rng(seed).normal(0, spread, blocks)).tolist()
        sides = (((1.0,) * pairs,) * blocks, tuple((ratio,) * pairs for ratio in ratios))
        firsts = ((True,) * pairs,) * blocks
        return Samples(a="A", b=b.name, blocks_a=sides[0], blocks_b=sides[1], a_first=firsts, cold=False, seed=seed)

    known = ratio_interval(np.zeros(20))
    monkeypatch.setattr(selftest, "time_blocks", time_blocks)
    monkeypatch.setattr(selftest, "ratio_interval", lambda _logs, **_: known)
    found = list(trials(SelfTestSpec(null_runs=6, effect_runs=3)))
    assert asked[0] == ("A again", selftest.NULL_BLOCKS)
    assert [trial.slowed for trial in found] == [False, False, True] * 3
    null, slowed = ([t.budget.blocks for t in found if t.slowed is kind] for kind in (False, True))
    expected = (0.06 * 1.093 * 1.1 * 5.15 / np.log(1.03)) ** 2
    assert 0.5 * expected < min(null) <= max(null) < 2 * expected
    # Twice the noise within the trial: a second stage of three times the first.
    assert 2 < min(slowed) / expected < max(slowed) / expected < 8
    for trial in found:
        assert sum(len(one.blocks_a) for one in trial.samples) == trial.budget.blocks
        assert len(trial.samples) == 2 or not trial.slowed
    assert next(trials(SelfTestSpec(null_runs=6, effect_runs=3), done=8)).number == 8


def test_trials_run_for_real(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "NULL_BLOCKS", 20)
    (trial,) = trials(SelfTestSpec(effect=0.5, null_runs=1, effect_runs=1, most_blocks=20), done=1)
    assert (trial.slowed, trial.budget.blocks, len(trial.samples)) == (True, 20, 1)
    assert min(trial.samples[0].blocks_a[0]) > 0


def test_the_busy_loop_is_the_share_of_the_build_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that every look moves by 1 us: a build of 1 us, one look, then a loop of five looks."""
    now = [0]

    def look() -> int:
        now[0] += 1000
        return now[0]

    monkeypatch.setattr("time.thread_time_ns", look)
    looks = {}
    for effect in (0.0, 5.0):
        subject = builder_subject("A", effect)
        subject.prepare(0)
        now[0] = 0
        subject.run()
        looks[effect] = now[0] // 1000
    assert looks == {0.0: 3, 5.0: 8}


def test_a_run_goes_on_behind_its_last_whole_trial(tmp_path: Path) -> None:
    path, done = tmp_path / "trials.jsonl", all_trials()
    assert kept_trials(path, SPEC) == []
    for trial in done[:3]:
        keep_trial(path, trial)
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"number": 3, "slo')
    assert kept_trials(path, SPEC) == done[:3]
    assert path.read_bytes() == whole
    with pytest.raises(ValueError, match="of a run with other options"):
        kept_trials(path, SelfTestSpec(seed=1))
    path.write_bytes(msgspec.json.encode(SPEC) + b"\n" + msgspec.json.encode(done[1]) + b"\n")
    with pytest.raises(ValueError, match="of a run with other options"):
        kept_trials(path, SPEC)
    path.write_bytes(b"hello\n")
    with pytest.raises(ValueError, match="holds no trials"):
        kept_trials(path, SPEC)


def test_the_command_stops_and_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    known = all_trials()

    def some(_spec: SelfTestSpec, done: int = 0):  # type: ignore[no-untyped-def]
        yield from known[done : done + 4]
        if done == 0:
            raise KeyboardInterrupt
        yield from known[done + 4 :]

    monkeypatch.setattr("dsv32_reports.commands.bench_latency.trials", some)
    out = tmp_path / "trials.jsonl"
    arguments = ["bench", "selftest", "--null-runs", "8", "--effect-runs", "2", "--out", str(out)]
    stopped = CliRunner().invoke(app, arguments)
    assert stopped.exit_code == 130, stopped.output
    assert "INCOMPLETE" in stopped.stdout
    assert "goes on behind trial 4 of 10" in stopped.stdout
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("PASSED: cpu time")
    assert kept_trials(out, SPEC) == known
    again = CliRunner().invoke(app, [*arguments, "--json"])
    assert json.loads(again.stdout)["detected"] == 2
    bad = CliRunner().invoke(app, ["bench", "selftest", "--clock", "device"])
    assert (bad.exit_code, "choose cpu or wall" in bad.stderr) == (2, True)
