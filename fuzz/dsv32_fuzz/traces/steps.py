"""The decode steps of a trace, and what happened in each.

A step begins where its marker begins and ends where the next one does; the last ends with its own marker and has no
duration. Markers are program annotations. By default these are tried in turn, and the first that occurs twice is used:
- `execute_context_C(c)_generation_G(g)`: vLLM's worker; C requests with c prompt tokens, G with g decode tokens;
- `execute_new_N_cached_M`: older vLLM (#22496); N new requests. A prompt's later chunks count as cached there, so that
  "decode" may hold a step with a chunk;
- `ProfilerStep#i`: torch.profiler's own, from its `step()`.
Device work belongs to the step that launched it (by correlation), which under asynchronous scheduling may not be the
step during which it ran; work whose launch is not in the trace belongs to the step in which it began.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec
import numpy as np
import numpy.typing as npt

from dsv32_fuzz.traces.kineto import ANNOTATION, DEVICE, OPERATOR, RUNTIME, Trace, TraceError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

MARKERS = (
    r"execute_context_\d+\(\d+\)_generation_\d+\(\d+\)",
    r"execute_new_\d+_cached_\d+",
    r"ProfilerStep#\d+$",
)
_WITHOUT_PROMPT = re.compile(r"execute_context_0\(|execute_new_0_")
_WITH_CLASS = re.compile(r"execute_(context|new)_\d+")

DEVICE_PATTERNS = {
    "casts": r"bfloat16tofloat32_copy_kernel",
    "plan launches": r"get_mla_metadata_v1",
    "fills": r"FillFunctor|Memset|fillBuffer",
    "host-to-device copies": r"Memcpy HtoD|Memcpy_?HtoD|CopyHostToDevice",
}
"""What is counted among device work: kernels, copies and memsets, by name."""
HOST_PATTERNS = {
    "casts": r"^aten::_to_copy$",
    "plan launches": r"get_mla_metadata_v1$",
    "fills": r"^aten::zero_$",
}
"""The same where a trace has no device work. `_to_copy` is every conversion, so only a difference means casts."""
RUNTIME_PATTERNS = {
    "synchronisations": r"(Device|Stream|Event)Synchronize",
    "graph launches": r"GraphLaunch",
}


class StepTable(msgspec.Struct, frozen=True, kw_only=True):
    """One row per step; columns of counts, and times in milliseconds."""

    path: str
    marker: str
    level: str
    """`device` if the trace has device work, else `host`."""
    cut: str | None
    period_ms: tuple[float, ...]
    """From marker to next marker; one fewer than there are steps."""
    marker_ms: tuple[float, ...]
    idle_ms: tuple[float, ...]
    """Time within the step in which the device did nothing (level host: in which no marker was open)."""
    counts: dict[str, tuple[int, ...]]
    decode: tuple[bool, ...] | None
    """Whether a step has decode tokens only; None where the marker does not say."""

    @property
    def steps(self) -> int:
        """How many there are."""
        return len(self.marker_ms)


def step_table(
    trace: Trace, marker: str | None = None, patterns: Mapping[str, str] | None = None, *, decode_only: bool = False
) -> StepTable:
    """What happened in each step of `trace`.

    Args:
        trace: from `read_trace`.
        marker: regular expression that the name of a step's annotation begins with; None tries `MARKERS`.
        patterns: regular expressions by count, in the place of the default of that name.
        decode_only: leave out steps with prompt tokens.

    Raises:
        TraceError: fewer than two steps, overlapping ones, a bad expression, or a marker that cannot tell decode steps.
    """
    used, chosen = _marked(trace, marker)
    begin, end = trace.ts[chosen], trace.ts[chosen] + trace.dur[chosen]
    if (begin[1:] < end[:-1] - 1).any():
        raise TraceError(
            f"{trace.path}: steps of {used!r} overlap; give the trace of one rank, or another --step-marker"
        )
    edges = np.append(begin, max(end[-1], begin[-1]))
    level = "device" if (trace.kind == DEVICE).any() else "host"
    names = [trace.names[i] for i in trace.name[chosen]]
    decode = tuple(bool(_WITHOUT_PROMPT.match(n)) for n in names) if all(map(_WITH_CLASS.match, names)) else None
    table = StepTable(
        path=str(trace.path),
        marker=used,
        level=level,
        cut=trace.cut,
        period_ms=tuple((np.diff(begin) / 1e3).tolist()),
        marker_ms=tuple(((end - begin) / 1e3).tolist()),
        idle_ms=tuple((_idle(trace, edges, end, level) / 1e3).tolist()),
        counts={name: tuple(n.tolist()) for name, n in _counts(trace, edges, level, patterns or {}).items()},
        decode=decode,
    )
    return _decode_steps(table) if decode_only else table


def _marked(trace: Trace, marker: str | None) -> tuple[str, Ints]:
    """The marker used, and the annotations that carry it, in order of time."""
    for expression in (marker,) if marker else MARKERS:
        named = matching(trace, expression, start=True)
        found = np.flatnonzero((trace.kind == ANNOTATION) & named[trace.name])
        if len(found) >= 2:
            return expression, found[np.argsort(trace.ts[found], kind="stable")]
    tried = marker or ", ".join(MARKERS)
    remedy = "give torch.profiler a schedule, or name the annotation by --step-marker"
    raise TraceError(f"{trace.path}: fewer than two steps are marked by {tried}; {remedy}")


def matching(trace: Trace, expression: str, *, start: bool = False) -> npt.NDArray[np.bool_]:
    """For each distinct name whether it matches."""
    try:
        compiled = re.compile(expression)
    except re.error as error:
        raise TraceError(f"{expression!r} is no regular expression: {error}") from error
    match = compiled.match if start else compiled.search
    return np.array([match(name) is not None for name in trace.names], dtype=np.bool_)


def _counts(trace: Trace, edges: Floats, level: str, patterns: Mapping[str, str]) -> dict[str, Ints]:
    owner = _owner(trace, edges)
    kinds = (DEVICE,) if level == "device" else (OPERATOR, ANNOTATION)
    wanted = dict(DEVICE_PATTERNS if level == "device" else HOST_PATTERNS) | dict(patterns)
    counted = {name: _count(trace, owner, edges, expression, kinds) for name, expression in wanted.items()}
    runtime = {n: _count(trace, owner, edges, e, (RUNTIME,)) for n, e in RUNTIME_PATTERNS.items()}
    work = DEVICE if level == "device" else OPERATOR
    return {"launches": _per_step(owner[trace.kind == work], edges), **counted, **runtime}


def _count(trace: Trace, owner: Ints, edges: Floats, expression: str, kinds: tuple[int, ...]) -> Ints:
    """Matches per step of the first of `kinds` that has any: an operator inside its annotation counts once."""
    named = matching(trace, expression)[trace.name]
    for kind in kinds:
        chosen = named & (trace.kind == kind)
        if chosen.any():
            return _per_step(owner[chosen], edges)
    return np.zeros(len(edges) - 1, dtype=np.int64)


def _per_step(owner: Ints, edges: Floats) -> Ints:
    counted: Ints = np.bincount(owner[owner >= 0], minlength=len(edges) - 1).astype(np.int64)
    return counted


def _owner(trace: Trace, edges: Floats) -> Ints:
    """The step of every event, -1 outside all; device work goes by its launch."""
    when = trace.ts.copy()
    calls = np.flatnonzero((trace.kind == RUNTIME) & (trace.correlation != 0))
    work = np.flatnonzero((trace.kind == DEVICE) & (trace.correlation != 0))
    if len(calls) and len(work):
        calls = calls[np.argsort(trace.correlation[calls], kind="stable")]
        known = trace.correlation[calls]
        at = np.minimum(np.searchsorted(known, trace.correlation[work]), len(known) - 1)
        tied = known[at] == trace.correlation[work]
        when[work[tied]] = trace.ts[calls[at[tied]]]
    owner = np.searchsorted(edges, when, side="right") - 1
    owner[when == edges[-1]] = len(edges) - 2
    owner[(owner < 0) | (owner >= len(edges) - 1)] = -1
    found: Ints = owner.astype(np.int64)
    return found


def _idle(trace: Trace, edges: Floats, end: Floats, level: str) -> Floats:
    """Microseconds per step in which nothing ran, by the union of the intervals of what runs."""
    if level == "host":
        return np.maximum(np.diff(edges) - (end - edges[:-1]), 0.0)
    work = np.flatnonzero(trace.kind == DEVICE)
    work = work[np.argsort(trace.ts[work], kind="stable")]
    begin, stop = trace.ts[work], np.maximum.accumulate(trace.ts[work] + trace.dur[work])
    # Busy time up to a moment is piecewise linear in it: merge the intervals, then read it off at the edges.
    first = np.flatnonzero(np.append(True, begin[1:] > stop[:-1]))
    starts, stops = begin[first], stop[np.append(first[1:] - 1, len(stop) - 1)]
    busy = np.concatenate([[0.0], np.cumsum(stops - starts)])
    at = np.searchsorted(starts, edges, side="right")
    over = np.where(at > 0, np.maximum(stops[at - 1] - edges, 0.0), 0.0)
    return np.maximum(np.diff(edges) - np.diff(busy[at] - over), 0.0)


def _decode_steps(table: StepTable) -> StepTable:
    if table.decode is None:
        raise TraceError(f"{table.path}: {table.marker!r} does not say which steps are decode; leave out --decode-only")
    keep = [i for i, decode in enumerate(table.decode) if decode]
    if len(keep) < 2:
        raise TraceError(f"{table.path}: fewer than two steps have decode tokens only; leave out --decode-only")
    return msgspec.structs.replace(
        table,
        period_ms=tuple(table.period_ms[i] for i in keep if i < len(table.period_ms)),
        marker_ms=tuple(table.marker_ms[i] for i in keep),
        idle_ms=tuple(table.idle_ms[i] for i in keep),
        counts={name: tuple(values[i] for i in keep) for name, values in table.counts.items()},
        decode=tuple(True for _ in keep),
    )
