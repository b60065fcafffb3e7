"""The counts of a decode schedule for the baseline, each change alone, and all together, at the true layer count.

The model has the real layers, experts, top-k and token budget and small widths, and its tensors are on the `meta`
device: no count depends on a width, and nothing is computed. Kernels are hollow. Such counts confirm arithmetic only:
"58 casts removed" can be confirmed by a trace of the real engine alone.

The schedule holds what makes the three changes differ: steps that repeat a key, a batch that shrinks, one that grows,
a request below topk whose rows change with every step, and graph padding.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import cast

import msgspec
import torch

from dsv32_fast.kernels.protocol import Kernels
from dsv32_fast.options import PRESETS, Options
from dsv32_fast.packing import moved
from dsv32_fast.path import DecodePath, PathConfig
from dsv32_fast.router import GateGemm
from dsv32_fast.scale import pooled_weights
from dsv32_fuzz.latency.accounting import StepCounts, count_step
from dsv32_fuzz.latency.seam import HollowKernels, Seam
from dsv32_fuzz.latency.shapes import ShapeMemo
from dsv32_ref.config import Config
from dsv32_ref.weights import Weights

NARROW = Config(
    vocab_size=64,
    dim=64,
    inter_dim=64,
    moe_inter_dim=32,
    n_heads=4,
    q_lora_rank=32,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=16,
    v_head_dim=16,
    index_n_heads=2,
    index_head_dim=32,
)
"""61 layers of which 3 are dense, 256 experts, topk 2048 as published; every width is small."""
BASELINE = "baseline"
ALL = "all"
FIELDS = ("logits", "bias", "key", "clear")


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One step of a schedule: new tokens per request, rows after graph padding, and who leaves afterwards."""

    tokens: dict[int, int]
    padded_rows: int = 0
    release: tuple[int, ...] = ()
    admit: dict[int, int] = {}
    """Requests whose prompts of this many tokens are cached before the step, without a prefill."""

    @property
    def rows(self) -> int:
        """Rows of the step, padding included."""
        return max(self.padded_rows, sum(self.tokens.values()))


class VariantCounts(msgspec.Struct, frozen=True, kw_only=True):
    """The counts of every step of one variant."""

    name: str
    options: Options
    steps: tuple[StepCounts, ...]


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """What `dsv32 bench step --counts-only --json` prints, and what a budget file holds."""

    torch: str
    """The torch that dispatched the operators: their names and numbers may differ between releases."""
    layers: int
    moe_layers: int
    max_num_batched_tokens: int
    topk: int
    gate_gemm: str
    schedule: tuple[Event, ...]
    variants: tuple[VariantCounts, ...]


def variants(options: Options) -> dict[str, Options]:
    """`baseline`, each field that `options` changes alone, and `all`; split_cap is in `all` only (it launches nothing).

    Raises:
        ValueError: the options are the baseline, so that there is nothing to compare.
    """
    base = PRESETS[BASELINE]
    changed = [field for field in FIELDS if getattr(options, field) != getattr(base, field)]
    if not changed:
        raise ValueError("options: they are those of the baseline; choose a preset with changes, like pr47766")
    alone = {field: msgspec.structs.replace(base, **{field: getattr(options, field)}) for field in changed}
    return {BASELINE: base, **alone, ALL: options}


def decode_schedule(batch: int = 16, context: int = 5000, drafts: int = 0) -> tuple[Event, ...]:
    """Seven steps of `batch` requests with `context` cached tokens, `drafts` + 1 rows each.

    The batch decodes (three steps), half of it leaves, the other half decodes on (two steps, the second padded), a
    request of 100 tokens joins, and decodes on.

    Raises:
        ValueError: fewer than two requests, no context, or negative drafts.
    """
    if batch < 2 or context < 1 or drafts < 0:
        raise ValueError(f"batch {batch}, context {context}, drafts {drafts}: give at least 2, 1 and 0")
    rows, half = drafts + 1, batch // 2
    whole, left = dict.fromkeys(range(batch), rows), dict.fromkeys(range(half), rows)
    return (
        Event(tokens=whole, admit=dict.fromkeys(range(batch), context)),
        Event(tokens=whole),
        Event(tokens=whole, release=tuple(range(half, batch))),
        Event(tokens=left),
        Event(tokens=left, padded_rows=half * rows + 3),
        Event(tokens={**left, batch: rows}, admit={batch: 100}),
        Event(tokens={**left, batch: rows}),
    )


def meta_path(
    options: Options, kernels: object, config: Config = NARROW, rows: int = 8192, gate_gemm: GateGemm = "bf16"
) -> DecodePath:
    """A decode path without storage: weights, caches and buffers are on the `meta` device.

    Args:
        options: the switches of the path.
        kernels: hollow kernels, perhaps behind a seam.
        config: dimensions.
        rows: max_num_batched_tokens.
        gate_gemm: "bf16" is vLLM on ROCm at the time of #42982, whose cast that pull request removed.
    """
    sizes = PathConfig(device="meta", max_num_batched_tokens=rows, gate_gemm=gate_gemm)
    return path_of(options, kernels, config, sizes)


def path_of(options: Options, kernels: object, config: Config, sizes: PathConfig) -> DecodePath:
    """A decode path over pooled weights on the device of `sizes`."""
    packed = pooled_weights(config, options)
    hollow = Weights(embed=packed.embed, layers=(), norm=packed.norm, head=packed.head)
    path = DecodePath(config, hollow, options, cast(Kernels, kernels), sizes)
    path.weights = moved(packed, torch.device(sizes.device))
    return path


def count_schedule(
    options: Options,
    schedule: Sequence[Event],
    config: Config = NARROW,
    rows: int = 8192,
    gate_gemm: GateGemm = "bf16",
    memo: ShapeMemo | None = None,
) -> tuple[StepCounts, ...]:
    """The counts of every step of `schedule`, from a fresh path.

    Raises:
        ValueError: a step that the path refuses.
    """
    seam, memo = Seam(HollowKernels()), memo or ShapeMemo()
    path = meta_path(options, seam, config, rows, gate_gemm)
    longest = sum(n for event in schedule for n in event.admit.values()) + sum(event.rows for event in schedule)
    requests = {r for event in schedule for r in event.tokens}
    state = path.new_state(longest + len(requests) * path.path.page_size)
    counts = []
    for event in schedule:
        if event.admit:
            state.append({request: [0] * length for request, length in event.admit.items()})
        tokens = {request: [0] * n for request, n in event.tokens.items()}
        counts.append(count_step(path, seam, state, tokens, padded_rows=event.padded_rows, memo=memo))
        for request in event.release:
            state.release(request)
    return tuple(counts)


@functools.cache
def _moe_layers(config: Config) -> int:
    return sum(config.kind(layer) == "moe" for layer in range(config.n_layers))


def count_table(
    options: Options,
    schedule: Sequence[Event] | None = None,
    config: Config = NARROW,
    rows: int = 8192,
    gate_gemm: GateGemm = "bf16",
) -> Table:
    """Every variant of `options` over one schedule (`decode_schedule()` by default).

    Raises:
        ValueError: options without changes, or a schedule that the path refuses.
    """
    schedule, memo = tuple(schedule or decode_schedule()), ShapeMemo()
    counted = tuple(
        VariantCounts(name=name, options=chosen, steps=count_schedule(chosen, schedule, config, rows, gate_gemm, memo))
        for name, chosen in variants(options).items()
    )
    return Table(
        torch=torch.__version__.split("+")[0],
        layers=config.n_layers,
        moe_layers=_moe_layers(config),
        max_num_batched_tokens=rows,
        topk=config.index_topk,
        gate_gemm=gate_gemm,
        schedule=schedule,
        variants=counted,
    )
