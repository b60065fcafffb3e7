"""Compilation of integer loops by numba, with one set of options for all of them.

`int32_array` and `int64_array` give compiled code the memory of a tensor by its address. Passing nine tensors as numpy
arrays costs more than planning 64 rows does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
from numba.core import types
from numba.extending import intrinsic

F = TypeVar("F", bound=Callable[..., Any])

# Typed in some releases of numba and not in others.
_numba: Any = numba
_types: Any = types
_carray = _numba.carray


def njit(function: F) -> F:
    """Compile at the first call, free of the interpreter lock, and keep the machine code where a cache is writable.

    Division follows numpy's rules (no exception), so callers must not divide by zero.
    """
    try:
        return cast("F", _numba.njit(function, cache=True, nogil=True, error_model="numpy"))
    except RuntimeError:  # numba found no directory to keep a cache in
        return cast("F", _numba.njit(function, nogil=True, error_model="numpy"))


def _pointer_to(element: Any) -> Any:
    """A compiled-code function from an address to a pointer."""

    @intrinsic
    def pointer(typing_context: Any, address: Any) -> Any:  # noqa: ARG001 - the signature that numba calls
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        return _types.CPointer(element)(types.int64), codegen

    return pointer


_int32_pointer, _int64_pointer = _pointer_to(types.int32), _pointer_to(types.int64)


@njit
def int32_array(address: int, shape: Any) -> Any:
    """The int32 array of `shape` (a tuple) at `address`; for compiled code only, valid while the owner lives."""
    return _carray(_int32_pointer(address), shape)


@njit
def int64_array(address: int, shape: Any) -> Any:
    """The int64 array of `shape` (a tuple) at `address`; for compiled code only, valid while the owner lives."""
    return _carray(_int64_pointer(address), shape)
