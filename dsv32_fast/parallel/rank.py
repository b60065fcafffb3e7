"""What one rank does: the same steps twice, with the plan cache and with a plan rebuilt every step.

A rank runs `DecodePath` on its shard and completes each layer's `attn_out` and `ffn_out` by a sum over the ranks. Every
choice (`index_topk`, `gate_idx`) is gathered from all ranks and compared bit for bit, order included, since each rank
chooses by itself. Rank 0 also runs TP 1 and compares: every step bit for bit in what is on all ranks, the decode steps
within bounds in what is divided.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import msgspec
import numpy as np
import torch
from torch import Tensor

from dsv32_fast.kernels.emulated import api
from dsv32_fast.kernels.emulated.attention import uses_persistent_kernel
from dsv32_fast.kernels.protocol import Kernels
from dsv32_fast.options import PRESETS, Options
from dsv32_fast.parallel.communicator import Communicator, all_sum
from dsv32_fast.parallel.compare import Comparison
from dsv32_fast.parallel.shard import padded_heads, place, shard, shard_config
from dsv32_fast.path import DecodePath, PathConfig
from dsv32_fast.state import Tokens
from dsv32_ref.config import Config
from dsv32_ref.weights import Weights, assemble, synthetic

SMALL = Config(
    vocab_size=96,
    dim=128,
    inter_dim=128,
    moe_inter_dim=32,
    n_layers=2,
    n_dense_layers=1,
    q_lora_rank=64,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=16,
    index_n_heads=4,
    index_head_dim=64,
    index_topk=16,
    max_seq_len=256,
    original_seq_len=32,
    rope_factor=8.0,
)
"""128 heads and 256 experts as in the real model, so that every world pads and routes as there; the rest is small."""


def emulated(rank: int) -> Kernels:  # noqa: ARG001 - all ranks have the same kernels
    """The emulated kernels."""
    return api


Q_SCALE, KV_SCALE = 0.13, 0.11
"""With an fp8 cache; no powers of two, so that a scale that is lost or applied twice shows."""


@dataclass(frozen=True, kw_only=True)
class TpSpec:
    """One tensor-parallel run.

    Raises:
        ValueError: a world that does not divide the model, a count that is not positive, or an unknown `kv_cache`.
    """

    world: int
    rows: int = 8
    """Requests, each with one token per decode step."""
    steps: int = 5
    """Decode steps after the prompts; in the third, request 0 verifies a draft."""
    seed: int = 0
    options: Options = PRESETS["pr47766"]
    kv_cache: Literal["bf16", "fp8"] = "bf16"
    """fp8 makes the queries and the kernel's probabilities fp8 too; their scales are `Q_SCALE` and `KV_SCALE`."""
    config: Config = SMALL
    """On real kernels: 512 + 64 latent dimensions and an index_topk that is a multiple of 128."""
    kernels: Callable[[int], Kernels] = emulated
    """From a rank to its kernels; a function at the top level of a module."""
    backend: str = "gloo"
    """`gloo` on CPUs; `nccl`, which is RCCL on ROCm, gives every rank a GPU of its own."""
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        for name in ("rows", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; give a positive number")
        padded_heads(shard_config(self.config, self.world).n_heads)
        _sizes(self)

    @property
    def heads(self) -> int:
        """Heads that each rank gives to the decode kernel."""
        return padded_heads(self.config.n_heads // self.world)


class Disagreement(msgspec.Struct, frozen=True, kw_only=True):
    """A rank that chose otherwise than rank 0."""

    step: int
    layer: int
    stage: str
    rank: int


class RankReport(msgspec.Struct, kw_only=True):
    """What a rank found."""

    choices: int = 0
    """Rows of choices that were compared over the ranks."""
    disagreements: list[Disagreement] = []
    reused: int = 0
    """Steps that used a cached plan which the kernel reads."""
    reused_ignored: int = 0
    """Steps that kept a cached plan which the kernel ignores."""
    cache_unequal: int = 0
    """Steps whose logits differ between the cached and the rebuilt plan."""
    budget_used: dict[str, float] = {}
    unequal: dict[str, int] = {}
    compared: int = 0


def workload(spec: TpSpec) -> list[Tokens]:
    """Prompts beyond topk, then decode steps: equal row counts, so that a saturated plan is used again."""
    rng = np.random.default_rng(spec.seed)
    topk = spec.config.index_topk

    def tokens(count: int) -> list[int]:
        drawn: list[int] = rng.integers(0, spec.config.vocab_size, count).tolist()
        return drawn

    prompts: list[Tokens] = [{r: tokens(int(rng.integers(topk + 1, topk + 8))) for r in range(spec.rows)}]
    return prompts + [{r: tokens(2 if (r, n) == (0, 2) else 1) for r in range(spec.rows)} for n in range(spec.steps)]


@functools.lru_cache(maxsize=2)
def whole_model(config: Config, seed: int) -> Weights:
    """Synthetic weights; every rank draws the same. Kept, since ranks that are threads can share them."""
    return assemble(config, synthetic(config, seed))


def run_rank(communicator: Communicator, spec: TpSpec) -> RankReport:
    """Everything that one rank does."""
    device = torch.device("cuda", communicator.rank) if spec.backend == "nccl" else torch.device("cpu")
    kernels, report = spec.kernels(communicator.rank), RankReport()
    weights = place(whole_model(spec.config, spec.seed), device)
    steps = workload(spec)
    cached = _Run(communicator, spec, weights, spec.options, kernels)
    rebuilt = _Run(communicator, spec, weights, msgspec.structs.replace(spec.options, key="none"), kernels)
    comparison = _comparison(spec, weights, kernels) if communicator.rank == 0 and spec.world > 1 else None
    for number, tokens in enumerate(steps):
        logits = cached.step(number, tokens)
        if not torch.equal(logits, rebuilt.step(number, tokens)):
            report.cache_unequal += 1
        if comparison is not None:
            comparison.step(tokens, cached.values, bounds=number > 0)  # the prompts are step 0
    report.choices, report.disagreements = cached.choices, cached.disagreements
    report.reused, report.reused_ignored = cached.reused
    if comparison is not None:
        found = comparison.found
        report.budget_used, report.unequal, report.compared = found.budget_used, found.unequal, found.compared
    return report


def _sizes(spec: TpSpec) -> PathConfig:
    return PathConfig(
        max_num_batched_tokens=spec.rows * (spec.config.index_topk + 8),
        page_size=16,
        kv_cache=spec.kv_cache,
        q_scale=Q_SCALE,
        kv_scale=KV_SCALE,
    )


def _slots(spec: TpSpec) -> int:
    return spec.rows * (spec.config.index_topk + 8 + spec.steps + 16)


def _comparison(spec: TpSpec, weights: Weights, kernels: Kernels) -> Comparison:
    path = DecodePath(spec.config, weights, spec.options, kernels, _sizes(spec))
    return Comparison(path=path, state=path.new_state(_slots(spec)), world=spec.world)


@dataclass
class _Run:
    """One rank's path through all steps."""

    communicator: Communicator
    spec: TpSpec
    weights: Weights
    options: Options
    kernels: Kernels
    choices: int = 0
    disagreements: list[Disagreement] = field(default_factory=list)
    reused: tuple[int, int] = (0, 0)
    values: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    """Stages of the last step, with all heads and complete sums."""

    def __post_init__(self) -> None:
        spec, rank = self.spec, self.communicator.rank
        config, part = shard_config(spec.config, spec.world), shard(spec.config, self.weights, rank, spec.world)
        self._path = DecodePath(config, part, self.options, self.kernels, _sizes(spec))
        self._state = self._path.new_state(_slots(spec))
        self._number = 0

    def step(self, number: int, tokens: Tokens) -> Tensor:
        """One step; the logits."""
        self._number, self.values = number, {}
        launches = self._path.builder.counts.plan_launches
        logits = self._path.decode(self._state, tokens, tap=self._tap).logits
        if self._path.builder.counts.plan_launches == launches:
            rows = sum(len(ids) for ids in tokens.values())
            dtype = self._path.path.kv_dtype
            read = uses_persistent_kernel(dtype, dtype, self.spec.heads, 1, rows, None)
            self.reused = self.reused[0] + read, self.reused[1] + (not read)
        return logits

    def _tap(self, stage: str, layer: int, value: Tensor) -> Tensor:
        whole = value
        if stage in ("attn_out", "ffn_out"):
            value = whole = all_sum(value, self.communicator)
        elif stage in ("attn_q", "attn_z"):
            whole = torch.cat(self.communicator.all_gather(value), 1)
        elif stage in ("index_topk", "gate_idx"):
            self._agree(stage, layer, value)
        self.values[stage, layer] = whole.clone()
        return value

    def _agree(self, stage: str, layer: int, value: Tensor) -> None:
        everybody = self.communicator.all_gather(value)
        self.choices += len(value) * (len(everybody) - 1)
        for rank, theirs in enumerate(everybody):
            if not torch.equal(theirs, everybody[0]):
                self.disagreements.append(Disagreement(step=self._number, layer=layer, stage=stage, rank=rank))
