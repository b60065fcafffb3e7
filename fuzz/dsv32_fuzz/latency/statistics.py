"""Was B slower than A: a bootstrap interval, an exact test beside it, a verdict, and how many blocks that takes.

A pair is one run of A and one of B, back to back in random order. One observation is a block of pairs: the median of
its pairs' log ratios. A ratio within a pair drops the drifts of a shared machine, the median drops its hiccups, and
blocks may come from several processes. A change that slows fewer than half of the steps does not move that median.

The interval is scipy's bootstrap (BCa) on the mean of the blocks without the quarter at either end: on a shared machine
whole blocks are hit, and a resample of 20 may hold one of them several times. A bootstrap of some dozens of
heavy-tailed values leaves the truth out more often than its level says, so a difference also needs the sign-flip test:
if A and B are the same, the random order makes every block's sign a fair coin, whatever the distribution: the test's
level is exact.

How many blocks: for an effect e on the log scale, level alpha and power p the mean of n blocks of standard deviation s
needs s / sqrt(n) <= e / (z(1 - alpha / 2) + z(p)); for the trimmed mean s is the winsorised deviation over 1 - 2 / 4
(Tukey and McLaughlin 1963). s comes from an A/A run of m blocks and is itself uncertain, so its upper 90 % confidence
limit s sqrt((m - 1) / chi2(0.1; m - 1)) is used. Student's factor for n is of the same size as that margin and is left
out.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
from scipy import stats

Floats = npt.NDArray[np.float64]
Verdict = Literal["faster", "slower", "no difference", "cannot tell"]

ALPHA = 0.01
"""Two-sided: the nominal false-alarm rate of an interval that leaves out 1."""
POWER = 0.995
"""What a budget aims at: with it, 50 trials detect the effect in at least 49 (a rate of 0.97) 97 times of 100."""
FEWEST_BLOCKS = 20
"""Below this no interval is given: a bootstrap of fewer values has no tails at 1 %."""
TRIMMED = 0.25
"""Of the blocks, at either end."""
RESAMPLES = 4999
LEAST_SPREAD = 1e-6
"""Log ratios that vary less than a clock can resolve would give an interval of no width."""


class Interval(msgspec.Struct, frozen=True, kw_only=True):
    """The ratio B / A of step times, with its interval."""

    ratio: float
    low: float
    high: float
    p_value: float
    """Of the sign-flip test, two-sided."""
    blocks: int
    alpha: float
    spread: float
    """Deviation of one block, see `spread_of`."""

    @property
    def differs(self) -> bool:
        """Whether A and B differ at the level alpha: by the test, and by the interval."""
        return self.p_value < self.alpha and not self.low <= 1 <= self.high


def centre(values: Floats, axis: int = -1) -> Any:
    """The trimmed mean along `axis`."""
    return stats.trim_mean(values, TRIMMED, axis=axis)


def spread_of(values: Floats) -> float:
    """What takes the place of the standard deviation for the trimmed mean of `values`, [n]."""
    cut = int(TRIMMED * len(values))
    inner = np.sort(values)[cut : len(values) - cut]
    return float(np.std(np.clip(values, inner[0], inner[-1]), ddof=1)) / (1 - 2 * TRIMMED)


def ratio_interval(log_ratios: Floats, alpha: float = ALPHA, seed: int = 0) -> Interval:
    """The trimmed geometric mean of the blocks' ratios B / A, its bootstrap interval, and the sign-flip test against 1.

    Args:
        log_ratios: log(B / A) of each block, [n].
        alpha: two-sided level.
        seed: of the resampling.

    Raises:
        ValueError: fewer than `FEWEST_BLOCKS` blocks, or a value that is not finite.
    """
    d = np.asarray(log_ratios, dtype=np.float64)
    if d.ndim != 1 or len(d) < FEWEST_BLOCKS:
        raise ValueError(f"log_ratios: {d.size} blocks; an interval needs at least {FEWEST_BLOCKS}")
    if not np.isfinite(d).all():
        raise ValueError("log_ratios: a block is not finite; every run must have taken time")
    mean, spread = float(centre(d)), spread_of(d)
    low = high = mean
    if spread > LEAST_SPREAD:
        found = stats.bootstrap(
            (d,), centre, confidence_level=1 - alpha, n_resamples=RESAMPLES, rng=np.random.default_rng(seed)
        ).confidence_interval
        low, high = float(found.low), float(found.high)
    test = stats.permutation_test(
        (d,),
        centre,
        permutation_type="samples",
        n_resamples=RESAMPLES,
        vectorized=True,
        rng=np.random.default_rng(seed),
    )
    return Interval(
        ratio=math.exp(mean),
        low=math.exp(low),
        high=math.exp(high),
        p_value=float(test.pvalue),
        blocks=len(d),
        alpha=alpha,
        spread=spread,
    )


def verdict(interval: Interval, margin: float) -> Verdict:
    """What the interval says about B, with `margin` as smallest effect that matters, e.g. 0.01 for 1 %.

    - no difference: the whole interval lies within 1 / (1 + margin) and 1 + margin (an equivalence test);
    - faster, slower: else, if A and B differ (`Interval.differs`);
    - cannot tell: they may be equal, and may differ by more than the margin.

    Raises:
        ValueError: a margin that is not positive.
    """
    if not margin > 0:
        raise ValueError(f"margin is {margin}; it must be positive")
    if 1 / (1 + margin) < interval.low and interval.high < 1 + margin:
        return "no difference"
    if not interval.differs:
        return "cannot tell"
    return "faster" if interval.ratio < 1 else "slower"


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """How many blocks to time for an effect, from an A/A run."""

    blocks: int
    effect: float
    """The effect asked for, as a share of the step."""
    detectable: float
    """The effect that `blocks` blocks detect with the power asked for."""
    spread: float
    """Deviation of one A/A block, see `spread_of`."""
    spread_limit: float
    """Its upper 90 % confidence limit, which the budget is made from."""
    alpha: float
    power: float

    @property
    def sufficient(self) -> bool:
        """False where the effect is undetectable within the blocks allowed."""
        return self.detectable <= self.effect


def choose_budget(
    null_log_ratios: Floats, effect: float, most_blocks: int, alpha: float = ALPHA, power: float = POWER
) -> Budget:
    """The blocks that detect `effect` with `power` at `alpha`, at least `FEWEST_BLOCKS`, at most `most_blocks`.

    Raises:
        ValueError: an effect that is not positive, fewer than FEWEST_BLOCKS blocks allowed or measured.
    """
    if not effect > 0:
        raise ValueError(f"effect is {effect}; it must be positive")
    if min(most_blocks, len(null_log_ratios)) < FEWEST_BLOCKS:
        raise ValueError(f"most_blocks {most_blocks}, {len(null_log_ratios)} A/A blocks: give at least {FEWEST_BLOCKS}")
    m = len(null_log_ratios)
    spread = max(spread_of(null_log_ratios), LEAST_SPREAD)
    limit = spread * math.sqrt((m - 1) / float(stats.chi2.ppf(0.1, m - 1)))
    reach = limit * float(stats.norm.ppf(1 - alpha / 2) + stats.norm.ppf(power))
    blocks = min(most_blocks, max(FEWEST_BLOCKS, math.ceil((reach / math.log1p(effect)) ** 2)))
    return Budget(
        blocks=blocks,
        effect=effect,
        detectable=math.expm1(reach / math.sqrt(blocks)),
        spread=spread,
        spread_limit=limit,
        alpha=alpha,
        power=power,
    )
