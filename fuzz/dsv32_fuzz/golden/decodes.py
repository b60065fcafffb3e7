"""Replay of recorded decodes of another implementation against the reference, stage by stage.

Contract: every recorded value is held against the bound that `dsv32_ref.bounds` proves from the values recorded before
it, in the simulated-quantised reference of its mode, with the recorded decisions: one legal rounding flip cascades
through random weights, so nothing is carried from stage to stage. A run in plain fp32 is also replayed from end to end.
The first stage, layer, step and request that differ are named, or the first set that is no correct choice of its
scores. Legend: T rows (tokens of all requests), B requests, S cached tokens, D latent, I index key, K choices.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from dsv32_fuzz.golden.components import ComponentReplay, replay_components
from dsv32_fuzz.golden.recipe import recipe_weights, weights_sha256
from dsv32_fuzz.golden.recording import Recording, load_manifest, load_recording
from dsv32_ref.bounds import Approx, Certificate, approx, certify_router, certify_topk, exact, judge
from dsv32_ref.bounds.stages import StageBounds
from dsv32_ref.bounds.step import DECISIONS, Cached, StepBounds
from dsv32_ref.config import FP32
from dsv32_ref.decode import Form, decode, prefill
from dsv32_ref.moe import MoeWeights
from dsv32_ref.state import Model, State
from dsv32_ref.weights import assemble

FLIP_SHARE = 2**-4
"""Largest share of a stage's values that honest rounding carries to a neighbour, as an alarm. Two fp32 sums of n <= 256
terms differ by at most 2 x 256 x 2^-24 of their size, and bf16 boundaries lie at least 2^-8 of it apart: one rounding
point flips a value with probability 2^-7 at most, and at most eight lie between recorded values.
"""


def tolerance(x: Tensor) -> Tensor:
    """2e-5 + 1e-5 |x|: what two fp32 implementations may differ by from end to end.

    Two independent ones measured 3.6e-6 on logits of 3.4 (see the README beside the recordings).
    """
    return 2e-5 + 1e-5 * x.abs()


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


@dataclass
class Flips:
    """Values of one stage and layer that rounding carried beyond the fp32 tolerance."""

    values: int = 0
    flipped: int = 0
    first: Finding | None = None


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
    """Values of a quantised run beyond 2e-5 + 1e-5 |x|: rounding flips, each within its bound."""
    ties: int
    """Sets that differ by a certified tie."""
    tolerance_used: float
    """Largest error of a plain fp32 run, from end to end, as a share of 2e-5 + 1e-5 |x|."""
    budget_used: dict[str, float]
    """By stage, the largest error of a recorded value as a share of the bound proven from the values recorded before
    it; empty where those were not recorded.
    """

    @property
    def right(self) -> bool:
        """An honest run agrees; a defective one does not."""
        return (self.first is not None) == self.negative

    def __str__(self) -> str:
        outcome = "agrees" if self.first is None else f"differs first at {self.first}"
        return f"{self.name}: {outcome} ({self.values} values, {self.sets} sets, {self._used})"

    @property
    def _used(self) -> str:
        worst = max(self.budget_used, key=lambda stage: self.budget_used[stage], default=None)
        tolerance = f"fp32 tolerance used {self.tolerance_used:.2g}" if self.mode == "fp32" else f"{self.flips} flips"
        bound = (
            "no bounds: inputs not recorded" if worst is None else f"bound used {self.budget_used[worst]:.2g} ({worst})"
        )
        return f"{tolerance}, {bound}"


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
    folder: str | Path, progress: Callable[[str], None] | None = None, only: Collection[str] | None = None
) -> DecodeReplay:
    """Replays every run that the folder's manifest lists, and its `components_*.npz` if there are any.

    Args:
        folder: manifest.json and one .npz per run; see `recording`.
        progress: called with one line per run.
        only: names of the runs to replay; None for all that are listed.

    Raises:
        ValueError: a malformed folder, or weights other than the recorded ones; the message says what to do.
    """
    root = Path(folder)
    config, hashes, listed = load_manifest(root)
    runs, models = [], {}
    for name, mode, seed in listed:
        if only is not None and name not in only:
            continue
        recording = load_recording(root, config, name, mode, seed)
        if seed not in models:
            models[seed] = _model(recording, hashes)
        runs.append(_replay(recording, models[seed]))
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


def _replay(recording: Recording, model: Model) -> RunReplay:
    model = Model(config=model.config, weights=model.weights, precision=recording.precision)
    state = State(model, recording.tokens.size + 64)
    comparison = _Comparison(recording, model)
    for step in range(recording.steps):
        comparison.start(step)
        start, stop = recording.span(step)
        tokens = {request: row[start:stop].tolist() for request, row in enumerate(recording.tokens)}
        (decode if step else prefill)(model, state, tokens, tap=comparison)
        if comparison.first is not None:
            break
    return comparison.result()


class _Comparison:
    """The tap that compares each stage with the recording and, in a quantised run, goes on with the recorded value."""

    def __init__(self, recording: Recording, model: Model) -> None:
        self.recording, self.model = recording, model
        self.local = recording.precision != FP32
        self.bounds = StageBounds(config=model.config, precision=recording.precision, simulated=True)
        self.first: Finding | None = None
        self.values = self.sets = self.ties = 0
        self.flips: dict[tuple[str, int], Flips] = {}
        self.tolerance_used = 0.0
        self.budget_used: dict[str, float] = {}

    def start(self, step: int) -> None:
        """Before each step."""
        self.step, self.local_bounds = step, None if self.recording.missing else self._step_bounds(step)
        self.scores: dict[str, Approx] = {}

    def _step_bounds(self, step: int) -> StepBounds:
        recording = self.recording
        start, stop = recording.span(step)
        tokens_T = torch.from_numpy(recording.tokens[:, start:stop].reshape(-1).astype("int64"))

        def cached(layer: int) -> list[Cached]:
            rows = [slice(i, i + stop - start) for i in range(0, len(tokens_T), stop - start)]
            parts = zip(rows, recording.cached(layer, step), strict=True)
            return [Cached(rows=own, kv_SD=kv, keys_SI=keys, scale_S=scale) for own, (kv, keys, scale) in parts]

        form: Form = "absorbed" if step else "unabsorbed"
        return StepBounds(self.bounds, self.model.weights, tokens_T, recording.positions(step), form, cached)

    def __call__(self, stage: str, layer: int, value: Tensor) -> Tensor:
        """Compares `value`; returns what to go on with."""
        recorded = self._recorded(stage, layer)
        if self.first is not None:
            return value
        if recorded is not None and recorded.shape != value.shape:
            key = f"s{self.step}.L{layer}.{stage}"
            raise ValueError(f"{self.recording.name}: {key} has {tuple(recorded.shape)}; expected {tuple(value.shape)}")
        if recorded is not None and stage in DECISIONS:
            self._decide(stage, layer, value, recorded)
        if self.first is None and self.local_bounds is not None:
            self._judge(stage, layer, recorded, self.local_bounds(stage, layer, recorded))
        if recorded is not None and self.first is None and stage not in DECISIONS:
            self._compare(stage, layer, value, recorded)
        self.scores[stage] = approx(value, tolerance(value)) if recorded is None else exact(recorded)
        return value if recorded is None or not (self.local or stage in DECISIONS) else recorded

    def _recorded(self, stage: str, layer: int) -> Tensor | None:
        recorded = self.recording.stage(self.step, layer, stage)
        if stage != "index_score" or recorded is None:
            return recorded
        future_TS = torch.arange(recorded.shape[1]) > self.recording.positions(self.step)[:, None]
        return recorded.masked_fill(future_TS, -torch.inf)

    def _judge(self, stage: str, layer: int, recorded: Tensor | None, bound: Approx | None) -> None:
        """The recorded value against the bound that follows from the values recorded before it."""
        if recorded is None or bound is None:
            return
        if stage == "index_key":
            scale = self.recording.stage(self.step, layer, "index_scale")
            recorded = recorded if scale is None else recorded.double() * scale[:, None].double()
        budget = judge(recorded, bound)
        self.budget_used[stage] = max(self.budget_used.get(stage, 0.0), budget.worst)
        if budget.first is not None:
            self.first = self._local_finding(
                stage, layer, budget.first, recorded, bound, f"proven to within {budget.bound:.3g}"
            )
        elif self.local:
            self._count_flips(stage, layer, recorded, bound)

    def _count_flips(self, stage: str, layer: int, recorded: Tensor, bound: Approx) -> None:
        """Beyond the fp32 tolerance lies only what was rounded on the way, and of that only a small share."""
        visible = bound.value != -torch.inf
        flipped = ((recorded - bound.value).abs() > tolerance(bound.value)) & visible
        count = self.flips.setdefault((stage, layer), Flips())
        count.values += int(visible.sum())
        count.flipped += int(flipped.sum())
        if bool(flipped.any()) and (count.first is None or self._unrounded(stage, layer)):
            place = tuple(flipped.nonzero()[0].tolist())
            count.first = self._local_finding(stage, layer, place, recorded, bound, "beyond the fp32 tolerance")
            self.first = count.first if self._unrounded(stage, layer) else None

    def _unrounded(self, stage: str, layer: int) -> bool:
        """No rounding point lies between the recorded inputs of this stage and its value."""
        if not self.recording.precision.bf16:
            return stage not in ("latent", "index_key", "index_scale", "index_score")
        ffn_in = self.recording.stage(self.step, layer, "ffn_in")
        return stage in ("gate_w", "logits") or (stage == "gate_logits" and ffn_in is not None)

    def _local_finding(
        self, stage: str, layer: int, place: tuple[int, ...], recorded: Tensor, bound: Approx, limit: str
    ) -> Finding:
        found, wanted = float(recorded[place]), float(bound.value[place])
        text = f"recorded is {found:.8g}, the reference has {wanted:.8g} from the recorded inputs, {limit}"
        return self._finding(stage, layer, place[0], text)

    def _compare(self, stage: str, layer: int, value: Tensor, recorded: Tensor) -> None:
        """In plain fp32 the reference's own value, from end to end, against the recorded one."""
        if self.local:
            return
        visible = recorded != -torch.inf
        used = ((value - recorded).abs() / tolerance(recorded)).masked_fill(~visible, 0.0)
        self.values += int(visible.sum())
        self.tolerance_used = max(self.tolerance_used, float(used.max()))
        wrong = (~(used <= 1)).nonzero()  # NaN never passes
        if len(wrong):
            row, column = wrong[0].tolist()[0], tuple(wrong[0].tolist())
            found, wanted = float(value[column]), float(recorded[column])
            text = f"the reference has {found:.8g}, recorded is {wanted:.8g}"
            text += f", {float(used[column]):.3g} times the tolerance"
            self.first = self._finding(stage, layer, row, text)

    def _decide(self, stage: str, layer: int, value: Tensor, recorded: Tensor) -> None:
        """The recorded set must be a correct choice of the recorded scores, or of the reference's within tolerance."""
        certificate = (
            self._certify_topk(value, recorded) if stage == "index_topk" else self._certify(layer, value, recorded)
        )
        self.sets += len(value)
        row = certificate.first_illegal
        self.ties += int((certificate.flips > 0).sum()) if row is None else 0
        if row is not None:
            a, b = set(value[row].tolist()), set(recorded[row].tolist())
            text = f"the reference alone has {sorted(a - b)}, recorded alone {sorted(b - a)}, no certified tie: "
            self.first = self._finding(stage, layer, row, text + certificate.describe(stage))

    def _certify_topk(self, value: Tensor, recorded: Tensor) -> Certificate:
        scores = self.scores["index_score"]
        valid = torch.arange(scores.value.shape[1]) <= self.recording.positions(self.step)[:, None]
        err = scores.err.masked_fill(~valid, 0.0)
        return certify_topk(scores.value, err, value, recorded, valid=valid)

    def _certify(self, layer: int, value: Tensor, recorded: Tensor) -> Certificate:
        ffn, config = self.model.weights.layers[layer].ffn, self.model.config
        assert isinstance(ffn, MoeWeights)
        biased = self.bounds.biased_scores(self.scores["gate_logits"], ffn.gate)
        groups, kept = config.n_expert_groups, config.n_limited_groups
        return certify_router(
            biased.value, biased.err, value, recorded, groups=groups, kept=kept, arith=self.bounds.arith
        )

    def _finding(self, stage: str, layer: int, row: int, detail: str) -> Finding:
        rows = len(self.recording.tokens) if stage == "logits" else len(self.recording.positions(self.step))
        per_request = rows // len(self.recording.tokens)
        start, stop = self.recording.span(self.step)
        position = stop - 1 if stage == "logits" else start + row % per_request
        return Finding(
            step=self.step, layer=layer, stage=stage, request=row // per_request, position=position, detail=detail
        )

    def _alarm(self) -> Finding | None:
        """The first stage of which more values flipped than honest rounding explains."""
        for count in self.flips.values():
            if count.first is not None and count.flipped > FLIP_SHARE * count.values:
                detail = f"{count.flipped} of {count.values} values flipped, first: {count.first.detail}"
                return msgspec.structs.replace(count.first, detail=detail)
        return None

    def result(self) -> RunReplay:
        """What the whole run came to."""
        counts = self.flips.values()
        return RunReplay(
            name=self.recording.name,
            mode=self.recording.mode,
            negative=self.recording.negative,
            first=self.first or self._alarm(),
            values=self.values + sum(count.values for count in counts),
            sets=self.sets,
            flips=sum(count.flipped for count in counts),
            ties=self.ties,
            tolerance_used=self.tolerance_used,
            budget_used=self.budget_used,
        )
