"""junit.xml, the form in which CI systems show results: one suite per gate, one test per scope."""

from __future__ import annotations

from xml.etree import ElementTree as ET

from dsv32_fuzz.verdict import Status
from dsv32_reports.model import Gate, Report
from dsv32_reports.wording import printable


def junit_xml(report: Report) -> bytes:
    """FAILED is a failure, MISTRUSTED an error, SKIPPED skipped; times belong to the run, not to a scope."""
    root = ET.Element("testsuites", name=f"dsv32 sign-off {printable(report.id)}", time=str(report.seconds))
    for gate in report.gates:
        root.append(_suite(gate))
    root.append(_outcome(report))
    totals = {name: sum(int(suite.get(name, "0")) for suite in root) for name in _counts([])}
    root.attrib.update({name: str(value) for name, value in totals.items()})
    ET.indent(root)
    document: bytes = ET.tostring(root, encoding="utf-8", xml_declaration=True)
    return document + b"\n"


def _suite(gate: Gate) -> ET.Element:
    suite = ET.Element("testsuite", name=printable(gate.title))
    suite.attrib.update({name: str(value) for name, value in _counts([line.status for line in gate.lines]).items()})
    for line in gate.lines:
        test = ET.SubElement(suite, "testcase", classname=f"dsv32.{printable(gate.name)}", name=printable(line.scope))
        _result(test, line.status, line.summary)
    return suite


def _outcome(report: Report) -> ET.Element:
    """The outcome as a test of its own, so that an INCONCLUSIVE run is never green."""
    status = {"GO": Status.PASSED, "NO-GO": Status.FAILED}.get(report.outcome.value, Status.MISTRUSTED)
    suite = ET.Element("testsuite", name="Outcome")
    suite.attrib.update({name: str(value) for name, value in _counts([status]).items()})
    _result(ET.SubElement(suite, "testcase", classname="dsv32", name="outcome"), status, report.reason)
    return suite


def _counts(statuses: list[Status]) -> dict[str, int]:
    return {
        "tests": len(statuses),
        "failures": statuses.count(Status.FAILED),
        "errors": statuses.count(Status.MISTRUSTED),
        "skipped": statuses.count(Status.SKIPPED),
    }


def _result(test: ET.Element, status: Status, summary: str) -> None:
    kind = {Status.FAILED: "failure", Status.MISTRUSTED: "error", Status.SKIPPED: "skipped"}.get(status)
    if kind:
        ET.SubElement(test, kind, message=printable(summary), type=status.value)
