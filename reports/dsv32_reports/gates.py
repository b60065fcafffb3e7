"""From verdicts to gates, and from gates to the outcome.

A gate fails if any scope failed, and is MISTRUSTED if it was never reached: what could not run is never a GO. A gate
whose evidence the policy does not require, and of which there is none, is SKIPPED: shown as NOT JUDGED, never hidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dsv32_fuzz.checks.catalogue import INPUT_CHECKS
from dsv32_fuzz.checks.own_input import InputCheck
from dsv32_fuzz.events import RunStarted, VerdictReached
from dsv32_fuzz.verdict import Status, Verdict, worst
from dsv32_reports.given import DEFAULT_LIMITS
from dsv32_reports.model import Gate, Outcome, ScopeLine, Traffic
from dsv32_reports.policy import DEFAULT, Policy

EVERYWHERE = ("workload", "decode", "mtp_decode", "chunked_prefill", "mixed", "serving", "batch_mixes")
REQUIRED: dict[str, tuple[str, ...]] = {
    "recorded_plans": ("aiter_e404860_v1", "aiter_e404860_undefined"),
    "key_exhaustive": ("decode", "any_query_length"),
    "recorded_decodes": ("recorded",),
    "drift_forced": ("decode", "mixed"),
    "drift_free": ("decode", "mixed"),
    "sensitivity": (),
    "accuracy": (),
    "checkpoint_router": (),
    "latency": (),
    "corpus_cases": (),
    "ledger": (),
}
"""Where a check must have run; every other check everywhere. What is missing is MISTRUSTED, so it is never a GO."""

GATES: dict[str, tuple[str, str, frozenset[str]]] = {
    "reference": (
        "Reference self-check",
        "the reference gives the recorded decodes of another implementation, and refuses one recorded with a defect",
        frozenset({"recorded_decodes"}),
    ),
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
    "drift": (
        "Decode drift",
        "over hundreds of steps beside the reference errors stay within bounds, and free choices are possible ones",
        frozenset({"drift_forced", "drift_free"}),
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
    "router_precision": (
        "Router precision",
        "rounding router logits and bias to bf16 changes the experts of few enough tokens of the user's checkpoint",
        frozenset({"checkpoint_router"}),
    ),
    "latency": (
        "Latency",
        "a step on the device is not slower than before by more than the limit",
        frozenset({"latency"}),
    ),
    "corpus": (
        "Corpus and ledger",
        "no known case fails but what the ledger lists; no entry of it is expired, none passes unexpectedly",
        frozenset({"corpus_cases", "ledger"}),
    ),
    "hardware": (
        "Hardware evidence",
        "the checks ran on the kernels of a real MI355X",
        frozenset(),
    ),
}

NO_EVIDENCE = {
    "sensitivity": "this profile injects no faults; choose --profile signoff or release",
    "accuracy": "give two results of lm-evaluation-harness with --accuracy",
    "router_precision": "what bf16 changes in the router of your checkpoint says dsv32 router --checkpoint DIR --json; "
    "give its output with --router-study",
    "latency": "nothing is timed here; compare traces of your engine by dsv32 trace BEFORE AFTER --out FILE, and give "
    "it with --latency",
    "corpus": "give known cases with --corpus, and failures that are allowed with --ledger",
    "hardware": "no MI355X was used; every kernel is an emulation on the CPU",
}
"""Gates whose evidence a run may lack, and how to give it: not judged then, unless the policy requires it."""

STATISTICAL = frozenset({"accuracy", "router_precision", "latency"})
"""Gates that are judged by `statistics.controlled`: the figure of one is shown beside its limit and decides nothing."""

SCOPE_TITLES = {
    "decode": "decode, q = 1 throughout",
    "mtp_decode": "pure MTP decode, q > 1",
    "chunked_prefill": "chunked prefill",
    "mixed": "mixed batches, padding, idle and capture builds",
    "serving": "a small serving engine's actions",
    "batch_mixes": "batch mixes: ramps, churn, permutations, captures",
    "any_query_length": "any query lengths",
    "recorded": "recorded decodes of another implementation",
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

_BUDGET = ("largest share of its proven bound that an error uses", "worst_budget_used", 1.0)
FIGURES: dict[str, tuple[str, str, float | None]] = {
    "checks_attention": _BUDGET,
    "checks_step": _BUDGET,
    "drift": _BUDGET,
    "accuracy": ("share of answers lost at most (95 %)", "largest_loss", DEFAULT_LIMITS["accuracy"]),
    "router_precision": (
        "share of tokens that change experts at most (95 %)",
        "flip_rate_at_most",
        DEFAULT_LIMITS["router_precision"],
    ),
    "latency": ("share by which a step is slower at most (99 %)", "slowdown_at_most", DEFAULT_LIMITS["latency"]),
}
"""Gate -> what it measures, the name of that measurement, and the largest value that passes (None: none is set)."""


def make_gates(
    reached: Sequence[VerdictReached],
    policy: Policy = DEFAULT,
    checks: Sequence[type[InputCheck[Any]]] = INPUT_CHECKS,
    run: RunStarted | None = None,
) -> list[Gate]:
    """Every gate of the policy, then one for each family of `checks`; one without a verdict is MISTRUSTED.

    `run` says which target and evidence the verdicts are of, and what evidence was to be made.
    """
    families = dict.fromkeys(check.family for check in checks)
    lines = {name: _lines(name, reached, policy, run) for name in GATES}
    lines["hardware"] = _hardware(run)
    meanings = {name: GATES[name][:2] for name in GATES}
    for family in families:
        own = [check for check in checks if check.family == family]
        name, names = f"checks_{family}", ", ".join(check.name.replace("_", " ") for check in own)
        by_check = {event.verdict.check: event.verdict for event in reached if event.phase == f"check:{family}"}
        lines[name] = [_check_line(check, by_check.get(check.name)) for check in own]
        title = FAMILY_TITLES.get(family, family.replace("_", " ").capitalize())
        meanings[name] = title, f"no drawn input falsifies: {names}"
    unknown = unknown_releases(run.fingerprint) if run else []
    return [_judged(name, *meanings[name], found, unknown, policy) for name, found in lines.items()]


def gate_names(checks: Sequence[type[InputCheck[Any]]] = INPUT_CHECKS) -> tuple[str, ...]:
    """Names of all gates, as a policy calls them."""
    return (*GATES, *dict.fromkeys(f"checks_{check.family}" for check in checks))


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


def _lines(name: str, reached: Sequence[VerdictReached], policy: Policy, run: RunStarted | None) -> list[ScopeLine]:
    """What was found about a gate, and for what should have been looked at and was not a MISTRUSTED line."""
    checks, outside = GATES[name][2], policy.scope.outside()
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
    promised: dict[str, tuple[str, ...]] = {
        "corpus_cases": ("cases",) if run and run.corpus else (),
        "ledger": ("ledger",) if run and run.ledger else (),
    }
    lines += [
        ScopeLine(
            scope=SCOPE_TITLES.get(scope, scope),
            status=Status.MISTRUSTED,
            summary=f"{check} did not run",
            measured={},
            in_scope=scope not in outside,
        )
        for check in sorted(checks)
        for scope in promised.get(check, REQUIRED.get(check, EVERYWHERE))
        if (check, scope) not in ran
    ]
    return lines


def _hardware(run: RunStarted | None) -> list[ScopeLine]:
    """Whether the run says that it used hardware, and its fingerprint which."""
    gpu = run.fingerprint.get("gpu", "none") if run else "none"
    if run is None or run.evidence != "hardware":
        return []
    named = gpu != "none"
    summary = f"ran on {gpu}" if named else "says hardware, but its fingerprint names no GPU"
    measured: dict[str, float | int | str] = {
        name: run.fingerprint[name] for name in ("gpu", "rocm", "hip", "amd-aiter") if name in run.fingerprint
    }
    status = Status.PASSED if named else Status.MISTRUSTED
    return [ScopeLine(scope="this run", status=status, summary=summary, measured=measured)]


def unknown_releases(fingerprint: Mapping[str, str]) -> list[str]:
    """Releases under test that the suite was not written for, in words: every `NAME known` of the fingerprint that is
    not `yes`.
    """
    return [
        f"{name} {fingerprint.get(name, 'of unknown version')}"
        for key, value in fingerprint.items()
        if key.endswith(" known") and value != "yes" and (name := key.removesuffix(" known"))
    ]


INDEPENDENT = frozenset({"planner", "reference", "accuracy", "router_precision", "latency", "hardware"})
"""Gates that do not drive the target, so that its release does not matter to them."""


def _judged(
    name: str, title: str, meaning: str, lines: list[ScopeLine], unknown: Sequence[str], policy: Policy
) -> Gate:
    """A gate of its lines: the worst of those in scope, and of its figure against the limit."""
    rule = policy.rule(name)
    need = "required" if name == "hardware" and policy.evidence == "hardware" else rule.need
    if not lines and name in NO_EVIDENCE:
        status = Status.MISTRUSTED if need == "required" else Status.SKIPPED
        lines = [ScopeLine(scope="evidence", status=status, summary=NO_EVIDENCE[name], measured={})]
    elif unknown and name not in INDEPENDENT:
        text = f"the suite was not written for {', '.join(unknown)}: what passes here may rest on what it does not know"
        lines = [*lines, ScopeLine(scope="release", status=Status.MISTRUSTED, summary=text, measured={})]
    figure, value, limit = _figure(name, lines, rule.limit)
    statuses = [line.status for line in lines if line.in_scope]
    if value is not None and limit is not None and name not in STATISTICAL:
        statuses.append(Status.PASSED if value <= limit else Status.FAILED)
    status = worst(statuses)
    return Gate(
        name=name,
        title=title,
        status=status,
        meaning=meaning,
        lines=lines,
        required=(need or ("optional" if status is Status.SKIPPED else "required")) == "required",
        figure=figure,
        value=value,
        limit=limit,
    )


def not_judged(gates: Sequence[Gate]) -> list[str]:
    """What a reader must not take for judged: every gate that is SKIPPED, and how evidence of it can be given."""
    return [f"{gate.title.lower()}: {gate.lines[0].summary}" for gate in gates if not gate.judged and gate.lines]


def _figure(name: str, lines: Sequence[ScopeLine], limit: float | None) -> tuple[str, float | None, float | None]:
    """What a gate measures, its worst value in scope, and the limit: the policy's, else its own."""
    if name not in FIGURES:
        return "", None, None
    figure, measurement, own = FIGURES[name]
    values = [float(line.measured[measurement]) for line in lines if line.in_scope and measurement in line.measured]
    return figure, max(values, default=None), own if limit is None else limit


def _scope_text(event: VerdictReached) -> str:
    phase = event.phase.partition(":")[0]
    how = "fuzzed" if phase == "fuzz" else {"proof": "by exhaustion"}.get(phase, "")
    if phase == "drift":
        how = f"{event.verdict.check.removeprefix('drift_')} decisions"
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
    failing_runs: float | None = None,
) -> tuple[Outcome, str]:
    """The outcome and its reason in one line; failures outrank everything, then what could not be judged.

    Args:
        gates: all of them; optional ones are named but decide nothing.
        interrupted: whether the run ended early.
        policy: what a GO needs.
        failing_runs: upper bound on the share of serving runs that fail, None if no run was tried.
    """
    required = [gate for gate in gates if gate.required]
    logic = [gate for gate in required if gate.name != "hardware"]
    failed = [gate.title for gate in required if gate.status is Status.FAILED]
    unclear = [gate.title for gate in logic if gate.status in (Status.MISTRUSTED, Status.SKIPPED)]
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
    missing = [gate for gate in required if gate.status is not Status.PASSED]
    if missing:
        reason = f"logic GO, hardware evidence missing: the policy asks for it, and {missing[0].lines[0].summary}"
        return Outcome.INCONCLUSIVE, reason
    aside = [gate.title for gate in gates if not gate.required and gate.judged and gate.status is not Status.PASSED]
    told = f"; not required and not passed: {', '.join(aside)}" if aside else ""
    open_ = [gate.title for gate in gates if not gate.judged]
    told += f"; not judged: {', '.join(open_)}" if open_ else ""
    return Outcome.GO, f"{len(passed)} gates passed: {', '.join(passed)}{told}"
