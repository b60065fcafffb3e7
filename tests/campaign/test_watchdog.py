"""The watchdog: a hang or a crash names its case, the shard goes on without it, and nothing outlives the campaign."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
from campaign_world import SPEC

from dsv32_fuzz.campaigns import watchdog
from dsv32_fuzz.campaigns.journal import JOURNAL, LOG, Crash, case_in
from dsv32_fuzz.campaigns.local import FuzzPlan, fuzz
from dsv32_fuzz.campaigns.result import CRASHED, read_result
from dsv32_fuzz.campaigns.shards import ShardPlan, shard_folder, write_inputs
from dsv32_fuzz.campaigns.watchdog import Watched
from dsv32_fuzz.events import CounterexampleFound, RunFinished
from dsv32_fuzz.verdict import Status

# A stand-in for a shard: it writes what a shard writes, imports little, and misbehaves as its first argument says.
SHARD = """
import faulthandler, os, sys, time
from pathlib import Path
from dsv32_fuzz.case import InputCase
from dsv32_fuzz.campaigns.causes import case_digest
from dsv32_fuzz.campaigns.journal import CRASHES, Crash, Journal, SessionBegan, SessionEnded, case_in, read_records
from dsv32_fuzz.verdict import Status, Verdict

faulthandler.enable()
how, folder, shard = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
own = folder / f"shard-{shard:04d}"
bad = InputCase(check="even", input={"number": 4})
crashed = [r for r in read_records(own / CRASHES) if isinstance(r, Crash)]
with Journal(own) as journal:
    journal.write(SessionBegan(at=0.0, started="now"))
    for number in (2, 4, 6):
        case = InputCase(check="even", input={"number": number})
        if number == 4 and any(case_in(c.case) == bad for c in crashed):
            continue
        journal.begin(case)
        if number == 4:
            if how == "hang": time.sleep(600)
            if how == "segfault": os.kill(os.getpid(), 11)
            if how == "raise": raise OSError("the disk is gone")
            if how == "exit": os._exit(7)
        journal.finish(case, [Verdict(check="even", status=Status.PASSED, summary="", measured={})])
    if how == "between" and not crashed:
        os.kill(os.getpid(), 9)
    if how == "always":
        os.kill(os.getpid(), 9)
    if how == "wait":
        import signal
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        time.sleep(600)
    journal.write(SessionEnded(at=journal.elapsed, reason="time"))
"""


def command(folder: Path, how: str) -> tuple[str, ...]:
    (folder / "shard.py").write_text(SHARD)
    return (sys.executable, str(folder / "shard.py"), how)


def watch(folder: Path, how: str, case_seconds: float = 60.0) -> list[Crash]:
    """Poll one shard to its end; the crashes that were seen."""
    folder.mkdir(exist_ok=True)
    write_inputs(folder / "run", SPEC, ())
    plan = ShardPlan(folder=folder / "run", shard=0, of=1, until=time.time() + 300)
    watched = Watched(plan, case_seconds, command(folder, how))
    watched.start()
    seen = []
    while watched.alive:
        crash = watched.poll()
        seen += [crash] if crash else []
        time.sleep(0.02)
    return seen


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("hang", "hung: nothing new for"),
        ("segfault", "died of SIGSEGV"),
        ("raise", "ended with exit code 1: OSError: the disk is gone"),
        ("exit", "ended with exit code 7: no message"),
    ],
)
def test_what_a_shard_dies_of_names_its_case(tmp_path: Path, how: str, told: str) -> None:
    (crash,) = watch(tmp_path, how, case_seconds=2.0 if how == "hang" else 60.0)
    assert crash.how.startswith(told)
    case = case_in(crash.case)
    assert case is not None
    assert case.input == {"number": 4}  # type: ignore[union-attr]
    result = read_result([tmp_path / "run"])
    (failure,) = result.failures
    assert (failure.check, failure.scope) == ("even", "even")
    assert told in failure.summary
    assert result.status is Status.FAILED
    assert (result.crashes, result.lost_shards, result.cases) == (1, [], 2)  # the rest ran in a second process


def test_a_hang_leaves_its_stack(tmp_path: Path) -> None:
    watch(tmp_path, "hang", case_seconds=2.0)
    log = (shard_folder(tmp_path / "run", 0) / LOG).read_text()
    assert "Fatal Python error: Aborted" in log
    assert "shard.py" in log


def test_a_death_between_two_cases_blames_neither(tmp_path: Path) -> None:
    (crash,) = watch(tmp_path, "between")
    assert case_in(crash.case) is None
    assert "after case 3, between two cases" in crash.how
    (failure,) = read_result([tmp_path / "run"]).failures
    assert failure.check == CRASHED


def test_a_shard_that_dies_again_and_again_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "MAX_CRASHES", 2)
    assert len(watch(tmp_path, "always")) == 2
    assert read_result([tmp_path / "run"]).lost_shards == [0]


def test_an_interrupted_campaign_stops_its_shards(tmp_path: Path) -> None:
    write_inputs(tmp_path / "run", SPEC, ())
    plan = FuzzPlan(folder=tmp_path / "run", seconds=300, workers=2)
    events = fuzz(plan, command=command(tmp_path, "wait"))
    journals = [shard_folder(tmp_path / "run", k) / JOURNAL for k in (0, 1)]
    for _ in events:
        if all(path.exists() and b'"number":3' in path.read_bytes() for path in journals):
            break
    rest = [events.throw(KeyboardInterrupt())]
    rest += events
    assert isinstance(rest[-1], RunFinished)
    assert rest[-1].interrupted
    assert read_result([tmp_path / "run"]).cases == 3


def test_a_campaign_tells_of_a_crash_as_a_counterexample(tmp_path: Path) -> None:
    write_inputs(tmp_path / "run", SPEC, ())
    plan = FuzzPlan(folder=tmp_path / "run", seconds=300)
    events = list(fuzz(plan, command=command(tmp_path, "exit")))
    (found,) = [event for event in events if isinstance(event, CounterexampleFound)]
    assert found.summary == "the process ended with exit code 7: no message"
    assert found.case.input == {"number": 4}  # type: ignore[union-attr]


def test_a_shard_dies_with_the_process_that_watches_it(tmp_path: Path) -> None:
    """kill -9 of the whole campaign leaves no orphan."""
    if sys.platform != "linux":
        pytest.skip("the kernel ends a child with its parent on Linux only")
    parent = os.fork()
    if parent == 0:
        child = os.fork()
        if child == 0:
            from dsv32_fuzz.campaigns.processes import die_with_parent

            die_with_parent()
            (tmp_path / "child").write_text(str(os.getpid()))
            (tmp_path / "ready").touch()
            time.sleep(600)
        time.sleep(600)
    while not (tmp_path / "ready").exists():
        time.sleep(0.01)
    child = int((tmp_path / "child").read_text())
    os.kill(parent, 9)
    os.waitpid(parent, 0)
    until = time.monotonic() + 30
    while time.monotonic() < until and _alive(child):
        time.sleep(0.01)
    assert not _alive(child)


def _alive(process: int) -> bool:
    """Whether a process runs; one that nobody has waited for yet is dead all the same."""
    try:
        return "Z" not in Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
