"""The bound of every value that one step of an implementation passes through, from the values it had before.

Contract: `StepBounds` follows `decode.STAGES` in order. What is given for a stage is taken as exactly what the
implementation went on with, so each bound is local to its stage; where nothing is given the bound itself goes on, and
errors add up. Decisions must be given. Legend: T rows of all requests, M width, S cached tokens of one request,
D cached latent, I index key, K choices, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv32_ref.bounds.arith import Approx, exact
from dsv32_ref.bounds.stages import StageBounds
from dsv32_ref.decode import Form
from dsv32_ref.indexer import allowed
from dsv32_ref.moe import MoeWeights
from dsv32_ref.router import GateWeights
from dsv32_ref.weights import LayerWeights, Weights

DECISIONS = ("index_topk", "gate_idx")


@dataclass(frozen=True, kw_only=True)
class Cached:
    """One request in a step: its rows, and what its cache holds with this step's tokens included."""

    rows: slice
    kv_SD: Tensor
    keys_SI: Tensor
    scale_S: Tensor


class StepBounds:
    """Call it once per stage and layer, in order.

    Args:
        bounds: precision, arithmetic, and whether values are ideal or simulated.
        weights: of the model.
        tokens_T: the ids of the step's rows.
        positions_T: their positions.
        form: "unabsorbed" for a prefill, "absorbed" for a decode.
        cached: each request of the step, for a layer.
    """

    def __init__(
        self,
        bounds: StageBounds,
        weights: Weights,
        tokens_T: Tensor,
        positions_T: Tensor,
        form: Form,
        cached: Callable[[int], Sequence[Cached]],
    ) -> None:
        self.bounds, self.weights, self.form, self.cached = bounds, weights, form, cached
        self.positions_T = positions_T
        self.choice: dict[str, Tensor] = {}
        embedded = exact(weights.embed[tokens_T])
        self.now = {"ffn_out": embedded, "residual": exact(torch.zeros_like(embedded.value))}

    def __call__(self, stage: str, layer: int, given: Tensor | None = None) -> Approx | None:
        """The bound of this stage, None for a decision; `given` is what the implementation had.

        Raises:
            ValueError: a decision is not given.
        """
        if stage in DECISIONS:
            if given is None:
                raise ValueError(f"{stage} of layer {layer} is not given; what follows cannot be bounded without it")
            self.choice[stage] = given
            return None
        bound: Approx = getattr(self, f"_{stage}")(layer)
        self.now[stage] = bound if given is None else exact(given)
        return bound

    def biased_scores(self, logits_TE: Approx, layer: int) -> Approx:
        """What experts are chosen by [T, E]; feed it to `margins.certify_router`."""
        return self.bounds.biased_scores(logits_TE, self._gate(layer))

    def _layer(self, layer: int) -> LayerWeights:
        return self.weights.layers[layer]

    def _gate(self, layer: int) -> GateWeights:
        ffn = self._layer(layer).ffn
        if not isinstance(ffn, MoeWeights):
            raise ValueError(f"layer {layer} is dense; it has no router")
        return ffn.gate

    def _attn_in(self, layer: int) -> Approx:
        gain = self._layer(layer).attn_norm
        normed, self.sum_TM = self.bounds.add_rms_norm(self.now["ffn_out"], self.now["residual"], gain)
        return normed

    def _latent(self, layer: int) -> Approx:
        self.qr_TL = self.bounds.query_latent(self.now["attn_in"], self._layer(layer).attn)
        return self.bounds.latents(self.now["attn_in"], self._layer(layer).attn, self.positions_T)

    def _index_key(self, layer: int) -> Approx:
        return self.bounds.index_keys(self.now["attn_in"], self._layer(layer).indexer, self.positions_T)

    def _index_scale(self, layer: int) -> Approx:
        return self.bounds.index_key_scales(self.now["attn_in"], self._layer(layer).indexer, self.positions_T)

    def _index_score(self, layer: int) -> Approx:
        """[T, S], -inf with err 0 in a row's future and beyond its request."""
        parts = [self._scores_of(cached, layer) for cached in self.cached(layer)]
        longest = max(part.value.shape[1] for part in parts)
        value = torch.full((len(self.positions_T), longest), -torch.inf, dtype=torch.float64)
        err = torch.zeros_like(value)
        for cached, part in zip(self.cached(layer), parts, strict=True):
            value[cached.rows, : part.value.shape[1]] = part.value
            err[cached.rows, : part.value.shape[1]] = part.err
        future_TS = torch.arange(longest) > self.positions_T[:, None]
        return Approx(value.masked_fill(future_TS, -torch.inf), err.masked_fill(future_TS, 0.0))

    def _scores_of(self, cached: Cached, layer: int) -> Approx:
        x_TM, qr_TL = self.now["attn_in"].map(cached.rows), self.qr_TL.map(cached.rows)
        keys, w = (exact(cached.keys_SI), exact(cached.scale_S)), self._layer(layer).indexer
        return self.bounds.index_scores(x_TM, qr_TL, *keys, w, self.positions_T[cached.rows])

    def _attn_out(self, layer: int) -> Approx:
        w = self._layer(layer).attn
        heads = self.bounds.queries(self.qr_TL, w, self.positions_T)
        parts = [self._attended(cached, *heads, layer) for cached in self.cached(layer)]
        o_THV = Approx(torch.cat([part.value for part in parts]), torch.cat([part.err for part in parts]))
        return self.bounds.output(o_THV, w)

    def _attended(self, cached: Cached, q_nope_THN: Approx, q_pe_THR: Approx, layer: int) -> Approx:
        w, topk_TK, kv_SD = self._layer(layer).attn, self.choice["index_topk"][cached.rows], exact(cached.kv_SD)
        query = (q_nope_THN.map(cached.rows), q_pe_THR.map(cached.rows))
        if self.form == "unabsorbed":
            return self.bounds.unabsorbed(*query, kv_SD, allowed(topk_TK, len(cached.kv_SD)), w)
        return self.bounds.absorbed(*query, kv_SD.map(topk_TK.clamp_min(0)), topk_TK >= 0, w)

    def _residual(self, layer: int) -> Approx:
        gain = self._layer(layer).ffn_norm
        self.normed_TM, stored = self.bounds.add_rms_norm(self.now["attn_out"], self.sum_TM, gain)
        return stored

    def _ffn_in(self, _layer: int) -> Approx:
        return self.normed_TM

    def _gate_logits(self, layer: int) -> Approx:
        return self.bounds.gate_logits(self.now["ffn_in"], self._gate(layer))

    def _gate_w(self, _layer: int) -> Approx:
        return self.bounds.expert_weights(self.now["gate_logits"], self.choice["gate_idx"])

    def _ffn_out(self, layer: int) -> Approx:
        ffn = self._layer(layer).ffn
        if not isinstance(ffn, MoeWeights):
            return self.bounds.mlp(self.now["ffn_in"], ffn)
        return self.bounds.mixture(self.now["ffn_in"], self.choice["gate_idx"], self.now["gate_w"], ffn)

    def _final_norm(self, _layer: int) -> Approx:
        return self.bounds.add_rms_norm(self.now["ffn_out"], self.now["residual"], self.weights.norm)[0]

    def _logits(self, _layer: int) -> Approx:
        """Of each request's last row, [B, V]."""
        last_B = [cached.rows.stop - 1 for cached in self.cached(0)]
        return self.bounds.head(self.now["final_norm"].map(last_B), self.weights.head)
