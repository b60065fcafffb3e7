"""History: kept once, drifts found and not invented, differences named."""

from __future__ import annotations

import json
import random
import sqlite3
from pathlib import Path

import pytest
from report_worlds import make_bundle, whole_run
from typer.testing import CliRunner

from dsv32_fuzz.events import RunFinished, SequencesChecked
from dsv32_reports.cli import app
from dsv32_reports.fold import fold
from dsv32_reports.history import SHORTEST_SERIES, changes, drifts, figures, opened
from dsv32_reports.html_page import render_history


def test_a_signoff_is_kept_once(tmp_path: Path) -> None:
    report = fold(whole_run(), "run")
    with opened(tmp_path / "h.sqlite") as history:
        assert history.add(report, "sha256:1")
        assert not history.add(report, "sha256:1")
    with opened(tmp_path / "h.sqlite") as history:
        assert [row.digest for row in history.rows()] == ["sha256:1"]
        assert {name for _, name in history.figures()} == set(figures(report))


def series(values: list[float]) -> dict[tuple[str, str], list[tuple[str, float]]]:
    return {("s", "f"): [(str(i), value) for i, value in enumerate(values)]}


def test_a_steady_rise_is_a_drift_and_noise_is_none() -> None:
    (drift,) = drifts(series([0.10, 0.11, 0.12, 0.13, 0.14, 0.15, 0.16, 0.17]))
    assert (drift.first, drift.last, drift.tau) == (0.10, 0.17, pytest.approx(1))
    assert drifts(series([0.1] * 20)) == []
    assert drifts(series([0.1 * i for i in range(SHORTEST_SERIES - 1)])) == []


def test_noise_is_rarely_a_drift_over_many_figures() -> None:
    rng = random.Random(0)
    wrong = 0
    for _ in range(40):
        noise = {("s", f"f{n}"): [(str(i), rng.random()) for i in range(10)] for n in range(20)}
        wrong += bool(drifts(noise))
    # Under the null a run raises an alarm with probability at most 5 %; 9 or more of 40 has probability below 1e-4.
    assert wrong < 9


def test_differences_are_named() -> None:
    before, after = fold(whole_run(), "a"), fold(whole_run(failing=True, options_text="pr42982"), "b")
    told = changes(before, after)
    assert "outcome: GO -> NO-GO" in told
    assert "options_text: pr47766 -> pr42982" in told
    assert "gate Metadata key: PASSED -> FAILED" in told
    assert any(line.startswith("counterexample new: key_sufficiency in mtp_decode") for line in told)
    assert changes(before, before) == []


def test_the_commands(tmp_path: Path) -> None:
    for i in range(8):
        events = [
            e for e in whole_run(started=f"2026-01-0{i + 1}") if not isinstance(e, SequencesChecked | RunFinished)
        ]
        events += [SequencesChecked(sequences=100 - 10 * i, failed=0, step_batches=1), RunFinished(seconds=1.0)]
        make_bundle(tmp_path / f"b{i}", events)
    bundles = [str(tmp_path / f"b{i}") for i in range(8)]
    kept = ["--db", str(tmp_path / "h.sqlite"), "--html", str(tmp_path / "h.html"), "--json"]
    done = CliRunner().invoke(app, ["history", *bundles, *kept])
    assert done.exit_code == 1, done.output  # the bound on failing runs rises, since fewer and fewer runs were tried
    document = json.loads(done.stdout)
    assert document["added"] == 8
    assert [drift["figure"] for drift in document["drifts"]] == ["upper bound on failing serving runs"]
    page = (tmp_path / "h.html").read_text()
    assert page.count('<svg role="img"') == len(figures(fold(whole_run(), "x")))
    assert CliRunner().invoke(app, ["diff", bundles[0], bundles[0]]).exit_code == 0
    assert CliRunner().invoke(app, ["diff", bundles[0], bundles[7]]).exit_code == 1
    (tmp_path / "b0" / "report.html").write_text("x")
    assert CliRunner().invoke(app, ["history", bundles[0], *kept]).exit_code == 2


def test_a_file_that_is_no_history_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("no database, however long it is, will it ever be one" * 10)
    with pytest.raises(ValueError, match="no history"), opened(tmp_path / "x"):
        pass


def test_a_file_with_another_table_of_that_name_is_an_error(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "x") as database:
        database.execute("CREATE TABLE signoff (x)")
    with pytest.raises(ValueError, match="no history"), opened(tmp_path / "x") as history:
        history.add(fold(whole_run(), "run"), "sha256:1")


def test_the_history_page_escapes(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>"
    page = render_history([], {(evil, evil): [("1", 1.0)]}, [])
    assert "<script" not in page
