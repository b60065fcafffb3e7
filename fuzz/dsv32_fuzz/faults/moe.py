"""Faults of the experts: the shared one, the routed scale, layouts of weights.

Legend: T tokens, E experts, I inner width, M model width.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from dsv32_fuzz.faults.base import Call, Fault, Patch, around, before, writes
from dsv32_fuzz.faults.router import both

_EXPERTS = "dsv32_fast.experts"


def _routed_only(run: Any, call: Call) -> Tensor:
    routed: Tensor = run({**call, "w": dataclasses.replace(call["w"], shared=None)})
    return routed


def _shared_divided(run: Any, call: Call) -> Tensor:
    """The sum is scaled back by the routed factor, shared expert included: 1 / 2.5 of it is left."""
    routed_TM: Tensor = _routed_only(run, call)
    all_TM: Tensor = run(call)
    less_TM: Tensor = routed_TM.float() + 0.4 * (all_TM.float() - routed_TM.float())
    return less_TM.to(all_TM.dtype)


def _unscaled(call: Call) -> None:
    call["topk_weights"].div_(call["routed_scaling_factor"])


def _up_before_gate(call: Call) -> None:
    call["w1"] = torch.cat(call["w1"].chunk(2, 1)[::-1], 1)


def _tiles_transposed(call: Call) -> None:
    """The kernel un-shuffles 16 x 16 tiles that nobody shuffled."""
    w2 = call["w2"]
    experts, rows, columns = w2.shape
    if rows % 16 or columns % 16:
        raise ValueError(f"w2 is {rows} x {columns}; this fault needs whole tiles of 16")
    raw = w2.view(torch.uint8) if w2.dtype.itemsize == 1 else w2
    tiles = raw.view(experts, rows // 16, 16, columns // 16, 16).transpose(2, 3)
    call["w2"] = tiles.contiguous().view(raw.shape).view(w2.dtype)


def _one_short(call: Call) -> None:
    call["topk_ids"], call["topk_weight"] = call["topk_ids"][:, :-1], call["topk_weight"][:, :-1]


def _next_expert(call: Call) -> None:
    call["topk_ids"] = (call["topk_ids"] + 1) % call["w1"].shape[0]


FAULTS: tuple[Fault, ...] = (
    Fault(
        name="moe_no_shared",
        area="moe",
        story="the shared expert is left out",
        reference="sglang #28237; ATOM #1379 (a top-k without the shared expert's id)",
        patches=(Patch(where=_EXPERTS, name="mixture", make=around(_routed_only)),),
    ),
    Fault(
        name="moe_shared_divided",
        area="moe",
        story="the shared expert counts 1 / 2.5, the routed scale applied to it as well",
        reference="sglang #28237",
        patches=(Patch(where=_EXPERTS, name="mixture", make=around(_shared_divided)),),
    ),
    Fault(
        name="moe_no_routed_scale",
        area="moe",
        story="the routed scaling factor is never applied",
        reference="AITER moe_fused_gate ignores it",
        bugs=("Z45",),
        options="baseline",
        kernels=both(writes(_unscaled)),
    ),
    Fault(
        name="moe_up_before_gate",
        area="moe",
        story="gate and up are stacked in the other order",
        reference="AITER fused_moe: gate rows first",
        kernels={"fused_moe": before(_up_before_gate)},
    ),
    Fault(
        name="moe_tiles_transposed",
        area="moe",
        story="the kernel expects shuffled weights and gets natural ones",
        reference="sglang #28471",
        bugs=("Z68",),
        kernels={"fused_moe": before(_tiles_transposed)},
    ),
    Fault(
        name="moe_one_expert_short",
        area="moe",
        story="a slot is kept for the shared expert among the top-k, so one routed expert is lost",
        reference="ATOM #1379",
        kernels={"fused_moe": before(_one_short)},
    ),
    Fault(
        name="moe_next_expert",
        area="moe",
        story="expert ids are off by one, as with a wrong first local expert",
        reference="AITER fused_moe: expert_mask numbers the local experts",
        kernels={"fused_moe": before(_next_expert)},
    ),
)
