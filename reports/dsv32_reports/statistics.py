"""The few statistics that a verdict quotes; all of them from scipy.

A statistical gate asks whether a rate, a loss or a slowdown lies within a limit. It passes if it surely does, fails if
it surely does not, and else cannot tell. All such questions of one sign-off are decided together: the p-values of
"within" and those of "beyond" are each controlled for false discoveries (Benjamini-Hochberg) at 5 %. A GO needs every
question of its required gates answered by "within", and for that the control takes nothing away: if the largest of the
p-values is at most 5 %, all are discoveries. What it takes away are lone failures and lone passes among many questions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from scipy.stats import binomtest, false_discovery_control

from dsv32_fuzz.verdict import Status, Verdict

FALSE_DISCOVERY_RATE = 0.05


def failure_rate_upper_bound(failed: int, trials: int, confidence: float = 0.95) -> float:
    """One-sided Clopper-Pearson upper bound on a failure rate, from `failed` of `trials` independent trials.

    Raises:
        ValueError: no trial, or more failures than trials.
    """
    if trials < 1 or not 0 <= failed <= trials:
        raise ValueError(f"{failed} failures of {trials} trials give no rate")
    result = binomtest(failed, trials, alternative="less")
    return float(result.proportion_ci(confidence_level=confidence, method="exact").high)


@dataclass(frozen=True, kw_only=True)
class Statistic:
    """One question of a statistical gate, and the numbers that answer it.

    Attributes:
        check, scope: whose, and about what: a task, a layer, a pair of traces.
        told: what was measured, in words.
        limit: the limit in words.
        note: what the number cannot say, appended to the summary.
        measured: the numbers.
        p_within: of "beyond the limit"; small if it surely lies within.
        p_beyond: of "within the limit"; None: 1 - p_within.
        untold: why nothing can be told from these numbers; empty if it can.
        never_within: why they cannot pass, though they can fail; empty if they can.
        judged: False where the policy sets no limit: shown, and decides nothing.
    """

    check: str
    scope: str
    told: str
    limit: str
    measured: dict[str, float | int | str]
    p_within: float
    p_beyond: float | None = None
    note: str = ""
    untold: str = ""
    never_within: str = ""
    judged: bool = field(default=True)


def controlled(asked: Sequence[Statistic]) -> list[Verdict]:
    """The verdict of each question, decided together with all others."""
    answered = [one for one in asked if one.judged and not one.untold]
    within = _adjusted([one.p_within for one in answered])
    beyond = _adjusted([1 - one.p_within if one.p_beyond is None else one.p_beyond for one in answered])
    by_question = {id(one): pair for one, pair in zip(answered, zip(within, beyond, strict=True), strict=True)}
    return [_verdict(one, *by_question.get(id(one), (1.0, 1.0))) for one in asked]


def _adjusted(p_values: list[float]) -> list[float]:
    return [float(p) for p in false_discovery_control(p_values)] if p_values else []


def _verdict(one: Statistic, within: float, beyond: float) -> Verdict:
    if not one.judged:
        status, word = Status.SKIPPED, "NOT JUDGED: the policy sets no limit"
    elif one.untold:
        status, word = Status.MISTRUSTED, one.untold
    elif within <= FALSE_DISCOVERY_RATE and one.never_within:
        status, word = Status.MISTRUSTED, f"within {one.limit}, but {one.never_within}"
    elif within <= FALSE_DISCOVERY_RATE:
        status, word = Status.PASSED, f"within {one.limit}"
    elif beyond <= FALSE_DISCOVERY_RATE:
        status, word = Status.FAILED, f"beyond {one.limit}"
    else:
        status, word = Status.MISTRUSTED, f"too few to tell whether it lies within {one.limit}"
    p_values = {"adjusted_p_within": within, "adjusted_p_beyond": beyond} if one.judged and not one.untold else {}
    numbers = {
        name: float(f"{value:.6g}") if isinstance(value, float) else value
        for name, value in {**one.measured, **p_values}.items()
    }
    summary = f"{one.told}; {word}" + (f". {one.note}" if one.note else "")
    return Verdict(check=one.check, status=status, summary=summary, measured=numbers)
