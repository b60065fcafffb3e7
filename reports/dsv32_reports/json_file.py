"""JSON on disk: the report, and one line per event in the journal."""

from __future__ import annotations

import msgspec

from dsv32_fuzz.campaign_result import CampaignResult
from dsv32_fuzz.events import Event
from dsv32_reports.model import Report


def encode(report: Report) -> bytes:
    """report.json: indented, ends with a newline."""
    return msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"


def encode_campaign(result: CampaignResult) -> bytes:
    """result.json of a fuzz campaign: indented, ends with a newline; the verdict on top."""
    document = {"status": result.status, **msgspec.to_builtins(result, builtin_types=(msgspec.Raw,))}
    return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"


def journal_line(event: Event) -> bytes:
    """One event, one line."""
    return msgspec.json.encode(event) + b"\n"


def report_schema() -> dict[str, object]:
    """The JSON Schema of report.json."""
    return msgspec.json.schema(Report)
