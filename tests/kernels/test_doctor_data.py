"""The diagnosis of an installation: what can run follows from what is there."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch
from kernel_worlds import RULE, admits

from dsv32_fast.doctor import Diagnosis, Gpu, examine
from dsv32_fast.kernels.installed import Difference, Installation
from dsv32_fast.kernels.mounted import mounted

READY = Diagnosis(
    torch="2.9+rocm7",
    torch_commit="0" * 40,
    hip="7.0",
    rocm="7.0.2",
    gpu=Gpu(name="AMD Instinct MI355X", arch="gfx950", compute_units=256),
    aiter=Installation(kind="aiter", release="0.1.20"),
    aiter_differences=(Difference(function="mla_decode_fwd", what="parameter unknown", detail="new"),),
    vllm=Installation(kind="vllm", release="0.33.0"),
)


def capability(diagnosis, name):
    return next(c for c in diagnosis.capabilities if c.name == name)


def test_everything_installed():
    assert all(c.available for c in READY.capabilities)
    assert capability(READY, "AITER kernels").reason == "AITER 0.1.20"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"aiter": Installation(kind="absent")}, "not installed"),
        ({"aiter": Installation(kind="unrelated")}, "unrelated async library"),
        ({"aiter": Installation(kind="emulated")}, "mounted"),
        ({"hip": None}, "not a ROCm build"),
        ({"gpu": None}, "no ROCm device"),
        ({"gpu": Gpu(name="MI300X", arch="gfx942", compute_units=304)}, "gfx942"),
        (
            {"aiter_differences": (Difference(function="fused_moe", what="function missing", detail=""),)},
            "lacks fused_moe",
        ),
    ],
)
def test_aiter_is_refused_with_a_reason(change, reason):
    found = capability(replace(READY, **change), "AITER kernels")
    assert not found.available
    assert reason in found.reason
    assert capability(replace(READY, **change), "emulated kernels").available


def test_vllm():
    assert capability(READY, "installed vLLM").reason == "version 0.33.0"
    assert not capability(replace(READY, vllm=Installation(kind="absent")), "installed vLLM").available


@admits(emulation=RULE)
def test_examining_this_machine_imports_neither_aiter_nor_vllm():
    found = examine()
    assert found.torch == torch.__version__
    assert found.hip == torch.version.hip
    assert (found.gpu is None) or found.hip
    assert "aiter" not in sys.modules
    assert "vllm" not in sys.modules


def test_mounted_emulation_is_recognised():
    with mounted("0.1.19"):
        found = examine()
    assert (found.aiter.kind, found.aiter.release) == ("emulated", "0.1.19")
    assert not capability(found, "AITER kernels").available
