"""What a step costs: kernel calls by name, plans, casts of the router, bytes cleared, host reads, width of the scores.

The budget of a step follows from its lengths and the options alone; it is written here a second time, without the
builder and without the path.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import msgspec
from hypothesis import strategies as st

from dsv32_fast.kernels.protocol import Kernels
from dsv32_fast.options import Options
from dsv32_fuzz.checks.own_input import InputCheck
from dsv32_fuzz.probes.decode_step import kernels_of, options_of
from dsv32_fuzz.stages.recorder import MIXED, config_for, filled_state, path_of
from dsv32_fuzz.targets import Target
from dsv32_fuzz.verdict import Verdict
from dsv32_ref.config import Config

WATCHED = (
    "get_mla_metadata_v1",
    "mla_decode_fwd",
    "concat_and_cache_mla",
    "indexer_k_quant_and_cache",
    "deepgemm_fp8_paged_mqa_logits",
    "cp_gather_indexer_k_quant_cache",
    "fp8_mqa_logits",
    "top_k_per_row_decode",
    "top_k_per_row_prefill",
    "biased_grouped_topk",
    "fused_moe",
)
_ENTRY = 4
"""Bytes of an int32."""


@dataclass
class CountedKernels:
    """Passes every call on and counts it by name, and the columns that a top-k looks through."""

    kernels: Kernels
    calls: Counter[str] = field(default_factory=Counter)
    widest: int = 0

    def __getattr__(self, name: str) -> Any:
        """A kernel that counts its calls."""
        function = getattr(self.kernels, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] += 1
            if name in ("top_k_per_row_decode", "top_k_per_row_prefill"):
                self.widest = max(self.widest, args[0].shape[1])
            return function(*args, **kwargs)

        return call


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """Cached tokens of each request, and the new tokens of each in every step."""

    contexts: tuple[int, ...]
    steps: tuple[tuple[int, ...], ...]
    padding: int = 0


class LaunchBudget(InputCheck[Traffic]):
    """Every step against its budget."""

    name = "launch_budget"
    meaning = "each step launched, cast and cleared exactly what its lengths and the options call for"
    family = "step"
    input_type = Traffic

    def inputs(self) -> st.SearchStrategy[Traffic]:
        """Steps of drafts and chunks that shrink, grow and repeat; contexts around and far beyond topk."""
        topk = MIXED.index_topk
        contexts = st.sampled_from((topk + 9, topk - 1, topk, 1))
        return st.lists(contexts, min_size=1, max_size=3).flatmap(
            lambda chosen: st.builds(
                Traffic,
                contexts=st.just(tuple(chosen)),
                steps=st.lists(
                    st.tuples(*[st.sampled_from((1, 1, 1, 2, 6, 0))] * len(chosen)), min_size=2, max_size=4
                ).map(tuple),
                padding=st.sampled_from((0, 2)),
            )
        )

    def run(self, drawn: Traffic, target: Target) -> Verdict:
        """Count each step's calls and compare."""
        counted, options = CountedKernels(kernels_of(target)), options_of(target)
        path = path_of(target, config_for(target, MIXED))
        path.kernels = counted
        path.builder.kernels = counted
        state = filled_state(path, dict(enumerate(drawn.contexts)), seed=0)
        budget = _Budget(path.config, options, path.path.max_num_batched_tokens, path.path.longest_paged)
        lengths, total = list(drawn.contexts), Counter[str]()
        for number, new in enumerate(drawn.steps):
            lengths = [length + count for length, count in zip(lengths, new, strict=True)]
            counted.calls.clear()
            counted.widest = 0
            counts = path.builder.counts
            before = path.casts.bf16_to_fp32, counts.bytes_cleared, counts.host_device_reads
            tokens = {request: [1] * count for request, count in enumerate(new)}
            path.decode(state, tokens, padded_rows=sum(new) + drawn.padding)
            seen = Counter({name: counted.calls[name] for name in WATCHED})
            seen["router casts"] = path.casts.bf16_to_fp32 - before[0]
            seen["bytes cleared"] = counts.bytes_cleared - before[1]
            seen["host reads"] = counts.host_device_reads - before[2]
            seen["columns of index scores"] = counted.widest
            expected = budget.step(new, lengths, sum(new) + drawn.padding)
            total.update(seen)
            wrong = [name for name in expected if seen[name] != expected[name]]
            if wrong:
                what = f"{wrong[0]}: {seen[wrong[0]]}, not {expected[wrong[0]]}"
                return self.verdict(f"step {number} of {list(new)} new tokens: {what}", dict(total))
        return self.verdict("", dict(total), untested="" if total["mla_decode_fwd"] else "no step had a row")


class _Budget:
    """What steps may do; remembers the last planned lengths and the last extents."""

    def __init__(self, config: Config, options: Options, most_rows: int, longest_paged: int) -> None:
        self.config, self.options, self.most_rows, self.longest_paged = config, options, most_rows, longest_paged
        self.planned: object = None
        self.extents = 0, 0

    def step(self, new: tuple[int, ...], lengths: list[int], rows: int) -> dict[str, int]:
        """Calls by name, casts and cleared bytes of one step of `rows` rows, padding included."""
        layers, mixtures = self.config.n_layers, self.config.n_layers - self.config.n_dense_layers
        gathered = sum(count > self.longest_paged for count in new)
        paged = rows > sum(count for count in new if count > self.longest_paged) and max(lengths) > 0
        return {
            "get_mla_metadata_v1": self._plans(new, lengths, rows),
            "mla_decode_fwd": layers if rows else 0,
            "concat_and_cache_mla": layers,
            "indexer_k_quant_and_cache": layers,
            "deepgemm_fp8_paged_mqa_logits": layers if paged else 0,
            "top_k_per_row_decode": layers if paged else 0,
            "cp_gather_indexer_k_quant_cache": layers * gathered,
            "fp8_mqa_logits": layers * gathered,
            "top_k_per_row_prefill": layers if gathered else 0,
            "biased_grouped_topk": mixtures,
            "fused_moe": mixtures,
            "router casts": mixtures if self.options.logits == "fp32" else 0,
            "bytes cleared": self._cleared(sum(new), rows),
            "host reads": 0,
            "columns of index scores": max(lengths) if paged or gathered else 0,
        }

    def _plans(self, new: tuple[int, ...], lengths: list[int], rows: int) -> int:
        """One launch unless the lengths that the key policy looks at are those of the last launch."""
        topk = self.config.index_topk
        key: tuple[object, ...] = (rows, max(new), tuple(min(length, topk) for length in lengths))
        if self.options.key == "pr47766":
            contexts = tuple(min(length - count, topk) for length, count in zip(lengths, new, strict=True))
            key = (*key, contexts, new)
        launch = self.options.key == "none" or key != self.planned
        self.planned = key
        return int(launch)

    def _cleared(self, live: int, rows: int) -> int:
        """Bytes: the rest of the row pointers, and either three whole buffers or what the last step left behind."""
        topk, most = self.config.index_topk, self.most_rows
        entries = most - rows
        if self.options.clear == "full":
            entries += most + most * topk + most + 1
        else:
            entries += max(0, self.extents[0] - live) + max(0, self.extents[1] - rows * topk)
        self.extents = live, rows * topk
        return _ENTRY * entries


CHECKS: tuple[type[InputCheck[Any]], ...] = (LaunchBudget,)
