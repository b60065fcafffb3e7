"""Faults of the router: precision of logits and bias, limits by group, weights of the chosen, ties and NaN.

Legend: T tokens, E experts, G groups, K chosen experts, M model width.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from dsv32_fuzz.faults.base import Call, Fault, Make, Patch, after, around, before, returns, value, writes

_ROUTER = "dsv32_fast.router"
_EMULATED = "dsv32_fast.kernels.emulated.router"


def bf16(x: Tensor) -> Tensor:
    """The values of bf16 in the dtype of `x`."""
    return x.bfloat16().to(x.dtype)


def both(make: Make) -> dict[str, Make]:
    """The same change of AITER's router under both of its names."""
    return {"biased_grouped_topk": make, "biased_grouped_topk_hip": make}


def _kept(call: Call) -> str:
    return "topk_group" if "topk_group" in call else "topk_grp"


def _scores(call: Call) -> tuple[Tensor, Tensor]:
    """Scores and biased scores [T, E], fp32."""
    scores_TE = call["gating_output"].float().sigmoid()
    return scores_TE, scores_TE + call["correction_bias"].float()


def _round_logits(call: Call) -> None:
    call["gating_output"] = bf16(call["gating_output"])


def _round_bias(call: Call) -> None:
    call["correction_bias"] = bf16(call["correction_bias"])


def _round_both(call: Call) -> None:
    _round_logits(call)
    _round_bias(call)


def _round_large_batches(call: Call) -> None:
    if len(call["gating_output"]) > 8:
        _round_logits(call)


def _stored_in_bf16(logits_TE: Tensor) -> Tensor:
    return bf16(logits_TE)


def _bf16_partials(original: Any) -> Any:
    """Four partial sums over the width, added up in bf16 in an order that moves from call to call."""
    calls = 0

    def change(run: Any, call: Call) -> Tensor:
        nonlocal calls
        calls += 1
        x_TM, weight_EM = call["x_TM"].float(), call["gate"].weight.float()
        parts = [x @ w.T for x, w in zip(x_TM.tensor_split(4, 1), weight_EM.tensor_split(4, 1), strict=True)]
        total_TE = torch.zeros_like(parts[0]).bfloat16()
        for number in range(4):
            total_TE = total_TE + parts[(number + calls) % 4].bfloat16()
        return total_TE.to(run(call).dtype)

    return around(change)(original)


def _masked_zero(call: Call) -> None:
    """The choice again, experts outside the kept groups counting as 0."""
    scores_TE, biased_TE = _scores(call)
    grouped_TGe = biased_TE.unflatten(1, (call["num_expert_group"], -1))  # type: ignore[no-untyped-call]
    group_TG = grouped_TGe.topk(min(2, grouped_TGe.shape[-1]), -1).values.sum(-1)
    dropped_TG = torch.ones_like(group_TG, dtype=torch.bool)
    dropped_TG.scatter_(1, group_TG.topk(call[_kept(call)], 1).indices, False)
    ids_TK = grouped_TGe.masked_fill(dropped_TG[..., None], 0.0).flatten(1).topk(call["topk_ids"].shape[1], 1).indices
    _write(call, ids_TK, scores_TE.gather(1, ids_TK))


def _write(call: Call, ids_TK: Tensor, weights_TK: Tensor) -> None:
    """Ids and renormalised weights in the place of the kernel's, where the row has no NaN."""
    sound_T1 = ~call["gating_output"].isnan().any(1, keepdim=True)
    weights_TK = weights_TK / weights_TK.sum(1, keepdim=True) * call["routed_scaling_factor"]
    call["topk_ids"].copy_(torch.where(sound_T1, ids_TK.int(), call["topk_ids"]))
    call["topk_weights"].copy_(torch.where(sound_T1, weights_TK, call["topk_weights"]))


def _best_of_group(biased_TE: Tensor, groups: int) -> Tensor:
    best_TG: Tensor = biased_TE.view(len(biased_TE), groups, -1).amax(2)
    return best_TG


def _bf16_groups(biased_TE: Tensor, groups: int) -> Tensor:
    best = biased_TE.bfloat16().view(len(biased_TE), groups, -1).topk(2, dim=2).values
    total_TG: Tensor = best[..., 0] + best[..., 1]
    return total_TG.float()


def _biased_weights(call: Call) -> None:
    _write(call, call["topk_ids"], _scores(call)[1].gather(1, call["topk_ids"].long()))


def _not_renormalised(call: Call) -> None:
    weights_TK = _scores(call)[0].gather(1, call["topk_ids"].long())
    call["topk_weights"].copy_(weights_TK * call["routed_scaling_factor"])


def _scaled_twice(call: Call) -> None:
    call["topk_weights"].mul_(call["routed_scaling_factor"])


def _nan_row(call: Call) -> None:
    broken_T1 = call["gating_output"].isnan().any(1, keepdim=True)
    call["topk_ids"].masked_fill_(broken_T1, 0)
    call["topk_weights"].masked_fill_(broken_T1, math.nan)


def _all_groups(call: Call) -> None:
    call[_kept(call)] = call["num_expert_group"]


def _weights_resorted(call: Call) -> None:
    call["topk_weights"].copy_(call["topk_weights"].sort(1, descending=True).values)


def _ties_by_arrival(original: Any) -> Any:
    """Every second call prefers the last of the experts that tie at the cut."""
    calls = 0

    def change(call: Call, result: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls % 2 == 0:
            _take_last_of_ties(call)
        return result

    return after(change)(original)


def _take_last_of_ties(call: Call) -> None:
    _, biased_TE = _scores(call)
    ids_TK = call["topk_ids"].long()
    values_TK = biased_TE.gather(1, ids_TK)
    worst_T1 = values_TK.argmin(1, keepdim=True)
    size = biased_TE.shape[1] // call["num_expert_group"]
    group_TE = torch.arange(biased_TE.shape[1], device=ids_TK.device) // size
    tied_TE = (biased_TE == values_TK.gather(1, worst_T1)) & torch.isin(group_TE, ids_TK // size)
    tied_TE.scatter_(1, ids_TK, False)
    last_T1 = tied_TE.shape[1] - 1 - tied_TE.flip(1).int().argmax(1, keepdim=True)
    chosen_T1 = torch.where(tied_TE.any(1, keepdim=True), last_T1, ids_TK.gather(1, worst_T1))
    call["topk_ids"].scatter_(1, worst_T1, chosen_T1.int())


def _own_part_first(_run: Any, call: Call) -> Tensor:
    """The sum in fp32, beginning with the rank's own part."""
    ranks = call["communicator"]
    parts = ranks.all_gather(call["tensor"])
    total = torch.zeros_like(parts[0], dtype=torch.float32)
    for part in (*parts[ranks.rank :], *parts[: ranks.rank]):
        total = total + part.float()
    return total.to(parts[0].dtype)


def _router(
    name: str, story: str, reference: str, make: Make, bugs: tuple[str, ...] = (), options: str = "baseline"
) -> Fault:
    return Fault(
        name=name, area="router", story=story, reference=reference, bugs=bugs, options=options, kernels=both(make)
    )


def _groups(name: str, story: str, reference: str, change: Any, bugs: tuple[str, ...]) -> Fault:
    patch = Patch(where=_EMULATED, name="_group_scores", make=value(change))
    return Fault(
        name=name, area="router", story=story, reference=reference, bugs=bugs, options="baseline", patches=(patch,)
    )


FAULTS: tuple[Fault, ...] = (
    Fault(
        name="router_bf16_logits",
        area="router",
        story="the gate's GEMM stores bf16 although fp32 logits were asked for",
        reference="vLLM #42982; sglang #29783, #34857, #33764, #38695",
        bugs=("Z37",),
        options="baseline",
        patches=(Patch(where=_ROUTER, name="gate_logits", make=returns(_stored_in_bf16)),),
    ),
    Fault(
        name="router_bf16_bias_loaded",
        area="router",
        story="the loader stores the correction bias in bf16 although fp32 was asked for; no later cast restores it",
        reference="vLLM #41760, #41835, #23640; transformers #42580",
        bugs=("Z36", "Z39"),
        options="baseline",
        patches=(
            Patch(
                where="dsv32_fast.packing", name="_TORCH", make=value({"fp32": torch.bfloat16, "bf16": torch.bfloat16})
            ),
        ),
    ),
    _router(
        "router_bf16_bias",
        "the kernel reads the correction bias in bf16: 6.99 and 7.01 are the same",
        "sglang #37133, #31213",
        before(_round_bias),
        ("Z36",),
    ),
    _router(
        "router_bf16_both",
        "the kernel reads logits and bias in bf16",
        "vLLM #42982 (both precisions drop)",
        before(_round_both),
        ("Z36", "Z37"),
    ),
    _router(
        "router_batch_precision",
        "up to 8 rows the logits are exact, from 9 rows on they are rounded to bf16",
        "vllm-backport #65; vLLM #54048",
        before(_round_large_batches),
        ("Z38",),
    ),
    Fault(
        name="router_bf16_partials",
        area="router",
        story="the gate's GEMM adds split-K partials in bf16, in the order in which they arrive",
        reference="sglang #40578",
        bugs=("Z46",),
        options="baseline",
        patches=(Patch(where=_ROUTER, name="gate_logits", make=_bf16_partials),),
    ),
    _router(
        "router_masked_zero",
        "experts outside the kept groups count as 0 instead of -inf, and win where biased scores are negative",
        "vLLM #13474; DeepSeek-V3 #741",
        writes(_masked_zero),
        ("Z42",),
    ),
    _groups(
        "router_group_max",
        "a group is worth its best expert, not the sum of its two best",
        "vLLM #13474",
        _best_of_group,
        ("Z42",),
    ),
    _groups("router_bf16_groups", "group scores are added up in bf16", "FlagGems #4245", _bf16_groups, ("Z43",)),
    _router(
        "router_no_group_limit",
        "the limit to the best groups is not applied",
        "DeepSeek-V3 report, section 2.1.2: node-limited routing",
        before(_all_groups),
    ),
    _router(
        "router_biased_weights",
        "the biased score becomes the weight, not only the choice",
        "vLLM #12002; transformers #41647",
        writes(_biased_weights),
        ("Z41",),
    ),
    _router(
        "router_not_renormalised",
        "the weights of the chosen experts do not sum to the scaling factor",
        "DeepSeek-V3 report, section 2.1.2: gating values are normalised among the chosen",
        writes(_not_renormalised),
    ),
    _router(
        "router_scaled_twice",
        "the routed scaling factor is applied by the kernel and again behind it",
        "vLLM #42982's wrapper passes the factor to the kernel; AITER applies it in some kernels only",
        writes(_scaled_twice),
    ),
    _router(
        "router_nan_row",
        "a row of NaN, as padding may hold, gives expert 0 eight times with NaN weights",
        "vLLM #39391",
        writes(_nan_row),
        ("Z44",),
    ),
    _router(
        "router_ties_by_arrival",
        "experts that tie at the cut are taken as they arrive, so equal inputs give two choices",
        "AITER #4415; sglang #31115",
        _ties_by_arrival,
        ("Z52",),
        "pr47766",
    ),
    _router(
        "router_weights_resorted",
        "the weights are sorted and the ids are not",
        "AITER biased_grouped_topk: ids and weights in one order",
        writes(_weights_resorted),
        (),
        "pr47766",
    ),
    Fault(
        name="router_own_part_first",
        area="router",
        story="each tensor-parallel rank adds up the partial sums from its own on, so the ranks route by other bits",
        reference="AITER #4415: every rank chooses by itself, so it must choose from the same bits as all others",
        bugs=("Z52",),
        patches=(Patch(where="dsv32_fast.parallel.communicator", name="all_sum", make=around(_own_part_first)),),
    ),
)
