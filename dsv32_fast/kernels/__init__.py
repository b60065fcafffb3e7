"""Kernels behind AITER's names and signatures: `emulated` on any machine, `aiter` on ROCm."""

from __future__ import annotations

from typing import Any, Protocol

import torch


class MetadataKernels(Protocol):
    """The two planner entry points of AITER; the emulation's module and the real adapter both have them."""

    def get_mla_metadata_info_v1(self, *args: Any, **kwargs: Any) -> tuple[tuple[Any, torch.dtype], ...]:
        """Shapes and dtypes of the six plan buffers."""

    def get_mla_metadata_v1(self, *args: Any, **kwargs: Any) -> None:
        """Fill the six plan buffers in place."""
