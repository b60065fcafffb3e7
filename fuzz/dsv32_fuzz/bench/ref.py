"""How fast the reference decodes beside transformers: the same weights, threads and process, and equal results.

Contract: `bench_ref` returns data and prints nothing. Both sides run alternately on what they have cached, and
medians are reported; a comparison whose results differ raises, since then the times mean nothing. Needs the `oracle`
extra.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import msgspec
import torch
from torch import Tensor

from dsv32_fuzz.golden.oracle import hf_config, hf_model
from dsv32_ref.checkpoint import hf_name
from dsv32_ref.config import GOLDEN, Config
from dsv32_ref.decode import attention, decode, new_pass, untouched
from dsv32_ref.quant import hadamard_matrix
from dsv32_ref.state import Batch, Model, State
from dsv32_ref.weights import assemble, synthetic

ATOL, RTOL = 2e-5, 1e-5
"""Two fp32 implementations agree to this (see the replay of recorded decodes)."""
TRUE_LAYER = Config().replace(vocab_size=8, n_layers=1, n_dense_layers=1, inter_dim=8)
"""The true attention and indexer; vocabulary and feed-forward network are cut to almost nothing."""


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """One comparison on one workload."""

    name: str
    batch: int
    cached_tokens: int
    threads: int
    repeats: int
    reference_s: float
    """Median seconds of one decode step."""
    transformers_s: float
    matmul_s: float | None
    """Median seconds of the layer's bare weight products; None for a whole model."""
    largest_error: float
    """Between the two results of the first step, as a share of 2e-5 + 1e-5 |x|; at most 1."""

    @property
    def speedup(self) -> float:
        """How many times faster than transformers the reference is."""
        return self.transformers_s / self.reference_s

    @property
    def over_matmul(self) -> float | None:
        """Time as a multiple of the bare weight products."""
        return None if self.matmul_s is None else self.reference_s / self.matmul_s

    @property
    def tokens_per_s(self) -> float:
        """Decoded tokens per second of the reference."""
        return self.batch / self.reference_s


def bench_ref(
    *,
    small_contexts: tuple[int, ...] = (64, 1024),
    contexts: tuple[int, ...] = (256, 4096),
    repeats: int = 5,
    batch: int = 4,
    seed: int = 0,
) -> list[Timing]:
    """Decode of a small world, then one true-size MLA + indexer layer at batch 1, for each context length.

    Args:
        small_contexts: cached tokens per request in the small world. At 64 both sides are bound by the overhead of
            small operations and take about the same time; from 1024 on the form decides.
        contexts: cached tokens before the timed steps of the true-size layer; 1.7 GB of memory are needed.
        repeats: timed steps of each side.
        batch: requests in the small world.
        seed: of weights and tokens.

    Raises:
        ValueError: repeats or a context is not positive, or the two results differ.
    """
    if repeats < 1 or batch < 1 or not all(context > 0 for context in small_contexts + contexts):
        raise ValueError(f"repeats {repeats}, batch {batch} and all contexts must be positive")
    with torch.no_grad():
        found = [_small_world(batch, repeats, seed, context) for context in small_contexts]
        if contexts:
            layer = _TrueLayer(seed)
            found += [layer.time(context, repeats) for context in contexts]
    return found


def _alternate(repeats: int, *sides: Callable[[], object]) -> list[float]:
    """Median seconds of each side, run in turns."""
    times: list[list[float]] = [[] for _ in sides]
    for _ in range(repeats):
        for side, taken in zip(sides, times, strict=True):
            start = time.perf_counter()
            side()
            taken.append(time.perf_counter() - start)
    return [statistics.median(taken) for taken in times]


def _agree(name: str, ours: Tensor, theirs: Tensor) -> float:
    used = float(((ours - theirs).abs() / (ATOL + RTOL * theirs.abs())).max())
    if not used <= 1:
        raise ValueError(
            f"{name}: the results differ by {used:.3g} times the tolerance; times of unequal work mean nothing"
        )
    return used


def _fill(config: Config, state: State, past: Any, batch: int, context: int, random: torch.Generator) -> None:
    """Random tokens cached for both sides, `context` per request, each in its own form.

    transformers keeps the rope part with even lanes before odd ones, and index keys that are not rotated by Hadamard
    (which is its own inverse). Filling the caches instead of prefilling keeps legal flips of one side's choices out.
    """
    new: Batch = state.append({request: [0] * context for request in range(batch)})
    rotation_II = hadamard_matrix(config.index_head_dim).to(torch.float32) * config.index_head_dim**-0.5
    for layer in range(config.n_layers):
        kv_TD = torch.randn(batch * context, config.latent_dim, generator=random)
        k_TI = torch.randn(batch * context, config.index_head_dim, generator=random)
        state.latent[layer].write(new.new_slots, kv_TD)
        state.index[layer].write(new.new_slots, k_TI, torch.ones(len(k_TI)))
        c_TC, pe_TR = kv_TD[:, : config.kv_lora_rank], kv_TD[:, config.kv_lora_rank :]
        pe_TR = torch.cat([pe_TR[:, 0::2], pe_TR[:, 1::2]], -1)
        past.update(c_TC.view(batch, 1, context, -1), pe_TR.view(batch, 1, context, -1), layer)
        past.update_indexer((k_TI @ rotation_II).view(batch, context, -1), layer)


def _small_world(batch: int, repeats: int, seed: int, context: int) -> Timing:
    from transformers import DynamicCache

    original = -(-(context + repeats + 2) // int(GOLDEN.rope_factor))
    config = GOLDEN.replace(original_seq_len=original, max_seq_len=original * int(GOLDEN.rope_factor))
    named, random = synthetic(config, seed), torch.Generator().manual_seed(seed)
    model, oracle = Model(config=config, weights=assemble(config, named)), hf_model(config, named)
    state, past = State(model, batch * (config.max_seq_len + 64)), DynamicCache(config=oracle.config)
    _fill(config, state, past, batch, context, random)
    tokens = torch.randint(config.vocab_size, (batch, 1), generator=random)
    step = {request: row.tolist() for request, row in enumerate(tokens)}

    def ours() -> Tensor:
        return decode(model, state, step).logits

    def theirs() -> Tensor:
        logits: Tensor = oracle(tokens, cache=past, use_cache=True).logits[:, -1]
        return logits

    error = _agree("small world", ours(), theirs())
    reference_s, transformers_s = _alternate(repeats, ours, theirs)
    return Timing(
        name="small world",
        batch=batch,
        cached_tokens=context,
        threads=torch.get_num_threads(),
        repeats=repeats,
        reference_s=reference_s,
        transformers_s=transformers_s,
        matmul_s=None,
        largest_error=error,
    )


class _TrueLayer:
    """One attention layer of the true dimensions on both sides; they share the weight tensors."""

    def __init__(self, seed: int) -> None:
        from transformers.models.deepseek_v32.modeling_deepseek_v32 import (
            DeepseekV32Attention,
            DeepseekV32RotaryEmbedding,
        )

        self.config, self.seed = TRUE_LAYER, seed
        named = synthetic(self.config, seed)
        self.model = Model(config=self.config, weights=assemble(self.config, named))
        self.hf_config = hf_config(self.config)
        self.hf_config._attn_implementation = "eager"
        with torch.device("meta"):
            self.attention = DeepseekV32Attention(self.hf_config, 0).eval()
        prefix = "model.layers.0.self_attn."
        own = {hf_name(name): tensor for name, tensor in named.items()}
        state = {name.removeprefix(prefix): tensor for name, tensor in own.items() if name.startswith(prefix)}
        self.attention.load_state_dict(state, assign=True)
        self.rotary = DeepseekV32RotaryEmbedding(self.hf_config)

    def time(self, context: int, repeats: int) -> Timing:
        """Times one decode step over `context` cached tokens, whose latents and index keys are drawn by seed."""
        from transformers import DynamicCache

        random = torch.Generator().manual_seed(self.seed)
        x_TM = torch.randn(1, self.config.dim, generator=random)
        state, past = State(self.model, context + repeats + 1), DynamicCache(config=self.hf_config)
        _fill(self.config, state, past, 1, context, random)

        def ours() -> Tensor:
            step = new_pass(self.model, state, state.append({0: [0]}), "absorbed", untouched)
            return attention(x_TM, self.model.weights.layers[0], 0, step)

        def theirs() -> Tensor:
            length = past.get_seq_length()
            table = self.rotary(x_TM, torch.tensor([[length]]))
            mask = torch.zeros(1, 1, 1, length + 1)
            result: Tensor = self.attention(x_TM[None], table, mask, cache=past)[0][0]
            return result

        error = _agree(f"true layer, {context} tokens", ours(), theirs())
        reference_s, transformers_s, matmul_s = _alternate(repeats, ours, theirs, lambda: self._products(x_TM))
        return Timing(
            name="true-size MLA + indexer layer",
            batch=1,
            cached_tokens=context,
            threads=torch.get_num_threads(),
            repeats=repeats,
            reference_s=reference_s,
            transformers_s=transformers_s,
            matmul_s=matmul_s,
            largest_error=error,
        )

    def _products(self, x_TM: Tensor) -> None:
        """Every weight product of the layer, and nothing else."""
        w, index = self.model.weights.layers[0].attn, self.model.weights.layers[0].indexer
        c = self.config
        heads = w.wkv_b.view(c.n_heads, -1, c.kv_lora_rank)  # type: ignore[union-attr]
        qr_TL = x_TM @ w.wq_a.T  # type: ignore[union-attr]
        q_HTX = (qr_TL @ w.wq_b.T).view(c.n_heads, 1, -1)  # type: ignore[union-attr]
        kv_TD = x_TM @ w.wkv_a.T  # type: ignore[union-attr]
        qa_HTC = q_HTX[..., : c.qk_nope_head_dim] @ heads[:, : c.qk_nope_head_dim]
        o_HTV = qa_HTC @ heads[:, c.qk_nope_head_dim :].mT
        _ = o_HTV.reshape(1, -1) @ w.wo.T, kv_TD  # type: ignore[union-attr]
        _ = qr_TL @ index.wq_b.T, x_TM @ index.wk.T, x_TM @ index.weights_proj.T  # type: ignore[union-attr]
