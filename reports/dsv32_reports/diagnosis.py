"""What `dsv32 doctor` says: what is installed here, what it can run, and what is wrong with it.

A part that is absent is no finding, since the suite runs without it; a part that is installed and cannot be used is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from dsv32_fast.doctor import Capability, Diagnosis
from dsv32_reports.model import EXIT_CODES, Outcome

WRONG_AITER = (
    "The installed package `aiter` is an async library that has nothing to do with AMD; AMD's AITER is the package "
    "`amd-aiter`, which ROCm images bring along: uninstall `aiter` and use such an image."
)
UNKNOWN_AITER = (
    "AITER {} is none of the releases that the suite was written for; what the emulation shows need not hold for it"
)
SHOWN_DIFFERENCES = 5


def doctor_text(diagnosis: Diagnosis, target: dict[str, str] | None = None) -> str:
    """The diagnosis for a terminal: a table of what is installed, then one line for each thing that can or cannot run.

    `target` is what another target's own process runs (`signoff.target_fingerprint`). Ends without a line break.
    """
    rows = [("torch", _torch(diagnosis)), ("ROCm", diagnosis.rocm), ("GPU", _gpu(diagnosis))]
    rows += [("AITER", _aiter(diagnosis)), ("vLLM", _vllm(diagnosis))]
    lines = [f"{name:<8}{text}" for name, text in rows]
    lines += ["", *(_capability(capability) for capability in diagnosis.capabilities)]
    if not diagnosis.aiter_recorded:
        lines += ["", f"unknown    {UNKNOWN_AITER.format(diagnosis.aiter.release or 'without a version')}"]
    if target is not None:
        lines += ["", *(f"{name:<31}{value}" for name, value in target.items())]
    if diagnosis.aiter.kind == "unrelated":
        lines += ["", WRONG_AITER]
    return "\n".join(lines + _difference_lines(diagnosis))


def doctor_exit_code(diagnosis: Diagnosis) -> int:
    """0 if everything that is installed can be used, 1 (a finding) if AITER, or what goes by its name, cannot."""
    installed = diagnosis.aiter.kind in ("aiter", "unrelated")
    usable = any(c.available for c in diagnosis.capabilities if c.name == "AITER kernels")
    return EXIT_CODES[Outcome.NO_GO] if installed and not usable else 0


def doctor_json(diagnosis: Diagnosis, target: dict[str, str] | None = None) -> str:
    """The diagnosis with its capabilities, the exit code and the target's versions, as one JSON document."""
    document = msgspec.to_builtins(diagnosis, enc_hook=_as_text)
    document["capabilities"] = msgspec.to_builtins(diagnosis.capabilities)
    document["aiter_recorded"] = diagnosis.aiter_recorded
    document["target"] = target
    document["exit_code"] = doctor_exit_code(diagnosis)
    return msgspec.json.encode(document).decode()


def _as_text(value: Any) -> str:
    if isinstance(value, (Path, str)):  # torch's version is a subclass of str
        return str(value)
    raise NotImplementedError(f"{type(value).__name__} has no JSON form")


def _torch(diagnosis: Diagnosis) -> str:
    build = f"HIP {diagnosis.hip}" if diagnosis.hip else "not a ROCm build"
    return f"{diagnosis.torch}, {build}, {_commit(diagnosis.torch_commit)}"


def _commit(commit: str | None) -> str:
    return f"commit {commit}" if commit else "commit not recorded"


def _gpu(diagnosis: Diagnosis) -> str:
    gpu = diagnosis.gpu
    return f"{gpu.name}, {gpu.arch}, {gpu.compute_units} compute units" if gpu else "no ROCm device visible"


def _aiter(diagnosis: Diagnosis) -> str:
    found = diagnosis.aiter
    if found.kind == "absent":
        return "not installed"
    names = {"aiter": "amd-aiter", "unrelated": "another package of that name,", "emulated": "the emulation,"}
    told = f"{names[found.kind]} {found.release or 'without a version'}" + (f" in {found.root}" if found.root else "")
    return f"{told}, {_commit(found.commit)}" if found.kind == "aiter" else told


def _vllm(diagnosis: Diagnosis) -> str:
    found = diagnosis.vllm
    if found.kind == "absent":
        return "not installed"
    place = f" in {found.root}" if found.root else ""
    return f"{found.release or 'without a version'}{place}, {_commit(found.commit)}"


def _capability(capability: Capability) -> str:
    return f"{'can run' if capability.available else 'cannot run':<12}{capability.name}: {capability.reason}"


def _difference_lines(diagnosis: Diagnosis) -> list[str]:
    found = diagnosis.aiter_differences
    if not found:
        return []
    lines = ["", f"{len(found)} differences from the signatures that the suite was written for:"]
    lines += [f"  {d.function}: {d.what}: {d.detail}" for d in found[:SHOWN_DIFFERENCES]]
    left = len(found) - SHOWN_DIFFERENCES
    return [*lines, f"  and {left} more (--json has them all)"] if left > 0 else lines
