"""Replay of recorded decodes of another implementation against the reference, stage by stage.

Contract: a run recorded in plain fp32 is replayed end to end; a run that quantises is replayed layer by layer, each
stage computed from the recorded inputs with the recorded decisions, since one legal rounding flip cascades through
random weights. The first stage, layer, step and request beyond tolerance is named, or the first set that differs
without a certified tie. Legend: T rows (tokens of all requests), B requests, S cached tokens, K choices, E experts, G
groups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from dsv32_fuzz.golden.components import ComponentReplay, replay_components
from dsv32_fuzz.golden.recipe import recipe_weights, weights_sha256
from dsv32_fuzz.golden.recording import Recording, load_manifest, load_recording
from dsv32_ref.config import FP32
from dsv32_ref.decode import decode, prefill
from dsv32_ref.moe import MoeWeights
from dsv32_ref.state import Model, State
from dsv32_ref.weights import assemble

DECISIONS = ("index_topk", "gate_idx")


@dataclass(frozen=True, kw_only=True)
class StageValue:
    """A recorded value and what it came from, for a tolerance to judge by."""

    model: Model
    """Config, weights, and the rounding points of the run."""
    state: State
    """The caches as the reference has them at this point."""
    step: int
    layer: int
    stage: str
    recorded: Tensor
    before: Mapping[str, Tensor]
    """The stages before this one, by name: the recorded values in a quantised run, else the reference's own."""


Tolerance = Callable[[StageValue], Tensor]
"""The largest permitted error of each recorded value."""


def default_tolerance(value: StageValue) -> Tensor:
    """2e-5 + 1e-5 |x|, and, where the run quantises, one rounding flip.

    Two honest fp32 sums differ by about 1e-6 here (two independent implementations measured 3.6e-6 on logits), which
    may carry a value across a rounding boundary. What was stored on the e4m3 grid then differs by one step, 2^-3 |x|
    (2^-9 of the unit below the normal range); a bf16 result by one ulp, 2^-7 |x|. A flip inside a stage moves one
    term of a sum, by 2^-7 of it in bf16; a rotated e4m3 query lane by 2^-3, but it carries only 1/128 of |q||k|,
    times at most 8 where it is a peak. Either way that is 2^-7 of the row's largest value: an estimate by size, where
    a proven bound can be passed.
    """
    x, stage, precision = value.recorded, value.stage, value.model.precision
    plain, ulp = 2e-5 + 1e-5 * x.abs(), 2**-7 * x.abs() if precision.bf16 else torch.zeros(())
    if precision == FP32:
        return plain
    if stage == "index_key":
        return plain + 2**-3 * x.abs() + 2**-9
    if stage == "latent":
        in_latent_D = torch.arange(x.shape[-1]) < value.model.config.kv_lora_rank
        return plain + torch.where(in_latent_D, 2**-3 * x.abs(), ulp)
    if stage in ("index_score", "attn_out", "ffn_out"):
        return plain + ulp + 2**-7 * x.abs().amax(-1, keepdim=True)
    return plain


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Where a recording and the reference part for the first time."""

    step: int
    """0 is the prefill."""
    layer: int
    """-1 for the final norm and the logits."""
    stage: str
    request: int
    position: int
    detail: str

    def __str__(self) -> str:
        where = f"layer {self.layer} " if self.layer >= 0 else ""
        return f"step {self.step}, {where}{self.stage}, request {self.request}, position {self.position}: {self.detail}"


class RunReplay(msgspec.Struct, frozen=True, kw_only=True):
    """One run: what was compared, and what differed first."""

    name: str
    mode: str
    negative: bool
    """Recorded with a defect: it is right when a finding is there."""
    first: Finding | None
    values: int
    """Numbers compared."""
    sets: int
    """Top-k and expert sets compared."""
    flips: int
    """Values beyond 2e-5 + 1e-5 |x| and within the tolerance (rounding flips of quantised runs)."""
    ties: int
    """Sets that differ by a certified tie."""
    budget_used: float
    """Largest error / tolerance among the values compared before the first finding."""

    @property
    def right(self) -> bool:
        """An honest run agrees; a defective one does not."""
        return (self.first is not None) == self.negative

    def __str__(self) -> str:
        outcome = "agrees" if self.first is None else f"differs first at {self.first}"
        return f"{self.name}: {outcome} ({self.values} values, {self.sets} sets, budget used {self.budget_used:.2g})"


class DecodeReplay(msgspec.Struct, frozen=True, kw_only=True):
    """A folder of recorded decodes."""

    folder: str
    runs: list[RunReplay]
    components: list[ComponentReplay]

    @property
    def right(self) -> bool:
        """Every honest run and component agrees, every defective run does not."""
        return all(run.right for run in self.runs) and all(component.right for component in self.components)


def replay_decodes(
    folder: str | Path, progress: Callable[[str], None] | None = None, *, tolerance: Tolerance = default_tolerance
) -> DecodeReplay:
    """Replays every run that the folder's manifest lists, and its `components_*.npz` if there are any.

    Args:
        folder: manifest.json and one .npz per run; see `recording`.
        progress: called with one line per run.
        tolerance: permitted error per value.

    Raises:
        ValueError: a malformed folder, or weights other than the recorded ones; the message says what to do.
    """
    root = Path(folder)
    config, hashes, listed = load_manifest(root)
    runs, models = [], {}
    for name, mode, seed in listed:
        recording = load_recording(root, config, name, mode, seed)
        if seed not in models:
            models[seed] = _model(recording, hashes)
        runs.append(_replay(recording, models[seed], tolerance))
        if progress:
            progress(str(runs[-1]))
    components = [part for path in sorted(root.glob("components_*.npz")) for part in replay_components(path)]
    for component in components if progress else []:
        assert progress is not None
        progress(str(component))
    return DecodeReplay(folder=str(root), runs=runs, components=components)


def _model(recording: Recording, hashes: dict[str, str]) -> Model:
    named = recipe_weights(recording.config, recording.seed)
    if weights_sha256(named) != hashes.get(str(recording.seed)):
        raise ValueError(
            f"weights_sha256 of seed {recording.seed} is not the recipe's; record with the weights of `golden.recipe`"
        )
    return Model(config=recording.config, weights=assemble(recording.config, named))


def _replay(recording: Recording, model: Model, tolerance: Tolerance) -> RunReplay:
    model = Model(config=model.config, weights=model.weights, precision=recording.precision)
    state = State(model, recording.tokens.size + 64)
    comparison = _Comparison(recording, model, state, tolerance)
    for comparison.step in range(recording.steps):
        start, stop = recording.span(comparison.step)
        tokens = {request: row[start:stop].tolist() for request, row in enumerate(recording.tokens)}
        (decode if comparison.step else prefill)(model, state, tokens, tap=comparison)
        if comparison.first is not None:
            break
    return comparison.result()


class _Comparison:
    """The tap that compares each stage with the recording and, in a quantised run, goes on with the recorded value."""

    def __init__(self, recording: Recording, model: Model, state: State, tolerance: Tolerance) -> None:
        self.recording, self.model, self.state, self.tolerance = recording, model, state, tolerance
        self.local = recording.precision != FP32
        self.step = 0
        self.first: Finding | None = None
        self.values = self.sets = self.flips = self.ties = 0
        self.budget_used = 0.0
        self.last: dict[str, Tensor] = {}

    def __call__(self, stage: str, layer: int, value: Tensor) -> Tensor:
        """Compares `value`; returns what to go on with."""
        recorded = self.recording.stage(self.step, layer, stage)
        self.last[stage] = recorded if self.local and recorded is not None and stage not in DECISIONS else value
        if recorded is None or self.first is not None:
            return value
        if recorded.shape != value.shape:
            key = f"s{self.step}.L{layer}.{stage}"
            raise ValueError(f"{self.recording.name}: {key} has {tuple(recorded.shape)}; expected {tuple(value.shape)}")
        if stage in DECISIONS:
            return self._decide(stage, layer, value, recorded)
        if stage == "index_score":
            columns_S = torch.arange(value.shape[1])
            recorded = recorded.masked_fill(columns_S > self.recording.positions(self.step)[:, None], -torch.inf)
        self._compare(stage, layer, value, recorded)
        return recorded if self.local else value

    def _compare(self, stage: str, layer: int, value: Tensor, recorded: Tensor) -> None:
        visible = recorded != -torch.inf
        error = (value - recorded).abs()[visible]
        used = error / self._permitted(stage, layer, recorded.masked_fill(~visible, 0.0))[visible]
        self.values += error.numel()
        self.flips += int((error > 2e-5 + 1e-5 * recorded[visible].abs()).sum())
        wrong = ~(used <= 1)  # NaN never passes
        if bool(wrong.any()):
            row = int(visible.nonzero()[wrong.nonzero()[0, 0], 0])
            place = int(wrong.nonzero()[0, 0])
            found, wanted = float(value[visible][place]), float(recorded[visible][place])
            text = (
                f"the reference has {found:.8g}, recorded is {wanted:.8g}, {float(used[place]):.3g} times the tolerance"
            )
            self.first = self._finding(stage, layer, row, text)
        elif used.numel():
            self.budget_used = max(self.budget_used, float(used.max()))

    def _permitted(self, stage: str, layer: int, recorded: Tensor) -> Tensor:
        return self.tolerance(
            StageValue(
                model=self.model,
                state=self.state,
                step=self.step,
                layer=layer,
                stage=stage,
                recorded=recorded,
                before=self.last,
            )
        )

    def _decide(self, stage: str, layer: int, value: Tensor, recorded: Tensor) -> Tensor:
        ours, theirs = value.sort(-1).values, recorded.sort(-1).values
        self.sets += len(value)
        for row in (ours != theirs).any(-1).nonzero().flatten().tolist():
            a, b = set(ours[row].tolist()), set(theirs[row].tolist())
            margin, permitted = self._margin(stage, layer, row, sorted(b - a))
            if not margin <= permitted:
                text = f"the reference alone has {sorted(a - b)}, recorded alone {sorted(b - a)}"
                text += f", margin {margin:.3g}, a tie needs {permitted:.3g}"
                self.first = self._finding(stage, layer, row, text)
                return value
            self.ties += 1
        return recorded

    def _margin(self, stage: str, layer: int, row: int, foreign: list[int]) -> tuple[float, float]:
        """How far the foreign choices lie behind the cut, and how far apart two honest results may move them."""
        if stage == "index_topk":
            scores_S = self.last["index_score"][row]
            if not all(0 <= s < len(scores_S) for s in foreign):
                return float("inf"), 0.0
            slack_S = self._permitted(stage, layer, scores_S.nan_to_num(neginf=0.0))
            cut = scores_S[self.last["index_topk"][row]].min()
            return float(cut - scores_S[foreign].min()), 2 * float(slack_S.max())
        ffn = self.model.weights.layers[layer].ffn
        assert isinstance(ffn, MoeWeights)
        logits_E, config = self.last["gate_logits"][row], self.model.config
        if not all(0 <= e < config.n_routed_experts for e in foreign):
            return float("inf"), 0.0
        biased_E = logits_E.sigmoid() + ffn.gate.bias
        # The sigmoid moves by at most a quarter of its argument; a group score is a sum of two.
        slack = float(self._permitted("gate_logits", layer, logits_E).max()) / 4
        per_group_GE = biased_E.view(config.n_expert_groups, -1)
        group_G = per_group_GE.topk(min(2, per_group_GE.shape[1]), -1).values.sum(-1).sort(descending=True).values
        kept = config.n_limited_groups
        group_margin = float(group_G[kept - 1] - group_G[kept]) / 2 if kept < len(group_G) else float("inf")
        cut = biased_E[self.last["gate_idx"][row]].min()
        return min(abs(float(cut - biased_E[foreign].min())), group_margin), 2 * slack

    def _finding(self, stage: str, layer: int, row: int, detail: str) -> Finding:
        rows = len(self.recording.tokens) if stage == "logits" else len(self.recording.positions(self.step))
        per_request = rows // len(self.recording.tokens)
        start, stop = self.recording.span(self.step)
        position = stop - 1 if stage == "logits" else start + row % per_request
        return Finding(
            step=self.step, layer=layer, stage=stage, request=row // per_request, position=position, detail=detail
        )

    def result(self) -> RunReplay:
        """What the whole run came to."""
        return RunReplay(
            name=self.recording.name,
            mode=self.recording.mode,
            negative=self.recording.negative,
            first=self.first,
            values=self.values,
            sets=self.sets,
            flips=self.flips,
            ties=self.ties,
            budget_used=self.budget_used,
        )
