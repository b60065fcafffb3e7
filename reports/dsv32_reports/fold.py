"""From the events of a run to its report: a pure fold, so that whoever has the journal can compute the report again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from dsv32_fast.batch import StepBatch
from dsv32_fast.options import Options, describe
from dsv32_fuzz.case import AnyCase, Case
from dsv32_fuzz.events import (
    CounterexampleFound,
    Event,
    EvidenceGiven,
    InputSpaceCovered,
    PhaseFinished,
    RunFinished,
    RunStarted,
    SequencesChecked,
    TableMade,
    VerdictReached,
)
from dsv32_fuzz.search.coverage import EVENTS, LENGTHS, Coverage, merge_coverage, possible_cells
from dsv32_fuzz.verdict import Status
from dsv32_reports.gates import by_traffic, decide, make_gates, not_judged
from dsv32_reports.given import verdicts as given_verdicts
from dsv32_reports.model import Covered, Finding, Given, Outcome, Previous, Report, Sequences
from dsv32_reports.policy import Policy, policy_of
from dsv32_reports.statistics import failure_rate_upper_bound
from dsv32_reports.wording import replay_command


class Then(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept of the sign-off before, as `RunStarted.previous`."""

    id: str
    outcome: Outcome
    options_text: str
    policy: Policy
    fingerprint: dict[str, str]
    digest: str


@dataclass
class Evidence:
    """Everything a run said, sorted by kind."""

    started: RunStarted | None = None
    given: list[EvidenceGiven] = field(default_factory=list)
    verdicts: list[VerdictReached] = field(default_factory=list)
    findings: dict[str, CounterexampleFound] = field(default_factory=dict)
    """By file name in the bundle's folder `cases`."""
    sequences: SequencesChecked | None = None
    coverage: list[Coverage] = field(default_factory=list)
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    seconds: float = 0.0
    """Of all finished phases, over all sessions of a run that was resumed."""
    finished: RunFinished | None = None

    def add(self, event: Event) -> None:
        """Take one event in."""
        match event:
            case RunStarted():
                self.started = event
            case EvidenceGiven():
                self.given.append(event)
            case VerdictReached():
                self.verdicts.append(event)
            case CounterexampleFound():
                self.findings[f"{event.case.scope}-{event.case.check}.json"] = event
            case SequencesChecked():
                self.sequences = event
            case InputSpaceCovered():
                self.coverage.append(event.coverage)
            case TableMade():
                self.tables[event.name] = event.rows
            case PhaseFinished():
                self.seconds += event.seconds
            case RunFinished():
                self.finished = event


def fold(events: Iterable[Event], folder: str) -> Report:
    """The report of a run, `folder` being the name that its commands call the bundle by.

    Raises:
        ValueError: the events do not begin with `RunStarted`.
    """
    evidence = Evidence()
    for event in events:
        evidence.add(event)
    return make_report(evidence, folder)


def make_report(evidence: Evidence, folder: str) -> Report:
    """Fold the evidence into gates, outcome and pages' data.

    Raises:
        ValueError: the run never started.
    """
    started = evidence.started
    if started is None:
        raise ValueError("the journal does not begin with RunStarted, so it is not one of a sign-off")
    policy = policy_of(started.policy)
    verdicts = [*evidence.verdicts, *given_verdicts(evidence.given, policy)]
    gates = make_gates(verdicts, policy, run=started)
    finished = evidence.finished or RunFinished(seconds=0.0, interrupted=True)
    sequences = _sequences(evidence.sequences)
    outcome, reason = decide(
        gates,
        interrupted=finished.interrupted,
        policy=policy,
        failing_runs=sequences.failure_rate_upper_bound if sequences else None,
    )
    return Report(
        id=started.id,
        folder=folder,
        outcome=outcome,
        reason=reason,
        evidence=started.evidence,
        target=started.target,
        options=started.options,
        options_text=started.options_text,
        started=started.started,
        seconds=round(evidence.seconds, 1),
        seed=started.seed,
        profile=started.profile,
        approver=started.approver,
        policy=policy,
        previous=_previous(started),
        given=[Given(kind=one.kind, source=one.source, sha256=one.sha256) for one in evidence.given],
        gates=gates,
        traffic=by_traffic(verdicts, policy),
        findings=[finding(found, name, folder) for name, found in evidence.findings.items()],
        sequences=sequences,
        coverage=covered(merge_coverage(evidence.coverage), started.options),
        tables=evidence.tables,
        not_judged=not_judged(gates),
        fingerprint=started.fingerprint,
    )


def covered(coverage: Coverage, options: Options | None) -> Covered:
    """Which cells of the input space were visited, by length and query class, and how often each rare event was."""
    cells = possible_cells()
    suffix = describe(options) if options else "unknown"
    counts = {cell: coverage.cells.get("/".join((*cell, suffix)), 0) for cell in cells}
    table: dict[str, dict[str, int]] = {length: {} for length in LENGTHS}
    for (length, query, _, _), count in counts.items():
        table[length][query] = table[length].get(query, 0) + count
    return Covered(
        cases=coverage.cases,
        steps=coverage.steps,
        visited=sum(count > 0 for count in counts.values()),
        possible=len(cells),
        steps_by_length_and_query=table,
        rare_events={name: coverage.events.get(name, 0) for name in EVENTS},
    )


def finding(found: CounterexampleFound, name: str, folder: str) -> Finding:
    """A counterexample as the report shows it; `name` is its file in the bundle's folder `cases`."""
    case = found.case
    path = Path(folder) / "cases" / name
    return Finding(
        check=case.check,
        scope=case.scope,
        summary=found.summary,
        classification=classify(found),
        also_fails=[v.check for v in found.verdicts if v.status is Status.FAILED and v.check != case.check],
        shown=shown_case(case),
        file=f"cases/{name}",
        command=replay_command(str(path), case.target),
    )


def classify(found: CounterexampleFound) -> str:
    """What kind of harm the counterexample does, judged by what all checks say of it."""
    by_check = {verdict.check: verdict for verdict in found.verdicts}
    key, plan = by_check.get("key_sufficiency"), by_check.get("plan_coverage")
    covered = plan is not None and plan.status is Status.PASSED
    if key and key.status is Status.FAILED and covered:
        if key.measured["wrongful"] == key.measured["wrongful_split_cap_only"]:
            return "split cap only: plan differs, coverage still exact; result bits may depend on what ran before"
        return "reused plan made for other rows; coverage happens to stay exact"
    if plan is not None and plan.status is Status.FAILED:
        return "wrong rows: some lose keys, or read keys of a neighbouring request"
    return {
        "buffer_hygiene": "stale entries stay where a padded or replayed row reads",
        "planner_input": "the builder asks the planner for other rows than the step has",
        "cache_transparency": "the plan differs from a rebuild",
    }.get(found.case.check, "")


def shown_case(case: AnyCase) -> list[str]:
    """A case in at most eight lines: its step batches, or the fields of the input that a check drew."""
    if isinstance(case, Case):
        return [f"step {i}: {show_step(step)}" for i, step in enumerate(case.steps[:8])]
    # As JSON, so that a tuple and the list that a journal keeps of it read alike.
    return [f"{name}: {msgspec.json.encode(value).decode()}" for name, value in [*case.input.items()][:8]]


def show_step(step: StepBatch) -> str:
    """One step in one line; long lists are cut."""

    def cut(values: tuple[int, ...]) -> str:
        return (
            str(list(values)) if len(values) <= 8 else f"[{', '.join(map(str, values[:6]))}, ... {len(values)} in all]"
        )

    exact = max(step.seq_lens, default=0)
    bound = f" max_seq_len={step.max_seq_len}" if step.max_seq_len != exact else ""
    padded = f" padded to {step.num_tokens} rows" if step.num_tokens != step.num_query_tokens else ""
    return f"q={cut(step.query_lens)} seq={cut(step.seq_lens)}{padded}{bound}"


def _sequences(checked: SequencesChecked | None) -> Sequences | None:
    if checked is None or checked.sequences == 0:
        return None
    return Sequences(
        sequences=checked.sequences,
        failed=checked.failed,
        step_batches=checked.step_batches,
        failure_rate_upper_bound=failure_rate_upper_bound(checked.failed, checked.sequences),
    )


def _previous(started: RunStarted) -> Previous | None:
    """What changed since the sign-off that was given for comparison."""
    if started.previous is None:
        return None
    then = msgspec.convert(started.previous, Then)
    before = {"options": then.options_text, **_policy_fields(then.policy), **then.fingerprint}
    now = {"options": started.options_text, **_policy_fields(policy_of(started.policy)), **started.fingerprint}
    changed = [
        f"{name}: {before.get(name, 'unknown')} -> {now.get(name, 'unknown')}"
        for name in dict.fromkeys([*before, *now])
        if before.get(name) != now.get(name)
    ]
    return Previous(id=then.id, outcome=then.outcome, digest=then.digest, changed=changed)


def _policy_fields(policy: Policy) -> dict[str, object]:
    return {f"policy {name}": value for name, value in msgspec.to_builtins(policy).items()}
