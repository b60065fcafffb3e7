"""Reads a Kineto trace (Chrome's trace format, .json or .json.gz) as a stream, in bounded memory.

The file is never held: of each event that a question can be about, some 30 bytes are kept in typed arrays, and each
distinct name once. Python frames (`with_stack=True`) and everything else are passed over. ijson does the parsing.
"""

from __future__ import annotations

import gzip
import math
import zlib
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import ijson
import numpy as np
import numpy.typing as npt

DEVICE, RUNTIME, OPERATOR, ANNOTATION = range(4)
"""Kinds of events: device work, calls of the CUDA or HIP runtime, torch operators, annotations of the program."""
_KINDS = {
    "kernel": DEVICE,
    "gpu_memcpy": DEVICE,
    "gpu_memset": DEVICE,
    "memcpy": DEVICE,
    "memset": DEVICE,
    "cuda_runtime": RUNTIME,
    "cuda_driver": RUNTIME,
    "runtime": RUNTIME,
    "cpu_op": OPERATOR,
    "operator": OPERATOR,
    "user_annotation": ANNOTATION,
}
_GZIP_MAGIC = b"\x1f\x8b"
_BUFFER = 1 << 16


class TraceError(ValueError):
    """A trace that cannot be read; one line that names the file and the remedy."""


@dataclass
class Trace:
    """The events of one file as columns; times in microseconds, correlation 0 where there is none."""

    path: Path
    names: list[str] = field(default_factory=list)
    kind_: array[int] = field(default_factory=lambda: array("B"))
    name_: array[int] = field(default_factory=lambda: array("l"))
    ts_: array[float] = field(default_factory=lambda: array("d"))
    dur_: array[float] = field(default_factory=lambda: array("d"))
    correlation_: array[int] = field(default_factory=lambda: array("q"))
    events: int = 0
    """Complete events in the file, those passed over included."""
    cut: str | None = None
    """Why the file could not be read to its end; None if it was."""

    @property
    def kind(self) -> npt.NDArray[np.uint8]:
        """DEVICE, RUNTIME, OPERATOR or ANNOTATION."""
        return np.frombuffer(self.kind_, dtype=np.uint8)

    @property
    def name(self) -> npt.NDArray[np.int64]:
        """Index into `names`."""
        return np.frombuffer(self.name_, dtype=np.dtype("l")).astype(np.int64)

    @property
    def ts(self) -> npt.NDArray[np.float64]:
        """Start, in microseconds."""
        return np.frombuffer(self.ts_)

    @property
    def dur(self) -> npt.NDArray[np.float64]:
        """Duration, in microseconds."""
        return np.frombuffer(self.dur_)

    @property
    def correlation(self) -> npt.NDArray[np.int64]:
        """What ties device work to the runtime call that launched it."""
        return np.frombuffer(self.correlation_, dtype=np.int64)


def read_trace(path: Path, *, partial: bool = False) -> Trace:
    """The trace in `path`.

    Args:
        path: a file of torch.profiler's `export_chrome_trace` or `tensorboard_trace_handler`, gzipped or not.
        partial: whether a file that ends early or is damaged gives what could be read, with `cut` set.

    Raises:
        TraceError: no trace, no event, an event without times, or damage where `partial` is not allowed.
        OSError: the file cannot be opened.
    """
    trace = Trace(path=path)
    index: dict[str, int] = {}
    try:
        with _open(path) as file:
            prefix = _prefix(path, file)
            for event in ijson.items(file, prefix, use_float=True, buf_size=_BUFFER):
                _keep(trace, event, index)
    except (ijson.JSONError, UnicodeDecodeError) as error:
        trace.cut = f"its JSON is damaged or ends early after {trace.events} events ({_first_line(error)})"
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        trace.cut = f"its gzip data are damaged or end early after {trace.events} events ({_first_line(error)})"
    if trace.cut is not None and (not partial or not trace.events):
        remedy = "record it again" if not trace.events else "record it again, or pass --partial to use what is there"
        raise TraceError(f"{path}: {trace.cut}; {remedy}")
    if not trace.events:
        raise TraceError(f"{path}: it holds no traceEvents; give a file that torch.profiler exported as a Chrome trace")
    trace.names = list(index)
    return trace


@contextmanager
def _open(path: Path) -> Iterator[IO[bytes]]:
    with path.open("rb") as raw:
        packed = raw.read(2) == _GZIP_MAGIC
        raw.seek(0)
        if packed:
            with gzip.open(raw) as file:
                yield file  # type: ignore[misc]
        else:
            yield raw


def _prefix(path: Path, file: IO[bytes]) -> str:
    """Where the events are: in `traceEvents`, or in a list that is the whole file."""
    start = file.read(64).lstrip()
    file.seek(0)
    if start[:1] not in (b"{", b"["):
        raise TraceError(f"{path}: it is no JSON; give a file that torch.profiler exported as a Chrome trace")
    return "item" if start[:1] == b"[" else "traceEvents.item"


def _keep(trace: Trace, event: Any, index: dict[str, int]) -> None:
    if not isinstance(event, dict) or event.get("ph") != "X":
        return
    trace.events += 1
    kind = _KINDS.get(str(event.get("cat", "")).lower())
    if kind is None:
        return
    name: Any = event.get("name")
    ts: Any = event.get("ts")
    dur: Any = event.get("dur")
    if not (_is_time(ts) and _is_time(dur) and dur >= 0 and isinstance(name, str)):
        raise TraceError(f"{trace.path}: event {trace.events} has no name, or no time and duration; record it again")
    args = event.get("args")
    correlation = args.get("correlation", 0) if isinstance(args, dict) else 0
    trace.kind_.append(kind)
    trace.name_.append(index.setdefault(name, len(index)))
    trace.ts_.append(ts)
    trace.dur_.append(dur)
    trace.correlation_.append(correlation if isinstance(correlation, int) else 0)


def _is_time(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].strip()
