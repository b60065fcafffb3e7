"""The kill matrix as one SVG string: a row per fault, a column per check, for a page without scripts."""

from __future__ import annotations

from html import escape

from dsv32_fuzz.faults.base import AREAS
from dsv32_fuzz.faults.results import FaultRow, KillMatrix

CELL, LEFT, TOP, GAP = 13, 215, 175, 7
FIRST, KILLED, NOT_FAILED, ALIVE = "#0b6e4f", "#7cc6a4", "#eef0f2", "#c0392b"


def heat_map(matrix: KillMatrix) -> str:
    """Dark: killed it first; light: kills it, too; grey: did not fail, or was not asked any more; red: nobody did."""
    places, height = _places(matrix.rows)
    width = LEFT + CELL * len(matrix.checks) + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="10" role="img" aria-label="{escape(_summary(matrix))}">',
        f"<title>{escape(_summary(matrix))}</title>",
        *_columns(matrix),
    ]
    area = ""
    for row, top in zip(matrix.rows, places, strict=True):
        if row.area != area:
            area = row.area
            title = escape(AREAS[area].title)
            parts.append(f'<text x="2" y="{top - 3}" font-weight="bold">{title}</text>')
        parts += _cells(matrix, row, top)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _summary(matrix: KillMatrix) -> str:
    killed = len(matrix.rows) - len(matrix.survivors)
    return f"{killed} of {len(matrix.rows)} faults killed, gate {matrix.gate}, seed {matrix.seed}"


def _places(rows: tuple[FaultRow, ...]) -> tuple[list[int], int]:
    """Top of each row, room for the area's title above its first one, and the height of the picture."""
    places, top, area = [], TOP, ""
    for row in rows:
        if row.area != area:
            area, top = row.area, top + GAP + CELL
        places.append(top)
        top += CELL
    return places, top + GAP


def _columns(matrix: KillMatrix) -> list[str]:
    return [
        f'<text transform="translate({LEFT + CELL * n + 10},{TOP}) rotate(-60)">{escape(check.name)}</text>'
        for n, check in enumerate(matrix.checks)
    ]


def _cells(matrix: KillMatrix, row: FaultRow, top: int) -> list[str]:
    kills = {kill.check: kill for kill in row.kills}
    first = row.kills[0].check if row.kills else ""
    colour = "#222" if row.killed else ALIVE
    parts = [
        f'<text x="{LEFT - 6}" y="{top + 10}" text-anchor="end" fill="{colour}">{escape(row.fault)}'
        f"<title>{escape(row.story)}</title></text>"
    ]
    for number, check in enumerate(matrix.checks):
        kill = kills.get(check.name)
        fill = NOT_FAILED if kill is None else FIRST if check.name == first else KILLED
        told = f"{kill.examples} examples, {kill.seconds:.2f} s: {kill.summary}" if kill else "did not fail"
        title = escape(f"{row.fault}, {check.name}: {told}")
        parts.append(
            f'<rect x="{LEFT + CELL * number}" y="{top}" width="{CELL - 1}" height="{CELL - 1}" fill="{fill}">'
            f"<title>{title}</title></rect>"
        )
    return parts
