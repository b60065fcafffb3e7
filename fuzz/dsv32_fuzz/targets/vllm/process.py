"""The worker process as the suite sees it: started with another interpreter, asked one thing at a time.

The suite never imports vLLM; what the worker says arrives as data. What the target prints goes to a log file, whose
end is told when the worker is lost.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import weakref
from pathlib import Path
from typing import Any

import dsv32_fast
import dsv32_fuzz
import dsv32_ref
from dsv32_fuzz.targets.vllm.wire import Message, receive, send

ENVIRONMENT = {
    "TRITON_INTERPRET": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "HIP_VISIBLE_DEVICES": "",
    "VLLM_TARGET_DEVICE": "empty",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CONFIGURE_LOGGING": "0",
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
}
"""Of the worker. Device lists that are set but empty make Triton's driver check lenient; no GPU is used."""
LOG_TAIL_LINES = 3


class TargetError(RuntimeError):
    """The target raised; the message has its error's type and text."""


class MissingModuleError(TargetError):
    """The target needs a module that its interpreter does not have."""

    def __init__(self, module: str, text: str) -> None:
        super().__init__(text)
        self.module = module


class LostWorkerError(TargetError):
    """The worker ended or stopped making sense."""


class Worker:
    """A worker process; `ask` sends a message and returns the answer. Ended when it is closed or collected."""

    def __init__(self, python: str) -> None:
        """Start it.

        Raises:
            ValueError: `python` cannot be started.
        """
        self.python = python
        self._forgotten: list[int] = []
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # lives as long as the worker
        self._links = tempfile.TemporaryDirectory(prefix="dsv32-worker-")
        try:
            self._process = subprocess.Popen(
                [python, "-m", "dsv32_fuzz.targets.vllm.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env={**os.environ, **ENVIRONMENT, "PYTHONPATH": expose(Path(self._links.name))},
                start_new_session=True,  # Ctrl-C is for the suite, which then ends the worker
            )
        except OSError as error:
            raise ValueError(f"{python} cannot be started ({error.strerror}); give an interpreter of Python") from error
        self._end = weakref.finalize(self, _end, self._process)

    def ask(self, **message: Any) -> Message:
        """Send one message and wait for its answer.

        Raises:
            TargetError: the target raised.
            MissingModuleError: it needs a module that its interpreter does not have.
            LostWorkerError: the worker has ended; the end of its log is in the message.
        """
        message["forget"], self._forgotten = self._forgotten, []
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            send(self._process.stdin, message)
            answer = receive(self._process.stdout)
        except (OSError, ValueError) as error:
            raise LostWorkerError(f"the worker is lost ({error}): {self.log_tail()}") from error
        if answer is None:
            code = self._process.wait()
            raise LostWorkerError(f"the worker ended with code {code}: {self.log_tail()}")
        if "error" in answer:
            text = f"{answer['error']}: {' '.join(str(answer['text']).split())}"
            raise MissingModuleError(answer["missing"], text) if answer.get("missing") else TargetError(text)
        return answer

    def forget(self, session: int) -> None:
        """Close a session, together with the next message."""
        self._forgotten.append(session)

    def close(self) -> None:
        """End the worker."""
        self._end()

    def log_tail(self) -> str:
        """The last lines that the target printed, in one line."""
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return " | ".join(line.strip() for line in lines[-LOG_TAIL_LINES:]) or "it printed nothing"


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()  # it holds nothing that wants to be written
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()


def expose(folder: Path) -> str:
    """The worker's PYTHONPATH: links to the suite's own packages in `folder`, and what the environment says.

    Links, because the folder that they are installed in may hold another torch than the target's interpreter has.
    """
    for module in (dsv32_ref, dsv32_fast, dsv32_fuzz):
        package = Path(module.__file__ or "").resolve().parent
        (folder / package.name).symlink_to(package, target_is_directory=True)
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


def default_python() -> str:
    """The interpreter of the suite itself."""
    return sys.executable
