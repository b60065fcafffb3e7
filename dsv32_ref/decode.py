"""The whole model over paged caches: prefill, and decode of ragged batches with any number of tokens per request.

Legend: B requests, T query tokens of all requests in a row, M model width, S cached tokens of one request, K top-k,
H heads, V value width or vocabulary.
`prefill` attends unabsorbed and `decode` absorbed, as DeepSeek's inference code does. Everything that a step computes
passes through its `tap`, which may look at a value (a trace) or answer with another one (a forced decision); `STAGES`
lists the names in the order of computation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from dsv32_ref import indexer, mla, moe, router
from dsv32_ref.norm import add_rms_norm
from dsv32_ref.rope import rope_table
from dsv32_ref.state import Batch, Model, State, Tokens
from dsv32_ref.weights import LayerWeights

STAGES = (
    "attn_in",
    "latent",
    "index_key",
    "index_scale",
    "index_score",
    "index_topk",
    "attn_out",
    "residual",
    "ffn_in",
    "gate_logits",
    "gate_idx",
    "gate_w",
    "ffn_out",
    "final_norm",
    "logits",
)
ROWS_AT_ONCE = 64
"""Rows whose selected tokens are gathered together: 64 x 2048 x 576 fp32 are 0.3 GB."""
Form = Literal["absorbed", "unabsorbed"]
Tap = Callable[[str, int, Tensor], Tensor]
"""(stage, layer, value) -> the value to go on with. The layer of final_norm and logits is -1."""


def untouched(_stage: str, _layer: int, value: Tensor) -> Tensor:
    """The tap that does nothing."""
    return value


@dataclass(kw_only=True)
class Trace:
    """A tap that keeps every value, and answers with `forced` ones (decisions or whole stages) where there are any."""

    forced: Mapping[tuple[str, int], Tensor] = field(default_factory=dict)
    values: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    """What was computed, by (stage, layer), before anything was forced."""

    def __call__(self, stage: str, layer: int, value: Tensor) -> Tensor:
        """Keeps `value`; returns it, or what is forced there."""
        self.values[stage, layer] = value
        forced = self.forced.get((stage, layer), value)
        if forced.shape != value.shape:
            raise ValueError(f"forced {stage} of layer {layer} is {tuple(forced.shape)}; give {tuple(value.shape)}")
        return forced


@dataclass(frozen=True, kw_only=True)
class StepOutput:
    """What a step gives: hidden states after the final norm [T, M], and logits [T, V] or, of last rows, [B, V]."""

    batch: Batch
    final_norm: Tensor
    logits: Tensor


@dataclass(frozen=True, kw_only=True)
class Pass:
    """The surroundings of one layer in one step."""

    model: Model
    state: State
    batch: Batch
    rope: tuple[Tensor, Tensor]
    form: Form
    tap: Tap


def new_pass(model: Model, state: State, batch: Batch, form: Form, tap: Tap) -> Pass:
    """The surroundings of one step; the RoPE table is formed once for all layers."""
    table = rope_table(model.config, batch.positions, model.weights.embed.dtype)
    return Pass(model=model, state=state, batch=batch, rope=table, form=form, tap=tap)


def decoder_layer(h_TM: Tensor, residual_TM: Tensor, w: LayerWeights, layer: int, step: Pass) -> tuple[Tensor, Tensor]:
    """Norm, sparse attention, norm, feed-forward. Takes and gives (output, residual); their sum is the hidden state."""
    config, precision, tap = step.model.config, step.model.precision, step.tap
    a_TM, residual_TM = add_rms_norm(h_TM, residual_TM, w.attn_norm, config.norm_eps, precision)
    h_TM = tap("attn_out", layer, attention(tap("attn_in", layer, a_TM), w, layer, step))
    f_TM, residual_TM = add_rms_norm(h_TM, residual_TM, w.ffn_norm, config.norm_eps, precision)
    residual_TM = tap("residual", layer, residual_TM)
    return tap("ffn_out", layer, feed_forward(tap("ffn_in", layer, f_TM), w, layer, step)), residual_TM


def attention(a_TM: Tensor, w: LayerWeights, layer: int, step: Pass) -> Tensor:
    """Sparse multi-head latent attention, [T, M]: caches the new tokens, selects, attends."""
    config, precision, batch = step.model.config, step.model.precision, step.batch
    qr_TL = mla.query_latent(a_TM, w.attn, config, precision)
    latent, index = step.state.latent[layer], step.state.index[layer]
    kv_TD = mla.latents(a_TM, w.attn, step.rope, config, precision)
    latent.write(batch.new_slots, step.tap("latent", layer, kv_TD))
    k_TI, scale_T = indexer.index_keys(a_TM, w.indexer, step.rope, config, precision)
    index.write(batch.new_slots, step.tap("index_key", layer, k_TI), step.tap("index_scale", layer, scale_T))
    topk_TK = _select(a_TM, qr_TL, w, layer, step)
    q_nope_THN, q_pe_THR = mla.queries(qr_TL, w.attn, step.rope, config, precision)
    o_THV = a_TM.new_zeros(len(a_TM), config.n_heads, config.v_head_dim)
    if step.form == "unabsorbed":
        for rows, slots_S in batch.owned():
            query, allowed_TS = (q_nope_THN[rows], q_pe_THR[rows]), indexer.allowed(topk_TK[rows], len(slots_S))
            o_THV[rows] = mla.unabsorbed(*query, latent.gather(slots_S), allowed_TS, w.attn, config, precision)
    else:
        slots_TK = batch.selected_slots(topk_TK)
        for rows in (slice(i, i + ROWS_AT_ONCE) for i in range(0, len(a_TM), ROWS_AT_ONCE)):
            query, kv_TKD, valid_TK = (
                (q_nope_THN[rows], q_pe_THR[rows]),
                latent.gather(slots_TK[rows]),
                slots_TK[rows] >= 0,
            )
            o_THV[rows] = mla.absorbed(*query, kv_TKD, valid_TK, w.attn, config, precision)
    return mla.output(o_THV, w.attn, precision)


def _select(a_TM: Tensor, qr_TL: Tensor, w: LayerWeights, layer: int, step: Pass) -> Tensor:
    """The positions [T, K] that each token attends to, within its own request; -1 pads."""
    config, precision, batch = step.model.config, step.model.precision, step.batch
    q_TJI, q_scale_TJ = indexer.index_queries(qr_TL, w.indexer, step.rope, config, precision)
    w_TJ = indexer.head_weights(a_TM, q_scale_TJ, w.indexer, config)
    longest = max((len(slots_S) for slots_S in batch.slots), default=0)
    scores_TS = a_TM.new_full((len(a_TM), longest), -torch.inf)
    for rows, slots_S in batch.owned():
        keys = step.state.index[layer].gather(slots_S)
        scores_TS[rows, : len(slots_S)] = indexer.index_scores(q_TJI[rows], w_TJ[rows], *keys)
    scores_TS = scores_TS.masked_fill(torch.arange(longest) >= batch.lengths[:, None], -torch.inf)
    scores_TS = step.tap("index_score", layer, scores_TS)
    topk_TK = indexer.select_topk(scores_TS, batch.lengths, config.index_topk)
    topk_TK = step.tap("index_topk", layer, topk_TK)
    if bool((topk_TK >= batch.lengths[:, None]).any()):
        raise ValueError(f"index_topk of layer {layer} names a position that its token may not see; use -1 as padding")
    return topk_TK


def feed_forward(f_TM: Tensor, w: LayerWeights, layer: int, step: Pass) -> Tensor:
    """The dense network or the mixture of experts, [T, M]."""
    config, precision, tap = step.model.config, step.model.precision, step.tap
    if isinstance(w.ffn, moe.MlpWeights):
        return moe.mlp(f_TM, w.ffn, precision)
    logits_TE = tap("gate_logits", layer, router.gate_logits(f_TM, w.ffn.gate))
    idx_TK = tap("gate_idx", layer, router.choose_experts(logits_TE, w.ffn.gate.bias, config))
    weights_TK = tap("gate_w", layer, router.expert_weights(logits_TE, idx_TK, config))
    return moe.mixture(f_TM, idx_TK, weights_TK, w.ffn, precision)


def prefill(
    model: Model, state: State, prompts: Tokens, *, chunk: int | None = None, tap: Tap = untouched
) -> StepOutput:
    """Takes whole prompts in, `chunk` tokens per request and step; the output is that of each request's last chunk.

    The logits are those of the last tokens, [B, V], in the order of `prompts`.

    Raises:
        ValueError: bad tokens, a sequence beyond `max_seq_len`, or too few free slots.
    """
    longest = max((len(ids) for ids in prompts.values()), default=0)
    size = chunk or max(longest, 1)
    last: dict[int, Tensor] = {}
    for start in range(0, max(longest, 1), size):
        part = {r: ids[start : start + size] for r, ids in prompts.items() if start < len(ids) or start == 0}
        out = _step(model, state, part, "unabsorbed", tap, all_logits=False)
        last |= dict(zip(part, out.logits, strict=True))
    return StepOutput(batch=out.batch, final_norm=out.final_norm, logits=torch.stack([last[r] for r in prompts]))


def decode(model: Model, state: State, tokens: Tokens, *, tap: Tap = untouched, all_logits: bool = False) -> StepOutput:
    """Takes the next token(s) of each request in: one in plain decode, several when drafts are verified.

    Args:
        model: configuration, weights and precision.
        state: changed in place.
        tokens: new token ids per request; the numbers may differ, and may be zero.
        tap: sees, and may replace, every stage.
        all_logits: logits of every token [T, V] instead of each request's last [B, V] (NaN for a request
            without tokens).

    Raises:
        ValueError: bad tokens, a sequence beyond `max_seq_len`, or too few free slots.
    """
    return _step(model, state, tokens, "absorbed", tap, all_logits=all_logits)


def _step(model: Model, state: State, tokens: Tokens, form: Form, tap: Tap, *, all_logits: bool) -> StepOutput:
    _check_tokens(model, state, tokens)
    batch = state.append(tokens)
    step = new_pass(model, state, batch, form, tap)
    h_TM = model.weights.embed[batch.tokens]
    residual_TM = torch.zeros_like(h_TM)
    for layer, w in enumerate(model.weights.layers):
        h_TM, residual_TM = decoder_layer(h_TM, residual_TM, w, layer, step)
    final_TM, _ = add_rms_norm(h_TM, residual_TM, model.weights.norm, model.config.norm_eps, model.precision)
    final_TM = tap("final_norm", -1, final_TM)
    rows_TM = final_TM if all_logits else last_rows(final_TM, batch)
    return StepOutput(batch=batch, final_norm=final_TM, logits=tap("logits", -1, rows_TM @ model.weights.head.T))


def last_rows(x_TM: Tensor, batch: Batch) -> Tensor:
    """The last row of each request, [B, M]; NaN for a request without tokens in this step."""
    rows = [x_TM[s.stop - 1] if s.stop > s.start else x_TM.new_full(x_TM.shape[1:], torch.nan) for s in batch.spans]
    return torch.stack(rows) if rows else x_TM[:0]


def _check_tokens(model: Model, state: State, tokens: Tokens) -> None:
    for request, ids in tokens.items():
        if any(not 0 <= token < model.config.vocab_size for token in ids):
            raise ValueError(f"request {request} has a token outside [0, {model.config.vocab_size})")
        total = len(state.tokens.get(request, ())) + len(ids)
        if total > model.config.max_seq_len:
            raise ValueError(f"request {request} would reach {total} tokens; max_seq_len is {model.config.max_seq_len}")
