"""Where a free-running optimised path leaves the reference, and whether arithmetic accounts for it.

Both paths take the same tokens and make their own decisions. The first differing decision is judged layer-locally: is
the path's choice possible for the scores that real arithmetic gives on the inputs that the path had, within the bound
of its own roundings? If so the flip is certified, and what follows is a consequence; if not, there is a bug there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from dsv32_fuzz.stages.bounds import ARITH, Recording, Values, ideal_biased, index_pairs, index_scores
from dsv32_ref.bounds import certify_router, certify_topk, exact
from dsv32_ref.bounds.margins import Certificate
from dsv32_ref.bounds.router import best_two
from dsv32_ref.indexer import select_topk

Kind = Literal["key", "expert", "group", "malformed"]


@dataclass(frozen=True, kw_only=True)
class Flip:
    """One differing decision.

    kind: what changed, keys, experts, or the groups that experts are taken from. members: how many of them. margin: how
    far apart the reference's scores are for the widest pair that changed places (0: a tie). moved: by how much the
    path's scores of that pair differ from the reference's. slack: room left under the bounds by the deciding pair,
    negative where the flip is not legal.
    """

    step: int
    layer: int
    row: int
    kind: Kind
    members: int
    margin: float
    moved: float
    slack: float
    certified: bool


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """The first flip, None if there is none, and the relative L2 error of the logits at every step."""

    first: Flip | None
    logits: tuple[float, ...]


def divergence(rec: Recording, reference: list[Values]) -> Divergence:
    """Compares a free run of the path with a free run of the reference, step by step."""
    errors = tuple(
        float(
            (ours["logits", -1].double() - theirs["logits", -1].double()).norm() / theirs["logits", -1].double().norm()
        )
        for ours, theirs in zip(rec.steps, reference, strict=True)
        if len(ours["logits", -1])
    )
    return Divergence(first=first_flip(rec, reference), logits=errors)


def first_flip(rec: Recording, reference: list[Values]) -> Flip | None:
    """The first row whose set of keys or experts differs, in the order of computation."""
    for step, (ours, theirs) in enumerate(zip(rec.steps, reference, strict=True)):
        for layer in range(rec.config.n_layers):
            for stage in ("index_topk", "gate_idx"):
                if (stage, layer) in ours and (row := _first_other_set(ours[stage, layer], theirs[stage, layer])) >= 0:
                    return _judged(rec, step, layer, stage, row, theirs)
    return None


def _first_other_set(ours_TK: Tensor, theirs_TK: Tensor) -> int:
    other_T = (ours_TK.long().sort(-1).values != theirs_TK.long().sort(-1).values).any(-1)
    return int(other_T.int().argmax()) if bool(other_T.any()) else -1


def _judged(rec: Recording, step: int, layer: int, stage: str, row: int, theirs: Values) -> Flip:
    alone = replace(rec, steps=[rec.steps[step]])
    certificate = (keys_chosen if stage == "index_topk" else experts_chosen)(alone, layer)
    ours_X, theirs_X, kind, mine, reference = _compared(rec, step, layer, stage, row, theirs)
    lost = max(reference - mine, key=lambda e: float(theirs_X[e]))
    gained = min(mine - reference, key=lambda e: float(theirs_X[e]))
    gap = theirs_X[lost] - theirs_X[gained]
    return Flip(
        step=step,
        layer=layer,
        row=row,
        kind="malformed" if int(certificate.kind[row]) == 2 else kind,
        members=len(mine - reference),
        margin=float(gap),
        moved=float((gap - (ours_X[lost] - ours_X[gained])).abs()),
        slack=float(certificate.slack[row]),
        certified=bool(certificate.legal[row]),
    )


def _compared(
    rec: Recording, step: int, layer: int, stage: str, row: int, theirs: Values
) -> tuple[Tensor, Tensor, Kind, set[int], set[int]]:
    """Scores of both paths, what they rank, and what each path took: keys, groups where these differ, or experts."""
    mine, reference = (set(v[stage, layer][row].tolist()) - {-1} for v in (rec.steps[step], theirs))
    if stage == "index_topk":
        scores = rec.steps[step]["index_score", layer][row].double(), theirs["index_score", layer][row].double()
        return *scores, "key", mine, reference
    ideal_E: Tensor = rec.weights.layers[layer].ffn.gate.bias  # type: ignore[union-attr]
    ours_E = rec.steps[step]["gate_logits", layer][row].double().sigmoid() + rec.bias(layer).double()
    theirs_E = theirs["gate_logits", layer][row].double().sigmoid() + ideal_E.double()
    ours_G, theirs_G = (best_two(scores, rec.config.n_expert_groups) for scores in (ours_E, theirs_E))
    kept = [set(scores.topk(rec.config.n_limited_groups).indices.tolist()) for scores in (ours_G, theirs_G)]
    if kept[0] != kept[1]:
        return ours_G, theirs_G, "group", kept[0], kept[1]
    return ours_E, theirs_E, "expert", mine, reference


def keys_chosen(rec: Recording, layer: int) -> Certificate:
    """Against the ideal scores of the layer's input over the cached keys."""
    q_TJI, w_TJ = index_pairs(rec, layer)
    scores = index_scores(q_TJI, w_TJ, exact(rec.of("keys", layer)), exact(rec.of("key_scales", layer)))
    lengths_T = rec.of("positions", -1) + 1
    best = select_topk(scores.value, lengths_T, rec.config.index_topk)
    inside = torch.arange(scores.value.shape[1]) < lengths_T[:, None]
    return certify_topk(scores.value, scores.err, best, rec.of("index_topk", layer).long(), valid=inside)


def experts_chosen(rec: Recording, layer: int) -> Certificate:
    """Against the ideal fp32 router on the layer's input; the bound holds the roundings that the options ask for."""
    biased, best = ideal_biased(rec, layer)
    groups, kept = rec.config.n_expert_groups, rec.config.n_limited_groups
    chosen = rec.of("gate_idx", layer).long()
    return certify_router(biased.value, biased.err, best, chosen, groups=groups, kept=kept, arith=ARITH)
