"""The benchmark of the checks measures judged steps only, and its command says so."""

from __future__ import annotations

import msgspec
import pytest
from typer.testing import CliRunner

from dsv32_fast.batch import StepBatch
from dsv32_fast.metadata import MetadataBuilder
from dsv32_fast.options import PRESETS
from dsv32_fuzz.bench.checks import bench_checks, sequence
from dsv32_fuzz.checks.catalogue import STEP_CHECKS_BY_NAME
from dsv32_fuzz.checks.hygiene import BufferHygiene
from dsv32_fuzz.targets.intree import InTreeTarget
from dsv32_reports.cli import app


def test_the_command_gives_rates_and_shares() -> None:
    before = BufferHygiene.observe
    result = CliRunner().invoke(app, ["bench", "checks", "--batches", "2", "--steps", "16", "--json"])
    assert result.exit_code == 0
    (rate,) = msgspec.json.decode(result.stdout)
    assert (rate["batch"], rate["steps"], set(rate["shares"])) == (2, 16, {*STEP_CHECKS_BY_NAME, "build"})
    assert sum(rate["shares"].values()) == pytest.approx(1)
    assert 0 < rate["lowest"] <= rate["steps_per_second"] <= rate["highest"]
    assert BufferHygiene.observe is before


@pytest.mark.parametrize("sizes", ["0", "9000", "x"])
def test_a_bad_size_is_refused(sizes: str) -> None:
    result = CliRunner().invoke(app, ["bench", "checks", "--batches", sizes, "--steps", "16"])
    assert result.exit_code == 2


def test_a_failing_check_gives_no_rate() -> None:
    class ForgetsToClear(MetadataBuilder):
        def _clear(self, step: StepBatch) -> None:
            del step

    with pytest.raises(RuntimeError, match="buffer_hygiene fails on the benchmark"):
        bench_checks(InTreeTarget(PRESETS["pr47766"], builder=ForgetsToClear), (2,), 32)


def test_the_sequence_crosses_topk_and_shrinks() -> None:
    steps = sequence(3, 160)
    assert {len(step.seq_lens) for step in steps} == {2, 3}
    assert min(step.seq_lens[-1] for step in steps) < 2048 <= max(step.seq_lens[-1] for step in steps)
