"""What is installed here, and what it can run."""

from __future__ import annotations

from dsv32_fast.doctor import examine
from dsv32_fuzz.targets.registry import IN_TREE, open_target
from dsv32_reports.commands.common import Json, TargetName, TargetPython, VllmPath, command
from dsv32_reports.diagnosis import doctor_exit_code, doctor_json, doctor_text
from dsv32_reports.signoff import target_fingerprint


@command
def doctor(
    target: TargetName = IN_TREE, vllm_path: VllmPath = None, target_python: TargetPython = None, json: Json = False
) -> int:
    """What is installed here (torch, ROCm, AITER, vLLM), its releases and commits, and what it can run.

    AITER and vLLM are read without importing them; with --target, the target is opened and tells what its own process
    has. Exit 1 if AITER, or a package that goes by its name, cannot be used.
    """
    opened = open_target(target, path=vllm_path, python=target_python)
    diagnosis, versions = examine(), target_fingerprint(opened) if target != IN_TREE else None
    print(doctor_json(diagnosis, versions) if json else doctor_text(diagnosis, versions))
    return doctor_exit_code(diagnosis)
