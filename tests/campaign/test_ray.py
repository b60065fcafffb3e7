"""A campaign on Ray: two workers, one of them killed in the middle of its shard."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("ray")

import ray
from campaign_world import SPEC

from dsv32_fuzz.campaigns import ray_tasks
from dsv32_fuzz.campaigns.local import FuzzPlan
from dsv32_fuzz.campaigns.ray_tasks import fuzz_on_ray
from dsv32_fuzz.campaigns.result import read_result
from dsv32_fuzz.campaigns.shards import write_inputs
from dsv32_fuzz.events import Event, RunFinished

# A shard that runs ten cases a second until its time is up; it tells in a folder which process watches it.
SHARD = """
import os, sys, time
from pathlib import Path
from dsv32_fuzz.case import InputCase
from dsv32_fuzz.campaigns.journal import Journal, RoundsDone, SessionBegan, SessionEnded
from dsv32_fuzz.verdict import Status, Verdict

told, folder, shard, until = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[5])
number = 0
with Journal(folder / f"shard-{shard:04d}") as journal:
    journal.write(SessionBegan(at=0.0, started="now"))
    while time.time() < until:
        for scope in ("even", "odd"):
            case = InputCase(check=scope, input={"number": number, "shard": shard})
            journal.begin(case)
            journal.finish(case, [Verdict(check=scope, status=Status.PASSED, summary="", measured={})])
        number += 1
        (told / f"{shard}-{os.getppid()}").touch()
        time.sleep(0.2)
    journal.write(SessionEnded(at=journal.elapsed, reason="time"))
"""


@pytest.mark.nightly
def test_a_lost_worker_costs_its_task_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_tasks, "SHORTEST_TASK", 5.0)
    (tmp_path / "shard.py").write_text(SHARD)
    told = tmp_path / "told"
    told.mkdir()
    write_inputs(tmp_path / "run", SPEC, ())
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    try:
        events = fuzz_on_ray(
            FuzzPlan(folder=tmp_path / "run", seconds=40, workers=2),
            "local",
            command=(sys.executable, str(tmp_path / "shard.py"), str(told)),
        )
        started, killed, last = time.monotonic(), 0, None
        for event in events:
            last = event
            workers = {int(path.name.partition("-")[2]) for path in told.iterdir()}
            if not killed and workers:
                killed = min(workers)
                os.kill(killed, signal.SIGKILL)
    finally:
        ray.shutdown()
    assert killed
    assert isinstance(last, RunFinished)
    assert not last.interrupted
    assert time.monotonic() - started < 120
    result = read_result([tmp_path / "run"])
    assert result.lost_shards == []  # the task was run again, by another worker
    tries = [path.name.partition("-")[0] for path in told.iterdir()]
    assert len(tries) > len(set(tries))
    assert result.cases > 100


def test_a_part_of_a_campaign_is_refused(tmp_path: Path) -> None:
    plan = FuzzPlan(folder=tmp_path, seconds=1, part=0, parts=2)
    events: list[Event] = []
    with pytest.raises(ValueError, match="with --ray the cluster does it"):
        events.extend(fuzz_on_ray(plan, "local"))
