"""The watchdog of one shard's process: starts it, sees it hang or die, names the case, and starts it again without it.

The shard's heartbeat is running.json: it changes with every case. If it stays the same for longer than a case may take,
the process hangs (so does one that draws for so long): it is told to abort, which leaves its stack in log.txt, and then
killed. Either way the case is written to crashes.jsonl and is in quarantine before the process starts again.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from dsv32_fuzz.campaigns.journal import (
    CRASHES,
    JOURNAL,
    LOG,
    RUNNING,
    CaseFinished,
    Crash,
    Running,
    append_durably,
    document_of,
    read_records,
    read_running,
)
from dsv32_fuzz.campaigns.processes import THREAD_VARIABLES
from dsv32_fuzz.campaigns.shards import ShardPlan

SHARD_COMMAND = (sys.executable, "-m", "dsv32_fuzz.campaigns.shards")
START_SECONDS = 180.0
"""From the start of the process to its first case: libraries are imported and targets opened."""
MAX_CRASHES = 10
"""A shard that dies more often is not started again."""
WORTHWHILE_SECONDS = 5.0
"""With less time left, a shard that died is not started again."""
STOP_SECONDS = 20.0
"""A shard that was told to stop has so long to finish its case."""
ABORT_SECONDS = 3.0


@dataclass
class Watched:
    """A shard's process under watch; `poll` it a few times a second."""

    plan: ShardPlan
    case_seconds: float
    command: Sequence[str] = SHARD_COMMAND
    running: Running | None = None
    ended: bool = False
    gave_up: str = ""
    """Why the shard will not run to its end, empty if it will."""
    crashes: int = 0
    _process: subprocess.Popen[bytes] | None = None
    _last_sign: float = field(default_factory=time.monotonic)
    _stopping_since: float = 0.0

    def start(self) -> None:
        """Start the process, in a session of its own, so that Ctrl-C reaches the campaign alone."""
        plan = self.plan
        plan.own_folder.mkdir(parents=True, exist_ok=True)
        words = [*self.command, str(plan.folder), str(plan.shard), str(plan.of), repr(plan.until)]
        environment = {**os.environ, **dict.fromkeys(THREAD_VARIABLES, "1")}
        with (plan.own_folder / LOG).open("ab") as log:
            self._process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        self.running, self._last_sign = None, time.monotonic()

    @property
    def alive(self) -> bool:
        """Whether there is still something to poll for."""
        return self._process is not None and not self.ended

    def poll(self) -> Crash | None:
        """Look once; a crash is returned when it is seen, and is written down by then."""
        if self.ended or self._process is None:
            return None
        code = self._process.poll()
        if code is None:
            self._look()
            return self._hang() if self._silent_for() > self._patience() else self._overstayed()
        if code == 0 or self._stopping_since:
            self.ended = True
            return None
        return self._crashed(_how_it_ended(code, self._last_words()))

    def stop(self) -> None:
        """Ask the process to end after its case; `poll` kills it if it does not."""
        if self._process is not None and not self.ended and not self._stopping_since:
            self._stopping_since = time.monotonic()
            self._process.terminate()

    def kill(self) -> None:
        """End the process at once."""
        if self._process is not None and self._process.poll() is None:
            _signal_group(self._process, signal.SIGKILL)
            self._process.wait()
        self.ended = True

    def _look(self) -> None:
        found = read_running(self.plan.own_folder)
        if found is not None and found[0] != self.running:
            self.running, self._last_sign = found[0], time.monotonic()

    def _silent_for(self) -> float:
        return time.monotonic() - self._last_sign

    def _patience(self) -> float:
        return self.case_seconds if self.running is not None else max(START_SECONDS, self.case_seconds)

    def _overstayed(self) -> Crash | None:
        if self._stopping_since and time.monotonic() - self._stopping_since > STOP_SECONDS:
            self.kill()
        return None

    def _hang(self) -> Crash | None:
        process = self._process
        assert process is not None
        how = f"hung: nothing new for {self._silent_for():.0f} s"
        _signal_group(process, signal.SIGABRT)
        try:
            process.wait(ABORT_SECONDS)
        except subprocess.TimeoutExpired:
            _signal_group(process, signal.SIGKILL)
            try:
                process.wait(ABORT_SECONDS)
            except subprocess.TimeoutExpired:  # stuck inside the kernel, as after a GPU hang: nobody can end it
                self.gave_up, self.ended = f"{how}, and it cannot be killed", True
        return self._crashed(how)

    def _crashed(self, how: str) -> Crash:
        crash = self._describe(how)
        append_durably(self.plan.own_folder / CRASHES, crash)
        self.crashes += 1
        (self.plan.own_folder / RUNNING).unlink(missing_ok=True)
        if self.crashes >= MAX_CRASHES and not self.gave_up:
            self.gave_up = f"it died {self.crashes} times"
        if self.gave_up or self._stopping_since or self.plan.left < WORTHWHILE_SECONDS:
            self.ended = True
        else:
            self.start()
        return crash

    def _describe(self, how: str) -> Crash:
        found = read_running(self.plan.own_folder)
        if found is None:
            return Crash(at=0.0, how=f"{how} before its first case", scope="")
        running, case = found
        if case is None or running.number <= self._last_finished():
            how = f"{how} after case {running.number}, between two cases"
            return Crash(at=running.at, how=how, scope=running.scope)
        return Crash(at=running.at, how=how, scope=running.scope, case=document_of(case))

    def _last_finished(self) -> int:
        records = read_records(self.plan.own_folder / JOURNAL)
        return max((record.number for record in records if isinstance(record, CaseFinished)), default=0)

    def _last_words(self) -> str:
        path = self.plan.own_folder / LOG
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    try:
        os.killpg(process.pid, number)  # the shard leads its own session, so its own children go with it
    except ProcessLookupError:
        return


def _how_it_ended(code: int, last_words: str) -> str:
    if code < 0:
        return f"died of {signal.Signals(-code).name}"
    return f"ended with exit code {code}: {last_words or 'no message'}"
