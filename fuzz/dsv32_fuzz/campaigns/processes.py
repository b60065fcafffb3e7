"""What a shard's process needs of the operating system: one thread, and no life of its own after its parent's."""

from __future__ import annotations

import ctypes
import signal
import sys

THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "NUMBA_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)
"""One thread each: shards share the cores, and a reduction split over threads would round differently."""

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies (on Linux; elsewhere a hung one may outlive it)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def limit_threads() -> None:
    """One thread for torch; the other libraries read the environment that the watchdog sets."""
    import torch  # not needed by a parent that only watches

    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
