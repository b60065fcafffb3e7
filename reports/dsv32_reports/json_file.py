"""JSON on disk: the report, and one line per event in the journal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from dsv32_fuzz.campaigns.result import CampaignResult
from dsv32_fuzz.events import AnyEvent, Event
from dsv32_reports.model import Report

_EVENT: msgspec.json.Decoder[AnyEvent] = msgspec.json.Decoder(AnyEvent)


def encode(document: Any) -> bytes:
    """A document for people and machines: indented, ends with a newline."""
    return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"


def encode_campaign(result: CampaignResult) -> bytes:
    """result.json of a fuzz campaign: indented, ends with a newline; the verdict on top."""
    document = {"status": result.status, **msgspec.to_builtins(result, builtin_types=(msgspec.Raw,))}
    return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"


def journal_line(event: Event) -> bytes:
    """One event, one line."""
    return msgspec.json.encode(event) + b"\n"


def read_journal(path: Path) -> list[AnyEvent]:
    """Every event of a journal, in order. A last line that was cut off by a kill is left out.

    Raises:
        ValueError: a line is no event; the message names file and line.
        OSError: cannot be read.
    """
    events = []
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), 1):
        if not line.endswith(b"\n"):
            break
        try:
            events.append(_EVENT.decode(line))
        except (msgspec.MsgspecError, RecursionError) as error:
            raise ValueError(f"{path}, line {number}: no event of a run ({error}); the journal was changed") from error
    return events


def report_schema() -> dict[str, object]:
    """The JSON Schema of report.json."""
    return msgspec.json.schema(Report)
