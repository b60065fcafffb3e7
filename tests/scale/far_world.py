"""Caches of more than 2^31 elements that take hardly any memory, and kernels that address them in a given integer type.

A far array is a sparse file: only what is touched exists. `addressed(name, dtype)` is the emulation in which one kernel
computes its own offsets in `dtype`: it copies the records that these offsets name, lets the genuine kernel run on the
copy, and writes them back. An offset outside the array is taken modulo its size, which stands for foreign memory that
happens to be mapped. In int64 such a kernel is right, which shows that the rewiring itself is no defect.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from dsv32_fast.kernels.emulated import api
from dsv32_fast.kernels.protocol import Kernels

CACHE_KERNELS = (
    "concat_and_cache_mla",
    "mla_decode_fwd",
    "indexer_k_quant_and_cache",
    "cp_gather_indexer_k_quant_cache",
    "deepgemm_fp8_paged_mqa_logits",
)
"""Every kernel that finds something in a cache by an index."""


def far_array(folder: Path, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros of `shape` in a sparse file."""
    raw = np.memmap(folder / name, dtype=np.uint8, mode="w+", shape=(int(np.prod(shape)) * dtype.itemsize,))
    return torch.from_numpy(raw).view(dtype).view(shape)


def offsets(index: Tensor, stride: int, dtype: torch.dtype, size: int) -> Tensor:
    """[records, stride]: where the elements of each record lie by arithmetic in `dtype`."""
    exact = index.to(dtype)[:, None] * stride + torch.arange(stride, dtype=dtype)
    return exact.long() % size


def addressed(name: str, dtype: torch.dtype) -> Kernels:
    """The emulation with kernel `name` replaced."""
    kernels = SimpleNamespace(**{kernel: getattr(api, kernel) for kernel in api.__all__})
    makers: dict[str, Callable[[torch.dtype], Callable[..., Any]]] = {
        "concat_and_cache_mla": _latent_writer,
        "mla_decode_fwd": _latent_reader,
        "indexer_k_quant_and_cache": _key_writer,
        "cp_gather_indexer_k_quant_cache": _key_gatherer,
        "deepgemm_fp8_paged_mqa_logits": _key_reader,
        "top_k_per_row_decode": _logits_reader,
    }
    setattr(kernels, name, makers[name](dtype))
    return cast(Kernels, kernels)


def _latent_writer(dtype: torch.dtype) -> Callable[..., Any]:
    def write(c_TC: Tensor, pe_TR: Tensor, cache_PSD: Tensor, slots_T: Tensor, kind: str, scale: Tensor) -> None:
        assert kind == "auto"
        live = slots_T >= 0
        flat = cache_PSD.view(-1)
        rows_TD = torch.cat([c_TC, pe_TR], -1)[: len(slots_T)][live].to(flat.dtype)
        flat[offsets(slots_T[live], rows_TD.shape[1], dtype, len(flat))] = rows_TD

    return write


def _latent_reader(dtype: torch.dtype) -> Callable[..., Any]:
    def decode(
        q: Tensor, kv: Tensor, o: Tensor, qo: Tensor, indptr: Tensor, indices: Tensor, *rest: Any, **named: Any
    ) -> Any:
        flat, width = kv.view(-1), kv.shape[-1]
        copied = flat[offsets(indices, width, dtype, len(flat))].view(-1, 1, 1, width)
        return api.mla_decode_fwd(
            q, copied, o, qo, indptr, torch.arange(len(copied), dtype=torch.int32), *rest, **named
        )

    return decode


def _key_writer(dtype: torch.dtype) -> Callable[..., Any]:
    def write(k_TI: Tensor, cache: Tensor, slots_T: Tensor, *rest: Any, **named: Any) -> None:
        size = cache.shape[1]
        pages, number_T = (slots_T // size).unique(return_inverse=True)
        flat, at = cache.view(-1), offsets(pages, size * cache.shape[2], dtype, cache.numel())
        copied = flat[at].view(-1, *cache.shape[1:])
        local_T = torch.where(slots_T < 0, -1, number_T * size + slots_T % size)
        api.indexer_k_quant_and_cache(k_TI, copied, local_T, *rest, **named)
        flat[at] = copied.view(len(pages), -1)

    return write


def _copied_pages(cache: Tensor, table: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The pages that `table` names, one after the other, and the table of the copy."""
    flat, stride = cache.view(-1), cache[0].numel()
    copied = flat[offsets(table.flatten(), stride, dtype, len(flat))].view(-1, *cache.shape[1:])
    return copied, torch.arange(table.numel(), dtype=torch.int32).view(table.shape)


def _key_gatherer(dtype: torch.dtype) -> Callable[..., Any]:
    def gather(cache: Tensor, keys: Tensor, scales: Tensor, table: Tensor, *rest: Any, **named: Any) -> None:
        copied, local = _copied_pages(cache, table, dtype)
        api.cp_gather_indexer_k_quant_cache(copied, keys, scales, local, *rest, **named)

    return gather


def _key_reader(dtype: torch.dtype) -> Callable[..., Any]:
    def read(
        q: Tensor, cache: Tensor, weights: Tensor, out: Tensor, lens: Tensor, table: Tensor, *rest: Any, **named: Any
    ) -> None:
        copied, local = _copied_pages(cache, table, dtype)
        api.deepgemm_fp8_paged_mqa_logits(q, copied, weights, out, lens, local, *rest, **named)

    return read


def _logits_reader(dtype: torch.dtype) -> Callable[..., Any]:
    def select(
        logits: Tensor, next_n: int, lens: Tensor, found: Tensor, rows: int, stride0: int, stride1: int, **named: Any
    ) -> None:
        flat, width = logits.view(-1), int(lens.max())
        first = torch.arange(rows, dtype=dtype) * torch.tensor(stride0, dtype=dtype)
        copied = flat[(first[:, None] + torch.arange(width, dtype=dtype)).long() % len(flat)]
        api.top_k_per_row_decode(copied, next_n, lens, found, rows, width, stride1, **named)

    return select
