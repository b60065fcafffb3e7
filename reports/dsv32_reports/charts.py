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


def histogram(title: str, bins: Sequence[tuple[str, int, int]]) -> Markup:
    """Columns, one per (label, count, marked); the marked part is hatched by an outline and counted in the label."""
    top = max([count for _, count, _ in bins], default=0) or 1
    width, height = max(1, WIDTH // max(1, len(bins))), 140
    parts = []
    for i, (label, count, marked) in enumerate(bins):
        x, tall = i * width, 100 * count / top
        parts.append(
            Markup('<rect x="{}" y="{:.1f}" width="{}" height="{:.1f}"/>').format(x + 2, 110 - tall, width - 4, tall)
        )
        if marked:
            share = 100 * marked / top
            column = (x + 2, 110 - share, width - 4, share)
            parts.append(Markup('<rect class="over" x="{}" y="{:.1f}" width="{}" height="{:.1f}"/>').format(*column))
            parts.append(_text(x + width / 2, 104 - tall, str(marked), "middle"))
        parts.append(_text(x + width / 2, 128, label, "middle"))
    return _svg(title, WIDTH, height, parts)


def heat(title: str, rows: Sequence[str], columns: Sequence[str], cells: Sequence[Sequence[float | None]]) -> Markup:
    """A matrix of shades, one cell per (row, column), from 0 (paper) to the largest value; None is left blank."""
    top = max([value for line in cells for value in line if value is not None], default=0.0) or 1.0
    side, head = 16, 130
    width, height = LABEL + side * len(columns) + 8, head + side * len(rows) + 8
    parts = [
        Markup('<text transform="translate({},{}) rotate(-60)">{}</text>').format(LABEL + side * i + 12, head - 6, name)
        for i, name in enumerate(columns)
    ]
    for r, (name, line) in enumerate(zip(rows, cells, strict=True)):
        y = head + side * r
        parts.append(_text(LABEL - 6, y + 12, name, "end"))
        for c, value in enumerate(line):
            if value is not None:
                place = (
                    LABEL + side * c,
                    y,
                    side - 1,
                    side - 1,
                    0.15 + 0.85 * value / top,
                    f"{name}, {columns[c]}: {value:.3g}",
                )
                cell = '<rect x="{}" y="{}" width="{}" height="{}" fill-opacity="{:.2f}"><title>{}</title></rect>'
                parts.append(Markup(cell).format(*place))
    return _svg(title, width, height, parts)


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
