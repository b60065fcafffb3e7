"""What is installed here, and what it can run."""

from __future__ import annotations

from dsv32_fast.doctor import examine
from dsv32_reports.commands.common import Json, command
from dsv32_reports.diagnosis import doctor_exit_code, doctor_json, doctor_text


@command
def doctor(json: Json = False) -> int:
    """What is installed here (torch, ROCm, AITER, vLLM), and what it can run.

    AITER is read without importing it. Exit 1 if AITER, or a package that goes by its name, cannot be used.
    """
    diagnosis = examine()
    print(doctor_json(diagnosis) if json else doctor_text(diagnosis))
    return doctor_exit_code(diagnosis)
