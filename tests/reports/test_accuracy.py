"""Accuracy evidence: the interval is the published one, and small or bad evidence is never a pass."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dsv32_fuzz.verdict import Status
from dsv32_reports.accuracy import Counts, interval, non_inferiority, read_counts
from dsv32_reports.statistics import controlled


def unpaired(baseline: int, candidate: int, trials: int = 1319) -> Counts:
    sizes = {"baseline_trials": trials, "candidate_trials": trials}
    return Counts(task="gsm8k", metric="m", baseline=baseline, candidate=candidate, **sizes)


def test_the_interval_is_newcombes() -> None:
    # Newcombe (1998), table II (a): 56/70 against 48/80, two-sided 95 %: 0.0524 to 0.3339. Ours is one-sided 95 %,
    # that is two-sided 90 %, so it lies within.
    counts = Counts(task="t", metric="m", candidate=56, candidate_trials=70, baseline=48, baseline_trials=80)
    difference, low, high = interval(counts)
    assert difference == pytest.approx(0.2)
    assert 0.0524 < low < 0.2 < high < 0.3339


@pytest.mark.parametrize(
    ("baseline", "candidate", "trials", "status"),
    [
        (1250, 1250, 1319, Status.PASSED),
        (1250, 1240, 1319, Status.MISTRUSTED),
        (1250, 1100, 1319, Status.FAILED),
        (10, 10, 10, Status.MISTRUSTED),
        (0, 0, 10, Status.MISTRUSTED),
    ],
)
def test_non_inferiority(baseline: int, candidate: int, trials: int, status: Status) -> None:
    (verdict,) = controlled([non_inferiority(unpaired(baseline, candidate, trials), margin=0.02)])
    assert verdict.status is status
    assert "cannot show in this score" in verdict.summary


def test_pairs_tell_more_than_counts() -> None:
    paired = Counts(
        task="t", metric="m", baseline=1250, candidate=1248, baseline_trials=1319, candidate_trials=1319, both=1245
    )
    assert interval(paired)[1] > interval(unpaired(1250, 1248))[1]


def results(path: Path, score: object, n: object = 1319) -> Path:
    scores = {"gsm8k": {"exact_match,strict-match": score, "alias": "gsm8k"}}
    path.write_text(json.dumps({"results": scores, "n-samples": {"gsm8k": {"effective": n}}}))
    return path


def samples(path: Path, right: list[int], metric: str = "exact_match") -> Path:
    path.write_text("".join(json.dumps({"doc_id": i, metric: float(x)}) + "\n" for i, x in enumerate(right)))
    return path


def test_both_kinds_of_file(tmp_path: Path) -> None:
    (counts,) = read_counts(results(tmp_path / "a.json", 0.95), results(tmp_path / "b.json", 0.94))
    assert (counts.baseline, counts.candidate, counts.both) == (1253, 1240, None)
    pair = samples(tmp_path / "samples_a.jsonl", [1, 1, 0, 1]), samples(tmp_path / "samples_b.jsonl", [1, 0, 0, 1])
    (counts,) = read_counts(*pair)
    assert (counts.baseline, counts.candidate, counts.both, counts.baseline_trials) == (3, 2, 2, 4)


@pytest.mark.parametrize("score", [1.5, -0.1, "high", None])
def test_a_bad_score_is_an_error(tmp_path: Path, score: object) -> None:
    with pytest.raises(ValueError, match="must be from 0 to 1"):
        read_counts(results(tmp_path / "a.json", score), results(tmp_path / "b.json", 0.9))


def test_bad_files_are_one_line(tmp_path: Path) -> None:
    good = results(tmp_path / "a.json", 0.9)
    (tmp_path / "bad.json").write_text('{"a": 1}')
    (tmp_path / "deep.json").write_text("[" * 100_000)
    for bad in ("bad.json", "deep.json", "none.json"):
        with pytest.raises(ValueError, match=r"give a results_\*.json"):
            read_counts(good, tmp_path / bad)
    with pytest.raises(ValueError, match="not one of each"):
        read_counts(good, samples(tmp_path / "s.jsonl", [1]))
    with pytest.raises(ValueError, match="in common"):
        read_counts(good, results(tmp_path / "c.json", 0.9, n=None))
    with pytest.raises(ValueError, match="differ in 1 documents"):
        read_counts(samples(tmp_path / "s.jsonl", [1]), samples(tmp_path / "t.jsonl", [1, 1]))
    with pytest.raises(ValueError, match="neither"):
        read_counts(samples(tmp_path / "s.jsonl", [1], "bleu"), samples(tmp_path / "t.jsonl", [1], "bleu"))
    with pytest.raises(ValueError, match="above 0"):
        non_inferiority(unpaired(1, 1), 0.0)


def lines(path: Path, *found: dict[str, object]) -> Path:
    path.write_text("".join(json.dumps(sample) + "\n" for sample in found))
    return path


def test_answers_that_are_no_pairs_are_refused(tmp_path: Path) -> None:
    one = {"doc_id": 0, "exact_match": 1.0, "doc_hash": "a", "filter": "strict-match"}
    good = lines(tmp_path / "a.jsonl", one, one | {"filter": "flexible-extract", "exact_match": 0.0})
    (counts,) = read_counts(good, lines(tmp_path / "b.jsonl", one))
    assert (counts.baseline, counts.baseline_trials) == (1, 1)
    for other, told in (
        ([one | {"doc_hash": "b"}], "differ in 2 documents"),
        ([one | {"filter": "flexible-extract"}], "differ in 2 documents"),
        ([one, one], "document 0 occurs twice"),
        ([one | {"exact_match": 7.0}], "from 0 to 1"),
    ):
        with pytest.raises(ValueError, match=told):
            read_counts(good, lines(tmp_path / "c.jsonl", *other))


def test_one_file_twice_or_a_task_left_out_is_refused(tmp_path: Path) -> None:
    good = results(tmp_path / "a.json", 0.9)
    (tmp_path / "link.json").symlink_to(good)
    with pytest.raises(ValueError, match="is given twice"):
        read_counts(good, tmp_path / "link.json")
    both = json.loads(good.read_text())
    both["results"]["mmlu"] = {"acc,none": 0.2}
    (tmp_path / "b.json").write_text(json.dumps(both))
    with pytest.raises(ValueError, match="only one of the two results has the task 'mmlu'"):
        read_counts(tmp_path / "b.json", good)
    for n in (0, -5, "1319", 1e300, 10**30):
        with pytest.raises(ValueError, match="in common"):
            read_counts(good, results(tmp_path / "c.json", 0.9, n=n))
