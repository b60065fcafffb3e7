"""Certificates for discrete choices: is a differing top-k, or a differing set of experts, legal under the error bounds?

Contract: every true score lies in [score - err, score + err], independently. A choice is legal exactly where some
scores in these intervals make it a correct choice; ties may fall either way. An illegal choice is a bug of the path
that made it (under its arithmetic), with the row and the deciding pair named. Legend: T rows, S candidates, K chosen,
E experts, G groups, N subsets of groups. Indices are int64 [T, K]; -1 is padding (a row with fewer than K candidates).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv32_ref.bounds.arith import Approx, Arithmetic
from dsv32_ref.bounds.router import best_two


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """Verdict on T rows.

    legal: the other choice is possible under the bounds. flips: how many of its members the reference did not choose.
    slack: by how much the deciding pair may still move apart (negative: illegal; -inf: malformed). decided: the
    reference's own choice is the only legal one. chosen, rejected: the deciding pair, in the units of `kind`
    (0 expert or key, 1 group, 2 malformed: duplicate, out of range or wrong count; -1 where there is none).
    """

    legal: Tensor
    flips: Tensor
    slack: Tensor
    decided: Tensor
    kind: Tensor
    chosen: Tensor
    rejected: Tensor

    @property
    def passed(self) -> bool:
        """At least one row, and every row is legal."""
        return self.legal.numel() > 0 and bool(self.legal.all())

    @property
    def first_illegal(self) -> int | None:
        """Row of the first illegal choice."""
        return None if bool(self.legal.all()) else int((~self.legal).int().argmax())

    def describe(self, stage: str) -> str:
        """One line for a report: counts, or the first illegal row and the pair that decides it."""
        row = self.first_illegal
        if row is None:
            flipped = int((self.flips > 0).sum())
            return f"{stage}: {self.legal.numel()} rows legal, {flipped} flipped, {int(self.decided.sum())} decided"
        kind = ("candidate", "group", "malformed choice")[int(self.kind[row])]
        pair = f"{int(self.chosen[row])} chosen over {int(self.rejected[row])}"
        return f"{stage}: row {row}: {kind} {pair}, beyond both bounds by {-float(self.slack[row]):.3g}"


def certify_topk(
    ref_scores: Tensor, err: Tensor, ref_idx: Tensor, other_idx: Tensor, *, valid: Tensor | None = None
) -> Certificate:
    """Is `other_idx` [T, K] a possible top-k of scores [T, S] known to within `err` [T, S]?

    Legal exactly where min over the chosen of (score + err) >= max over the rest of (score - err). `valid` [T, S] marks
    the candidates of each row (default: all); a row must choose min(K, candidates) of them, each once.
    Raises ValueError for NaN scores or bounds among the candidates, a malformed `ref_idx`, or wrong shapes.
    """
    valid = torch.ones_like(ref_scores, dtype=torch.bool) if valid is None else valid
    _check(ref_scores, err, valid, ref_idx, other_idx)
    ref, sound = _mask(ref_idx, valid)
    if not bool(sound.all()):
        raise ValueError(
            f"ref_idx: row {int((~sound).int().argmax())} is no choice of min(K, candidates) distinct candidates"
        )
    other, sound = _mask(other_idx, valid)
    high, low = _ends(Approx(ref_scores.double(), err.double()), valid)
    slack, chosen, rejected = _cut(high, low, other, valid & ~other)
    legal = sound & (slack >= 0)
    # Only one choice is legal where even the weakest chosen, at its lowest, beats the best of the rest at its highest.
    best_rest = torch.where(valid & ~ref, high, -math.inf).amax(-1)
    decided = torch.where(ref, low, math.inf).amin(-1) > best_rest
    return Certificate(
        legal=legal,
        flips=(other & ~ref).sum(-1),
        slack=torch.where(sound, slack, -math.inf),
        decided=decided | (best_rest == -math.inf),
        kind=torch.where(sound, 0, 2),
        chosen=chosen,
        rejected=rejected,
    )


def certify_router(
    ref_biased: Tensor,
    err: Tensor,
    ref_idx: Tensor,
    other_idx: Tensor,
    *,
    groups: int,
    kept: int,
    arith: Arithmetic,
) -> Certificate:
    """Is `other_idx` [T, K] a possible group-limited choice for biased scores [T, E] known to within `err` [T, E]?

    The kept groups are not observed, so every set of `kept` groups that holds all chosen experts is tried. For one
    set the most favourable scores are known: chosen experts as high, experts of other groups as low as allowed, and
    the rejected experts of kept groups as high as the expert cut permits. Legal exactly where these pass both cuts;
    the sums of two that rank the groups may each be rounded once under `arith`.
    Raises ValueError for NaN, wrong shapes, a malformed `ref_idx`, or groups that do not divide the experts.
    """
    T, E = ref_biased.shape
    if E % groups or not 0 < kept <= groups:
        raise ValueError(f"groups, kept: {groups} and {kept} do not fit {E} experts")
    valid = torch.ones(T, E, dtype=torch.bool)
    _check(ref_biased, err, valid, ref_idx, other_idx)
    pair = Approx(ref_biased.double(), err.double())
    ref, ref_sound = _mask(ref_idx, valid)
    other, sound = _mask(other_idx, valid)
    if not bool(ref_sound.all()):
        raise ValueError(f"ref_idx: row {int((~ref_sound).int().argmax())} is no choice of K distinct experts")
    best = _best_subset(pair, other, groups, kept, arith)
    legal = sound & (best.slack >= 0)
    return Certificate(
        legal=legal,
        flips=(other & ~ref).sum(-1),
        slack=torch.where(sound, best.slack, -math.inf),
        decided=_router_decided(pair, ref, groups, kept, arith),
        kind=torch.where(sound, best.kind, 2),
        chosen=best.chosen,
        rejected=best.rejected,
    )


@dataclass(frozen=True)
class _Best:
    slack: Tensor
    kind: Tensor
    chosen: Tensor
    rejected: Tensor


def _best_subset(pair: Approx, other: Tensor, groups: int, kept: int, arith: Arithmetic) -> _Best:
    """The set of kept groups under which the choice `other` [T, E] has the most slack, and what decides it there."""
    high, low = pair.value + pair.err, pair.value - pair.err
    limit = torch.where(other, high, math.inf).amin(-1, keepdim=True)
    favourable = torch.where(other, high, torch.minimum(high, limit))
    best_TG, worst_TG = best_two(favourable, groups), best_two(low, groups)
    best_TG, worst_TG = best_TG + arith.rounding(best_TG.abs()), worst_TG - arith.rounding(worst_TG.abs())
    rest_TG = torch.where(other, -math.inf, low).reshape(other.shape[0], groups, -1).amax(-1)
    subsets = _subsets(groups, kept)
    inside = subsets.unsqueeze(0)
    group_slack = _spread(best_TG, worst_TG, inside)
    expert_slack = limit - torch.where(inside, rest_TG.unsqueeze(1), -math.inf).amax(-1)
    used_TG = other.reshape(other.shape[0], groups, -1).any(-1)
    outside = (used_TG.unsqueeze(1) & ~inside).any(-1)
    slack = torch.minimum(group_slack, expert_slack).masked_fill(outside, -math.inf)
    at = slack.argmax(-1, keepdim=True)
    kind = (group_slack.gather(1, at) < expert_slack.gather(1, at)).squeeze(1).long()
    chosen_subset = subsets[at.squeeze(1)]
    group_pair = _pair(best_TG, worst_TG, chosen_subset, ~chosen_subset)
    in_kept = chosen_subset.repeat_interleave(other.shape[-1] // groups, -1)
    expert_pair = _pair(high, low, other, in_kept & ~other)
    pairs = [torch.where(kind == 1, g, e) for g, e in zip(group_pair, expert_pair, strict=True)]
    best_slack = slack.gather(1, at).squeeze(1)
    return _Best(best_slack, torch.where(best_slack == -math.inf, 2, kind), pairs[0], pairs[1])


def _spread(best_TG: Tensor, worst_TG: Tensor, inside: Tensor) -> Tensor:
    """Smallest kept group at its best minus largest dropped group at its worst, per subset [T, N]; inf if none is
    dropped.
    """
    weakest = torch.where(inside, best_TG.unsqueeze(1), math.inf).amin(-1)
    return weakest - torch.where(inside, -math.inf, worst_TG.unsqueeze(1)).amax(-1)


def _router_decided(pair: Approx, ref: Tensor, groups: int, kept: int, arith: Arithmetic) -> Tensor:
    """Rows whose reference choice is forced: a strict group cut and a strict expert cut for all scores in the
    intervals.
    """
    high, low = pair.value + pair.err, pair.value - pair.err
    nominal = best_two(pair.value, groups)
    kept_TG = torch.zeros_like(nominal, dtype=torch.bool).scatter_(1, nominal.topk(kept, -1).indices, True)
    least, most = best_two(low, groups), best_two(high, groups)
    least, most = least - arith.rounding(least.abs()), most + arith.rounding(most.abs())
    group_cut = torch.where(kept_TG, least, math.inf).amin(-1) > torch.where(kept_TG, -math.inf, most).amax(-1)
    in_kept = kept_TG.repeat_interleave(ref.shape[-1] // groups, -1)
    weakest = torch.where(ref, low, math.inf).amin(-1)
    expert_cut = weakest > torch.where(in_kept & ~ref, high, -math.inf).amax(-1)
    return group_cut & expert_cut & (ref & ~in_kept).logical_not().all(-1)


def _subsets(groups: int, kept: int) -> Tensor:
    """All sets of `kept` of `groups`, [N, G] bool (70 for 4 of 8). Raises ValueError beyond 20 000 sets."""
    if math.comb(groups, kept) > 20_000:
        raise ValueError(f"groups, kept: {kept} of {groups} has {math.comb(groups, kept)} sets; 20000 is the limit")
    rows = torch.tensor(list(itertools.combinations(range(groups), kept)))
    return torch.zeros(len(rows), groups, dtype=torch.bool).scatter_(1, rows, True)


def _ends(pair: Approx, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Highest and lowest possible scores; -inf scores with any bound stay -inf."""
    floor = pair.value == -math.inf
    high = torch.where(floor, -math.inf, pair.value + pair.err)
    low = torch.where(floor, -math.inf, pair.value - pair.err)
    return high.masked_fill(~valid, -math.inf), low.masked_fill(~valid, -math.inf)


def _cut(high: Tensor, low: Tensor, chosen: Tensor, rest: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Slack of a cut and its deciding pair: weakest chosen at its highest against strongest rest at its lowest."""
    weakest = torch.where(chosen, high, math.inf).amin(-1)
    strongest = torch.where(rest, low, -math.inf).amax(-1)
    slack = torch.where(weakest == strongest, 0.0, weakest - strongest)
    return slack, *_pair(high, low, chosen, rest)


def _pair(high: Tensor, low: Tensor, chosen: Tensor, rest: Tensor) -> tuple[Tensor, Tensor]:
    weakest = torch.where(chosen, high, math.inf).argmin(-1)
    strongest = torch.where(rest, low, -math.inf).argmax(-1)
    return (
        torch.where(chosen.any(-1), weakest, -1),
        torch.where(rest.any(-1), strongest, -1),
    )


def _mask(idx: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Members [T, S], and whether a row names min(K, candidates) distinct candidates, padded with -1."""
    S = valid.shape[-1]
    padding = idx == -1
    inside = (idx >= 0) & (idx < S)
    counts = torch.zeros(idx.shape[0], S + 1, dtype=torch.int64)
    counts.scatter_add_(1, torch.where(inside, idx, S), torch.ones_like(idx))
    members = counts[:, :S] > 0
    wanted = valid.sum(-1).clamp(max=idx.shape[-1])
    once = (counts[:, :S] <= 1).all(-1) & (padding | inside).all(-1) & ~(members & ~valid).any(-1)
    return members, once & (inside.sum(-1) == wanted)


def _check(scores: Tensor, err: Tensor, valid: Tensor, ref_idx: Tensor, other_idx: Tensor) -> None:
    if scores.dim() != 2 or err.shape != scores.shape or valid.shape != scores.shape:
        raise ValueError(
            f"err, valid: must have the shape [rows, candidates] of the scores, here {tuple(scores.shape)}"
        )
    for name, idx in (("ref_idx", ref_idx), ("other_idx", other_idx)):
        if idx.dim() != 2 or idx.shape[0] != scores.shape[0] or idx.dtype not in (torch.int64, torch.int32):
            raise ValueError(
                f"{name}: must be an integer tensor [{scores.shape[0]}, K], is {tuple(idx.shape)} {idx.dtype}"
            )
    if ref_idx.shape != other_idx.shape:
        raise ValueError(f"other_idx: {tuple(other_idx.shape)} differs from ref_idx {tuple(ref_idx.shape)}")
    if bool(((scores.isnan() | err.isnan() | (err < 0)) & valid).any()):
        raise ValueError(
            "ref_scores, err: NaN (or a negative bound) among the candidates; a choice among NaN is undefined"
        )
