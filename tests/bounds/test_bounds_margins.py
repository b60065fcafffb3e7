"""Certificates of discrete choices against exhaustive search over the corners of the score intervals."""

from __future__ import annotations

import itertools

import pytest
import torch
from bounds_inputs import generator
from bounds_stages import FP
from torch import Tensor

from dsv32_ref.bounds import certify_router, certify_topk

NO_ERR = 1e-9


def _is_topk(scores: Tensor, chosen: Tensor) -> Tensor:
    """chosen [S] is a correct top-k of scores [N, S], ties either way."""
    return scores[:, chosen].amin(-1) >= scores[:, ~chosen].amax(-1)


def _is_router_choice(c: Tensor, chosen: Tensor, groups: int, kept: int) -> Tensor:
    """chosen [E] is a correct group-limited choice for scores c [N, E], ties of both cuts either way."""
    grouped = c.reshape(len(c), groups, -1)
    worth = grouped.topk(2, -1).values.sum(-1)
    used = chosen.reshape(groups, -1).any(-1)
    found = torch.zeros(len(c), dtype=torch.bool)
    for subset in itertools.combinations(range(groups), kept):
        inside = torch.zeros(groups, dtype=torch.bool)
        inside[list(subset)] = True
        if bool((used & ~inside).any()):
            continue
        cut = worth[:, inside].amin(-1) >= worth[:, ~inside].amax(-1)
        rest = inside.repeat_interleave(c.shape[1] // groups) & ~chosen
        found |= cut & (c[:, chosen].amin(-1) >= c[:, rest].amax(-1))
    return found


def _corners(low: Tensor, high: Tensor, extra: Tensor) -> Tensor:
    """Every combination of low, high, and `extra` where it lies between, [3^E, E]."""
    middle = torch.minimum(torch.maximum(extra.expand_as(low), low), high)
    choices = torch.stack([low, high, middle])
    picks = torch.tensor(list(itertools.product(range(3), repeat=len(low))))
    return choices.gather(0, picks)


def _mask(size: int, members: tuple[int, ...]) -> Tensor:
    mask = torch.zeros(size, dtype=torch.bool)
    mask[list(members)] = True
    return mask


def test_topk_is_legal_exactly_where_some_scores_allow_it() -> None:
    gen, verdicts = generator(1), {True: 0, False: 0}
    for _ in range(40):
        s = torch.randint(0, 12, (5,), generator=gen).double()
        e = torch.randint(0, 4, (5,), generator=gen).double() / 2
        ref = s.topk(2).indices[None]
        corners = _corners(s - e, s + e, s)
        for members in itertools.combinations(range(5), 2):
            got = bool(certify_topk(s[None], e[None], ref, torch.tensor([members])).legal)
            assert got == bool(_is_topk(corners, _mask(5, members)).any())
            verdicts[got] += 1
    assert min(verdicts.values()) > 50


@pytest.mark.parametrize(
    ("experts", "groups", "kept", "k", "draws"), [(8, 4, 2, 3, 2), (6, 2, 1, 2, 15), (6, 3, 2, 2, 15)]
)
def test_router_choice_is_legal_exactly_where_some_scores_allow_it(
    experts: int, groups: int, kept: int, k: int, draws: int
) -> None:
    """Every choice against all corners of the intervals; the third value of each score is the expert cut itself."""
    gen, verdicts = generator(2), {True: 0, False: 0}
    for _ in range(draws):
        c = torch.randint(0, 16, (experts,), generator=gen) + torch.rand(experts, generator=gen).double() / 4
        e = torch.randint(0, 6, (experts,), generator=gen).double() / 2 + 1e-6
        ref = _choose(c, groups, kept, k)
        for members in itertools.combinations(range(experts), k):
            chosen = _mask(experts, members)
            corners = _corners(c - e, c + e, (c + e)[chosen].amin())
            possible = bool(_is_router_choice(corners, chosen, groups, kept).any())
            other = torch.tensor([members])
            got = certify_router(c[None], e[None], ref[None], other, groups=groups, kept=kept, arith=FP)
            assert bool(got.legal) == possible
            verdicts[possible] += 1
    assert min(verdicts.values()) > 5


def _choose(c: Tensor, groups: int, kept: int, k: int) -> Tensor:
    grouped = c.reshape(groups, -1)
    inside = torch.zeros(groups, dtype=torch.bool)
    inside[grouped.topk(2, -1).values.sum(-1).topk(kept).indices] = True
    return torch.where(inside.repeat_interleave(len(c) // groups), c, -torch.inf).topk(k).indices


def test_every_choice_that_perturbed_scores_make_is_legal_at_the_deployed_shape() -> None:
    """256 experts, 8 groups, 4 kept, 8 chosen; bf16 logits and bias against fp32 ones, biases around 5."""
    gen = generator(3)
    logits = torch.randn(3000, 256, generator=gen)
    bias = 5 + 0.05 * torch.randn(256, generator=gen)
    exact_c = logits.double().sigmoid() + bias.double()
    low_c = logits.bfloat16().float().sigmoid() + bias.bfloat16().float()
    err = (low_c.double() - exact_c).abs() + 1e-6
    ref = torch.stack([_choose(c, 8, 4, 8) for c in exact_c])
    other = torch.stack([_choose(c, 8, 4, 8) for c in low_c.double()])
    got = certify_router(exact_c, err, ref, other, groups=8, kept=4, arith=FP)
    assert got.passed, got.describe("router")
    assert int((got.flips > 0).sum()) > 1000  # bf16 biases near 5 do flip choices
    # and a decided row never flips
    assert not bool((got.decided & (got.flips > 0)).any())
    # A path that adds no bias chooses others; its choices lie far outside.
    wrong = torch.stack([_choose(c, 8, 4, 8) for c in logits.double().sigmoid()])
    assert float(certify_router(exact_c, err, ref, wrong, groups=8, kept=4, arith=FP).legal.double().mean()) < 0.5


def test_masking_groups_with_zero_is_caught() -> None:
    """Negative biased scores: masked groups must be -inf; with 0 an expert outside the kept groups wins."""
    gen = generator(4)
    c = -5 + 0.5 * torch.rand(50, 256, generator=gen).double()
    ref = torch.stack([_choose(row, 8, 4, 8) for row in c])
    kept = torch.zeros(50, 8, dtype=torch.bool)
    kept.scatter_(1, c.reshape(50, 8, 32).topk(2, -1).values.sum(-1).topk(4, -1).indices, True)
    wrong = torch.where(kept.repeat_interleave(32, -1), c, 0.0).topk(8, -1).indices
    got = certify_router(c, torch.full_like(c, 1e-6), ref, wrong, groups=8, kept=4, arith=FP)
    assert not bool(got.legal.any())


def test_decided_rows_admit_no_other_choice() -> None:
    gen, seen = generator(5), 0
    for _ in range(60):
        s = torch.randint(0, 12, (1, 5), generator=gen).double()
        e = torch.rand(1, 5, generator=gen).double()
        ref = s.topk(2, -1).indices
        others = [torch.tensor([m]) for m in itertools.combinations(range(5), 2) if set(m) != set(ref[0].tolist())]
        legal = any(bool(certify_topk(s, e, ref, other).legal) for other in others)
        decided = bool(certify_topk(s, e, ref, ref).decided)
        assert decided == (not legal)
        seen += decided
    assert 5 < seen < 55


def test_router_decided_rows_admit_no_other_choice() -> None:
    gen, seen = generator(6), 0
    for _ in range(25):
        c = torch.randint(0, 40, (1, 8), generator=gen).double() + torch.rand(1, 8, generator=gen).double() / 4
        e = torch.rand(1, 8, generator=gen).double()
        ref = _choose(c[0], 4, 2, 3)[None]
        got = certify_router(c, e, ref, ref, groups=4, kept=2, arith=FP)
        if not bool(got.decided):
            continue
        seen += 1
        for members in itertools.combinations(range(8), 3):
            if set(members) != set(ref[0].tolist()):
                other = certify_router(c, e, ref, torch.tensor([members]), groups=4, kept=2, arith=FP)
                assert not bool(other.legal)
    assert seen > 3


def test_the_first_illegal_row_and_its_pair_are_named() -> None:
    s = torch.tensor([[5.0, 4.0, 3.0, 1.0], [5.0, 4.0, 3.0, 1.0], [9.0, 8.0, 0.0, 1.0]])
    e = torch.full_like(s, 0.6)
    ref = torch.tensor([[0, 1], [0, 1], [0, 1]])
    got = certify_topk(s, e, ref, torch.tensor([[0, 2], [0, 3], [3, 2]]))
    assert got.legal.tolist() == [True, False, False]
    assert (got.first_illegal, int(got.chosen[1]), int(got.rejected[1])) == (1, 3, 1)
    assert float(got.slack[1]) == pytest.approx(1.6 - 3.4)
    assert "row 1" in got.describe("top-k")
    assert "3 chosen over 1" in got.describe("top-k")
    assert got.flips.tolist() == [1, 1, 2]


def test_a_router_group_flip_is_attributed_to_groups() -> None:
    c = torch.tensor([[9.0, 8.0, 5.0, 5.0, 4.0, 4.0, 1.0, 1.0]])
    got = certify_router(
        c, torch.full_like(c, 0.1), torch.tensor([[0, 1]]), torch.tensor([[4, 5]]), groups=4, kept=1, arith=FP
    )
    assert (bool(got.legal), int(got.kind), int(got.chosen), int(got.rejected)) == (False, 1, 2, 0)
    assert "group 2 chosen over 0" in got.describe("router")


@pytest.mark.parametrize("other", [[0, 0], [0, 7], [0, -2], [0, -1]])
def test_malformed_choices_are_illegal(other: list[int]) -> None:
    s = torch.tensor([[3.0, 2.0, 1.0]])
    got = certify_topk(s, torch.full_like(s, 100.0), torch.tensor([[0, 1]]), torch.tensor([other]))
    assert (bool(got.legal), int(got.kind)) == (False, 2)
    router = certify_router(
        torch.tensor([[3.0, 2.0, 1.0, 0.0]]),
        torch.full((1, 4), 100.0),
        torch.tensor([[0, 1]]),
        torch.tensor([other]),
        groups=2,
        kept=1,
        arith=FP,
    )
    assert (bool(router.legal), int(router.kind)) == (False, 2)


def test_experts_of_too_many_groups_are_illegal_whatever_the_bounds() -> None:
    c = torch.tensor([[4.0, 3.0, 2.0, 1.0]])
    got = certify_router(
        c, torch.full_like(c, 100.0), torch.tensor([[0, 1]]), torch.tensor([[0, 2]]), groups=2, kept=1, arith=FP
    )
    assert (bool(got.legal), int(got.kind)) == (False, 2)


def test_short_rows_are_padded() -> None:
    s = torch.tensor([[3.0, 2.0, 99.0, 99.0]])
    valid = torch.tensor([[True, True, False, False]])
    ref = torch.tensor([[0, 1, -1]])
    e = torch.full_like(s, NO_ERR)
    assert certify_topk(s, e, ref, torch.tensor([[1, -1, 0]]), valid=valid).passed
    for wrong in ([[0, 1, 2]], [[0, -1, -1]], [[0, 2, -1]]):
        assert not certify_topk(s, e, ref, torch.tensor(wrong), valid=valid).passed


def test_an_empty_choice_and_no_rows() -> None:
    s = torch.zeros(1, 2)
    none = torch.zeros(1, 2, dtype=torch.bool)
    pad = torch.tensor([[-1]])
    assert certify_topk(s, s, pad, pad, valid=none).passed
    no_rows = torch.zeros(0, 2)
    assert not certify_topk(no_rows, no_rows, torch.zeros(0, 1).long(), torch.zeros(0, 1).long()).passed


def test_minus_infinity_scores_tie_with_each_other_only() -> None:
    s = torch.tensor([[1.0, -torch.inf, -torch.inf]])
    e = torch.full_like(s, 0.5)
    ref = torch.tensor([[0, 1]])
    assert certify_topk(s, e, ref, torch.tensor([[0, 2]])).passed
    assert not certify_topk(s, e, ref, torch.tensor([[1, 2]])).passed


def test_bad_input_is_named() -> None:
    s, idx = torch.zeros(2, 4), torch.zeros(2, 1).long()
    with pytest.raises(ValueError, match="NaN"):
        certify_topk(torch.full((2, 4), torch.nan), s, idx, idx)
    with pytest.raises(ValueError, match="other_idx"):
        certify_topk(s, s, idx, torch.zeros(2, 2).long())
    with pytest.raises(ValueError, match="ref_idx"):
        certify_topk(s, s, idx + 9, idx)
    with pytest.raises(ValueError, match="integer"):
        certify_topk(s, s, idx, idx.double())
    with pytest.raises(ValueError, match="groups"):
        certify_router(s, s, idx, idx, groups=3, kept=1, arith=FP)


def test_group_sums_that_fp32_rounds_to_a_tie_may_fall_either_way() -> None:
    """10 + 2.5 ulp and 10 + 1.5 ulp both round to 10 + 2 ulp (even): one rounding on either side."""
    c = torch.tensor([[5.0, 5.0 + 5 * 2.0**-21, 5.0, 5.0 + 3 * 2.0**-21]])
    assert float(c[0, 0] + c[0, 1]) == float(c[0, 2] + c[0, 3])
    none, ref, other = torch.zeros_like(c), torch.tensor([[0, 1]]), torch.tensor([[2, 3]])
    assert certify_router(c, none, ref, other, groups=2, kept=1, arith=FP).passed
    clear = torch.tensor([[5.0, 5.0 + 2.0**-18, 5.0, 5.0]])
    assert not certify_router(clear, none, ref, other, groups=2, kept=1, arith=FP).passed
