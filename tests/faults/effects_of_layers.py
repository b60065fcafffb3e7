"""Effects of faults in attention, reduction, RoPE, the indexer and the experts' layer.

Legend: T rows, H heads, C latent, D latent + RoPE, J indexer heads, I indexer width, S positions.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from effect_table import Observe, effect, ints
from torch import Tensor

from dsv32_fast import attention
from dsv32_fast.kernels.emulated import attention as emulated_attention
from dsv32_fast.kernels.emulated import pieces, reduce, splitkv
from dsv32_fuzz.targets.intree import InTreeTarget
from dsv32_ref.config import GOLDEN

HEADS, LATENT, DIM = 16, 16, 24


def attended(lens: tuple[int, ...], *, lse: bool = False, heads: int = HEADS) -> Observe:
    """Which values each row averages: every query is zero but in its RoPE part, key s holds s in all latent dims.

    The index list is 0, 1, 2, ...: row t owns the next lens[t] entries. Unsplit plan, so the gather alone is seen.
    """
    total = sum(lens)
    indptr = ints(0, *np.cumsum(lens).tolist())
    works = torch.zeros(len(lens), 8, dtype=torch.int32)
    for row in range(len(lens)):
        works[row] = ints(row, -1, row, row + 1, int(indptr[row]), int(indptr[row + 1]), 0, 0)

    def observe(target: InTreeTarget) -> tuple[Tensor, Tensor | None]:
        kernels: Any = target.kernels
        q = torch.zeros(len(lens), heads, DIM, dtype=torch.bfloat16)
        q[..., LATENT] = torch.arange(len(lens))[:, None] * 4.0  # row t prefers keys with a large RoPE part
        q[..., LATENT] += torch.arange(heads) / 4
        kv = torch.arange(float(total))[:, None].repeat(1, DIM).bfloat16()
        kv[:, LATENT:] = (torch.arange(total) % 3 == 0)[:, None]
        out = torch.full((len(lens), heads, LATENT), torch.nan, dtype=torch.bfloat16)
        _, found = kernels.mla_decode_fwd(
            q,
            kv[:, None, None],
            out,
            torch.arange(len(lens) + 1, dtype=torch.int32),
            indptr,
            torch.arange(total, dtype=torch.int32),
            torch.ones(len(lens), dtype=torch.int32),
            1,
            sm_scale=1.0,
            work_meta_data=torch.zeros(2, dtype=torch.uint64),
            work_indptr=ints(0, len(lens)),
            work_info_set=works,
            reduce_indptr=ints(*[0] * (len(lens) + 1)),
            reduce_final_map=torch.zeros(len(lens), 2, dtype=torch.int32),
            reduce_partial_map=ints(0),
            return_lse=lse,
        )
        return out.float()[..., 0], found

    return observe


EVEN = attended((3, 3))
effect(
    "attention_lost_key",
    EVEN,  # of row 0's head 0, which weighs keys 0, 1, 2 alike, key 2 becomes key 0
    lambda c, f: abs(float(c[0][0, 0]) - 1.0) < 1e-2 and abs(float(f[0][0, 0]) - 1 / 3) < 1e-2,
)
effect("attention_shifted_window", EVEN, lambda _, f: abs(float(f[0][0, 0]) - (5 + 0 + 1) / 3) < 2e-2)
effect(
    "attention_rows_exchanged",
    EVEN,  # row 0 gets the query that prefers key 0, row 1 the even-handed one
    lambda _, f: float(f[0][0, 0]) < 0.2 and abs(float(f[0][1, 0]) - 4.0) < 2e-2,
)
effect("attention_heads_rotated", EVEN, lambda c, f: torch.equal(f[0], c[0].roll(1, 1)))
effect(
    "attention_no_rope_part",
    EVEN,
    lambda c, f: abs(float(f[0][1, 0]) - 4.0) < 2e-2 and float(c[0][1, 0]) < 3.2,
)
effect(
    "reduce_unsplit_lse",
    attended((3, 3), lse=True),
    lambda c, f: bool(c[1].isfinite().all()) and bool(f[1].isnan().all()),
)


class _SeenError(Exception):
    pass


def _scale_seen(target: InTreeTarget) -> float | None:
    """The scale at the last stop before the scores, 1 / sqrt(width) standing for none."""
    seen: list[float] = []

    def operands(*args: Any) -> Any:
        seen.append(args[4])
        raise _SeenError

    original = emulated_attention._operands
    emulated_attention._operands = operands
    try:
        attended((3, 3))(target)
    except _SeenError:
        pass
    finally:
        emulated_attention._operands = original
    return seen[0]


effect("scale_kernel_default", _scale_seen, lambda c, f: (c, f) == (1.0, None))


class _Table(SimpleNamespace):
    """The metadata of rows with the given keys and owners."""


def gathered(topk: list[list[int]], table: list[list[int]], owner: list[int], lens: list[int]) -> Observe:
    def observe(target: InTreeTarget) -> list[int]:
        paged = torch.full((sum(lens),), -7, dtype=torch.int32)
        metadata: Any = _Table(
            paged_kv_indptr_T1=ints(0, *np.cumsum(lens).tolist()),
            req_id_per_token_T=ints(*owner),
            paged_kv_indices=paged,
        )
        attention.fill_gather_list(torch.tensor(topk, dtype=torch.int32), metadata, torch.tensor(table), 4)
        return paged.tolist()

    return observe


TWO = gathered([[5, 0, -1], [1, 4, 2]], [[3, 6], [9, 2]], [0, 1], [3, 3])
CLEAN_LIST = [25, 12, -1, 37, 8, 38]
effect("attention_slot_zero", TWO, lambda c, f: c == CLEAN_LIST and f == [25, 12, 0, 37, 8, 38])
effect("attention_logical_slots", TWO, lambda c, f: c == CLEAN_LIST and f == [5, 0, -1, 1, 4, 2])
effect("attention_first_table", TWO, lambda c, f: c == CLEAN_LIST and f == [25, 12, -1, 13, 24, 14])
effect("attention_page_start", TWO, lambda c, f: c == CLEAN_LIST and f == [24, 12, -1, 36, 8, 36])


def listed_twice(target: InTreeTarget) -> list[int]:
    """Two layers of one step, which choose 5, 0 and then 1, 2 of the same request."""
    paged = torch.full((2,), -7, dtype=torch.int32)
    metadata: Any = _Table(paged_kv_indptr_T1=ints(0, 2), req_id_per_token_T=ints(0), paged_kv_indices=paged)
    for chosen in ([5, 0], [1, 2]):
        attention.fill_gather_list(torch.tensor([chosen], dtype=torch.int32), metadata, torch.tensor([[3, 6]]), 4)
    return paged.tolist()


effect("attention_list_kept", listed_twice, lambda c, f: (c, f) == ([13, 14], [25, 12]))


def layer_output(live: tuple[int, ...] = (3, 1), heads: int = 4) -> Observe:
    """What the layer's decode makes of a kernel that returns row and head numbers; requests have live[r] rows."""

    def kernel(q: Tensor, kv: Tensor, out: Tensor, *args: Any, **kwargs: Any) -> None:
        rows, count = out.shape[:2]
        out[:] = (torch.arange(rows)[:, None] + torch.arange(count) / 32)[..., None]
        seen["scale"] = kwargs["sm_scale"]

    seen: dict[str, float] = {}

    def observe(target: InTreeTarget) -> tuple[list[float], list[float], float]:
        rows = sum(live)
        config = GOLDEN.replace(n_heads=heads)
        owner = [request for request, count in enumerate(live) for _ in range(count)]
        metadata: Any = SimpleNamespace(
            qo_indptr_T1=None,
            paged_kv_indptr_T1=torch.arange(rows + 1),
            req_id_per_token_T=ints(*owner),
            paged_kv_indices=None,
            paged_kv_last_page_len_T=None,
            plan=SimpleNamespace(
                work_metadata_ptrs=None,
                work_indptr=None,
                work_info_set=None,
                reduce_indptr=None,
                reduce_final_map=None,
                reduce_partial_map=None,
            ),
        )
        kernels: Any = SimpleNamespace(mla_decode_fwd=kernel)
        q = torch.zeros(rows, heads, config.latent_dim)
        out = attention.decode(q, torch.zeros(1, 1, config.latent_dim), metadata, config, kernels)
        return out[:, 0, 0].tolist(), (out[0, :, 0] * 32).tolist(), seen["scale"]

    return observe


effect(
    "attention_unpads_wrongly",
    layer_output(),
    lambda c, f: (c[1], f[1]) == ([0.0, 4.0, 8.0, 12.0], [0.0, 0.0, 0.0, 0.0]),
)
effect(
    "mtp_identical_rows",
    layer_output((3, 2)),
    lambda c, f: (c[0], f[0]) == ([0.0, 1.0, 2.0, 3.0, 4.0], [0.0, 0.0, 0.0, 3.0, 4.0]),
)
effect(
    "scale_no_mscale",
    layer_output(),
    lambda c, f: abs(f[2] - GOLDEN.qk_head_dim**-0.5) < 1e-9 < c[2] - f[2],
)

LSES = torch.tensor([[[0.0], [0.0], [0.0], [-math.inf]]])
OUTPUTS = torch.tensor([1.0, 2.0, 4.0, 9.0]).view(1, 4, 1, 1)


def merged(target: InTreeTarget) -> list[float]:
    """Three partials online, then four (the last one empty) in two passes."""
    few = reduce.merge_online(OUTPUTS[:, :3], LSES[:, :3])[0]
    many = reduce.merge_two_pass(OUTPUTS, LSES)[0]
    uneven = reduce.merge_two_pass(OUTPUTS, torch.tensor([[[0.0], [0.0], [0.0], [3.0]]]))[0]
    return [float(value) for value in (few, many, uneven)]


def close(a: list[float], b: list[float]) -> bool:
    return all(abs(x - y) < 1e-5 for x, y in zip(a, b, strict=True))


WEIGHTED = (7 + 9 * math.exp(3)) / (3 + math.exp(3))
CLEAN_MERGE = [7 / 3, 7 / 3, WEIGHTED]
effect("reduce_averages", merged, lambda c, f: close(c, CLEAN_MERGE) and close(f, [7 / 3, 4.0, 4.0]))
effect("reduce_last_lost", merged, lambda c, f: close(c, CLEAN_MERGE) and close(f, [7 / 3, 7 / 3, 7 / 3]))
effect("reduce_empty_counts", merged, lambda c, f: close(c, CLEAN_MERGE) and close(f, [7 / 3, 4.0, WEIGHTED]))
effect(
    "reduce_bf16_partials",
    lambda _: float(reduce.merge_online(torch.full((1, 2, 1, 1), 1.001), LSES[:, :2])[0]),
    lambda c, f: abs(c - 1.001) < 1e-6 and f == 1.0,
)
effect(
    "reduce_empty_tile",
    lambda _: float(reduce.merge_two_pass(torch.zeros(1, 4, 1, 1), torch.full((1, 4, 1), -math.inf))[1]),
    lambda c, f: math.isinf(c) and math.isnan(f),
)


def merged_twice(target: InTreeTarget) -> tuple[float, float]:
    """1e8, 1 and -1e8 in fp32: what is left of the 1 depends on the order."""
    outputs = torch.tensor([1e8, 1.0, -1e8]).view(1, 3, 1, 1)
    first, second = (float(reduce.merge_online(outputs, torch.zeros(1, 3, 1))[0]) for _ in range(2))
    return first, second


effect("reduce_by_arrival", merged_twice, lambda c, f: c[0] == c[1] and f[0] != f[1])


def piece_lse(target: InTreeTarget) -> float:
    """Two keys of score 0: ln 2."""
    return float(pieces._softmax_times_values(torch.zeros(1, 1, 2), torch.zeros(1, 2, 1), torch.bfloat16)[1])


effect("reduce_lse_base_2", piece_lse, lambda c, f: abs(c - math.log(2)) < 1e-6 and abs(f - 1.0) < 1e-6)


def split_counts(target: InTreeTarget) -> list[int]:
    """Rows of three and of one piece."""
    made = pieces.Pieces(
        q_start=np.array([0, 0, 0, 1]),
        q_count=np.ones(4, dtype=np.int64),
        kv_start=np.zeros(4, dtype=np.int64),
        tokens=np.ones(4, dtype=np.int64),
        slack=np.zeros(4, dtype=np.int64),
    )
    found: list[int] = splitkv._splits_per_row(made, np.array([0, 1, 2, 0]), 2).tolist()
    return found


effect("reduce_stale_split_count", split_counts, lambda c, f: (c, f) == ([3, 1], [3, 3]))


def scattered(target: InTreeTarget) -> list[float]:
    lses = torch.full((2, 1), 5.0)
    values = torch.tensor([[[1.0]], [[2.0]]])
    emulated_attention._scatter("partial_lse", lses, np.array([0, 1]), values, np.array([True, True]))
    return lses.flatten().tolist()


effect("reduce_unwritten_partial", scattered, lambda c, f: c == [1.0, 2.0] and f[0] == 1.0 and math.isnan(f[1]))
