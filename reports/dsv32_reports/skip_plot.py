"""A plot of skip rate over input length as one SVG document: no script, no font, no network.

One panel per MTP depth, one line per concurrency. Hollow points are lengths at which the cache skips less than half of
the launches; the dashed line is topk, below which a row grows with every step and no plan holds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

from dsv32_fuzz.latency.cost import Prediction
from dsv32_fuzz.oracle import TOPK

WIDTH, HEIGHT, LEFT, TOP, GAP = 260, 200, 46, 34, 24
COLOURS = ("#0b6e99", "#c2541b", "#4a7c1f", "#7a3e9d", "#8a6d00", "#555555")
USEFUL = 0.5


def skip_plot(predictions: Sequence[Prediction]) -> str:
    """The document.

    Raises:
        ValueError: nothing to plot.
    """
    if not predictions:
        raise ValueError("predictions: there are none to plot")
    depths = sorted({p.workload.mtp_depth for p in predictions})
    lines = sorted({p.workload.concurrency for p in predictions})
    width, height = LEFT + len(depths) * (WIDTH + GAP), TOP + HEIGHT + 62
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for column, depth in enumerate(depths):
        chosen = [p for p in predictions if p.workload.mtp_depth == depth]
        parts += _panel(chosen, lines, LEFT + column * (WIDTH + GAP), f"MTP depth {depth}")
    for i, concurrency in enumerate(lines):
        x, y = LEFT + i * 110, height - 10
        parts.append(f'<circle cx="{x}" cy="{y - 4}" r="4" fill="{COLOURS[i % len(COLOURS)]}"/>')
        parts.append(f'<text x="{x + 8}" y="{y}">concurrency {concurrency}</text>')
    return "\n".join([*parts, "</svg>\n"])


def _panel(predictions: Sequence[Prediction], lines: Sequence[int], x0: int, title: str) -> list[str]:
    lengths = sorted({p.workload.input_len for p in predictions} | {TOPK})
    low, high = math.log2(lengths[0]), max(math.log2(lengths[-1]), math.log2(lengths[0]) + 1)

    def x(length: int) -> float:
        return round(x0 + WIDTH * (math.log2(length) - low) / (high - low), 1)

    def y(rate: float) -> float:
        return round(TOP + HEIGHT * (1 - rate), 1)

    parts = [f'<text x="{x0}" y="{TOP - 14}" font-weight="bold">{escape(title)}: plan launches skipped</text>']
    for tenth in (0, 25, 50, 75, 100):
        at = y(tenth / 100)
        parts.append(f'<line x1="{x0}" x2="{x0 + WIDTH}" y1="{at}" y2="{at}" stroke="#dddddd"/>')
        parts.append(f'<text x="{x0 - 4}" y="{at + 4}" text-anchor="end">{tenth} %</text>')
    dashed = 'stroke="#999999" stroke-dasharray="4 3"'
    parts.append(f'<line x1="{x(TOPK)}" x2="{x(TOPK)}" y1="{TOP}" y2="{TOP + HEIGHT}" {dashed}/>')
    parts += [
        f'<text x="{x(length)}" y="{TOP + HEIGHT + 16}" text-anchor="middle">{length}</text>' for length in lengths
    ]
    parts.append(f'<text x="{x0 + WIDTH / 2}" y="{TOP + HEIGHT + 32}" text-anchor="middle">input tokens</text>')
    for i, concurrency in enumerate(lines):
        points = [
            (x(p.workload.input_len), y(p.skip_rate), p.skip_rate)
            for p in sorted(predictions, key=lambda p: p.workload.input_len)
            if p.workload.concurrency == concurrency
        ]
        colour = COLOURS[i % len(COLOURS)]
        path = " ".join(f"{px},{py}" for px, py, _ in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        for px, py, rate in points:
            fill = colour if rate >= USEFUL else "white"
            parts.append(f'<circle cx="{px}" cy="{py}" r="3.5" fill="{fill}" stroke="{colour}"/>')
    return parts
