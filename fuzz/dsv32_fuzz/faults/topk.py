"""Faults of the indexer's top-k: ties, sentinels, short rows, index bases, order across ranks.

Legend: M rows, N columns, K entries per row.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from dsv32_fast.kernels.emulated.topk import arrival_order
from dsv32_fuzz.faults.base import Call, Fault, Make, after, around, before, writes


def _both(make: Make) -> dict[str, Make]:
    return {"top_k_per_row_decode": make, "top_k_per_row_prefill": make}


def _bounds(call: Call) -> tuple[Tensor, Tensor]:
    """First column and end of each row, int64 [M]."""
    rows_M = torch.arange(call["numRows"])
    if "rowStarts" in call:
        return call["rowStarts"].cpu().long()[rows_M], call["rowEnds"].cpu().long()[rows_M]
    next_n = call["next_n"]
    return torch.zeros_like(rows_M), call["seqLens"].cpu().long()[rows_M // next_n] - next_n + rows_M % next_n + 1


def _picked(call: Call, found_MK: Tensor) -> Tensor:
    """The logits of the entries; NaN where there is none."""
    flat: Tensor = call["logits"].as_strided((call["numRows"], call["logits"].shape[1]), (call["stride0"], 1)).cpu()
    picked_MK = flat.gather(1, found_MK.clamp_min(0).clamp_max(flat.shape[1] - 1))
    return picked_MK.masked_fill(found_MK < 0, math.nan)


def _entries(call: Call) -> Tensor:
    found_MK: Tensor = call["indices"][: call["numRows"]].cpu().long()
    return found_MK


def _store(call: Call, found_MK: Tensor) -> None:
    call["indices"][: call["numRows"]] = found_MK.to(call["indices"])


def _tie_cap(call: Call) -> None:
    """Of the entries equal to the smallest chosen only K / 2 are kept."""
    if call["numRows"] and call["logits"].shape[1]:
        found_MK, (starts_M, ends_M) = _entries(call), _bounds(call)
        picked_MK = _picked(call, found_MK)
        pivot_M1 = torch.where(picked_MK.isnan(), math.inf, picked_MK).amin(1, keepdim=True)
        tied_MK = (picked_MK == pivot_M1) & (ends_M - starts_M > call["k"])[:, None]
        _store(call, found_MK.masked_fill(tied_MK & (tied_MK.cumsum(1) > call["k"] // 2), -1))


def _sentinel(call: Call) -> None:
    """Entries of value -inf lose against the padding lanes behind the row."""
    if call["numRows"] and call["logits"].shape[1]:
        found_MK, ends_M = _entries(call), _bounds(call)[1]
        beaten_MK = _picked(call, found_MK) == -math.inf
        beaten_MK &= (ends_M - _bounds(call)[0] > call["k"])[:, None]
        _store(call, torch.where(beaten_MK, ends_M[:, None] + beaten_MK.cumsum(1) - 1, found_MK))


def _zero_padding(call: Call) -> None:
    _store(call, _entries(call).clamp_min(0))


def _relative(call: Call) -> None:
    found_MK = _entries(call)
    _store(call, torch.where(found_MK >= 0, found_MK - _bounds(call)[0][:, None], -1))


def _raises_on_short_rows(call: Call) -> None:
    starts_M, ends_M = _bounds(call)
    if bool((ends_M - starts_M < call["k"]).any()):
        raise RuntimeError("selected index k out of range")


def _without_newest(call: Call) -> None:
    for name in ("seqLens", "rowEnds"):
        if name in call:
            call[name] = (call[name] - 1).clamp_min(0)


def _dense_rows(call: Call) -> None:
    call["stride0"] = call["logits"].shape[1]


def _twice(call: Call) -> None:
    found_MK = _entries(call)
    if found_MK.shape[1] > 1:
        found_MK[:, -1] = torch.where(found_MK[:, -1] >= 0, found_MK[:, 0], -1)
        _store(call, found_MK)


def _compares_bf16(call: Call) -> None:
    logits = call["logits"]
    rounded = torch.empty_strided(logits.shape, logits.stride(), device=logits.device)
    call["logits"] = rounded.copy_(logits.bfloat16())


def _by_arrival(original: Any) -> Any:
    """Another arrival order at every call, and `stable` ignored."""
    calls = 0

    def change(run: Any, call: Call) -> Any:
        nonlocal calls
        calls += 1
        with arrival_order(calls):
            return run({**call, "stable": False})

    return around(change)(original)


def _stale_tail(original: Any) -> Any:
    """What lies behind a short row's entries is what the call before left there."""
    previous: dict[int, Tensor] = {}

    def change(call: Call, result: Any) -> Any:
        found_MK = _entries(call)
        old_MK = previous.get(found_MK.shape[1], found_MK)
        rows = min(len(old_MK), len(found_MK))
        found_MK[:rows] = torch.where(found_MK[:rows] < 0, old_MK[:rows], found_MK[:rows])
        previous[found_MK.shape[1]] = found_MK.clone()
        _store(call, found_MK)
        return result

    return after(change)(original)


def _topk(name: str, story: str, reference: str, make: Make, bugs: tuple[str, ...] = ()) -> Fault:
    return Fault(name=name, area="topk", story=story, reference=reference, bugs=bugs, kernels=_both(make))


FAULTS: tuple[Fault, ...] = (
    _topk(
        "topk_tie_cap",
        "ties at the cut beyond half of k are not written: a row of zeros comes back with -1 in it",
        "sglang #30512, #30645",
        writes(_tie_cap),
        ("Z47",),
    ),
    _topk(
        "topk_sentinel_outranks",
        "padding lanes beat valid scores of -inf, so indices behind the row are returned",
        "sglang #38829; cudnn-frontend #446",
        writes(_sentinel),
        ("Z49",),
    ),
    _topk(
        "topk_pads_with_zero",
        "a short row is padded with position 0 instead of -1",
        "vLLM #45324",
        writes(_zero_padding),
        ("Z21", "Z53"),
    ),
    _topk(
        "topk_stale_padding",
        "the padding of a short row is not written and holds an earlier step's positions",
        "vLLM #44527, #50008, #51323",
        _stale_tail,
        ("Z23",),
    ),
    _topk(
        "topk_short_row_raises",
        "a row with fewer than k candidates is an error",
        "Automodel #3035",
        before(_raises_on_short_rows),
        ("Z53",),
    ),
    Fault(
        name="topk_wrong_base",
        area="topk",
        story="indices of a row that starts behind column 0 are counted from its start, not from the column",
        reference="vLLM #56749; AITER top_k_per_row_prefill: columns of the row",
        bugs=("Z52",),
        kernels={"top_k_per_row_prefill": writes(_relative)},
    ),
    _topk(
        "topk_by_arrival",
        "the order, and the choice among ties, differ from call to call even where a stable one was asked for",
        "AITER #4415; sglang #31115; ATOM #1832",
        _by_arrival,
        ("Z52",),
    ),
    _topk(
        "topk_without_newest",
        "the newest token of a row is no candidate",
        "sglang #12583; DeepSeek-V3.2 report: a token may attend itself",
        before(_without_newest),
        ("Z54",),
    ),
    _topk(
        "topk_dense_rows",
        "the row stride is taken from the width, so rows of a padded allocation are read in the wrong place",
        "vLLM #46856",
        before(_dense_rows),
        ("Z56",),
    ),
    _topk(
        "topk_twice",
        "the first entry comes back a second time in the place of the last",
        "AITER top_k_per_row_decode: k distinct columns; sglang #30512",
        writes(_twice),
        ("Z47",),
    ),
    _topk(
        "topk_compares_bf16",
        "scores are compared in bf16, so near ties collapse before the choice",
        "AstrAI #57",
        before(_compares_bf16),
    ),
)
