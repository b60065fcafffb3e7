"""What rounding logits and bias to bf16 changes in one router: choices measured and predicted, margins, load.

The reference routes unrounded fp32 logits with the stored bias; each variant rounds the logits, the bias, or both, and
chooses by the same rule, so a flip is due to precision alone. A token flips when its set of experts changes.

The prediction does not route anything at bf16: it perturbs the logits and the bias of *other* tokens by independent
noise, uniform within half a bf16 step. Where it disagrees with the measurement, rounding does not act like noise: a
bias whose values collapse onto few steps is moved the same way for every token.

Legend: T tokens, M model width, E experts, K chosen.
"""

from __future__ import annotations

import msgspec
import torch
from scipy.stats import binomtest
from torch import Tensor

from dsv32_fuzz.router_study.gates import Gate
from dsv32_ref.config import Config
from dsv32_ref.router import choose_experts, expert_weights

CONFIDENCE = 0.95
VARIANTS = {"logits": (True, False), "bias": (False, True), "both": (True, True)}
"""Which of the two is rounded: vLLM #42982 rounds both."""


class Rate(msgspec.Struct, frozen=True, kw_only=True):
    """A share of tokens that flip, with its two-sided Clopper-Pearson interval, and what noise would do."""

    flipped: int
    tokens: int
    rate: float
    low: float
    high: float
    predicted: float


class LayerReport(msgspec.Struct, frozen=True, kw_only=True):
    """One layer."""

    layer: int
    bias_dtype: str
    bias_low: float
    bias_high: float
    distinct: int
    distinct_bf16: int
    bf16_step: float
    """Spacing of bf16 at the largest bias."""
    collapsed: bool
    """bf16 leaves at most half of the distinct values."""
    flips: dict[str, Rate]
    margin_median: float
    """Of the biased score by which a choice is made, at the nearer of its two cuts: experts and groups."""
    margin_low: float
    """The margin that one token in a hundred stays below."""
    load_shift: float
    """Share of the expert load that moves to other experts when both are rounded: total variation distance."""
    weight_shift: float | None = None
    """Mean over tokens of the share of the routed weight that moves to other experts, or between them, when both are
    rounded. The routed output of a token moves by at most twice this share of `route_scale` times the largest output
    of an expert.
    """


def bf16_step(value: float) -> float:
    """Distance of neighbouring bf16 numbers (8 significant bits) at `value`."""
    exponent = torch.frexp(torch.tensor(abs(value), dtype=torch.float64)).exponent
    return float(torch.ldexp(torch.tensor(1.0, dtype=torch.float64), exponent - 8))


def distinct(values: Tensor) -> int:
    """How many different values there are."""
    return len(set(values.tolist()))


def collapsed(bias_E: Tensor) -> bool:
    """Whether bf16 leaves at most half of the bias's distinct values, so that on average two become one."""
    return 2 * distinct(bias_E.bfloat16()) <= distinct(bias_E)


def study_layer(gate: Gate, x_TM: Tensor, config: Config, *, seed: int) -> LayerReport:
    """Route the first half of the tokens at both precisions, and predict from the second half.

    Raises:
        ValueError: fewer than two tokens, or a gate that does not fit `config`.
    """
    if len(x_TM) < 2:
        raise ValueError(f"layer {gate.layer}: {len(x_TM)} tokens; at least 2 are needed")
    if len(gate.bias_E) != config.n_routed_experts:
        raise ValueError(f"layer {gate.layer} has {len(gate.bias_E)} experts, its config {config.n_routed_experts}")
    logits_TE = x_TM.float() @ gate.weight_EM.float().T
    measured, other = logits_TE[: len(x_TM) // 2], logits_TE[len(x_TM) // 2 :]
    bias_E = gate.bias_E.float()
    chosen_TE = _set(measured, bias_E, config)
    rounded_TE = _set(measured.bfloat16().float(), bias_E.bfloat16().float(), config)
    margins_T = margins(measured, bias_E, config)
    load_E, rounded_load_E = chosen_TE.double().sum(0), rounded_TE.double().sum(0)
    return LayerReport(
        layer=gate.layer,
        bias_dtype=str(gate.bias_E.dtype).removeprefix("torch."),
        bias_low=float(bias_E.min()),
        bias_high=float(bias_E.max()),
        distinct=distinct(bias_E),
        distinct_bf16=distinct(bias_E.bfloat16()),
        bf16_step=bf16_step(float(bias_E.abs().max())),
        collapsed=collapsed(bias_E),
        flips={name: _rate(measured, other, bias_E, config, *which, seed=seed) for name, which in VARIANTS.items()},
        margin_median=float(margins_T.median()),
        margin_low=float(margins_T.quantile(0.01)),
        load_shift=float((load_E - rounded_load_E).abs().sum() / 2 / load_E.sum()),
        weight_shift=_weight_shift(measured, bias_E, config),
    )


def _weight_shift(logits_TE: Tensor, bias_E: Tensor, config: Config) -> float:
    """Total variation distance of the weights of both precisions, as a share of their sum, averaged over tokens."""
    weights = []
    for logits, bias in ((logits_TE, bias_E), (logits_TE.bfloat16().float(), bias_E.bfloat16().float())):
        chosen_TK = choose_experts(logits, bias, config)
        chosen = expert_weights(logits, chosen_TK, config).double()
        weights.append(torch.zeros_like(logits, dtype=torch.float64).scatter_(1, chosen_TK, chosen))
    return float((weights[0] - weights[1]).abs().sum(-1).mean() / 2 / config.route_scale)


def _rate(
    logits_TE: Tensor, other_TE: Tensor, bias_E: Tensor, config: Config, logits: bool, bias: bool, *, seed: int
) -> Rate:
    rounded_TE = logits_TE.bfloat16().float() if logits else logits_TE
    rounded_E = bias_E.bfloat16().float() if bias else bias_E
    flipped = int((_set(logits_TE, bias_E, config) != _set(rounded_TE, rounded_E, config)).any(-1).sum())
    interval = binomtest(flipped, len(logits_TE)).proportion_ci(CONFIDENCE, "exact")
    predicted = _predicted(other_TE, bias_E, config, logits, bias, seed)
    return Rate(
        flipped=flipped,
        tokens=len(logits_TE),
        rate=flipped / len(logits_TE),
        low=float(interval.low),
        high=float(interval.high),
        predicted=predicted,
    )


def _predicted(logits_TE: Tensor, bias_E: Tensor, config: Config, logits: bool, bias: bool, seed: int) -> float:
    """Share of tokens that independent noise within half a step flips; each token draws noise of its own."""
    generator = torch.Generator().manual_seed(seed)
    noisy_TE = logits_TE + (_noise(logits_TE, generator) if logits else 0)
    scores_TE = noisy_TE.sigmoid()
    bias_TE = bias_E.expand_as(logits_TE)
    bias_TE = bias_TE + (_noise(bias_TE, generator) if bias else 0)
    before = _set(logits_TE, bias_E, config)
    return float((_chosen(scores_TE + bias_TE, config) != before).any(-1).double().mean())


def _noise(values: Tensor, generator: torch.Generator) -> Tensor:
    exponents = torch.frexp(values.double().abs()).exponent
    half_step = torch.ldexp(torch.ones_like(values, dtype=torch.float64), exponents - 9)
    half_step = torch.where(values == 0, 0.0, half_step)
    uniform = torch.rand(values.shape, generator=generator, dtype=torch.float64) * 2 - 1
    return (half_step * uniform).to(values.dtype)


def _set(logits_TE: Tensor, bias_E: Tensor, config: Config) -> Tensor:
    """The chosen experts as a mask, bool [T, E]."""
    chosen_TK = choose_experts(logits_TE, bias_E, config)
    return torch.zeros_like(logits_TE, dtype=torch.bool).scatter_(1, chosen_TK, True)


def _groups(biased_TE: Tensor, config: Config) -> tuple[Tensor, Tensor]:
    """Group scores [T, G], and the mask [T, E] of the experts of kept groups."""
    grouped = biased_TE.reshape(len(biased_TE), config.n_expert_groups, -1)
    score_TG = grouped.topk(min(2, grouped.shape[-1]), -1).values.sum(-1)
    kept_TG = torch.zeros_like(score_TG, dtype=torch.bool)
    kept_TG.scatter_(1, score_TG.topk(config.n_limited_groups, -1).indices, True)
    return score_TG, kept_TG.repeat_interleave(grouped.shape[-1], dim=1)


def _chosen(biased_TE: Tensor, config: Config) -> Tensor:
    _, open_TE = _groups(biased_TE, config)
    best = biased_TE.masked_fill(~open_TE, -torch.inf).topk(config.n_activated_experts, -1).indices
    return torch.zeros_like(open_TE).scatter_(1, best, True)


def margins(logits_TE: Tensor, bias_E: Tensor, config: Config) -> Tensor:
    """By how much biased scores may move before a choice changes at the nearer cut, [T].

    Half a gap, as both sides move. The group cut compares sums of two scores, so there a quarter of the gap counts.
    """
    biased_TE = logits_TE.sigmoid() + bias_E
    score_TG, open_TE = _groups(biased_TE, config)
    best = biased_TE.masked_fill(~open_TE, -torch.inf).topk(config.n_activated_experts + 1, -1).values
    margin_T = (best[:, -2] - best[:, -1]) / 2
    if config.n_limited_groups < config.n_expert_groups:
        group = score_TG.topk(config.n_limited_groups + 1, -1).values
        margin_T = torch.minimum(margin_T, (group[:, -2] - group[:, -1]) / 4)
    return margin_T
