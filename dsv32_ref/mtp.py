"""The multi-token-prediction layer, which drafts the token after next (DeepSeek-V3 report, section 2.2).

Legend: T query tokens, M model width, B requests, V vocabulary.
For a token at position p the layer joins the embedding of token p + 1 with the main model's hidden state at p,
embedding FIRST (the report's formula has them the other way round; the weight is called `eh_proj`), and runs one
decoder layer with its own caches. The hidden state is the one AFTER the final norm. Embedding
and head are the main model's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv32_ref.config import FP32, Config, Precision
from dsv32_ref.decode import StepOutput, Tap, decoder_layer, last_rows, new_pass, untouched
from dsv32_ref.norm import add_rms_norm, rms_norm
from dsv32_ref.quant import linear
from dsv32_ref.state import Model, State
from dsv32_ref.weights import MtpWeights


def join(embed_TM: Tensor, hidden_TM: Tensor, w: MtpWeights, config: Config, precision: Precision = FP32) -> Tensor:
    """eh_proj [rms(embedding); rms(hidden)], [T, M]."""
    e_TM = rms_norm(embed_TM, w.enorm, config.norm_eps, precision)
    h_TM = rms_norm(hidden_TM, w.hnorm, config.norm_eps, precision)
    return linear(torch.cat([e_TM, h_TM], -1), w.eh_proj, precision)


def draft(
    model: Model, state: State, previous: StepOutput, next_T: Tensor, *, number: int = 0, tap: Tap = untouched
) -> StepOutput:
    """Drafts from the rows of `previous`, the step that was just run. Call it after every step, each chunk of a prefill
    included.

    Args:
        model: configuration, weights and precision.
        state: its MTP caches are written at the positions of `previous`.
        previous: the main model's output, or a draft's when drafts are chained.
        next_T: the token that follows each row of `previous`, int64 [T].
        number: which MTP layer.
        tap: sees, and may replace, every stage; the layer's number is n_layers + number.

    Returns:
        The hidden states after `shared_head.norm`, and the logits [B, V] of each request's last row.

    Raises:
        ValueError: no such MTP layer, or not one next token per row.
    """
    if not 0 <= number < len(model.weights.mtp):
        raise ValueError(f"MTP layer {number} is not there; the weights hold {len(model.weights.mtp)}")
    if next_T.shape != previous.batch.tokens.shape:
        raise ValueError(f"next_T is {tuple(next_T.shape)}; give one token per row of {len(previous.batch.tokens)}")
    w, layer = model.weights.mtp[number], model.config.n_layers + number
    step = new_pass(model, state, previous.batch, "absorbed", tap)
    u_TM = join(model.weights.embed[next_T], previous.final_norm, w, model.config, model.precision)
    h_TM, residual_TM = decoder_layer(u_TM, torch.zeros_like(u_TM), w.layer, layer, step)
    final_TM, _ = add_rms_norm(h_TM, residual_TM, w.norm, model.config.norm_eps, model.precision)
    logits_BV = last_rows(final_TM, previous.batch) @ model.weights.head.T
    return StepOutput(batch=previous.batch, final_norm=final_TM, logits=logits_BV)
