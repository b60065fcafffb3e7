"""Faults of the lightning indexer: which pairs RoPE turns, norms, ReLU, heads, scales, windows of ragged rows.

Legend: T rows, J heads, I head width, U keys, L positions of a request.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsv32_fast.layers import rope_half_split, rope_interleaved
from dsv32_fuzz.faults.base import Call, Fault, Patch, after, around, before, value, writes
from dsv32_ref.quant import hadamard_matrix

_INDEXING = "dsv32_fast.indexing"
_EMULATED = "dsv32_fast.kernels.emulated.indexer"
BROKEN_FROM = 2048
"""First position at which the paged kernel of vLLM #39303 went wrong."""


def _turns_last(x: Tensor, table: Any, config: Any) -> Tensor:
    rest = x.shape[-1] - config.qk_rope_head_dim
    return torch.cat([x[..., :rest], rope_half_split(x[..., rest:], table)], -1)


def _no_norm_bias(call: Call) -> None:
    call["bias_N"] = torch.zeros_like(call["bias_N"])


def _mean_kept(call: Call, result: Tensor) -> Tensor:
    wide = call["x_TN"].float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + call["eps"])
    normed: Tensor = scaled * call["gain_N"] + call["bias_N"]
    return normed.to(result.dtype)


def _negative_too(run: Any, call: Call) -> Tensor:
    """Without ReLU a score is linear in the keys: relu(x) - relu(-x) = x."""
    return run(call) - run({**call, "q_THD": _negated(call["q_THD"])})  # type: ignore[no-any-return]


def _negated(q: Tensor) -> Tensor:
    """-q in fp8: the sign is the first bit of a byte."""
    raw: Tensor = q.contiguous().view(torch.uint8) ^ 0x80
    return raw.view(q.dtype)


def _first_head(call: Call) -> None:
    weights_TH = torch.zeros_like(call["weights_TH"])
    weights_TH[:, 0] = call["weights_TH"][:, 0]
    call["weights_TH"] = weights_TH


def _no_key_scales(call: Call) -> None:
    call["scales_U"] = torch.ones_like(call["scales_U"])


def _hadamard(call: Call) -> None:
    x = call["x"]
    width = x.shape[-1]
    call["x"] = (x.float() @ hadamard_matrix(width).float().to(x.device) * width**-0.5).to(x.dtype)


def _no_query_scale(call: Call) -> None:
    call["scale_TJ"] = torch.ones_like(call["scale_TJ"])


def _scaled_twice(call: Call, result: Tensor) -> Tensor:
    return result * float(call["config"].index_head_dim ** -0.5)


def _length_for_end(call: Call) -> None:
    call["cu_ends"] = call["cu_ends"] - call["cu_starts"]


def _broken_tail(call: Call) -> None:
    out, n = call["out_logits"], call["q_fp8"].shape[1]
    for request, context in enumerate(call["context_lens"].tolist()):
        rows = slice(request * n, (request + 1) * n)
        tail = out[rows, BROKEN_FROM : max(context, BROKEN_FROM)]
        tail.copy_(tail.flip(1).clone())


def _gather_skipped(original: Any) -> Any:
    """Only the first gather into a buffer of some length copies; the next one finds a new, empty buffer."""
    seen: set[int] = set()

    def change(run: Any, call: Call) -> None:
        table = call["block_table"]
        first_page = int(table[0, 0]) if table.numel() else -1
        if first_page in seen:
            call["dst_k"].view(torch.uint8).zero_()
            call["dst_scale"].zero_()
        else:
            run(call)
        seen.add(first_page)

    return around(change)(original)


def _indexing(name: str, story: str, reference: str, attribute: str, make: Any, bugs: tuple[str, ...] = ()) -> Fault:
    patch = Patch(where=_INDEXING, name=attribute, make=make)
    return Fault(name=name, area="indexer", story=story, reference=reference, bugs=bugs, patches=(patch,))


def _logits(name: str, story: str, reference: str, make: Any, bugs: tuple[str, ...] = ()) -> Fault:
    patch = Patch(where=_EMULATED, name="_logits", make=make)
    return Fault(name=name, area="indexer", story=story, reference=reference, bugs=bugs, patches=(patch,))


FAULTS: tuple[Fault, ...] = (
    _indexing(
        "indexer_rope_interleaved",
        "the indexer turns interleaved pairs, as MLA does; its own RoPE is half-split",
        "vLLM #28968; sglang #13530, #30111; vllm-ascend #4641, #7341",
        "rope_half_split",
        value(rope_interleaved),
        ("Z59",),
    ),
    _indexing(
        "indexer_turns_last",
        "the indexer turns the last part of each head, as MLA does, instead of the first",
        "sglang #13531; DeepSeek's inference code of November 2025",
        "_turn_first",
        value(_turns_last),
        ("Z59",),
    ),
    _indexing(
        "indexer_no_norm_bias",
        "the bias of the key's LayerNorm is left out",
        "DeepSeek's inference code: k_norm is a LayerNorm with bias",
        "layer_norm",
        before(_no_norm_bias),
    ),
    _indexing(
        "indexer_mean_kept",
        "the key's LayerNorm does not subtract the mean",
        "DeepSeek's inference code: k_norm is a LayerNorm, not an RMS norm",
        "layer_norm",
        after(_mean_kept),
    ),
    _logits(
        "indexer_no_relu",
        "negative products count: the ReLU is missing",
        "mlx-lm #531",
        around(_negative_too),
        ("Z54",),
    ),
    _logits(
        "indexer_one_head",
        "the heads are not summed: only the first one counts",
        "mlx-lm #531",
        before(_first_head),
        ("Z54",),
    ),
    _logits(
        "indexer_no_key_scales",
        "the scales of the fp8 keys are not applied",
        "vLLM #46856; DeepGEMM's fp8_mqa_logits takes one scale per key",
        before(_no_key_scales),
        ("Z56",),
    ),
    _indexing(
        "indexer_hadamard_query",
        "the queries are rotated by a Hadamard matrix and the keys are not",
        "DeepSeek's inference code: both sides are rotated, or (vLLM) none",
        "quantise_ue8m0",
        before(_hadamard),
    ),
    _indexing(
        "indexer_no_query_scale",
        "the scale of the fp8 queries does not reach the head weights",
        "sglang #13459; vLLM folds the query scale into the weights",
        "head_weights",
        before(_no_query_scale),
        ("Z54",),
    ),
    _indexing(
        "indexer_scaled_twice",
        "the factor I^-0.5 is applied twice; the order of the keys hides it",
        "DeepSeek-V3.2 report, equation 1",
        "head_weights",
        after(_scaled_twice),
    ),
    Fault(
        name="indexer_length_for_end",
        area="indexer",
        story="a ragged row's end is counted from its start, not from the first key",
        reference="sglang #12583",
        bugs=("Z54",),
        kernels={"fp8_mqa_logits": before(_length_for_end)},
    ),
    Fault(
        name="indexer_broken_from_2049",
        area="indexer",
        story="the paged kernel is right for the first 2048 positions and mixes up those behind",
        reference="vLLM #39303, #39509",
        bugs=("Z50",),
        kernels={"deepgemm_fp8_paged_mqa_logits": writes(_broken_tail)},
    ),
    Fault(
        name="indexer_gather_skipped",
        area="indexer",
        story="later chunks of a prompt skip the gather although the buffer behind it is a new one",
        reference="vLLM #40018, #46478",
        bugs=("Z55",),
        kernels={"cp_gather_indexer_k_quant_cache": _gather_skipped},
    ),
)
