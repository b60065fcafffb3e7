"""From a report to its charts and heat maps; None or nothing where the report has no such data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from dsv32_fuzz.faults import AREAS
from dsv32_fuzz.verdict import MARGIN_EDGES, Status
from dsv32_ref.bounds import EDGES
from dsv32_reports.charts import Bar, Cell, Column, Grid, Interval
from dsv32_reports.model import Covered, Gate

BUDGET, SAME, FLIPPED = "budget used: ", "router margin: same choice", "router margin: flipped"


def bins(edges: Sequence[float]) -> list[str]:
    """Names of the bins up to each edge, and of the one beyond the last."""
    names = [f"{edge:.0f}" if edge >= 1 else f"1/{1 / edge:.0f}" for edge in edges]
    return [*names, f"> {names[-1]}"]


def budgets(gates: Sequence[Gate]) -> Grid | None:
    """Per gate and stage, how the compared elements are distributed over the share of the bound that they use."""
    counts: dict[str, list[int]] = {}
    for gate in gates:
        for line in gate.lines:
            for name, found in line.histograms.items():
                if name.startswith(BUDGET):
                    label = f"{gate.title}: {name.removeprefix(BUDGET)}"
                    counts[label] = _added(counts.get(label), found)
    if not counts:
        return None
    return Grid(
        name="budgets",
        title="Share of the proven bound that errors use, by stage",
        desc=f"{len(counts)} stages; each row is the distribution of its elements over twelve bins, in per cent. "
        f"{sum(found[-1] for found in counts.values())} elements lie beyond their bound.",
        corner="Stage",
        columns=[*bins(EDGES), "elements"],
        rows=[(label, _shares(found)) for label, found in counts.items()],
    )


def _shares(counts: Sequence[int]) -> list[Cell | None]:
    total = sum(counts) or 1
    cells: list[Cell | None] = []
    for number, count in enumerate(counts):
        share, beyond = count / total, number == len(counts) - 1
        cells.append(Cell(text=_per_cent(share), share=share, wrong=beyond) if count else None)
    return [*cells, Cell(text=_short(total), share=0.0)]


LARGEST_LEGAL_MARGIN = MARGIN_EDGES.index(1.0) + 1
"""Number of the first bin of margins in which a flip is illegal."""


def margins(gates: Sequence[Gate]) -> list[Column]:
    """Rows by the margin of their choice of experts, those whose choice flipped marked; empty if none was compared."""
    lines = [line.histograms for gate in gates for line in gate.lines if SAME in line.histograms]
    nothing = [0] * (len(MARGIN_EDGES) + 1)
    same, flipped = nothing, nothing
    for found in lines:
        same, flipped = _added(same, found[SAME]), _added(flipped, found.get(FLIPPED, nothing))
    named = zip(bins(MARGIN_EDGES), same, flipped, strict=True)
    return [Column(label=name, plain=plain, marked=marked) for name, plain, marked in named] if lines else []


def kills(rows: Sequence[Mapping[str, Any]]) -> Grid:
    """Checks by areas of faults: how many faults of the area the check killed, before any other check did."""
    areas = [area for area in AREAS if any(row["area"] == area for row in rows)]
    checks = sorted({str(row["killed_by"]) for row in rows if row["killed_by"]})
    by_area = {area: [row["killed_by"] for row in rows if row["area"] == area] for area in areas}
    lines = [(check.replace("_", " "), [_killed(by_area[area], check) for area in areas]) for check in checks]
    survived = [_survived(by_area[area].count("")) for area in areas]
    total = [Cell(text=str(len(by_area[area])), share=0.0) for area in areas]
    killed = sum(bool(row["killed_by"]) for row in rows)
    return Grid(
        name="kills",
        title=f"{killed} of {len(rows)} injected faults were seen by some check",
        desc=f"Rows are {len(checks)} checks, columns are {len(areas)} areas of faults; a cell is the number of faults "
        "of the area that the check was the first to see.",
        corner="Check",
        columns=[AREAS[area].title for area in areas],
        rows=[*lines, ("seen by no check", survived), ("faults injected", total)],
    )


def _killed(killers: Sequence[str], check: str) -> Cell | None:
    count = list(killers).count(check)
    return Cell(text=str(count), share=count / len(killers)) if count else None


def _survived(count: int) -> Cell:
    return Cell(text=str(count), share=0.0, wrong=count > 0)


def coverage(covered: Covered) -> Grid:
    """How many steps were searched in each class of lengths and queries; a cell that was never reached is hatched."""
    table = covered.steps_by_length_and_query
    queries = list(dict.fromkeys(query for row in table.values() for query in row))
    most = math.log1p(max((count for row in table.values() for count in row.values()), default=0)) or 1.0
    never = sum(count == 0 for row in table.values() for count in row.values())
    return Grid(
        name="coverage-map",
        title="Steps searched, by the longest sequence (rows) and the longest query (columns) of a step",
        desc=f"{covered.steps} steps; darker is more, on a logarithmic scale. "
        f"{never} possible cells were never reached.",
        corner="Longest sequence",
        columns=queries,
        rows=[
            (length, [_visits(row[query], most) if query in row else None for query in queries])
            for length, row in table.items()
        ],
    )


def _visits(count: int, most: float) -> Cell:
    return Cell(text=_short(count), share=math.log1p(count) / most, wrong=count == 0)


def skip_rates(rows: Sequence[Mapping[str, Any]]) -> list[Bar]:
    """Shares of steps that reused the plan, rightly and wrongly; the tick is the share among steps of pure decode."""
    return [
        Bar(
            label=f"{row['requests']} requests, spread {100 * row['spread']:.0f} %, {row['budget']} tokens",
            plain=row["rightful"] / row["steps"],
            marked=row["wrongful"] / row["steps"],
            tick=row["decode_skip_rate"],
        )
        for row in rows
    ]


def drifts(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Relative error of the logits per step of the long decodes, by traffic and by who decides, in powers of ten."""
    found: dict[str, list[float]] = {}
    for row in rows:
        for kind in ("forced", "free"):
            if row.get(kind):
                found.setdefault(f"{row['traffic']}, {kind} decisions", []).append(math.log10(row[kind]))
    return found


def ratios(gates: Sequence[Gate]) -> list[Interval]:
    """Measured ratios with their intervals, of every gate that has them."""
    return [
        Interval(
            label=line.scope,
            low=float(line.measured["ratio_low"]),
            value=float(line.measured["ratio"]),
            high=float(line.measured["ratio_high"]),
        )
        for gate in gates
        for line in gate.lines
        if {"ratio", "ratio_low", "ratio_high"} <= line.measured.keys() and line.status is not Status.SKIPPED
    ]


def _added(known: Sequence[int] | None, more: Sequence[int]) -> list[int]:
    return [a + b for a, b in zip(known or [0] * len(more), more, strict=True)]


def _per_cent(share: float) -> str:
    return f"{100 * share:.0f}" if share >= 0.005 else "<1"


def _short(count: int) -> str:
    return str(count) if count < 10_000 else f"{count / 1000:.0f}k" if count < 10_000_000 else f"{count / 1e6:.0f}M"
