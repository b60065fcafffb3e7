"""The counting probe on the kernels of the emulation: what it must see, and that it reads exactly what happened."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from dsv32_fast.batch import StepBatch
from dsv32_fast.options import PRESETS
from dsv32_fuzz.probes import counting
from dsv32_fuzz.probes.decode_step import DecodeEngine, DecodeStep, Shape
from dsv32_fuzz.targets.intree import InTreeTarget

TARGET = InTreeTarget(PRESETS["baseline"])
N = 2048


def long_step(kv: str, q: str = "bf16", keys: int = N) -> DecodeStep:
    """Two rows of `keys` keys each, at the true top-k and latent width, cut into many pieces."""
    shape = Shape(latent=512, rope=64, topk=keys, page_size=64, q=q, kv=kv)  # type: ignore[arg-type]
    return DecodeEngine(TARGET, shape, 2).build(StepBatch(query_lens=(1, 1), seq_lens=(N + 20, N)), seed=3)


STEPS = {"bf16": ("bf16", "bf16"), "fp8": ("fp8", "fp8"), "bf16 on fp8": ("fp8", "bf16")}


@pytest.fixture(scope="module", params=STEPS)
def step(request: pytest.FixtureRequest) -> DecodeStep:
    kv, q = STEPS[request.param]
    return long_step(kv, q)


def probe(step: DecodeStep, *, lse: bool, cap: int = -1) -> tuple[counting.Attended, str]:
    shape, marks = step.engine.shape, counting.Marks(slots=len(step.positions_S), columns=step.engine.shape.latent)
    q_THD, tail = torch.zeros(step.rows, shape.heads, shape.width), torch.ones(marks.slots, shape.rope)
    listed = step.engine.listed(step, range(step.rows), cap)
    listed.metadata.paged_kv_indices.copy_(step.metadata.paged_kv_indices)

    def kernel(values_SC: Tensor) -> tuple[Tensor, Tensor | None]:
        return listed.by_kernel(q_THD, torch.cat([values_SC, tail], 1), scale=0.1, scales=(0.37, 0.21), lse=lse)

    scale = 0.21 if shape.kv == "fp8" else 1.0
    seen = counting.count_attended(kernel, marks, step.key_counts, value_scale=scale)
    return seen, counting.difference(seen, step.slots_T, step.names_T)


@pytest.mark.parametrize("lse", [True, False])
@pytest.mark.parametrize("cap", [-1, 1, 4])
def test_all_of_2048_slots_are_counted_through_any_split(step: DecodeStep, lse: bool, cap: int) -> None:
    seen, violation = probe(step, lse=lse, cap=cap)
    assert violation == ""
    assert bool(seen.readable_TH.all())
    assert int(seen.counts_THS.sum()) == 2 * N * step.engine.shape.heads


def edited(step: DecodeStep, what: str) -> tuple[int, int]:
    """Change one entry of row 1's part of the gather list: (slot that was there, slot that is now)."""
    indices, first = step.metadata.paged_kv_indices, int(step.metadata.paged_kv_indptr_T1[1])
    at = {"doubled": int(indices[first]), "foreign": int(indices[5]), "nobody": 0}[what]
    old = int(indices[first + 1000])
    indices[first + 1000] = at
    return old, at


@pytest.mark.parametrize("lse", [True, False])
@pytest.mark.parametrize("what", ["doubled", "foreign", "nobody"])
def test_one_slot_of_2048_in_exchange_for_another_is_seen_and_named(step: DecodeStep, lse: bool, what: str) -> None:
    kept = step.metadata.paged_kv_indices.clone()
    try:
        lost, gained = edited(step, what)
        seen, violation = probe(step, lse=lse, cap=4)
    finally:
        step.metadata.paged_kv_indices.copy_(kept)
    assert violation.startswith("row 1 (request 1, token 0), head 0: lost 1 of 2048 slots")
    assert f"first {lost}, attended 1 slots too often, first {gained}" in violation
    assert {"doubled": "doubled, 2 times", "foreign": "of row 0", "nobody": "of nobody"}[what] in violation
    assert int(seen.counts_THS[1, 7, lost]) == 0
    assert int(seen.counts_THS[1, 7, gained]) == (2 if what == "doubled" else 1)
    assert bool((seen.counts_THS[0].sum(-1) == N).all()), "row 0 is as it was"


@pytest.mark.parametrize("step", ["bf16", "fp8"], indirect=True)
@pytest.mark.parametrize("lse", [True, False])
@pytest.mark.parametrize("change", [-1, 1])
def test_one_slot_of_2048_too_few_or_too_many_is_seen(step: DecodeStep, lse: bool, change: int) -> None:
    """Row 0 (row 1) is planned one entry short (long): the number of keys itself is another one."""
    rows = step.slots_T
    shifted = [rows[0][:-1], rows[1]] if change < 0 else [rows[0], torch.cat([rows[1], rows[0][:1]])]
    slots = DecodeStep(
        engine=step.engine,
        metadata=step.metadata,
        slots_T=shifted,
        positions_S=step.positions_S,
        names_T=step.names_T,
    )
    wide = DecodeEngine(TARGET, Shape(**{**vars(step.engine.shape), "topk": N + 1}), 2)
    listed = wide.listed(slots, range(2), 4)
    marks = counting.Marks(slots=len(step.positions_S), columns=512)
    tail = torch.ones(marks.slots, 64)
    seen = counting.count_attended(
        lambda v: listed.by_kernel(
            torch.zeros(2, 16, 576), torch.cat([v, tail], 1), scale=0.1, scales=(0.37, 0.21), lse=lse
        ),
        marks,
        step.key_counts,
        value_scale=0.21 if step.engine.shape.kv == "fp8" else 1.0,
    )
    violation = counting.difference(seen, step.slots_T, step.names_T)
    if change < 0:
        assert f"row 0 (request 0, token 0), head 0: lost 1 of 2048 slots, first {int(rows[0][-1])}" in violation
    else:
        assert violation.startswith("row 1 (request 1, token 0), head 0: attended 1 slots too often")
        assert f"first {int(rows[0][0])} (of row 0" in violation
    assert float(seen.keys_TH[int(change > 0), 0]) == pytest.approx(N + change, abs=0.1)


def test_the_longest_honest_row_decodes_with_room_to_spare() -> None:
    """Measured, not only derived: how far output x n is from a whole number (at 2048 itself nothing is rounded)."""
    step, worst, keys = long_step("bf16", keys=N - 1), 0.0, N - 1
    marks = counting.Marks(slots=len(step.positions_S), columns=512)
    tail = torch.ones(marks.slots, 64)
    for number in range(marks.passes):
        values = torch.cat([marks.values(number), tail], 1)
        out, _ = step.by_kernel(torch.zeros(2, 16, 576), values, scale=0.1)
        sums = out.double() * keys
        worst = max(worst, float((sums - sums.round()).abs().max()))
    assert 0.0 < worst <= 21 * (2.0**-8 + 2.0**-10)


def test_every_slot_has_a_cell_of_its_own() -> None:
    marks = counting.Marks(slots=1000, columns=64)
    cells = [
        (number, int(column), float(value))
        for number in range(marks.passes)
        for row in [marks.values(number)]
        for _, column in row.nonzero()
        for value in [row[_, column]]
    ]
    assert len(cells) == len(set(cells)) == 1000


def model(counts_S: Tensor, values_SC: Tensor, lse: bool) -> tuple[Tensor, Tensor | None]:
    """A kernel that attends each slot so often: [1, 1, C]."""
    n = int(counts_S.sum())
    out = (counts_S.double() @ values_SC.double() / n).bfloat16()
    return out[None, None], torch.tensor([[math.log(n)]]) if lse else None


@pytest.mark.parametrize("lse", [True, False])
def test_no_other_counts_look_like_the_expected_ones(lse: bool) -> None:
    """Counts 0..4 of six slots in two columns that differ in at most two of them: only the expected set itself passes.

    Without an LSE a common factor of all counts is invisible in any output, so multiples of the set pass, too.
    """
    marks = counting.Marks(slots=6, columns=2)
    for wanted in [(1, 1, 1, 0, 0, 0), (0, 1, 0, 0, 1, 1), (1, 1, 1, 1, 1, 1), (0, 0, 0, 0, 0, 1)]:
        slots = torch.tensor(wanted).nonzero()[:, 0]
        planned = torch.tensor([len(slots)])
        for counts in itertools.product(range(5), repeat=6):
            if sum(counts) == 0 or sum(c != w for c, w in zip(counts, wanted, strict=True)) > 2:
                continue
            seen = counting.count_attended(lambda v, c=counts: model(torch.tensor(c), v, lse), marks, planned)
            same = len({c / w if w else (0 if c == 0 else -1) for c, w in zip(counts, wanted, strict=True)} - {0}) == 1
            equal = counts == wanted or (
                not lse and same and all((c > 0) == (w > 0) for c, w in zip(counts, wanted, strict=True))
            )
            assert (counting.difference(seen, [slots], ["row 0"]) == "") == equal, (counts, wanted)


def test_nan_and_unwritten_rows_are_no_counts() -> None:
    marks = counting.Marks(slots=6, columns=2)
    for value in (math.nan, math.inf, 768.0, -1.0):
        out = torch.full((1, 1, 2), value)
        seen = counting.count_attended(lambda _, out=out: (out, None), marks, torch.tensor([2]))
        assert not bool(seen.readable_TH.any())
        assert counting.difference(seen, [torch.tensor([0, 1])], ["row 0"]) != ""


def test_nothing_to_mark_is_refused() -> None:
    with pytest.raises(ValueError, match="no slot to mark"):
        counting.count_attended(
            lambda _: (torch.zeros(0, 1, 2), None), counting.Marks(slots=0, columns=2), torch.empty(0)
        )
