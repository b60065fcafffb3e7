"""The rows of a run that is not finished, one JSON document per line, so that a run that was ended goes on behind them.

The first line says which run it is. A last line that was cut off while it was written is dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from dsv32_fuzz.faults.results import ControlRow, FaultRow, Gate

NAME = "unfinished.jsonl"


class Run(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What two runs must share for their rows to be of one matrix; `names` are the faults asked for."""

    gate: Gate
    seed: int
    names: tuple[str, ...]


class _Line(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    fault: FaultRow | None = None
    control: ControlRow | None = None


def read(folder: Path, run: Run) -> list[FaultRow | ControlRow]:
    """The rows that an ended run left in the folder; none if there was none.

    Raises:
        ValueError: they belong to another run, or the file is no journal.
    """
    path = folder / NAME
    if not path.exists():
        return []
    head, *lines = path.read_bytes().split(b"\n")[:-1] or [b""]
    try:
        if msgspec.json.decode(head, type=Run) != run:
            raise ValueError(
                f"{path} is of another gate, seed or choice of faults; finish that run or give another --out"
            )
        found = [msgspec.json.decode(line, type=_Line) for line in lines]
    except msgspec.DecodeError as error:
        raise ValueError(f"{path} is no journal of a kill matrix ({error}); remove it to begin anew") from error
    return [row for line in found if (row := line.fault or line.control) is not None]


def written(
    folder: Path, run: Run, old: Iterable[FaultRow | ControlRow], new: Iterable[FaultRow | ControlRow]
) -> Iterator[FaultRow | ControlRow]:
    """`old` rows, then each of `new` when it is on disk."""
    folder.mkdir(parents=True, exist_ok=True)
    path, kept = folder / NAME, list(old)
    lines = [msgspec.json.encode(run), *map(_encoded, kept)]
    path.write_bytes(b"\n".join([*lines, b""]))
    yield from kept
    with path.open("ab") as journal:
        for row in new:
            journal.write(_encoded(row) + b"\n")
            journal.flush()
            yield row


def finished(folder: Path) -> None:
    """The matrix of the run is written: its journal goes."""
    (folder / NAME).unlink(missing_ok=True)


def _encoded(row: FaultRow | ControlRow) -> bytes:
    line = _Line(fault=row) if isinstance(row, FaultRow) else _Line(control=row)
    return msgspec.json.encode(line)
