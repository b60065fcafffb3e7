"""From verdicts to gates, and from gates to the outcome.

A gate fails if any scope failed, and is MISTRUSTED if it was never reached: what could not run is never a GO.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dsv32_fuzz.checks.catalogue import INPUT_CHECKS
from dsv32_fuzz.checks.own_input import InputCheck
from dsv32_fuzz.events import VerdictReached
from dsv32_fuzz.verdict import Status, Verdict, worst
from dsv32_reports.model import Gate, Outcome, ScopeLine, Traffic
from dsv32_reports.policy import DEFAULT, Policy

EVERYWHERE = ("workload", "decode", "mtp_decode", "chunked_prefill", "mixed", "serving", "batch_mixes")
REQUIRED: dict[str, tuple[str, ...]] = {
    "recorded_plans": ("aiter_e404860_v1", "aiter_e404860_undefined"),
    "key_exhaustive": ("decode", "any_query_length"),
    "sensitivity": (),
    "accuracy": (),
}
"""Where a check must have run; every other check everywhere. What is missing is MISTRUSTED, so it is never a GO."""

GATES: dict[str, tuple[str, str, frozenset[str]]] = {
    "planner": (
        "Emulated planner",
        "the emulated get_mla_metadata_v1 equals AITER's recorded plans, unwritten entries included",
        frozenset({"recorded_plans"}),
    ),
    "input": (
        "Planner input",
        "the KV length of every row that reaches the planner is the one the step asks for",
        frozenset({"planner_input"}),
    ),
    "key": (
        "Metadata key",
        "equal key implies equal planner input, so a plan is only reused for the rows it was made for",
        frozenset({"key_sufficiency", "key_exhaustive"}),
    ),
    "cache": (
        "Cache transparency",
        "a run with the cache gives the kernels the same plan, bit for bit, as a run that always rebuilds",
        frozenset({"cache_transparency"}),
    ),
    "plan": (
        "Plan coverage",
        "the work items in the buffers cover every row's KV range exactly once",
        frozenset({"plan_coverage"}),
    ),
    "metadata": (
        "Step metadata",
        "the attention layers receive the step's rows, at addresses that a captured graph can rely on",
        frozenset({"step_metadata"}),
    ),
    "hygiene": (
        "Buffer hygiene",
        "nothing stale lies past the extent of a step, so a padded or replayed row reads zeros",
        frozenset({"buffer_hygiene"}),
    ),
    "sensitivity": (
        "Sensitivity",
        "known defects, injected on purpose, are seen by some check, and no check fails without one",
        frozenset({"sensitivity"}),
    ),
    "accuracy": (
        "Accuracy",
        "the candidate's score in lm-evaluation-harness is not worse than the baseline's by more than the margin",
        frozenset({"accuracy"}),
    ),
}
OPTIONAL = frozenset({"sensitivity", "accuracy"})
"""Gates whose evidence a run may lack: not judged then, unless the policy requires it; required once there is some."""

NOT_JUDGED = (
    "your checkpoint: what bf16 logits and bias change in its router is measured by `dsv32 router --checkpoint DIR`",
    "latency: nothing is timed here; the claimed 41.522 to 40.234 ms per step is held against traces by `dsv32 trace`",
    "hardware: no MI355X was used; every kernel is an emulation on the CPU",
)

SCOPE_TITLES = {
    "decode": "decode, q = 1 throughout",
    "mtp_decode": "pure MTP decode, q > 1",
    "chunked_prefill": "chunked prefill",
    "mixed": "mixed batches, padding, idle and capture builds",
    "serving": "a small serving engine's actions",
    "batch_mixes": "batch mixes: ramps, churn, permutations, captures",
    "any_query_length": "any query lengths",
    "workload": "serving runs of the PR's workload",
    "aiter_e404860_v1": "plans recorded from AITER e404860",
    "aiter_e404860_undefined": "calls that AITER e404860 leaves undefined",
}


FAMILY_TITLES = {
    "attention": "Attention",
    "router": "Router",
    "indexer": "Indexer",
    "cache": "KV cache",
    "graph": "Graphs",
    "serving": "Serving",
    "step": "Decode step",
    "moe": "Experts",
    "interface": "Kernel interface",
}
"""Titles of the gates of the checks that draw their own input; a family that is not named here is its own title."""

FIGURES: dict[str, tuple[str, str, float]] = {
    f"checks_{family}": ("largest share of its proven bound that an error uses", "worst_budget_used", 1.0)
    for family in ("attention", "step")
}
"""Gate -> what it measures, the name of that measurement, and the largest value that passes."""


def make_gates(
    reached: Sequence[VerdictReached],
    policy: Policy = DEFAULT,
    checks: Sequence[type[InputCheck[Any]]] = INPUT_CHECKS,
) -> list[Gate]:
    """Every gate of the policy, then one for each family of `checks`; one without a verdict is MISTRUSTED."""
    families = dict.fromkeys(check.family for check in checks)
    return [
        *(_gate(name, reached, policy) for name in GATES),
        *(_family_gate(family, [c for c in checks if c.family == family], reached, policy) for family in families),
    ]


def gate_names(checks: Sequence[type[InputCheck[Any]]] = INPUT_CHECKS) -> tuple[str, ...]:
    """Names of all gates, as a policy calls them."""
    return (*GATES, *dict.fromkeys(f"checks_{check.family}" for check in checks))


def _family_gate(
    family: str, checks: Sequence[type[InputCheck[Any]]], reached: Sequence[VerdictReached], policy: Policy
) -> Gate:
    """A family passes if each of its checks has a verdict and none is bad; what does not apply is SKIPPED."""
    by_check = {event.verdict.check: event.verdict for event in reached if event.phase == f"check:{family}"}
    lines = [_check_line(check, by_check.get(check.name)) for check in checks]
    names = ", ".join(check.name.replace("_", " ") for check in checks)
    title = FAMILY_TITLES.get(family, family.replace("_", " ").capitalize())
    return _judged(f"checks_{family}", title, f"no drawn input falsifies: {names}", lines, policy)


def _check_line(check: type[InputCheck[Any]], verdict: Verdict | None) -> ScopeLine:
    scope = check.name.replace("_", " ")
    if verdict is None:
        return ScopeLine(scope=scope, status=Status.MISTRUSTED, summary=f"{check.name} did not run", measured={})
    return ScopeLine(
        scope=scope,
        status=verdict.status,
        summary=verdict.summary,
        measured=verdict.measured,
        histograms=verdict.histograms,
    )


def _gate(name: str, reached: Sequence[VerdictReached], policy: Policy) -> Gate:
    title, meaning, checks = GATES[name]
    outside = policy.scope.outside()
    lines = [
        ScopeLine(
            scope=_scope_text(event),
            status=event.verdict.status,
            summary=event.verdict.summary,
            measured=event.verdict.measured,
            histograms=event.verdict.histograms,
            in_scope=event.scope not in outside,
        )
        for event in reached
        if event.verdict.check in checks
    ]
    ran = {(event.verdict.check, event.scope) for event in reached}
    lines += [
        ScopeLine(
            scope=SCOPE_TITLES[scope],
            status=Status.MISTRUSTED,
            summary=f"{check} did not run",
            measured={},
            in_scope=scope not in outside,
        )
        for check in sorted(checks)
        for scope in REQUIRED.get(check, EVERYWHERE)
        if (check, scope) not in ran
    ]
    return _judged(name, title, meaning, lines, policy)


def _judged(name: str, title: str, meaning: str, lines: list[ScopeLine], policy: Policy) -> Gate:
    """A gate of its lines: the worst of those in scope, and of its figure against the limit."""
    rule = policy.rule(name)
    figure, value, limit = _figure(name, lines, rule.limit)
    statuses = [line.status for line in lines if line.in_scope]
    if value is not None and limit is not None:
        statuses.append(Status.PASSED if value <= limit else Status.FAILED)
    return Gate(
        name=name,
        title=title,
        status=worst(statuses),
        meaning=meaning,
        lines=lines,
        required=(rule.need or _default_need(name, lines)) == "required",
        figure=figure,
        value=value,
        limit=limit,
    )


def _default_need(name: str, lines: Sequence[ScopeLine]) -> str:
    return "optional" if name in OPTIONAL and not lines else "required"


def not_judged(gates: Sequence[Gate]) -> list[str]:
    """What a reader must not take for judged: the fixed list, and optional gates without evidence."""
    missing = [f"{gate.title.lower()}: no evidence was given" for gate in gates if not gate.required and not gate.lines]
    return [*NOT_JUDGED, *missing]


def _figure(name: str, lines: Sequence[ScopeLine], limit: float | None) -> tuple[str, float | None, float | None]:
    """What a gate measures, its worst value in scope, and the limit: the policy's, else its own."""
    if name not in FIGURES:
        return "", None, None
    figure, measurement, own = FIGURES[name]
    values = [float(line.measured[measurement]) for line in lines if line.in_scope and measurement in line.measured]
    return figure, max(values, default=None), own if limit is None else limit


def _scope_text(event: VerdictReached) -> str:
    how = {"proof": "by exhaustion", "workload": "", "recordings": ""}.get(event.phase.partition(":")[0], "fuzzed")
    title = SCOPE_TITLES.get(event.scope, event.scope)
    return f"{title} ({how})" if how else title


def by_traffic(reached: Sequence[VerdictReached], policy: Policy = DEFAULT) -> list[Traffic]:
    """One line per traffic class that was searched, so that GO for one and NO-GO for another are two lines."""
    scopes = list(dict.fromkeys(event.scope for event in reached if event.phase.startswith("fuzz:")))
    lines = []
    for scope in scopes:
        verdicts = [event.verdict for event in reached if event.scope == scope]
        failed = [verdict.check for verdict in verdicts if verdict.status is Status.FAILED]
        status = worst([verdict.status for verdict in verdicts])
        in_scope = scope not in policy.scope.outside()
        lines.append(Traffic(scope=SCOPE_TITLES.get(scope, scope), status=status, failed=failed, in_scope=in_scope))
    return lines


def decide(
    gates: Sequence[Gate],
    *,
    interrupted: bool,
    policy: Policy = DEFAULT,
    evidence: str = "emulated",
    failing_runs: float | None = None,
) -> tuple[Outcome, str]:
    """The outcome and its reason in one line; failures outrank everything, then what could not be judged.

    Args:
        gates: all of them; optional ones are named but decide nothing.
        interrupted: whether the run ended early.
        policy: what a GO needs.
        evidence: the level that the run had.
        failing_runs: upper bound on the share of serving runs that fail, None if no run was tried.
    """
    required = [gate for gate in gates if gate.required]
    failed = [gate.title for gate in required if gate.status is Status.FAILED]
    unclear = [gate.title for gate in required if gate.status is Status.MISTRUSTED]
    passed = [gate.title for gate in required if gate.status is Status.PASSED]
    if failed:
        return Outcome.NO_GO, f"failed: {', '.join(failed)}"
    if interrupted:
        return Outcome.INCONCLUSIVE, "interrupted before every check had run"
    if unclear or not passed:
        return Outcome.INCONCLUSIVE, f"nothing was really tested by: {', '.join(unclear) or 'any gate'}"
    limit = policy.max_failing_runs
    if limit is not None and (failing_runs is None or failing_runs > limit):
        reached = "none was tried" if failing_runs is None else f"the bound reached is {100 * failing_runs:.1f} %"
        reason = f"the policy needs at most {100 * limit:.1f} % of serving runs to fail, {reached}: run more of them"
        return Outcome.INCONCLUSIVE, reason
    if policy.evidence == "hardware" and evidence != "hardware":
        return Outcome.INCONCLUSIVE, "logic GO, hardware evidence missing: the policy asks for a run on an MI355X"
    aside = [gate.title for gate in gates if not gate.required and gate.lines and gate.status is not Status.PASSED]
    told = f"; not required and not passed: {', '.join(aside)}" if aside else ""
    return Outcome.GO, f"{len(passed)} gates passed: {', '.join(passed)}{told}"
