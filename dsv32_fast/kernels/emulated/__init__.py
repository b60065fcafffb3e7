"""CPU emulation of what AITER's kernels observably do."""

from __future__ import annotations

from dsv32_fast.kernels.emulated.launch import MlaVersion, UndefinedInAiter, UnsupportedPlanner
from dsv32_fast.kernels.emulated.metadata import get_mla_metadata_v1
from dsv32_fast.kernels.emulated.metadata_info import get_mla_metadata_info_v1

__all__ = [
    "MlaVersion",
    "UndefinedInAiter",
    "UnsupportedPlanner",
    "get_mla_metadata_info_v1",
    "get_mla_metadata_v1",
]
