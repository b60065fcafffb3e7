"""The pages: each one file, no network, no script; everything shown is escaped."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from jinja2 import Environment, PackageLoader, StrictUndefined

from dsv32_reports import charts, plots, wording
from dsv32_reports.history import Drift, Row
from dsv32_reports.model import Report


@functools.cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("dsv32_reports"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for chart in (charts.bars, charts.columns, charts.heat_map, charts.intervals, charts.trend):
        environment.globals[chart.__name__] = chart
    words = (wording.headline, wording.number, wording.scope_text, wording.scope_title, wording.sentence)
    environment.filters.update({word.__name__: word for word in words}, by_scope=wording.by_scope)
    environment.filters.update(
        kills=plots.kills, coverage_grid=plots.coverage, skip_rates=plots.skip_rates, error_drifts=plots.drifts
    )
    return environment


def render_html(report: Report) -> str:
    """The page of a report."""
    shown = {
        "budget_grid": plots.budgets(report.gates),
        "margin_columns": plots.margins(report.gates),
        "legal_margins": plots.LARGEST_LEGAL_MARGIN,
        "ratio_intervals": plots.ratios(report.gates),
    }
    sections = {
        "traffic": "By traffic",
        "gates": "Gates",
        "not-judged": "Not judged",
        "findings": report.findings and "Counterexamples",
        "budget": shown["budget_grid"] and "Errors",
        "margins": shown["margin_columns"] and "Router margins",
        "drift": report.tables.get("drift") and "Error over steps",
        "skip-rate": report.tables.get("skip_rate") and "Plan reuse",
        "latency": shown["ratio_intervals"] and "Latency",
        "faults": report.tables.get("kill_matrix") and "Injected faults",
        "coverage": report.coverage.cases and "Coverage",
        "details": "Details",
        "made-with": "Made with",
    }
    named = [(name, title) for name, title in sections.items() if title]
    return _environment().get_template("report.html.j2").render(report=report, sections=named, **shown)


def render_history(
    rows: Sequence[Row], figures: Mapping[tuple[str, str], Sequence[tuple[str, float]]], drifts: Sequence[Drift]
) -> str:
    """The page of a history: a trend plot of every figure."""
    return _environment().get_template("history.html.j2").render(rows=rows, figures=figures, drifts=drifts)
