"""The sign-off: runs a campaign, keeps its events, and folds them into a report. It never runs a check itself."""

from __future__ import annotations

import datetime
import shlex
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsv32_fast.batch import StepBatch
from dsv32_fast.options import describe
from dsv32_fuzz.case import AnyCase, Case, save_case, write_atomically
from dsv32_fuzz.events import (
    CounterexampleFound,
    Event,
    RunFinished,
    SequencesChecked,
    TableMade,
    VerdictReached,
)
from dsv32_fuzz.targets import Target
from dsv32_fuzz.verdict import Status
from dsv32_reports.fingerprint import fingerprint
from dsv32_reports.gates import NOT_JUDGED, by_traffic, decide, make_gates
from dsv32_reports.html_page import render_html
from dsv32_reports.interrupt import Interrupts
from dsv32_reports.json_file import encode, journal_line
from dsv32_reports.model import Finding, Report, Sequences
from dsv32_reports.statistics import failure_rate_upper_bound

Listener = Callable[[Event], None]


@dataclass
class Evidence:
    """Everything a campaign said, sorted by kind."""

    verdicts: list[VerdictReached] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    sequences: SequencesChecked | None = None
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    finished: RunFinished | None = None


def prepare_folder(folder: Path) -> None:
    """Make the bundle's folder, and see that it can be written, before anything long starts.

    Raises:
        ValueError: it holds something already, or cannot be written; the message names the remedy.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ValueError(
                f"{folder} is not empty; a sign-off never overwrites another: choose a new folder with --out"
            )
        (folder / "cases").mkdir()
    except OSError as error:
        raise ValueError(f"{folder} cannot be written ({error.strerror}); choose another folder with --out") from error


def new_id(options_text: str) -> str:
    """Time and options: readable, sortable, and distinct for two runs a second apart."""
    stamp = datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m%d-%H%M%S")
    return f"{options_text.replace(' ', '_').replace('=', '-')}-{stamp}"


def collect(
    events: Generator[Event, None, None], folder: Path, listeners: Iterable[Listener], interrupts: Interrupts
) -> Evidence:
    """Drain the stream: every event goes to the journal and the listeners first, then into the evidence."""
    evidence = Evidence()
    listeners = list(listeners)
    with interrupts.noted(), (folder / "events.jsonl").open("wb") as journal:
        for event in until_interrupted(events, interrupts):
            journal.write(journal_line(event))
            journal.flush()
            _keep(evidence, event, folder)
            for listener in listeners:
                listener(event)
    return evidence


def until_interrupted(events: Generator[Event, None, None], interrupts: Interrupts) -> Iterator[Event]:
    """The events; a noted interrupt is raised inside the stream, between two of them, once."""
    raised = False
    for event in events:
        yield event
        if interrupts.requested and not raised and not isinstance(event, RunFinished):
            raised = True
            yield events.throw(KeyboardInterrupt())


def _keep(evidence: Evidence, event: Event, folder: Path) -> None:
    match event:
        case VerdictReached():
            evidence.verdicts.append(event)
        case CounterexampleFound():
            evidence.findings.append(_save(event, folder))
        case SequencesChecked():
            evidence.sequences = event
        case TableMade():
            evidence.tables[event.name] = event.rows
        case RunFinished():
            evidence.finished = event


def _save(found: CounterexampleFound, folder: Path) -> Finding:
    case = found.case
    path = folder / "cases" / f"{case.scope}-{case.check}.json"
    save_case(case, path)
    return Finding(
        check=case.check,
        scope=case.scope,
        summary=found.summary,
        classification=classify(found),
        also_fails=[v.check for v in found.verdicts if v.status is Status.FAILED and v.check != case.check],
        shown=shown_case(case)[:8],
        file=str(path.relative_to(folder)),
        command=f"dsv32 replay {shlex.quote(str(path))}",
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
    }.get(found.case.check, "the plan differs from a rebuild")


def shown_case(case: AnyCase) -> list[str]:
    """A case in lines: its step batches, or the fields of the input that a check drew."""
    if isinstance(case, Case):
        return [f"step {i}: {show_step(step)}" for i, step in enumerate(case.steps)]
    return [f"{name}: {value}" for name, value in case.input.items()]


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


def make_report(evidence: Evidence, target: Target, *, run_id: str, seed: int, profile: str, started: str) -> Report:
    """Fold the evidence into gates, outcome and pages' data."""
    gates = make_gates(evidence.verdicts)
    finished = evidence.finished or RunFinished(seconds=0.0, interrupted=True)
    outcome, reason = decide(gates, interrupted=finished.interrupted)
    return Report(
        id=run_id,
        outcome=outcome,
        reason=reason,
        evidence=target.evidence,
        target=target.name,
        options=target.options,
        options_text=describe(target.options) if target.options else "as installed",
        started=started,
        seconds=round(finished.seconds, 1),
        seed=seed,
        profile=profile,
        gates=gates,
        traffic=by_traffic(evidence.verdicts),
        findings=evidence.findings,
        sequences=_sequences(evidence.sequences),
        tables=evidence.tables,
        not_judged=list(NOT_JUDGED),
        fingerprint=fingerprint(),
    )


def _sequences(checked: SequencesChecked | None) -> Sequences | None:
    if checked is None or checked.sequences == 0:
        return None
    return Sequences(
        sequences=checked.sequences,
        failed=checked.failed,
        step_batches=checked.step_batches,
        failure_rate_upper_bound=failure_rate_upper_bound(checked.failed, checked.sequences),
    )


def write_bundle(report: Report, folder: Path) -> None:
    """report.json and report.html, each whole or not at all."""
    write_atomically(folder / "report.json", encode(report))
    write_atomically(folder / "report.html", render_html(report).encode())
