"""What the page and the terminal say in the same words."""

from __future__ import annotations

import shlex
from collections.abc import Iterable

from dsv32_fuzz.targets.registry import IN_TREE
from dsv32_fuzz.verdict import Status
from dsv32_reports.gates import SCOPE_TITLES
from dsv32_reports.model import Finding, Outcome, Report
from dsv32_reports.policy import Policy

_CONTROL = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)], "\N{REPLACEMENT CHARACTER}")


def printable(text: str) -> str:
    """The text without control characters, with which a name or a reason could rewrite what a terminal or XML shows."""
    return text.translate(_CONTROL)


def headline(report: Report) -> str:
    """The outcome as one sentence for the person who decides."""
    required = [gate for gate in report.gates if gate.required]
    failed = sum(gate.status is Status.FAILED for gate in required)
    match report.outcome:
        case Outcome.GO:
            return f"Nothing speaks against deploying {report.options_text}, as far as {report.evidence} evidence goes."
        case Outcome.NO_GO:
            return f"Do not deploy {report.options_text}: {failed} of {len(required)} required gates failed."
        case Outcome.INCONCLUSIVE:
            return f"Not decided: nothing here is a reason to deploy {report.options_text}."


def sentence(text: str) -> str:
    """The text with a capital at its beginning and a full stop at its end."""
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith('.') else '.'}"


def scope_title(scope: str) -> str:
    """A traffic class in words; a check that draws its own input is its own scope."""
    return SCOPE_TITLES.get(scope) or f"own input of {scope.replace('_', ' ')}"


def scope_text(policy: Policy) -> str:
    """The traffic that a policy asks to be safe."""
    drafts = f"up to {policy.scope.mtp_depth} drafts a step" if policy.scope.mtp_depth else "no drafts"
    return f"{drafts}, {'with' if policy.scope.chunked_prefill else 'without'} chunked prefill"


def replay_command(file: str, target: str) -> str:
    """The command that shows a counterexample again; another target than the in-tree path is named."""
    on = "" if target == IN_TREE else f" --target {shlex.quote(target)}"
    return f"dsv32 replay {shlex.quote(file)}{on}"


def number(value: float | int | str | None) -> str:
    """A figure to three digits; counts and texts as they are."""
    if value is None:
        return ""
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.3g}"


def by_scope(findings: Iterable[Finding]) -> list[tuple[str, list[Finding]]]:
    """Counterexamples of the same scope together, the shortest case first."""
    groups: dict[str, list[Finding]] = {}
    for found in findings:
        groups.setdefault(found.scope, []).append(found)
    return [(scope, sorted(found, key=lambda f: sum(map(len, f.shown)))) for scope, found in groups.items()]
