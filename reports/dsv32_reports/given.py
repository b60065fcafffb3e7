"""Evidence that a user hands to a sign-off: read once, kept raw in the journal, and judged from there.

Three kinds: accuracy (lm-evaluation-harness), the precision of the router on a checkpoint (`dsv32 router --json`), and
latency (`dsv32 trace --out` or `dsv32 bench step --out` on a GPU). None is made by the run itself; whoever has the
journal can judge it again, under this policy or another.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from scipy.stats import binomtest, norm

from dsv32_fuzz.events import EvidenceGiven, VerdictReached
from dsv32_fuzz.latency.evidence import ADMISSIBLE, Compared, Evidence, judged, read_evidence
from dsv32_fuzz.router_study.study import LayerReport
from dsv32_ref.config import Config
from dsv32_reports.accuracy import Counts, non_inferiority, read_counts
from dsv32_reports.policy import Policy
from dsv32_reports.statistics import Statistic, controlled, failure_rate_upper_bound

PHASE = "given"
"""Phase of evidence that was not made by the run."""
MAX_BYTES = 1 << 28
_MODEL = Config()
DEFAULT_LIMITS: dict[str, float | None] = {"accuracy": 0.01, "router_precision": None, "latency": 0.01}
"""Share of answers lost; share of tokens that change experts (no limit unless the policy sets one); share slower."""


class Accuracy(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept of results of lm-evaluation-harness."""

    counts: list[Counts]


class RouterStudy(msgspec.Struct, frozen=True, kw_only=True):
    """What `dsv32 router --json` prints."""

    inputs: str
    worst_layer: int
    layers: list[LayerReport]


def accuracy_given(baseline: Path, candidate: Path) -> EvidenceGiven:
    """Two results of lm-evaluation-harness.

    Raises:
        ValueError: see `read_counts`.
    """
    kept = Accuracy(counts=read_counts(baseline, candidate))
    return _given("accuracy", (baseline, candidate), msgspec.to_builtins(kept))


def router_study_given(path: Path) -> EvidenceGiven:
    """A study of the routers of a checkpoint.

    Raises:
        ValueError: another file, or one without a layer.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"larger than {MAX_BYTES} bytes")
        study = msgspec.json.decode(path.read_bytes(), type=RouterStudy)
        if not study.layers:
            raise ValueError("it has no layer")
        list(_of_router(study, 0.5))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); give what dsv32 router --json prints") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: no router study ({error}); give what dsv32 router --json prints") from error
    return _given("router_precision", (path,), msgspec.to_builtins(study))


def latency_given(path: Path) -> EvidenceGiven:
    """Two traces that were compared, or a step timed on a GPU.

    Raises:
        ValueError: another file, one whose samples do not give its numbers, or emulated times.
    """
    try:
        found = read_evidence(path)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); give what dsv32 trace --out writes") from error
    if found.kind not in ADMISSIBLE:
        raise ValueError(
            f"{path}: {found.kind} times say nothing of a GPU; give traces with device work, or a GPU's times"
        )
    if not found.steps:
        raise ValueError(f"{path}: it compares no whole step; give what dsv32 bench step --out writes of one")
    return _given("latency", (path,), msgspec.to_builtins(found))


def _given(kind: Any, paths: Sequence[Path], document: dict[str, Any]) -> EvidenceGiven:
    content = hashlib.sha256()
    for path in paths:
        content.update(path.read_bytes())
    source = ", ".join(path.name for path in paths)
    return EvidenceGiven(kind=kind, source=source, sha256=content.hexdigest(), document=document)


def verdicts(given: Sequence[EvidenceGiven], policy: Policy) -> list[VerdictReached]:
    """What all evidence says under a policy, every question decided together with all others.

    Raises:
        ValueError: a document that is none of its kind.
    """
    asked = [statistic for event in given for statistic in _OF_KIND[event.kind](event.document, policy)]
    return [
        VerdictReached(phase=PHASE, scope=one.scope, verdict=verdict)
        for one, verdict in zip(asked, controlled(asked), strict=True)
    ]


def check_limits(policy: Policy) -> None:
    """See that every limit of these gates is one.

    Raises:
        ValueError: a share that is none.
    """
    for gate in DEFAULT_LIMITS:
        limit = limit_of(gate, policy)
        if limit is not None and not (0 < limit < 1 or (limit == 0 and gate == "latency")):
            raise ValueError(f"the limit of {gate} is {limit:g}; it is a share, above 0 and below 1")


def limit_of(gate: str, policy: Policy) -> float | None:
    """The policy's limit, else the default."""
    own = policy.rule(gate).limit
    return DEFAULT_LIMITS[gate] if own is None else own


def _accuracy(document: dict[str, Any], policy: Policy) -> Iterator[Statistic]:
    margin = limit_of("accuracy", policy)
    assert margin is not None
    for counts in msgspec.convert(document, Accuracy).counts:
        yield non_inferiority(counts, margin)


def _router(document: dict[str, Any], policy: Policy) -> Iterator[Statistic]:
    yield from _of_router(msgspec.convert(document, RouterStudy), limit_of("router_precision", policy))


def _of_router(study: RouterStudy, limit: float | None) -> Iterator[Statistic]:
    """One question per layer: does rounding logits and bias to bf16 change the experts of too many tokens?"""
    studied, mixtures = len({layer.layer for layer in study.layers}), _MODEL.n_layers - _MODEL.n_dense_layers
    if studied < len(study.layers):
        raise ValueError("a layer occurs twice")
    if studied < mixtures:
        partial = f"only {studied} of the model's {mixtures} routers were studied: study the whole checkpoint"
    elif not study.inputs.startswith("recorded"):
        partial = "the gate inputs are synthetic: record real ones, see docs/targets.md"
    else:
        partial = ""
    for layer in study.layers:
        shift: dict[str, float | int | str] = {}
        if layer.weight_shift is not None:
            shift = {"weight_shift": layer.weight_shift}
        both = layer.flips.get("both")
        if both is None:
            raise ValueError(f"layer {layer.layer} has no flips of logits and bias rounded together")
        bound = failure_rate_upper_bound(both.flipped, both.tokens)
        level = 1.0 if limit is None else min(limit, 1.0)
        yield Statistic(
            check="checkpoint_router",
            scope=f"layer {layer.layer}",
            told=(
                f"{both.flipped} of {both.tokens} tokens change experts in bf16, at most {bound:.2%} (95 %, "
                f"Clopper-Pearson); {layer.distinct} distinct bias values, {layer.distinct_bf16} in bf16; "
                f"{layer.load_shift:.2%} of the load moves{_output(layer)}; gate inputs {study.inputs}"
            ),
            limit=f"the policy's {level:.2%} of tokens",
            measured={
                "tokens": both.tokens,
                "flipped": both.flipped,
                "flip_rate": both.flipped / both.tokens,
                "flip_rate_at_most": bound,
                "distinct": layer.distinct,
                "distinct_bf16": layer.distinct_bf16,
                "load_shift": layer.load_shift,
                **shift,
            },
            p_within=float(binomtest(both.flipped, both.tokens, level, alternative="less").pvalue),
            p_beyond=float(binomtest(both.flipped, both.tokens, level, alternative="greater").pvalue),
            never_within=partial,
            judged=limit is not None,
        )


def _output(layer: LayerReport) -> str:
    if layer.weight_shift is None:
        return ""
    return f"; {layer.weight_shift:.2%} of the routed weight moves, which bounds the change of the MoE output"


def _latency(document: dict[str, Any], policy: Policy) -> Iterator[Statistic]:
    limit = limit_of("latency", policy)
    assert limit is not None
    evidence = judged(msgspec.convert(document, Evidence))
    if not evidence.steps:
        raise ValueError("evidence of latency that compares no whole step")
    for one in evidence.steps:
        yield _of_step(one, evidence, limit)


def _of_step(one: Compared, evidence: Evidence, limit: float) -> Statistic:
    """One question per whole step that was timed: is it slower than the limit?"""
    told = f"{one.name}, after / before = {one.ratio:.4f} ({evidence.kind}: {evidence.measured})"
    measured: dict[str, float | int | str] = {"ratio": one.ratio}
    untold, p_within = "", 1.0
    if evidence.kind not in ADMISSIBLE:
        untold = f"{evidence.kind} times say nothing of a GPU"
    elif not evidence.complete:
        untold = "the evidence is incomplete: a run was interrupted, or a trace is damaged"
    elif one.low is None or one.high is None:
        untold = "too few steps for an interval"
    elif evidence.kind == "device" and one.setting not in {null.setting for null in evidence.null}:
        untold = "the same thing was not timed twice, so the noise is unknown"
    elif any(null.verdict in ("faster", "slower") for null in evidence.null):
        untold = "the same thing timed twice differs, so no difference can be told"
    else:
        measured |= {"ratio_low": one.low, "ratio_high": one.high, "slowdown_at_most": one.high - 1}
        told += f", 99 % interval [{one.low:.4f}, {one.high:.4f}]"
        p_within = _p_ratio(one.ratio, one.low, one.high, 1 + limit, evidence.alpha)
    return Statistic(
        check="latency",
        scope=one.name,
        told=told,
        limit=f"{100 * limit:g} % slower",
        measured=measured,
        p_within=p_within,
        untold=untold,
        note="One run a side shows the variation within a run, not that between runs",
    )


def _p_ratio(ratio: float, low: float, high: float, limit: float, alpha: float) -> float:
    """Of "slower than the limit", from the interval of the ratio taken as normal on the log scale."""
    error = (math.log(high) - math.log(low)) / (2 * float(norm.isf(alpha / 2)))
    distance = math.log(ratio) - math.log(limit)
    if error == 0:
        return 0.0 if distance < 0 else 1.0
    return float(norm.cdf(distance / error))


_OF_KIND: dict[str, Callable[[dict[str, Any], Policy], Iterator[Statistic]]] = {
    "accuracy": _accuracy,
    "router_precision": _router,
    "latency": _latency,
}
