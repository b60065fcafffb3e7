"""The interface contract of the kernels behind AITER's signatures: empty and single rows, and arguments refused.

`DEGENERATE` holds calls on nothing or on one row, with the shapes and types that must come back; `REFUSED` holds calls
that a correct binding turns down with a message that names the argument. The real kernels check hardly any argument and
may fault, so the second list is for emulations and wrappers.

Legend: T tokens, E experts, K chosen experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import msgspec
import torch
from hypothesis import strategies as st
from torch import Tensor

from dsv32_fast.kernels.protocol import Kernels
from dsv32_fuzz.checks import TARGET_ERRORS
from dsv32_fuzz.checks.findings import Findings, device_of
from dsv32_fuzz.checks.own_input import InputCheck
from dsv32_fuzz.strategies.steps import sampled_from
from dsv32_fuzz.targets import Target
from dsv32_fuzz.verdict import Verdict

I32, FP8 = torch.int32, torch.float8_e4m3fn
Shapes = list[tuple[str, Tensor, tuple[int, ...], torch.dtype]]
"""Name, tensor, the shape and the type that it must have."""


def _router(kernels: Kernels, T: int, device: torch.device) -> Shapes:
    weights, ids = torch.full((T, 8), torch.nan, device=device), torch.full((T, 8), -7, dtype=I32, device=device)
    logits, bias = torch.zeros(T, 256, device=device), torch.zeros(256, device=device)
    kernels.biased_grouped_topk(logits, bias, weights, ids, 8, 4, True, 2.5)
    return [("topk_weights", weights, (T, 8), torch.float32), ("topk_ids", ids, (T, 8), I32)]


def _topk_decode(kernels: Kernels, T: int, device: torch.device) -> Shapes:
    found, lens = torch.full((T, 128), -7, dtype=I32, device=device), torch.full((T,), 3, dtype=I32, device=device)
    kernels.top_k_per_row_decode(torch.zeros(T, 200, device=device), 1, lens, found, T, 200, 1, k=128)
    return [("indices", found, (T, 128), I32)]


def _topk_prefill(kernels: Kernels, T: int, device: torch.device) -> Shapes:
    found, ends = torch.full((T, 128), -7, dtype=I32, device=device), torch.full((T,), 3, dtype=I32, device=device)
    kernels.top_k_per_row_prefill(torch.zeros(T, 200, device=device), ends * 0, ends, found, None, T, 200, 1, k=128)
    return [("indices", found, (T, 128), I32)]


def _per_group(kernels: Kernels, T: int, device: torch.device) -> Shapes:
    x = torch.ones(T, 256, dtype=torch.bfloat16, device=device)
    values, scales = kernels.per_group_quant_hip(x, quant_dtype=FP8)
    return [("values", values, (T, 256), FP8), ("scales", scales, (T, 2), torch.float32)]


def _per_token(kernels: Kernels, T: int, device: torch.device) -> Shapes:
    x = torch.ones(T, 256, dtype=torch.bfloat16, device=device)
    values, scales = kernels.per_token_quant_hip(x, quant_dtype=FP8)
    return [("values", values, (T, 256), FP8), ("scales", scales, (T, 1), torch.float32)]


def _fused_moe(kernels: Kernels, T: int, device: torch.device) -> Shapes:
    x, w1, w2 = (
        torch.ones(shape, dtype=torch.bfloat16, device=device) for shape in ((T, 32), (4, 64, 32), (4, 32, 32))
    )
    weights, ids = torch.ones(T, 2, device=device), torch.zeros(T, 2, dtype=I32, device=device)
    ids[:, 1] = 3
    return [("output", kernels.fused_moe(x, w1, w2, weights, ids), (T, 32), torch.bfloat16)]


def _latent_cache(kernels: Kernels, T: int, device: torch.device) -> Shapes:
    cache = torch.zeros(2, 16, 576, dtype=torch.bfloat16, device=device)
    kv, slots = torch.ones(T, 576, dtype=torch.bfloat16, device=device), torch.arange(T, device=device)
    kernels.concat_and_cache_mla(kv[:, :512], kv[:, 512:], cache, slots, "auto", torch.ones(1, device=device))
    return [("cached rows", cache.flatten(0, 1)[cache.flatten(0, 1)[:, 0] == 1], (T, 576), torch.bfloat16)]


def _index_cache(kernels: Kernels, T: int, device: torch.device) -> Shapes:
    cache = torch.zeros(2, 16, 132, dtype=torch.uint8, device=device)
    k, slots = torch.ones(T, 128, dtype=torch.bfloat16, device=device), torch.arange(T, device=device)
    kernels.indexer_k_quant_and_cache(k, cache, slots, 128, "ue8m0")
    keys = cache.view(2, -1)[:, : 16 * 128].reshape(-1, 128)
    return [("cached keys", keys[keys[:, 0] != 0], (T, 128), torch.uint8)]


DEGENERATE: dict[str, Callable[[Kernels, int, torch.device], Shapes]] = {
    "biased_grouped_topk": _router,
    "top_k_per_row_decode": _topk_decode,
    "top_k_per_row_prefill": _topk_prefill,
    "per_group_quant_hip": _per_group,
    "per_token_quant_hip": _per_token,
    "fused_moe": _fused_moe,
    "concat_and_cache_mla": _latent_cache,
    "indexer_k_quant_and_cache": _index_cache,
}


class DegenerateInput(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A kernel and a number of rows."""

    kernel: str = "biased_grouped_topk"
    rows: Literal[0, 1, 2] = 0


class DegenerateShapes(InputCheck[DegenerateInput]):
    """No row, one row and two."""

    name = "degenerate_shapes"
    meaning = "a kernel takes no row and one row, gives results of that shape and type, and writes all of them"
    family = "interface"
    input_type = DegenerateInput

    def inputs(self) -> st.SearchStrategy[DegenerateInput]:
        """Every kernel with every count."""
        return st.builds(DegenerateInput, kernel=sampled_from(tuple(DEGENERATE)), rows=sampled_from((0, 1, 2)))

    def run(self, drawn: DegenerateInput, target: Target) -> Verdict:
        """One call."""
        found = Findings()
        if drawn.kernel not in DEGENERATE:
            raise ValueError(f"kernel {drawn.kernel!r} is unknown; choose one of {', '.join(DEGENERATE)}")
        assert target.kernels is not None
        for name, tensor, shape, dtype in DEGENERATE[drawn.kernel](target.kernels, drawn.rows, device_of(target)):
            got = tuple(tensor.shape), tensor.dtype
            text = f"{drawn.kernel}: {name} is {got[0]} {got[1]} for {drawn.rows} rows, not {shape} {dtype}"
            found.require("tensors", got == (shape, dtype), text)
            unwritten = bool((tensor.float().isnan() | (tensor.float() == -7)).any())
            found.require("tensors", not unwritten, f"{drawn.kernel}: {name} is not written for {drawn.rows} rows")
        return self.verdict(found.violation, found.measured())


def _route(kernels: Kernels, **changes: Any) -> None:
    given: dict[str, Any] = {
        "gating_output": torch.zeros(2, 256),
        "correction_bias": torch.zeros(256),
        "topk_weights": torch.empty(2, 8),
        "topk_ids": torch.empty(2, 8, dtype=I32),
        "num_expert_group": 8,
        "topk_group": 4,
        "need_renorm": True,
    }
    kernels.biased_grouped_topk(**{**given, **changes})


def _select(kernels: Kernels, found: Tensor, logits_type: torch.dtype = torch.float32) -> None:
    logits = torch.zeros(2, 20, dtype=logits_type)
    kernels.top_k_per_row_decode(logits, 1, torch.tensor([9, 9], dtype=I32), found, 2, 20, 1, k=8)


def _cache_keys(kernels: Kernels, **changes: Any) -> None:
    given: dict[str, Any] = {
        "k": torch.ones(2, 128),
        "kv_cache": torch.zeros(2, 16, 132, dtype=torch.uint8),
        "slot_mapping": torch.tensor([0, 1]),
        "quant_block_size": 128,
        "scale_fmt": "ue8m0",
    }
    kernels.indexer_k_quant_and_cache(**{**given, **changes})


def _mixed(kernels: Kernels, last_id: int) -> None:
    w1, w2 = torch.ones(4, 8, 8), torch.ones(4, 8, 4)
    ids = torch.tensor([[0, last_id]], dtype=I32)
    kernels.fused_moe(torch.ones(1, 8), w1, w2, torch.ones(1, 2), ids)


def _cache_latents(kernels: Kernels, slot: int, width: int = 576, kind: str = "auto") -> None:
    cache = torch.zeros(2, 16, width, dtype=torch.bfloat16)
    kernels.concat_and_cache_mla(
        torch.ones(1, 512), torch.ones(1, 64), cache, torch.tensor([slot]), kind, torch.ones(1)
    )


REFUSED: dict[str, tuple[Callable[[Kernels], None], str]] = {
    "router: int64 ids": (lambda k: _route(k, topk_ids=torch.empty(2, 8, dtype=torch.int64)), "topk_ids"),
    "router: fp64 logits": (lambda k: _route(k, gating_output=torch.zeros(2, 256).double()), "gating_output"),
    "router: columns with a stride": (lambda k: _route(k, gating_output=torch.zeros(256, 2).T), "gating_output"),
    "router: no kept group": (lambda k: _route(k, topk_group=0), "topk_group"),
    "router: more kept groups than there are": (lambda k: _route(k, topk_group=9), "topk_group"),
    "router: bias too short": (lambda k: _route(k, correction_bias=torch.zeros(256).bfloat16()), "correction_bias"),
    "top-k: int64 indices": (lambda k: _select(k, torch.empty(2, 8, dtype=torch.int64)), "indices"),
    "top-k: too few columns": (lambda k: _select(k, torch.empty(2, 7, dtype=I32)), "indices"),
    "top-k: bf16 logits": (lambda k: _select(k, torch.empty(2, 8, dtype=I32), torch.bfloat16), "logits"),
    "index cache: slot beyond": (lambda k: _cache_keys(k, slot_mapping=torch.tensor([0, 32])), "kv_cache"),
    "index cache: block of 96": (lambda k: _cache_keys(k, quant_block_size=96), "quant_block_size"),
    "index cache: records of 128": (
        lambda k: _cache_keys(k, kv_cache=torch.zeros(2, 16, 128, dtype=torch.uint8)),
        "kv_cache",
    ),
    "latent cache: slot beyond": (lambda k: _cache_latents(k, 32), "kv_cache"),
    "latent cache: rows of 512": (lambda k: _cache_latents(k, 0, 512), "kv_cache"),
    "latent cache: unknown type": (lambda k: _cache_latents(k, 0, kind="int4"), "kv_cache_dtype"),
    "experts: id beyond the last": (lambda k: _mixed(k, 4), "w1"),
    "experts: id -1 without a mask": (lambda k: _mixed(k, -1), "w1"),
    "quantiser: groups of 48": (
        lambda k: _discard(k.per_group_quant_hip(torch.ones(1, 96), quant_dtype=FP8, group_size=48)),
        "group_size",
    ),
    "quantiser: int8": (lambda k: _discard(k.per_token_quant_hip(torch.ones(1, 96))), "quant_dtype"),
}


def _discard(result: object) -> None:
    del result


class RefusedInput(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of `REFUSED`."""

    call: str = "router: int64 ids"


class ArgumentErrors(InputCheck[RefusedInput]):
    """Arguments that would make a kernel read or write something else."""

    name = "argument_errors"
    meaning = "an argument that the kernel does not take is refused with a message that names it"
    family = "interface"
    input_type = RefusedInput

    def inapplicable(self, target: Target) -> str:
        """A real kernel may fault instead."""
        unsafe = "" if target.evidence == "emulated" else "a real kernel checks few arguments and may fault"
        return super().inapplicable(target) or unsafe

    def inputs(self) -> st.SearchStrategy[RefusedInput]:
        """Every call."""
        return st.builds(RefusedInput, call=sampled_from(tuple(REFUSED)))

    def run(self, drawn: RefusedInput, target: Target) -> Verdict:
        """One call, which must raise."""
        found = Findings()
        if drawn.call not in REFUSED:
            raise ValueError(f"call {drawn.call!r} is unknown; choose one of {', '.join(REFUSED)}")
        call, name = REFUSED[drawn.call]
        assert target.kernels is not None
        try:
            call(target.kernels)
        except TARGET_ERRORS as error:
            kind = isinstance(error, (TypeError, ValueError, IndexError))
            text = f"{drawn.call}: {type(error).__name__} does not name {name}: {' '.join(str(error).split())[:80]}"
            found.require("calls", kind and name in str(error), text)
        else:
            found.require("calls", False, f"{drawn.call}: accepted")
        return self.verdict(found.violation, found.measured())


CHECKS: tuple[type[InputCheck[Any]], ...] = (DegenerateShapes, ArgumentErrors)
