"""AITER's functions as the kernels of this session have them: `from under_test import mla_decode_fwd`.

Arguments are tensors on the host; `--kernels` chooses what runs (`dsv32_fast.kernels.selection`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from dsv32_fast.kernels.emulated import api
from dsv32_fast.kernels.selection import current


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    @functools.wraps(getattr(api, name))
    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(current().from_host, name)(*args, **kwargs)

    return call
