"""What the planner refuses, and in which words."""

from __future__ import annotations

import enum
import subprocess
import sys
from typing import Any

import pytest
import torch
from planner_calls import POISON, buffers, decode, indptr

from dsv32_fast.kernels.emulated import (
    MlaVersion,
    UndefinedInAiter,
    UnsupportedPlanner,
    get_mla_metadata_info_v1,
    get_mla_metadata_v1,
)
from dsv32_fast.kernels.emulated.device import MI300X, MI355X, emulated_device
from dsv32_fast.kernels.emulated.launch import env_flag
from dsv32_fast.plan import PlanBuffers

FP8 = torch.float8_e4m3fn
LENS = [2048, 300, 17]


def call(**changes: Any) -> PlanBuffers:
    """vLLM's call for LENS with some arguments replaced, by AITER's names."""
    plan = changes.pop("plan", None) or buffers(16, heads=64)
    rows = len(LENS)
    arguments: dict[str, Any] = {
        "seqlens_qo_indptr": torch.arange(rows + 1, dtype=torch.int32),
        "seqlens_kv_indptr": indptr(LENS),
        "kv_last_page_lens": torch.ones(rows, dtype=torch.int32),
        "num_heads_per_head_k": 16,
        "num_heads_k": 1,
        "is_causal": True,
        "max_seqlen_qo": 1,
        "uni_seqlen_qo": 1,
        **plan._asdict(),
    }
    get_mla_metadata_v1(**arguments | changes)
    return plan


def test_the_unchanged_call_is_fine():
    assert call().work_indptr[-1] > 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seqlens_kv_indptr": indptr(LENS).long()}, r"seqlens_kv_indptr is torch\.int64.*int32"),
        ({"seqlens_qo_indptr": indptr([1] * 7)[::2]}, "seqlens_qo_indptr is non-contiguous"),
        ({"seqlens_qo_indptr": torch.empty(4, dtype=torch.int32, device="meta")}, "seqlens_qo_indptr.*on meta"),
        ({"work_metadata_ptrs": torch.zeros(2, dtype=torch.int64)}, r"work_metadata_ptrs.*torch\.uint64"),
        ({"work_metadata_ptrs": torch.zeros(3, dtype=torch.uint64)}, "work_metadata_ptrs.*3.*need 2"),
        ({"work_info_set": torch.zeros(8, dtype=torch.int32)}, r"work_info_set.*\[n, 8\]"),
        ({"work_info_set": torch.zeros((8, 7), dtype=torch.int32)}, r"work_info_set.*\[n, 8\]"),
        ({"reduce_final_map": torch.zeros((8, 8), dtype=torch.int32)}, r"reduce_final_map.*\[n, 2\]"),
        ({"reduce_indptr": torch.zeros(0, dtype=torch.int32)}, "reduce_indptr"),
        ({"work_indptr": torch.zeros(256, dtype=torch.int32)}, "work_indptr has 256 entries; .* need 257"),
        ({"seqlens_kv_indptr": indptr([5])}, "B rows need"),
        ({"seqlens_kv_indptr": indptr([*LENS, 5])}, "B rows need"),
        ({"kv_last_page_lens": torch.ones(2, dtype=torch.int32)}, "B rows need"),
        ({"seqlens_qo_indptr": torch.zeros(0, dtype=torch.int32)}, "B rows need"),
        ({"seqlens_kv_indptr": torch.tensor([1, 5, 6, 7], dtype=torch.int32)}, "seqlens_kv_indptr does not start at 0"),
        ({"seqlens_kv_indptr": torch.tensor([0, 5, 4, 7], dtype=torch.int32)}, "kv_indptr decreases at index 2"),
        ({"seqlens_qo_indptr": torch.tensor([0, 1, 2, 1], dtype=torch.int32)}, "seqlens_qo_indptr.*index 3"),
        ({"seqlens_qo_indptr": torch.tensor([-1, 1, 2, 3], dtype=torch.int32)}, "seqlens_qo_indptr is negative"),
        ({"page_size": 3}, "page_size is 3.*power of two"),
        ({"page_size": 0}, "page_size is 0.*power of two"),
        ({"kv_granularity": 48}, "kv_granularity is 48.*power of two"),
        ({"num_heads_per_head_k": 0}, "head counts"),
        ({"num_heads_k": 300}, "num_heads_k is 300"),
    ],
)  # fmt: skip
def test_bad_arguments_are_named(changes, words):
    plan = buffers(16)
    with pytest.raises(ValueError, match=words) as caught:
        call(plan=plan, **changes)
    assert "\n" not in str(caught.value)
    assert not isinstance(caught.value, UndefinedInAiter)
    assert all((buffer == POISON).all() for buffer in plan[1:])


@pytest.mark.parametrize("name", ["seqlens_kv_indptr", "work_info_set"])
def test_only_tensors_are_taken(name):
    with pytest.raises(TypeError, match=f"{name} is list; pass a torch tensor"):
        call(**{name: [0, 1]})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_split_per_batch": 0}, "split budget"),
        ({"uni_seqlen_qo": -1, "max_seqlen_qo": 2, "num_heads_per_head_k": 128}, "payload is garbage"),
        ({"uni_seqlen_qo": 0, "max_seqlen_qo": 1, "num_heads_per_head_k": 32, "dtype_kv": FP8}, "folded heads.*qo_"),
        ({"page_size": 64, "num_heads_per_head_k": 48, "dtype_q": FP8, "dtype_kv": FP8}, "kv_last_page_lens"),
        ({"topk": 64, "seqlens_qo_indptr": indptr([4] * 3), "uni_seqlen_qo": -1}, "several rows per request"),
        ({"topk": 2**31 - 1}, "kv_start overflows"),
        ({"topk": 2**30}, "kv_start overflows"),  # of the three rows together
        ({"seqlens_kv_indptr": indptr([2**31 - 1, 0, 0]), "kv_granularity": 1}, "payload overflows"),
    ],
)  # fmt: skip
def test_undefined_results_are_refused(changes, words):
    plan = buffers(16)
    with pytest.raises(UndefinedInAiter, match=words) as caught:
        call(plan=plan, **changes)
    assert "AITER" in str(caught.value)
    assert all((buffer == POISON).all() for buffer in plan[1:])


def test_a_call_without_rows_and_with_a_cap_is_undefined():
    assert not decode([], plan=buffers(4), cap=-1).work_indptr.any()
    with pytest.raises(UndefinedInAiter, match="divides by it"):
        decode([], plan=buffers(4), cap=16)
    with pytest.raises(UndefinedInAiter, match=r"qo_indptr\[1\]"):
        decode([], plan=buffers(4), topk=64)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fast_mode": False}, "v1_1"),
        ({"fast_mode": False, "intra_batch_mode": True}, "v1_0"),
        ({"mla_version": MlaVersion.V40}, "V40"),
        ({"mla_version": "V40"}, "V40"),
        ({"dtype_q_nope": FP8, "dtype_q_rope": torch.bfloat16}, "dtype_q_nope and dtype_q_rope differ"),
        ({"dtype_kv_rope": FP8}, "dtype_kv_nope and dtype_kv_rope differ"),
    ],
)
def test_other_planners_are_refused(changes, words):
    with pytest.raises(UnsupportedPlanner, match=words):
        call(**changes)


@pytest.mark.parametrize(
    ("size", "kind", "words"),
    [(7, UnsupportedPlanner, "v1_1"), (6, UndefinedInAiter, "v1_1.* folds 32 heads into 2 rows and writes 7 entries")],
)
def test_v1_1_folds_heads_beyond_a_reduce_indptr_for_rows_alone(size, kind, words):
    """Three rows of 32 heads become six, whose ends need seven entries."""
    with pytest.raises(kind, match=words):
        call(fast_mode=False, num_heads_per_head_k=32, reduce_indptr=torch.zeros(size, dtype=torch.int32))


def test_any_enum_with_the_right_name_is_taken():
    other = enum.Enum("MLAVersion", ["V32", "V40"])
    call(mla_version=other.V32)
    with pytest.raises(UnsupportedPlanner, match="V40"):
        call(mla_version=other.V40)


def test_dtypes_may_come_by_either_name():
    """fp8 queries and keys of 32 heads are native, mixed ones fold: six rows instead of three."""
    mixed = call(num_heads_per_head_k=32, dtype_kv=FP8)
    assert mixed.work_info_set[: mixed.work_indptr[-1], 0].max() == 5
    for names in (("dtype_q", "dtype_kv"), ("dtype_q_nope", "dtype_kv_nope")):
        plan = call(num_heads_per_head_k=32, **dict.fromkeys(names, FP8))
        assert plan.work_info_set[: plan.work_indptr[-1], 0].max() == 2
    with pytest.raises(TypeError, match="dtype_q"):
        call(dtype_q="fp8")


# Blocks 128, 19, 2 and 3 overheads of 16 make 197; payload ceil(197 / 48) + 16 = 21, so 5 blocks to a unit: 26 pieces,
# 4 pieces, and one work unsplit.
NEEDED = {"work_info_set": 31, "reduce_indptr": 4, "reduce_final_map": 2, "reduce_partial_map": 30}


@pytest.mark.parametrize("name", NEEDED)
def test_small_buffers_are_named_and_never_overrun(name):
    """Exactly enough passes; less is refused, and the memory behind the buffer is not touched."""
    lens, need = [2048, 300, 17], NEEDED[name]
    whole = getattr(decode(lens, cap=16), name)
    for rows in (need, need - 1, 1 if name == "reduce_indptr" else 0):
        guarded = torch.full((need + 8, *whole.shape[1:]), POISON, dtype=torch.int32)
        plan = buffers(3)._replace(**{name: guarded[:rows]})
        if rows == need:
            decode(lens, cap=16, plan=plan)
            assert guarded[:need].equal(whole[:need])
        else:
            with pytest.raises(ValueError, match=f"{name} has {rows} rows and this plan needs {need}"):
                decode(lens, cap=16, plan=plan)
        assert (guarded[rows:] == POISON).all()


@pytest.mark.parametrize(
    ("text", "on"),
    [("1", True), ("0", False), ("2", True), (" 1", True), ("-1", True), ("", False), ("yes", False), ("0x1", False)],
)
def test_switches_are_read_as_integers(monkeypatch, text, on):
    monkeypatch.setenv("AITER_MLA_META_USE_PARALLEL", text)
    assert env_flag("AITER_MLA_META_USE_PARALLEL", 1) is on


def test_info_follows_the_device_and_refuses_nonsense(monkeypatch):
    assert get_mla_metadata_info_v1(8, 1, 16, None, None, True)[1] == (257, torch.int32)
    with emulated_device(MI300X):
        assert get_mla_metadata_info_v1(8, 1, 16, None, None, True)[1] == (305, torch.int32)
    monkeypatch.setenv("AITER_ENABLE_EXPERIMENTAL", "1")
    assert get_mla_metadata_info_v1(8, 1, 64, FP8, FP8, True)[1] == (513, torch.int32)
    monkeypatch.setenv("AITER_ENABLE_EXPERIMENTAL", "2")  # the Python side takes "1" only
    assert get_mla_metadata_info_v1(8, 1, 64, FP8, FP8, True)[1] == (257, torch.int32)
    with pytest.raises(ValueError, match="num_head_qo is 12"):
        get_mla_metadata_info_v1(8, 1, 12, None, None, True)
    with pytest.raises(ValueError, match="batch_size -1"):
        get_mla_metadata_info_v1(-1, 1, 16, None, None, True)


def test_info_counts_a_sparse_query_token_as_a_row():
    sparse = get_mla_metadata_info_v1(8, 4, 16, None, None, True)
    assert sparse == get_mla_metadata_info_v1(32, 1, 16, None, None, True)


def test_info_adds_room_for_a_split_cap():
    plain = get_mla_metadata_info_v1(512, 1, 16, None, None, True)
    assert plain[5] == (2 * 255, torch.int32)
    assert get_mla_metadata_info_v1(512, 1, 16, None, None, True, max_split_per_batch=16)[5] == (512 + 256, torch.int32)


def test_experimental_kernel_doubles_the_workgroups(monkeypatch):
    monkeypatch.setenv("AITER_ENABLE_EXPERIMENTAL", "1")
    with emulated_device(MI355X), pytest.raises(ValueError, match="512 compute units need 513"):
        call(num_heads_per_head_k=64, dtype_q=FP8, dtype_kv=FP8)


def test_importing_the_emulation_does_not_import_numba():
    code = "import sys, dsv32_fast.kernels.emulated, dsv32_fuzz.plan_checker; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
