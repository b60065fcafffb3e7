"""The tap of the true-shape step finds what it is there for, on a small pooled model."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from one_step import Counting
from torch import Tensor

from dsv32_fast.kernels.emulated import api
from dsv32_fast.kernels.protocol import Kernels
from dsv32_fast.options import PRESETS
from dsv32_fast.path import PathConfig
from dsv32_fast.scale import admit, pooled_path
from dsv32_ref.config import Config

CONFIG = Config(
    vocab_size=64,
    dim=256,
    inter_dim=256,
    moe_inter_dim=128,
    n_layers=2,
    n_dense_layers=1,
    n_heads=16,
    q_lora_rank=128,
    index_n_heads=4,
    index_topk=128,
)
LENGTHS = [150, 5]
Change = Callable[[str, Tensor], Tensor]


def wrong(change: Change | None = None, fp8: bool = False, **kernels: Callable[..., Any]) -> list[str]:
    """What the tap complains about when kernels, or the values that it is shown, are changed."""
    used = cast(Kernels, SimpleNamespace(**{name: getattr(api, name) for name in api.__all__} | kernels))
    path = pooled_path(CONFIG, PRESETS["pr42982"], used, PathConfig(max_num_batched_tokens=256), fp8=fp8)
    state = path.new_state(256)
    admit(path, state, dict(enumerate(LENGTHS)))
    tap = Counting(path, LENGTHS)

    def shown(stage: str, layer: int, value: Tensor) -> Tensor:
        tap(stage, layer, change(stage, value) if change else value)
        return value

    path.decode(state, {0: [1], 1: [2]}, tap=shown)
    return tap.wrong


@pytest.mark.parametrize("fp8", [False, True])
def test_the_path_as_it_is(fp8: bool) -> None:
    assert wrong(fp8=fp8) == []


def test_other_experts() -> None:
    def route(logits: Tensor, bias: Tensor, weights: Tensor, ids: Tensor, *rest: Any) -> None:
        api.biased_grouped_topk(logits, bias, weights, ids, *rest)
        ids[0, 3] = (ids[0, 3] + 1) % 256

    assert wrong(biased_grouped_topk=route) == ["gate_idx of layer 1"]


def test_a_lost_key() -> None:
    def select(logits: Tensor, next_n: int, lens: Tensor, found: Tensor, *rest: Any, **named: Any) -> None:
        api.top_k_per_row_decode(logits, next_n, lens, found, *rest, **named)
        found[0, 0] = found[0, 1]

    assert wrong(top_k_per_row_decode=select) == ["index_topk of layer 0", "index_topk of layer 1"]


def test_not_finite() -> None:
    def moe(x: Tensor, *rest: Any, **named: Any) -> Tensor:
        return torch.full_like(x, torch.nan)

    assert wrong(fused_moe=moe) == ["ffn_out of layer 1", "final_norm of layer -1", "logits of layer -1"]


def test_logits_of_another_matrix() -> None:
    assert wrong(lambda stage, x: x.roll(1, -1) if stage == "gate_logits" else x) == [
        "gate_logits of layer 1",
        "gate_idx of layer 1",
    ]


def test_a_score_that_a_row_may_not_see() -> None:
    def change(stage: str, value: Tensor) -> Tensor:
        return value.masked_fill(value == -torch.inf, 0.0) if stage == "index_score" else value

    assert wrong(change) == ["index_score of layer 0", "index_score of layer 1"]
