"""Steps of the optimised path with every stage recorded, ready to be judged by `stages.bounds`; stages may be forced.

The worlds are small but for the router, whose kernel exists for 256 experts only. Caches are filled without a prefill,
so that a step far into a sequence is as cheap as the first.

Legend: T rows, K top-k, S positions.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dsv32_fast.kernels.emulated.cache import read_keys
from dsv32_fast.kernels.mounted import EMULATION
from dsv32_fast.options import Options
from dsv32_fast.path import DecodePath, PathConfig
from dsv32_fast.router import Casts
from dsv32_fast.scale import admit
from dsv32_fast.state import CacheState, Tokens
from dsv32_fuzz.probes.decode_step import builder_of, kernels_of, options_of
from dsv32_fuzz.stages.bounds import Recording, Values
from dsv32_fuzz.targets import Target
from dsv32_ref.config import Config, Precision
from dsv32_ref.weights import Weights, assemble, synthetic

MIXED = Config(
    vocab_size=96,
    dim=128,
    inter_dim=128,
    moe_inter_dim=32,
    n_layers=2,
    n_dense_layers=1,
    n_heads=4,
    q_lora_rank=64,
    kv_lora_rank=64,
    qk_nope_head_dim=32,
    qk_rope_head_dim=16,
    v_head_dim=32,
    index_n_heads=4,
    index_head_dim=64,
    index_topk=16,
    max_seq_len=256,
    original_seq_len=32,
    rope_factor=8.0,
)
"""A dense layer and a mixture of 256 experts in 8 groups, 4 kept, 8 chosen; YaRN on."""
DENSE = MIXED.replace(n_layers=1)
"""The dense layer alone, for checks of attention."""
REAL_WIDTHS = {
    "dim": 256,
    "moe_inter_dim": 128,
    "n_heads": 16,
    "q_lora_rank": 128,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 128,
}
"""What real kernels ask for."""
Request = int


def config_for(target: Target, config: Config) -> Config:
    """`config`, or on hardware with the smallest widths that real kernels admit."""
    return config if target.evidence != "hardware" else config.replace(**REAL_WIDTHS)


@functools.cache
def weights(config: Config) -> Weights:
    """One synthetic model of these dimensions."""
    return assemble(config, synthetic(config, 0))


@functools.cache
def packed_path(config: Config, options: Options, sizes: PathConfig) -> DecodePath:
    """A path on the emulated kernels, for its packed weights: packing takes longer than a step.

    A fault in `dsv32_fast.packing` needs `packed_path.cache_clear()` to be seen.
    """
    return DecodePath(config, weights(config), options, EMULATION, sizes)


def path_of(target: Target, config: Config, *, max_rows: int = 64) -> DecodePath:
    """The target's path: its options, kernels and metadata builder, the latter fresh."""
    hardware = target.evidence == "hardware"
    sizes = PathConfig(
        max_num_batched_tokens=max_rows, page_size=64 if hardware else 16, device="cuda" if hardware else "cpu"
    )
    options, kernels = options_of(target), kernels_of(target)
    path = copy.copy(packed_path(config, options, sizes))
    path.kernels, path.casts = kernels, Casts()
    path.builder = builder_of(target)(config=path.builder.config, options=options, kernels=kernels, device=path.device)
    return path


def filled_state(path: DecodePath, contexts: Mapping[Request, int], seed: int, room: int = 64) -> CacheState:
    """Caches in which each request has so many tokens, with random latents and keys, and `room` for more."""
    page = path.path.page_size
    state = path.new_state(sum((length + room) // page * page + page for length in contexts.values()))
    admit(path, state, contexts, seed)
    return state


@dataclass(kw_only=True)
class Recorder:
    """A tap that keeps every stage, and of the caches what the stage read; answers with `forced` where it can."""

    path: DecodePath
    state: CacheState
    tokens: Tokens
    forced: Callable[[str, int, Tensor], Tensor] = lambda _stage, _layer, value: value
    values: Values = field(default_factory=dict)

    def __call__(self, stage: str, layer: int, value: Tensor) -> Tensor:
        """Keep the path's own value, and what it was replaced by where that matters to a bound."""
        self.values[stage, layer] = value.detach().cpu().clone()
        if stage == "index_score":
            self.values["keys", layer], self.values["key_scales", layer] = self._keys(layer, value.shape[1])
            own = [self.state.slots(request)[position] for request, position in self.rows()]
            self.values["cached", layer] = self._latents(layer)[torch.stack(own)]
        value = self.forced(stage, layer, value)
        if stage == "gate_idx":
            self.values["routed", layer] = value.cpu()
        if stage == "index_topk":
            self.values["attended", layer] = value.cpu()
            self.values["kv", layer] = self._gathered(layer, value.cpu().long())
        return value

    def rows(self) -> Iterator[tuple[Request, int]]:
        """(request, position) of each live row."""
        for request, ids in self.tokens.items():
            length = len(self.state.tokens[request])
            yield from ((request, length - len(ids) + j) for j in range(len(ids)))

    def _keys(self, layer: int, longest: int) -> tuple[Tensor, Tensor]:
        cache, state, width = self.state.index[layer].cpu(), self.state, self.path.config.index_head_dim
        own: dict[Request, tuple[Tensor, Tensor]] = {}
        for request in self.tokens:
            slots = state.slots(request)
            bits, scale = read_keys(cache, slots // state.page_size, slots % state.page_size, width, state.preshuffle)
            pad = longest - len(slots)
            keys = torch.nn.functional.pad(bits.view(torch.float8_e4m3fn).float(), (0, 0, 0, pad))
            own[request] = keys, torch.nn.functional.pad(scale[:, 0], (0, pad))
        rows = [own[request] for request, _ in self.rows()]
        return torch.stack([keys for keys, _ in rows]), torch.stack([scale for _, scale in rows])

    def _gathered(self, layer: int, topk_TK: Tensor) -> Tensor:
        flat = self._latents(layer)
        rows = [flat[self.state.slots(request)[topk_TK[t].clamp_min(0)]] for t, (request, _) in enumerate(self.rows())]
        return torch.stack(rows).masked_fill((topk_TK < 0)[..., None], 0.0)

    def _latents(self, layer: int) -> Tensor:
        """The latent of every slot, dequantised in fp64."""
        flat, scales = self.state.latent[layer].cpu().flatten(0, 1).double(), self.path.scales
        return flat if scales is None else flat * scales.kv.double().cpu()


def record_step(path: DecodePath, tap: Recorder, *, padded_rows: int = 0) -> Values:
    """One step under `tap`; logits of every row."""
    path.decode(tap.state, tap.tokens, padded_rows=padded_rows, tap=tap, all_logits=True)
    positions = [position for _, position in tap.rows()]
    tap.values["positions", -1] = torch.tensor(positions, dtype=torch.int64)
    tap.values["tokens", -1] = torch.tensor([t for ids in tap.tokens.values() for t in ids], dtype=torch.int64)
    return tap.values


def recording(path: DecodePath, steps: list[Values]) -> Recording:
    """Recorded steps, ready for `stages.bounds.values`."""
    precision = Precision(bf16=path.path.activations == torch.bfloat16, scale_format="fp32")
    return Recording(
        config=path.config, weights=weights(path.config), options=path.options, steps=steps, precision=precision
    )
