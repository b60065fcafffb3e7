"""A fuzz campaign on Ray: many short shards as tasks, on as many workers as the cluster has, merged as they come.

Every task is a whole shard with a seed stream of its own, run under its watchdog on the worker, that hands back the
files of its folder. So nothing is shared between workers, a task that is lost with its worker costs its own few minutes
and is run again elsewhere, and what came back before is in the campaign's folder, where `dsv32 merge` finds it too.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray

from dsv32_fuzz.campaigns.journal import CRASHES, JOURNAL, LOG, CounterexampleShrunk, case_in, read_records
from dsv32_fuzz.campaigns.local import POLL_SECONDS, FuzzPlan
from dsv32_fuzz.campaigns.shards import CORPUS, SPEC, CampaignSpec, ShardPlan, read_spec, shard_folder
from dsv32_fuzz.campaigns.watchdog import SHARD_COMMAND, Watched
from dsv32_fuzz.case import write_atomically
from dsv32_fuzz.events import CounterexampleFound, Event, PhaseStarted, Progress, RunFinished

TASKS_PER_WORKER = 4
"""A worker runs so many shards one after the other: few enough to be worth their start, many enough to lose little."""
SHORTEST_TASK = 30.0
RETRIES = 3
"""How often a task is run again whose worker was lost."""
MAX_LOST = 3
"""Tasks that Ray gave up on, after which no new ones are started."""

Files = dict[str, bytes]


def run_shard_on_worker(
    inputs: Files, shard: int, of: int, seconds: float, latest: float, case_seconds: float, command: Sequence[str]
) -> Files:
    """One shard in a scratch folder of the worker, for `seconds` and not past `latest`; the files of its folder.

    A task that is run again after its worker was lost has less time, so the campaign ends when it should. A lost worker
    takes its shard with it: the shard's own process dies with the one that runs this.
    """
    folder = Path(tempfile.mkdtemp(prefix="dsv32-shard-"))
    try:
        for name, content in inputs.items():
            (folder / name).write_bytes(content)
        plan = ShardPlan(folder=folder, shard=shard, of=of, until=min(time.time() + seconds, latest))
        watched = Watched(plan, case_seconds, command)
        watched.start()
        try:
            while watched.alive:
                watched.poll()
                time.sleep(POLL_SECONDS)
        finally:
            watched.kill()
        return {
            name: path.read_bytes() for name in (JOURNAL, CRASHES, LOG) if (path := plan.own_folder / name).exists()
        }
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@dataclass
class _Cluster:
    """The tasks that run, and the numbers of those that are yet to be started."""

    plan: FuzzPlan
    spec: CampaignSpec
    until: float
    command: Sequence[str]
    slots: int
    """Tasks at a time; the corpus and the promised examples are divided among as many shards."""
    running: dict[Any, int] = field(default_factory=dict)
    lost: list[int] = field(default_factory=list)
    next_shard: int = 0

    def __post_init__(self) -> None:
        """Shards that came back before are not run again."""
        self.inputs = {name: (self.plan.folder / name).read_bytes() for name in (SPEC, CORPUS)}
        gpus = float(_resources().get("GPU", 0.0)) if self.spec.evidence == "hardware" else 0.0
        self.task = ray.remote(num_cpus=1, num_gpus=1 if gpus else 0, max_retries=RETRIES)(run_shard_on_worker)
        done = [int(path.name.partition("-")[2]) for path in self.plan.folder.glob("shard-[0-9]*")]
        self.next_shard = max(done, default=-1) + 1

    @property
    def left(self) -> float:
        return self.until - time.time()

    def fill(self) -> None:
        """Start tasks while there is a free slot, and enough time for one to be worth its start."""
        length = max(SHORTEST_TASK, self.plan.seconds / TASKS_PER_WORKER)
        while len(self.running) < self.slots and len(self.lost) < MAX_LOST and self._worthwhile():
            seconds = self.left if self.left < 1.5 * length else length
            spec = self.spec
            words = (self.inputs, self.next_shard, self.slots, seconds, self.until, spec.case_seconds, [*self.command])
            reference = self.task.remote(*words)
            self.running[reference] = self.next_shard
            self.next_shard += 1

    def _worthwhile(self) -> bool:
        return self.left >= SHORTEST_TASK / 2 or (self.next_shard == 0 and self.left > 0)

    def collect(self) -> Iterator[int]:
        """Numbers of the shards that came back since the last look."""
        ready, _ = ray.wait(list(self.running), num_returns=len(self.running), timeout=POLL_SECONDS)
        for reference in ready:
            shard = self.running.pop(reference)
            try:
                _write(shard_folder(self.plan.folder, shard), ray.get(reference))
                yield shard
            except ray.exceptions.RayError:
                shard_folder(self.plan.folder, shard).mkdir(exist_ok=True)  # counts as a shard that was lost
                self.lost.append(shard)

    def cancel(self) -> None:
        """Give up what still runs."""
        for reference in self.running:
            ray.cancel(reference, force=True)


def _resources() -> dict[str, float]:
    found: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    return found


def _write(folder: Path, files: Mapping[str, bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        write_atomically(folder / name, content)


def connect(address: str) -> bool:
    """Join a cluster, or start one on this machine for the address `local`; whether it was started here.

    Raises:
        ValueError: there is no cluster at the address.
    """
    if ray.is_initialized():
        return False
    variables = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    try:
        ray.init(
            address=None if address == "local" else address,
            include_dashboard=False if address == "local" else None,
            log_to_driver=False,
            runtime_env={"env_vars": variables} if address == "local" else None,
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"no Ray cluster at {address!r} ({reason}); give its address, auto or local") from error
    return True


def fuzz_on_ray(
    plan: FuzzPlan, address: str, *, command: Sequence[str] = SHARD_COMMAND
) -> Generator[Event, None, None]:
    """Run the campaign that `prepare` laid out on a cluster; the last event is `RunFinished`.

    Ctrl-C, raised inside the stream, gives up the tasks that run; what came back is kept.

    Raises:
        ValueError: there is no cluster at the address, or the plan is one machine's part of a campaign.
    """
    if plan.parts > 1:
        raise ValueError("--shard divides a campaign over machines by hand; with --ray the cluster does it")
    own, started, interrupted = connect(address), time.monotonic(), False
    spec = read_spec(plan.folder)
    yield PhaseStarted(phase="fuzz", title=f"search {len(spec.properties)} properties on Ray", seconds=plan.seconds)
    slots = plan.workers if plan.workers > 1 else max(1, int(_resources().get("CPU", 1.0)))
    cluster = _Cluster(plan, spec, time.time() + plan.seconds, command, slots)
    try:
        yield from _drain(cluster)
    except KeyboardInterrupt:
        interrupted = True
        cluster.cancel()
    finally:
        if own:
            ray.shutdown()
    yield RunFinished(seconds=time.monotonic() - started, interrupted=interrupted)


def _drain(cluster: _Cluster) -> Iterator[Event]:
    cluster.fill()
    cases = 0
    while cluster.running:
        for shard in cluster.collect():
            folder = shard_folder(cluster.plan.folder, shard)
            cases += sum(1 for _ in read_records(folder / JOURNAL))
            yield from _counterexamples(folder)
        cluster.fill()
        done = 1.0 - max(0.0, cluster.left) / cluster.plan.seconds
        text = f"{len(cluster.running)} tasks run, {cases} records came back, {len(cluster.lost)} tasks lost"
        yield Progress(phase="fuzz", done=min(1.0, done), text=text)


def _counterexamples(folder: Path) -> Iterator[CounterexampleFound]:
    for record in read_records(folder / JOURNAL):
        case = case_in(record.case) if isinstance(record, CounterexampleShrunk) else None
        if isinstance(record, CounterexampleShrunk) and case is not None:
            yield CounterexampleFound(case=case, summary=record.summary, verdicts=record.verdicts)
