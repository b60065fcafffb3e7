"""What the evidence was made with: releases and commits of software, the processor, switches in the environment."""

from __future__ import annotations

import functools
import os
import platform
from importlib import metadata
from pathlib import Path

import torch

import dsv32_fast
from dsv32_fast.doctor import rocm_release
from dsv32_fast.kernels.installed import commit_of, find_aiter, find_vllm
from dsv32_fast.kernels.signatures import is_recorded
from dsv32_fuzz.latency.device import device_state

_PACKAGES = ("dsv32-validation", "torch", "numpy", "numba", "scipy", "hypothesis", "vllm", "amd-aiter")
NOT_RECORDED = "not recorded"
DEVICE_STATE = "gpu state: "
"""Prefix of what changes from moment to moment, so that a run may go on with another value."""
_SWITCHES = ("AITER_ENABLE_EXPERIMENTAL", "AITER_MLA_META_USE_PARALLEL", "AITER_MLA_DECODE_PERSISTENT_MAX_BATCH")


def fingerprint() -> dict[str, str]:
    """Name to value; a package that is not installed, and a commit that nothing recorded, says so.

    `amd-aiter known` says whether the suite was written for that release; `yes` where none is installed.
    """
    found = {name: _version(name) for name in _PACKAGES}
    found["dsv32-validation commit"] = _own_commit()
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


def device_fingerprint() -> dict[str, str]:
    """Clock, power, temperature and load of the GPU at this moment, empty where there is none."""
    return {f"{DEVICE_STATE}{name}": value for name, value in device_state().items() if name != "device"}


@functools.cache
def _own_commit() -> str:
    return commit_of("dsv32-validation", Path(dsv32_fast.__file__).parent) or NOT_RECORDED


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"
