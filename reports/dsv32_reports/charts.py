"""The kinds of chart that the pages draw. Every mark that means something has a shape, a hatching or a label beside its
colour, and the numbers of a chart stand in a table next to it.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from markupsafe import Markup

from dsv32_reports.svg import dot, line, path, picture, rect, slanted, text

WIDTH, ROW, LABEL = 720, 24, 290
PLOT = WIDTH - LABEL - 70
VALUE = WIDTH - 58
TALL, COLUMN = 140, 48
CELL, NAME, SLANT, LEVELS = 22, 210, 108, 5


class Bar(msgspec.Struct, frozen=True, kw_only=True):
    """A share of 0 to 1 in two parts, `plain` and a hatched `marked` behind it; `tick` is another share to compare."""

    label: str
    plain: float
    marked: float = 0.0
    tick: float | None = None


class Column(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of one bin of a histogram: `plain`, and a hatched `marked` on top of it."""

    label: str
    plain: int
    marked: int = 0


class Interval(msgspec.Struct, frozen=True, kw_only=True):
    """An estimate with its confidence interval."""

    label: str
    low: float
    value: float
    high: float


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """A cell of a grid: what it says, and how dark it is, from 0 to 1; a wrong one is hatched."""

    text: str
    share: float
    wrong: bool = False


class Grid(msgspec.Struct, frozen=True, kw_only=True):
    """A heat map and the table of the same cells: rows under columns, None where there can be nothing."""

    name: str
    title: str
    desc: str
    corner: str
    """What the rows are."""
    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[Cell | None]]]


def bars(name: str, title: str, desc: str, values: Sequence[Bar], *, limit: float | None = None) -> Markup:
    """Horizontal bars on an axis of 0 to 100 %; a dashed line at `limit`."""
    height = ROW * len(values) + 8
    parts = [] if limit is None else [line("limit", (LABEL + PLOT * limit, 0), (LABEL + PLOT * limit, height))]
    for i, bar in enumerate(values):
        y, plain, marked = ROW * i + 4, PLOT * bar.plain, PLOT * bar.marked
        parts.append(rect("bar", (LABEL, y), (plain, ROW - 8)))
        parts.append(rect("hatch", (LABEL + plain, y), (marked, ROW - 8)))
        if bar.tick is not None:
            x = LABEL + PLOT * bar.tick
            parts.append(line("tick", (x, y - 2), (x, y + ROW - 6)))
        parts.append(text((LABEL - 10, y + ROW - 12), bar.label, "end"))
        parts.append(text((VALUE, y + ROW - 12), f"{100 * (bar.plain + bar.marked):.1f} %"))
    return picture(name, title, desc, (WIDTH, height), parts)


def columns(name: str, title: str, desc: str, values: Sequence[Column], *, limit: int | None = None) -> Markup:
    """A histogram with its counts above the columns; a dashed line before the bin number `limit`."""
    top = max((column.plain + column.marked for column in values), default=0) or 1
    width, base = COLUMN * len(values) + 20, TALL + 24
    parts = [line("axis", (10, base), (width - 10, base))]
    if limit is not None:
        parts.append(line("limit", (10 + COLUMN * limit, 4), (10 + COLUMN * limit, base)))
    for i, column in enumerate(values):
        x, plain, marked = 14 + COLUMN * i, TALL * column.plain / top, TALL * column.marked / top
        parts.append(rect("bar", (x, base - plain), (COLUMN - 8, plain)))
        parts.append(rect("hatch", (x, base - plain - marked), (COLUMN - 8, marked)))
        middle, count = x + COLUMN / 2 - 4, column.plain + column.marked
        parts.append(text((middle, base - plain - marked - 5), str(count) if count else "", "middle"))
        parts.append(text((middle, base + 16), column.label, "middle"))
    return picture(name, title, desc, (width, base + 24), parts)


def intervals(name: str, title: str, desc: str, values: Sequence[Interval], *, limit: float) -> Markup:
    """Points with their intervals on an axis that holds them all and `limit`, which a dashed line shows."""
    low, high = min([limit, *(v.low for v in values)]), max([limit, *(v.high for v in values)])
    scale, height = PLOT / ((high - low) or 1.0), ROW * len(values) + 28
    at = LABEL + scale * (limit - low)
    parts = [line("limit", (at, 0), (at, height - 20)), text((at, height - 6), f"{limit:g}", "middle")]
    for i, value in enumerate(values):
        y = ROW * i + ROW / 2
        first, middle, last = (LABEL + scale * (v - low) for v in (value.low, value.value, value.high))
        parts.append(line("axis", (first, y), (last, y)))
        parts += [line("axis", (end, y - 5), (end, y + 5)) for end in (first, last)]
        parts += [dot((middle, y)), text((LABEL - 10, y + 4), value.label, "end")]
        parts.append(text((VALUE + 8, y + 4), f"{value.value:.4g}"))
    return picture(name, title, desc, (WIDTH, height), parts)


def trend(name: str, title: str, desc: str, values: Sequence[float]) -> Markup:
    """A line through `values` in order, each a dot; the ends of the axis, which spans them, are written at its left."""
    low, high, left = min(values), max(values), 74
    span, step = (high - low) or 1.0, (WIDTH - left - 90) / max(1, len(values) - 1)
    points = [(left + step * i, 72 - 60 * (value - low) / span) for i, value in enumerate(values)]
    ends = [(high, 16), (low, 76)] if high > low else [(low, 76)]
    parts = [text((left - 14, y), f"{value:.4g}", "end") for value, y in ends]
    parts += [path(points), *map(dot, points)]
    parts.append(text((points[-1][0] + 10, points[-1][1] + 4), f"{values[-1]:.4g}"))
    return picture(name, title, desc, (WIDTH, 88), parts)


def heat_map(grid: Grid, *, width: int = 44) -> Markup:
    """Shaded cells of that width, each with its text; the names of the columns rise above them."""
    size = NAME + width * len(grid.columns) + SLANT - width // 2, SLANT + CELL * len(grid.rows) + 4
    parts = [slanted((NAME + width * (i + 0.5), SLANT - 6), name) for i, name in enumerate(grid.columns)]
    for row, (name, cells) in enumerate(grid.rows):
        y = SLANT + CELL * row
        parts.append(text((NAME - 10, y + 15), name, "end"))
        for i, cell in enumerate(cells):
            if cell is not None:
                x = NAME + width * i
                parts.append(rect(_shade(cell), (x + 1, y + 1), (width - 2, CELL - 2)))
                kind = "wrong" if cell.wrong else "name"
                parts.append(text((x + width / 2, y + 15), cell.text, "middle", kind=kind))
    return picture(grid.name, grid.title, grid.desc, size, parts)


def _shade(cell: Cell) -> str:
    if cell.wrong:
        return "hatch"
    return "heat0" if cell.share <= 0 else f"heat{min(LEVELS, 1 + int(cell.share * LEVELS))}"
