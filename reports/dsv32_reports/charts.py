"""Inline SVG for the pages: no script, no network, readable in dark and light and on paper, with a text for readers.

Colours are the page's own variables; every mark that means something also has a shape or a label. Each chart stands
beside a table of the same numbers, so its `title` only says what to see.
"""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup, escape

WIDTH, ROW, LABEL = 640, 22, 250
PLOT = WIDTH - LABEL - 70


def bars(
    title: str, values: Sequence[tuple[str, float]], *, limit: float | None = None, percent: bool = False
) -> Markup:
    """Horizontal bars, one per (label, value); a dashed line at `limit`. The axis starts at 0 and holds all values."""
    top = max([value for _, value in values] + ([limit] if limit is not None else []), default=0.0) or 1.0
    height = ROW * len(values) + 8
    parts = [_line(LABEL + PLOT * limit / top, 0, LABEL + PLOT * limit / top, height)] if limit is not None else []
    for i, (label, value) in enumerate(values):
        y, width = ROW * i + 4, PLOT * value / top
        shown = f"{100 * value:.1f} %" if percent else f"{value:.3g}"
        over = ' class="over"' if limit is not None and value > limit and not percent else ""
        parts.append(
            Markup('<rect x="{}" y="{}" width="{:.1f}" height="{}"{}/>').format(LABEL, y, width, ROW - 8, Markup(over))
        )
        parts.append(_text(LABEL - 8, y + ROW - 10, label, "end"))
        parts.append(_text(LABEL + width + 6, y + ROW - 10, shown, "start"))
    return _svg(title, WIDTH, height, parts)


def trend(title: str, values: Sequence[float]) -> Markup:
    """A line through `values` in order, each a dot; the axis spans their range."""
    low, high = min(values), max(values)
    span, step = (high - low) or 1.0, (WIDTH - 120) / max(1, len(values) - 1)
    points = [(10 + step * i, 70 - 60 * (value - low) / span) for i, value in enumerate(values)]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    parts = [Markup('<polyline points="{}" fill="none" stroke="currentColor"/>').format(line)]
    parts += [Markup('<circle cx="{:.1f}" cy="{:.1f}" r="3"/>').format(x, y) for x, y in points]
    parts.append(_text(points[-1][0] + 8, points[-1][1] + 4, f"{values[-1]:.4g}", "start"))
    return _svg(title, WIDTH, 84, parts)


def _svg(title: str, width: int, height: int, parts: Sequence[Markup]) -> Markup:
    head = '<svg role="img" viewBox="0 0 {} {}" style="max-width:{}px" aria-label="{}"><title>{}</title>{}</svg>'
    return Markup(head).format(width, height, width, title, title, Markup("").join(parts))


def _text(x: float, y: float, text: str, anchor: str) -> Markup:
    return Markup('<text x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>').format(x, y, anchor, escape(text))


def _line(x1: float, y1: float, x2: float, y2: float) -> Markup:
    return Markup('<line class="limit" x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}"/>').format(x1, y1, x2, y2)
