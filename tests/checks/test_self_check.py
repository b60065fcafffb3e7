"""The reference's own trial: recorded decodes agree, and a recording that should not agree fails."""

from __future__ import annotations

import shutil
from pathlib import Path

from dsv32_fuzz.events import VerdictReached
from dsv32_fuzz.golden.verdicts import DECODES, SHORT_RUNS, decodes_verdict, reference_self_check
from dsv32_fuzz.verdict import Status

HONEST, DEFECTIVE = SHORT_RUNS


def test_the_short_trial_holds_one_honest_run_one_defective_and_the_components() -> None:
    (reached,) = [event for event in reference_self_check() if isinstance(event, VerdictReached)]
    assert reached.verdict.status is Status.PASSED
    assert reached.verdict.measured["runs"] == 2
    assert int(reached.verdict.measured["components"]) >= 18
    assert int(reached.verdict.measured["values"]) > 300_000


def test_a_recording_with_a_defect_under_an_honest_name_fails(tmp_path: Path) -> None:
    shutil.copy(DECODES / "manifest.json", tmp_path)
    shutil.copy(DECODES / f"{DEFECTIVE}.npz", tmp_path / f"{HONEST}.npz")
    verdict = decodes_verdict(tmp_path, runs=[HONEST])
    assert verdict.status is Status.FAILED
    assert "step 0, layer 0" in verdict.summary


def test_nothing_replayed_is_mistrusted() -> None:
    assert decodes_verdict(DECODES, runs=()).status is Status.MISTRUSTED
