"""What the evidence was made with: versions of the software, the processor, and the switches in the environment."""

from __future__ import annotations

import os
import platform
from importlib import metadata

import torch

_PACKAGES = ("dsv32-validation", "torch", "numpy", "numba", "scipy", "hypothesis", "vllm", "amd-aiter")
_SWITCHES = ("AITER_ENABLE_EXPERIMENTAL", "AITER_MLA_META_USE_PARALLEL", "AITER_MLA_DECODE_PERSISTENT_MAX_BATCH")


def fingerprint() -> dict[str, str]:
    """Name to value; a package that is not installed says so."""
    found = {name: _version(name) for name in _PACKAGES}
    found["python"] = platform.python_version()
    found["machine"] = f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs"
    found["rocm"] = torch.version.hip or "none"
    found["gpu"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    found.update({switch: os.environ.get(switch, "unset") for switch in _SWITCHES})
    return found


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"
