"""Gate logits and biases that are hard for a router: near and exact ties, cancellation, saturation, NaN.

Real checkpoints have biases with a large common offset (6.8 to 7.1 in one published layer, sglang #37133; others near
5, 12 or 34.5) and a small spread, where the bf16 grid has a step of 1/32. Each row of logits is of one kind, so that a
failure shrinks to one row of one kind.

Legend: T rows, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import msgspec
import torch
from hypothesis import strategies as st
from torch import Tensor

from dsv32_fuzz.strategies.steps import integers, sampled_from
from dsv32_ref.config import Config

RowKind = Literal[
    "spread",
    "one_far_up",
    "dominant_group",
    "near_ties",
    "exact_ties",
    "tied_pairs",
    "all_equal",
    "all_low",
    "saturated",
    "one_nan",
    "all_nan",
]
"""What a row of logits looks like; see `_DRAW`."""
NAN_KINDS = ("one_nan", "all_nan")
Shape = Literal["256/8/4/8", "64/4/2/6", "32/8/3/4", "16/1/1/4", "8/8/4/2"]
"""Experts, groups, kept groups, chosen experts: DeepSeek-V3's, for which the optimised kernel is, and others."""
SHAPES: tuple[Shape, ...] = get_args(Shape)
BIASES = (
    *((0.0, 0.0), (7.0, 0.05), (6.95, 0.15), (0.0, 0.1), (-1.0, 0.05)),
    *((-3.0, 0.0), (12.0, 0.02), (34.5, 0.14), (-2.0, 0.1), (-1.0, 0.02)),
)
"""(offset, spread): none, the real band, biased scores below zero, and where score + bias - bias cancels."""
PROBE_BIASES = BIASES[:5]


def config_of(shape: Shape, **changes: int | float) -> Config:
    """The dimensions of a router of that shape."""
    experts, groups, kept, chosen = (int(part) for part in shape.split("/"))
    sizes = {"n_routed_experts": experts, "n_expert_groups": groups, "n_limited_groups": kept}
    return Config(n_activated_experts=chosen).replace(**sizes, **changes)


class RouterRows(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A batch of gate logits, one kind per row, and a bias."""

    shape: Shape = "256/8/4/8"
    rows: tuple[RowKind, ...] = ("spread",)
    bias_offset: float = 0.0
    bias_spread: float = 0.0
    seed: int = 0

    def generator(self) -> torch.Generator:
        """Equal inputs give equal numbers."""
        return torch.Generator().manual_seed(self.seed)

    def tensors(self) -> tuple[Tensor, Tensor]:
        """fp32 logits [T, E] and bias [E]."""
        config, g = config_of(self.shape), self.generator()
        experts = config.n_routed_experts
        bias_E = bias(g, experts, self.bias_offset, self.bias_spread)
        rows = [_DRAW[kind](torch.randn(experts, generator=g), config, g) for kind in self.rows]
        return torch.stack(rows), bias_E


def bias(g: torch.Generator, experts: int, offset: float, spread: float) -> Tensor:
    """fp32 [E]: uniform within `spread` of the offset."""
    return offset + spread * (2 * torch.rand(experts, generator=g) - 1)


def _one_far_up(noise_E: Tensor, config: Config, g: torch.Generator) -> Tensor:
    """A group of one good expert and poor others, which a sum of two must not keep but a maximum would."""
    row_E = noise_E.abs().neg() * 0.1 - 3.0
    expert = int(torch.randint(config.n_routed_experts, (1,), generator=g))
    row_E[expert] = 3.0
    width = config.n_routed_experts // config.n_expert_groups
    fair = (expert + width * torch.arange(1, config.n_limited_groups + 1)) % config.n_routed_experts
    row_E[fair], row_E[fair // width * width + (fair + 1) % width] = 0.5, 0.25
    return row_E


def _dominant_group(noise_E: Tensor, config: Config, g: torch.Generator) -> Tensor:
    """All good experts in one group: the other kept groups give only poor ones."""
    width = config.n_routed_experts // config.n_expert_groups
    group = int(torch.randint(config.n_expert_groups, (1,), generator=g))
    row_E = noise_E - 4.0
    row_E[group * width : (group + 1) * width] += 7.0
    return row_E


def _near_ties(noise_E: Tensor, config: Config, g: torch.Generator) -> Tensor:
    """Scores that share their top 22 bits, or that only bf16 makes equal."""
    del config
    step = 2.0 ** -int(torch.tensor([9, 13, 21])[torch.randint(3, (1,), generator=g)])
    return 1.0 + step * (4 * noise_E).round()


def _exact_ties(noise_E: Tensor, config: Config, g: torch.Generator) -> Tensor:
    """Few levels: ties across every cut."""
    del config, g
    return noise_E.round().clamp(-1, 1)


def _tied_pairs(noise_E: Tensor, config: Config, g: torch.Generator) -> Tensor:
    """Every value twice, far apart."""
    del config
    order = torch.randperm(len(noise_E), generator=g)
    row_E = noise_E.clone()
    row_E[order[1::2]] = row_E[order[0::2]]
    return row_E


def _one_nan(noise_E: Tensor, config: Config, g: torch.Generator) -> Tensor:
    row_E = noise_E.clone()
    row_E[int(torch.randint(config.n_routed_experts, (1,), generator=g))] = torch.nan
    return row_E


_DRAW: dict[RowKind, Callable[[Tensor, Config, torch.Generator], Tensor]] = {
    "spread": lambda noise_E, _config, _g: 1.5 * noise_E,
    "one_far_up": _one_far_up,
    "dominant_group": _dominant_group,
    "near_ties": _near_ties,
    "exact_ties": _exact_ties,
    "tied_pairs": _tied_pairs,
    "all_equal": lambda noise_E, _config, _g: torch.zeros_like(noise_E),
    "all_low": lambda noise_E, _config, _g: -6.0 - 2.0 * noise_E.abs(),
    "saturated": lambda noise_E, _config, _g: 40.0 * noise_E,
    "one_nan": _one_nan,
    "all_nan": lambda noise_E, _config, _g: torch.full_like(noise_E, torch.nan),
}


@st.composite
def router_rows(draw: st.DrawFn) -> RouterRows:
    """Any batch: mostly DeepSeek-V3's shape, one to five rows."""
    offset, spread = draw(sampled_from(BIASES))
    return RouterRows(
        shape=draw(sampled_from((SHAPES[0], SHAPES[0], SHAPES[0], *SHAPES))),
        rows=tuple(draw(st.lists(sampled_from(get_args(RowKind)), min_size=1, max_size=5))),
        bias_offset=offset,
        bias_spread=spread,
        seed=draw(integers(0, 1 << 16)),
    )
