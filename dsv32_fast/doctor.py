"""What is installed here and what it can run: data only, gathered without importing AITER or vLLM.

Packages are looked up by their metadata and files; the GPU is asked through torch. Nothing is printed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from dsv32_fast.kernels.installed import Difference, Installation, differences, find_aiter, find_vllm
from dsv32_fast.kernels.signatures import is_recorded

ADMITTED_ARCHITECTURES = ("gfx950",)
"""Where the checks know what the kernels should do; gfx942 differs in fp8 flavour and kernels."""

ROCM_VERSION_FILE = Path("/opt/rocm/.info/version")


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """The current ROCm device."""

    name: str
    arch: str
    """ISA name without feature flags, such as gfx950."""
    compute_units: int


@dataclass(frozen=True, kw_only=True)
class Capability:
    """Something that can or cannot be run here."""

    name: str
    available: bool
    reason: str
    """Why not and what to do about it; or what makes it available."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Everything that `examine` found."""

    torch: str
    torch_commit: str | None
    hip: str | None
    """HIP version that torch was built for; None for another build."""
    rocm: str
    """Release of ROCm on this machine, `none` without it."""
    gpu: Gpu | None
    aiter: Installation
    aiter_differences: tuple[Difference, ...]
    """Disagreements of the installed AITER with the signatures that the suite was written for."""
    vllm: Installation

    @property
    def aiter_recorded(self) -> bool:
        """Whether the suite was written for the installed AITER, or none is installed."""
        return self.aiter.kind != "aiter" or is_recorded(self.aiter.release or "")

    @property
    def capabilities(self) -> tuple[Capability, ...]:
        """What can be run: the emulation always, AITER and vLLM depending on what is installed."""
        problem = self._aiter_problem
        return (
            Capability(name="emulated kernels", available=True, reason="need only torch"),
            Capability(name="AITER kernels", available=not problem, reason=problem or f"AITER {self.aiter.release}"),
            Capability(
                name="installed vLLM",
                available=self.vllm.kind == "vllm",
                reason="not installed; install vllm" if self.vllm.kind == "absent" else f"version {self.vllm.release}",
            ),
        )

    @property
    def _aiter_problem(self) -> str:
        """Why AITER's kernels cannot run here, empty if they can."""
        if self.aiter.kind == "absent":
            return "AITER is not installed; use a ROCm image that has it"
        if self.aiter.kind == "unrelated":
            return "the package aiter is an unrelated async library; uninstall it and install amd-aiter"
        if self.aiter.kind == "emulated":
            return "the emulation is mounted as aiter"
        if self.hip is None:
            return "torch is not a ROCm build; install torch for ROCm"
        if self.gpu is None:
            return "no ROCm device is visible; check the driver and HIP_VISIBLE_DEVICES"
        if self.gpu.arch not in ADMITTED_ARCHITECTURES:
            return f"the device is {self.gpu.arch}; the checks are written for {', '.join(ADMITTED_ARCHITECTURES)}"
        missing = [d.function for d in self.aiter_differences if d.what == "function missing"]
        return f"AITER {self.aiter.release} lacks {', '.join(missing)}; install another release" if missing else ""


def examine() -> Diagnosis:
    """Look at this machine."""
    found = find_aiter()
    return Diagnosis(
        torch=torch.__version__,
        torch_commit=torch.version.git_version,
        hip=torch.version.hip,
        rocm=rocm_release(),
        gpu=_gpu(),
        aiter=found,
        aiter_differences=differences(found.root) if found.kind == "aiter" and found.root is not None else (),
        vllm=find_vllm(),
    )


def rocm_release() -> str:
    """Release of ROCm on this machine, from the file that its packages install; `none` without it."""
    try:
        return ROCM_VERSION_FILE.read_text(encoding="utf-8").strip()
    except OSError:
        return "none"


def _gpu() -> Gpu | None:
    if torch.version.hip is None or not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return Gpu(
        name=properties.name,
        arch=properties.gcnArchName.partition(":")[0],
        compute_units=properties.multi_processor_count,
    )
