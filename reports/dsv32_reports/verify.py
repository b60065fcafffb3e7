"""`dsv32 verify`: is this bundle whole, and does its journal give the report that it shows?

Two independent looks. The manifest: every file is there with its digest, and none besides. The journal: gates, bounds,
outcome and pages are computed again from the events, and every case is the one the events hold. Whoever changes a
number must change journal, pages and manifest alike; then only the digest kept elsewhere tells.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from dsv32_fuzz.case import load_case
from dsv32_reports.bundle import JOURNAL, MANIFEST, Manifest, digest, files_of, pages
from dsv32_reports.fingerprint import fingerprint
from dsv32_reports.fold import Evidence, Then, make_report
from dsv32_reports.json_file import read_journal
from dsv32_reports.model import Report

SUITE, COMMIT = "dsv32-validation", "dsv32-validation commit"
MAX_REPORT_BYTES = 256 * 1024 * 1024


def verify(folder: Path, expected: str = "") -> tuple[list[str], str]:
    """What is wrong with a bundle, one line each, and its digest (empty without a manifest).

    Args:
        folder: the bundle.
        expected: the digest that the sign-off printed, `sha256:HEX`; empty if it was not kept.

    Raises:
        ValueError: no bundle at all.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder; give the folder that a sign-off wrote")
    if not (folder / MANIFEST).is_file() and not (folder / JOURNAL).is_file():
        raise ValueError(f"{folder} holds neither {MANIFEST} nor {JOURNAL}; give the folder that a sign-off wrote")
    problems, found = _against_manifest(folder)
    if expected and expected != found:
        problems.insert(
            0, f"the digest is {found or 'missing'}, not {expected}: the bundle was changed after it was made"
        )
    try:
        problems += _against_journal(folder)
    except (ValueError, OSError) as error:
        problems.append(str(error))
    except Exception as error:  # rows of tables and measurements are free text: an edit can break any page
        problems.append(f"{JOURNAL}: gives no report ({type(error).__name__}: {error}); the journal was changed")
    return list(dict.fromkeys(problems)), found


def verified_report(folder: Path) -> tuple[Report, str]:
    """The report of a bundle, and the bundle's digest.

    Raises:
        ValueError: no bundle, or one that does not verify.
    """
    problems, found = verify(folder)
    if problems:
        raise ValueError(f"{folder} does not verify ({problems[0]}); give an unchanged bundle")
    return _report(folder / "report.json"), found


def previous_of(folder: Path) -> dict[str, Any]:
    """What a sign-off keeps of the one before, for `RunStarted.previous`.

    Raises:
        ValueError: no bundle, or one that does not verify.
    """
    report, found = verified_report(folder)
    then = Then(
        id=report.id,
        outcome=report.outcome,
        options_text=report.options_text,
        policy=report.policy,
        fingerprint=report.fingerprint,
        digest=found,
    )
    kept: dict[str, Any] = msgspec.to_builtins(then)
    return kept


def _against_manifest(folder: Path) -> tuple[list[str], str]:
    path = folder / MANIFEST
    if not path.is_file():
        return [f"{MANIFEST}: missing; the sign-off did not finish, or the file was removed"], ""
    content = path.read_bytes()
    try:
        listed = msgspec.json.decode(content, type=Manifest).files
    except msgspec.MsgspecError as error:
        return [f"{MANIFEST}: no manifest ({error})"], digest(content)
    present = files_of(folder)
    problems = [f"{name}: missing, though the manifest lists it" for name in sorted(listed.keys() - set(present))]
    problems += [f"{name}: not in the manifest" for name in present if name not in listed]
    for name in sorted(listed.keys() & set(present)):
        if (folder / name).is_symlink():
            problems.append(f"{name}: a link, not a file")
        elif digest((folder / name).read_bytes()) != listed[name]:
            problems.append(f"{name}: changed since the manifest was made")
    return problems, digest(content)


def _against_journal(folder: Path) -> list[str]:
    if not (folder / JOURNAL).is_file():
        return [f"{JOURNAL}: missing, so nothing can be computed again"]
    evidence = Evidence()
    for event in read_journal(folder / JOURNAL):
        evidence.add(event)
    other = _made_by_another_version(evidence)
    if other:
        return [other]
    report_path = folder / "report.json"
    if not report_path.is_file():
        return ["report.json: missing"]
    shown = _report(report_path)
    computed = make_report(evidence, shown.folder)
    problems = [f"report.json: {text}" for text in differences(shown, computed)]
    expected = pages(computed)
    for name, content in expected.items():
        if not (folder / name).is_file():
            problems.append(f"{name}: missing")
        elif name != "report.json" and (folder / name).read_bytes() != content:
            problems.append(f"{name}: differs from what the journal gives")
    known = {JOURNAL, *expected, *(f"cases/{name}" for name in evidence.findings)}
    problems += [f"{name}: no file of a sign-off" for name in files_of(folder) if name not in known]
    problems += _cases(folder, evidence)
    return [*problems, *_of_another_commit(evidence)] if problems else []


def _made_by_another_version(evidence: Evidence) -> str:
    """Pages and gates are those of one version; another one cannot tell an edit from a change of the suite."""
    made = evidence.started.fingerprint.get(SUITE, "unknown") if evidence.started else "unknown"
    ours = fingerprint()[SUITE]
    return "" if made == ours else f"{JOURNAL}: made by {SUITE} {made}, this is {ours}; verify it with {made}"


def _of_another_commit(evidence: Evidence) -> list[str]:
    """A hint for whoever sees differences: the suite itself may have changed since."""
    made = evidence.started.fingerprint.get(COMMIT, "") if evidence.started else ""
    ours = fingerprint()[COMMIT]
    if not made or made == ours:
        return []
    return [
        f"{JOURNAL}: made by commit {made}, this is {ours}; a difference may be one of the suite: verify it with {made}"
    ]


def _report(path: Path) -> Report:
    if path.stat().st_size > MAX_REPORT_BYTES:
        raise ValueError(f"{path.name}: larger than {MAX_REPORT_BYTES} bytes")
    try:
        return msgspec.json.decode(path.read_bytes(), type=Report)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"{path.name}: no report of a sign-off ({error})") from error


def _cases(folder: Path, evidence: Evidence) -> list[str]:
    problems = []
    for name, found in evidence.findings.items():
        path = folder / "cases" / name
        if not path.is_file():
            problems.append(f"cases/{name}: missing, though the journal holds it")
            continue
        try:
            same = load_case(path) == found.case
        except ValueError:
            same = False
        if not same:
            problems.append(f"cases/{name}: not the counterexample of the journal")
    return problems


def differences(shown: Report, computed: Report) -> list[str]:
    """Where two reports differ, as dotted paths with both values; at most twenty."""
    return _walk(msgspec.to_builtins(shown), msgspec.to_builtins(computed), "")[:20]


def _walk(shown: Any, computed: Any, path: str) -> list[str]:
    if isinstance(shown, dict) and isinstance(computed, dict):
        names = dict.fromkeys([*shown, *computed])
        return [text for name in names for text in _walk(shown.get(name), computed.get(name), f"{path}.{name}")]
    if isinstance(shown, list) and isinstance(computed, list) and len(shown) == len(computed):
        pairs = zip(shown, computed, strict=True)
        return [text for i, (a, b) in enumerate(pairs) for text in _walk(a, b, f"{path}[{i}]")]
    if shown == computed:
        return []
    return [f"{path.lstrip('.')} is {_short(shown)}, the journal gives {_short(computed)}"]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
