"""What a decode step reads and changes: the model, the state of all requests, and one step's batch.

Legend: B requests, T query tokens of all requests in a row, S cached tokens of one request, K top-k.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv32_ref.cache import CacheFormat, IndexCache, LatentCache, PageTable
from dsv32_ref.config import FP32, Config, Precision
from dsv32_ref.weights import Weights

Tokens = Mapping[int, Sequence[int]]
"""New token ids of each request, by request id."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """What does not change between steps."""

    config: Config
    weights: Weights
    precision: Precision = FP32


class State:
    """What changes between steps: each request's tokens, its pages, and every layer's caches.

    Args:
        model: fixes the dimensions and, by the dtype of its weights, the compute dtype.
        n_slots: tokens that the caches hold in all; rounded up to whole pages.
        form: the byte layouts.
    """

    def __init__(self, model: Model, n_slots: int, form: CacheFormat | None = None) -> None:
        self.form = form or CacheFormat()
        config, dtype = model.config, model.weights.embed.dtype
        n_pages = -(-n_slots // self.form.page_size)
        self.table = PageTable(n_pages=n_pages, page_size=self.form.page_size)
        self.tokens: dict[int, list[int]] = {}
        layers = range(config.n_layers + len(model.weights.mtp))
        slots = n_pages * self.form.page_size
        self.latent = [LatentCache(config, self.form, slots, dtype) for _ in layers]
        self.index = [IndexCache(config, self.form, slots, dtype) for _ in layers]

    def fork(self, request: int, parent: int, length: int) -> None:
        """Admits `request` with the first `length` tokens of `parent` as its prefix, whose pages both read.

        Raises:
            ValueError: the prefix is longer than the parent or does not end at a page.
        """
        if length > len(self.tokens.get(parent, ())) or length % self.form.page_size:
            raise ValueError(
                f"a prefix of {length} tokens of request {parent} is not cached in whole pages; shorten it"
            )
        self.table.admit(request, self.table.pages[parent][: length // self.form.page_size])
        self.tokens[request] = self.tokens[parent][:length]

    def truncate(self, request: int, length: int) -> None:
        """Forgets the tokens behind the first `length`, for example rejected drafts."""
        if not 0 <= length <= len(self.tokens.get(request, ())):
            raise ValueError(
                f"length {length} is not within request {request}'s {len(self.tokens.get(request, ()))} tokens"
            )
        self.table.shrink(request, length)
        del self.tokens[request][length:]

    def preempt(self, request: int) -> list[int]:
        """Drops a request and its pages; its tokens are returned, and prefilling them again resumes it."""
        if request not in self.tokens:
            raise ValueError(f"request {request} is not here; it cannot be preempted")
        tokens = list(self.tokens[request])
        self.truncate(request, 0)
        del self.table.pages[request], self.tokens[request]
        return tokens

    def append(self, new: Tokens) -> Batch:
        """Admits unknown requests, takes the tokens in and gives every new token its slot."""
        spans: list[slice] = []
        positions, slots = [], []
        for request, ids in new.items():
            if request not in self.tokens:
                self.table.admit(request)
                self.tokens[request] = []
            start, stop = len(self.tokens[request]), len(self.tokens[request]) + len(ids)
            self.table.grow(request, stop)
            self.tokens[request].extend(ids)
            begin = spans[-1].stop if spans else 0
            spans.append(slice(begin, begin + len(ids)))
            positions.append(torch.arange(start, stop))
            slots.append(self.table.slots(request, 0, stop))
        flat = [token for ids in new.values() for token in ids]
        return Batch(
            requests=tuple(new),
            spans=tuple(spans),
            tokens=torch.tensor(flat, dtype=torch.int64),
            positions=torch.cat(positions) if positions else torch.empty(0, dtype=torch.int64),
            slots=tuple(slots),
        )


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One step's tokens: request b owns the rows `spans[b]`, and `slots[b]` holds all its cached tokens."""

    requests: tuple[int, ...]
    spans: tuple[slice, ...]
    tokens: Tensor
    """[T] int64."""
    positions: Tensor
    """[T] int64: the place of each token in its request."""
    slots: tuple[Tensor, ...]

    @property
    def lengths(self) -> Tensor:
        """How many cached tokens each row may see: its own and all before."""
        return self.positions + 1

    @property
    def new_slots(self) -> Tensor:
        """Where each new token is cached."""
        new = [slots_S[len(slots_S) - (rows.stop - rows.start) :] for rows, slots_S in self.owned()]
        return torch.cat(new) if new else torch.empty(0, dtype=torch.int64)

    def selected_slots(self, topk_TK: Tensor) -> Tensor:
        """Where the selected positions of each row are cached, without the columns that no row fills; -1 stays -1."""
        longest = max((len(slots_S) for slots_S in self.slots), default=0)
        slots_BS = torch.nn.utils.rnn.pad_sequence(list(self.slots), batch_first=True, padding_value=-1)
        sizes_B = torch.tensor([rows.stop - rows.start for rows in self.spans])
        owner_T = torch.arange(len(self.spans)).repeat_interleave(sizes_B)
        topk_TK = topk_TK[:, :longest]
        return slots_BS[owner_T[:, None], topk_TK.clamp_min(0)].masked_fill(topk_TK < 0, -1)

    def owned(self) -> list[tuple[slice, Tensor]]:
        """(rows, slots) of each request."""
        return list(zip(self.spans, self.slots, strict=True))
