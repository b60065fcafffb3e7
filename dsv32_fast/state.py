"""Requests, pages and caches of the optimised path, and one step's batch as its kernels see it.

Every layer has a latent cache (bf16 or fp8) and a page-planar fp8 cache of indexer keys, with the same block tables.
Pages are handed out last freed first, so a request's slots are neither contiguous nor in order. Fresh pages hold NaN,
so that a read of something never written shows.

Legend: T rows of the step (padding included), B requests, P pages, S slots of a page, D latent + RoPE width, I indexer
width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv32_fast.batch import StepBatch
from dsv32_ref.config import Config

Tokens = Mapping[int, Sequence[int]]
"""New token ids of each request, by request id."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One step: the rows of all requests in order, then padding rows (token, position and length 0, slot -1)."""

    requests: tuple[int, ...]
    step: StepBatch
    tokens: Tensor
    """[T] int64."""
    positions: Tensor
    """[T] int64, within the request."""
    lengths: Tensor
    """[T] int32: cached tokens that a row may see, itself included."""
    new_slots: Tensor
    """[T] int64: where each token is cached."""
    block_table: Tensor
    """[B, pages] int32, -1 where a request has no page."""
    owner: Tensor
    """[T] int64: the request that each row belongs to; 0 in padding rows."""

    @property
    def live(self) -> int:
        """Rows that are not padding."""
        return self.step.num_query_tokens

    def spans(self) -> list[slice]:
        """The rows of each request."""
        ends = [sum(self.step.query_lens[: r + 1]) for r in range(len(self.requests))]
        return [slice(end - q, end) for end, q in zip(ends, self.step.query_lens, strict=True)]


class CacheState:
    """Tokens, pages and caches of all requests.

    Args:
        config: dimensions.
        n_slots: tokens that the caches hold in all, rounded up to whole pages.
        page_size: tokens per page.
        device: of the caches.
        kv_dtype: of the latents, bf16 or fp8.

    Raises:
        ValueError: a size that is not positive.
    """

    def __init__(
        self,
        config: Config,
        n_slots: int,
        page_size: int,
        device: torch.device,
        kv_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        if n_slots < 1 or page_size < 1:
            raise ValueError(f"n_slots {n_slots} and page_size {page_size} must be positive")
        n_pages = -(-n_slots // page_size)
        self.page_size, self.device = page_size, device
        self.tokens: dict[int, list[int]] = {}
        self.pages: dict[int, list[int]] = {}
        self.free = list(range(n_pages))
        shape, index_width = (n_pages, page_size), config.index_head_dim + 4
        self.latent = [
            torch.full((*shape, config.latent_dim), torch.nan, dtype=kv_dtype, device=device)
            for _ in range(config.n_layers)
        ]
        self.index = [
            torch.full((*shape, index_width), 0xFF, dtype=torch.uint8, device=device) for _ in range(config.n_layers)
        ]

    @property
    def preshuffle(self) -> bool:
        """Whether indexer keys lie in 16 x 16 tiles: as vLLM on ROCm stores them in pages of 64."""
        return self.page_size == 64

    def slots(self, request: int) -> Tensor:
        """Physical slots [length] int64 of a request's tokens, in order."""
        position = torch.arange(len(self.tokens[request]))
        return (
            torch.tensor(self.pages[request])[position // self.page_size] * self.page_size + position % self.page_size
        )

    def truncate(self, request: int, length: int) -> None:
        """Forgets the tokens behind the first `length`, for example rejected drafts, and frees whole pages.

        Raises:
            ValueError: the request is unknown, or shorter.
        """
        if request not in self.tokens:
            raise ValueError(f"request {request} is not here; it cannot be truncated or released")
        if not 0 <= length <= len(self.tokens[request]):
            raise ValueError(f"length {length}: request {request} has {len(self.tokens[request])} tokens")
        keep = -(-length // self.page_size)
        self.free += self.pages[request][keep:]
        del self.pages[request][keep:], self.tokens[request][length:]

    def release(self, request: int) -> None:
        """Drops a finished or preempted request."""
        self.truncate(request, 0)
        del self.pages[request], self.tokens[request]

    def append(self, new: Tokens, padded_rows: int = 0) -> Batch:
        """Admits unknown requests, takes their tokens in and gives every token a slot; nothing changes on an error.

        Raises:
            ValueError: too few free pages, or fewer padded rows than tokens.
        """
        before = {request: len(self.tokens.get(request, ())) for request in new}
        step = StepBatch(
            query_lens=tuple(len(ids) for ids in new.values()),
            seq_lens=tuple(before[request] + len(ids) for request, ids in new.items()),
            num_tokens=padded_rows,
        )
        self._grow(dict(zip(new, step.seq_lens, strict=True)))
        for request, ids in new.items():
            self.tokens.setdefault(request, []).extend(ids)
        return self._batch(tuple(new), step, new)

    def _grow(self, lengths: Mapping[int, int]) -> None:
        need = {r: -(-n // self.page_size) - len(self.pages.get(r, ())) for r, n in lengths.items()}
        if sum(need.values()) > len(self.free):
            raise ValueError(
                f"n_slots: the step needs {sum(need.values())} pages and {len(self.free)} are free; release a request"
            )
        for request, pages in need.items():
            self.pages.setdefault(request, []).extend(self.free.pop() for _ in range(pages))

    def _batch(self, requests: tuple[int, ...], step: StepBatch, new: Tokens) -> Batch:
        rows, padding = step.num_tokens, step.num_tokens - step.num_query_tokens
        positions = [torch.arange(s - q, s) for q, s in zip(step.query_lens, step.seq_lens, strict=True)]
        slots = [self.slots(r)[s - q :] for r, q, s in zip(requests, step.query_lens, step.seq_lens, strict=True)]
        owner = torch.arange(len(requests)).repeat_interleave(torch.tensor(step.query_lens, dtype=torch.int64))

        def padded(parts: Sequence[Tensor], value: int) -> Tensor:
            whole = torch.cat([*parts, torch.full((padding,), value)]) if rows else torch.empty(0)
            return whole.to(torch.int64).to(self.device)

        table = torch.full((len(requests), max((len(self.pages[r]) for r in requests), default=0)), -1)
        for row, request in enumerate(requests):
            table[row, : len(self.pages[request])] = torch.tensor(self.pages[request])
        return Batch(
            requests=requests,
            step=step,
            tokens=padded([torch.tensor([token for ids in new.values() for token in ids], dtype=torch.int64)], 0),
            positions=padded(positions, 0),
            lengths=padded([p + 1 for p in positions], 0).int(),
            new_slots=padded(slots, -1),
            block_table=table.int().to(self.device),
            owner=padded([owner], 0),
        )
