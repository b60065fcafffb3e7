"""The timed decode step: host time of one variant of the options against another, in this or in fresh processes.

A subject is a `DecodePath` of 61 layers and small widths on the CPU behind hollow kernels, in steady decode: every
request has its context, gets one fresh random token, and gives it back before the next run, so that a cached plan
stays valid. What is timed is the CPU time of what the host does: Python, dispatch, and torch's operators on small
tensors; of the kernels only their calls. Such times say how the host's share changes. They are no latency of a GPU and
never feed a gate that judges one.

Sizes that matter here: the clears. With topk 32 and 8192 rows the full clear writes 1.1 MB, which a CPU does in the
time that an MI355X needs for the 67 MB of topk 2048.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import msgspec
import numpy as np
import torch

from dsv32_fast.options import Options
from dsv32_fast.path import PathConfig
from dsv32_fuzz.latency.counting import NARROW, path_of
from dsv32_fuzz.latency.roofline import host_peaks, step_floor
from dsv32_fuzz.latency.seam import HollowKernels
from dsv32_fuzz.latency.timing import Samples, Subject, runs_per_block, time_pairs

TOPK, CONTEXT, PAGE = 32, 40, 16
ROWS = 8192


class PairSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What one process times: `pairs` pairs of A and B."""

    name_a: str
    name_b: str
    a: Options
    b: Options
    batch: int
    layers: int = 61
    pairs: int = 20
    block: int = 0
    """Runs per block; 0 chooses as many as last long enough."""
    cold: bool = False
    seed: int = 0


def step_subject(name: str, options: Options, batch: int, layers: int = 61, seed: int = 0) -> Subject:
    """Steady decode of `batch` requests with these options.

    Raises:
        ValueError: no request, or more than max_num_batched_tokens.
    """
    if not 1 <= batch <= ROWS:
        raise ValueError(f"batch is {batch}; give 1 to {ROWS}")
    config = dataclasses.replace(NARROW, n_layers=layers, n_dense_layers=min(3, layers), index_topk=TOPK)
    sizes = PathConfig(max_num_batched_tokens=ROWS, page_size=PAGE, gate_gemm="bf16")
    path = path_of(options, HollowKernels(), config, sizes)
    state = path.new_state(batch * 2 * PAGE * -(-CONTEXT // PAGE))
    state.append({request: [0] * CONTEXT for request in range(batch)})
    tokens: dict[int, list[int]] = {}
    fresh = np.random.default_rng(seed)

    def prepare(_number: int) -> None:
        for request in range(batch):
            state.truncate(request, CONTEXT)
        tokens.update({r: [int(t)] for r, t in enumerate(fresh.integers(0, config.vocab_size, batch))})

    def run() -> None:
        path.decode(state, tokens)

    floor = step_floor(config, [0] * batch, host_peaks(), bytes_per_weight=0)
    return Subject(name=name, prepare=prepare, run=run, floor=floor)


def time_spec(spec: PairSpec) -> Samples:
    """Time the pairs of `spec` in this process, on one thread."""
    torch.set_num_threads(1)
    a = step_subject(spec.name_a, spec.a, spec.batch, spec.layers, spec.seed)
    b = step_subject(spec.name_b, spec.b, spec.batch, spec.layers, spec.seed + 1)
    block = spec.block or runs_per_block(a)
    runs_per_block(b)  # warms it up
    return time_pairs(a, b, spec.pairs, block, cold=spec.cold, seed=spec.seed)


def time_in_fresh_process(spec: PairSpec) -> Samples:
    """Time the pairs of `spec` in a new interpreter: other addresses, other hash seeds, cold code.

    Raises:
        RuntimeError: the process failed; the message ends with its last line.
    """
    command = [sys.executable, "-m", "dsv32_fuzz.latency.step"]
    done = subprocess.run(command, input=msgspec.json.encode(spec), capture_output=True, check=False)
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["no message"]
        raise RuntimeError(f"the timing process ended with {done.returncode}: {last[0]}")
    return msgspec.json.decode(done.stdout, type=Samples)


def main(stdin: Any = None) -> None:
    """A `PairSpec` as JSON on standard input, its `Samples` on standard output."""
    spec = msgspec.json.decode((stdin or sys.stdin.buffer).read(), type=PairSpec)
    sys.stdout.write(msgspec.json.encode(time_spec(spec)).decode())


if __name__ == "__main__":
    main()
