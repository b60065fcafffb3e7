"""Does the timing tell noise from change on this machine: false alarms on A/A runs, power on a known slowdown.

The subject is small and does real host work: the metadata builder on a step of 64 requests, behind hollow kernels. A
trial compares it with an identical one, or with one whose step is prolonged by a busy loop of known length. The two
kinds take turns, so that a machine that others use too treats both alike. Every trial has the budget that the latest
A/A runs before it ask for, and more blocks if its own spread asks for them; so the method is tested as `dsv32 bench
step` uses it, on this machine, not in a simulation.

Trials are kept in a file, one JSON line each with every raw sample; a run that was cut short goes on behind the last.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import torch
from scipy import stats

from dsv32_fast.batch import StepBatch
from dsv32_fast.metadata import BuilderConfig, MetadataBuilder
from dsv32_fast.options import PRESETS
from dsv32_fuzz.latency.seam import HollowKernels
from dsv32_fuzz.latency.statistics import ALPHA, Budget, Interval, Verdict, choose_budget, ratio_interval, verdict
from dsv32_fuzz.latency.timing import CLOCKS, Samples, Subject, joined, pairs_per_block, time_blocks

BATCH, ROWS, CONTEXT, INPUTS = 64, 512, 5000, 997
REQUIRED_POWER = 0.97
NULL_BLOCKS = 100
"""The latest A/A blocks, which the budget is chosen from."""
MOST_BLOCKS = 1000


class SelfTestSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure.

    Raises:
        ValueError: a number that is too small, named.
    """

    effect: float = 0.03
    """The slowdown to detect, as a share of the step."""
    margin: float = 0.01
    """Smallest effect that matters, as in `dsv32 bench step`."""
    null_runs: int = 200
    effect_runs: int = 50
    most_blocks: int = MOST_BLOCKS
    """The largest budget."""
    clock: Literal["cpu", "wall"] = "cpu"
    seed: int = 0

    def __post_init__(self) -> None:
        """Validate."""
        if not self.effect > 0 or self.null_runs < 1 or self.effect_runs < 1:
            raise ValueError(
                f"effect {self.effect}, {self.null_runs} and {self.effect_runs} runs: all must be positive"
            )

    @property
    def trials(self) -> int:
        """Of both kinds."""
        return self.null_runs + self.effect_runs

    def slowed(self, number: int) -> bool:
        """Whether trial `number` has the slowdown: the two kinds take turns, in proportion."""
        return (number + 1) * self.effect_runs // self.trials > number * self.effect_runs // self.trials


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One comparison with its raw samples."""

    number: int
    slowed: bool
    budget: Budget
    """By the latest A/A runs, or by the trial's own spread if that asks for more."""
    interval: Interval
    verdict: Verdict
    samples: tuple[Samples, ...]

    @property
    def hit(self) -> bool:
        """A false alarm; with the slowdown, that B was called slower."""
        return self.verdict == "slower" or (not self.slowed and self.verdict == "faster")


class SelfTest(msgspec.Struct, frozen=True, kw_only=True):
    """What the trials say; `verdict` says what follows from it."""

    spec: SelfTestSpec
    pairs: int
    """Runs of each side per block."""
    blocks: tuple[int, int, int]
    """The budget: least, median and largest of the trials."""
    spread: float
    """Median over the trials of the A/A spread per block."""
    step_s: float
    """Median step, in seconds of the clock."""
    null_runs: int
    false_alarms: int
    """Identical sides of which one was called faster or slower."""
    small_differences: int
    """Identical sides that differ by the statistics, and by less than the margin: their verdict is no alarm."""
    false_alarm_limit: int
    """The 99.8 % quantile of the false alarms at the nominal rate: 7 of 200 at 1 %."""
    effect_runs: int
    detected: int
    undetectable: int
    """Trials with the slowdown whose budget did not suffice, by what the machine did before or meanwhile."""
    required_power: float = REQUIRED_POWER

    @property
    def complete(self) -> bool:
        """Whether all trials are there."""
        return (self.null_runs, self.effect_runs) == (self.spec.null_runs, self.spec.effect_runs)

    @property
    def failures(self) -> list[str]:
        """What is not as it should be; where the effect is undetectable nothing is asked of the power."""
        found = []
        if self.false_alarms > self.false_alarm_limit:
            found.append(f"{self.false_alarms} false alarms in {self.null_runs}, limit {self.false_alarm_limit}")
        if not self.undetectable and self.detected < self.required_power * self.effect_runs:
            found.append(f"power {self.detected / self.effect_runs:.2f}, required {self.required_power}")
        return found

    @property
    def verdict(self) -> Literal["PASSED", "FAILED", "UNDETECTABLE", "INCOMPLETE"]:
        """FAILED beats all; UNDETECTABLE if the budget did not always suffice; INCOMPLETE if trials are missing."""
        if self.failures:
            return "FAILED"
        if not self.complete:
            return "INCOMPLETE"
        return "UNDETECTABLE" if self.undetectable else "PASSED"


def builder_subject(name: str, effect: float = 0.0) -> Subject:
    """One metadata build per run, its lengths other ones each time, then a busy loop of `effect` times its CPU time.

    The loop is as long as the share asks for of the very build before it, so that it is known whatever else the machine
    does. It ends half a look at the clock late on average, so that half of one is taken off; on a busy machine a look
    takes a microsecond or two. Without an effect the same looks are taken, and there is no loop.
    """
    config = BuilderConfig(max_num_batched_tokens=ROWS)
    builder = MetadataBuilder(config=config, options=PRESETS["pr47766"], kernels=HollowKernels())
    lens_SB = np.random.default_rng(0).integers(CONTEXT, 2 * CONTEXT, (INPUTS, BATCH))
    inputs = [StepBatch(query_lens=(1,) * BATCH, seq_lens=tuple(lens_B)) for lens_B in lens_SB.tolist()]
    chosen = [inputs[0]]

    def prepare(number: int) -> None:
        chosen[0] = inputs[number % INPUTS]

    def run() -> None:
        begin = time.thread_time_ns()
        builder.build(chosen[0])
        built = time.thread_time_ns()
        ready = time.thread_time_ns()
        if effect:
            end = ready + effect * (built - begin) - (ready - built) / 2
            while time.thread_time_ns() < end:
                pass

    return Subject(name=name, prepare=prepare, run=run)


def trials(spec: SelfTestSpec, done: int = 0) -> Iterator[Trial]:
    """Run the trials from number `done` on, on one thread, after an A/A run that is none of them."""
    torch.set_num_threads(1)
    clock = CLOCKS[spec.clock]
    a, same = builder_subject("A"), builder_subject("A again")
    slower = builder_subject("slower", spec.effect)
    pairs = max(pairs_per_block(subject, clock) for subject in (a, same, slower))
    first = time_blocks(a, same, NULL_BLOCKS, pairs, clock=clock, seed=spec.seed)
    recent = deque(first.log_ratios().tolist(), maxlen=NULL_BLOCKS)
    for number in range(done, spec.trials):
        slowed = spec.slowed(number)
        budget = choose_budget(np.array(recent), spec.effect, spec.most_blocks)
        b, seed = slower if slowed else same, spec.seed + 1 + number
        samples = [time_blocks(a, b, budget.blocks, pairs, clock=clock, seed=seed)]
        own = choose_budget(samples[0].log_ratios(), spec.effect, spec.most_blocks)
        if own.blocks > budget.blocks:
            more = own.blocks - budget.blocks
            samples.append(time_blocks(a, b, more, pairs, clock=clock, seed=seed + spec.trials))
            budget = own
        logs = joined(samples)
        interval = ratio_interval(logs, seed=spec.seed + number)
        yield Trial(
            number=number,
            slowed=slowed,
            budget=budget,
            interval=interval,
            verdict=verdict(interval, spec.margin),
            samples=tuple(samples),
        )
        if not slowed:
            recent.extend(logs.tolist())


def summary(spec: SelfTestSpec, found: Sequence[Trial]) -> SelfTest:
    """What the trials so far say.

    Raises:
        ValueError: there is none.
    """
    if not found:
        raise ValueError("no trial was finished, so nothing can be said")
    null, slowed = ([one for one in found if one.slowed is kind] for kind in (False, True))
    blocks = [one.budget.blocks for one in found]
    return SelfTest(
        spec=spec,
        pairs=len(found[-1].samples[0].blocks_a[0]),
        blocks=(min(blocks), int(np.median(blocks)), max(blocks)),
        spread=float(np.median([one.budget.spread for one in found])),
        step_s=float(np.median([one.samples[0].medians()[0] for one in found])),
        null_runs=len(null),
        false_alarms=sum(one.hit for one in null),
        small_differences=sum(one.interval.differs and not one.hit for one in null),
        false_alarm_limit=int(stats.binom.ppf(0.998, max(1, len(null)), ALPHA)),
        effect_runs=len(slowed),
        detected=sum(one.hit for one in slowed),
        undetectable=sum(not one.budget.sufficient for one in slowed),
    )


def kept_trials(path: Path, spec: SelfTestSpec) -> list[Trial]:
    """The trials in the file of an earlier run, none where there is no file; drops a last line that was cut short.

    Raises:
        ValueError: another file, or a run of another specification.
        OSError: it cannot be read or cut.
    """
    if not path.exists():
        path.write_bytes(msgspec.json.encode(spec) + b"\n")
        return []
    whole, _, rest = path.read_bytes().rpartition(b"\n")
    if rest:
        path.write_bytes(whole + b"\n")
    head, *lines = whole.split(b"\n")
    try:
        known = msgspec.json.decode(head, type=SelfTestSpec)
        found = [msgspec.json.decode(line, type=Trial) for line in lines]
    except msgspec.MsgspecError as error:
        raise ValueError(f"{path}: it holds no trials of `dsv32 bench selftest`: {error}") from error
    if known != spec or [one.number for one in found] != list(range(len(found))):
        raise ValueError(f"{path}: it is of a run with other options; give those again, or another file")
    return found


def keep_trial(path: Path, trial: Trial) -> None:
    """Append one trial, as one line in one write."""
    with path.open("ab", buffering=0) as file:
        file.write(msgspec.json.encode(trial) + b"\n")
