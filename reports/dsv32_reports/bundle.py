"""The bundle: every file that a sign-off leaves, and the manifest that holds their digests.

All files but the journal and the cases are computed from the journal (`pages`), so `verify` can compute them again. The
digest of a bundle is the SHA-256 of its manifest: whoever keeps it elsewhere sees any later edit.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from dsv32_fuzz.case import write_atomically
from dsv32_reports.attestation import statement
from dsv32_reports.html_page import render_html
from dsv32_reports.json_file import encode, report_schema
from dsv32_reports.junit import junit_xml
from dsv32_reports.model import Report

JOURNAL = "events.jsonl"
MANIFEST = "manifest.json"


class Manifest(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="format", tag="dsv32-manifest/1"
):
    """SHA-256 of every other file of the bundle, by path relative to it."""

    files: dict[str, str]


def digest(content: bytes) -> str:
    """SHA-256 as `sha256:HEX`."""
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def pages(report: Report) -> dict[str, bytes]:
    """Every file that is computed from a report, by name."""
    document = encode(report)
    return {
        "report.json": document,
        "report.schema.json": encode(report_schema()),
        "report.html": render_html(report).encode(),
        "junit.xml": junit_xml(report),
        "test-result.intoto.json": encode(statement(report, digest(document))),
    }


def write_bundle(report: Report, folder: Path) -> str:
    """Write the pages, each whole or not at all, and the manifest last; returns the bundle's digest."""
    for name, content in pages(report).items():
        write_atomically(folder / name, content)
    manifest = encode(Manifest(files={name: digest((folder / name).read_bytes()) for name in files_of(folder)}))
    write_atomically(folder / MANIFEST, manifest)
    return digest(manifest)


def files_of(folder: Path) -> list[str]:
    """Paths of all that is in a bundle but the manifest and true folders, relative to it, sorted."""
    found = (
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()
    )
    return sorted(name for name in found if name != MANIFEST)
