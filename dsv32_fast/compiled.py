"""Compilation of integer loops by numba, with one set of options for all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

F = TypeVar("F", bound=Callable[..., Any])

_decorate: Any = numba.njit  # typed in some releases and not in others


def njit(function: F) -> F:
    """Compile at the first call, free of the interpreter lock, and keep the machine code where a cache is writable.

    Division follows numpy's rules (no exception), so callers must not divide by zero.
    """
    try:
        return cast("F", _decorate(function, cache=True, nogil=True, error_model="numpy"))
    except RuntimeError:  # numba found no directory to keep a cache in
        return cast("F", _decorate(function, nogil=True, error_model="numpy"))
