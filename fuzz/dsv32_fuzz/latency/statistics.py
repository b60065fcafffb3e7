"""Was B slower than A: a paired bootstrap interval, an exact test beside it, a verdict, and how many pairs that takes.

One observation is a pair: a block of A and a block of B timed back to back, in random order. What is judged is the log
of the ratio of the two blocks' medians. A block's median drops the hiccups of a shared machine, a pair's ratio drops
its slow drifts, and pairs may come from several processes.

The interval is scipy's bootstrap (BCa) on the mean of the log ratios. A bootstrap of some dozens of heavy-tailed values
leaves the truth out twice as often as its level says, so a difference also needs the sign-flip test: if A and B are
the same, the random order makes every pair's sign a fair coin, whatever the distribution: the test's level is exact.

How many pairs: for an effect e on the log scale, level alpha and power p the mean of n pairs with standard deviation s
needs s / sqrt(n) <= e / (z(1 - alpha / 2) + z(p)). s comes from an A/A run of m pairs and is itself uncertain, so its
upper 90 % confidence limit s sqrt((m - 1) / chi2(0.1; m - 1)) is used. Student's factor for n is of the same size as
that margin and is left out.
"""

from __future__ import annotations

import math
from typing import Literal

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
FEWEST_PAIRS = 20
"""Below this no interval is given: a bootstrap of fewer values has no tails at 1 %."""
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
    pairs: int
    alpha: float
    spread: float
    """Standard deviation of the pairs' log ratios."""

    @property
    def differs(self) -> bool:
        """Whether A and B differ at the level alpha: by the test, and by the interval."""
        return self.p_value < self.alpha and not self.low <= 1 <= self.high


def ratio_interval(log_ratios: Floats, alpha: float = ALPHA, seed: int = 0) -> Interval:
    """The geometric mean of the pairs' ratios B / A, its bootstrap interval, and the sign-flip test against 1.

    Args:
        log_ratios: log(B / A) of each pair, [n].
        alpha: two-sided level.
        seed: of the resampling.

    Raises:
        ValueError: fewer than `FEWEST_PAIRS` pairs, or a value that is not finite.
    """
    d = np.asarray(log_ratios, dtype=np.float64)
    if d.ndim != 1 or len(d) < FEWEST_PAIRS:
        raise ValueError(f"log_ratios: {d.size} pairs; an interval needs at least {FEWEST_PAIRS}")
    if not np.isfinite(d).all():
        raise ValueError("log_ratios: a pair is not finite; every block must have taken time")
    mean, spread = float(d.mean()), float(d.std(ddof=1))
    low = high = mean
    if spread > LEAST_SPREAD:
        found = stats.bootstrap(
            (d,), np.mean, confidence_level=1 - alpha, n_resamples=RESAMPLES, rng=np.random.default_rng(seed)
        ).confidence_interval
        low, high = float(found.low), float(found.high)
    test = stats.permutation_test(
        (d,),
        np.mean,
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
        pairs=len(d),
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
    """How many pairs to time for an effect, from an A/A run."""

    pairs: int
    effect: float
    """The effect asked for, as a share of the step."""
    detectable: float
    """The effect that `pairs` pairs detect with the power asked for."""
    spread: float
    """Standard deviation of the A/A log ratios."""
    spread_limit: float
    """Its upper 90 % confidence limit, which the budget is made from."""
    alpha: float
    power: float

    @property
    def sufficient(self) -> bool:
        """False where the effect is undetectable within the pairs allowed."""
        return self.detectable <= self.effect


def choose_budget(
    null_log_ratios: Floats, effect: float, most_pairs: int, alpha: float = ALPHA, power: float = POWER
) -> Budget:
    """The pairs that detect `effect` with `power` at `alpha`, at least `FEWEST_PAIRS`, at most `most_pairs`.

    Raises:
        ValueError: an effect that is not positive, fewer than FEWEST_PAIRS pairs allowed or measured.
    """
    if not effect > 0:
        raise ValueError(f"effect is {effect}; it must be positive")
    if min(most_pairs, len(null_log_ratios)) < FEWEST_PAIRS:
        raise ValueError(f"most_pairs {most_pairs} of {len(null_log_ratios)} A/A pairs: give at least {FEWEST_PAIRS}")
    m = len(null_log_ratios)
    spread = max(float(np.std(null_log_ratios, ddof=1)), LEAST_SPREAD)
    limit = spread * math.sqrt((m - 1) / float(stats.chi2.ppf(0.1, m - 1)))
    reach = limit * float(stats.norm.ppf(1 - alpha / 2) + stats.norm.ppf(power))
    pairs = min(most_pairs, max(FEWEST_PAIRS, math.ceil((reach / math.log1p(effect)) ** 2)))
    return Budget(
        pairs=pairs,
        effect=effect,
        detectable=math.expm1(reach / math.sqrt(pairs)),
        spread=spread,
        spread_limit=limit,
        alpha=alpha,
        power=power,
    )
