"""The few statistics that a verdict quotes; all of them from scipy."""

from __future__ import annotations

from scipy.stats import binomtest


def failure_rate_upper_bound(failed: int, trials: int, confidence: float = 0.95) -> float:
    """One-sided Clopper-Pearson upper bound on a failure rate, from `failed` of `trials` independent trials.

    Raises:
        ValueError: no trial, or more failures than trials.
    """
    if trials < 1 or not 0 <= failed <= trials:
        raise ValueError(f"{failed} failures of {trials} trials give no rate")
    result = binomtest(failed, trials, alternative="less")
    return float(result.proportion_ci(confidence_level=confidence, method="exact").high)
