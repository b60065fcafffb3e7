"""The pages: each one file, no network, no script; everything shown is escaped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jinja2 import Environment, PackageLoader, StrictUndefined

from dsv32_reports import charts
from dsv32_reports.history import Drift, Row
from dsv32_reports.model import Report


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("dsv32_reports"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(bars=charts.bars, trend=charts.trend)
    environment.filters["skip_bars"] = _skip_bars
    return environment


def _skip_bars(rows: Sequence[Mapping[str, object]]) -> list[tuple[str, float]]:
    """The rows of the skip-rate table as labelled shares."""
    return [
        (f"{row['requests']} requests, spread {row['spread']}, {row['budget']}", float(str(row["skip_rate"])))
        for row in rows
    ]


def render_html(report: Report) -> str:
    """The page of a report."""
    return _environment().get_template("report.html.j2").render(report=report)


def render_history(
    rows: Sequence[Row], figures: Mapping[tuple[str, str], Sequence[tuple[str, float]]], drifts: Sequence[Drift]
) -> str:
    """The page of a history: a trend plot of every figure."""
    return _environment().get_template("history.html.j2").render(rows=rows, figures=figures, drifts=drifts)
