"""report.html: one file, no network, no script; everything shown is escaped."""

from __future__ import annotations

from jinja2 import Environment, PackageLoader, StrictUndefined

from dsv32_reports.model import Report


def render_html(report: Report) -> str:
    """The page of a report."""
    environment = Environment(
        loader=PackageLoader("dsv32_reports"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html.j2").render(report=report)
