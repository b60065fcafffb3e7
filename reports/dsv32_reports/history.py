"""Sign-offs over time: a SQLite file of their outcomes, gates and figures, and what drifts in it.

A figure is a number that has no pass or fail of its own yet may creep: a worst budget used, a failure-rate bound, a
skip rate. It drifts if Kendall's rank correlation with time is significant after Benjamini-Hochberg control over all
figures (scipy), among sign-offs of the same target, options and profile.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
from scipy.stats import false_discovery_control, kendalltau

from dsv32_reports.model import Report

SHORTEST_SERIES = 6
"""With fewer points no order of them is significant at 1 % (2 / 5! = 1.7 %, 2 / 6! = 0.3 %)."""
FALSE_DISCOVERY_RATE = 0.05

_SCHEMA = """
CREATE TABLE IF NOT EXISTS signoff (
  digest TEXT PRIMARY KEY, id TEXT, started TEXT, series TEXT, outcome TEXT, reason TEXT
);
CREATE TABLE IF NOT EXISTS gate (digest TEXT, name TEXT, status TEXT, PRIMARY KEY (digest, name));
CREATE TABLE IF NOT EXISTS figure (digest TEXT, name TEXT, value REAL, PRIMARY KEY (digest, name));
PRAGMA user_version = 1;
"""


class Drift(msgspec.Struct, frozen=True, kw_only=True):
    """A figure that moves one way over time."""

    series: str
    figure: str
    first: float
    last: float
    tau: float
    """Kendall's tau with time: 1 rises always, -1 falls always."""
    p_value: float
    """After false-discovery control."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One sign-off of the history."""

    digest: str
    id: str
    started: str
    series: str
    outcome: str
    reason: str


@dataclass(frozen=True)
class History:
    """The sign-offs of one SQLite file."""

    database: sqlite3.Connection

    def add(self, report: Report, digest: str) -> bool:
        """Keep a sign-off; False if it is kept already."""
        series = f"{report.target}, {report.options_text}, {report.profile}"
        row = (digest, report.id, report.started, series, report.outcome.value, report.reason)
        with self.database:
            new = self.database.execute("INSERT OR IGNORE INTO signoff VALUES (?,?,?,?,?,?)", row).rowcount > 0
            if new:
                gates = [(digest, gate.name, gate.status.value) for gate in report.gates]
                self.database.executemany("INSERT INTO gate VALUES (?,?,?)", gates)
                values = [(digest, name, value) for name, value in figures(report).items()]
                self.database.executemany("INSERT INTO figure VALUES (?,?,?)", values)
        return new

    def rows(self) -> list[Row]:
        """Every sign-off, oldest first."""
        found = self.database.execute(
            "SELECT digest, id, started, series, outcome, reason FROM signoff ORDER BY started, id"
        )
        return [
            Row(digest=d, id=i, started=s, series=series, outcome=outcome, reason=reason)
            for d, i, s, series, outcome, reason in found
        ]

    def figures(self) -> dict[tuple[str, str], list[tuple[str, float]]]:
        """By series and figure: (start time, value), oldest first."""
        found: dict[tuple[str, str], list[tuple[str, float]]] = {}
        for series, name, started, value in self.database.execute(
            "SELECT series, name, started, value FROM figure JOIN signoff USING (digest) ORDER BY started, id"
        ):
            found.setdefault((series, name), []).append((started, value))
        return found


@contextmanager
def opened(path: Path) -> Iterator[History]:
    """The history in a file, made if there is none.

    Raises:
        ValueError: the file is no history, or cannot be written.
    """
    try:
        with closing(sqlite3.connect(path)) as database:
            database.executescript(_SCHEMA)
            yield History(database)
    except sqlite3.Error as error:
        raise ValueError(f"{path}: no history ({error}); give another file with --db") from error


def figures(report: Report) -> dict[str, float]:
    """The numbers of a report that are worth following, by name."""
    found: dict[str, float] = {}
    for gate in report.gates:
        for line in gate.lines:
            values = {k: v for k, v in line.measured.items() if isinstance(v, float)}
            found.update({f"{gate.title}, {line.scope}: {k.replace('_', ' ')}": v for k, v in values.items()})
    if report.sequences:
        found["upper bound on failing serving runs"] = report.sequences.failure_rate_upper_bound
    for row in report.tables.get("skip_rate", []):
        what = f"skip rate, {row['requests']} requests, spread {row['spread']}, budget {row['budget']}"
        found[what] = float(row["skip_rate"])
    return found


def drifts(series: dict[tuple[str, str], list[tuple[str, float]]]) -> list[Drift]:
    """Figures that move one way over time, most certain first; those with too few points cannot."""
    long = {key: [value for _, value in points] for key, points in series.items() if len(points) >= SHORTEST_SERIES}
    moving = {key: values for key, values in long.items() if len(set(values)) > 1}
    if not moving:
        return []
    tests = [kendalltau(range(len(values)), values) for values in moving.values()]
    adjusted = false_discovery_control([float(test.pvalue) for test in tests])
    found = [
        Drift(series=key[0], figure=key[1], first=v[0], last=v[-1], tau=float(test.statistic), p_value=float(p))
        for (key, v), test, p in zip(moving.items(), tests, adjusted, strict=True)
        if p <= FALSE_DISCOVERY_RATE
    ]
    return sorted(found, key=lambda drift: drift.p_value)


def changes(before: Report, after: Report) -> list[str]:
    """What differs between two sign-offs, one line each: outcome, inputs, gates, counterexamples, figures."""
    found = [_change("outcome", before.outcome.value, after.outcome.value)]
    found += [
        _change(name, getattr(before, name), getattr(after, name)) for name in ("options_text", "profile", "seed")
    ]
    found += _changed_names("made with", before.fingerprint, after.fingerprint)
    statuses = [{gate.title: gate.status.value for gate in report.gates} for report in (before, after)]
    found += _changed_names("gate", *statuses)
    findings = [{f"{f.check} in {f.scope}": f.summary for f in report.findings} for report in (before, after)]
    found += [f"counterexample gone: {name}" for name in findings[0] if name not in findings[1]]
    found += [f"counterexample new: {name}: {findings[1][name]}" for name in findings[1] if name not in findings[0]]
    values = [{name: f"{value:.4g}" for name, value in figures(report).items()} for report in (before, after)]
    return [line for line in [*found, *_changed_names("figure", *values)] if line]


def _changed_names(kind: str, before: dict[str, str], after: dict[str, str]) -> Sequence[str]:
    names = dict.fromkeys([*before, *after])
    return [_change(f"{kind} {name}", before.get(name, "absent"), after.get(name, "absent")) for name in names]


def _change(name: str, before: object, after: object) -> str:
    return "" if before == after else f"{name}: {before} -> {after}"
