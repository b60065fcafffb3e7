"""Does a long decode drift: hundreds of steps beside the reference, with forced decisions and with free ones.

Forced: the path takes the reference's keys and experts, so its logits differ by arithmetic alone. The steps where they
differ most are judged stage by stage against proven bounds on the inputs that the path had there: if the largest drift
is accounted for, the smaller ones hide nothing of their size.

Free: the path decides for itself, and every choice of every step must be one that real arithmetic on the path's own
inputs may call for (a certified flip, or no flip). From the first flip on the two runs are different runs, so the
distance of their logits is shown and not judged.

No tolerance is set by hand. What the reference and the path share (weights, schedule) is drawn by seed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from dsv32_fuzz.checks import TARGET_ERRORS, add_histograms, told
from dsv32_fuzz.events import Event, PhaseStarted, Progress, TableMade, VerdictReached
from dsv32_fuzz.stages.bounds import Recording, Values, values
from dsv32_fuzz.stages.divergence import experts_chosen, first_flip, keys_chosen
from dsv32_fuzz.stages.long_decode import Event as Step
from dsv32_fuzz.stages.long_decode import logits_error, run_path, run_reference, schedule
from dsv32_fuzz.stages.recorder import MIXED, config_for, path_of, recording
from dsv32_fuzz.targets import Target
from dsv32_fuzz.verdict import Status, Verdict
from dsv32_ref.bounds import Certificate, judge

PHASE = "drift"
FORCED, FREE = "drift_forced", "drift_free"
TRAFFIC = ("decode", "mixed")
STEPS_ON_HARDWARE = 40
"""At the widths of real kernels a step of the reference costs a hundred times as much."""
Measured = dict[str, float | int | str]


def decode_drift(target: Target, steps: int, judged: int, run_seed: int) -> Iterator[Event]:
    """For plain decode and for mixed traffic, a verdict for forced and one for free decisions; then the table `drift`,
    the error of the logits step by step.

    Args:
        target: one with kernels; any other is SKIPPED.
        steps: of each schedule; at most `STEPS_ON_HARDWARE` on real kernels.
        judged: steps of a forced run whose stages are held against their bounds, those that drift most.
        run_seed: of the schedules.
    """
    yield PhaseStarted(phase=PHASE, title=f"decode {steps} steps beside the reference, decisions forced and free")
    steps = steps if target.evidence == "emulated" else min(steps, STEPS_ON_HARDWARE)
    errors: dict[str, dict[str, list[float]]] = {}
    for number, traffic in enumerate(TRAFFIC):
        errors[traffic] = {}
        for verdict in _of_traffic(target, traffic, steps, judged, run_seed, errors[traffic]):
            yield VerdictReached(phase=PHASE, scope=traffic, verdict=verdict)
        yield Progress(phase=PHASE, done=(number + 1) / len(TRAFFIC), text=f"{traffic} traffic done")
    yield TableMade(name=PHASE, rows=[row for traffic in TRAFFIC for row in _rows(traffic, errors[traffic])])


def _of_traffic(
    target: Target, traffic: str, steps: int, judged: int, run_seed: int, errors: dict[str, list[float]]
) -> Iterator[Verdict]:
    """The verdict of each check; `errors` gets the error of each step's logits."""
    if target.kernels is None:
        for check in (FORCED, FREE):
            yield _verdict(check, Status.SKIPPED, f"the target {target.name} offers no kernels, only its plans", {})
        return
    config = config_for(target, MIXED)
    events = schedule(steps, run_seed, config, traffic=traffic)
    reference = run_reference(events, config)
    for check in (FORCED, FREE):
        yield _run(check, target, events, reference, judged, errors)


def _run(
    check: str,
    target: Target,
    events: list[Step],
    reference: list[Values],
    judged: int,
    errors: dict[str, list[float]],
) -> Verdict:
    try:
        path = path_of(target, config_for(target, MIXED))
        rec = recording(path, run_path(path, events, reference if check == FORCED else None))
    except TARGET_ERRORS as error:
        return _verdict(check, Status.FAILED, told(error), {})
    errors[check] = [logits_error(a, b) for a, b in zip(rec.steps, reference, strict=True)]
    return judge_forced(rec, errors[check], judged) if check == FORCED else judge_free(rec, reference)


def judge_forced(rec: Recording, errors: list[float], judged: int) -> Verdict:
    """The `judged` steps of the largest `errors`, every stage of them against its bound."""
    order = sorted(range(len(errors)), key=lambda step: -errors[step])[:judged]
    if not order:
        return _verdict(FORCED, Status.MISTRUSTED, "no step had a live row", {"steps": 0})
    counts: Measured = {"steps": len(errors), "rows": len(rec.of("positions", -1)), "steps_judged": len(order)}
    worst, elements, violation = 0.0, 0, ""
    histograms: list[dict[str, list[int]]] = []
    for step in order:
        for stage, computed, bound in values(replace(rec, steps=[rec.steps[step]])):
            budget = judge(computed, bound)
            worst, elements = max(worst, budget.worst), elements + budget.elements
            histograms.append({f"budget used: {stage.partition(' ')[0]}": list(budget.histogram)})
            if budget.first is not None and not violation:
                violation = f"step {step}: {budget.describe(stage)}"
    measured = counts | {"elements": elements, "worst_budget_used": worst, "largest_logits_error": max(errors)}
    text = (
        f"{len(errors)} steps; the logits differ by {max(errors):.2g} at most (relative, step {order[0]}); "
        f"at the {len(order)} steps that differ most every stage lies within its bound"
    )
    status = Status.FAILED if violation else Status.PASSED
    return _verdict(FORCED, status, violation or text, measured, add_histograms(histograms))


def judge_free(rec: Recording, reference: list[Values]) -> Verdict:
    """Every choice of keys and experts of every step, by what the path had there."""
    if not rec.steps:
        return _verdict(FREE, Status.MISTRUSTED, "no step had a live row", {"steps": 0})
    made, violation = 0, ""
    for layer in range(rec.config.n_layers):
        certificates = [("keys", keys_chosen(rec, layer))]
        if rec.config.kind(layer) == "moe":
            certificates.append(("experts", experts_chosen(rec, layer)))
        for what, certificate in certificates:
            made += certificate.legal.numel()
            if not certificate.passed and not violation:
                violation = _illegal(rec, certificate, f"{what} of layer {layer}")
    errors = [logits_error(a, b) for a, b in zip(rec.steps, reference, strict=True)]
    measured: Measured = {"steps": len(errors), "choices": made, "largest_logits_error": max(errors)}
    if violation:
        return _verdict(FREE, Status.FAILED, violation, measured)
    flip = first_flip(rec, reference)
    first = "no choice differs from the reference's"
    if flip is not None:
        measured |= {"first_flip_step": flip.step, "first_flip": flip.kind}
        first = f"the runs part at step {flip.step}, layer {flip.layer}, by a legal choice of another {flip.kind}"
    text = f"{len(errors)} steps, {made} choices, each possible for the path's own inputs; {first}"
    return _verdict(FREE, Status.PASSED, text, measured)


def _illegal(rec: Recording, certificate: Certificate, what: str) -> str:
    row, step = certificate.first_illegal or 0, 0
    while row >= len(rec.steps[step]["positions", -1]):
        row, step = row - len(rec.steps[step]["positions", -1]), step + 1
    return f"step {step}, row {row} of it: {certificate.describe(what)}"


def _rows(traffic: str, errors: dict[str, list[float]]) -> Iterator[dict[str, Any]]:
    for step, row in enumerate(zip(*errors.values(), strict=True)):
        shown = {name.removeprefix("drift_"): float(f"{value:.4g}") for name, value in zip(errors, row, strict=True)}
        yield {"traffic": traffic, "step": step, **shown}


def _verdict(
    check: str, status: Status, summary: str, measured: Measured, histograms: dict[str, list[int]] | None = None
) -> Verdict:
    return Verdict(check=check, status=status, summary=summary, measured=measured, histograms=histograms or {})
