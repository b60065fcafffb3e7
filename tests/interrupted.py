"""A `dsv32 fuzz` that is interrupted, as by Ctrl-C, as soon as its shards have written something down."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

from typer.testing import CliRunner, Result

from dsv32_reports.cli import app
from dsv32_reports.model import EXIT_INTERRUPTED

LONG = "4m"
"""Time that no test uses up."""


def fuzz_until(written: bytes, folder: Path, *arguments: str) -> Result:
    """Run `dsv32 fuzz` with its results in `folder` until `written` stands in the journal of some shard."""
    ended = threading.Event()

    def interrupt() -> None:
        while not any(written in journal.read_bytes() for journal in folder.glob("shard-*/journal.jsonl")):
            if ended.wait(0.05):
                return
        os.kill(os.getpid(), signal.SIGINT)

    watcher = threading.Thread(target=interrupt)
    watcher.start()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what runs behind
    try:
        done = CliRunner().invoke(app, ["fuzz", *arguments, "--max-time", LONG, "--out", str(folder)])
    finally:
        signal.signal(signal.SIGINT, before)
        ended.set()
        watcher.join()
    assert done.exit_code == EXIT_INTERRUPTED, done.output
    return done
