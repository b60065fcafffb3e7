"""Router kernels against a literal fp64 router, and their three tie, NaN and scaling rules one by one."""

from __future__ import annotations

import math

import pytest
import torch
from kernel_worlds import NEIGHBOURS, REFUSALS, RULE, U32, admits
from under_test import biased_grouped_topk, biased_grouped_topk_hip, moe_fused_gate

from dsv32_fast.kernels.emulated.device import MI300X, emulated_device
from dsv32_fast.kernels.emulated.memory import OutOfBoundsError
from dsv32_fast.kernels.emulated.router import fused_gate_threshold, require_equal_dtypes

NAN, INF = math.nan, math.inf


def route(logits, bias, groups=8, kept=4, chosen=8, renorm=True, factor=1.0, function=biased_grouped_topk):
    logits = torch.as_tensor(logits)
    logits = logits[None] if logits.ndim == 1 else logits
    weights, ids = torch.full((len(logits), chosen), -7.0), torch.full((len(logits), chosen), -7, dtype=torch.int32)
    function(logits, torch.as_tensor(bias), weights, ids, groups, kept, renorm, factor)
    return weights, ids


def fused(logits, bias, groups=8, kept=4, chosen=8, renorm=True, factor=1.0):
    def call(logits, bias, weights, ids, groups, kept, renorm, factor):
        moe_fused_gate(logits, bias, weights, ids, groups, kept, chosen, 0, factor)

    return route(logits, bias, groups, kept, chosen, renorm, factor, call)


def logit(score):
    return math.log(score / (1 - score))


def literal(logits, bias, groups, kept, chosen):
    """fp64: chosen ids as a set, the sigmoids, and the smallest gap that decided (group cut or expert cut)."""
    scores = [1 / (1 + math.exp(-x)) for x in logits.double().tolist()]
    biased = [s + b for s, b in zip(scores, bias.double().tolist(), strict=True)]
    width = len(scores) // groups
    value = [sum(sorted(biased[g * width : (g + 1) * width])[-2:]) for g in range(groups)]
    order = sorted(range(groups), key=lambda g: -value[g])
    gap = value[order[kept - 1]] - value[order[kept]] if kept < groups else INF
    candidates = sorted((e for e in range(len(scores)) if e // width in order[:kept]), key=lambda e: -biased[e])
    return set(candidates[:chosen]), scores, min(gap, biased[candidates[chosen - 1]] - biased[candidates[chosen]])


SHAPES = [(256, 8, 4, 8), (64, 4, 2, 6), (64, 8, 2, 8), (384, 1, 1, 8), (32, 2, 1, 4), (18, 2, 2, 3), (256, 8, 3, 8)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kernel", "shape"),
    [
        pytest.param(k, s, marks=admits(router=s))
        for k in ("wrapper", "fused")
        for s in SHAPES
        if k == "wrapper" or s[0] // s[1] <= 32
    ],
)
def test_sets_and_weights(kernel, shape, dtype):
    """A biased score is off by at most 6 u (exponent, exp, 1 +, reciprocal) + u |c|, a group sum by twice that, so a
    choice with a larger gap must be the exact one; a weight recovered as c - bias carries that error once more, and
    the sum and the division relative n u."""
    experts, groups, kept, chosen = shape
    generator = torch.Generator().manual_seed(experts + kept)
    logits = (3 * torch.randn(40, experts, generator=generator)).to(dtype)
    bias = (5 + 0.1 * torch.randn(experts, generator=generator)).to(dtype)
    weights, ids = (fused if kernel == "fused" else route)(logits, bias, groups, kept, chosen, factor=2.5)
    factor = 1.0 if kernel == "fused" else 2.5
    size = float(bias.float().abs().max()) + 1
    unit, decided = U32 * (6 + 2 * size), 0
    for row in range(40):
        expected, scores, gap = literal(logits[row], bias, groups, kept, chosen)
        if gap <= 4 * unit:
            continue
        decided += 1
        assert set(ids[row].tolist()) == expected
        total = sum(scores[e] for e in expected)
        for slot, expert in enumerate(ids[row].tolist()):
            share = scores[expert] / total
            allowed = factor * (unit * (1 + chosen * share) / (total - chosen * unit) + (chosen + 4) * U32 * share)
            assert abs(float(weights[row, slot]) - factor * share) <= allowed
    assert decided > (30 if dtype == torch.float32 else 5)


def test_order_of_the_optimised_kernel():
    """Ids come by group slot and expert, first those above the 8th score; not by weight."""
    logits = torch.full((256,), -4.0)
    logits[[3, 40, 41, 70, 71, 100, 101, 102]] = torch.tensor([1.0, 4.0, 2.0, 3.0, 0.5, 0.0, 2.5, 1.5])
    _, ids = route(logits, torch.zeros(256))
    # group scores (sum of two best): 1.. group 1 > 3 > 2 > 0, of which group 0 is at the cut and therefore last
    assert ids[0].tolist() == [40, 41, 70, 71, 101, 102, 3, 100]


def test_ties_of_the_optimised_kernel():
    """All equal: groups 0-3, then experts 0-7. Ties at the group cut come last even with a lower index."""
    _, ids = route(torch.zeros(256), torch.zeros(256))
    assert ids[0].tolist() == list(range(8))
    logits = torch.zeros(256)
    logits[[5 * 32, 6 * 32, 7 * 32]] = 1.0  # groups 5, 6, 7 are above; 0-4 tie for the fourth place
    _, ids = route(logits, torch.zeros(256))
    assert ids[0].tolist() == [160, 192, 224, 161, 162, 163, 164, 165]


@admits(router=(64, 8, 8, 8))
def test_ties_of_the_generic_kernel():
    """In a lane of 4 experts the lowest id, across 16 lanes 15 first, and the highest row of 16 lanes before all."""
    _, ids = route(torch.zeros(64), torch.zeros(64), 1, 1, 8)
    assert ids[0].tolist() == [60, 61, 62, 63, 56, 57, 58, 59]
    _, ids = route(torch.zeros(256), torch.zeros(256), 8, 8, 4)
    assert ids[0].tolist() == [252, 253, 254, 255]
    _, ids = route(torch.zeros(64), torch.zeros(64), 4, 2, 4)
    assert ids[0].tolist() == [0, 1, 2, 3], "groups 0 and 1 are kept, that is lanes 0-7, of which 0 is preferred"
    _, ids = route((torch.arange(64) >= 16).float(), torch.zeros(64), 4, 2, 8)
    assert ids[0].tolist() == [32, 33, 34, 35, 36, 37, 38, 39], "groups 1 and 2 are kept, and lane 8 comes before 7"
    _, ids = route(torch.zeros(34), torch.zeros(34), 1, 1, 4)
    assert ids[0].tolist() == [32, 33, 30, 31], "lanes of 2 experts where 4 do not divide their number"


def test_ties_of_the_fused_gate():
    """The lower group indices are dropped, then the lower expert ids win."""
    _, ids = fused(torch.zeros(256), torch.zeros(256))
    assert ids[0].tolist() == list(range(128, 136))


@admits(router=(64, 8, 8, 8))
def test_bf16_bias_hides_the_better_expert():
    """sglang#37133: biases 6.990 and 7.010 are both 7.0 in bf16; the scores 0.500 and 0.490 then decide."""
    logits = torch.full((64,), -20.0)
    logits[0], logits[1] = logit(0.5), logit(0.49)
    bias = torch.zeros(64)
    bias[0], bias[1] = 6.99, 7.01
    assert route(logits, bias, 8, 8, 1)[1].item() == 1
    assert route(logits.bfloat16(), bias.bfloat16(), 8, 8, 1)[1].item() == 0


@admits(router=(64, 8, 8, 8))
def test_bf16_logits_tie():
    """sglang#34857: logits 1 + 2^-9 and 1 are equal in bf16, so the bias of 1e-4 decides."""
    logits, bias = torch.full((64,), -20.0), torch.zeros(64)
    logits[0], logits[1], bias[1] = 1.001953125, 1.0, 1e-4
    assert route(logits, bias, 8, 8, 1)[1].item() == 0
    assert route(logits.bfloat16(), bias.bfloat16(), 8, 8, 1)[1].item() == 1


@admits(router=(64, 8, 8, 8))
@pytest.mark.parametrize("kernel", [route, fused])
def test_weights_are_unbiased_scores(kernel):
    """vllm#12002: scores .6, .5 with biases 0, 1 weigh .6/1.1 and .5/1.1."""
    logits, bias = torch.full((64,), -INF), torch.zeros(64)
    logits[0], logits[1], bias[1] = logit(0.6), logit(0.5), 1.0
    weights, ids = kernel(logits, bias, 8, 8, 2)
    assert ids[0].tolist() == [1, 0]
    torch.testing.assert_close(weights[0], torch.tensor([0.5 / 1.1, 0.6 / 1.1]), rtol=8 * U32, atol=0)


@admits(router=(4, 2, 1, 1))
@pytest.mark.parametrize("kernel", [route, fused])
def test_masked_groups_lose_against_negative_scores(kernel):
    """vllm#13474: with all biased scores negative a mask of 0 would elect a dropped group."""
    scores = torch.tensor([0.6, 0.5, 0.7, 0.65])
    _, ids = kernel(torch.logit(scores), torch.full((4,), -1.0), 2, 1, 1)
    assert ids.item() == 2
    scores = torch.tensor([0.9, 0.1, 0.1, 0.1, 0.6, 0.6, 0.1, 0.1])  # the sum of two, not the best, ranks a group
    _, ids = kernel(torch.logit(scores), torch.zeros(8), 2, 1, 2)
    assert sorted(ids[0].tolist()) == [4, 5]


def test_large_bias_cancels_the_weights_of_the_optimised_kernel():
    """flashinfer#3875: recovered as c - bias, scores of 1e-8 under a bias of 12 are 0, and 0/0 is NaN."""
    weights, _ = route(torch.full((256,), -18.0), torch.full((256,), 12.0))
    assert weights.isnan().all()


@admits(router=(64, 8, 4, 8))
def test_large_bias_does_not_cancel_the_weights_of_the_generic_kernel():
    weights, _ = route(torch.full((64,), -18.0), torch.full((64,), 12.0), 8, 4, 8)
    assert (weights == 0.125).all(), "the generic kernel stores the score instead"


@admits(router=(64, 8, 8, 8))
def test_group_sums_in_fp32():
    """FlagGems#4245: group sums that bf16 would round together differ in fp32."""
    bias = torch.zeros(64)
    bias[0], bias[8], bias[9] = 4.0, 4.0, 0.001
    _, ids = route(torch.zeros(64).bfloat16(), bias.bfloat16(), 8, 1, 1)
    assert ids.item() == 8


# ---- NaN -------------------------------------------------------------------------------------------------------------


def test_nan_row():
    """vllm#39391 asks for distinct ids: the optimised kernel gives 0..7, and NaN weights; other rows do not notice."""
    weights, ids = route(torch.full((256,), NAN), torch.ones(256))
    assert ids[0].tolist() == list(range(8))
    assert weights.isnan().all()
    logits = torch.randn(3, 256, generator=torch.Generator().manual_seed(0))
    alone = route(logits, torch.ones(256))
    logits[1] = NAN
    weights, ids = route(logits, torch.ones(256))
    assert ids[1].tolist() == list(range(8))
    assert torch.equal(ids[[0, 2]], alone[1][[0, 2]])
    assert torch.equal(weights[[0, 2]], alone[0][[0, 2]])


@admits(router=(64, 8, 4, 4))
def test_nan_row_of_the_generic_kernel():
    """The ids are the slots."""
    weights, ids = route(torch.full((64,), NAN), torch.ones(64), 8, 4, 4)
    assert ids[0].tolist() == [0, 1, 2, 3]
    assert weights.isnan().all()


def test_nan_row_of_the_fused_gate():
    """A NaN logit counts as sigmoid 0, so that all tie."""
    _, ids = fused(torch.full((256,), NAN), torch.zeros(256))
    assert ids[0].tolist() == list(range(128, 136))


@pytest.mark.parametrize("shape", [pytest.param(s, marks=admits(router=s)) for s in ((256, 8, 4, 8), (64, 8, 4, 8))])
def test_single_nan_is_never_chosen(shape):
    experts, groups, kept, chosen = shape
    logits = torch.linspace(-1, 1, experts)
    logits[-1] = NAN
    weights, ids = route(logits, torch.zeros(experts), groups, kept, chosen)
    assert experts - 1 not in ids[0].tolist()
    assert not weights.isnan().any()


# ---- scaling, switch and dtypes --------------------------------------------------------------------------------------


@admits(router=(64, 8, 8, 8))
@pytest.mark.parametrize("function", [biased_grouped_topk, biased_grouped_topk_hip])
def test_the_factor_is_one_unless_given(function):
    weights, ids = torch.full((1, 8), -7.0), torch.full((1, 8), -7, dtype=torch.int32)
    function(torch.zeros(1, 64), torch.zeros(64), weights, ids, 8, 8, True)
    torch.testing.assert_close(weights.sum(), torch.tensor(1.0), rtol=16 * U32, atol=0)


def test_scaling_factor_without_renormalisation():
    """The optimised kernel ignores the factor there."""
    assert (route(torch.zeros(256), torch.zeros(256), renorm=False, factor=2.5)[0] == 0.5).all()


@admits(router=(64, 8, 4, 8))
def test_scaling_factor_without_renormalisation_in_the_generic_kernel():
    assert (route(torch.zeros(64), torch.zeros(64), renorm=False, factor=2.5)[0] == 1.25).all()


@pytest.mark.nightly
def test_switch_at_54272_tokens():
    """On an MI355X the 54 273rd token costs every weight the scaling factor, with the same experts."""
    logits = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)).repeat(849, 1)[: 54272 + 1]
    below, above = (route(part, torch.zeros(256), factor=2.5) for part in (logits[:54272], logits))
    assert ((below[0].sum(1) - 2.5).abs() <= 16 * 2.5 * U32).all()
    assert ((above[0].sum(1) - 1.0).abs() <= 16 * U32).all()
    for ids in (below[1], above[1]):
        assert torch.equal(ids[: 848 * 64].view(848, -1), ids[:64].view(1, -1).expand(848, -1)), "row by row the same"
    assert torch.equal(below[1][:64].sort(1).values, above[1][:64].sort(1).values)


@admits(emulation=RULE)
def test_switch_to_the_fused_gate(monkeypatch):
    """Above 212 tokens per unit the weights lose the scaling factor: 2.5 times smaller."""
    assert fused_gate_threshold() == 54272
    with emulated_device(MI300X):
        assert fused_gate_threshold() == 64448
    monkeypatch.setenv("CU_NUM", "1")
    logits = torch.randn(213, 256, generator=torch.Generator().manual_seed(0))
    below, _ = route(logits[:212], torch.zeros(256), factor=2.5)
    above, _ = route(logits, torch.zeros(256), factor=2.5)
    torch.testing.assert_close(below.sum(1), torch.full((212,), 2.5))
    torch.testing.assert_close(above.sum(1), torch.ones(213))
    with pytest.raises(ValueError, match="need_renorm"):
        route(logits, torch.zeros(256), renorm=False)


@admits(emulation=NEIGHBOURS)
def test_bias_of_another_dtype_is_reread_as_bytes():
    bias = torch.zeros(256)
    bias[4] = 7.015625  # 0x40E08000: the words 0x8000 = -0.0 and 0x40E0 = 7.0 become the biases of experts 8 and 9
    _, ids = route(torch.zeros(256).bfloat16(), bias)
    assert 9 in ids[0].tolist()
    assert 4 not in ids[0].tolist()[:1]
    with pytest.raises(TypeError, match=r"correction_bias is torch\.float32"):
        require_equal_dtypes(torch.zeros(1, 256).bfloat16(), bias)
    require_equal_dtypes(torch.zeros(1, 256), bias)
    with pytest.raises(OutOfBoundsError, match="read 1024 bytes of its 512"):
        route(torch.zeros(256), torch.zeros(256).bfloat16())


@admits(emulation=NEIGHBOURS)
def test_row_strides():
    """The HIP kernels honour the row stride of the logits; moe_fused_gate reads rows as contiguous."""
    wide = torch.randn(4, 300, generator=torch.Generator().manual_seed(0))
    view = wide[:, :256]
    assert torch.equal(route(view, torch.zeros(256))[1], route(view.contiguous(), torch.zeros(256))[1])
    assert torch.equal(fused(view, torch.zeros(256))[1][0], fused(view.contiguous(), torch.zeros(256))[1][0])
    packed = wide.flatten()[: 4 * 256].view(4, 256)
    assert torch.equal(fused(view, torch.zeros(256))[1], fused(packed, torch.zeros(256))[1])


@admits(emulation=REFUSALS)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"groups": 3}, "num_expert_group"),
        ({"groups": 16}, "num_expert_group must be"),
        ({"kept": 9}, "topk_group"),
        ({"chosen": 65}, "topk_ids"),
    ],
)
def test_refusals(arguments, message):
    with pytest.raises(ValueError, match=message):
        route(torch.zeros(256), torch.zeros(256), **arguments)


@admits(emulation=REFUSALS)
def test_outputs_share_their_stride():
    weights, ids = torch.zeros(2, 9)[:, :8], torch.zeros(2, 8, dtype=torch.int32)
    with pytest.raises(ValueError, match="row strides"):
        biased_grouped_topk_hip(torch.zeros(2, 256), torch.zeros(256), weights, ids, 8, 4, True)
    with pytest.raises(TypeError, match="int32"):
        biased_grouped_topk_hip(torch.zeros(2, 256), torch.zeros(256), weights, ids.long(), 8, 4, True)
