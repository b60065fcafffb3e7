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

EVERYWHERE = ("workload", "decode", "mtp_decode", "chunked_prefill", "mixed")
REQUIRED: dict[str, tuple[str, ...]] = {
    "recorded_plans": ("aiter_e404860_v1", "aiter_e404860_undefined"),
    "key_exhaustive": ("decode", "any_query_length"),
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
}

NOT_JUDGED = (
    "bf16 router precision: expert choices are not checked yet, so neither bf16 logits nor bf16 bias is judged",
    "attention numerics: plans are judged, attention outputs are not",
    "latency: nothing is timed; the claimed 41.522 to 40.234 ms per step is neither confirmed nor refuted",
    "hardware: no MI355X was used; every kernel is an emulation on the CPU",
)

SCOPE_TITLES = {
    "decode": "decode, q = 1 throughout",
    "mtp_decode": "pure MTP decode, q > 1",
    "chunked_prefill": "chunked prefill",
    "mixed": "mixed batches, padding, idle and capture builds",
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
}
"""Titles of the gates of the checks that draw their own input; a family that is not named here is its own title."""


def make_gates(reached: Sequence[VerdictReached], checks: Sequence[type[InputCheck[Any]]] = INPUT_CHECKS) -> list[Gate]:
    """Every gate of the policy, then one for each family of `checks`; one without a verdict is MISTRUSTED."""
    families = dict.fromkeys(check.family for check in checks)
    return [
        *(_gate(name, reached) for name in GATES),
        *(_family_gate(family, [c for c in checks if c.family == family], reached) for family in families),
    ]


def _family_gate(family: str, checks: Sequence[type[InputCheck[Any]]], reached: Sequence[VerdictReached]) -> Gate:
    """A family passes if each of its checks has a verdict and none is bad; what does not apply is SKIPPED."""
    phase = f"check:{family}"
    by_check = {event.verdict.check: event.verdict for event in reached if event.phase == phase}
    lines = [_check_line(check, by_check.get(check.name)) for check in checks]
    names = ", ".join(check.name.replace("_", " ") for check in checks)
    return Gate(
        name=phase,
        title=FAMILY_TITLES.get(family, family.replace("_", " ").capitalize()),
        status=worst([line.status for line in lines]),
        meaning=f"no drawn input falsifies: {names}",
        lines=lines,
    )


def _check_line(check: type[InputCheck[Any]], verdict: Verdict | None) -> ScopeLine:
    scope = check.name.replace("_", " ")
    if verdict is None:
        return ScopeLine(scope=scope, status=Status.MISTRUSTED, summary=f"{check.name} did not run", measured={})
    return ScopeLine(scope=scope, status=verdict.status, summary=verdict.summary, measured=verdict.measured)


def _gate(name: str, reached: Sequence[VerdictReached]) -> Gate:
    title, meaning, checks = GATES[name]
    lines = [
        ScopeLine(
            scope=_scope_text(event),
            status=event.verdict.status,
            summary=event.verdict.summary,
            measured=event.verdict.measured,
        )
        for event in reached
        if event.verdict.check in checks
    ]
    ran = {(event.verdict.check, event.scope) for event in reached}
    lines += [
        ScopeLine(scope=SCOPE_TITLES[scope], status=Status.MISTRUSTED, summary=f"{check} did not run", measured={})
        for check in sorted(checks)
        for scope in REQUIRED.get(check, EVERYWHERE)
        if (check, scope) not in ran
    ]
    status = worst([line.status for line in lines])
    return Gate(name=name, title=title, status=status, meaning=meaning, lines=lines)


def _scope_text(event: VerdictReached) -> str:
    how = {"proof": "by exhaustion", "workload": "", "recordings": ""}.get(event.phase.partition(":")[0], "fuzzed")
    title = SCOPE_TITLES.get(event.scope, event.scope)
    return f"{title} ({how})" if how else title


def by_traffic(reached: Sequence[VerdictReached]) -> list[Traffic]:
    """One line per traffic class that was searched, so that GO for one and NO-GO for another are two lines."""
    scopes = list(dict.fromkeys(event.scope for event in reached if event.phase.startswith("fuzz:")))
    lines = []
    for scope in scopes:
        verdicts = [event.verdict for event in reached if event.scope == scope]
        failed = [verdict.check for verdict in verdicts if verdict.status is Status.FAILED]
        status = worst([verdict.status for verdict in verdicts])
        lines.append(Traffic(scope=SCOPE_TITLES.get(scope, scope), status=status, failed=failed))
    return lines


def decide(gates: Sequence[Gate], *, interrupted: bool) -> tuple[Outcome, str]:
    """The outcome and its reason in one line; failures outrank everything, then what could not be judged."""
    failed = [gate.title for gate in gates if gate.status is Status.FAILED]
    unclear = [gate.title for gate in gates if gate.status is Status.MISTRUSTED]
    passed = [gate.title for gate in gates if gate.status is Status.PASSED]
    if failed:
        return Outcome.NO_GO, f"failed: {', '.join(failed)}"
    if interrupted:
        return Outcome.INCONCLUSIVE, "interrupted before every check had run"
    if unclear or not passed:
        return Outcome.INCONCLUSIVE, f"nothing was really tested by: {', '.join(unclear) or 'any gate'}"
    return Outcome.GO, f"{len(passed)} gates passed: {', '.join(passed)}"
