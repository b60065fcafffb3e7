"""Honest low-precision computations of every stage on generated inputs, paired with their bounds.

Each stage yields (computed, bound) pairs whose leading dimension counts stage inputs; the first pair of a stage has
them all, further pairs hold the same inputs computed in another order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from bounds_inputs import every_kind, forward_sum, pairwise_sum, rows, summation_orders
from torch import Tensor

from dsv32_ref.bounds import (
    BF16,
    E4M3FNUZ,
    Approx,
    Arithmetic,
    SoftmaxForm,
    attend,
    elementary,
    exact,
    indexer,
    linear,
    moe,
    norm,
    quant,
    rope,
    round_like,
    round_to,
    router,
    scores,
)

Pairs = Iterator[tuple[Tensor, Approx]]
FP = Arithmetic()


def dots(gen: torch.Generator) -> Pairs:
    a, b = every_kind(500, 96, gen), every_kind(500, 96, gen)
    b = b[torch.randperm(len(b), generator=gen)]
    bound = linear.dot(exact(a), exact(b), FP)
    for order in summation_orders(a * b, gen):
        yield order, bound
    yield torch.einsum("ri,ri->r", a, b), bound


def totals(gen: torch.Generator) -> Pairs:
    x = every_kind(250, 128, gen)
    for order in summation_orders(x, gen):
        yield order, linear.total(exact(x), FP)


def bf16_accumulation(gen: torch.Generator) -> Pairs:
    """Everything in bf16, the accumulator included."""
    a, b = every_kind(100, 24, gen).bfloat16(), every_kind(100, 24, gen).bfloat16()
    bound = linear.dot(exact(a), exact(b), Arithmetic(acc=BF16))
    for order in summation_orders(a * b, gen):
        yield order, bound


def bf16_linear(gen: torch.Generator) -> Pairs:
    """bf16 inputs, fp32 accumulation, bf16 output."""
    x, w = every_kind(100, 128, gen).bfloat16(), torch.randn(16, 128, generator=gen).bfloat16()
    bound = linear.linear(exact(x), exact(w), FP)
    product = x.float() @ w.float().T
    yield product, bound
    yield product.bfloat16(), round_to(bound, BF16)
    yield product.bfloat16(), round_like(bound, BF16)


def hadamards(gen: torch.Generator) -> Pairs:
    x = every_kind(100, 128, gen)
    y = x
    for step in (1, 2, 4, 8, 16, 32, 64):  # butterflies: seven levels
        pairs = y.reshape(len(x), -1, 2, step)
        y = torch.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], 2).reshape(len(x), -1)
    yield y * 128**-0.5, linear.hadamard(exact(x), FP, depth=7)
    yield y * 128**-0.5, linear.hadamard(exact(x), FP)


def elements(gen: torch.Generator) -> Pairs:
    """Sums, products, quotients, exponentials, sigmoids, SiLU, roots and logarithms, on inputs with errors."""
    x, y = every_kind(250, 8, gen), every_kind(250, 8, gen)[torch.randperm(2000, generator=gen)]
    px, py = round_to(exact(x), BF16), round_to(exact(y), BF16)
    bx, by = x.bfloat16().float(), y.bfloat16().float()
    yield bx + by, elementary.add(px, py, FP)
    yield bx * by, elementary.mul(px, py, FP)
    quotient = elementary.div(px, exact(y), FP)
    sound = torch.isfinite(quotient.err) & torch.isfinite(bx / y)
    yield torch.where(sound, bx / y, 0.0), Approx(*(torch.where(sound, p, 0.0) for p in (quotient.value, quotient.err)))
    small, psmall = (x * 0.5).clamp(-80, 80), exact((x * 0.5).clamp(-80, 80))
    yield small.exp(), elementary.exp(psmall, FP)
    yield torch.exp2(small * torch.tensor(math.log2(math.e))), elementary.exp(psmall, FP)
    yield small.sigmoid(), elementary.sigmoid(psmall, FP)
    yield 1 / (1 + (-small).exp()), elementary.sigmoid(psmall, FP)
    yield small.exp() / (1 + small.exp()), elementary.sigmoid(psmall, FP)
    yield torch.nn.functional.silu(small), elementary.silu(psmall, FP)
    positive = x.abs() + 1e-30
    yield positive.rsqrt(), elementary.rsqrt(exact(positive), FP)
    yield 1 / positive.sqrt(), elementary.rsqrt(exact(positive), FP)
    yield positive.log(), elementary.log(exact(positive), FP)
    yield positive.log2() * math.log(2), elementary.log(exact(positive), FP)


def _rms(x: Tensor, g: Tensor, total: Callable[[Tensor], Tensor]) -> Tensor:
    return g * (x * torch.rsqrt(total(x * x).unsqueeze(-1) / x.shape[-1] + 1e-6))


def rms_norms(gen: torch.Generator) -> Pairs:
    x, g = every_kind(150, 192, gen).clamp(-1e15, 1e15), 1 + 0.1 * torch.randn(192, generator=gen)
    bound = norm.rms_norm(exact(x), exact(g), 1e-6, FP)
    for total in (forward_sum, pairwise_sum, lambda t: t.sum(-1)):
        yield _rms(x, g, total), bound
    yield torch.nn.functional.rms_norm(x, (192,), g, 1e-6), bound
    stored = x.bfloat16().float()  # inputs known to half a bf16 ulp only
    yield (
        _rms(stored, g, forward_sum).bfloat16(),
        round_to(norm.rms_norm(round_to(exact(x), BF16), exact(g), 1e-6, FP), BF16),
    )


def residuals(gen: torch.Generator) -> Pairs:
    x, r = every_kind(100, 64, gen).clamp(-1e15, 1e15), every_kind(100, 64, gen).clamp(-1e15, 1e15)
    g = 1 + 0.1 * torch.randn(64, generator=gen)
    normed, kept = norm.residual_norm(exact(x), exact(r), exact(g), 1e-6, FP, BF16)
    yield _rms(x + r, g, forward_sum).bfloat16(), normed
    yield (x + r).bfloat16(), kept


def layer_norms(gen: torch.Generator) -> Pairs:
    x, g = every_kind(150, 128, gen).clamp(-1e15, 1e15), 1 + 0.1 * torch.randn(128, generator=gen)
    b = torch.randn(128, generator=gen)
    two, one = (norm.layer_norm(exact(x), exact(g), exact(b), 1e-6, FP, m) for m in ("two-pass", "one-pass"))
    for total in (forward_sum, pairwise_sum, lambda t: t.sum(-1)):
        c = x - total(x).unsqueeze(-1) / 128
        yield g * (c * torch.rsqrt(total(c * c).unsqueeze(-1) / 128 + 1e-6)) + b, two
    # One pass may find a variance <= 0 of a large offset: then its bound is infinite, and such rows are set aside.
    sound = torch.isfinite(one.err).all(-1)
    mean = forward_sum(x) / 128
    raw = torch.rsqrt(forward_sum(x * x) / 128 - mean * mean + 1e-6)
    single = g * ((x - mean.unsqueeze(-1)) * raw.unsqueeze(-1)) + b
    yield single[sound], one.map(sound)
    yield torch.nn.functional.layer_norm(x, (128,), g, b, 1e-6)[sound], one.map(sound)


def rotations(gen: torch.Generator) -> Pairs:
    x = every_kind(250, 64, gen)
    position = torch.randint(0, 163840, (len(x),), generator=gen)
    f32 = 1.0 / (10000.0 ** (torch.arange(0, 64, 2, dtype=torch.float32) / 64))
    keep = 1 - ((torch.arange(32, dtype=torch.float32) - 10) / 13).clamp(0, 1)
    f32 = f32 / 40 * (1 - keep) + f32 * keep
    angle = position.float()[:, None] * f32
    derived = rope.frequencies(64, 10000.0, FP, factor=40.0, low=10.0, high=23.0)
    yield f32.expand(len(x), -1), Approx(derived.value.expand(len(x), -1), derived.err.expand(len(x), -1))
    cos, sin = angle.cos(), angle.sin()
    for angles in (rope.angles(position, exact(f32), FP), rope.angles(position, derived, FP, reference="ideal")):
        table = rope.cos_sin(angles, FP)
        a, b = x[:, 0::2], x[:, 1::2]
        turned = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
        yield turned, rope.rotate(exact(x), *table, "interleaved", FP)
        a, b = x[:, :32], x[:, 32:]
        turned = torch.cat([torch.addcmul(a * cos, -b, sin), torch.addcmul(a * sin, b, cos)], -1)
        yield turned.bfloat16(), round_to(rope.rotate(exact(x), *table, "half-split", FP), BF16)


RULES = (
    quant.ACT_QUANT,
    quant.FLASHMLA_KV,
    quant.VLLM_KV,
    quant.ScaleRule(ue8m0=False),
    quant.ScaleRule(fmt=E4M3FNUZ, largest=224.0),
)


def _fp8(x: Tensor, rule: quant.ScaleRule, reciprocal: bool) -> Tensor:
    """Quantised and dequantised in fp32, as a kernel does it."""
    amax = x.abs().amax(-1, keepdim=True).clamp(min=rule.amax_floor)
    scale = amax / rule.largest if reciprocal else amax * torch.tensor(1 / rule.largest)
    scale = scale.clamp(min=rule.scale_floor)
    scale = quant.power_of_two(scale) if rule.ue8m0 else scale
    code = x * (1 / scale) if reciprocal else x / scale
    dtype = torch.float8_e4m3fnuz if rule.fmt is E4M3FNUZ else torch.float8_e4m3fn
    return code.clamp(-rule.largest, rule.largest).to(dtype).float() * scale


def quantisations(gen: torch.Generator) -> Pairs:
    x = every_kind(250, 128, gen).clamp(-1e30, 1e30)
    x[:3] = torch.tensor([448.0, 1e-6, 0.0])[:, None]
    stored = x.bfloat16().float()
    for rule in RULES:
        # A zero block without a floor has the scale 2^-126, whose reciprocal products stay zero.
        for bound in (quant.fake_quant, quant.fake_quant_like):
            yield _fp8(x, rule, False), bound(exact(x), rule, FP)
            yield _fp8(x, rule, True), bound(exact(x), rule, FP)
            yield _fp8(stored, rule, True), bound(round_to(exact(x), BF16), rule, FP)


def _split_attention(s: Tensor, v: Tensor, tile: int, splits: int, p_bf16: bool) -> tuple[Tensor, Tensor]:
    """Online softmax in fp32 over tiles, per split, merged by LSE: the form of a decode kernel. s [R, K], v [R, K,
    C].
    """
    outs, lses = [], []
    for s_part, v_part in zip(s.chunk(splits, -1), v.chunk(splits, -2), strict=True):
        top = torch.full_like(s[:, :1], -math.inf)
        total, acc = torch.zeros_like(top), torch.zeros_like(v[:, 0])
        for s_tile, v_tile in zip(s_part.split(tile, -1), v_part.split(tile, -2), strict=True):
            new = torch.maximum(top, s_tile.amax(-1, keepdim=True))
            base = torch.where(torch.isfinite(new), new, 0.0)
            p = torch.exp(s_tile - base)
            shrink = torch.exp(top - base)
            total = total * shrink + forward_sum(p).unsqueeze(-1)
            p = p.bfloat16().float() if p_bf16 else p
            acc = acc * shrink + forward_sum((p.unsqueeze(-1) * v_tile).transpose(-1, -2))
            top = new
        outs.append(torch.where(total > 0, acc / total, 0.0))
        lses.append(torch.where(total > 0, top + total.log(), -math.inf).squeeze(-1))
    if splits == 1:
        return outs[0], lses[0]
    lse = torch.stack(lses, -1)
    peak = lse.amax(-1, keepdim=True)
    merged = peak.squeeze(-1) + forward_sum(torch.exp(lse - peak)).log()
    weight = torch.exp(lse - merged.unsqueeze(-1))
    return forward_sum((weight.unsqueeze(-1) * torch.stack(outs, 1)).transpose(-1, -2)), merged


def attentions(gen: torch.Generator) -> Pairs:
    """Rows of 160 keys, some masked; scores of several magnitudes; plain and split, P in fp32 and bf16, bf16 output."""
    count = 400
    q = torch.randn(count, 1, 48, generator=gen) * torch.tensor([0.0, 0.3, 1.0, 6.0]).repeat(count // 4)[:, None, None]
    k = torch.randn(count, 160, 48, generator=gen)
    v = every_kind(count // 8, 160 * 12, gen).clamp(-1e10, 1e10).reshape(count, 160, 12)
    s = scores(exact(q), exact(k), 0.135, FP)
    masked = torch.rand(count, 1, 160, generator=gen) < 0.2
    s = Approx(s.value.masked_fill(masked, -math.inf), s.err.masked_fill(masked, 0.0))
    computed = ((q @ k.mT) * 0.135).masked_fill(masked, -math.inf).squeeze(1)
    for splits, tile, p_bf16 in ((1, 160, False), (1, 32, True), (4, 16, False), (5, 8, True)):
        form = SoftmaxForm(splits=splits, rescales=160 // tile // splits, p_format=BF16 if p_bf16 else None)
        out, lse = attend(s, exact(v), FP, form)
        got, got_lse = _split_attention(computed, v, tile, splits, p_bf16)
        yield got.unsqueeze(1), out
        yield got.bfloat16().unsqueeze(1), round_to(out, BF16)
        yield got_lse.unsqueeze(1), lse
    out, lse = attend(s, exact(v), FP, SoftmaxForm(normalise_first=True, p_format=BF16))
    p = torch.softmax(computed, -1).bfloat16().float()
    yield (p.unsqueeze(1) @ v), out
    yield computed.logsumexp(-1, keepdim=True), lse


def index_scores(gen: torch.Generator) -> Pairs:
    count = 800
    q, k = torch.randn(count, 8, 128, generator=gen), every_kind(10, 128, gen)
    w = torch.randn(count, 8, generator=gen) * torch.exp2(torch.randint(-20, 10, (count, 1), generator=gen).float())
    scale = torch.exp2(torch.randint(-10, 3, (len(k),), generator=gen).float())
    bound = indexer.index_scores(exact(q), exact(w), exact(k), exact(scale), FP)
    hits = (q @ k.T).clamp_min(0)
    yield (w[:, None] @ hits).squeeze(1) * scale, bound
    yield forward_sum((w[:, :, None] * (hits * scale)).transpose(1, 2)), bound


def routings(gen: torch.Generator) -> Pairs:
    count, E = 2000, 32
    x, w = rows("normal", count, 64, gen), torch.randn(E, 64, generator=gen) * 0.2
    bias = 5 + 0.05 * torch.randn(E, generator=gen)
    logit = router.logits(exact(x), exact(w), FP)
    got = x @ w.T
    for p, g in (
        (logit, got),
        (round_to(logit, BF16), got.bfloat16().float()),
        (round_like(logit, BF16), got.bfloat16().float()),
    ):
        for pb, gb in ((exact(bias), bias), (round_to(exact(bias), BF16), bias.bfloat16().float())):
            plain, biased = router.router_scores(p, pb, FP)
            yield g.sigmoid(), plain
            yield g.sigmoid() + gb, biased
            grouped = (g.sigmoid() + gb).reshape(count, 4, 8).topk(2, -1).values
            yield grouped[..., 0] + grouped[..., 1], router.group_scores(biased, 4, FP)
            chosen = (got.sigmoid() + bias).topk(4, -1).indices
            s = g.sigmoid().gather(-1, chosen)
            yield s / s.sum(-1, keepdim=True) * 2.5, router.expert_weights(plain, chosen, 2.5, FP)


def experts(gen: torch.Generator) -> Pairs:
    count = 400
    x = every_kind(count // 8, 64, gen).clamp(-1e4, 1e4).bfloat16()
    w1, w3 = (torch.randn(40, 64, generator=gen).bfloat16() * 0.1 for _ in range(2))
    w2 = torch.randn(64, 40, generator=gen).bfloat16() * 0.1
    g, u = x.float() @ w1.float().T, x.float() @ w3.float().T
    wide = (torch.nn.functional.silu(g) * u) @ w2.float().T
    yield wide, moe.mlp(exact(x), exact(w1), exact(w2), exact(w3), FP)
    g, u = g.bfloat16().float(), u.bfloat16().float()
    inner = (torch.nn.functional.silu(g) * u).bfloat16().float()
    bound = moe.mlp(exact(x), exact(w1), exact(w2), exact(w3), FP, storage=BF16)
    yield (inner @ w2.float().T).bfloat16(), bound
    weights = torch.rand(count, 4, generator=gen)
    outs = torch.randn(count, 4, 64, generator=gen)
    mixed = forward_sum((outs * weights[..., None]).transpose(1, 2)) + wide
    shared = Approx(wide.double(), torch.zeros(count, 64, dtype=torch.float64))
    yield mixed, moe.combine(exact(outs), exact(weights), shared, FP)


STAGES: dict[str, tuple[Callable[[torch.Generator], Pairs], int]] = {
    "dot": (dots, 4000),
    "sum": (totals, 2000),
    "bf16 accumulation": (bf16_accumulation, 800),
    "bf16 linear": (bf16_linear, 800),
    "hadamard": (hadamards, 800),
    "elementary": (elements, 2000),
    "rms norm": (rms_norms, 1200),
    "residual": (residuals, 800),
    "layer norm": (layer_norms, 1200),
    "rope": (rotations, 2000),
    "fp8": (quantisations, 2000),
    "attention": (attentions, 400),
    "index score": (index_scores, 800),
    "router": (routings, 2000),
    "experts": (experts, 400),
}
