"""Small inputs with known right values, for what the recordings cannot see; the numbers are public issue threads."""

from __future__ import annotations

import math

import mpmath
import pytest
import torch
from torch import Tensor

from dsv32_ref import indexer, moe
from dsv32_ref.config import BF16_Q, FP8, FP32, FP32_Q, GOLDEN, Config, Precision
from dsv32_ref.mla import attend
from dsv32_ref.norm import add_rms_norm, layer_norm, rms_norm
from dsv32_ref.quant import act_quant, fake_quant, hadamard, linear, quantise_blocks, ue8m0
from dsv32_ref.rope import correction_range, frequencies, rope_half_split, rope_interleaved, rope_table
from dsv32_ref.router import choose_experts, expert_weights


def router(experts: int, groups: int, kept: int, k: int) -> Config:
    return GOLDEN.replace(
        n_routed_experts=experts, n_expert_groups=groups, n_limited_groups=kept, n_activated_experts=k
    )


def logits_of(*scores: float) -> Tensor:
    return torch.tensor([[math.log(s / (1 - s)) for s in scores]], dtype=torch.float32)


# Router


def test_the_bias_is_not_rounded_to_bf16() -> None:
    """Biases 6.990 and 7.010 both round to 7.0 in bf16, which would turn the choice round (sglang #37133)."""
    assert choose_experts(logits_of(0.500, 0.490), torch.tensor([6.990, 7.010]), router(2, 1, 1, 1)).item() == 1


def test_logits_are_not_rounded_to_bf16() -> None:
    """Logits 1.001953125 and 1.0 are one in bf16, where the bias would decide (sglang #34857)."""
    x, w = torch.eye(2), torch.tensor([[1.001953125, 0.0], [1.0, 0.0]])
    from dsv32_ref.router import GateWeights, gate_logits

    logits = gate_logits(x[:1], GateWeights(weight=w, bias=torch.zeros(2)))
    assert choose_experts(logits, torch.tensor([0.0, 1e-4]), router(2, 1, 1, 1)).item() == 0


def test_weights_are_unbiased_scores() -> None:
    """vllm #12002: the biased score is not a weight."""
    config, logits = router(2, 1, 1, 2).replace(route_scale=1.0), logits_of(0.6, 0.5)
    idx = choose_experts(logits, torch.tensor([0.0, 1.0]), config)
    assert idx.tolist() == [[1, 0]]
    torch.testing.assert_close(expert_weights(logits, idx, config), torch.tensor([[0.5 / 1.1, 0.6 / 1.1]]))


def test_weights_survive_a_large_bias() -> None:
    """Scores of 1e-8 beside a bias of 12 (flashinfer #3875): score + bias - bias would be 0."""
    config, logits = router(4, 1, 1, 2), torch.tensor([[-18.0, -17.0, -19.0, -18.5]])
    weights = expert_weights(logits, choose_experts(logits, torch.full((4,), 12.0), config), config)
    torch.testing.assert_close(weights.sum(-1), torch.tensor([2.5]))
    assert float(weights.min()) > 0.4


def test_a_masked_group_counts_as_minus_infinity() -> None:
    """With all biased scores negative, 0 for a masked expert would win (vllm #13474)."""
    config = router(4, 2, 1, 1)
    assert choose_experts(logits_of(0.6, 0.5, 0.7, 0.65), torch.full((4,), -1.0), config).item() == 2
    config = router(4, 2, 1, 2)
    assert choose_experts(logits_of(0.6, 0.5, 0.7, 0.65), torch.full((4,), -1.0), config).tolist() == [[2, 3]]


def test_a_group_is_worth_its_two_best() -> None:
    config = router(8, 2, 1, 1)
    assert choose_experts(logits_of(0.9, 0.1, 0.1, 0.1, 0.6, 0.6, 0.1, 0.1), torch.zeros(8), config).item() == 4


def test_groups_of_one_expert() -> None:
    """As many groups as experts (vllm #29439)."""
    assert choose_experts(logits_of(0.1, 0.9, 0.8, 0.2), torch.zeros(4), router(4, 4, 2, 2)).tolist() == [[1, 2]]


def test_router_ties_go_to_the_lower_index() -> None:
    assert choose_experts(torch.zeros(1, 16), torch.zeros(16), GOLDEN).tolist() == [[0, 1, 2, 3]]


@pytest.mark.parametrize(
    ("logits", "bias", "message"),
    [
        (torch.zeros(1, 16), None, "bias is missing"),
        (torch.zeros(1, 15), torch.zeros(16), "16 experts"),
        (torch.full((1, 16), torch.nan), torch.zeros(16), "gate_logits holds NaN"),
        (torch.zeros(1, 16), torch.full((16,), torch.nan), r"gate\.bias holds NaN"),
    ],
)
def test_router_refuses(logits: Tensor, bias: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose_experts(logits, bias, GOLDEN)


# Indexer


def test_half_split_rope_value() -> None:
    """q at position 5, k at position 2: 2.6448 half-split, 2.8160 interleaved (vllm #28968)."""
    config = GOLDEN.replace(qk_rope_head_dim=4, max_seq_len=64, original_seq_len=64)
    q, k = torch.tensor([[1.0, 2.0, 3.0, 4.0]]), torch.tensor([[1.0, 0.0, 0.0, 1.0]])
    tables = [rope_table(config, torch.tensor([at])) for at in (5, 2)]
    scores = [float((turn(q, tables[0]) * turn(k, tables[1])).sum()) for turn in (rope_half_split, rope_interleaved)]
    assert scores == pytest.approx([2.6448, 2.8160], abs=5e-5)


def test_scores_are_relu_then_weighted_over_heads() -> None:
    """Head by head: max(q.k, 0), its weight (which may be negative), the key's scale; see mlx-lm #531."""
    q = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]]])
    k, scale, w = torch.tensor([[2.0, 3.0], [-1.0, 5.0]]), torch.tensor([0.5, 2.0]), torch.tensor([[1.0, -1.0, 10.0]])
    expected = torch.tensor([[0.5 * (2 - 3 + 0), 2.0 * (0 - 5 + 10)]])
    assert torch.equal(indexer.index_scores(q, w, k, scale), expected)


@pytest.mark.parametrize(
    ("scores", "length", "k", "expected"),
    [
        ([1.0, 3.0, 2.0], 3, 5, [1, 2, 0, -1, -1]),
        ([5.0, 5.0, 5.0, 5.0], 4, 2, [0, 1]),
        ([0.0, -0.0, 1.0, 0.0], 4, 3, [2, 0, 1]),
        ([1.0, 2.0, 9.0], 2, 2, [1, 0]),
        ([-torch.inf, 1.0, 9.0], 2, 3, [1, 0, -1]),
        ([9.0], 0, 2, [-1, -1]),
    ],
)
def test_topk_contract(scores: list[float], length: int, k: int, expected: list[int]) -> None:
    """Short rows are padded with -1 (Automodel #3035), ties go to the lower index, the future is never chosen."""
    assert indexer.select_topk(torch.tensor([scores]), torch.tensor([length]), k).tolist() == [expected]


def test_topk_of_many_ties_is_full_and_unique() -> None:
    """One winner among zeros: k valid ids, the winner among them (sglang #30512)."""
    scores = torch.zeros(1, 21)
    scores[0, 13] = 1.0
    assert indexer.select_topk(scores, torch.tensor([21]), 8).tolist() == [[13, 0, 1, 2, 3, 4, 5, 6]]


def test_topk_refuses_nan_and_wrong_lengths() -> None:
    scores = torch.tensor([[0.0, torch.nan]])
    with pytest.raises(ValueError, match="index_score is NaN"):
        indexer.select_topk(scores, torch.tensor([2]), 1)
    assert indexer.select_topk(scores, torch.tensor([1]), 1).tolist() == [[0]]
    with pytest.raises(ValueError, match="do not fit"):
        indexer.select_topk(scores, torch.tensor([3]), 1)


def test_hadamard_tames_an_outlier_lane() -> None:
    """Gaussian input cannot show a missing rotation; outlier lanes can (vllm #55459)."""
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    x[:, 5] *= 60.0
    y = torch.randn(64, 128, generator=torch.Generator().manual_seed(1))
    y[:, 5] *= 60.0
    exact = x.double() @ y.double().T
    plain = (fake_quant(x).double() @ fake_quant(y).double().T - exact).square().mean()
    turned = fake_quant(hadamard(x, FP32)).double() @ fake_quant(hadamard(y, FP32)).double().T
    assert float((turned - exact).square().mean()) < 0.5 * float(plain)
    torch.testing.assert_close(hadamard(hadamard(x, FP32), FP32), x, rtol=1e-5, atol=1e-4)


# Norms


def test_epsilon_matters_for_tiny_activations() -> None:
    x = torch.full((1, 4), 1e-3)
    torch.testing.assert_close(rms_norm(x, torch.ones(4), 1e-6), torch.full((1, 4), 2**-0.5))
    spread = torch.tensor([[1e-3, -1e-3]])
    expected = torch.tensor([[2**-0.5 + 7.0, -(2**-0.5) + 7.0]])
    torch.testing.assert_close(layer_norm(spread, torch.ones(2), torch.full((2,), 7.0), 1e-6), expected)


def test_the_norm_reads_the_unrounded_sum() -> None:
    """bf16 inputs whose fp32 sum is no bf16 value: the norm of the rounded sum is another result."""
    x, residual = torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16).float()
    normed, stored = add_rms_norm(x, residual, torch.ones(64), 1e-6, BF16_Q)

    def rms(s: Tensor) -> Tensor:
        exact = s.double() / (s.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()
        return exact.to(torch.float32).to(torch.bfloat16).float()

    rounded = (x + residual).to(torch.bfloat16).float()
    assert torch.equal(stored, rounded)
    assert torch.equal(normed, rms(x + residual))
    assert not torch.equal(normed, rms(rounded))


# RoPE


def test_yarn_of_the_true_model() -> None:
    config = Config()
    assert correction_range(config) == (10, 23)
    assert config.softmax_scale == pytest.approx(0.13523378, abs=5e-9)
    f = frequencies(config)
    assert float(f[0]) == 1.0
    with mpmath.workdps(40):
        for pair in (0, 10, 16, 23, 31):
            plain = mpmath.mpf(10000) ** (-mpmath.mpf(2 * pair) / 64)
            ramp = min(max(mpmath.mpf(pair - 10) / 13, 0), 1)
            exact = plain / 40 * ramp + plain * (1 - ramp)
            # Six fp32 operations (exponent: its rounding is multiplied by ln 10000 = 9.2): under 16 units of 2^-24.
            assert abs(float(f[pair]) / float(exact) - 1) < 16 * 2**-24


def test_yarn_clamps_its_range() -> None:
    """Very long original context and few turns: the upper end stays below the width, the lower above 0."""
    wide = GOLDEN.replace(original_seq_len=10**9, max_seq_len=2 * 10**9, beta_slow=1e-3)
    assert correction_range(wide)[1] == GOLDEN.qk_rope_head_dim - 1
    assert correction_range(GOLDEN.replace(beta_fast=1e6))[0] == 0
    # Both ends at pair 0 (32 / (2 pi n) just below 1): the range is widened, not divided by zero.
    turns = 1.01 * GOLDEN.original_seq_len / (2 * math.pi)
    config = GOLDEN.replace(beta_fast=turns, beta_slow=turns)
    assert correction_range(config) == (0, 0.001)
    assert bool(frequencies(config).isfinite().all())


def test_angles_are_formed_in_fp32() -> None:
    config = Config()
    positions = torch.tensor([163839])
    cos, _ = rope_table(config, positions, torch.float64)
    angle = (positions.float()[:, None] * frequencies(config)).double()
    assert torch.equal(cos, angle.cos())
    assert float((cos - (positions.double()[:, None] * frequencies(config).double()).cos()).abs().max()) > 1e-4
    with pytest.raises(ValueError, match="positions reach 163840"):
        rope_table(config, torch.tensor([163840]))


def test_without_yarn_nothing_is_stretched() -> None:
    config = Config(max_seq_len=4096)
    assert config.softmax_scale == 192**-0.5
    torch.testing.assert_close(frequencies(config), 10000.0 ** (-torch.arange(0, 64, 2) / 64))


# Quantisation


@pytest.mark.parametrize(
    ("x", "expected"), [(1.0, 1.0), (1.0000001, 2.0), (0.75, 1.0), (2.0**-13, 2.0**-13), (3.0, 4.0)]
)
def test_ue8m0_rounds_up(x: float, expected: float) -> None:
    assert float(ue8m0(torch.tensor([x]))) == expected


def test_act_quant_edges() -> None:
    x = torch.zeros(3, 128)
    x[1, 0], x[2, 0] = 448.0, 449.0
    values, scale = act_quant(x)
    assert scale.flatten().tolist() == [2.0**-22, 1.0, 2.0]
    assert float(values[1, 0]) == 448.0
    raw = act_quant(x, scale_format="fp32")[1]
    assert float(raw[0, 0]) == float(torch.tensor(1e-4) * torch.tensor(1 / 448))
    with pytest.raises(ValueError, match="multiple of block"):
        act_quant(torch.zeros(2, 130))
    with pytest.raises(ValueError, match="NaN or infinity"):
        act_quant(torch.full((1, 128), torch.nan))


def test_fp8_linear_is_the_product_of_what_was_stored() -> None:
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(5, 256, generator=generator).double(), torch.randn(192, 256, generator=generator)
    block = quantise_blocks(w)
    assert block.scale.shape == (2, 2)  # 192 = 1.5 x 128 rows
    assert float((block.dequantise(torch.float64) - w).abs().max()) <= float(w.abs().max()) * 2**-4
    ideal = linear(x, block, FP32)
    assert torch.equal(ideal, x @ block.dequantise(torch.float64).T)
    simulated = linear(x, block, Precision(linear_fp8=True))
    values, scale = act_quant(x)
    by_blocks = torch.zeros(5, 192, dtype=torch.float64)
    for row in range(2):
        for column in range(2):
            rows, columns = slice(128 * row, 128 * row + 128), slice(128 * column, 128 * column + 128)
            part = values[:, columns].double() @ block.bits[rows, columns].double().T
            by_blocks[:, rows] += part * scale[:, column : column + 1].double() * block.scale[row, column].double()
    torch.testing.assert_close(simulated, by_blocks, rtol=1e-13, atol=1e-13)
    assert float((simulated - ideal).abs().max()) > 1e-3
    assert torch.equal(linear(x, block, FP8), simulated.to(torch.bfloat16).double())


def test_bf16_mode_leaves_only_bf16_values() -> None:
    x = torch.randn(4, 128, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16).float()
    w = moe.MlpWeights(w1=torch.eye(128), w2=torch.eye(128) / 3, w3=torch.eye(128))
    out = moe.mlp(x, w, BF16_Q)
    assert torch.equal(out, out.to(torch.bfloat16).float())
    assert not torch.equal(out, moe.mlp(x, w, FP32_Q))


# Attention


def test_a_lonely_query_gives_zero_and_infinity() -> None:
    z, lse = attend(
        torch.ones(2, 3, 4), torch.ones(2, 3, 2), torch.zeros(2, 5, 6), torch.zeros(2, 5, dtype=torch.bool), 1.0
    )
    assert torch.equal(z, torch.zeros(2, 3, 4))
    assert torch.equal(lse, torch.full((2, 3), torch.inf))


def test_an_invalid_entry_takes_no_share() -> None:
    """Logits [1, 2], values [1, 3] give 2.4621; two leaked entries would give 96.788 (vllm #45324)."""
    kv = torch.tensor([[[1.0, 1.0], [3.0, 2.0], [100.0, 5.0], [100.0, 5.0]]])
    valid = torch.tensor([[True, True, False, False]])
    z, lse = attend(torch.zeros(1, 1, 1), torch.ones(1, 1, 1), kv, valid, 1.0)
    assert float(z) == pytest.approx(2.4621, abs=5e-5)
    assert float(lse) == pytest.approx(math.log(math.e + math.e**2))


# Mixture


def test_mixture_adds_the_shared_expert_unweighted() -> None:
    def expert(scale: float) -> moe.MlpWeights:
        return moe.MlpWeights(w1=torch.eye(2), w2=scale * torch.eye(2), w3=torch.eye(2))

    from dsv32_ref.router import GateWeights

    gate = GateWeights(weight=torch.zeros(3, 2), bias=torch.zeros(3))
    w = moe.MoeWeights(gate=gate, experts={0: expert(1.0), 2: expert(10.0)}, shared=expert(100.0))
    x = torch.tensor([[1.0, 2.0]])
    unit = torch.nn.functional.silu(x) * x
    out = moe.mixture(x, torch.tensor([[2, 0]]), torch.tensor([[0.5, 2.0]]), w)
    torch.testing.assert_close(out, unit * (0.5 * 10 + 2.0 * 1 + 100))
    with pytest.raises(ValueError, match=r"experts\.1 was chosen"):
        moe.mixture(x, torch.tensor([[1, 0]]), torch.tensor([[0.5, 2.0]]), w)
