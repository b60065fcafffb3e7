"""The worker process: `python -m dsv32_fuzz.targets.vllm.worker`, run by the interpreter that has vLLM.

It answers one message at a time on standard input and output until the input ends. An exception of the target is an
answer, not the end of the worker.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import IO, Any

from dsv32_fuzz.targets.vllm.wire import Message, receive, send


@dataclass
class Worker:
    """The state between messages: the loaded vLLM and its open sessions."""

    loaded: Any = None
    sessions: dict[int, Any] = field(default_factory=dict)

    def answer(self, message: Message) -> Message:
        """The answer to one message.

        Raises:
            ValueError: an unknown operation.
        """
        for number in message.get("forget", ()):
            session = self.sessions.pop(number, None)
            if session is not None:
                session.close()
        operations: dict[str, Callable[[Message], Message]] = {
            "load": self._load,
            "open": self._open,
            "build": self._build,
            "probe": self._probe,
        }
        if message["op"] not in operations:
            raise ValueError(f"the worker knows no operation {message['op']!r}; both sides must be of one version")
        return operations[message["op"]](message)

    def _load(self, message: Message) -> Message:
        import torch

        from dsv32_fuzz.targets.vllm.identity import versions
        from dsv32_fuzz.targets.vllm.imports import load

        torch.set_num_threads(1)
        started = time.monotonic()
        self.loaded = load(message["path"], message["aiter_release"])
        seconds = time.monotonic() - started
        backend, installed = str(self.loaded.backend.__file__), self.loaded.installed_aiter
        told = versions(self.loaded.version, backend, message["aiter_release"], installed)
        return {"versions": told, "seconds": seconds}

    def _open(self, message: Message) -> Message:
        import msgspec

        from dsv32_fuzz.case import Dims
        from dsv32_fuzz.targets.vllm.engine import Setting
        from dsv32_fuzz.targets.vllm.sessions import BuilderSession, TwinSession

        kind = TwinSession if message["rebuild"] else BuilderSession
        dims = msgspec.convert(message["dims"], Dims)
        session = kind(self.loaded, dims, message["poison"], Setting(**message["setting"]))
        told = session.open()
        self.sessions[message["session"]] = session
        return told

    def _build(self, message: Message) -> Message:
        import msgspec

        from dsv32_fast.batch import StepBatch

        step = msgspec.convert(message["step"], StepBatch)
        answer: Message = self.sessions[message["session"]].build(step)
        return answer

    def _probe(self, message: Message) -> Message:
        from dsv32_fuzz.targets.vllm import probes

        answer: Message = probes.run(self.loaded, message)
        return answer


def serve(source: IO[bytes], sink: IO[bytes]) -> None:
    """Answer until the source ends."""
    worker = Worker()
    while (message := receive(source)) is not None:
        try:
            answer = worker.answer(message)
        except (Exception, SystemExit) as error:
            missing = getattr(error, "name", None) if isinstance(error, ModuleNotFoundError) else None
            answer = {"error": type(error).__name__, "text": str(error), "missing": missing}
        send(sink, answer)


def main() -> None:
    """Keep the message pipes for messages, then serve."""
    kept = os.dup(1)
    os.dup2(2, 1)  # what the target prints must not reach the messages
    with os.fdopen(os.dup(0), "rb") as source, os.fdopen(kept, "wb") as sink:
        serve(source, sink)


if __name__ == "__main__":
    main()
