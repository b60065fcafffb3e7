"""The sign-off as an in-toto statement with a test-result predicate, unsigned.

Form: in-toto attestation framework, Statement v1 and test-result predicate v0.1. To sign it, see docs/commands.md.
"""

from __future__ import annotations

from typing import Any

from dsv32_fuzz.verdict import Status
from dsv32_reports.model import Outcome, Report

RESULTS = {Outcome.GO: "PASSED", Outcome.NO_GO: "FAILED", Outcome.INCONCLUSIVE: "WARNED"}


def statement(report: Report, report_digest: str) -> dict[str, Any]:
    """About report.json, whose digest is `report_digest` (`sha256:HEX`)."""
    algorithm, _, value = report_digest.partition(":")
    by_status = {
        status: [gate.title for gate in report.gates if gate.status is status]
        for status in (Status.PASSED, Status.MISTRUSTED, Status.FAILED)
    }
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": "report.json", "digest": {algorithm: value}}],
        "predicateType": "https://in-toto.io/attestation/test-result/v0.1",
        "predicate": {
            "result": RESULTS[report.outcome],
            "configuration": [{"name": f"dsv32 sign-off of {report.target}, {report.options_text}"}],
            "passedTests": by_status[Status.PASSED],
            "warnedTests": by_status[Status.MISTRUSTED],
            "failedTests": by_status[Status.FAILED],
        },
    }
