"""The metadata builder: vLLM's buffers, keys and clears, and exact counts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dsv32_fast.batch import StepBatch
from dsv32_fast.kernels import emulated
from dsv32_fast.metadata import BuilderConfig, MetadataBuilder, max_split_per_batch, metadata_key
from dsv32_fast.options import PRESETS, Options, resolve
from dsv32_fast.plan import consumer_bytes

ROWS, TOPK = 128, 2048
pytestmark = pytest.mark.filterwarnings("error")  # torch only warns when it resizes an output of the wrong shape


def make(options: Options, **config: object) -> MetadataBuilder:
    settings = {"max_num_batched_tokens": ROWS, "topk": TOPK, **config}
    return MetadataBuilder(config=BuilderConfig(**settings), options=options, kernels=emulated)  # type: ignore[arg-type]


def decode(*seqs: int, rows: int = 0) -> StepBatch:
    return StepBatch(query_lens=(1,) * len(seqs), seq_lens=seqs, num_tokens=rows)


@pytest.mark.parametrize("rows", [ROWS, 101])
def test_buffers_are_those_of_vllms_sparse_builder(rows: int) -> None:
    builder = make(PRESETS["pr42982"], max_num_batched_tokens=rows)
    sizes = {
        "req_id_per_token_N": rows,
        "paged_kv_indices_NK": rows * TOPK,
        "paged_kv_indptr_N1": rows + 1,
        "qo_indptr_N1": rows + 1,
        "paged_kv_last_page_len_N": rows,
    }
    for name, size in sizes.items():
        buffer = getattr(builder, name)
        assert (buffer.shape, buffer.dtype) == ((size,), torch.int32), name
    assert not builder.req_id_per_token_N.any()
    assert not builder.paged_kv_indices_NK.any()
    assert torch.equal(builder.qo_indptr_N1, torch.arange(rows + 1, dtype=torch.int32))
    assert (builder.paged_kv_last_page_len_N == 1).all()
    info = emulated.get_mla_metadata_info_v1(
        rows, 1, 32, torch.bfloat16, torch.bfloat16, is_sparse=True, fast_mode=True
    )
    for buffer, (shape, dtype) in zip(builder.plan, info, strict=True):
        assert (buffer.numel(), buffer.dtype) == (int(np.prod(shape)), dtype)


def test_the_sizes_of_a_rank_are_deepseeks() -> None:
    config = BuilderConfig()
    assert (config.num_heads, config.topk, config.max_num_batched_tokens, config.compute_units) == (32, 2048, 8192, 256)


def test_the_planner_is_called_as_vllm_calls_it() -> None:
    """vLLM's ROCm sparse backend: one row of one token per query token, pages of one token, 16 of them a block."""
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    kernels: Any = SimpleNamespace(
        get_mla_metadata_info_v1=emulated.get_mla_metadata_info_v1,
        get_mla_metadata_v1=lambda *args, **kwargs: calls.append((args, kwargs)),
    )
    config = BuilderConfig(num_heads=8, max_num_batched_tokens=5, topk=TOPK, q_dtype=torch.float8_e4m3fn)
    builder = MetadataBuilder(config=config, options=PRESETS["vllm026"], kernels=kernels)
    metadata = builder.build(StepBatch(query_lens=(2,), seq_lens=(300,), num_tokens=3, max_seq_len=300))
    ((args, kwargs),) = calls
    assert [len(tensor) for tensor in args[:3]] == [4, 4, 3]
    assert args[3:6] == (16, 1, True)
    plan, tensors = builder.plan, (*args[:3], *args[6:])
    expected = (
        metadata.qo_indptr_T1,
        metadata.paged_kv_indptr_T1,
        metadata.paged_kv_last_page_len_T,
        plan.work_metadata_ptrs,
        plan.work_info_set,
        plan.work_indptr,
        plan.reduce_indptr,
        plan.reduce_final_map,
        plan.reduce_partial_map,
    )
    assert all(given is wanted for given, wanted in zip(tensors, expected, strict=True))
    assert kwargs == {
        "page_size": 1,
        "kv_granularity": 16,
        "max_seqlen_qo": 1,
        "uni_seqlen_qo": 1,
        "fast_mode": True,
        "max_split_per_batch": 2,
        "dtype_q": torch.float8_e4m3fn,
        "dtype_kv": torch.bfloat16,
    }


def test_heads_are_padded_to_sixteen() -> None:
    assert make(PRESETS["baseline"], num_heads=8).num_heads == 16
    assert make(PRESETS["baseline"], num_heads=32).num_heads == 32


def test_rows_get_their_requests_and_lengths() -> None:
    metadata = make(PRESETS["baseline"]).build(
        StepBatch(query_lens=(3, 0, 2), seq_lens=(5, 0, 2050), num_tokens=8, max_seq_len=4096)
    )
    assert metadata.req_id_per_token_T.tolist() == [0, 0, 0, 2, 2, 0, 0, 0]
    assert np.diff(metadata.paged_kv_indptr_T1.numpy()).tolist() == [3, 4, 5, 2048, 2048, 0, 0, 0]
    assert (metadata.num_tokens, metadata.max_query_len) == (8, 3)
    assert metadata.paged_kv_indices.shape == (8 * TOPK,)


def test_a_step_above_the_buffers_is_refused() -> None:
    with pytest.raises(ValueError, match=f"above max_num_batched_tokens={ROWS}"):
        make(PRESETS["baseline"]).build(decode(*[1] * (ROWS + 1)))


def test_buffers_that_int32_cannot_address_are_refused() -> None:
    """The refusal comes before any memory is taken."""
    with pytest.raises(ValueError, match="int32"):
        make(PRESETS["baseline"], max_num_batched_tokens=2**20)


def test_tail_clear_counts_exactly_what_a_shrink_leaves() -> None:
    """4 (d_req + topk d_tokens) bytes for the shrink, and the indptr tail that every version fills."""
    builder = make(PRESETS["pr42982"])
    builder.build(decode(*[4096] * 50, rows=64))
    before = builder.counts.bytes_cleared
    builder.build(decode(*[4096] * 10, rows=16))
    shrink = 4 * ((50 - 10) + TOPK * (64 - 16))
    indptr_tail = 4 * (ROWS + 1 - 17)
    assert builder.counts.bytes_cleared - before == shrink + indptr_tail


def test_a_first_step_has_nothing_to_clear_but_the_indptr_tail() -> None:
    for rows in (0, 3):
        builder = make(PRESETS["pr42982"])
        builder.build(decode(*[4096] * rows))
        assert builder.counts.bytes_cleared == 4 * (ROWS - rows)


def test_full_clear_counts_every_buffer() -> None:
    builder = make(PRESETS["baseline"])
    builder.build(decode(4096))
    assert builder.counts.bytes_cleared == 4 * (ROWS + ROWS * TOPK + ROWS + 1) + 4 * (ROWS + 1 - 2)


@pytest.mark.parametrize(("preset", "launches"), [("baseline", 4), ("pr42982", 2), ("pr47766", 2)])
def test_plan_launches_follow_the_key(preset: str, launches: int) -> None:
    builder = make(PRESETS[preset])
    for seqs in ((4096, 5000), (4097, 5001), (4098, 5002), (4099,)):
        builder.build(decode(*seqs))
    assert (builder.counts.builds, builder.counts.plan_launches) == (4, launches)


def test_a_hit_skips_the_launch_only() -> None:
    builder = make(PRESETS["pr42982"])
    builder.build(StepBatch(query_lens=(2,), seq_lens=(2048,)))
    plan = consumer_bytes(builder.plan)
    metadata = builder.build(StepBatch(query_lens=(2,), seq_lens=(2049,)))
    assert consumer_bytes(builder.plan) == plan
    assert np.diff(metadata.paged_kv_indptr_T1.numpy()).tolist() == [2048, 2048]


def test_the_keys_are_the_published_ones() -> None:
    step = StepBatch(query_lens=(3, 1), seq_lens=(2049, 7), num_tokens=8)
    clamped = np.array([2048, 7], np.int32).tobytes()
    assert metadata_key(step, "none", TOPK, 16) is None
    assert metadata_key(step, "pr42982", TOPK, 16) == (8, 3, 16, clamped)
    context, query = np.array([2046, 6], np.int32).tobytes(), np.array([3, 1], np.int32).tobytes()
    assert metadata_key(step, "pr47766", TOPK, 16) == (8, 3, 16, clamped, context, query)


def test_a_key_reads_the_device_only_without_host_lengths() -> None:
    """vLLM #54369: the key costs a blocking read when the runner keeps no host copy, on a hit too."""
    for preset, host_lens, reads in (("pr47766", True, 0), ("pr47766", False, 2), ("baseline", False, 0)):
        builder = make(PRESETS[preset], host_lens=host_lens)
        builder.build(decode(4096))
        builder.build(decode(4097))
        assert builder.counts.host_device_reads == reads


@pytest.mark.parametrize(
    ("bound", "cap"), [(1, 1), (255, 1), (256, 2), (383, 2), (384, 4), (640, 8), (1151, 8), (1152, 16), (163840, 16)]
)
def test_split_cap_of_vllm_026(bound: int, cap: int) -> None:
    step = StepBatch(query_lens=(1,), seq_lens=(1,), max_seq_len=bound)
    assert max_split_per_batch(step, "max_seq_len", BuilderConfig()) == cap
    assert max_split_per_batch(step, "unlimited", BuilderConfig()) == -1


def test_one_field_changes_one_thing() -> None:
    """The clear policy alone leaves the plan and the rows as they are."""
    steps = [decode(*[3000] * 5, rows=8), decode(17, 2048), decode(*[1] * 3, rows=4)]
    full, tail = make(resolve("pr47766", ("clear=full",))), make(resolve("pr47766"))
    for step in steps:
        a, b = full.build(step), tail.build(step)
        assert consumer_bytes(a.plan) == consumer_bytes(b.plan)
        assert torch.equal(a.req_id_per_token_T, b.req_id_per_token_T)
        assert torch.equal(a.paged_kv_indptr_T1, b.paged_kv_indptr_T1)
    assert full.counts.bytes_cleared > tail.counts.bytes_cleared
