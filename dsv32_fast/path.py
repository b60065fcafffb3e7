"""The optimised decode step: the whole model on AITER's kernels, with the switches of vLLM PR #42982.

Beside `dsv32_ref.decode.decode`: the same tokens go in, the same stage names come out, so that any stage of one can be
compared with, or replaced by, the other. Decisions (`index_topk`, `gate_idx`) are sets: their order is the kernel's.
`latent`, `attn_in`, `index_score`, `attn_out`, `residual`, `ffn_in`, `gate_logits`, `gate_idx`, `gate_w`, `ffn_out`,
`final_norm` and `logits` mean what they mean there; `index_q`, `index_q_scale`, `index_w`, `attn_q` and `attn_z` (what
the kernels receive and return; queries of an fp8 cache as the values that their e4m3 numbers stand for) are this path's
own. Stages never contain the padding rows of a graph.

Legend: T rows (padding included), B requests, M model width, L query latent, K top-k, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from dsv32_fast import attention, experts, indexing, router
from dsv32_fast.kernels.protocol import Kernels
from dsv32_fast.layers import FP8, Table, add_rms_norm, product, rope_table
from dsv32_fast.metadata import BuilderConfig, MetadataBuilder, SparseMlaMetadata
from dsv32_fast.options import Options
from dsv32_fast.packing import Layer, Moe, Shuffle, moved, natural, pack
from dsv32_fast.state import Batch, CacheState, Tokens
from dsv32_ref.config import Config
from dsv32_ref.weights import Weights

STAGES = (
    "attn_in",
    "latent",
    "index_q",
    "index_q_scale",
    "index_w",
    "index_score",
    "index_topk",
    "attn_q",
    "attn_z",
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
"""In the order of computation."""
Tap = Callable[[str, int, Tensor], Tensor]
"""(stage, layer, value) -> the value to go on with, of the same shape; the layer of final_norm and logits is -1."""


def untouched(_stage: str, _layer: int, value: Tensor) -> Tensor:
    """The tap that does nothing."""
    return value


@dataclass(frozen=True, kw_only=True)
class PathConfig:
    """What the engine around the model fixes.

    Raises:
        ValueError: activations that the kernels cannot take.
    """

    device: str = "cpu"
    """Where weights, caches and buffers live; "cuda" on ROCm too."""
    max_num_batched_tokens: int = 8192
    page_size: int = 64
    activations: torch.dtype = torch.bfloat16
    """torch.float32 isolates effects: only what kernels and caches fix (q, latents, attn_z) is bf16 or fp8 then."""
    gate_gemm: router.GateGemm = "fp32"
    """What the gate's GEMM stores under logits=fp32; "bf16" is vLLM on ROCm at the time of #42982."""
    longest_paged: int = 4
    """Query tokens per request up to which the paged indexer kernels are used (1 + drafts)."""
    compute_units: int = 256
    kv_cache: Literal["bf16", "fp8"] = "bf16"
    """How latents are stored; fp8 makes the queries and the kernel's probabilities fp8 too."""
    q_scale: float = 1.0
    """Of the queries that meet an fp8 cache, per tensor (vLLM's layer._q_scale, 1 unless calibrated)."""
    kv_scale: float = 1.0
    """Of an fp8 cache, per tensor (vLLM's layer._k_scale)."""
    max_model_len: int = 0
    """Columns of the indexer's scores and, by pages, of block tables; 0 takes the longest sequence of each step, which
    a graph cannot hold."""
    shuffle: Shuffle = natural
    """What `fused_moe` wants done to its weights: `aiter.ops.shuffle.shuffle_weight` on a GPU."""

    def __post_init__(self) -> None:
        if self.activations not in (torch.bfloat16, torch.float32):
            raise ValueError(f"activations {self.activations}: choose torch.bfloat16 or torch.float32")
        if self.kv_cache not in ("bf16", "fp8"):
            raise ValueError(f"kv_cache {self.kv_cache!r}: choose bf16 or fp8")
        for name in ("q_scale", "kv_scale"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise ValueError(f"{name} {getattr(self, name)}: give a finite positive number")

    @property
    def kv_dtype(self) -> torch.dtype:
        """Of the latent cache."""
        return FP8 if self.kv_cache == "fp8" else torch.bfloat16


@dataclass(frozen=True, kw_only=True)
class StepOutput:
    """What a step gives: hidden states after the final norm [live rows, M], logits fp32 [B, V] or [live rows, V]."""

    batch: Batch
    metadata: SparseMlaMetadata
    final_norm: Tensor
    logits: Tensor


@dataclass(frozen=True, kw_only=True)
class Step:
    """The surroundings of one layer in one step."""

    config: Config
    state: CacheState
    batch: Batch
    metadata: SparseMlaMetadata
    ways: indexing.Ways
    width: int
    """Columns of the indexer's scores."""
    tap: Tap = untouched

    @cached_property
    def rope(self) -> Table:
        """Of the step's positions."""
        return rope_table(self.config, self.batch.positions)

    def __call__(self, stage: str, layer: int, value: Tensor) -> Tensor:
        """Shows the live rows of `value` to the tap and puts its answer, converted to `value`, in their place.

        Raises:
            ValueError: the answer has another shape.
        """
        live = value[: self.batch.live]
        answer = self.tap(stage, layer, live)
        if answer is live:
            return value
        if answer.shape != live.shape:
            raise ValueError(f"tap: {stage} of layer {layer} is {tuple(answer.shape)}; give {tuple(live.shape)}")
        return torch.cat([answer.to(value), value[self.batch.live :]])


class DecodePath:
    """The optimised path over one model; it owns the metadata builder, hence the cached plan.

    Args:
        config: dimensions; `index_topk` must be a multiple of 128 on real kernels.
        weights: the model; matrices are converted to the activation dtype, block-fp8 ones stay fp8.
        options: the switches of the path.
        kernels: `dsv32_fast.kernels.aiter.load()`, or the module `dsv32_fast.kernels.emulated.api`.
        path: sizes and precision that the engine fixes.
    """

    def __init__(
        self, config: Config, weights: Weights, options: Options, kernels: Kernels, path: PathConfig | None = None
    ) -> None:
        self.config, self.options, self.kernels, self.path = config, options, kernels, path or PathConfig()
        self.device = torch.device(self.path.device)
        packed = pack(config, weights, options, self.path.activations, self.path.shuffle)
        self.weights = moved(packed, self.device)
        self.casts = router.Casts()
        self.scales = self._scales()
        sizes = BuilderConfig(
            num_heads=config.n_heads,
            topk=config.index_topk,
            max_num_batched_tokens=self.path.max_num_batched_tokens,
            compute_units=self.path.compute_units,
            q_dtype=self.path.kv_dtype,  # as vLLM 0.33; before, an fp8 cache was planned as if queries were bf16
            kv_dtype=self.path.kv_dtype,
        )
        self.builder = MetadataBuilder(config=sizes, options=options, kernels=kernels, device=self.device)

    def new_state(self, n_slots: int) -> CacheState:
        """Empty caches for `n_slots` tokens."""
        return CacheState(self.config, n_slots, self.path.page_size, self.device, self.path.kv_dtype)

    def _scales(self) -> attention.Fp8Scales | None:
        if self.path.kv_cache == "bf16":
            return None
        q, kv = (torch.tensor([scale], device=self.device) for scale in (self.path.q_scale, self.path.kv_scale))
        return attention.Fp8Scales(q=q, kv=kv)

    def decode(
        self, state: CacheState, tokens: Tokens, *, padded_rows: int = 0, tap: Tap = untouched, all_logits: bool = False
    ) -> StepOutput:
        """Takes the next token(s) of each request in: plain decode, drafts to verify, or a chunk of a prompt.

        Args:
            state: changed in place.
            tokens: new token ids per request; the numbers may differ, and may be zero.
            padded_rows: rows of the step after graph padding; 0 for none.
            tap: sees, and may replace, every stage.
            all_logits: logits of every token instead of each request's last (NaN for a request without tokens).

        Raises:
            ValueError: bad tokens, a sequence beyond `max_seq_len` or `max_model_len`, too few free slots, or more rows
                than max_num_batched_tokens. Nothing has changed then.
        """
        self.check(state, tokens, padded_rows)
        batch = state.append(tokens, padded_rows)
        step = Step(
            config=self.config,
            state=state,
            batch=batch,
            metadata=self.builder.build(batch.step),
            ways=indexing.split_rows(batch, self.path.longest_paged),
            width=self.path.max_model_len or max(batch.step.seq_lens, default=0),
            tap=tap,
        )
        final_TM = self.forward(step)
        if all_logits:
            logits = step("logits", -1, self.head(final_TM))[: batch.live]
        else:
            logits = tap("logits", -1, self.head(_last_rows(final_TM, batch)))
        return StepOutput(batch=batch, metadata=step.metadata, final_norm=final_TM[: batch.live], logits=logits)

    def forward(self, step: Step) -> Tensor:
        """All layers on a batch and its metadata: hidden states after the final norm [T, M], padding included.

        Static shapes throughout, and no value is read on the host unless some rows are gathered, so a graph holds it.
        """
        h_TM = self.weights.embed[step.batch.tokens]
        residual_TM = torch.zeros_like(h_TM)
        for layer, w in enumerate(self.weights.layers):
            h_TM, residual_TM = self._layer(h_TM, residual_TM, w, layer, step)
        final_TM, _ = add_rms_norm(h_TM, residual_TM, self.weights.norm, self.config.norm_eps)
        return step("final_norm", -1, final_TM)

    def head(self, rows_TM: Tensor) -> Tensor:
        """Logits, fp32 [T, V]."""
        return product(rows_TM, self.weights.head).float()

    def _layer(self, h_TM: Tensor, residual_TM: Tensor, w: Layer, layer: int, step: Step) -> tuple[Tensor, Tensor]:
        eps = self.config.norm_eps
        a_TM, residual_TM = add_rms_norm(h_TM, residual_TM, w.attn_norm, eps)
        h_TM = step("attn_out", layer, self._attention(step("attn_in", layer, a_TM), w, layer, step))
        f_TM, residual_TM = add_rms_norm(h_TM, residual_TM, w.ffn_norm, eps)
        residual_TM = step("residual", layer, residual_TM)
        return step("ffn_out", layer, self._feed_forward(step("ffn_in", layer, f_TM), w, layer, step)), residual_TM

    def _attention(self, a_TM: Tensor, w: Layer, layer: int, step: Step) -> Tensor:
        config, kernels, attn = self.config, self.kernels, w.attn
        qr_TL = attention.query_latent(a_TM, attn, config, kernels)
        kv_TD = step("latent", layer, attention.latents(a_TM, attn, step.rope, config, kernels))
        cache_PSD = step.state.latent[layer]
        attention.write_latents(kv_TD, cache_PSD, step.batch.new_slots, config, kernels, self.scales)
        topk_TK = self._select(a_TM, qr_TL, w, layer, step)
        attention.fill_gather_list(topk_TK, step.metadata, step.batch.block_table, step.state.page_size)
        q_THD = attention.absorbed_queries(qr_TL, attn, step.rope, config, kernels)
        q_THD = step("attn_q", layer, attention.received_queries(q_THD, self.scales))
        z_THC = attention.decode(q_THD, cache_PSD, step.metadata, config, kernels, self.scales)
        z_THC = step("attn_z", layer, z_THC)
        return attention.output(z_THC, attn, a_TM.dtype, kernels)

    def _select(self, a_TM: Tensor, qr_TL: Tensor, w: Layer, layer: int, step: Step) -> Tensor:
        """The positions [T, K] that each row attends to, within its own request; -1 pads."""
        config, kernels, index, state = self.config, self.kernels, w.indexer, step.state
        cache, layout = state.index[layer], state.preshuffle
        k_TI = indexing.index_keys(a_TM, index, step.rope, config, kernels)
        indexing.write_keys(k_TI, cache, step.batch.new_slots, preshuffle=layout, kernels=kernels)
        q_TJI, scale_TJ = indexing.index_queries(qr_TL, index, step.rope, config, kernels)
        q_TJI = step("index_q", layer, q_TJI.float()).to(FP8)
        scale_TJ = step("index_q_scale", layer, scale_TJ)
        w_TJ = step("index_w", layer, indexing.head_weights(a_TM, scale_TJ, index, config, kernels))
        query = indexing.IndexQuery(q=q_TJI, weights=w_TJ)
        scores_TS = indexing.index_scores(
            query, cache, step.batch, step.ways, width=step.width, preshuffle=layout, kernels=kernels
        )
        scores_TS = step("index_score", layer, scores_TS)
        return step("index_topk", layer, indexing.select(scores_TS, step.batch, step.ways, config.index_topk, kernels))

    def _feed_forward(self, f_TM: Tensor, w: Layer, layer: int, step: Step) -> Tensor:
        if not isinstance(w.ffn, Moe):
            return experts.mlp(f_TM, w.ffn, self.kernels)
        gate = w.ffn.gate
        logits_TE = router.gate_logits(f_TM, gate, self.options.logits, self.path.gate_gemm, self.casts)
        logits_TE = step("gate_logits", layer, logits_TE)
        ids_TK, weights_TK = router.choose_experts(logits_TE, gate.bias, self.config, self.kernels)
        chosen_TK = step("gate_idx", layer, ids_TK)
        if chosen_TK is not ids_TK:
            weights_TK = router.weights_for(chosen_TK, ids_TK, weights_TK, logits_TE, self.config)
        weights_TK = step("gate_w", layer, weights_TK)
        return experts.mixture(f_TM, weights_TK, chosen_TK, w.ffn, self.kernels)

    def check(self, state: CacheState, tokens: Tokens, padded_rows: int) -> None:
        """Refuses what `decode` cannot take; raises ValueError as documented there."""
        rows = max(padded_rows, sum(len(ids) for ids in tokens.values()))
        if rows > self.path.max_num_batched_tokens:
            raise ValueError(
                f"the step has {rows} rows, above max_num_batched_tokens {self.path.max_num_batched_tokens}"
            )
        for request, ids in tokens.items():
            if any(not 0 <= token < self.config.vocab_size for token in ids):
                raise ValueError(f"request {request} has a token outside [0, {self.config.vocab_size})")
            total = len(state.tokens.get(request, ())) + len(ids)
            for name, most in (("max_seq_len", self.config.max_seq_len), ("max_model_len", self.path.max_model_len)):
                if 0 < most < total:
                    raise ValueError(f"request {request} would reach {total} tokens; {name} is {most}")


def _last_rows(x_TM: Tensor, batch: Batch) -> Tensor:
    """The last row of each request, [B, M]; NaN for a request without tokens in this step."""
    rows = [x_TM[s.stop - 1] if s.stop > s.start else x_TM.new_full(x_TM.shape[1:], torch.nan) for s in batch.spans()]
    return torch.stack(rows) if rows else x_TM[:0]
