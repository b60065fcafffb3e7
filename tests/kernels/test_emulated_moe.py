"""`fused_moe` against a literal fp64 loop over tokens and experts."""

from __future__ import annotations

import pytest
import torch
from kernel_worlds import FAULTS, REFUSALS, U8, U16, U32, admits
from under_test import fused_moe

from dsv32_fast.kernels.emulated.memory import OutOfBoundsError
from dsv32_fast.kernels.emulated.quant import ActivationType, QuantType

FP32 = "fp32 activations or outputs, which real kernels do not take"
FP8 = torch.float8_e4m3fn
T, E, K, D, I = 6, 5, 3, 256, 128  # noqa: E741


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Layer:
    def __init__(self, dtype=torch.bfloat16):
        self.x = randn(T, D).to(dtype)
        self.w1, self.w2 = (randn(E, 2 * I, D, seed=1) / 16).to(dtype), (randn(E, D, I, seed=2) / 11).to(dtype)
        self.weights = randn(T, K, seed=3).softmax(1)
        self.ids = torch.stack(
            [torch.randperm(E, generator=torch.Generator().manual_seed(t))[:K] for t in range(T)]
        ).int()

    def run(self, **arguments):
        return fused_moe(self.x, self.w1, self.w2, self.weights, self.ids, **arguments)

    def quantise(self):
        """fp8 weights with scales that are no powers of two; returns them dequantised in fp64."""
        self.s1, self.s2 = randn(E, 2, 2, seed=4).abs() / 100 + 0.003, randn(E, 2, 1, seed=5).abs() / 100 + 0.003
        wide1 = self.s1.repeat_interleave(128, 1).repeat_interleave(128, 2)
        wide2 = self.s2.repeat_interleave(128, 1).repeat_interleave(128, 2)
        self.w1, self.w2 = (self.w1.float() / wide1).to(FP8), (self.w2.float() / wide2).to(FP8)
        return self.w1.double() * wide1, self.w2.double() * wide2


def literal(layer, w1, w2, x_unit, h_unit, small):
    """fp64 outputs and bounds.

    An input x is off by x_unit |x| (its quantisation), plus `small` times its group's scale below the fp8 normal
    range (amax / 448 * 2^-10 of the group). A dot product over n terms adds (n + 2) u on the sum of sizes. silu has a
    slope of at most 1.1, so h = silu(g) u is off by 1.1 dg |u| + |silu(g)| du + 4 u |h|, then rounded by h_unit and to
    the activation dtype (U16). The second product carries that through, and the weighted sum adds (K + 2) u, and one
    last rounding."""
    out, bound = torch.zeros(T, D).double(), torch.zeros(T, D).double()

    def rounding(values, unit):
        groups = values.abs().view(-1, 128).amax(1).repeat_interleave(128)
        return unit * values.abs() + small * groups / 448 * 2.0**-10 * (1 + unit)

    for t in range(T):
        x = layer.x[t].double()
        for slot, expert in enumerate(layer.ids[t].tolist()):
            a, b = w1[expert].double(), w2[expert].double()
            dg = a.abs() @ rounding(x, x_unit) + (D + 2) * U32 * (a.abs() @ (x.abs() * (1 + x_unit)))
            g, u = (a @ x).chunk(2)
            e, f = dg.chunk(2)
            silu = g * torch.sigmoid(g)
            h = silu * u
            dh = 1.1 * e * (u.abs() + f) + silu.abs() * f + 4 * U32 * h.abs()
            dh = dh + U16 * (h.abs() + dh)
            dh = dh + rounding(h.abs() + dh, h_unit)
            y, dy = b @ h, b.abs() @ dh + (I + 2) * U32 * (b.abs() @ (h.abs() + dh))
            out[t] += float(layer.weights[t, slot]) * y
            bound[t] += float(layer.weights[t, slot]) * (dy + (K + 2) * U32 * (y.abs() + dy))
    return out, bound + U16 * (out.abs() + bound)


def test_unquantised():
    layer = Layer()
    expected, bound = literal(layer, layer.w1, layer.w2, 0, 0, 0)
    out = layer.run()
    assert out.dtype == torch.bfloat16
    assert ((out.double() - expected).abs() <= bound).all()
    assert bound.max() < 0.05 * expected.abs().max(), "the bound is worth something"


def test_block_quantised():
    layer = Layer()
    w1, w2 = layer.quantise()
    expected, bound = literal(layer, w1, w2, U8, U8, 1)
    out = layer.run(quant_type=QuantType.per_1x128, w1_scale=layer.s1, w2_scale=layer.s2.flatten(1))
    assert ((out.double() - expected).abs() <= bound).all()
    unquantised = Layer()
    unquantised.w1, unquantised.w2 = w1.float(), w2.float()
    difference = (out.double() - unquantised.run().double()).norm() / out.double().norm()
    assert 2.0**-8 < difference < 2.0**-4, "the activations were quantised, to fp8 and no worse"


def one_expert(up, dtype=torch.float32):
    """One token (1, 0, ..) and one expert: h = 16 up (silu(16) is 16 within 2e-6), and the output is h itself."""
    x, w1, w2 = torch.zeros(1, 128), torch.zeros(1, 256, 128), torch.eye(128)[None]
    x[0, 0] = 1
    w1[0, :2, 0], w1[0, 128:130, 0] = 16, torch.tensor(up)
    return x.bfloat16(), w1.to(dtype), w2.to(dtype), torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int32)


@admits(emulation=FP32)
def test_intermediate_is_rounded_to_the_activation_dtype():
    """16 * 1.003 = 16.048 is 16 in bf16, though output and weights are fp32 here."""
    assert fused_moe(*one_expert([1.003, 0.0]), dtype=torch.float32)[0, 0].item() == 16.0


@admits(emulation=FP32)
def test_intermediate_is_quantised():
    """h = (16, 1.125) has scale 1/28, in which 1.125 is 31.5; e4m3 makes that 32, so 8/7."""
    ones = torch.ones(1, 2)
    layer = one_expert([1.0, 0.0703125], FP8)
    out = fused_moe(*layer, quant_type=QuantType.per_1x128, w1_scale=ones, w2_scale=ones[:, :1], dtype=torch.float32)
    assert abs(out[0, 1].item() - 8 / 7) < 1e-6
    assert abs(out[0, 0].item() - 16) < 1e-5


@admits(emulation=FP32)
def test_experts_of_other_ranks_contribute_nothing():
    """One rank per expert: the ranks' outputs add up to the whole, within the E + K roundings of the two sums."""
    layer = Layer()
    whole, parts = layer.run(dtype=torch.float32), []
    for rank in range(E):
        mask = (torch.arange(E) == rank).int()
        w1, w2 = layer.w1[[rank]], layer.w2[[rank]]
        parts.append(fused_moe(layer.x, w1, w2, layer.weights, layer.ids, mask, dtype=torch.float32))
        assert not parts[-1][(layer.ids != rank).all(1)].any()
    total, size = torch.stack(parts).double().sum(0), torch.stack(parts).double().abs().sum(0)
    assert ((total - whole.double()).abs() <= (E + K) * U32 * size).all()


@admits(emulation=FAULTS)
def test_padding_rows_and_output_dtype():
    layer = Layer()
    whole = layer.run()
    layer.ids[4:] = 10**6
    out = layer.run(num_local_tokens=torch.tensor([4]))
    assert torch.equal(out[:4], whole[:4])
    assert layer.run(num_local_tokens=torch.tensor([4]), dtype=torch.float16).dtype == torch.float16
    with pytest.raises(OutOfBoundsError, match="w1: access to row 1000000 of 5"):
        layer.run()


@admits(emulation=REFUSALS)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"activation": ActivationType.Gelu}, "activation"),
        ({"quant_type": QuantType.per_Token}, "quant_type"),
        ({"a1_scale": torch.ones(1)}, "a1_scale"),
        ({"quant_type": QuantType.per_1x128}, "w1_scale is required"),
    ],
)
def test_refusals(arguments, message):
    with pytest.raises(ValueError, match=message):
        Layer().run(**arguments)
