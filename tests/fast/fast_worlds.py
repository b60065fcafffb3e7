"""A small world with the router shape of the optimised kernel, a schedule of mixed steps, and both paths run on it.

The schedule is drawn by seed: prompts in chunks, plain decode, drafts of which some are rejected, requests that come
and go, lengths on both sides of topk, and padded steps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from dsv32_fast.kernels.emulated.cache import read_keys
from dsv32_fast.kernels.protocol import Kernels
from dsv32_fast.kernels.selection import current
from dsv32_fast.metadata import BuildCounts
from dsv32_fast.options import Options
from dsv32_fast.path import DecodePath, PathConfig, StepOutput
from dsv32_fast.state import CacheState
from dsv32_fuzz.stages.bounds import Recording, Values
from dsv32_fuzz.stages.long_decode import Event, decisions, follow
from dsv32_fuzz.stages.recorder import MIXED, REAL_WIDTHS
from dsv32_ref import decode as reference
from dsv32_ref.config import Config, Precision
from dsv32_ref.state import Model, State
from dsv32_ref.weights import Weights, assemble, quantise, synthetic

ADMITTED = MIXED.replace(**REAL_WIDTHS, max_seq_len=2048, original_seq_len=256)
"""The smallest world that real kernels take."""
KERNELS = current().kernels
"""What this session runs: the emulation unless `--kernels` says otherwise."""
SMALL = ADMITTED if current().limits.defined else MIXED
"""Experts as in the real model (256 in 8 groups, 4 kept, 8 chosen), everything else small, YaRN on."""
UNIT = SMALL.index_topk // 16
"""Lengths of the schedule scale with topk."""
PATH = PathConfig(
    max_num_batched_tokens=64 * UNIT,
    page_size=64 if current().limits.defined else 16,
    device=current().device,
    shuffle=current().shuffle,
)
SLOTS = 640 * UNIT
FP8_KV = replace(PATH, kv_cache="fp8", q_scale=0.037, kv_scale=0.11)
"""An fp8 cache; scales that are no powers of two, and under which nothing saturates."""
Recorded = Callable[..., tuple[Recording, BuildCounts]]
"""The fixture `recorded`: the run of the whole schedule, and what its builder did."""


@functools.cache
def weights(config: Config = SMALL, fp8: bool = False) -> Weights:
    named = synthetic(config, 0)
    return assemble(config, quantise(named) if fp8 else named)


def path(
    options: Options, kernels: Kernels, config: Config = SMALL, sizes: PathConfig = PATH, fp8: bool = False
) -> DecodePath:
    return DecodePath(config, weights(config, fp8), options, kernels, sizes)


def schedule(steps: int, seed: int = 0, config: Config = SMALL) -> list[Event]:
    """Ten steps of traffic, then ten in which only requests at or beyond topk go on, one token each, and so on."""
    rng, unit = np.random.default_rng(seed), config.index_topk // 16
    lengths: dict[int, int] = {}
    waiting: dict[int, int] = {}
    events: list[Event] = []
    newest = 0
    for number in range(steps):
        calm = number % 20 >= 10
        if not lengths or (len(lengths) < 4 and not calm and rng.random() < 0.7):
            lengths[newest], waiting[newest] = 0, int(rng.integers(1, 30)) * unit
            newest += 1
        if calm:
            counts = {r: int(n >= config.index_topk) for r, n in lengths.items()}
        else:
            counts = {r: _tokens_of(r, waiting, rng, unit) for r in lengths}
        tokens = {r: tuple(rng.integers(0, config.vocab_size, n).tolist()) for r, n in counts.items()}
        truncate = {}
        for r, n in counts.items():
            lengths[r] += n
            if r not in waiting and n > 1 and rng.random() < 0.6:
                lengths[r] -= int(rng.integers(1, n))
                truncate[r] = lengths[r]
        ended = tuple(r for r in lengths if r not in waiting and (lengths[r] > 60 * unit or rng.random() < 0.04))
        release = () if calm else ended
        rows = sum(counts.values())
        padded = -(-max(rows, 1) // 8) * 8 if calm or rng.random() < 0.5 else 0
        events.append(Event(tokens=tokens, padded_rows=padded, truncate=truncate, release=release))
        for r in release:
            del lengths[r]
    return events


def _tokens_of(request: int, waiting: dict[int, int], rng: np.random.Generator, unit: int) -> int:
    """A chunk of the prompt while there is one, else one token or some drafts, now and then none."""
    if request in waiting:
        chunk = min(waiting[request], 9 * unit)
        waiting[request] -= chunk
        if not waiting[request]:
            del waiting[request]
        return chunk
    return int(rng.choice([0, 1, 1, 1, 2, 3, 4]))


def run_reference(events: list[Event], config: Config = SMALL, fp8: bool = False) -> list[Values]:
    """Every stage of the fp32 reference, free-running."""
    model = Model(config=config, weights=weights(config, fp8))
    state, found = State(model, SLOTS), []
    for event in events:
        trace = reference.Trace()
        reference.decode(model, state, event.tokens, tap=trace, all_logits=True)
        found.append(trace.values)
        follow(event, state)
    return found


@dataclass(kw_only=True)
class Recorder:
    """A tap that keeps every stage of the optimised path, and of the caches what the stage read; forces decisions."""

    run: DecodePath
    state: CacheState
    tokens: Mapping[int, tuple[int, ...]]
    forced: Values
    values: Values = field(default_factory=dict)

    def __call__(self, stage: str, layer: int, value: Tensor) -> Tensor:
        self.values[stage, layer] = value.detach().cpu().clone()
        if stage == "index_score":
            self.values["keys", layer], self.values["key_scales", layer] = self._keys(layer, value.shape[1])
            self.values["cached", layer] = self._cached(layer, [[length - 1] for _, length in self.rows()], 1)[:, 0]
        value = self.forced.get((stage, layer), value)
        if stage == "gate_idx":
            self.values["routed", layer] = value.cpu()
        if stage == "index_topk":
            self.values["attended", layer] = value.cpu()
            kept = value.cpu().long()
            kv_TKD = self._cached(layer, kept.clamp_min(0).tolist(), kept.shape[1])
            self.values["kv", layer] = kv_TKD.masked_fill((kept < 0)[..., None], 0.0)
        return value

    def rows(self) -> Iterator[tuple[int, int]]:
        """(request, tokens it sees) of each row."""
        for request, ids in self.tokens.items():
            length = len(self.state.tokens[request])
            yield from ((request, length - len(ids) + j + 1) for j in range(len(ids)))

    def _keys(self, layer: int, longest: int) -> tuple[Tensor, Tensor]:
        cache, state, width = self.state.index[layer].cpu(), self.state, self.run.config.index_head_dim
        keys, scales = [], []
        for request, _ in self.rows():
            slots = state.slots(request)
            bits, scale = read_keys(cache, slots // state.page_size, slots % state.page_size, width, state.preshuffle)
            pad = longest - len(slots)
            keys.append(torch.nn.functional.pad(bits.view(torch.float8_e4m3fn).float(), (0, 0, 0, pad)))
            scales.append(torch.nn.functional.pad(scale[:, 0], (0, pad)))
        if not keys:
            return torch.zeros(0, longest, width), torch.zeros(0, longest)
        return torch.stack(keys), torch.stack(scales)

    def _cached(self, layer: int, positions: list[list[int]], width: int) -> Tensor:
        """The latents [T, width, D] at positions of each row's own request, dequantised in fp64."""
        flat = self.state.latent[layer].cpu().flatten(0, 1)
        owned = {request: self.state.slots(request) for request, _ in self.rows()}
        parts = [owned[r][torch.tensor(at)] for (r, _), at in zip(self.rows(), positions, strict=True)]
        slots_TK = torch.stack(parts) if parts else torch.zeros(0, width, dtype=torch.int64)
        if flat.dtype == torch.bfloat16:
            return flat[slots_TK].double()
        scales = self.run.scales
        assert scales is not None
        return flat.view(torch.uint8)[slots_TK].view(flat.dtype).double() * scales.kv.double().cpu()


def run_fast(
    run: DecodePath, events: list[Event], forced: list[Values] | None = None
) -> tuple[list[Values], list[StepOutput]]:
    """Every stage of the optimised path, with the decisions of `forced` where given."""
    state, found, outputs = run.new_state(SLOTS), [], []
    for number, event in enumerate(events):
        tap = Recorder(run=run, state=state, tokens=event.tokens, forced=forced[number] if forced else {})
        out = run.decode(state, event.tokens, padded_rows=event.padded_rows, tap=tap, all_logits=True)
        positions = [length - 1 for _, length in tap.rows()]
        tap.values["positions", -1] = torch.tensor(positions, dtype=torch.int64)
        tap.values["tokens", -1] = torch.tensor([t for ids in event.tokens.values() for t in ids], dtype=torch.int64)
        found.append(tap.values)
        outputs.append(out)
        follow(event, state)
    return found, outputs


def record(run: DecodePath, events: list[Event], reference: list[Values] | None) -> Recording:
    """The run of `events`, with the decisions of `reference` where given, ready to be judged."""
    steps, _ = run_fast(run, events, reference and [decisions(step) for step in reference])
    fp8 = run.weights.layers[0].attn.o.scale is not None
    precision = Precision(bf16=run.path.activations == torch.bfloat16, linear_fp8=fp8, scale_format="fp32")
    scales = run.scales and (run.scales.q.item(), run.scales.kv.item())
    return Recording(
        config=run.config,
        weights=weights(run.config, fp8),
        options=run.options,
        steps=steps,
        precision=precision,
        kv_scales=scales,
    )


def row_lengths(event: Event, before: Mapping[int, int], topk: int) -> list[int]:
    """KV length of each row, padding included, from the number of tokens that each request had."""
    lengths = [min(before.get(r, 0) + j + 1, topk) for r, ids in event.tokens.items() for j in range(len(ids))]
    return lengths + [0] * (event.padded_rows - len(lengths))


def stale_rows(events: list[Event], topk: int) -> list[list[bool]]:
    """Which live rows of each step a plan kept by the key of #42982 sends to another part of the gather list.

    Written from the pull request's key alone, without the builder: rows, largest query length, and min(seq, topk) of
    each request. A row is misled where the window that the kept plan has for it is not its own.
    """
    before: dict[int, int] = {}
    key: object = None
    planned: list[int] = []
    found = []
    for event in events:
        lengths = row_lengths(event, before, topk)
        seqs = [before.get(r, 0) + len(ids) for r, ids in event.tokens.items()]
        longest = max((len(ids) for ids in event.tokens.values()), default=0)
        new = (len(lengths), longest, tuple(min(s, topk) for s in seqs))
        if new != key:
            key, planned = new, lengths
        ends, planned_ends = np.cumsum(lengths), np.cumsum(planned)
        other = (ends != planned_ends) | (np.array(lengths) != np.array(planned))
        found.append([bool(flag) for flag in other[: event.rows]])
        before |= dict(zip(event.tokens, seqs, strict=True)) | dict(event.truncate)
        for r in event.release:
            del before[r]
    return found
