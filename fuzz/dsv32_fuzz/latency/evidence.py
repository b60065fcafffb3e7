"""Evidence of latency as one file: what was compared, of what kind, the verdict, and every raw sample behind it.

`dsv32 bench step --out` and `dsv32 trace --out` write it, a sign-off reads it. `judged` computes ratio, interval and
verdict again from the samples, so that a reader need not believe the file. Only kinds in `ADMISSIBLE`, and only
complete evidence, may feed a gate that judges latency: emulated times say nothing of a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from dsv32_fuzz.latency.attribution import Plan, Timed, Timings
from dsv32_fuzz.latency.statistics import ALPHA, Verdict, ratio_interval, verdict
from dsv32_fuzz.latency.timing import Blocks, log_ratios
from dsv32_fuzz.traces.compare import Claim, TraceComparison, ratio_of_steps

Kind = Literal["emulated", "device", "trace", "host trace"]
"""Hollow kernels; device events around AITER's kernels; two traces with device work; two traces without."""
ADMISSIBLE: frozenset[Kind] = frozenset({"device", "trace"})
STEP, WHOLE = "decode step", ", whole: all"
"""Name of the comparison of two traces; how that of a bench ends if it is of the whole step, all changes against none.
"""
MAX_ALPHA = 0.05
"""The laxest level at which an interval is taken for one."""


class Compared(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One comparison: B, or after, against A, or before."""

    name: str
    verdict: Verdict
    ratio: float
    low: float | None
    """The 99 % interval of the ratio; None where there are too few steps."""
    high: float | None
    p_value: float | None
    """Two-sided, against a ratio of 1."""
    a_s: Blocks
    """Seconds: blocks of pairs; of a trace one block, the consecutive steps' durations."""
    b_s: Blocks

    @property
    def setting(self) -> str:
        """What was timed, without what it was compared with."""
        return self.name.partition(":")[0]


class Evidence(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file."""

    format: Literal["dsv32-latency/1"] = "dsv32-latency/1"
    kind: Kind
    complete: bool
    """False if a run was interrupted or a trace is damaged."""
    measured: str
    """What the times are of, in one line."""
    margin: float
    alpha: float = ALPHA
    seed: int = 0
    null: tuple[Compared, ...] = ()
    """A/A comparisons of the same run; those that differ withhold the verdicts."""
    compared: tuple[Compared, ...]
    """Whole steps first."""
    claims: tuple[Claim, ...] = ()
    device: tuple[dict[str, str], ...] = ()
    """Clocks and power, in order of time."""
    sources: tuple[str, ...] = ()
    """The files that were read."""

    @property
    def admissible(self) -> bool:
        """Whether a gate on latency may use it."""
        return self.complete and self.kind in ADMISSIBLE

    @property
    def steps(self) -> tuple[Compared, ...]:
        """Every comparison of a whole step with all changes: of a bench one per batch size, of traces one."""
        return tuple(one for one in self.compared if one.name == STEP or one.name.endswith(WHOLE))


def judged(evidence: Evidence) -> Evidence:
    """The same evidence with ratio, interval, p-value and verdict of every comparison computed from its samples.

    Raises:
        ValueError: nothing compared, samples that give no ratio, or a level or margin that is none.
    """
    if not evidence.compared:
        raise ValueError("the evidence compares nothing")
    if not (0 < evidence.alpha <= MAX_ALPHA and 0 <= evidence.margin < 1):
        raise ValueError(
            f"alpha {evidence.alpha:g} and margin {evidence.margin:g}: a level is above 0 and at most {MAX_ALPHA:g}, a "
            "margin is a share"
        )
    null = tuple(_judged(one, evidence) for one in evidence.null)
    compared = tuple(_judged(one, evidence) for one in evidence.compared)
    withheld = {one.setting for one in null if one.p_value is not None and _differs(one, evidence.alpha)}
    return msgspec.structs.replace(
        evidence,
        null=null,
        compared=tuple(
            msgspec.structs.replace(one, verdict="cannot tell") if one.setting in withheld else one for one in compared
        ),
    )


def read_evidence(path: Path) -> Evidence:
    """The evidence in `path`.

    Raises:
        ValueError: another file, or numbers that its own samples do not give.
        OSError: it cannot be read.
    """
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Evidence)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{path}: no evidence of `dsv32 bench step --out` or `dsv32 trace --out`: {error}") from error
    try:
        again = judged(found)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{path}: {error}; measure again") from error
    for told, known in zip(_all(found), _all(again), strict=True):
        if not _same(told, known):
            raise ValueError(f"{path}: {told.name} is not what its samples give ({known.verdict}); measure again")
    return found


def _all(evidence: Evidence) -> tuple[Compared, ...]:
    return (*evidence.null, *evidence.compared)


def _same(told: Compared, known: Compared) -> bool:
    """Numbers to the last digits, which may be another machine's."""
    numbers = [(one.ratio, one.low, one.high, one.p_value) for one in (told, known)]
    close = all(
        a == b or (a is not None and b is not None and math.isclose(a, b, rel_tol=1e-9))
        for a, b in zip(*numbers, strict=True)
    )
    return close and told.verdict == known.verdict


def of_timings(timings: Sequence[Timings], plan: Plan, *, complete: bool) -> Evidence:
    """What `dsv32 bench step` timed, whole steps first."""
    ordered = sorted(timings, key=lambda one: one.setting.part != "whole")
    real = plan.clock == "device" and plan.kernels == "aiter"
    return Evidence(
        kind="device" if real else "emulated",
        complete=complete,
        measured=f"{plan.clock} time of a step of {plan.layers} layers of small widths, {plan.kernels} kernels",
        margin=plan.margin,
        seed=plan.seed,
        null=tuple(_of_timed(one.null, one) for one in ordered),
        compared=tuple(_of_timed(timed, one) for one in ordered for timed in one.compared),
        device=tuple(state for one in ordered for state in one.states),
    )


def of_traces(found: TraceComparison) -> Evidence:
    """What `dsv32 trace` compared."""
    a, b = (tuple(ms / 1e3 for ms in table.period_ms) for table in (found.before, found.after))
    step = Compared(
        name=STEP,
        verdict=found.verdict,
        ratio=found.ratio,
        low=found.ratio_low,
        high=found.ratio_high,
        p_value=found.p_value,
        a_s=(a,),
        b_s=(b,),
    )
    made = Evidence(
        kind="trace" if found.level == "device" else "host trace",
        complete=not found.partial,
        measured="time from one step to the next in two traces of an engine",
        margin=found.margin,
        compared=(step,),
        claims=found.claims,
        sources=(found.before.path, found.after.path),
    )
    return judged(made)


def _of_timed(timed: Timed, timings: Timings) -> Compared:
    setting = timings.setting
    return Compared(
        name=f"batch {setting.batch}, {setting.part}: {timed.comparison}",
        verdict=timed.verdict,
        ratio=timed.interval.ratio,
        low=timed.interval.low,
        high=timed.interval.high,
        p_value=timed.interval.p_value,
        a_s=tuple(block for one in timed.samples for block in one.blocks_a),
        b_s=tuple(block for one in timed.samples for block in one.blocks_b),
    )


def _differs(one: Compared, alpha: float) -> bool:
    if one.p_value is None or one.low is None or one.high is None:
        return False
    return one.p_value < alpha and not one.low <= 1 <= one.high


def _judged(one: Compared, evidence: Evidence) -> Compared:
    if one.a_s == one.b_s:
        raise ValueError(f"{one.name}: both sides have the very same times; give two measurements")
    if evidence.kind in ("trace", "host trace"):
        if len(one.a_s) != 1 or len(one.b_s) != 1 or not all(0 < t < math.inf for t in (*one.a_s[0], *one.b_s[0])):
            raise ValueError(f"{one.name}: give one block of positive, finite step times of each side")
        steps = ratio_of_steps(one.a_s[0], one.b_s[0], evidence.margin)
        return msgspec.structs.replace(
            one, ratio=steps.ratio, low=steps.low, high=steps.high, p_value=steps.p_value, verdict=steps.verdict
        )
    interval = ratio_interval(log_ratios(one.a_s, one.b_s), alpha=evidence.alpha, seed=evidence.seed)
    return msgspec.structs.replace(
        one,
        ratio=interval.ratio,
        low=interval.low,
        high=interval.high,
        p_value=interval.p_value,
        verdict=verdict(interval, evidence.margin),
    )
