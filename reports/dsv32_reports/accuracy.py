"""Accuracy evidence from lm-evaluation-harness: is the candidate worse than the baseline by less than a margin?

Reads the `results_*.json` of two runs (unpaired counts), or two `samples_*.jsonl` of the same task (paired, stronger).
The lower bound of the difference is Newcombe's hybrid score interval (Statistics in Medicine 17, 1998: method 10 for
unpaired, method 10 of the paired article for paired proportions), built from scipy's Wilson intervals.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from scipy.optimize import brentq
from scipy.stats import binomtest, norm

from dsv32_reports.statistics import Statistic

METRICS = ("exact_match,strict-match", "exact_match,flexible-extract", "exact_match,none", "acc,none")
MAX_BYTES = 1 << 30
CONFIDENCE = 0.95
LARGEST_Z = 8.0
"""p-values below 6e-16 are told as that."""
BLIND = (
    "GSM8K 5-shot prompts stay below 2048 tokens: every row attends to all of its keys, so a wrong choice of keys, a "
    "plan that crosses topk or a stale plan under MTP and chunked prefill cannot show in this score"
)


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """How often two runs were right; `both` is None where the answers are not paired."""

    task: str
    metric: str
    baseline: int
    candidate: int
    baseline_trials: int
    candidate_trials: int
    both: int | None = None


def read_counts(baseline: Path, candidate: Path) -> list[Counts]:
    """The tasks that both files hold.

    Raises:
        ValueError: no result files of the harness, two kinds of file, one file twice, or other tasks.
    """
    paired = baseline.suffix == ".jsonl", candidate.suffix == ".jsonl"
    if paired[0] != paired[1]:
        raise ValueError("give two results_*.json or two samples_*.jsonl files, not one of each")
    if baseline.resolve() == candidate.resolve():
        raise ValueError(f"{baseline} is given twice; give the baseline's file and the candidate's")
    found = [_paired(baseline, candidate)] if all(paired) else list(_unpaired(_load(baseline), _load(candidate)))
    if not found:
        raise ValueError(
            f"{baseline} and {candidate} have no task with a known metric ({', '.join(METRICS)}) in common"
        )
    return found


def non_inferiority(counts: Counts, margin: float) -> Statistic:
    """Whether the candidate is worse by less than `margin`; p-values by inverting the interval.

    Raises:
        ValueError: the margin is not in (0, 1), or the counts are none.
    """
    if not 0 < margin < 1:
        raise ValueError(f"the margin of accuracy is {margin}, must be above 0 and below 1")
    difference, low, high = interval(counts)
    told = (
        f"{counts.task}: {counts.candidate} of {counts.candidate_trials} right against {counts.baseline} of "
        f"{counts.baseline_trials}, difference {100 * difference:+.2f} points, at least {100 * low:+.2f} (95 %)"
    )
    return Statistic(
        check="accuracy",
        scope=counts.task,
        told=told,
        limit=f"the margin of {100 * margin:.1f} points",
        note=BLIND,
        measured={"difference": difference, "low": low, "high": high, "margin": margin, "largest_loss": -low},
        p_within=_p_within(counts, difference, margin),
    )


def _p_within(counts: Counts, difference: float, margin: float) -> float:
    """The level at which the interval's end on the side of -margin lies on it; half where the difference does."""
    side, sign = (1, 1.0) if difference > -margin else (2, -1.0)

    def beyond(z: float) -> float:
        return sign * (interval(counts, float(norm.cdf(z)))[side] + margin)

    if beyond(LARGEST_Z) > 0:
        p = float(norm.sf(LARGEST_Z))
    else:
        p = float(norm.sf(brentq(beyond, 0.0, LARGEST_Z))) if beyond(0.0) > 0 else 0.5
    return p if side == 1 else 1 - p


def interval(counts: Counts, confidence: float = CONFIDENCE) -> tuple[float, float, float]:
    """Difference candidate - baseline, and its one-sided bounds on either side."""
    p, p_low, p_high = _wilson(counts.candidate, counts.candidate_trials, confidence)
    q, q_low, q_high = _wilson(counts.baseline, counts.baseline_trials, confidence)
    phi = 0.0 if counts.both is None else _phi(counts, counts.both)
    down = math.sqrt(max(0.0, (p - p_low) ** 2 - 2 * phi * (p - p_low) * (q_high - q) + (q_high - q) ** 2))
    up = math.sqrt(max(0.0, (p_high - p) ** 2 - 2 * phi * (p_high - p) * (q - q_low) + (q - q_low) ** 2))
    return p - q, p - q - down, p - q + up


def _wilson(right: int, trials: int, confidence: float) -> tuple[float, float, float]:
    found = binomtest(right, trials).proportion_ci(confidence_level=max(0.0, 2 * confidence - 1), method="wilson")
    return right / trials, float(found.low), float(found.high)


def _phi(counts: Counts, both: int) -> float:
    """Correlation of the two answers; 0 where it is not defined."""
    n, a, b = counts.baseline_trials, counts.baseline, counts.candidate
    spread = math.sqrt(a * (n - a) * b * (n - b))
    return 0.0 if spread == 0 else (n * both - a * b) / spread


def _load(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"larger than {MAX_BYTES} bytes")
        document = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        if not isinstance(document.get("results"), dict):
            raise ValueError("no `results`")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); give a results_*.json") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: no result of lm-evaluation-harness ({error}); give a results_*.json") from error
    return document


def _unpaired(baseline: dict[str, Any], candidate: dict[str, Any]) -> Iterator[Counts]:
    alone = sorted(baseline["results"].keys() ^ candidate["results"].keys())
    if alone:
        raise ValueError(f"only one of the two results has the task {alone[0]!r}; run both on the same tasks")
    for task in baseline["results"]:
        ours, theirs = baseline["results"][task], candidate["results"][task]
        metric = next((name for name in METRICS if name in ours and name in theirs), "")
        sizes = [_samples(document, task) for document in (baseline, candidate)]
        if metric and all(sizes):
            yield Counts(
                task=task,
                metric=metric,
                baseline=_right(ours[metric], sizes[0]),
                candidate=_right(theirs[metric], sizes[1]),
                baseline_trials=sizes[0],
                candidate_trials=sizes[1],
            )


def _right(share: Any, trials: int) -> int:
    if not isinstance(share, int | float) or not 0 <= share <= 1:
        raise ValueError(f"a score is {share!r}, must be from 0 to 1")
    return round(share * trials)


def _samples(document: dict[str, Any], task: str) -> int:
    try:
        samples = document["n-samples"][task]["effective"]
    except (KeyError, TypeError):
        return 0
    return samples if isinstance(samples, int) and 0 < samples <= MAX_BYTES else 0


def _paired(baseline: Path, candidate: Path) -> Counts:
    ours, theirs = _answers(baseline), _answers(candidate)
    if not ours or ours.keys() != theirs.keys():
        missing = len(ours.keys() ^ theirs.keys())
        raise ValueError(
            f"{baseline} and {candidate} differ in {missing} documents; give samples of one and the same task"
        )
    both = sum(right and theirs[document] for document, right in ours.items())
    return Counts(
        task=baseline.stem.removeprefix("samples_"),
        metric="exact_match",
        baseline=sum(ours.values()),
        candidate=sum(theirs.values()),
        baseline_trials=len(ours),
        candidate_trials=len(theirs),
        both=both,
    )


class _Sample(msgspec.Struct):
    doc_id: int
    exact_match: float = -1.0
    acc: float = -1.0
    filter: str = ""
    doc_hash: str = ""


def _answers(path: Path) -> dict[tuple[int, str, str], bool]:
    """Right or wrong per document: its number, its text's hash and the filter. Only the file's first filter counts."""
    answers: dict[tuple[int, str, str], bool] = {}
    first: str | None = None
    try:
        with path.open("rb") as lines:
            for line in lines:
                sample = msgspec.json.decode(line, type=_Sample)
                score = max(sample.exact_match, sample.acc)
                if not 0 <= score <= 1:
                    raise ValueError("a sample has neither exact_match nor acc from 0 to 1")
                first = sample.filter if first is None else first
                if sample.filter != first:
                    continue
                document = sample.doc_id, sample.doc_hash, sample.filter
                if document in answers:
                    raise ValueError(f"document {sample.doc_id} occurs twice")
                answers[document] = score >= 0.5
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); give a samples_*.jsonl") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: no samples of lm-evaluation-harness ({error}); give a samples_*.jsonl") from error
    return answers
