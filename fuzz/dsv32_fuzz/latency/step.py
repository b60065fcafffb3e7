"""The timed decode step: one variant of the options against another, in this or in fresh processes.

A subject is a `DecodePath` of 61 layers and small widths in steady decode: every request has its context, gets one
fresh random token, and gives it back before the next run, so that a cached plan stays valid. Two parts can be timed:
- `whole`: the step. On the host it is eager: Python, dispatch, torch's operators on small tensors, and of the kernels
  only their calls. On a device it is the build of the metadata, the staging and the replay of a graph.
- `changed`: what the options change and nothing else, once a step: the build of the metadata, and the router (gate
  GEMM, cast, choice) of all 58 mixtures on fresh hidden states. It is a small share of the step, so that what a change
  saves stands out of the noise.

On the host kernels are hollow. Such times say how the host's share changes; they are no latency of a GPU and never feed
a gate that judges one. Sizes that matter there: the clears. With topk 32 and 8192 rows the full clear writes 1.1 MB,
which a CPU does in the time that an MI355X needs for the 67 MB of topk 2048.

Nothing on a device has run yet. There AITER's kernels run where they are usable, at the smallest widths that they take
and topk 2048, and the step is the replay of a graph; ratios are those of a model with short matrix products.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any, Literal

import msgspec
import numpy as np
import torch

from dsv32_fast import router
from dsv32_fast.batch import StepBatch
from dsv32_fast.graph.cuda import CudaGraphRunner
from dsv32_fast.graph.step import GraphedDecode
from dsv32_fast.kernels.aiter import load
from dsv32_fast.kernels.protocol import Kernels
from dsv32_fast.options import Options
from dsv32_fast.packing import Moe
from dsv32_fast.path import DecodePath, PathConfig
from dsv32_fast.state import CacheState
from dsv32_fuzz.latency.counting import NARROW, path_of
from dsv32_fuzz.latency.roofline import MI355X_PEAKS, host_peaks, step_floor
from dsv32_fuzz.latency.seam import HollowKernels
from dsv32_fuzz.latency.timing import CLOCKS, ClockName, Samples, Subject, pairs_per_block, time_blocks
from dsv32_ref.config import Config

Part = Literal["whole", "changed"]
ROWS = 8192


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """What is timed, the options aside.

    Raises:
        ValueError: a batch or a number of layers that no step has.
    """

    batch: int
    layers: int = 61
    part: Part = "whole"
    clock: ClockName = "cpu"
    """`device` puts weights and caches on the GPU and takes its events."""
    kernels: Literal["hollow", "aiter"] = "hollow"

    def __post_init__(self) -> None:
        """Validate."""
        if not 1 <= self.batch <= ROWS:
            raise ValueError(f"batch is {self.batch}; give 1 to {ROWS}")
        if self.layers < 1:
            raise ValueError(f"layers is {self.layers}; give at least 1")

    @property
    def device(self) -> str:
        """Where the path lives."""
        return "cuda" if self.clock == "device" else "cpu"

    @property
    def config(self) -> Config:
        """Small widths; with real kernels the smallest that AITER takes on gfx950, and the published topk."""
        depth = {"n_layers": self.layers, "n_dense_layers": min(3, self.layers)}
        if self.kernels == "hollow":
            return dataclasses.replace(NARROW, **depth, index_topk=32)
        widths = {"dim": 512, "inter_dim": 512, "moe_inter_dim": 256, "n_heads": 16, "q_lora_rank": 512}
        heads = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
        return dataclasses.replace(NARROW, **depth, **widths, **heads, index_n_heads=64, index_head_dim=128)

    @property
    def page(self) -> int:
        """Tokens per page: 64 as vLLM has them on ROCm, fewer where nothing reads them."""
        return 16 if self.kernels == "hollow" else 64

    @property
    def context(self) -> int:
        """Cached tokens of every request: above topk, so that the plan of a step serves the next one."""
        return self.config.index_topk + self.page // 2


class TimingSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What one process times: `blocks` blocks of pairs of A and B."""

    name_a: str
    name_b: str
    a: Options
    b: Options
    setting: Setting
    blocks: int = 20
    pairs: int = 0
    """Per block; 0 chooses as many as last long enough."""
    cold: bool = False
    seed: int = 0


def step_subject(name: str, options: Options, setting: Setting, seed: int = 0) -> Subject:
    """Steady decode of `setting.batch` requests with these options.

    Raises:
        RuntimeError: a device clock without a GPU.
        AiterUnavailableError: real kernels without AITER.
    """
    if setting.device == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("torch sees no GPU, so there are no device events; use the cpu or wall clock")
    config = setting.config
    graph = setting.part == "whole" and setting.clock == "device"
    sizes = PathConfig(
        device=setting.device,
        max_num_batched_tokens=ROWS,
        page_size=setting.page,
        gate_gemm="bf16",
        max_model_len=setting.context + setting.page if graph else 0,
    )
    path = path_of(options, _kernels(setting), config, sizes)
    if setting.part == "changed":
        return _changed(name, path, setting, seed)
    state = path.new_state(setting.batch * (setting.context + 2 * setting.page))
    state.append({request: [0] * setting.context for request in range(setting.batch)})
    for cache in (*state.latent, *state.index):
        cache.zero_()
    graphed = _graphed(path, state, setting.batch) if graph else None
    tokens: dict[int, list[int]] = {}
    fresh = np.random.default_rng(seed)

    def prepare(_number: int) -> None:
        for request in range(setting.batch):
            state.truncate(request, setting.context)
        tokens.update({r: [int(t)] for r, t in enumerate(fresh.integers(0, config.vocab_size, setting.batch))})

    def run() -> None:
        if graphed is None:
            path.decode(state, tokens)
        else:
            graphed.decode(tokens)

    peaks = MI355X_PEAKS if setting.clock == "device" else host_peaks()
    floor = step_floor(config, [0] * setting.batch, peaks, bytes_per_weight=0)
    return Subject(name=name, prepare=prepare, run=run, floor=floor)


def _kernels(setting: Setting) -> Kernels | HollowKernels:
    return load() if setting.kernels == "aiter" else HollowKernels()


def _graphed(path: DecodePath, state: CacheState, batch: int) -> GraphedDecode:
    graphed = GraphedDecode(path=path, state=state, runner=CudaGraphRunner((batch,)))
    graphed.capture()
    return graphed


def _changed(name: str, path: DecodePath, setting: Setting, seed: int) -> Subject:
    """The metadata of the next token of every request, and every mixture's router on fresh hidden states."""
    batch, config, options = setting.batch, path.config, path.options
    step = StepBatch(query_lens=(1,) * batch, seq_lens=(setting.context + 1,) * batch)
    gates = [layer.ffn.gate for layer in path.weights.layers if isinstance(layer.ffn, Moe)]
    hidden_TM = torch.empty(batch, config.dim, dtype=torch.bfloat16, device=path.device)
    generator = torch.Generator(path.device).manual_seed(seed)

    def prepare(_number: int) -> None:
        hidden_TM.normal_(generator=generator)

    def run() -> None:
        path.builder.build(step)
        for gate in gates:
            logits_TE = router.gate_logits(hidden_TM, gate, options.logits, path.path.gate_gemm, path.casts)
            router.choose_experts(logits_TE, gate.bias, config, path.kernels)

    peaks = MI355X_PEAKS if setting.clock == "device" else host_peaks()
    floor = 2 * batch * len(gates) * config.dim * config.n_routed_experts / peaks.flop_per_s
    return Subject(name=name, prepare=prepare, run=run, floor=floor)


def time_spec(spec: TimingSpec) -> Samples:
    """Time the blocks of `spec` in this process, on one thread."""
    torch.set_num_threads(1)
    clock = CLOCKS[spec.setting.clock]
    a = step_subject(spec.name_a, spec.a, spec.setting, spec.seed)
    b = step_subject(spec.name_b, spec.b, spec.setting, spec.seed + 1)
    pairs = pairs_per_block(a, clock)
    pairs_per_block(b, clock)  # warms it up
    return time_blocks(a, b, spec.blocks, spec.pairs or pairs, clock=clock, cold=spec.cold, seed=spec.seed)


def time_in_fresh_process(spec: TimingSpec) -> Samples:
    """Time the blocks of `spec` in a new interpreter: other addresses, other hash seeds, cold code.

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
    """A `TimingSpec` as JSON on standard input, its `Samples` on standard output."""
    spec = msgspec.json.decode((stdin or sys.stdin.buffer).read(), type=TimingSpec)
    sys.stdout.write(msgspec.json.encode(time_spec(spec)).decode())


if __name__ == "__main__":
    main()
