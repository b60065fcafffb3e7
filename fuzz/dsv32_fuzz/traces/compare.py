"""Two traces against each other, and against what was claimed for PR #42982.

Steps of one run depend on each other, so intervals come from means of batches of consecutive steps: about 30 batches
per trace, resampled by scipy's bootstrap; faster and slower also need a permutation test of those means. One trace per
side shows the variation within a run, not between runs; the result says so. Counts are compared exactly where they are
the same in every step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np
from scipy import stats

from dsv32_fuzz.latency.roofline import step_floor
from dsv32_fuzz.latency.statistics import ALPHA, FEWEST_BLOCKS, RESAMPLES, Floats, Verdict
from dsv32_fuzz.traces.kineto import TraceError
from dsv32_fuzz.traces.steps import StepTable
from dsv32_ref.config import Config

BATCHES = 30
CLAIMED_BEFORE_MS, CLAIMED_AFTER_MS = 41.522, 40.234
CLAIMED_CASTS = 58
CLAIMED_SKIP = 0.94
QUANTILES = (0.5, 0.9, 0.99)
LARGEST_TP = 8
"""The floor credits a step with so many ranks, whatever the run had."""


class StepRatio(msgspec.Struct, frozen=True, kw_only=True):
    """The ratio after / before of mean step times, and what it says; None where there are too few steps."""

    ratio: float
    low: float | None
    high: float | None
    p_value: float | None
    verdict: Verdict


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One quantity per step: mean before, mean after, and the difference with its interval."""

    name: str
    before: float
    after: float
    difference: float
    low: float | None
    """None where there are too few steps for an interval."""
    high: float | None


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """A published number beside the measured one; status is confirmed, differs, refuted or not judged."""

    name: str
    claimed: str
    measured: str
    status: str


class TraceComparison(msgspec.Struct, frozen=True, kw_only=True):
    """What `dsv32 trace` reports."""

    before: StepTable
    after: StepTable
    verdict: Verdict
    ratio: float
    ratio_low: float | None
    ratio_high: float | None
    p_value: float | None
    """Two-sided, of the permutation test against equal steps."""
    margin: float
    quantiles: dict[str, tuple[float, float]]
    """Period before and after in milliseconds, by quantile."""
    rows: tuple[Row, ...]
    claims: tuple[Claim, ...]

    @property
    def level(self) -> str:
        """`device` only if both traces have device work."""
        return "device" if self.before.level == self.after.level == "device" else "host"

    @property
    def partial(self) -> bool:
        """Whether a trace ended early."""
        return self.before.cut is not None or self.after.cut is not None


def compare(before: StepTable, after: StepTable, margin: float = 0.01) -> TraceComparison:
    """Difference after against before; `margin` is the smallest effect that matters, as a share of the step.

    Raises:
        TraceError: step times below what an MI355X can do at all.
        ValueError: a margin that is not positive.
    """
    if not margin > 0:
        raise ValueError(f"margin is {margin}; it must be positive")
    for table in (before, after):
        _check_possible(table)
    step = ratio_of_steps(before.period_ms, after.period_ms, margin)
    rows = [_row("step, ms", before.period_ms, after.period_ms), _row("idle, ms", before.idle_ms, after.idle_ms)]
    rows += [_row(name, before.counts[name], after.counts[name]) for name in before.counts if name in after.counts]
    found = TraceComparison(
        before=before,
        after=after,
        verdict=step.verdict,
        ratio=step.ratio,
        ratio_low=step.low,
        ratio_high=step.high,
        p_value=step.p_value,
        margin=margin,
        quantiles={f"p{100 * q:.0f}": _quantile(before, after, q) for q in QUANTILES},
        rows=tuple(rows),
        claims=(),
    )
    return msgspec.structs.replace(found, claims=tuple(_claims(found)))


def _check_possible(table: StepTable) -> None:
    if table.level != "device":
        return
    floor_ms = 1e3 * step_floor(Config(), [0], ranks=LARGEST_TP)
    mean = float(np.mean(table.period_ms))
    if mean < floor_ms:
        raise TraceError(
            f"{table.path}: {mean:.3g} ms per step is below {floor_ms:.2g} ms, in which {LARGEST_TP} MI355X read the "
            "weights of DeepSeek-V3.2: it is another model, or --step-marker marks something else"
        )


def _quantile(before: StepTable, after: StepTable, q: float) -> tuple[float, float]:
    return float(np.quantile(before.period_ms, q)), float(np.quantile(after.period_ms, q))


def _batch_means(values: Sequence[float]) -> Floats | None:
    """Means of about `BATCHES` runs of consecutive values; None if there are too few values."""
    if len(values) < FEWEST_BLOCKS:
        return None
    size = max(1, len(values) // BATCHES)
    whole = np.asarray(values, dtype=np.float64)[: len(values) // size * size]
    means: Floats = whole.reshape(-1, size).mean(1)
    return means


def _interval(before: Sequence[float], after: Sequence[float], *, log: bool) -> tuple[float | None, float | None]:
    a, b = _batch_means(before), _batch_means(after)
    if a is None or b is None:
        return None, None

    def difference(x: Floats, y: Floats, axis: int = -1) -> Floats:
        mx, my = x.mean(axis), y.mean(axis)
        found: Floats = np.log(my / mx) if log else my - mx
        return found

    point = float(difference(a, b))
    if np.ptp(a) == np.ptp(b) == 0:
        return point, point
    found = stats.bootstrap(
        (a, b),
        difference,
        confidence_level=1 - ALPHA,
        n_resamples=RESAMPLES,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return float(found.low), float(found.high)


def ratio_of_steps(before: Sequence[float], after: Sequence[float], margin: float) -> StepRatio:
    """The durations of consecutive steps after against before, in any one unit; the verdict is that of `verdict`."""
    ratio = float(np.mean(after) / np.mean(before))
    low, high = _interval(before, after, log=True)
    if low is None or high is None:
        return StepRatio(ratio=ratio, low=None, high=None, p_value=None, verdict="cannot tell")
    p_value = _p_value(before, after)
    low, high = math.exp(low), math.exp(high)
    return StepRatio(
        ratio=ratio, low=low, high=high, p_value=p_value, verdict=_verdict(low, high, p_value < ALPHA, margin)
    )


def _p_value(before: Sequence[float], after: Sequence[float]) -> float:
    """Of equal mean steps, by permutation of the batches' means."""
    means = [found for found in (_batch_means(before), _batch_means(after)) if found is not None]
    test = stats.permutation_test(
        means,
        lambda x, y, axis: x.mean(axis) - y.mean(axis),
        n_resamples=RESAMPLES,
        vectorized=True,
        rng=np.random.default_rng(0),
    )
    return float(test.pvalue)


def _row(name: str, before: Sequence[float], after: Sequence[float]) -> Row:
    low, high = _interval(before, after, log=False)
    a, b = float(np.mean(before)), float(np.mean(after))
    return Row(name=name, before=a, after=b, difference=b - a, low=low, high=high)


def _verdict(low: float, high: float, differs: bool, margin: float) -> Verdict:
    if 1 / (1 + margin) < low and high < 1 + margin:
        return "no difference"
    if low <= 1 <= high or not differs:
        return "cannot tell"
    return "faster" if high < 1 else "slower"


def _claims(found: TraceComparison) -> list[Claim]:
    rows = {row.name: row for row in found.rows}
    step, casts, plans = rows["step, ms"], rows["casts"], rows["plan launches"]
    device = found.level == "device" and not found.partial
    skipped = 1 - plans.after
    return [
        _value("ms per step, before", CLAIMED_BEFORE_MS, step.before, device),
        _value("ms per step, after", CLAIMED_AFTER_MS, step.after, device),
        Claim(
            name="change of the step",
            claimed=f"{100 * (CLAIMED_AFTER_MS / CLAIMED_BEFORE_MS - 1):.2f} %",
            measured=f"{100 * (found.ratio - 1):+.2f} %",
            status=_change_status(found, device),
        ),
        Claim(
            name="casts removed per step",
            claimed=str(CLAIMED_CASTS),
            measured=f"{-casts.difference:g}",
            status=_exact(-casts.difference == CLAIMED_CASTS, device),
        ),
        Claim(
            name="plan launches skipped, after",
            claimed=f"{100 * CLAIMED_SKIP:.0f} %",
            measured=f"{100 * skipped:.1f} %",
            status=_exact(round(skipped, 2) == CLAIMED_SKIP, device),
        ),
    ]


def _value(name: str, claimed: float, measured: float, device: bool) -> Claim:
    """An absolute time belongs to a machine and a load: another value refutes nothing."""
    same = abs(measured / claimed - 1) < 0.005
    status = ("confirmed" if same else "differs") if device else "not judged"
    return Claim(name=name, claimed=f"{claimed:.3f}", measured=f"{measured:.3f}", status=status)


def _change_status(found: TraceComparison, device: bool) -> str:
    claimed = CLAIMED_AFTER_MS / CLAIMED_BEFORE_MS
    if not device or found.ratio_low is None or found.ratio_high is None:
        return "not judged"
    if not found.ratio_low <= claimed <= found.ratio_high:
        return "refuted"
    return "confirmed" if found.verdict == "faster" else "not judged"


def _exact(holds: bool, device: bool) -> str:
    if not device:
        return "not judged"
    return "confirmed" if holds else "refuted"
