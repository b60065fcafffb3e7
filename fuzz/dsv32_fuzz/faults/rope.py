"""Faults of rotary positions and of the softmax scale.

A layout that is consistently wrong keeps every relative property; only a reference sees it.
Legend: T rows, H heads, R rotated width, P pairs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsv32_fast.layers import rope_half_split
from dsv32_fuzz.faults.base import Call, Fault, Patch, around, before, returns, value

_ATTENTION = "dsv32_fast.attention"


def _queries_half_split(run: Any, call: Call) -> Tensor:
    """Queries [T, H, R] are turned as half-split pairs, keys [T, R] as they should be."""
    half: Tensor = rope_half_split(call["x"], call["table"]) if call["x"].dim() == 3 else run(call)
    return half


def _keys_not_turned(run: Any, call: Call) -> Tensor:
    turned: Tensor = call["x"] if call["x"].dim() == 2 else run(call)
    return turned


def _next_position(call: Call) -> None:
    call["positions_T"] = call["positions_T"] + 1


def _row_behind(call: Call) -> None:
    call["table"] = tuple(part.roll(1, 0) for part in call["table"])


def _no_ramp(result: Tensor) -> Tensor:
    return torch.zeros_like(result)


def _bf16_angles(run: Any, call: Call) -> tuple[Tensor, Tensor]:
    """The frequencies are the angles of position 1, all below pi."""
    cos_1P, sin_1P = run({**call, "positions_T": torch.ones_like(call["positions_T"][:1])})
    angle_TP = (call["positions_T"].float()[:, None] * torch.atan2(sin_1P, cos_1P)).bfloat16().float()
    return angle_TP.cos(), angle_TP.sin()


def _no_mscale(call: Call) -> None:
    call["config"] = call["config"].replace(mscale=1e-12)


def _kernel_default(call: Call) -> None:
    call["sm_scale"] = None


def _backwards(result: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return result[0], -result[1]


def _patched(
    name: str, story: str, reference: str, where: str, attribute: str, make: Any, bugs: tuple[str, ...] = ()
) -> Fault:
    patch = Patch(where=where, name=attribute, make=make)
    return Fault(name=name, area="rope", story=story, reference=reference, bugs=bugs, patches=(patch,))


FAULTS: tuple[Fault, ...] = (
    _patched(
        "rope_mla_half_split",
        "MLA turns half-split pairs on both sides; its own RoPE is interleaved",
        "sglang #30342; transformers #46842",
        _ATTENTION,
        "rope_interleaved",
        value(rope_half_split),
        ("Z59",),
    ),
    _patched(
        "rope_layouts_mixed",
        "MLA's queries are turned as half-split pairs, its keys as interleaved ones",
        "vLLM #28968; vllm-ascend #5701",
        _ATTENTION,
        "rope_interleaved",
        around(_queries_half_split),
        ("Z59",),
    ),
    _patched(
        "rope_key_not_turned",
        "the turned key is a new tensor that nobody takes, so the key is cached as it was",
        "vLLM #43781",
        _ATTENTION,
        "rope_interleaved",
        around(_keys_not_turned),
        ("Z57",),
    ),
    _patched(
        "rope_next_position",
        "every token is turned at the position behind its own; all distances stay right",
        "vllm-ascend #17170 (positions of another step)",
        "dsv32_fast.path",
        "rope_table",
        before(_next_position),
    ),
    _patched(
        "rope_row_behind",
        "a query is turned at the position of the row before it",
        "vllm-ascend #17170 (positions of another step)",
        _ATTENTION,
        "absorbed_queries",
        before(_row_behind),
    ),
    _patched(
        "rope_no_yarn",
        "YaRN's frequencies are not interpolated",
        "DeepSeek-V3 report, section 4.3: YaRN, factor 40",
        "dsv32_fast.layers",
        "_ramp",
        returns(_no_ramp),
    ),
    _patched(
        "rope_bf16_angles",
        "angles are computed in bf16, so far positions are turned at random",
        "DeepSeek's inference code: frequencies and angles in fp32",
        "dsv32_fast.path",
        "rope_table",
        around(_bf16_angles),
    ),
    _patched(
        "rope_backwards",
        "all pairs are turned the other way, on both sides",
        "sglang #30111 (a fused kernel with another convention)",
        "dsv32_fast.path",
        "rope_table",
        returns(_backwards),
        ("Z59",),
    ),
    _patched(
        "scale_no_mscale",
        "the softmax scale lacks YaRN's factor",
        "DeepSeek's inference code: softmax_scale x mscale^2",
        _ATTENTION,
        "decode",
        before(_no_mscale),
    ),
    Fault(
        name="scale_kernel_default",
        area="rope",
        story="the softmax scale does not reach the kernel, which takes 576^-0.5",
        reference="AITER mla_decode_fwd: sm_scale defaults to the width of the latent",
        kernels={"mla_decode_fwd": before(_kernel_default)},
    ),
)
