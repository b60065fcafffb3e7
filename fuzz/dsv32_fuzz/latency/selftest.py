"""Does the timing tell noise from change on this machine: false alarms on A/A runs, power on a known slowdown.

The subject is small and does real host work: the metadata builder on a step of 64 requests, behind hollow kernels. An
A/A run sets the budget for the effect; with that budget identical sides are compared `null_runs` times, and a side
whose step is prolonged by a busy loop of known CPU time `effect_runs` times. The subjects are real, so that the
rates are those of the method on this machine, not of a simulation.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
import numpy as np
import torch
from scipy import stats

from dsv32_fast.batch import StepBatch
from dsv32_fast.metadata import BuilderConfig, MetadataBuilder
from dsv32_fast.options import PRESETS
from dsv32_fuzz.latency.seam import HollowKernels
from dsv32_fuzz.latency.statistics import ALPHA, FEWEST_PAIRS, Budget, choose_budget, ratio_interval
from dsv32_fuzz.latency.timing import Samples, Subject, cpu_clock, runs_per_block, time_pairs

BATCH, ROWS, CONTEXT, INPUTS = 64, 512, 5000, 997
REQUIRED_POWER = 0.97
NULL_PAIRS = 2 * FEWEST_PAIRS
MOST_PAIRS = 400
Progress = Callable[[int, int], None]


class SelfTest(msgspec.Struct, frozen=True, kw_only=True):
    """What the self-test found; `verdict` says what follows from it."""

    budget: Budget
    block: int
    """Runs per block."""
    step_s: float
    """Median step of the A/A run, CPU time in seconds."""
    busy_s: float
    """The busy loop: `budget.effect` of it."""
    null_runs: int
    false_alarms: int
    false_alarm_limit: int
    """The 99.8 % quantile of the false alarms at the nominal rate: 7 of 200 at 1 %."""
    effect_runs: int
    detected: int
    required_power: float = REQUIRED_POWER

    @property
    def power(self) -> float:
        """Share of the injected slowdowns that were called slower."""
        return self.detected / self.effect_runs

    @property
    def failures(self) -> list[str]:
        """What is not as it should be; where the effect is undetectable nothing is asked of the power."""
        found = []
        if self.false_alarms > self.false_alarm_limit:
            found.append(f"{self.false_alarms} false alarms in {self.null_runs}, limit {self.false_alarm_limit}")
        if self.budget.sufficient and self.power < self.required_power:
            found.append(f"power {self.power:.2f}, required {self.required_power}")
        return found

    @property
    def verdict(self) -> str:
        """PASSED, FAILED, or UNDETECTABLE where the budget allowed does not reach the effect."""
        if self.failures:
            return "FAILED"
        return "PASSED" if self.budget.sufficient else "UNDETECTABLE"


def builder_subject(name: str, busy_s: float = 0.0) -> Subject:
    """One metadata build per run, its lengths other ones each time, then a busy loop of `busy_s` CPU seconds."""
    config = BuilderConfig(max_num_batched_tokens=ROWS)
    builder = MetadataBuilder(config=config, options=PRESETS["pr47766"], kernels=HollowKernels())
    lens_SB = np.random.default_rng(0).integers(CONTEXT, 2 * CONTEXT, (INPUTS, BATCH))
    inputs = [StepBatch(query_lens=(1,) * BATCH, seq_lens=tuple(lens_B)) for lens_B in lens_SB.tolist()]
    chosen = [inputs[0]]

    def prepare(number: int) -> None:
        chosen[0] = inputs[number % INPUTS]

    def run() -> None:
        builder.build(chosen[0])
        if busy_s:
            spin(busy_s)

    return Subject(name=name, prepare=prepare, run=run)


def spin(seconds: float) -> None:
    """Burn `seconds` of this thread's CPU time."""
    end = time.thread_time_ns() + round(seconds * 1e9)
    while time.thread_time_ns() < end:
        pass


def selftest(
    effect: float = 0.03,
    null_runs: int = 200,
    effect_runs: int = 50,
    most_pairs: int = MOST_PAIRS,
    seed: int = 0,
    progress: Progress | None = None,
) -> SelfTest:
    """Measure false alarms and power, on one thread.

    Args:
        effect: the slowdown to detect, as a share of the step.
        null_runs, effect_runs: comparisons of identical sides, and with the slowdown.
        most_pairs: the largest budget.
        seed: of orders and resampling.
        progress: called with (comparisons done, all).

    Raises:
        ValueError: an effect, a number of runs or a budget that is too small.
    """
    if null_runs < 1 or effect_runs < 1:
        raise ValueError(f"null_runs {null_runs} and effect_runs {effect_runs} must be positive")
    torch.set_num_threads(1)
    a, b = builder_subject("A"), builder_subject("A again")
    block = max(runs_per_block(a), runs_per_block(b))
    null = time_pairs(a, b, NULL_PAIRS, block, clock=cpu_clock, seed=seed)
    budget = choose_budget(null.log_ratios(), effect, most_pairs)
    step_s = null.medians()[0]
    slower = builder_subject("slower", effect * step_s)
    runs_per_block(slower)
    total = null_runs + effect_runs
    alarms = detected = 0
    for i in range(total):
        other = b if i < null_runs else slower
        samples = time_pairs(a, other, budget.pairs, block, clock=cpu_clock, seed=seed + 1 + i)
        alarms += i < null_runs and _differs(samples, seed + i)
        detected += i >= null_runs and _differs(samples, seed + i, slower=True)
        if progress is not None:
            progress(i + 1, total)
    return SelfTest(
        budget=budget,
        block=block,
        step_s=step_s,
        busy_s=effect * step_s,
        null_runs=null_runs,
        false_alarms=alarms,
        false_alarm_limit=int(stats.binom.ppf(0.998, null_runs, ALPHA)),
        effect_runs=effect_runs,
        detected=detected,
    )


def _differs(samples: Samples, seed: int, slower: bool = False) -> bool:
    found = ratio_interval(samples.log_ratios(), seed=seed)
    return found.differs and (found.ratio > 1 or not slower)
