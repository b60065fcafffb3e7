"""Shards: their streams of seeds, what a kill leaves, how they merge, and what a search does with a known cause."""

from __future__ import annotations

import itertools
import os
import random
import signal
from pathlib import Path

import msgspec
import pytest
from campaign_world import LONG, SPEC, Numbers, forked, kill_when, number_case, plan_for, run_numbers, use_numbers
from hypothesis import strategies as st

from dsv32_fuzz.campaigns.causes import case_digest
from dsv32_fuzz.campaigns.journal import (
    CRASHES,
    JOURNAL,
    CaseFinished,
    CorpusCaseRun,
    CounterexampleShrunk,
    Crash,
    Journal,
    SessionEnded,
    append_durably,
    case_in,
    document_of,
    read_records,
)
from dsv32_fuzz.campaigns.recorded import Recorded
from dsv32_fuzz.campaigns.result import read_result
from dsv32_fuzz.campaigns.shards import ATTEMPTS, CorpusCase, round_seed, run_shard, shard_folder, write_inputs
from dsv32_fuzz.case import AnyCase
from dsv32_fuzz.verdict import Status


def digests(shard: Path) -> list[str]:
    return [record.digest for record in read_records(shard / JOURNAL) if isinstance(record, CaseFinished)]


def found_in(shard: Path) -> list[CounterexampleShrunk]:
    return [record for record in read_records(shard / JOURNAL) if isinstance(record, CounterexampleShrunk)]


def above(limit: int, words: str) -> Numbers:
    return Numbers("even", lambda number: f"number {number} {words}" if number > limit else "")


def test_every_round_of_every_property_on_every_shard_has_its_own_seed() -> None:
    keys = itertools.product((0, 1), ("even", "odd"), range(20), range(20))
    seeds = [round_seed(*key) for key in keys]
    assert len(set(seeds)) == len(seeds) == 1600


def test_a_kill_at_ten_random_moments_loses_no_finished_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The witness is another file: it is written when a case has finished, by whoever was about to be killed."""
    use_numbers(monkeypatch, Numbers("even", enough=10**6), Numbers("odd", enough=10**6))
    witness = os.open(tmp_path / "witness", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    finish = Journal.finish

    def told(self: Journal, case, verdicts, cells=()) -> None:  # type: ignore[no-untyped-def]
        finish(self, case, verdicts, cells)
        os.write(witness, case_digest(case).encode() + b"\n")

    monkeypatch.setattr(Journal, "finish", told)
    folder, draw = tmp_path / "campaign", random.Random(20261130)
    run_numbers(tmp_path / "other", 0.1)  # what Hypothesis imports lazily is there before the processes are forked
    (tmp_path / "witness").write_bytes(b"")
    write_inputs(folder, SPEC, ())
    for _ in range(10):
        wanted = (tmp_path / "witness").stat().st_size + 17 * draw.randrange(1, 40)  # a line has 17 bytes
        child = forked(lambda: run_shard(plan_for(folder, LONG)))
        killed = kill_when(child, lambda: (tmp_path / "witness").stat().st_size >= wanted, draw.uniform(0, 0.02))  # noqa: B023
        assert killed == signal.SIGKILL
    os.close(witness)
    kept, finished = digests(shard_folder(folder, 0)), (tmp_path / "witness").read_text().split()
    assert len(finished) > 100
    assert set(finished) <= set(kept)
    # A session that was killed between journal and witness leaves one case more; nothing that finished ran again.
    assert len(kept) - len(finished) <= 10
    assert len(set(kept)) >= len(kept) - 10
    assert read_result([folder]).cases == len(set(kept))


def test_a_resumed_shard_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_numbers(monkeypatch, even := Numbers("even"), Numbers("odd"))
    shard = run_numbers(tmp_path)
    first = digests(shard)
    even.ran.clear()
    run_numbers(tmp_path)
    both = digests(shard)
    assert both[: len(first)] == first
    assert len(both) > len(first)
    assert len(set(both)) == len(both)
    assert [r.reason for r in read_records(shard / JOURNAL) if isinstance(r, SessionEnded)] == ["interrupted"] * 2


def test_the_merge_of_shards_is_their_union_in_any_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three shards, each in a folder of its own as if on three machines, over a space so small that they must meet."""
    use_numbers(monkeypatch, Numbers("even", lambda n: f"number {n} is large" if n > 300 else "", 200), Numbers("odd"))
    folders = [tmp_path / f"machine-{k}" for k in range(3)]
    shards = [run_numbers(folder, 3.0, shard=k, of=3) for k, folder in enumerate(folders)]
    union = set().union(*(digests(shard) for shard in shards))
    results = [read_result(order) for order in itertools.permutations(folders)]
    assert results.count(results[0]) == len(results) == 6
    assert results[0].cases == len(union)
    assert results[0].shards == [0, 1, 2]
    assert results[0].duplicates == sum(len(set(digests(shard))) for shard in shards) - len(union) > 0
    odd = {r.digest: r for s in shards for r in read_records(s / JOURNAL) if isinstance(r, CaseFinished)}
    (line,) = [line for line in results[0].lines if line.scope == "odd"]
    measured = [r.verdicts[0].measured for r in odd.values() if r.scope == "odd"]
    assert line.measured == {"sum": sum(m["sum"] for m in measured), "worst": max(m["worst"] for m in measured)}
    assert line.cases == len(measured)
    assert results[0].status is Status.FAILED


def test_a_failure_is_shrunk_once_and_its_cause_counted_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_numbers(monkeypatch, above(1000, "is too large"), Numbers("odd"))
    shard = run_numbers(tmp_path)
    (found,) = found_in(shard)
    assert case_in(found.case) == number_case("even", 1002)
    result = read_result([tmp_path])
    (failure,) = result.failures
    assert failure.cause == "even: number # is too large"
    assert failure.shrunk
    (line,) = [line for line in result.lines if line.check == "even"]
    assert line.status is Status.FAILED
    assert line.cases > 50  # a known cause does not end the search


def test_a_known_defect_does_not_hide_a_second_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(number: int) -> str:
        if number % 3 == 0:
            return f"number {number} is a multiple of three" if number > 100 else ""
        return f"number {number} ends in a two" if number % 10 == 2 and number > 100 else ""

    use_numbers(monkeypatch, Numbers("even", wrong, enough=500), Numbers("odd", enough=500))
    run_numbers(tmp_path)
    result = read_result([tmp_path])
    assert [f.cause for f in result.failures] == [
        "even: number # ends in a two",
        "even: number # is a multiple of three",
    ]


def test_what_was_not_shrunk_in_time_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is killed on the second case that fails, so while it shrinks."""

    def fatal(number: int) -> str:
        if number > 1000 and any(before > 1000 for before in numbers.ran[:-1]):
            os.kill(os.getpid(), signal.SIGKILL)
        return f"number {number} is too large" if number > 1000 else ""

    numbers = Numbers("even", fatal)
    use_numbers(monkeypatch, numbers, Numbers("odd"))
    write_inputs(tmp_path, SPEC, ())
    os.waitpid(forked(lambda: run_shard(plan_for(tmp_path, LONG))), 0)
    result = read_result([tmp_path])
    (failure,) = result.failures
    assert not failure.shrunk
    assert failure.case is not None
    assert result.lost_shards == [0]
    assert result.status is Status.FAILED


def test_too_few_examples_are_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second property has 10 of its 100 examples when the shard is stopped; the first has had all of them."""
    use_numbers(monkeypatch, Numbers("even", enough=10**6), Numbers("odd", enough=10))
    run_numbers(tmp_path, 16.0, spec=msgspec.structs.replace(SPEC, min_examples=100))
    result = read_result([tmp_path])
    assert result.status is Status.MISTRUSTED
    assert {line.check: line.status for line in result.lines} == {"even": Status.PASSED, "odd": Status.MISTRUSTED}
    assert "10 of the 100 examples" in next(line.summary for line in result.lines if line.check == "odd")


def test_each_property_gets_its_examples_before_any_gets_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop_soon(_number: int) -> str:
        if all(len(searched.ran) >= 10 for searched in many):
            Recorded.stop()
        return ""

    many = [Numbers(f"property{k}", stop_soon, enough=10**6) for k in range(8)]
    use_numbers(monkeypatch, *many)
    spec = msgspec.structs.replace(SPEC, properties={p.scope: p.checks for p in many}, min_examples=10)
    run_numbers(tmp_path, 20.0, spec=spec)
    assert {line.status for line in read_result([tmp_path]).lines} == {Status.PASSED}


def test_a_space_that_is_used_up_leaves_its_time_to_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = Numbers("even", largest=3)
    use_numbers(monkeypatch, small, Numbers("odd", largest=5))
    shard = run_numbers(tmp_path)
    (ended,) = [r for r in read_records(shard / JOURNAL) if isinstance(r, SessionEnded)]
    assert ended.reason == "nothing left to search"
    assert sorted(small.ran) == [0, 2, 4, 6]
    assert read_result([tmp_path]).status is Status.PASSED


def test_what_is_in_quarantine_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = Numbers("even", largest=3)
    use_numbers(monkeypatch, small, Numbers("odd"))
    reasons = {case_digest(number_case("even", 4)): "takes the machine down", "odd": "hangs"}
    run_numbers(tmp_path, spec=msgspec.structs.replace(SPEC, quarantine=reasons))
    assert sorted(small.ran) == [0, 2, 6]
    (odd,) = [line for line in read_result([tmp_path]).lines if line.check == "odd"]
    assert (odd.status, odd.cases) == (Status.MISTRUSTED, 0)


def test_a_case_on_which_another_shard_died_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = Numbers("even", largest=3)
    use_numbers(monkeypatch, small, Numbers("odd"))
    other = shard_folder(tmp_path, 1)
    other.mkdir()
    append_durably(other / CRASHES, Crash(at=1.0, how="hung", scope="even", case=document_of(number_case("even", 2))))
    run_numbers(tmp_path)
    assert sorted(small.ran) == [0, 4, 6]


def test_a_case_that_kills_session_after_session_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Watchdog and all: each session first runs the case that the one before was in."""

    def fatal(number: int) -> str:
        if number > 1000:
            os.kill(os.getpid(), signal.SIGKILL)
        return ""

    use_numbers(monkeypatch, Numbers("even", fatal), Numbers("odd"))
    spec = msgspec.structs.replace(SPEC, properties={"even": ("even",)})
    write_inputs(tmp_path, spec, ())
    for session in range(ATTEMPTS + 1):
        assert (shard_folder(tmp_path, 0) / CRASHES).exists() == (session > ATTEMPTS)
        os.waitpid(forked(lambda: run_shard(plan_for(tmp_path, LONG))), 0)
    (crash,) = read_records(shard_folder(tmp_path, 0) / CRASHES)
    assert isinstance(crash, Crash)
    case = case_in(crash.case)
    assert case is not None
    assert "sessions ended while it ran" in crash.how
    (failure,) = read_result([tmp_path]).failures
    assert failure.check == "even"


def test_the_corpus_runs_first_and_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`replay_on` asks for a property by the case; here there is one of numbers."""
    numbers = above(1000, "is too large")
    use_numbers(monkeypatch, numbers, Numbers("odd"))
    monkeypatch.setattr("dsv32_fuzz.search.replay.property_of", lambda _case, _target: numbers)
    cases = [CorpusCase(file=f"{n}.json", case=document_of(number_case("even", n))) for n in (10, 2000)]
    shard = run_numbers(tmp_path, corpus=cases)
    assert numbers.ran[:2] == [10, 2000]
    run_numbers(tmp_path, corpus=cases)
    runs = [r for r in read_records(shard / JOURNAL) if isinstance(r, CorpusCaseRun)]
    assert [(run.file, run.verdict.status) for run in runs] == [
        ("10.json", Status.PASSED),
        ("2000.json", Status.FAILED),
    ]
    (failure,) = read_result([tmp_path]).failures
    assert failure.file == "2000.json"


def test_a_check_that_raises_fails_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(number: int) -> str:
        if number > 1000:
            raise KeyError(number)
        return ""

    use_numbers(monkeypatch, Numbers("even", broken, enough=10**6), Numbers("odd", enough=60))
    run_numbers(tmp_path, 16.0)
    result = read_result([tmp_path])
    (failure,) = result.failures
    assert failure.summary == "the check itself raised KeyError: 1002"
    assert failure.shrunk
    assert [(line.check, line.status) for line in result.lines] == [("even", Status.FAILED), ("odd", Status.PASSED)]


def test_a_property_that_cannot_be_drawn_from_fails_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Undrawable(Numbers):
        def cases(self) -> st.SearchStrategy[AnyCase]:
            def bad(_number: int) -> AnyCase:
                raise ZeroDivisionError("no width")

            return st.integers().map(bad)

    use_numbers(monkeypatch, Undrawable("even"), Numbers("odd"))
    run_numbers(tmp_path)
    result = read_result([tmp_path])
    (failure,) = result.failures
    assert failure.summary == "the process cannot draw for even: ZeroDivisionError: no width"
    assert result.status is Status.FAILED
    assert [(line.check, line.status) for line in result.lines] == [("even", Status.MISTRUSTED), ("odd", Status.PASSED)]


def test_a_shard_that_is_told_to_stop_ends_before_its_next_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = Numbers("even", enough=30)
    use_numbers(monkeypatch, numbers, Numbers("odd"))
    shard = run_numbers(tmp_path)
    assert len(numbers.ran) == 30
    (ended,) = [r for r in read_records(shard / JOURNAL) if isinstance(r, SessionEnded)]
    assert ended.reason == "interrupted"
    assert read_result([tmp_path]).lost_shards == []


def test_shards_of_different_campaigns_do_not_merge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_numbers(monkeypatch, Numbers("even"), Numbers("odd"))
    run_numbers(tmp_path / "a", 0.1)
    run_numbers(tmp_path / "b", 0.1, spec=msgspec.structs.replace(SPEC, seed=1))
    with pytest.raises(ValueError, match="of another campaign"):
        read_result([tmp_path / "a", tmp_path / "b"])
    with pytest.raises(ValueError, match="no campaign in it"):
        read_result([tmp_path])
