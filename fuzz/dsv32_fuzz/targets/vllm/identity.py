"""Worker side: exactly what is under test, and whether it is something that the suite has driven before.

A release that nobody drove before is driven all the same and earns its failures; but where it passes, nothing says that
the stand-ins of this target (`engine`, `imports`) still are what it needs, so no gate may rest on it alone.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import torch

from dsv32_fast.doctor import rocm_release
from dsv32_fast.kernels.installed import Installation, commit_of
from dsv32_fast.kernels.signatures import COMMIT, is_recorded

DRIVEN = (*(f"0.{minor}.0" for minor in range(21, 34)), "0.22.1", "0.25.1", "0.27.1")
"""vLLM releases whose every check and probe was looked at (docs/targets.md). Nothing else depends on this list."""


def is_known(release: str) -> bool:
    """Whether a vLLM release is one of those; a local part ("+rocm700") does not count, a development version does."""
    return release.partition("+")[0] in DRIVEN


def versions(
    vllm_release: str, backend_file: str, aiter_release: str | None, installed_aiter: Installation
) -> dict[str, str]:
    """Name to value, for the record: releases, commits ("not recorded" where nothing says it), known (yes or no).

    Args:
        vllm_release: as its distribution says.
        backend_file: the module under test; its digest stands for what a release number leaves open.
        aiter_release: whose signatures the emulation shows; None for those of the commit.
        installed_aiter: what the interpreter has, which the emulation hides; if it is AITER, `aiter known` is about it.
    """
    installed = installed_aiter.kind == "aiter"
    root = Path(sys.modules["vllm"].__file__ or "").parent
    return {
        "vllm": vllm_release,
        "vllm commit": commit_of("vllm", root) or "not recorded",
        "vllm known": _yes(is_known(vllm_release)),
        "vllm backend sha256": hashlib.sha256(Path(backend_file).read_bytes()).hexdigest()[:16],
        "aiter": aiter_release or "emulated",
        "aiter commit": COMMIT,
        "aiter installed": (installed_aiter.release or "without a version") if installed else "none",
        "aiter installed commit": (installed and installed_aiter.commit) or "not recorded",
        "aiter known": _yes(is_recorded(installed_aiter.release or "" if installed else aiter_release)),
        "torch": str(torch.__version__),
        "torch commit": str(torch.version.git_version),
        "hip": str(torch.version.hip),
        "rocm": rocm_release(),
        "python": sys.version.split()[0],
    }


def _yes(known: bool) -> str:
    return "yes" if known else "no"
