"""The counting probe: how often each KV slot was attended, from the ordinary output of a decode kernel.

With q = 0 every score is 0, so every attended slot has weight 1 / n and the output is (1 / n) times the sum of what
was attended. In one pass a column of V holds 1, 4 and 16 in three slots and 0 in all others: output times n is then a
number whose base-4 digits are the counts of the three. Every slot carries a mark in exactly one pass, in a cell of its
own, so that a foreign slot cannot hide a lost one.

Why it is exact. The largest honest value is 1 + 4 + 16 = 21, the largest decodable one 63. P = exp(0) = 1 has no
rounding in any format and the sums are sums of small integers. What is rounded: the quotient, the merge of splits and
the value scale in fp32 (together below 2^-10 for n <= 2^15: each LSE is off by at most 4 * 2^-24 * ln n, and a weight
by twice that), and the result to bf16, by at most 2^-8 of itself. A decoded value v is thus off by at most
63 * (2^-8 + 2^-10) < 0.31 < 0.5; `RELATIVE` allows a kernel one more rounding to bf16 (weights that are normalised
before they are stored), 63 * 2^-7 < 0.5. Zero stays exactly zero.

Why equal means equal. With n = exp(LSE), the counts sum to n. If every column has the value that expected counts of 0
or 1 give, any other counts with that value have a larger sum, as digits of 4 or more carry. So equal values and equal n
leave one possibility. Without an LSE n is taken from the plan: then only a multiplicity that all attended slots share
stays unseen, and that one changes no output at all.

Legend: S slots, C columns of V, P passes, T query rows, H heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BASE, DIGITS = 4, 3
RELATIVE = 2.0**-7
Kernel = Callable[[Tensor], tuple[Tensor, Tensor | None]]
"""V values fp32 [S, C] of all slots -> output [T, H, C] and natural-log LSE [T, H] (or None), for queries of zeros."""


@dataclass(frozen=True, kw_only=True)
class Marks:
    """Which cell of V each slot marks, and in which pass."""

    slots: int
    columns: int

    @property
    def per_pass(self) -> int:
        """Slots that carry a mark in one pass."""
        return DIGITS * self.columns

    @property
    def passes(self) -> int:
        """Passes until every slot had its mark."""
        return -(-self.slots // self.per_pass)

    def values(self, number: int) -> Tensor:
        """V of pass `number`, fp32 [S, C]: 1, 4 or 16 in one cell of each marked slot."""
        slot = torch.arange(number * self.per_pass, min((number + 1) * self.per_pass, self.slots))
        place = slot - number * self.per_pass
        values_SC = torch.zeros(self.slots, self.columns)
        values_SC[slot, place % self.columns] = float(BASE) ** (place // self.columns)
        return values_SC


@dataclass(frozen=True, kw_only=True)
class Attended:
    """What the probe read."""

    counts_THS: Tensor
    """int32: how often row T and head H attended slot S."""
    keys_TH: Tensor
    """fp64: how many keys the row attended in all, by its LSE; the planned number without one."""
    readable_TH: Tensor
    """Whether every value was one that counts give, and the counts sum to the keys."""


def count_attended(kernel: Kernel, marks: Marks, planned_T: Tensor, *, value_scale: float = 1.0) -> Attended:
    """Run `kernel` once per pass and decode.

    Args:
        kernel: the same work on other values of V, queries all zero; K may be anything finite.
        marks: the cells; `slots` must be all that the kernel could reach.
        planned_T: keys of each row, used where the kernel returns no LSE; if the output contradicts them, the first
            such row and head is read with the smallest number of keys that fits.
        value_scale: by how much the kernel multiplies what it reads (the scale of an fp8 V).
    """
    passes = [kernel(marks.values(number)) for number in range(marks.passes)]
    if not passes:
        raise ValueError("marks: there is no slot to mark; give at least one")
    shares_THPC = torch.stack([out_THC.double().cpu() / value_scale for out_THC, _ in passes], 2)
    lses = [lse_TH for _, lse_TH in passes if lse_TH is not None]
    planned_TH = planned_T.double()[:, None].expand(shares_THPC.shape[:2])
    keys_TH = lses[0].double().exp().cpu() if lses else planned_TH.clone()
    counts_THS, readable_TH = _read(shares_THPC, keys_TH.round(), marks)
    for lse_TH in lses:
        own_TH = lse_TH.double().exp().cpu()
        readable_TH &= ((own_TH - own_TH.round()).abs() <= own_TH * 2.0**-10) & (own_TH.round() == keys_TH.round())
    if not lses:
        _search(shares_THPC, marks, counts_THS, keys_TH, (~readable_TH & (planned_TH > 0)).nonzero()[:1].tolist())
    return Attended(counts_THS=counts_THS, keys_TH=keys_TH, readable_TH=readable_TH)


def _search(
    shares_THPC: Tensor, marks: Marks, counts_THS: Tensor, keys_TH: Tensor, places: Sequence[Sequence[int]]
) -> None:
    """Where the planned number of keys does not read: the smallest number that does, for the message's sake."""
    for row, head in places:
        planned = int(keys_TH[row, head])
        tried = torch.arange(1, 4 * planned + 64, dtype=torch.float64)[:, None]
        shares = shares_THPC[row : row + 1, head : head + 1].expand(len(tried), *[-1] * 3)
        counts, readable = _read(shares, tried, marks)
        if bool(readable.any()):
            first = int(readable[:, 0].nonzero()[0])
            counts_THS[row, head], keys_TH[row, head] = counts[first, 0], tried[first, 0]


def _read(shares_THPC: Tensor, keys_TH: Tensor, marks: Marks) -> tuple[Tensor, Tensor]:
    """Counts [T, H, S] if each row attended that many keys, and whether every value is a count and they sum to it."""
    counts, sound_TH = _digits(shares_THPC * keys_TH[..., None, None])
    counts_THS = counts.flatten(2)[..., : marks.slots]
    return counts_THS, sound_TH & (counts_THS.sum(-1) == keys_TH)


def _digits(sums_THPC: Tensor) -> tuple[Tensor, Tensor]:
    """Base-4 digits [T, H, P, 3 C] in the order of slots, and whether every sum of a head lies at an integer."""
    whole = sums_THPC.nan_to_num(nan=-1.0, posinf=-1.0, neginf=-1.0).round()
    sound = ((sums_THPC - whole).abs() <= whole * RELATIVE) & (whole >= 0) & (whole < BASE**DIGITS)
    value = whole.clamp(0, BASE**DIGITS - 1).int()
    digits = [value // BASE**k % BASE for k in range(DIGITS)]
    return torch.cat(digits, -1), sound.flatten(2).all(-1)


def difference(seen: Attended, expected_T: Sequence[Tensor], names_T: Sequence[str]) -> str:
    """The first row and head that did not attend exactly its slots, in words; empty if there is none.

    Args:
        seen: what the probe read.
        expected_T: the slots of each row, int64; a row without slots is not looked at.
        names_T: what a row is called.
    """
    expected_TS = torch.zeros(len(expected_T), seen.counts_THS.shape[-1], dtype=torch.int32)
    for row, slots in enumerate(expected_T):
        expected_TS[row].index_add_(0, slots, torch.ones(len(slots), dtype=torch.int32))
    live_T = torch.tensor([len(slots) > 0 for slots in expected_T], dtype=torch.bool)
    wrong_TH = ((seen.counts_THS != expected_TS[:, None]).any(-1) | ~seen.readable_TH) & live_T[:, None]
    if not bool(wrong_TH.any()):
        return ""
    row, head = (int(i) for i in wrong_TH.nonzero()[0])
    told = _told(seen.counts_THS[row, head], expected_TS, row, names_T)
    total, keys = int(seen.counts_THS[row, head].sum()), float(seen.keys_TH[row, head])
    unreadable = "" if total == round(keys) else f"; counts sum to {total}, not to {keys:.6g} keys"
    others = int(wrong_TH.any(1).sum()) - 1
    return f"{names_T[row]}, head {head}: {told}{unreadable}" + (f" (and {others} more rows)" if others else "")


def _told(counts_S: Tensor, expected_TS: Tensor, row: int, names_T: Sequence[str]) -> str:
    lost, more = (counts_S < expected_TS[row]).nonzero()[:, 0], (counts_S > expected_TS[row]).nonzero()[:, 0]
    words = []
    if len(lost):
        words.append(f"lost {len(lost)} of {int(expected_TS[row].sum())} slots, first {int(lost[0])}")
    if len(more):
        slot = int(more[0])
        owners = [r for r in range(len(expected_TS)) if expected_TS[r, slot] and r != row]
        what = "doubled" if expected_TS[row, slot] else f"of {names_T[owners[0]]}" if owners else "of nobody"
        words.append(f"attended {len(more)} slots too often, first {slot} ({what}, {int(counts_S[slot])} times)")
    return ", ".join(words) or "no counts of marked slots explain the output"
