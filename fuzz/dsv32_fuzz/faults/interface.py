"""Faults of the interface of kernels: calls on no row and on one, and arguments that nobody refuses.

Legend: T tokens, K chosen experts or entries per row.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from dsv32_fuzz.faults.base import Call, Fault, Make, Patch, around, before, value
from dsv32_fuzz.faults.router import both

_ROUTER = "dsv32_fast.kernels.emulated.router"


def _refuses_nothing(call: Call) -> None:
    if not len(call["hidden_states"]):
        raise RuntimeError("invalid configuration argument")


def _at_least_one_row(run: Any, call: Call) -> Any:
    x = call["x"]
    return run({**call, "x": x if len(x) else x.new_zeros(1, *x.shape[1:])})


def _single_row_unwritten(run: Any, call: Call) -> Tensor:
    out: Tensor = run(call)
    return torch.full_like(out, math.nan) if len(out) == 1 else out


def _low_halves(run: Any, call: Call) -> None:
    """32-bit ids through the address of the buffer, whatever its type: of 64-bit entries the first half is filled."""
    ids_TK = call["topk_ids"]
    if ids_TK.dtype != torch.int64:
        run(call)
        return
    written_TK = torch.empty(ids_TK.shape, dtype=torch.int32, device=ids_TK.device)
    run({**call, "topk_ids": written_TK})
    ids_TK.view(torch.int32).view(-1)[: ids_TK.numel()] = written_TK.view(-1)


def _bias_padded(bias: Tensor, gating: Tensor) -> Tensor:
    """What lies behind a bias that is too short reads as zeros."""
    stored, needed = bias.contiguous().view(torch.uint8), gating.shape[1] * gating.dtype.itemsize
    behind = stored.new_zeros(max(0, needed - len(stored)))
    return torch.cat([stored, behind])[:needed].view(gating.dtype).float()


def _last_expert(call: Call) -> None:
    if call["expert_mask"] is None:
        call["topk_ids"] = call["topk_ids"].clamp(0, len(call["w1"]) - 1)


def _drops_far_slots(call: Call) -> None:
    slots, cache = call["slot_mapping"], call["kv_cache"]
    call["slot_mapping"] = torch.where(slots < cache.shape[0] * cache.shape[1], slots, -1)


def _legal_groups(call: Call) -> None:
    name = "topk_group" if "topk_group" in call else "topk_grp"
    call[name] = min(max(call[name], 1), call["num_expert_group"])


def _first_columns(run: Any, call: Call) -> None:
    found_TK = call["indices"]
    if found_TK.shape[1] >= call["k"]:
        run(call)
        return
    all_TK = found_TK.new_empty(len(found_TK), call["k"])
    run({**call, "indices": all_TK})
    found_TK.copy_(all_TK[:, : found_TK.shape[1]])


def _kernel(name: str, story: str, reference: str, make: Make, *kernels: str, bugs: tuple[str, ...] = ()) -> Fault:
    return Fault(
        name=name,
        area="interface",
        story=story,
        reference=reference,
        bugs=bugs,
        kernels=dict.fromkeys(kernels, make),
    )


FAULTS: tuple[Fault, ...] = (
    _kernel(
        "interface_no_row_raises",
        "the experts' kernel is launched on a grid of no blocks when a rank is idle, and fails",
        "sglang #38773, #22455; tokenspeed #415",
        before(_refuses_nothing),
        "fused_moe",
    ),
    _kernel(
        "interface_no_row_is_one",
        "no row counts as one, so an idle rank gets a row that nobody sent",
        "ROCm/Megatron-LM #155",
        around(_at_least_one_row),
        "per_group_quant_hip",
        "per_token_quant_hip",
    ),
    _kernel(
        "interface_single_row_unwritten",
        "the experts' kernel is made for tiles of rows and leaves a single one as it was allocated",
        "AITER #4041",
        around(_single_row_unwritten),
        "fused_moe",
    ),
    _kernel(
        "interface_wide_ids",
        "ids of 32 bits are written into a buffer of 64-bit ids, and nobody looks at its type",
        "AITER #5255; vLLM #55147",
        around(_low_halves),
        *both(around(_low_halves)),
    ),
    Fault(
        name="interface_short_bias",
        area="interface",
        story="the router reads past a bias of another type than the logits'",
        reference="AITER #4845; vLLM #42982 (the kernel dispatches on the type of the logits)",
        patches=(Patch(where=_ROUTER, name="_bias_as_read", make=value(_bias_padded)),),
    ),
    _kernel(
        "interface_expert_beyond",
        "an expert id without a weight runs the nearest expert instead of being refused",
        "vLLM #50845, #48371; AITER #4636",
        before(_last_expert),
        "fused_moe",
    ),
    _kernel(
        "interface_slot_beyond",
        "a slot beyond the cache is skipped without a word, like one of padding",
        "flashinfer #3647 (review); b12x #40",
        before(_drops_far_slots),
        "concat_and_cache_mla",
        "indexer_k_quant_and_cache",
    ),
    _kernel(
        "interface_kept_groups",
        "a number of kept groups that cannot be is taken for the nearest that can",
        "AITER biased_grouped_topk: 1 to num_expert_group groups",
        before(_legal_groups),
        *both(before(_legal_groups)),
    ),
    _kernel(
        "interface_narrow_indices",
        "a result of fewer than k columns gets the first of them instead of an error",
        "TensorRT-LLM #8882 (review)",
        around(_first_columns),
        "top_k_per_row_decode",
        "top_k_per_row_prefill",
        bugs=("Z53",),
    ),
)
