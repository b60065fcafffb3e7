"""A planned decode step on a target, from step batch to kernel, with nothing in it but what the test puts there.

`DecodeEngine` holds the target's metadata builder, hence its cached plan; `DecodeStep` is one step of it: pages dealt
out at random, positions chosen for every row, the gather list filled by the path. Which slots each row ought to attend
follows from the draw alone. Page 0 and one more page belong to nobody.

Legend: B requests, T rows (padding included), K top-k, S slots, H heads, C latent columns, D = C + RoPE width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from dsv32_fast import attention
from dsv32_fast.batch import StepBatch
from dsv32_fast.kernels.emulated.device import MI355X, emulated_device
from dsv32_fast.kernels.protocol import Kernels
from dsv32_fast.metadata import MIN_HEADS, BuilderConfig, MetadataBuilder, SparseMlaMetadata
from dsv32_fast.options import Options
from dsv32_fast.plan import PlanBuffers, allocate
from dsv32_fuzz.targets import Target
from dsv32_ref.config import Config

DType = Literal["bf16", "fp8"]
_DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
UNREAD = 0x3C3C3C3C
"""What buffers hold where nobody has written: as a slot, a fault."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a decode step; the defaults are the small world."""

    heads: int = 16
    latent: int = 128
    rope: int = 32
    topk: int = 64
    page_size: int = 4
    q: DType = "bf16"
    kv: DType = "bf16"
    compute_units: int = 256

    @property
    def width(self) -> int:
        """D."""
        return self.latent + self.rope

    @property
    def fp8(self) -> bool:
        """Whether Q and KV both are fp8, hence P too."""
        return self.q == self.kv == "fp8"

    def config(self) -> Config:
        """The model config of these dimensions."""
        return Config(
            n_heads=self.heads, kv_lora_rank=self.latent, qk_rope_head_dim=self.rope, index_topk=max(self.topk, 1)
        )


def admitted(shape: Shape, target: Target) -> Shape:
    """`shape`, or on hardware the smallest one that real kernels take: 512 + 64, top-k a multiple of 128."""
    if target.evidence != "hardware":
        return shape
    return replace(shape, latent=512, rope=64, topk=-(-shape.topk // 128) * 128, heads=max(16, shape.heads))


def kernels_of(target: Target) -> Kernels:
    """The kernels of `target`.

    Raises:
        ValueError: it offers none.
    """
    if target.kernels is None:
        raise ValueError(f"target {target.name} offers no kernels; choose a check that needs only plans")
    return target.kernels


def builder_of(target: Target) -> type[MetadataBuilder]:
    """The metadata builder of an in-tree target; the path's own elsewhere."""
    kind: type[MetadataBuilder] = getattr(target, "builder", MetadataBuilder)
    return kind


def options_of(target: Target) -> Options:
    """The options of `target`; those of the baseline where it has none."""
    return target.options or Options()


class DecodeEngine:
    """A metadata builder and its plan cache; steps are planned in the order in which they are built."""

    def __init__(self, target: Target, shape: Shape, max_rows: int) -> None:
        self.shape, self.kernels = shape, kernels_of(target)
        self.device = torch.device("cuda" if target.evidence == "hardware" else "cpu")
        config = BuilderConfig(
            num_heads=shape.heads,
            topk=shape.topk,
            max_num_batched_tokens=max_rows,
            compute_units=shape.compute_units,
            q_dtype=_DTYPES[shape.q],
            kv_dtype=_DTYPES[shape.kv],
        )
        with self.emulated():
            self.builder = builder_of(target)(
                config=config, options=options_of(target), kernels=self.kernels, device=self.device
            )
        for buffer in self.builder.plan:
            (buffer.view(torch.int64) if buffer.dtype == torch.uint64 else buffer).fill_(UNREAD)

    @contextmanager
    def emulated(self) -> Iterator[None]:
        """The emulated device has the shape's compute units; a real one has its own."""
        with emulated_device(replace(MI355X, compute_units=self.shape.compute_units)):
            yield

    def build(self, batch: StepBatch, *, seed: int, kept: int = 0) -> DecodeStep:
        """Plan `batch`, choose what each row attends, and have the path fill the gather list.

        Args:
            batch: the step.
            seed: of pages and positions.
            kept: so many leading positions are chosen by every row that may see them.
        """
        generator = torch.Generator().manual_seed(seed)
        table_BP, pages = _deal(batch, self.shape.page_size, generator)
        topk_TK = _choose(batch, self.shape.topk, kept, generator)
        with self.emulated():
            metadata = self.builder.build(batch)
        owner_T = _owners(batch)
        on_device = topk_TK.to(self.device), table_BP.to(self.device)
        attention.fill_gather_list(on_device[0], metadata, on_device[1], self.shape.page_size)
        slots = [_physical(row[row >= 0].long(), table_BP[owner_T[t]], self.shape) for t, row in enumerate(topk_TK)]
        roles = torch.full((pages * self.shape.page_size,), -1)
        for row, request in zip(topk_TK, owner_T, strict=True):
            positions = row[row >= 0].long()
            roles[_physical(positions, table_BP[request], self.shape)] = positions
        return DecodeStep(
            engine=self, metadata=metadata, slots_T=slots, positions_S=roles, names_T=_names(batch, owner_T)
        )

    def listed(self, like: DecodeStep, order: Sequence[int], cap: int = -1) -> DecodeStep:
        """Rows `order` of another step as a batch of their own, planned afresh under a split cap (-1: none)."""
        slots = [like.slots_T[row] for row in order]
        indptr = torch.tensor([0, *(len(s) for s in slots)], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        indices = torch.full((len(order) * self.shape.topk,), UNREAD, dtype=torch.int32)
        indices[: int(indptr[-1])] = torch.cat([*slots, torch.empty(0, dtype=torch.int64)]).int()
        types = _DTYPES[self.shape.q], _DTYPES[self.shape.kv]
        heads = max(MIN_HEADS, self.shape.heads)
        capped: dict[str, Any] = {"max_split_per_batch": cap} if cap > 0 else {}
        with self.emulated():
            info = self.kernels.get_mla_metadata_info_v1(len(order), 1, heads, *types, is_sparse=True, **capped)
            plan = allocate(info, UNREAD, str(self.device))
            metadata = SparseMlaMetadata(
                num_tokens=len(order),
                max_query_len=1,
                req_id_per_token_T=torch.zeros(len(order), dtype=torch.int32, device=self.device),
                qo_indptr_T1=torch.arange(len(order) + 1, dtype=torch.int32, device=self.device),
                paged_kv_indptr_T1=indptr.to(self.device),
                paged_kv_last_page_len_T=torch.ones(len(order), dtype=torch.int32, device=self.device),
                paged_kv_indices=indices.to(self.device),
                plan=plan,
            )
            self.kernels.get_mla_metadata_v1(
                metadata.qo_indptr_T1,
                metadata.paged_kv_indptr_T1,
                metadata.paged_kv_last_page_len_T,
                heads,
                1,
                True,
                *plan.call_order(),
                max_seqlen_qo=1,
                uni_seqlen_qo=1,
                max_split_per_batch=cap,
                dtype_q=types[0],
                dtype_kv=types[1],
            )
        names = [like.names_T[row] for row in order]
        return DecodeStep(engine=self, metadata=metadata, slots_T=slots, positions_S=like.positions_S, names_T=names)


@dataclass(frozen=True, kw_only=True)
class DecodeStep:
    """One planned step, ready to run on any queries and any cache."""

    engine: DecodeEngine
    metadata: SparseMlaMetadata
    slots_T: list[Tensor]
    """int64: the slots that each row ought to attend, none for padding."""
    positions_S: Tensor
    """int64: the position within its request of each slot that some row ought to attend, -1 elsewhere."""
    names_T: list[str]
    """What a row is called in a message."""

    @property
    def rows(self) -> int:
        """T."""
        return len(self.slots_T)

    @property
    def key_counts(self) -> Tensor:
        """int64: how many slots each row ought to attend."""
        return torch.tensor([len(slots) for slots in self.slots_T], dtype=torch.int64)

    @property
    def live(self) -> Tensor:
        """bool: rows that attend something."""
        return self.key_counts > 0

    def by_path(self, q_THD: Tensor, kv_SD: Tensor) -> Tensor:
        """Output [T, H, C] of the path's own `attention.decode` (bf16, the model's softmax scale)."""
        engine, shape = self.engine, self.engine.shape
        q, kv = self.stored(q_THD, kv_SD)
        with engine.emulated():
            return attention.decode(
                q, kv.view(-1, shape.page_size, shape.width), self.metadata, shape.config(), engine.kernels
            )

    def by_kernel(
        self,
        q_THD: Tensor,
        kv_SD: Tensor,
        *,
        scale: float,
        scales: tuple[float, float] = (1.0, 1.0),
        plan: PlanBuffers | None = None,
        lse: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        """Output [T, H, C] and LSE [T, H] of the decode kernel itself.

        Args:
            q_THD: stored in the shape's Q type.
            kv_SD: stored in the shape's KV type.
            scale: of the softmax.
            scales: of an fp8 Q and KV.
            plan: another plan than the step's own.
            lse: whether to ask for the LSE.
        """
        engine, shape, m = self.engine, self.engine.shape, self.metadata
        q, kv = self.stored(q_THD, kv_SD)
        out = torch.full((*q.shape[:2], shape.latent), torch.nan, dtype=torch.bfloat16, device=q.device)
        extra: dict[str, Any] = {}
        if shape.kv == "fp8":
            extra["kv_scale"] = torch.tensor([scales[1]], device=q.device)
        if shape.q == "fp8":
            extra["q_scale"] = torch.tensor([scales[0]], device=q.device)
        with engine.emulated():
            _, found = engine.kernels.mla_decode_fwd(
                q,
                kv.view(-1, 1, 1, shape.width),
                out,
                m.qo_indptr_T1,
                m.paged_kv_indptr_T1,
                m.paged_kv_indices,
                m.paged_kv_last_page_len_T,
                1,
                sm_scale=scale,
                return_lse=lse,
                **planned(plan or m.plan),
                **extra,
            )
        return out, found if lse else None

    def stored(self, q_THD: Tensor, kv_SD: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and cache in the types of the shape, on the target's device."""
        device, shape = self.engine.device, self.engine.shape
        return q_THD.to(_DTYPES[shape.q]).to(device), kv_SD.to(_DTYPES[shape.kv]).to(device)


def planned(plan: PlanBuffers) -> dict[str, Any]:
    """The plan under the names of `mla_decode_fwd`'s arguments."""
    return {"work_meta_data": plan.work_metadata_ptrs, **{name: getattr(plan, name) for name in plan._fields[1:]}}


def _deal(batch: StepBatch, page_size: int, generator: torch.Generator) -> tuple[Tensor, int]:
    """Block table int32 [B, P], -1 where a request has no page, and the number of pages; two belong to nobody."""
    counts = [-(-length // page_size) for length in batch.seq_lens]
    order = torch.randperm(sum(counts) + 1, generator=generator) + 1
    table_BP = torch.full((len(counts), max([1, *counts])), -1, dtype=torch.int32)
    for request, (count, pages) in enumerate(zip(counts, torch.split_with_sizes(order[1:], counts), strict=True)):
        table_BP[request, :count] = pages.int()
    return table_BP, sum(counts) + 2


def _choose(batch: StepBatch, topk: int, kept: int, generator: torch.Generator) -> Tensor:
    """Positions int32 [T, K] in random order, -1 behind them; the first `kept` positions are always chosen."""
    topk_TK = torch.full((batch.num_tokens, topk), -1, dtype=torch.int32)
    row = 0
    for query, length in zip(batch.query_lens, batch.seq_lens, strict=True):
        for visible in range(length - query + 1, length + 1):
            count, first = min(visible, topk), min(kept, visible, topk)
            rest = torch.randperm(visible - first, generator=generator)[: count - first] + first
            chosen = torch.cat([torch.arange(first), rest])
            topk_TK[row, :count] = chosen[torch.randperm(count, generator=generator)].int()
            row += 1
    return topk_TK


def _owners(batch: StepBatch) -> list[int]:
    """The request of each row; 0 for padding, which has no position."""
    owners = [request for request, query in enumerate(batch.query_lens) for _ in range(query)]
    return owners + [0] * (batch.num_tokens - len(owners))


def _names(batch: StepBatch, owner_T: list[int]) -> list[str]:
    first = {request: owner_T.index(request) for request in owner_T}
    live = batch.num_query_tokens
    return [
        f"row {row} (request {request}, token {row - first[request]})" if row < live else f"row {row} (padding)"
        for row, request in enumerate(owner_T)
    ]


def _physical(positions: Tensor, pages_P: Tensor, shape: Shape) -> Tensor:
    return pages_P.long()[positions // shape.page_size] * shape.page_size + positions % shape.page_size
