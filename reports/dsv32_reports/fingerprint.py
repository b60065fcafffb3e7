"""What the evidence was made with: releases and commits of software, the processor, switches in the environment."""

from __future__ import annotations

import os
import platform
from importlib import metadata

import torch

from dsv32_fast.doctor import rocm_release
from dsv32_fast.kernels.installed import find_aiter, find_vllm
from dsv32_fast.kernels.signatures import is_recorded

_PACKAGES = ("dsv32-validation", "torch", "numpy", "numba", "scipy", "hypothesis", "vllm", "amd-aiter")
NOT_RECORDED = "not recorded"
_SWITCHES = ("AITER_ENABLE_EXPERIMENTAL", "AITER_MLA_META_USE_PARALLEL", "AITER_MLA_DECODE_PERSISTENT_MAX_BATCH")


def fingerprint() -> dict[str, str]:
    """Name to value; a package that is not installed, and a commit that nothing recorded, says so.

    `amd-aiter known` says whether the suite was written for that release; `yes` where none is installed.
    """
    found = {name: _version(name) for name in _PACKAGES}
    amd = find_aiter()
    unknown = amd.kind == "aiter" and not is_recorded(amd.release or "")
    found |= {"amd-aiter commit": amd.commit or NOT_RECORDED, "amd-aiter known": "no" if unknown else "yes"}
    found |= {
        "vllm commit": find_vllm().commit or NOT_RECORDED,
        "torch commit": torch.version.git_version or NOT_RECORDED,
    }
    found["python"] = platform.python_version()
    found["machine"] = f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs"
    found |= {"hip": torch.version.hip or "none", "rocm": rocm_release()}
    found["gpu"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    found.update({switch: os.environ.get(switch, "unset") for switch in _SWITCHES})
    return found


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"
