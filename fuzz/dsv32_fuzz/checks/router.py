"""Checks of the router: the choice that is made of given logits, and what the options' roundings cost.

Truth: `dsv32_ref.router` on the numbers that reach the kernel, with `dsv32_ref.bounds`. A choice that differs must be
a certified flip; nothing is compared by tolerance.

Legend: T rows, M model width, E experts, K chosen experts.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from hypothesis import strategies as st
from torch import Tensor

from dsv32_fast import packing
from dsv32_fast import router as subject
from dsv32_fast.options import Options
from dsv32_fuzz.checks.findings import Findings, device_of, same_bits
from dsv32_fuzz.checks.own_input import InputCheck
from dsv32_fuzz.router_study.study import margins
from dsv32_fuzz.strategies.router import (
    NAN_KINDS,
    PROBE_BIASES,
    RouterRows,
    bias,
    config_of,
    router_rows,
)
from dsv32_fuzz.strategies.steps import integers, sampled_from
from dsv32_fuzz.targets import Target
from dsv32_fuzz.verdict import MARGIN_EDGES, Verdict
from dsv32_ref import router as reference
from dsv32_ref import weights as reference_weights
from dsv32_ref.bounds import BF16, Approx, Arithmetic, binned, certify_router, exact, round_to
from dsv32_ref.bounds import router as bounds
from dsv32_ref.bounds.elementary import add
from dsv32_ref.config import Config
from dsv32_ref.moe import MoeWeights
from dsv32_ref.weights import Weights

ARITH = Arithmetic()
TORCH = {"fp32": torch.float32, "bf16": torch.bfloat16}
UNWRITTEN_ID = -7


def options_of(target: Target) -> Options:
    """The options of the target; a target without any is held to the baseline's."""
    return target.options or Options()


def biased(logits_TE: Tensor, bias_E: Tensor) -> Approx:
    """Biased scores of the numbers that reach the kernel."""
    return bounds.router_scores(exact(logits_TE), exact(bias_E), ARITH)[1]


def kernel_weights(logits_TE: Tensor, bias_E: Tensor, ids_TK: Tensor, factor: float) -> Approx:
    """Weights of given experts. The optimised kernel takes a score as (score + bias) - bias: two more roundings, which
    cover a kernel that keeps the score.
    """
    scores_TE = add(biased(logits_TE, bias_E), exact(-bias_E), ARITH)
    return bounds.expert_weights(scores_TE, ids_TK.long(), factor, ARITH)


def judge_choice(found: Findings, choice: tuple[Tensor, Tensor], ids_TK: Tensor, config: Config) -> None:
    """Rows without NaN: the ids are what these logits and this bias call for, or another side of a tie."""
    logits_TE, bias_E = choice
    ideal_TK = reference.choose_experts(logits_TE.double(), bias_E.double(), config)
    scores, groups = biased(logits_TE, bias_E), config.n_expert_groups
    found.certified(
        "gate_idx",
        certify_router(
            scores.value, scores.err, ideal_TK, ids_TK.long(), groups=groups, kept=config.n_limited_groups, arith=ARITH
        ),
    )


def judge_weights(found: Findings, weights_TK: Tensor, bound: Approx) -> None:
    """First the sum of each row, which names a factor that is missing or applied twice; then every weight."""
    found.within("sum of gate_w", weights_TK.double().sum(-1), Approx(bound.value.sum(-1), bound.err.sum(-1)))
    found.within("gate_w", weights_TK, bound)


def well_formed(found: Findings, ids_TK: Tensor, weights_TK: Tensor, config: Config) -> bool:
    """Types, range and uniqueness, also in rows of NaN."""
    types = ids_TK.dtype, weights_TK.dtype
    if not found.require("calls", types == (torch.int32, torch.float32), f"gate_idx and gate_w have types {types}"):
        return False
    sorted_TK = ids_TK.sort(-1).values
    wrong_T = (sorted_TK[:, 0] < 0) | (sorted_TK[:, -1] >= config.n_routed_experts)
    wrong_T |= (sorted_TK[:, 1:] == sorted_TK[:, :-1]).any(-1)
    row = int(wrong_T.int().argmax()) if len(wrong_T) else 0
    text = f"gate_idx: row {row}: {ids_TK[row].tolist()} are no {ids_TK.shape[1]} distinct experts"
    return found.require("rows_well_formed", not bool(wrong_T.any()), text, times=len(wrong_T))


class RouterChoice(InputCheck[RouterRows]):
    """What the kernel makes of given logits, in the types of the options."""

    name = "router_choice"
    meaning = "every set of experts is right or a certified tie, weights lie within their bound, rows are independent"
    family = "router"
    input_type = RouterRows

    def inputs(self) -> st.SearchStrategy[RouterRows]:
        """Mostly DeepSeek-V3's shape."""
        return router_rows()

    def run(self, drawn: RouterRows, target: Target) -> Verdict:
        """Choose for the whole batch; then again, alone, reversed, and into a buffer of more rows."""
        found, config, options = Findings(), config_of(drawn.shape), options_of(target)
        logits_TE, bias_E = drawn.tensors()
        logits_TE = logits_TE.to(TORCH[options.logits]).to(device_of(target))
        bias_E = bias_E.to(TORCH[options.bias]).to(device_of(target))
        given_TE = logits_TE.clone()
        ids_TK, weights_TK = self._choose(logits_TE, bias_E, config, target)
        found.require("calls", same_bits(given_TE, logits_TE), "the router changed its logits in place")
        if well_formed(found, ids_TK, weights_TK, config):
            # The kernel takes the bias in the type of the logits.
            read_E = bias_E.to(logits_TE.dtype).float().cpu()
            self._values(found, drawn, (logits_TE.float().cpu(), read_E), (ids_TK.cpu(), weights_TK.cpu()), config)
            self._invariants(found, (logits_TE, bias_E), (ids_TK, weights_TK), config, target)
        untested = "" if found.counts["rows"] else "every row holds NaN"
        return self.verdict(found.violation, found.measured(), untested=untested)

    def _choose(self, logits_TE: Tensor, bias_E: Tensor, config: Config, target: Target) -> tuple[Tensor, Tensor]:
        assert target.kernels is not None
        return subject.choose_experts(logits_TE, bias_E, config, target.kernels)

    def _values(
        self,
        found: Findings,
        drawn: RouterRows,
        numbers: tuple[Tensor, Tensor],
        chosen: tuple[Tensor, Tensor],
        config: Config,
    ) -> None:
        (logits_TE, bias_E), (ids_TK, weights_TK) = numbers, chosen
        plain = torch.tensor([kind not in NAN_KINDS for kind in drawn.rows])
        if bool(plain.any()):
            judge_choice(found, (logits_TE[plain], bias_E), ids_TK[plain], config)
            bound = kernel_weights(logits_TE[plain], bias_E, ids_TK[plain], config.route_scale)
            judge_weights(found, weights_TK[plain], bound)
        for row in [row for row, kind in enumerate(drawn.rows) if kind == "one_nan"]:
            nan = int(logits_TE[row].isnan().int().argmax())
            text = f"gate_idx: row {row}: expert {nan} was chosen, and its logit is NaN"
            # Too few others, and something has to fill the slots.
            spare = config.n_limited_groups * (config.n_routed_experts // config.n_expert_groups)
            needed = spare <= config.n_activated_experts
            found.require("rows_with_nan", needed or nan not in ids_TK[row].tolist(), text)

    def _invariants(
        self,
        found: Findings,
        numbers: tuple[Tensor, Tensor],
        chosen: tuple[Tensor, Tensor],
        config: Config,
        target: Target,
    ) -> None:
        (logits_TE, bias_E), rows = numbers, len(numbers[0])
        alone = [self._choose(logits_TE[row : row + 1], bias_E, config, target) for row in (0, rows - 1)]
        for row, (ids_1K, weights_1K) in zip((0, rows - 1), alone, strict=True):
            same = same_bits(ids_1K[0], chosen[0][row]) and same_bits(weights_1K[0], chosen[1][row])
            found.require("rows_alone", same, f"gate_idx, gate_w: row {row} differs when it is alone in its batch")
        again = self._choose(logits_TE.flip(0).contiguous(), bias_E, config, target)
        same = all(same_bits(part, other.flip(0)) for part, other in zip(chosen, again, strict=True))
        found.require("rows_reversed", same, "gate_idx, gate_w: not the same for the rows in reverse order", times=rows)
        self._in_place(found, numbers, chosen, config, target)

    def _in_place(
        self,
        found: Findings,
        numbers: tuple[Tensor, Tensor],
        chosen: tuple[Tensor, Tensor],
        config: Config,
        target: Target,
    ) -> None:
        """The kernel itself, into the first rows of buffers that hold one row more."""
        logits_TE, bias_E = numbers
        shape = (len(logits_TE) + 1, config.n_activated_experts)
        weights = torch.full(shape, torch.nan, device=logits_TE.device)
        ids = torch.full(shape, UNWRITTEN_ID, dtype=torch.int32, device=logits_TE.device)
        assert target.kernels is not None
        groups = config.n_expert_groups, config.n_limited_groups
        bias_E = bias_E.to(logits_TE.dtype)
        target.kernels.biased_grouped_topk(logits_TE, bias_E, weights[:-1], ids[:-1], *groups, True, config.route_scale)
        same = same_bits(ids[:-1], chosen[0]) and same_bits(weights[:-1], chosen[1])
        found.require("rows_in_place", same, "gate_idx, gate_w: not the same in a buffer that was not empty")
        kept = bool((ids[-1] == UNWRITTEN_ID).all()) and bool(weights[-1].isnan().all())
        found.require("canaries", kept, "gate_idx, gate_w: a row behind the last one was written")


class GateInput(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Activations, a router matrix and a bias, by their seeds."""

    tokens: int = 16
    bias_offset: float = 7.0
    bias_spread: float = 0.05
    seed: int = 0


@functools.cache
def _frame() -> tuple[Config, Weights]:
    """A model of one mixture layer with 256 experts, as narrow as possible, whose gate is exchanged run by run."""
    narrow = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4}
    index = {"index_n_heads": 1, "index_head_dim": 4, "index_topk": 4}
    sizes = {"vocab_size": 8, "dim": 32, "inter_dim": 8, "moe_inter_dim": 8, "n_layers": 1, "n_dense_layers": 0}
    config = Config(n_heads=1).replace(**narrow, **index, **sizes)
    return config, reference_weights.assemble(config, reference_weights.synthetic(config, seed=0))


@dataclass
class _Door:
    """Notes the bias that reaches the kernel."""

    kernels: Any
    bias_E: Tensor | None = None

    def biased_grouped_topk(self, gating_output: Tensor, correction_bias: Tensor, *rest: Any, **named: Any) -> None:
        self.bias_E = correction_bias.clone()
        self.kernels.biased_grouped_topk(gating_output, correction_bias, *rest, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernels, name)


class RouterPrecision(InputCheck[GateInput]):
    """From activations and checkpoint weights to experts, against the ideal router without any rounding."""

    name = "router_precision"
    meaning = "the options' roundings of logits and bias, and nothing else, separate the choice from the ideal one"
    family = "router"
    input_type = GateInput

    def inputs(self) -> st.SearchStrategy[GateInput]:
        """Biases around the published bands."""

        def made(tokens: int, band: tuple[float, float], seed: int) -> GateInput:
            return GateInput(tokens=tokens, bias_offset=band[0], bias_spread=band[1], seed=seed)

        return st.builds(made, sampled_from((16, 1, 32)), sampled_from(PROBE_BIASES), integers(0, 1 << 16))

    def run(self, drawn: GateInput, target: Target) -> Verdict:
        """Pack, multiply, choose; measure flips, lost bias values and moved load."""
        found, options, (config, whole) = Findings(), options_of(target), _frame()
        g = torch.Generator().manual_seed(drawn.seed)
        x_TM = torch.randn(drawn.tokens, config.dim, generator=g).bfloat16()
        weight_EM = (torch.randn(config.n_routed_experts, config.dim, generator=g) * config.dim**-0.5).bfloat16()
        bias_E = bias(g, config.n_routed_experts, drawn.bias_offset, drawn.bias_spread)
        gate = self._gate(config, whole, (weight_EM.float(), bias_E), options)
        gate = packing.moved(gate, device_of(target))
        casts, door = subject.Casts(), _Door(target.kernels)
        logits_TE = subject.gate_logits(x_TM.to(device_of(target)), gate, options.logits, "fp32", casts)
        ids_TK, weights_TK = subject.choose_experts(logits_TE, gate.bias, config, door)
        self._rounding_points(found, options, (logits_TE, casts.bf16_to_fp32), (bias_E, door.bias_E))
        if well_formed(found, ids_TK, weights_TK, config):
            logits = bounds.logits(exact(x_TM), exact(weight_EM), ARITH)
            self._compare(found, options, (logits_TE.cpu(), ids_TK.cpu()), (logits, bias_E), config)
        return self.verdict(found.violation, found.measured(), histograms=found.histograms)

    def _gate(self, config: Config, whole: Weights, numbers: tuple[Tensor, Tensor], options: Options) -> packing.Gate:
        layer = whole.layers[0]
        assert isinstance(layer.ffn, MoeWeights)
        gate = reference.GateWeights(weight=numbers[0], bias=numbers[1])
        layer = dataclasses.replace(layer, ffn=dataclasses.replace(layer.ffn, gate=gate))
        packed = packing.pack(config, dataclasses.replace(whole, layers=(layer,)), options, torch.bfloat16)
        ffn = packed.layers[0].ffn
        assert isinstance(ffn, packing.Moe)
        return ffn.gate

    def _rounding_points(
        self,
        found: Findings,
        options: Options,
        logits: tuple[Tensor, int],
        biases: tuple[Tensor, Tensor | None],
    ) -> None:
        """One cast per layer with fp32 logits, none with bf16 ones; the bias has its checkpoint bits, or bf16's."""
        wide = options.logits == "fp32"
        text = f"gate_logits are {logits[0].dtype}, and the options say {options.logits}"
        found.require("calls", logits[0].dtype == TORCH[options.logits], text)
        found.require("casts", logits[1] == wide, f"{logits[1]} casts to fp32 around the router, not {int(wide)}")
        bias_E, at_door_E = biases
        expected_E = bias_E if wide and options.bias == "fp32" else bias_E.bfloat16()
        expected_E = expected_E.to(TORCH[options.logits])
        right = at_door_E is not None and same_bits(expected_E, at_door_E.cpu())
        found.require("biases", right, f"the bias at the kernel's door is not the checkpoint's in {expected_E.dtype}")
        found.counts["bias_values"] += len(set(bias_E.tolist()))
        found.counts["bias_values_left"] += 0 if at_door_E is None else len(set(at_door_E.tolist()))

    def _compare(
        self,
        found: Findings,
        options: Options,
        made: tuple[Tensor, Tensor],
        given: tuple[Approx, Tensor],
        config: Config,
    ) -> None:
        (logits_TE, ids_TK), (logits, bias_E) = made, given
        ideal_TK = reference.choose_experts(logits.value, bias_E.double(), config)
        logits = round_to(logits, BF16) if options.logits == "bf16" else logits
        found.within("gate_logits", logits_TE, logits)
        narrow = "bf16" in (options.logits, options.bias)
        moved_E = (bias_E.double() - bias_E.bfloat16().double()).abs() * float(narrow)
        scores = bounds.router_scores(logits, Approx(bias_E.double(), moved_E), ARITH)[1]
        groups, kept = config.n_expert_groups, config.n_limited_groups
        found.certified(
            "gate_idx against the ideal router",
            certify_router(scores.value, scores.err, ideal_TK, ids_TK.long(), groups=groups, kept=kept, arith=ARITH),
        )
        margin_T = margins(logits.value, bias_E.double(), config) / scores.err.amax(-1)
        flipped_T = (ids_TK.long().sort(-1).values != ideal_TK.sort(-1).values).any(-1)
        for name, rows_T in (("same choice", ~flipped_T), ("flipped", flipped_T)):
            found.histograms[f"router margin: {name}"] = list(binned(margin_T[rows_T], MARGIN_EDGES))
        load_E, ideal_E = (
            torch.bincount(ids.flatten(), minlength=config.n_routed_experts) for ids in (ids_TK, ideal_TK)
        )
        found.counts["slots_moved"] += int((load_E - ideal_E).abs().sum()) // 2


CHECKS: tuple[type[InputCheck[Any]], ...] = (RouterChoice, RouterPrecision)
