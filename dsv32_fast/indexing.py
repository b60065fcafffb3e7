"""The lightning indexer on AITER's kernels: fp8 keys in a paged cache, fp8 queries, logits, top-k.

As in vLLM there is no Hadamard rotation (the reference has one; it leaves every score unchanged but for the
quantisation error), the head weights come from a bf16 product, and each query token is one row. Rows of short queries
take the paged kernels, longer ones (prefill chunks) gather their request's keys first.

Legend: T rows, M model width, L query latent, J indexer heads, I indexer width, S positions, K top-k.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv32_fast.kernels.protocol import CacheKernels, IndexerKernels
from dsv32_fast.layers import FP8, Table, layer_norm, linear, quantise_ue8m0, rope_half_split
from dsv32_fast.packing import Indexer
from dsv32_fast.state import Batch
from dsv32_ref.config import Config


@dataclass(frozen=True, kw_only=True)
class IndexQuery:
    """What the logits kernels receive: e4m3 queries [T, J, I], and fp32 head weights [T, J] with the query scales."""

    q: Tensor
    weights: Tensor


def _turn_first(x: Tensor, table: Table, config: Config) -> Tensor:
    """RoPE on the first part of each indexer head; MLA turns the last."""
    rope = config.qk_rope_head_dim
    return torch.cat([rope_half_split(x[..., :rope], table), x[..., rope:]], -1)


def index_keys(a_TM: Tensor, w: Indexer, table: Table, config: Config, kernels: CacheKernels) -> Tensor:
    """Normed and turned keys [T, I], before quantisation."""
    k_TI = layer_norm(linear(a_TM, w.k, kernels), w.k_norm_weight, w.k_norm_bias, config.norm_eps)
    return _turn_first(k_TI, table, config)


def index_queries(
    qr_TL: Tensor, w: Indexer, table: Table, config: Config, kernels: CacheKernels
) -> tuple[Tensor, Tensor]:
    """e4m3 queries [T, J, I] and their power-of-two scales [T, J]."""
    q_TJI = linear(qr_TL, w.q_b, kernels).view(len(qr_TL), config.index_n_heads, config.index_head_dim)
    return quantise_ue8m0(_turn_first(q_TJI, table, config))


def head_weights(a_TM: Tensor, scale_TJ: Tensor, w: Indexer, config: Config, kernels: CacheKernels) -> Tensor:
    """fp32 [T, J]: the activation-typed projection times query scale, J^-0.5 and I^-0.5."""
    w_TJ = linear(a_TM, w.head_weights, kernels).float()
    return w_TJ * scale_TJ * float(config.index_head_dim**-0.5) * float(config.index_n_heads**-0.5)


def write_keys(k_TI: Tensor, cache_PSX: Tensor, slots_T: Tensor, *, preshuffle: bool, kernels: IndexerKernels) -> None:
    """Quantises the keys, one ue8m0 scale each, and stores them; rows with slot -1 are skipped."""
    kernels.indexer_k_quant_and_cache(k_TI, cache_PSX, slots_T, k_TI.shape[1], "ue8m0", preshuffle=preshuffle)


@dataclass(frozen=True, kw_only=True)
class Ways:
    """The rows of a step by the kernels that they take."""

    paged: Tensor
    """Row numbers, padding included."""
    gathered: tuple[tuple[int, slice], ...]
    """(request, its rows)."""

    @property
    def gathered_rows(self) -> Tensor:
        """Row numbers of all gathered requests."""
        return torch.tensor(
            [row for _, rows in self.gathered for row in range(rows.start, rows.stop)], dtype=torch.int64
        )


def split_rows(batch: Batch, longest_paged: int) -> Ways:
    """Requests with more than `longest_paged` query tokens are gathered."""
    gathered = tuple((r, rows) for r, rows in enumerate(batch.spans()) if rows.stop - rows.start > longest_paged)
    taken = {row for _, rows in gathered for row in range(rows.start, rows.stop)}
    paged = torch.tensor([row for row in range(batch.step.num_tokens) if row not in taken], dtype=torch.int64)
    return Ways(paged=paged, gathered=gathered)


def index_scores(
    query: IndexQuery,
    cache_PSX: Tensor,
    batch: Batch,
    ways: Ways,
    *,
    width: int,
    preshuffle: bool,
    kernels: IndexerKernels,
) -> Tensor:
    """I(t, s), fp32 [T, width], at least the longest sequence wide; -inf where a row may not look."""
    scores_TS = torch.full((batch.step.num_tokens, width), -torch.inf, device=query.q.device)
    if width and len(ways.paged):
        _paged(query, cache_PSX, batch, ways.paged, scores_TS, preshuffle, kernels)
    for request, rows in ways.gathered:
        _gathered(query, cache_PSX, batch, (request, rows), scores_TS, preshuffle, kernels)
    return scores_TS


def _paged(
    query: IndexQuery,
    cache_PSX: Tensor,
    batch: Batch,
    rows: Tensor,
    scores_TS: Tensor,
    preshuffle: bool,
    kernels: IndexerKernels,
) -> None:
    """One kernel call in which every row is a request of its own, with the block table of its request."""
    logits_RS = torch.full((len(rows), scores_TS.shape[1]), -torch.inf, device=scores_TS.device)
    table_RP = batch.block_table[batch.owner[rows]].clamp_min(0)
    kernels.deepgemm_fp8_paged_mqa_logits(
        query.q.view(torch.uint8)[rows, None].view(FP8),  # torch indexes no fp8
        cache_PSX[:, :, None],
        query.weights[rows],
        logits_RS,
        batch.lengths[rows],
        table_RP,
        scores_TS.shape[1],
        Preshuffle=preshuffle,
        KVBlockSize=cache_PSX.shape[1],
    )
    scores_TS[rows] = logits_RS


def _gathered(
    query: IndexQuery,
    cache_PSX: Tensor,
    batch: Batch,
    request: tuple[int, slice],
    scores_TS: Tensor,
    preshuffle: bool,
    kernels: IndexerKernels,
) -> None:
    """One request: its keys are copied out of the cache, and row j sees the first lengths[j] of them."""
    number, rows = request
    length, device = batch.step.seq_lens[number], scores_TS.device
    keys_SI = torch.empty(length, query.q.shape[-1], dtype=torch.uint8, device=device)
    scale_S1 = torch.empty(length, 1, device=device)
    bounds = torch.tensor([0, length], dtype=torch.int32, device=device)
    table_1P = batch.block_table[number : number + 1]
    kernels.cp_gather_indexer_k_quant_cache(cache_PSX, keys_SI, scale_S1, table_1P, bounds, preshuffle=preshuffle)
    lengths = batch.lengths[rows]
    keys = keys_SI.view(FP8)
    logits = kernels.fp8_mqa_logits(query.q[rows], keys, scale_S1[:, 0], query.weights[rows], lengths * 0, lengths)
    scores_TS[rows, :length] = logits


def select(scores_TS: Tensor, batch: Batch, ways: Ways, k: int, kernels: IndexerKernels) -> Tensor:
    """The K best positions of each row [T, K] int32, in the kernel's order; -1 pads short rows."""
    device = scores_TS.device
    topk_TK = torch.full((len(scores_TS), k), -1, dtype=torch.int32, device=device)
    both = [(ways.paged, False)] + ([(ways.gathered_rows, True)] if ways.gathered else [])
    for rows, prefill in both:
        if len(rows) == 0 or scores_TS.shape[1] == 0:
            continue
        logits_RS, lengths_R = scores_TS[rows].contiguous(), batch.lengths[rows]
        found_RK = torch.full((len(rows), k), -1, dtype=torch.int32, device=device)
        size = (len(rows), logits_RS.stride(0), logits_RS.stride(1))
        if prefill:
            kernels.top_k_per_row_prefill(logits_RS, lengths_R * 0, lengths_R, found_RK, None, *size, k=k)
        else:
            kernels.top_k_per_row_decode(logits_RS, 1, lengths_R, found_RK, *size, k=k)
        topk_TK[rows] = found_RK
    return topk_TK
