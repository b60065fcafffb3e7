"""Marks of the pages' inline SVG: no script, no network, everything that is shown is escaped.

Colours are the page's own variables, by class. A picture keeps its size, so that its text stays legible: a narrow
screen scrolls, paper scales it down.
"""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

Point = tuple[float, float]


def picture(name: str, title: str, desc: str, size: Point, parts: Sequence[Markup]) -> Markup:
    """The SVG, with its title and description for readers who do not see it; `name` is unique on the page."""
    head = (
        '<svg role="img" viewBox="0 0 {w:.0f} {h:.0f}" width="{w:.0f}" height="{h:.0f}" aria-labelledby="{n}-t" '
        'aria-describedby="{n}-d"><title id="{n}-t">{t}</title><desc id="{n}-d">{d}</desc>{parts}</svg>'
    )
    return Markup(head).format(w=size[0], h=size[1], n=name, t=title, d=desc, parts=Markup("").join(parts))


def text(at: Point, shown: str, anchor: str = "start", *, kind: str = "name") -> Markup:
    """A line of text."""
    mark = '<text class="{}" x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>'
    return Markup(mark).format(kind, *at, anchor, shown)


def slanted(at: Point, shown: str) -> Markup:
    """A line of text that rises to the right."""
    return Markup('<text class="name" transform="translate({:.1f},{:.1f}) rotate(-45)">{}</text>').format(*at, shown)


def rect(kind: str, at: Point, size: Point) -> Markup:
    """A rectangle; nothing if it has no area."""
    mark = '<rect class="{}" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"/>'
    return Markup(mark).format(kind, *at, *size) if min(size) > 0 else Markup("")


def line(kind: str, start: Point, end: Point) -> Markup:
    """A straight line."""
    return Markup('<line class="{}" x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}"/>').format(kind, *start, *end)


def path(points: Sequence[Point]) -> Markup:
    """A line through points."""
    return Markup('<polyline class="line" points="{}"/>').format(" ".join(f"{x:.1f},{y:.1f}" for x, y in points))


def dot(at: Point) -> Markup:
    """A point."""
    return Markup('<circle cx="{:.1f}" cy="{:.1f}" r="3.5"/>').format(*at)
