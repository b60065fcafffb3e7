"""`mla_decode_fwd`: the planned kernel against literal fp64 attention, and what a stale plan makes of it."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from kernel_worlds import (
    FAULTS,
    NEIGHBOURS,
    REFUSALS,
    RULE,
    U8,
    U16,
    UNWRITTEN,
    admits,
    assert_attends,
    assert_unwritten,
    attention,
    plan_buffers,
    windows,
    world,
)
from under_test import get_mla_metadata_info_v1, get_mla_metadata_v1, mla_decode_fwd

from dsv32_fast.kernels.emulated.attention import head_fold, uses_persistent_kernel
from dsv32_fast.kernels.emulated.device import MI300X, emulated_device
from dsv32_fast.kernels.emulated.memory import OutOfBoundsError
from dsv32_fast.kernels.emulated.splitkv import get_meta_param

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
SATURATED = [64, 64, 64, 64]


def own(lengths, row):
    start = sum(lengths[:row])
    return start, start + lengths[row]


@pytest.mark.parametrize("pieces", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("lengths", [[1], [10, 300, 17, 2], [33, 1, 1, 129, 64]])
def test_each_row_attends_its_own_keys(lengths, pieces):
    step = world(lengths)
    cuts = windows(lengths, pieces)
    out, partials, lse = step.run(plan_buffers(cuts))
    for row in range(len(lengths)):
        slots = step.indices[slice(*own(lengths, row))]
        assert_attends(step, out, row, slots, len(cuts[row]))
        expected = attention(
            step.q[row].float(), step.kv[slots.long(), 0, 0].float(), step.latent, step.scale, len(cuts[row])
        )
        assert ((lse[row].double() - expected.lse).abs() <= expected.lse_bound).all()
    split = sum(len(row) for row in cuts if len(row) > 1)
    assert not partials[:split].isnan().any()
    assert_unwritten(partials[split:])  # the scratch beyond the plan's partials


def test_bound_sees_one_lost_key():
    """The comparison of the tests above is sharp enough: dropping or exchanging one key of 300 exceeds it."""
    step = world([300])
    out, _, _ = step.run(plan_buffers(windows([300])))
    assert_attends(step, out, 0, step.indices)
    with pytest.raises(AssertionError, match="of the bound"):
        assert_attends(step, out, 0, step.indices[:-1])
    with pytest.raises(AssertionError, match="of the bound"):
        assert_attends(step, out, 0, torch.cat([step.indices[:-1], step.indices[:1]]))


def test_true_dimensions():
    step = world([2048, 1, 700], heads=16, latent=512, rope=64)
    step.scale = 192**-0.5 * 1.3688879**2
    cuts = windows(step.lengths, 4)
    out, _, _ = step.run(plan_buffers(cuts))
    for row in range(3):
        assert_attends(step, out, row, step.indices[slice(*own(step.lengths, row))], len(cuts[row]))


def test_runs_are_bit_equal_and_independent_of_company():
    lengths = [40, 129, 64, 7, 300]
    step, cuts = world(lengths), windows(lengths, 3)
    plan = plan_buffers(cuts)
    out, _, lse = step.run(plan)
    again, _, lse_again = step.run({name: tensor.clone() for name, tensor in plan.items()})
    assert torch.equal(out, again)
    assert torch.equal(lse, lse_again)
    for row in range(len(lengths)):
        alone, _, _ = step.run(plan_buffers([cuts[r] if r == row else [] for r in range(len(lengths))]))
        assert torch.equal(alone[row], out[row])
        assert (alone[[r for r in range(len(lengths)) if r != row]] == 768).all()


def test_kv_indptr_is_not_read():
    """Only the plan says what is attended: kv_indptr may hold anything."""
    lengths = [40, 129, 64]
    step = world(lengths)
    plan = plan_buffers(windows(lengths, 2))
    out, _, _ = step.run(plan)
    step.lengths = [3, 1000, 0]
    assert torch.equal(step.run(plan)[0], out)


OPERANDS = {"bf16": (False, False), "fp8 cache": (False, True), "fp8": (True, True)}
"""Whether q and the cache are e4m3."""


def any_plan(windows_of_rows, generator):
    """A plan that no planner makes: each row's windows cut anywhere, its pieces in any order on any workgroup, partials
    scattered over the scratch, split rows reduced in any order. Rows without a window have no work."""

    def drawn(count):
        return torch.randperm(count, generator=generator).tolist()

    def pieces(start, end):
        cuts = sorted({start, end, *(start + c for c in drawn(end - start)[: drawn(5)[0]])})
        return list(itertools.pairwise(cuts))

    rows = [pieces(*window) for window in windows_of_rows]
    split = [row for row in drawn(len(rows)) if len(rows[row]) > 1]
    total = sum(len(rows[row]) for row in split)
    places, works, partial_map, indptr = drawn(total + 3), [], [], [0]
    for row in split:
        mine = [places.pop() for _ in rows[row]]
        works += [[row, place, row, row + 1, *cut, 0, 0] for place, cut in zip(mine, rows[row], strict=True)]
        partial_map += mine
        indptr.append(len(partial_map))
    works += [[row, -1, row, row + 1, *cut[0], 0, 0] for row, cut in enumerate(rows) if len(cut) == 1]
    ends = sorted(drawn(len(works) + 1)[: drawn(7)[0]])
    lists = {
        "work_indptr": [0, *ends, len(works)],
        "work_info_set": [works[n] for n in drawn(len(works))],
        "reduce_indptr": indptr,
        "reduce_final_map": [[row, row + 1] for row in split],
        "reduce_partial_map": [*partial_map, 0, 0, 0],
    }
    plan = {name: torch.tensor(values, dtype=torch.int32) for name, values in lists.items()}
    plan["reduce_final_map"] = plan["reduce_final_map"].view(-1, 2)
    return plan | {"work_meta_data": torch.zeros(2, dtype=torch.uint64)}, rows


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("operands", OPERANDS)
@pytest.mark.parametrize("heads", [16, 32, 64, 128])
def test_any_plan(heads, operands, seed):
    """Windows that overlap, that belong to other rows, or that are nobody's: each row attends what the plan says."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 120, (6,), generator=generator).tolist()
    step = world(lengths, heads=heads, seed=seed)
    exact, scales, unit = step, {}, U16
    if OPERANDS[operands][1]:
        scales = quantised(step)
        exact = dequantised(step, scales)
        if not OPERANDS[operands][0]:  # bf16 queries stay what they were
            step.q, unit = (exact.q / scales["q_scale"].double()).bfloat16(), U16
            exact.q = step.q.double()
            del scales["q_scale"]
        else:
            unit = U8
    fold = head_fold(step.q.dtype, step.kv.dtype, heads, 1)
    rows, total = len(lengths) * fold, sum(lengths)
    starts = torch.randint(0, total, (rows,), generator=generator)
    windows_of_rows = [
        (s, s + 1 + int(torch.randint(0, total - s, (1,), generator=generator))) for s in starts.tolist()
    ]
    plan, cuts = any_plan(windows_of_rows, generator)
    out, _, lse = step.run(plan, **scales)
    again, _, lse_again = step.run({name: tensor.clone() for name, tensor in plan.items()}, **scales)
    assert torch.equal(out, again)
    assert torch.equal(lse, lse_again)
    out, q, lse = (part.view(rows, heads // fold, *part.shape[2:]) for part in (out, exact.q, lse))
    for row, (start, end) in enumerate(windows_of_rows):
        keys = exact.kv[step.indices[start:end].long(), 0, 0]
        expected = attention(q[row], keys, step.latent, step.scale, len(cuts[row]), p_unit=unit)
        assert ((out[row].double() - expected.output).abs() <= expected.bound).all(), f"row {row}"
        assert ((lse[row].double() - expected.lse).abs() <= expected.lse_bound).all(), f"row {row}"


def dequantised(step, scales):
    """The values that an fp8 world stands for, in fp64."""
    return replace(step, q=step.q.double() * scales["q_scale"], kv=step.kv.double() * scales["kv_scale"])


# The stale-plan table: a plan for the lengths `old`, used with `new`. Row i attends its old window.
STALE = {
    "one token per row": ([10, 300, 128, 128], [11, 301, 128, 128], [(1, 0), (2, 1), (2, 2), (2, 2)]),
    "every row grew": ([32, 32, 32, 32], [33, 33, 33, 33], [(1, 0), (2, 1), (3, 2), (4, 3)]),
    "swapped": ([300, 10, 128, 100], [10, 300, 128, 100], [(0, 290), (290, 0), (0, 0), (0, 0)]),
    "only row 0 grew": ([10, 50, 60], [11, 50, 60], [(1, 0), (1, 1), (1, 1)]),
    "saturated": (SATURATED, SATURATED, [(0, 0)] * 4),
}


@pytest.mark.parametrize("pieces", [1, 4])
@pytest.mark.parametrize("name", STALE)
def test_stale_plan(name, pieces):
    old, new, losses = STALE[name]
    step = world(new)
    cuts = windows(old, pieces)
    out, _, _ = step.run(plan_buffers(cuts))
    for row in range(len(new)):
        (old_start, old_end), (start, end) = own(old, row), own(new, row)
        assert_attends(step, out, row, step.indices[old_start:old_end], len(cuts[row]))
        seen, mine = set(range(old_start, old_end)), set(range(start, end))
        assert (len(mine - seen), len(seen - mine)) == losses[row], f"row {row} loses and gains"
    fresh, _, _ = step.run(plan_buffers(windows(new, pieces)))
    assert torch.equal(fresh, out) == (old == new)


def test_stale_plan_of_a_smaller_batch_leaves_new_rows_unwritten():
    step = world([20, 30, 40])
    out, _, lse = step.run(plan_buffers(windows([20, 30])))
    assert (out[2] == 768).all()
    assert_unwritten(lse[2])
    assert_attends(step, out, 1, step.indices[20:50])


@admits(emulation=FAULTS)
def test_stale_plan_of_a_larger_batch_leaves_the_allocation():
    step = world([20, 30])
    with pytest.raises(OutOfBoundsError, match=r"q: access to row 2 of 2"):
        step.run(plan_buffers(windows([20, 15, 15])))


@admits(emulation=NEIGHBOURS)
def test_stale_plan_of_a_larger_batch_overwrites_the_neighbours_of_a_workspace():
    """q and o as views of a workspace, as vLLM pads for a graph: the surplus rows are read from and written behind."""
    step = world([20, 30, 40])
    whole = step.q.clone()
    plan = plan_buffers(windows([20, 30, 40]))
    expected, _, _ = step.run(plan)
    workspace = torch.full((4, 4, 16), 768.0, dtype=BF16)
    indptr = torch.tensor([0, 20, 50], dtype=torch.int32)
    mla_decode_fwd(
        whole[:2], step.kv, workspace[:2], torch.arange(3, dtype=torch.int32), indptr, step.indices,
        torch.ones(2, dtype=torch.int32), 1, sm_scale=step.scale, **plan,
    )  # fmt: skip
    assert torch.equal(workspace[:3], expected)
    assert (workspace[3] == 768).all()


@admits(emulation=FAULTS)
def test_plan_with_more_works_than_it_has_rows():
    step = world([20])
    plan = plan_buffers(windows([20]))
    plan["work_indptr"] = plan["work_indptr"] + torch.arange(9, dtype=torch.int32)
    with pytest.raises(OutOfBoundsError, match="work_info_set: access to row"):
        step.run(plan)


def emulated_plan(lengths, heads, q=1, page=1, cap=-1):
    """The plan of the emulated planner in buffers full of junk, and qo_indptr, kv_indptr and last page lengths."""
    pages = [-(-n // page) for n in lengths]
    indptr = torch.tensor([0, *torch.tensor(pages).cumsum(0).tolist()], dtype=torch.int32)
    last = torch.tensor(
        [n - (p - 1) * page if p else 0 for n, p in zip(lengths, pages, strict=True)], dtype=torch.int32
    )
    qo = torch.arange(len(lengths) + 1, dtype=torch.int32) * q
    sizes = get_mla_metadata_info_v1(len(lengths), q, heads, BF16, BF16, q == 1, max_split_per_batch=cap)
    buffers = [torch.full(shape if isinstance(shape, tuple) else (shape,), 10**6).to(dtype) for shape, dtype in sizes]
    meta, work_indptr, work_info, *maps = buffers
    get_mla_metadata_v1(
        qo, indptr, last, heads, 1, True, meta, work_info, work_indptr, *maps, page_size=page, max_seqlen_qo=q,
        uni_seqlen_qo=q, max_split_per_batch=cap,
    )  # fmt: skip
    plan = {"work_meta_data": meta, "work_indptr": work_indptr, "work_info_set": work_info}
    plan |= dict(zip(("reduce_indptr", "reduce_final_map", "reduce_partial_map"), maps, strict=True))
    return plan, (qo, indptr, last)


@pytest.mark.parametrize("cap", [-1, 16])
@pytest.mark.parametrize("seed", range(6))
def test_steps_of_the_emulated_planner(seed, cap):
    """Random steps with empty rows, planned for 256 units; an empty row is not written, with a work or without."""
    generator = torch.Generator().manual_seed(seed)
    batch = int(torch.randint(1, 20, (1,), generator=generator))
    lengths = torch.randint(0, 500, (batch,), generator=generator)
    lengths[torch.rand(batch, generator=generator) < 0.2] = 0
    step = world(lengths.tolist(), heads=16, seed=seed)
    plan, _ = emulated_plan(step.lengths, 16, cap=cap)
    out, _, lse = step.run(plan)
    for row, length in enumerate(step.lengths):
        if length:
            assert_attends(step, out, row, step.indices[slice(*own(step.lengths, row))], 64)
        else:
            assert (out[row] == 768).all()
            assert_unwritten(lse[row])


@admits(query_rows=2)
@pytest.mark.parametrize("page", [1, 64])
@pytest.mark.parametrize(("heads", "q"), [(16, 2), (16, 4), (32, 3), (128, 2), (128, 4), (64, 4)])
def test_several_query_rows_of_the_emulated_planner(heads, q, page):
    """Planner and kernel agree on what kv_offset means: row j of q sees all but the last q-1-j keys of its request."""
    lengths = [5, 200, 64, 130]
    step = world(lengths, heads=heads)
    step.q = torch.randn(len(lengths) * q, heads, 24, generator=torch.Generator().manual_seed(1)).bfloat16()
    plan, (qo, indptr, last) = emulated_plan(lengths, heads, q, page)
    keys = [step.kv[step.indices[slice(*own(lengths, r))].long(), 0, 0] for r in range(len(lengths))]
    kv = torch.full((int(indptr[-1]), page, 1, 24), math.nan, dtype=BF16)
    for row, rows in enumerate(keys):
        kv[int(indptr[row]) : int(indptr[row + 1]), :, 0].view(-1, 24)[: len(rows)] = rows
    out = torch.full((len(step.q), heads, 16), 768.0, dtype=BF16)
    indices = torch.arange(int(indptr[-1]), dtype=torch.int32)
    mla_decode_fwd(step.q, kv, out, qo, indptr, indices, last, q, page_size=page, sm_scale=0.3, **plan)
    for token in range(len(step.q)):
        request, row = divmod(token, q)
        seen = keys[request][: lengths[request] - (q - 1 - row)]
        expected = attention(step.q[token].float(), seen.float(), 16, 0.3, 64)
        assert ((out[token].double() - expected.output).abs() <= expected.bound).all(), (request, row)


@admits(emulation=NEIGHBOURS)
def test_stale_plan_of_a_longer_batch_reads_the_old_entries_of_the_index_buffer():
    """vLLM passes a view of a larger buffer: beyond it lie old slots, and the kernel attends them without complaint."""
    step = world([20, 40], slots=60)
    buffer = step.indices.clone()
    step.indices, step.lengths = buffer[:50], [20, 30]
    out, _, _ = step.run(plan_buffers(windows([20, 40])))
    assert_attends(step, out, 1, buffer[20:60])
    step.indices = buffer[:50].clone()
    with pytest.raises(OutOfBoundsError, match="kv_indices"):
        step.run(plan_buffers(windows([20, 40])))


def test_mixed_buffers_leave_newly_split_rows_unwritten():
    """New work_* with old reduce_*: a row that is split now and was not then is never merged."""
    step = world([64, 64])
    old, new = plan_buffers(windows([64, 64])), plan_buffers([[(0, 64)], [(64, 96), (96, 128)]])
    out, _, _ = step.run(new | {name: old[name] for name in ("reduce_indptr", "reduce_final_map")})
    assert_attends(step, out, 0, step.indices[:64])
    assert (out[1] == 768).all()


def test_empty_work_writes_nothing():
    step = world([20, 0, 5])
    out, _, lse = step.run(plan_buffers([[(0, 20)], [(20, 20)], [(20, 25)]]))
    assert (out[1] == 768).all()
    assert_unwritten(lse[1])
    assert_attends(step, out, 2, step.indices[20:])


@admits(emulation=FAULTS)
@pytest.mark.parametrize("bad", [-1, 10**6])
def test_slot_outside_the_cache_is_named(bad):
    step = world([20])
    step.indices[3] = bad
    with pytest.raises(OutOfBoundsError, match=f"kv_buffer: access to row {bad} of"):
        step.run(plan_buffers(windows([20])))


@admits(heads=1, latent=16)
def test_invalid_entry_read_as_slot_0():
    """vllm#45324: a converter that writes 0 for an invalid entry makes the row attend physical slot 0."""
    step = world([4], heads=1, latent=16, rope=0)
    step.kv[...] = 0
    step.q[...], step.scale = 1, 1.0
    # key dim 15 carries the logit, dim 0 the value: valid (1, 1), (2, 3); slot 0 has logit 5 and value 100
    for slot, logit, value in ((1, 1.0, 1.0), (2, 2.0, 3.0), (0, 5.0, 100.0)):
        step.kv[slot, 0, 0, 0], step.kv[slot, 0, 0, 15] = value, logit
    step.q[..., :15] = 0
    step.indices = torch.tensor([1, 2, 0, 0], dtype=torch.int32)
    right, _, _ = step.run(plan_buffers([[(0, 2)]]))
    wrong, _, _ = step.run(plan_buffers([[(0, 4)]]))
    assert abs(float(right[0, 0, 0]) - 2.4621) <= 2.4621 * 2**-7
    assert abs(float(wrong[0, 0, 0]) - 96.788) <= 96.788 * 2**-7


# ---- query lengths above 1 -------------------------------------------------------------------------------------------


def causal_plan(length, q, cut):
    """One request with q query rows as one tile, its keys cut at `cut`."""
    cuts = [(0, cut), (cut, length)] if cut else [(0, length)]
    works = [[0, i * q if cut else -1, 0, q, *piece, length - piece[1], 0] for i, piece in enumerate(cuts)]
    return {
        "work_meta_data": torch.zeros(2, dtype=torch.uint64),
        "work_indptr": torch.tensor([0, len(works)], dtype=torch.int32),
        "work_info_set": torch.tensor(works, dtype=torch.int32),
        "reduce_indptr": torch.tensor([0, 2 if cut else 0], dtype=torch.int32),
        "reduce_final_map": torch.tensor([[0, q]], dtype=torch.int32),
        "reduce_partial_map": torch.tensor([0, q], dtype=torch.int32),
    }


@admits(query_rows=2)
@pytest.mark.parametrize(
    ("length", "last_piece"), [(n, p) for n in (5, 40, 100) for p in (None, 1, 2, 4, 9) if p is None or p < n]
)
@pytest.mark.parametrize("q", [2, 3, 4])
def test_causal_rows_of_one_request(q, last_piece, length):
    """Row j of q sees all but the last q-1-j keys, also when a piece holds none of its keys (lse -inf, weight 0)."""
    step = world([length])
    step.q = torch.randn(q, 4, 24, generator=torch.Generator().manual_seed(1)).bfloat16()
    out = torch.full((q, 4, 16), 768.0, dtype=BF16)
    plan = causal_plan(length, q, length - last_piece if last_piece else None)
    ints = [torch.tensor(x, dtype=torch.int32) for x in ([0, q], [0, length])]
    mla_decode_fwd(
        step.q, step.kv, out, *ints, step.indices, torch.ones(1, dtype=torch.int32), q, sm_scale=step.scale, **plan
    )
    for row in range(q):
        assert_attends(step, out, row, step.indices[: length - (q - 1 - row)], 2)


@admits(query_rows=2)
def test_split_kv_kernel_is_causal_too():
    step = world([100])
    step.q = torch.randn(3, 4, 24, generator=torch.Generator().manual_seed(1)).bfloat16()
    ints = [torch.tensor(x, dtype=torch.int32) for x in ([0, 3], [0, 100])]
    for splits in (1, 5):
        out = torch.full((3, 4, 16), 768.0, dtype=BF16)
        mla_decode_fwd(
            step.q, step.kv, out, *ints, step.indices, torch.ones(1, dtype=torch.int32), 3, sm_scale=step.scale,
            num_kv_splits=splits,
        )  # fmt: skip
        for row in range(3):
            assert_attends(step, out, row, step.indices[: 98 + row], splits)


# ---- pages of 64, fp8, folding ---------------------------------------------------------------------------------------


@admits(page=64, heads=4)
@pytest.mark.parametrize("page", [4, 64])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 200])
def test_pages(page, length):
    generator = torch.Generator().manual_seed(2)
    pages = -(-length // page)
    order = torch.randperm(pages + 3, generator=generator)[:pages].to(torch.int32)
    kv = torch.full((pages + 3, page, 1, 24), math.nan, dtype=BF16)
    keys = torch.randn(length, 24, generator=generator).bfloat16()
    for token in range(length):
        kv[int(order[token // page]), token % page, 0] = keys[token]
    q, last = torch.randn(1, 4, 24, generator=generator).bfloat16(), length - (pages - 1) * page
    ints = [torch.tensor(x, dtype=torch.int32) for x in ([0, 1], [0, pages])]
    last_lens = torch.tensor([last], dtype=torch.int32)

    def check(pieces, **kernel):
        out = torch.full((1, 4, 16), 768.0, dtype=BF16)
        mla_decode_fwd(q, kv, out, *ints, order, last_lens, 1, page_size=page, sm_scale=0.3, **kernel)
        expected = attention(q[0].float(), keys.float(), 16, 0.3, pieces)
        assert ((out[0].double() - expected.output).abs() <= expected.bound).all()

    cut = pages // 2
    for cuts in ([(0, pages)], [(0, cut), (cut, pages)]) if cut else ([(0, pages)],):
        plan = plan_buffers([cuts])
        for work, (_, end) in zip(plan["work_info_set"], cuts, strict=False):
            work[6] = 0 if end == pages else (pages - end - 1) * page + last
        check(len(cuts), **plan)
    for splits in (1, 3):
        check(splits, num_kv_splits=splits)


def quantised(step, q_scale=0.37, kv_scale=0.21):
    step.q, step.kv = (step.q.float() / q_scale).to(FP8), (step.kv.float() / kv_scale).to(FP8)
    return {"q_scale": torch.tensor([q_scale]), "kv_scale": torch.tensor([kv_scale])}


@pytest.mark.parametrize("pieces", [1, 4])
def test_fp8_with_scales_that_are_no_powers_of_two(pieces):
    step = world([10, 300])
    scales = quantised(step)
    out, _, _ = step.run(plan_buffers(windows([10, 300], pieces)), **scales)
    exact = dequantised(step, scales)
    for row in range(2):
        slots = step.indices[slice(*own([10, 300], row))].long()
        expected = attention(exact.q[row], exact.kv[slots, 0, 0], step.latent, step.scale, pieces, p_unit=U8)
        assert ((out[row].double() - expected.output).abs() <= expected.bound).all()


@admits(heads=1, latent=16)
def test_probabilities_are_rounded_before_they_meet_v():
    """Logits 0 and -1.25: p = 1 and 0.28650, which is 0.28125 in e4m3 and 0.28711 in bf16; the sum stays unrounded."""
    step = world([2], heads=1, latent=16, rope=0)
    step.scale, step.indices = 1.0, torch.tensor([0, 1], dtype=torch.int32)
    step.q[...], step.kv[...] = 0, 0
    step.q[..., 15], step.kv[1, ..., 15], step.kv[1, ..., 0] = 1, -1.25, 1
    total = 1 + math.exp(-1.25)
    bf16, _, _ = step.run(plan_buffers(windows([2])))
    step.q, step.kv = step.q.to(FP8), step.kv.to(FP8)
    fp8, _, _ = step.run(plan_buffers(windows([2])), q_scale=torch.ones(1), kv_scale=torch.ones(1))
    assert float(bf16[0, 0, 0]) == float(torch.tensor(0.287109375 / total).bfloat16())
    assert float(fp8[0, 0, 0]) == float(torch.tensor(0.28125 / total).bfloat16())


@admits(heads=1, latent=16)
def test_fp8_bytes_are_read_in_the_flavour_of_the_device():
    """vllm#45720: the same bytes mean half as much in FNUZ, whatever the tensor's dtype says."""
    step = world([16], heads=1, latent=16, rope=0)
    step.q, step.kv = torch.zeros(1, 1, 16).to(FP8), torch.ones(step.kv.shape).to(FP8)
    scales = {"q_scale": torch.ones(1), "kv_scale": torch.ones(1)}
    on_mi355x, _, _ = step.run(plan_buffers(windows([16])), **scales)
    with emulated_device(MI300X):
        on_mi300x, _, _ = step.run(plan_buffers(windows([16])), **scales)
    assert (on_mi355x == 1.0).all()
    assert (on_mi300x == 0.5).all()


@admits(heads=32, latent=16, rope=8)
def test_folded_heads_are_pseudo_rows():
    """bf16 Q with fp8 KV and 32 heads runs as two pseudo rows of 16 heads each, which the plan must name."""
    step = world([40, 70], heads=32)
    step.kv = step.kv.to(FP8)
    assert head_fold(BF16, FP8, 32, 1) == 2
    folded = plan_buffers([[(0, 40)], [(0, 40)], [(40, 70), (70, 110)], [(40, 110)]])
    folded["reduce_partial_map"] = folded["reduce_partial_map"][:2]
    out, partials, lse = step.run(folded)
    assert partials.shape == (2, 1, 16, 16)
    assert torch.equal(step.run(folded, return_logits=True)[1], partials.view(1, 1, 32, 16))
    step.kv = step.kv.float()
    for row in range(2):
        assert_attends(step, out, row, step.indices[slice(*own([40, 70], row))], 2)
    assert not lse.isnan().any()


def test_no_rows():
    """A plan without works, and none of AITER's other kernels."""
    step = world([])
    out, partials, lse = step.run(plan_buffers([]))
    assert out.shape[0] == lse.shape[0] == 0
    assert partials.shape[1:] == (1, *out.shape[1:])


@admits(emulation=REFUSALS)
def test_no_rows_without_a_plan():
    with pytest.raises(ValueError, match="qo_indptr: no rows, and the split-KV kernel has no split count for none"):
        world([]).run({})


@pytest.mark.parametrize("planned", [True, False])
def test_rows_without_keys(planned):
    """All rows empty: the planned kernel writes none of them, the split-KV kernel divides 0 by 0 in each."""
    step = world([0, 0, 0], heads=16)
    out, _, lse = step.run(emulated_plan([0, 0, 0], 16)[0] if planned else {})
    if planned:
        assert (out == 768).all()
        assert_unwritten(lse)
    else:
        assert out.isnan().all()
        assert (lse == -math.inf).all()


@admits(emulation=RULE)
@pytest.mark.parametrize(
    ("q", "kv", "heads", "fold"),
    [
        (BF16, BF16, 128, 1),
        (BF16, BF16, 16, 1),
        (FP8, FP8, 64, 1),
        (FP8, FP8, 48, 3),
        (BF16, FP8, 128, 8),
        (FP8, FP8, 8, 1),
    ],
)
def test_head_fold(q, kv, heads, fold):
    assert head_fold(q, kv, heads, 1) == fold


@admits(emulation=RULE)
def test_head_fold_of_gfx942():
    with emulated_device(MI300X):
        assert head_fold(BF16, BF16, 128, 1) == 8
        assert head_fold(FP8, FP8, 64, 1) == 1
        assert head_fold(FP8, FP8, 64, 2) == 4


# ---- the split-KV kernel and its silent gate -------------------------------------------------------------------------


@admits(emulation=RULE)
def test_gate(monkeypatch):
    shape = (BF16, BF16, 16, 1)
    assert uses_persistent_kernel(*shape, 31, None)
    assert not uses_persistent_kernel(*shape, 32, None)
    assert uses_persistent_kernel(*shape, 32, 16), "a fixed split count bypasses the gate"
    for other in ((FP8, FP8, 16, 1), (BF16, BF16, 32, 1), (BF16, BF16, 16, 2)):
        assert uses_persistent_kernel(*other, 500, None)
    monkeypatch.setenv("AITER_MLA_DECODE_PERSISTENT_MAX_BATCH", "0")
    assert uses_persistent_kernel(*shape, 500, None)
    monkeypatch.setenv("AITER_MLA_DECODE_PERSISTENT_MAX_BATCH", "3")
    assert not uses_persistent_kernel(*shape, 3, None)
    monkeypatch.setenv("AITER_MLA_DECODE_PERSISTENT_MAX_BATCH", "many")
    assert not uses_persistent_kernel(*shape, 32, None)
    assert uses_persistent_kernel(*shape, 31, None)
    with emulated_device(MI300X):
        assert uses_persistent_kernel(*shape, 500, None)


@pytest.mark.parametrize("batch", [31, 32])
def test_gate_hides_a_stale_plan(batch):
    lengths = [20] * batch
    step = world(lengths, heads=16)
    stale = plan_buffers(windows([19, *lengths[1:]]))
    fresh = plan_buffers(windows(lengths))
    assert torch.equal(step.run(stale)[0], step.run(fresh)[0]) == (batch == 32)


@pytest.mark.parametrize("splits", [None, 1, 8, 16, 32])
def test_split_kv_kernel(splits):
    """aiter#4350: 5 keys in 16 splits have empty splits, whose scratch (NaN here) must not be merged."""
    lengths = [5, 0, 300, 1030]
    step = world(lengths, heads=16)
    out, partials, lse = step.run({}, num_kv_splits=splits)
    for row in (0, 2, 3):
        slots = step.indices[slice(*own(lengths, row))]
        assert_attends(step, out, row, slots, splits or 16)
        expected = attention(
            step.q[row].float(), step.kv[slots.long(), 0, 0].float(), step.latent, step.scale, splits or 16
        )
        assert ((lse[row].double() - expected.lse).abs() <= expected.lse_bound).all()
    assert out[1].isnan().all(), "a row without KV divides 0 by 0"
    assert (lse[1] == -math.inf).all()
    if splits:
        assert partials.shape == (4, splits, 16, step.latent)


@admits(heads=8)
def test_what_the_split_kv_kernel_returns_of_a_single_split():
    """With 8 heads (not with 16) one split is the result itself, and its LSE comes even unasked, in another shape."""
    step = world([20, 300], heads=8)
    out, partials, lse = step.run({}, num_kv_splits=1)
    assert partials is out
    _, _, unasked = step.run({}, num_kv_splits=1, return_lse=False)
    assert torch.equal(unasked[:, 0, :, 0], lse)
    assert step.run({}, num_kv_splits=2)[1].shape == (2, 2, 8, 16)
    step.q = torch.cat([step.q, step.q], 1)
    _, partials, _ = step.run({}, num_kv_splits=1)
    assert partials.shape == (2, 1, 16, 16)


@admits(emulation=UNWRITTEN)
@pytest.mark.parametrize(("heads", "parts"), [(16, 2), (8, 2), (4, 7), (64, 4)])
def test_short_rows_use_fewer_splits(heads, parts):
    """100 keys in 16 splits: parts of at least 64 (8 or 16 heads), 32 (64 heads) or 16; the rest is unwritten."""
    _, partials, _ = world([100], heads=heads).run({}, num_kv_splits=16)
    assert (~partials[0].isnan().flatten(1).any(1)).tolist() == [part < parts for part in range(16)]


@admits(emulation=RULE)
def test_split_counts():
    """Worked by hand: 64 rows on 256 units fill them with 4 splits; 256 rows want no split, at any length."""
    assert get_meta_param(None, 64, 64 * 2048, 16, 1, BF16)[0] == 4
    assert get_meta_param(None, 256, 256 * 2048, 16, 1, BF16)[0] == 1
    assert get_meta_param(None, 1, 2048, 16, 1, BF16)[0] == 16
    assert get_meta_param(None, 1, 300, 16, 1, FP8)[0] == 3
    assert get_meta_param(7, 3, 300, 16, 1, BF16)[1].tolist() == [0, 7, 14, 21]
    assert get_meta_param(7, 3, 3 * 300, 16, 1, FP8)[0] == 3, "an fp8 query caps a given number too"
    assert get_meta_param(7, 3, 3 * 257, 16, 2, FP8)[0] == 2, "3 blocks of 128, but only 2 in 257 - 2 tokens"
    assert get_meta_param(7, 3, 3 * 257, 16, 4, FP8)[0] == 4, "5 blocks of 64, but only 4 in 257 - 4 tokens"


# ---- refusals --------------------------------------------------------------------------------------------------------


@admits(emulation=REFUSALS)
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"logit_cap": 1.0}, ValueError, "logit_cap"),
        ({"intra_batch_mode": True}, ValueError, "intra_batch_mode"),
        ({"work_indptr": None}, ValueError, "work_indptr"),
        ({"page_size": 64}, ValueError, "kv_buffer must be"),
    ],
)
def test_refusals_name_the_argument(change, error, message):
    step = world([20])
    with pytest.raises(error, match=message):
        step.run(plan_buffers(windows([20])) | change)


@admits(emulation=REFUSALS)
def test_fp8_query_needs_its_scales():
    step = world([20])
    quantised(step)
    with pytest.raises(ValueError, match="q_scale"):
        step.run(plan_buffers(windows([20])))
    step.q = step.q.to(torch.float16)
    with pytest.raises(TypeError, match=r"torch\.float16"):
        step.run(plan_buffers(windows([20])))
