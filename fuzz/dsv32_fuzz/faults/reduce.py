"""Faults of split rows: partials that nobody wrote, weights of the merge, the log-sum-exp.

Legend: M rows to merge, S partials, H heads, C latent dim, N rows x heads, L keys.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dsv32_fuzz.faults.base import Call, Fault, Patch, after, around, returns, writes

_REDUCE = "dsv32_fast.kernels.emulated.reduce"
_PIECES = "dsv32_fast.kernels.emulated.pieces"
_SPLITS = "dsv32_fast.kernels.emulated.splitkv"
_DECODE = "dsv32_fast.kernels.emulated.attention"


def _lse_in_base_2(result: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    output, lse = result
    return output, lse / math.log(2)


def _unsplit_lse_missing(call: Call, result: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
    logits, lse_RH = result
    if lse_RH is not None and call["reduce_indptr"] is not None:
        parts = call["reduce_indptr"].diff()[: len(lse_RH)]
        lse_RH[: len(parts)][parts.to(lse_RH.device) <= 1] = math.nan
    return logits, lse_RH


def _no_guard(_original: Any) -> Any:
    def total_lse(max_MH: Tensor, sum_MH: Tensor) -> Tensor:
        return max_MH + torch.log(sum_MH)

    return total_lse


def _averaged(call: Call, result: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return call["outputs_MSHC"].mean(1), result[1]


def _last_lost(run: Any, call: Call) -> Any:
    return run({"outputs_MSHC": call["outputs_MSHC"][:, :-1], "lses_MSH": call["lses_MSH"][:, :-1]})


def _all_splits(result: Any) -> Any:
    return np.where(result > 0, result.max(initial=0), 0)


def _never_written(call: Call) -> None:
    """The log-sum-exp of the last piece of the call stays NaN."""
    if call["name"] == "partial_lse" and call["chosen"].any():
        call["target"][int(call["first"][call["chosen"]].max())] = math.nan


def _in_bf16(run: Any, call: Call) -> Any:
    return run({**call, "outputs_MSHC": call["outputs_MSHC"].bfloat16().float()})


def _empty_counts(run: Any, call: Call) -> Any:
    """A row that sees no key gets the weight of exp(0)."""
    lses_MSH = call["lses_MSH"]
    return run({**call, "lses_MSH": torch.where(lses_MSH == -math.inf, 0.0, lses_MSH)})


def _by_arrival(original: Any) -> Any:
    """Partials are added up in an order that moves from call to call."""
    calls = 0

    def change(run: Any, call: Call) -> Any:
        nonlocal calls
        calls += 1
        turned = {name: call[name].roll(calls % call[name].shape[1], 1) for name in ("outputs_MSHC", "lses_MSH")}
        return run({**call, **turned})

    return around(change)(original)


def _merges(make: Any) -> tuple[Patch, ...]:
    """Both ways of merging; split rows of the other kernel come by the first, under its own name."""
    return (
        Patch(where=_REDUCE, name="merge_online", make=make),
        Patch(where=_REDUCE, name="merge_two_pass", make=make),
        Patch(where=_SPLITS, name="merge_online", make=make),
    )


FAULTS: tuple[Fault, ...] = (
    Fault(
        name="reduce_lse_base_2",
        area="reduce",
        story="partials store their log-sum-exp in base 2, the merge takes it for base e",
        reference="AITER mla_decode_fwd: natural logarithm",
        patches=(Patch(where=_PIECES, name="_softmax_times_values", make=returns(_lse_in_base_2)),),
    ),
    Fault(
        name="reduce_unsplit_lse",
        area="reduce",
        story="the final log-sum-exp of a row that was not split is never written",
        reference="AITER #3606",
        bugs=("Z19",),
        kernels={"mla_decode_fwd": after(_unsplit_lse_missing)},
    ),
    Fault(
        name="reduce_empty_tile",
        area="reduce",
        story="a tile of which every partial is empty gets NaN instead of the log-sum-exp that marks it",
        reference="AITER #4420",
        bugs=("Z12",),
        patches=(Patch(where=_REDUCE, name="_total_lse", make=_no_guard),),
    ),
    Fault(
        name="reduce_averages",
        area="reduce",
        story="partials are averaged, whatever their log-sum-exp",
        reference="AITER mla_reduce_v1: weights are exp(lse - total)",
        patches=_merges(after(_averaged)),
    ),
    Fault(
        name="reduce_last_lost",
        area="reduce",
        story="a row of four or more partials loses the last one (a split count that is one too small)",
        reference="AITER #3955, #4076",
        bugs=("Z10",),
        patches=(Patch(where=_REDUCE, name="merge_two_pass", make=around(_last_lost)),),
    ),
    Fault(
        name="reduce_stale_split_count",
        area="reduce",
        story="every row merges as many splits as the longest one, so short rows read scratch that nobody wrote",
        reference="AITER #4129, #4350",
        bugs=("Z11", "Z14"),
        patches=(Patch(where=_SPLITS, name="_splits_per_row", make=returns(_all_splits)),),
    ),
    Fault(
        name="reduce_unwritten_partial",
        area="reduce",
        story="one partial's log-sum-exp is never written and poisons its row",
        reference="AITER #4420, #4350",
        bugs=("Z12", "Z14"),
        patches=(Patch(where=_DECODE, name="_scatter", make=writes(_never_written)),),
    ),
    Fault(
        name="reduce_bf16_partials",
        area="reduce",
        story="partial outputs are stored in bf16, so a split row is rounded twice",
        reference="AITER mla_decode_fwd: fp32 partials; AITER #4364 (splits change bits)",
        bugs=("Z15",),
        patches=_merges(around(_in_bf16)),
    ),
    Fault(
        name="reduce_empty_counts",
        area="reduce",
        story="an empty partial takes part with the weight exp(0)",
        reference="AITER #4420",
        bugs=("Z12",),
        patches=_merges(around(_empty_counts)),
    ),
    Fault(
        name="reduce_by_arrival",
        area="reduce",
        story="partials are merged in the order in which they arrive, so equal calls give other bits",
        reference="sglang #40578 (split-K partials in no fixed order); AITER mla_reduce_v1: in the order of the map",
        bugs=("Z46",),
        patches=_merges(_by_arrival),
    ),
)
