"""A case: a replayable JSON document that holds everything a check needs, and nothing that depends on this machine."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any, Literal

import msgspec

from dsv32_fast.batch import StepBatch
from dsv32_fast.options import Options

MAX_CASE_BYTES = 64 * 1024 * 1024
MAX_ROWS = 1 << 20
MAX_INDICES = 1 << 28


class Dims(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The constants of the world that a case lives in; the defaults are those of the PR: TP 4 on MI355X.

    Raises:
        ValueError: a size that no builder can be made for.
    """

    topk: int = 2048
    num_heads: int = 32
    max_num_batched_tokens: int = 8192
    compute_units: int = 256
    kv_dtype: Literal["bf16", "fp8"] = "bf16"

    def __post_init__(self) -> None:
        """Refuse sizes that would only fail later, deep inside a builder."""
        for name, low, high in (
            ("topk", 1, 1 << 16),
            ("num_heads", 1, 128),
            ("max_num_batched_tokens", 1, MAX_ROWS),
            ("compute_units", 1, 1024),
        ):
            if not low <= getattr(self, name) <= high:
                raise ValueError(f"{name} is {getattr(self, name)}, must be in {low}..{high}")
        if self.max_num_batched_tokens * self.topk > MAX_INDICES:
            raise ValueError(f"max_num_batched_tokens * topk is above {MAX_INDICES}, 1 GiB of indices")


class Case(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="format", tag="dsv32-case/1"
):
    """A sequence of step batches for one target, and the check that it was saved for."""

    check: str
    """Name of the check that failed on it."""
    scope: str
    """Traffic class it was found in: decode, mtp_decode, chunked_prefill or mixed."""
    target: str = "in-tree"
    options: Options | None = None
    """Options of the in-tree path; other targets are what their code does."""
    dims: Dims = Dims()
    steps: tuple[StepBatch, ...]
    note: str = ""

    def __post_init__(self) -> None:
        """Every step must fit the builder that the case describes."""
        for i, step in enumerate(self.steps):
            if step.num_tokens > self.dims.max_num_batched_tokens:
                raise ValueError(f"step {i} has {step.num_tokens} rows, above max_num_batched_tokens")


class InputCase(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="format", tag="dsv32-input/1"
):
    """An input of a check that draws its own, as plain data; the check knows its form."""

    check: str
    """Name of the check that failed on it."""
    target: str = "in-tree"
    options: Options | None = None
    """Options of the in-tree path; other targets are what their code does."""
    input: dict[str, Any]
    note: str = ""

    @property
    def scope(self) -> str:
        """The check is its own scope."""
        return self.check


AnyCase = Case | InputCase


def decode_case(document: bytes) -> AnyCase:
    """A case from its JSON document, whose `format` says what it is.

    Raises:
        ValueError: not a case.
    """
    return msgspec.json.decode(document, type=AnyCase)


def load_case(path: Path) -> AnyCase:
    """Read a case.

    Raises:
        ValueError: not a case; the message is one line that names the file, the place and the remedy.
    """
    try:
        if path.exists() and not path.is_file():
            raise ValueError("no regular file")
        if path.stat().st_size > MAX_CASE_BYTES:
            raise ValueError(f"larger than {MAX_CASE_BYTES} bytes")
        return decode_case(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); give a case file that a run saved") from error
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path}: not a saved case ({reason}); give a case file that a run saved") from error


def save_case(case: AnyCase, path: Path) -> None:
    """Write a case so that a crash leaves the old file or the new one, never half of one."""
    write_atomically(path, msgspec.json.format(msgspec.json.encode(case), indent=2) + b"\n")


def write_atomically(path: Path, content: bytes) -> None:
    """Write a temporary file beside `path`, then rename it into place."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
