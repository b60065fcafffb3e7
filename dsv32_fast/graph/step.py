"""The whole decode step under graphs: tokens, positions, slots and block tables staged, everything behind captured.

A step appends its tokens, builds its metadata (the plan included, unless the builder's cache holds), copies its batch
into buffers that never move, and replays the graph of the next captured size. A graph holds `DecodePath.forward` and
the head: norms, projections, both caches' writes, indexer, top-k, gather list, attention, router, experts. Its
indexer scores `PathConfig.max_model_len` columns, since the longest sequence of a step would be baked in.

Legend: T rows of the step, N rows of the largest graph, B requests, P pages of a block table, M width, V vocabulary.
"""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dsv32_fast.batch import StepBatch
from dsv32_fast.graph.runner import GraphRunner, StepCall
from dsv32_fast.indexing import split_rows
from dsv32_fast.metadata import SparseMlaMetadata
from dsv32_fast.path import DecodePath, Step
from dsv32_fast.state import Batch, CacheState, Tokens

STAGED = ("tokens", "positions", "lengths", "new_slots", "block_table", "owner")
"""Fields of `Batch` that a step copies into its buffers."""
RENEWED = (*STAGED, "req_id_per_token", "paged_kv_indptr")


class Outputs(NamedTuple):
    """What a replay leaves, with padding rows."""

    final_norm: Tensor
    """[N, M]."""
    logits: Tensor
    """fp32 [N, V]."""


@dataclass(kw_only=True)
class GraphedDecode:
    """Captures the decode step of `path` over the caches of `state`, and replays it.

    Args:
        path: with a `max_model_len`.
        state: whose caches the graphs address; only their contents may change.
        runner: its largest size is the largest step.

    Raises:
        ValueError: the path has no `max_model_len`, or fewer max_num_batched_tokens than the largest size.
    """

    path: DecodePath
    state: CacheState
    runner: GraphRunner

    def __post_init__(self) -> None:
        path, N = self.path, self.runner.sizes[-1]
        self.width = path.path.max_model_len
        if self.width < 1:
            raise ValueError("max_model_len is not set; a graph cannot hold the longest sequence of each step")
        if path.path.max_num_batched_tokens < N:
            raise ValueError(f"max_num_batched_tokens {path.path.max_num_batched_tokens} is below the size {N}")
        self._captured = copy.copy(path)  # the same weights, plan and caches, with kernels that a capture can see
        self._captured.kernels = self.runner.recording(path.kernels)

        def rows(*inner: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(N, *inner, dtype=dtype, device=path.device)

        pages = -(-self.width // self.state.page_size)
        self._staged = {name: rows() for name in ("tokens", "positions", "new_slots", "owner")}
        self._staged |= {"lengths": rows(dtype=torch.int32), "block_table": rows(pages, dtype=torch.int32)}
        self.outputs = Outputs(
            final_norm=rows(path.config.dim, dtype=path.path.activations),
            logits=rows(path.config.vocab_size, dtype=torch.float32),
        )

    def capture(self) -> None:
        """Capture every size, largest first, each after the build of an idle step: rows without keys or slots."""
        for size in reversed(self.runner.sizes):
            for name in STAGED:
                self._view(name, size).fill_(-1 if name == "new_slots" else 0)
            idle = StepBatch(query_lens=(), seq_lens=(), num_tokens=size)
            metadata = self.path.builder.build(idle)
            body = functools.partial(self._body, size, self._step(size, metadata))
            self.runner.capture(size, body, self._call(size, metadata))

    def decode(self, tokens: Tokens) -> Outputs:
        """Take the next token(s) of each request in; rows of all tokens in order, as views that the next step reuses.

        Raises:
            ValueError: as `DecodePath.decode`, or a request with more than `longest_paged` tokens, or more tokens than
                the largest size: such steps run by `DecodePath.decode`. Nothing has changed then.
            GraphFaultError: the log is strict and the replay would not compute this step.
        """
        longest = self.path.path.longest_paged
        for request, ids in tokens.items():
            if len(ids) > longest:
                raise ValueError(
                    f"request {request} has {len(ids)} tokens, above longest_paged {longest}; run it eagerly"
                )
        live = sum(len(ids) for ids in tokens.values())
        size = self.runner.padded_rows(max(live, len(tokens), 1))
        self.path.check(self.state, tokens, size)
        batch = self.state.append(tokens, size)
        metadata = self.path.builder.build(batch.step)
        self._stage(batch, size)
        self.runner.replay(size, self._call(size, metadata))
        return Outputs(*(output[:live] for output in self.outputs))

    def _stage(self, batch: Batch, size: int) -> None:
        """Copy a batch into the buffers; what a shorter block table leaves is -1."""
        for name in STAGED:
            buffer, value = self._view(name, size), getattr(batch, name)
            if name == "block_table":
                buffer.fill_(-1)
                buffer[: value.shape[0], : value.shape[1]].copy_(value)
            else:
                buffer.copy_(value)

    def _view(self, name: str, size: int) -> Tensor:
        return self._staged[name][:size]

    def _step(self, size: int, metadata: SparseMlaMetadata) -> Step:
        """An idle step whose tensors are the buffers."""
        idle = StepBatch(query_lens=(), seq_lens=(), num_tokens=size)
        batch = Batch(requests=(), step=idle, **{name: self._view(name, size) for name in STAGED})
        ways = split_rows(batch, self.path.path.longest_paged)
        return Step(
            config=self.path.config, state=self.state, batch=batch, metadata=metadata, ways=ways, width=self.width
        )

    def _body(self, size: int, step: Step) -> None:
        final_TM = self._captured.forward(step)
        self.outputs.final_norm[:size].copy_(final_TM)
        self.outputs.logits[:size].copy_(self._captured.head(final_TM))

    def _call(self, size: int, metadata: SparseMlaMetadata) -> StepCall:
        """What a graph of `size` rows depends on."""
        caches = {f"latent {n}": cache for n, cache in enumerate(self.state.latent)}
        caches |= {f"index {n}": cache for n, cache in enumerate(self.state.index)}
        tensors = {
            **{name: self._view(name, size) for name in STAGED},
            **{name: output[:size] for name, output in self.outputs._asdict().items()},
            **caches,
            "req_id_per_token": metadata.req_id_per_token_T,
            "qo_indptr": metadata.qo_indptr_T1,
            "paged_kv_indptr": metadata.paged_kv_indptr_T1,
            "paged_kv_last_page_len": metadata.paged_kv_last_page_len_T,
            "paged_kv_indices": metadata.paged_kv_indices,
            **metadata.plan._asdict(),
        }
        return StepCall(
            rows=metadata.num_tokens,
            tensors=tensors,
            outputs=("final_norm", "logits"),
            renewed=RENEWED,
            scalars={"max_model_len": self.width},
        )
