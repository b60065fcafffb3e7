"""Real releases, prepared with `dsv32 target install`: one whose key is insufficient and one whose key is not.

DSV32_VLLM_DIR=DIR pytest -m vllm tests/targets
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dsv32_fuzz.targets.registry import open_target
from dsv32_fuzz.targets.survey import Survey, survey
from dsv32_fuzz.targets.vllm import VllmTarget
from dsv32_fuzz.verdict import Status

pytestmark = pytest.mark.vllm
Surveyor = Callable[[str], Survey]


@pytest.fixture(scope="module")
def surveyed() -> Surveyor:
    """The survey of a prepared release, corpus only; skips where none is prepared."""
    folder = os.environ.get("DSV32_VLLM_DIR")
    if not folder:
        pytest.skip("no prepared vLLM; set DSV32_VLLM_DIR to a folder of `dsv32 target install`")

    def run(release: str) -> Survey:
        if not (Path(folder) / release).is_dir():
            pytest.skip(f"vllm=={release} is not prepared in {folder}")
        started = time.monotonic()
        target = open_target("vllm", path=str(Path(folder) / release))
        assert isinstance(target, VllmTarget)
        try:
            return survey(target, label=release, versions=target.versions, seconds=0, run_seed=0, started=started)
        finally:
            target.close()

    return run


def test_0_24_reuses_plans_for_other_rows(surveyed: Surveyor) -> None:
    row = surveyed("0.24.0")
    assert row.versions["vllm"] == "0.24.0"
    assert row.verdicts["key_sufficiency"].status is Status.FAILED
    assert row.verdicts["plan_coverage"].status is Status.FAILED
    assert row.verdicts["planner_input"].status is Status.PASSED


def test_0_26_covers_every_row_although_its_split_cap_depends_on_the_past(surveyed: Surveyor) -> None:
    row = surveyed("0.26.0")
    assert row.verdicts["plan_coverage"].status is Status.PASSED
    key = row.verdicts["key_sufficiency"].measured
    assert key["hits"]
    assert key["wrongful"] == key["wrongful_split_cap_only"]
