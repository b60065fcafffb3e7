"""The replay of quantised runs is useful: it names a defect where it is, and has nothing to say against an honest run.

Recordings are made with the reference itself, honest or with one defect, and with single altered values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from recorder import recipe, record
from torch import Tensor

from dsv32_fuzz.golden.decodes import Finding, RunReplay, replay_decodes
from dsv32_ref import decode, indexer, mla, moe, router
from dsv32_ref.config import BF16_Q, FP32_Q, PRECISIONS
from dsv32_ref.weights import Weights

MODES = ("fp32_q", "bf16_q")
Defect = Callable[[pytest.MonkeyPatch, Weights], Weights]


@pytest.fixture(scope="module")
def weights() -> Weights:
    return recipe()


def replay(folder: Path) -> RunReplay:
    (run,) = replay_decodes(folder).runs
    return run


@pytest.mark.parametrize("mode", MODES)
def test_an_honest_run_agrees(tmp_path: Path, weights: Weights, mode: str) -> None:
    record(tmp_path, mode, weights)
    run = replay(tmp_path)
    assert run.right, str(run)
    assert (run.sets, run.ties) == (5 * 52, 0)
    assert run.values > 190_000
    assert 0 < max(run.budget_used.values()) <= 1


def _keys_without_hadamard(patch: pytest.MonkeyPatch, weights: Weights) -> Weights:
    rotate = indexer.hadamard
    patch.setattr(indexer, "hadamard", lambda x, p: x if x.dim() == 2 else rotate(x, p))
    return weights


def _weights_of_another_layer(_patch: pytest.MonkeyPatch, weights: Weights) -> Weights:
    first, second, third = weights.layers
    layers = [first, second, dataclasses.replace(third, attn=second.attn)]
    return dataclasses.replace(weights, layers=type(weights.layers)(layers))


def _output_weights_of_another_layer(_patch: pytest.MonkeyPatch, weights: Weights) -> Weights:
    first, second, third = weights.layers
    layers = [first, second, dataclasses.replace(third, attn=dataclasses.replace(third.attn, wo=second.attn.wo))]
    return dataclasses.replace(weights, layers=type(weights.layers)(layers))


def _stale_rope(patch: pytest.MonkeyPatch, weights: Weights) -> Weights:
    table = decode.rope_table
    patch.setattr(decode, "rope_table", lambda c, p, d: table(c, (p - 1).clamp_min(0), d))
    return weights


def _softmax_scale_off_by_1_percent(patch: pytest.MonkeyPatch, weights: Weights) -> Weights:
    softmax = mla._softmax
    patch.setattr(mla, "_softmax", lambda s, allowed, p: softmax(s * 1.01, allowed, p))
    return weights


def _lost_attention_row(patch: pytest.MonkeyPatch, weights: Weights) -> Weights:
    softmax = mla._softmax

    def lose_the_first(scores: Tensor, allowed_TS: Tensor, precision: object) -> tuple[Tensor, Tensor]:
        first_T = allowed_TS.int().argmax(-1)
        alone_T = allowed_TS.sum(-1) == 1
        kept_TS = allowed_TS.scatter(1, first_T[:, None], alone_T[:, None])
        return softmax(scores, kept_TS, precision)  # type: ignore[arg-type]

    patch.setattr(mla, "_softmax", lose_the_first)
    return weights


def _no_shared_expert(patch: pytest.MonkeyPatch, weights: Weights) -> Weights:
    mixture = moe.mixture
    patch.setattr(moe, "mixture", lambda x, i, k, w, p: mixture(x, i, k, dataclasses.replace(w, shared=None), p))
    return weights


def _biased_expert_weights(patch: pytest.MonkeyPatch, weights: Weights) -> Weights:
    plain = router.expert_weights
    patch.setattr(router, "expert_weights", lambda logits, i, c: plain(logits + 0.01 * logits.abs(), i, c))
    return weights


def _index_score_without_relu(patch: pytest.MonkeyPatch, weights: Weights) -> Weights:
    patch.setattr(indexer, "index_scores", lambda q, w, k, s: (w[:, None] @ (q @ k.T)).squeeze(1) * s)
    return weights


DEFECTS: list[tuple[Defect, str, int]] = [
    (_keys_without_hadamard, "index_key", 0),
    (_weights_of_another_layer, "latent", 2),
    (_output_weights_of_another_layer, "attn_out", 2),
    (_stale_rope, "latent", 0),
    (_softmax_scale_off_by_1_percent, "attn_out", 0),
    (_lost_attention_row, "attn_out", 0),
    (_no_shared_expert, "ffn_out", 1),
    (_biased_expert_weights, "gate_w", 1),
    (_index_score_without_relu, "index_score", 0),
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("defect", "stage", "layer"), DEFECTS, ids=lambda x: getattr(x, "__name__", ""))
def test_a_defect_is_named(tmp_path: Path, weights: Weights, mode: str, defect: Defect, stage: str, layer: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        record(tmp_path, mode, defect(patch, weights))
    run = replay(tmp_path)
    assert run.first is not None
    assert (run.first.stage, run.first.layer, run.first.step) == (stage, layer, 0), str(run)


@pytest.mark.parametrize("mode", MODES)
def test_a_latent_that_was_not_quantised_is_named(tmp_path: Path, weights: Weights, mode: str) -> None:
    record(tmp_path, mode, weights, precision=dataclasses.replace(PRECISIONS[mode], latent_fp8=False))
    run = replay(tmp_path)
    assert run.first is not None
    assert (run.first.stage, run.first.layer) == ("latent", 0)


def test_a_run_of_other_rounding_points_is_not_taken_for_its_mode(tmp_path: Path, weights: Weights) -> None:
    record(tmp_path, "fp32_q", weights, precision=BF16_Q)
    assert replay(tmp_path).first is not None
    record(tmp_path, "bf16_q", weights, precision=FP32_Q)
    assert replay(tmp_path).first is not None


@pytest.fixture(scope="module", params=MODES)
def recorded(request: pytest.FixtureRequest, weights: Weights, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    record(folder, request.param, weights)
    return folder


def altered(recorded: Path, folder: Path, name: str, change: Callable[[np.ndarray], object]) -> Finding:
    """The finding in a copy of the recording with one array changed in place."""
    with np.load(recorded / "run.npz") as archive:
        arrays = {key: archive[key].copy() for key in archive.files}
    change(arrays[name])
    np.savez(folder / "run.npz", **arrays)
    (folder / "manifest.json").write_bytes((recorded / "manifest.json").read_bytes())
    run = replay(folder)
    assert run.first is not None
    return run.first


# The changed array, and where the change shows: an output that no bound sees by itself breaks the sum that follows.
VALUES = [
    ("s1.L1.attn_in", "attn_in", 1),
    ("s1.L1.attn_out", "residual", 1),
    ("s1.L1.residual", "residual", 1),
    ("s1.L1.ffn_in", "ffn_in", 1),
    ("s1.L1.gate_w", "gate_w", 1),
    ("s1.L1.ffn_out", "attn_in", 2),
    ("s1.final_norm", "final_norm", -1),
    ("s1.logits", "logits", -1),
]


@pytest.mark.parametrize(("name", "stage", "layer"), VALUES)
def test_one_altered_value_is_located(recorded: Path, tmp_path: Path, name: str, stage: str, layer: int) -> None:
    """2^-4 of the row's largest value, in one place of request 1: eight bf16 ulps there."""

    def alter(array: np.ndarray) -> None:
        row = array.reshape(2, -1)[1]
        row[1] += 2.0**-4 * np.abs(row).max()

    found = altered(recorded, tmp_path, name, alter)
    earlier = {"s1.L1.attn_out": "attn_out", "s1.L1.ffn_out": "ffn_out"}.get(name)  # unrounded in fp32_q: seen at once
    assert (found.stage, found.layer) in {(stage, layer), (earlier, 1)}, str(found)
    assert (found.step, found.request, found.position) == (1, 1, 24)


@pytest.mark.parametrize(
    ("name", "stage"), [("cache.L1.kv", "latent"), ("cache.L1.pe", "latent"), ("cache.L1.ik", "index_key")]
)
def test_one_altered_cache_entry_is_located(recorded: Path, tmp_path: Path, name: str, stage: str) -> None:
    """Its sign, where it is largest: many steps of any grid."""

    def alter(array: np.ndarray) -> None:
        array[1, 3, np.abs(array[1, 3]).argmax()] *= -1

    found = altered(recorded, tmp_path, name, alter)
    assert (found.stage, found.layer, found.step, found.request, found.position) == (stage, 1, 0, 1, 3)


def test_a_scale_of_twice_its_size_is_located(recorded: Path, tmp_path: Path) -> None:
    """The bound of the dequantised key sees it first."""

    def alter(array: np.ndarray) -> None:
        array[1, 3] *= 2

    found = altered(recorded, tmp_path, "cache.L1.ik_scale", alter)
    assert (found.layer, found.step, found.request, found.position) == (1, 0, 1, 3)
    assert found.stage in ("index_key", "index_scale")


@pytest.mark.parametrize(("name", "column"), [("s2.L1.index_topk", "index_topk"), ("s2.L1.gate_idx", "gate_idx")])
def test_an_altered_set_is_no_certified_tie(recorded: Path, tmp_path: Path, name: str, column: str) -> None:
    def alter(array: np.ndarray) -> None:
        row = array.reshape(2, -1)[1]
        row[0] = next(i for i in range(16) if i not in row)

    found = altered(recorded, tmp_path, name, alter)
    assert (found.step, found.layer, found.stage, found.request) == (2, 1, column, 1)
    assert "beyond both bounds" in found.detail


def test_a_duplicate_choice_is_malformed(recorded: Path, tmp_path: Path) -> None:
    def alter(array: np.ndarray) -> None:
        row = array.reshape(2, -1)[0]
        row[0] = row[1]

    assert "malformed" in altered(recorded, tmp_path, "s1.L1.gate_idx", alter).detail


def test_a_quantised_run_that_lacks_an_input_is_refused(recorded: Path, tmp_path: Path) -> None:
    with np.load(recorded / "run.npz") as archive:
        arrays = {key: archive[key] for key in archive.files if key != "cache.L2.ik_scale"}
    np.savez(tmp_path / "run.npz", **arrays)
    (tmp_path / "manifest.json").write_bytes((recorded / "manifest.json").read_bytes())
    with pytest.raises(ValueError, match=r"cache\.L2\.ik_scale is missing .* a run that quantises needs it"):
        replay_decodes(tmp_path)


def test_fp32_runs_report_both_shares(tmp_path: Path, weights: Weights) -> None:
    record(tmp_path, "fp32", weights)
    run = replay(tmp_path)
    assert run.right, str(run)
    assert run.tolerance_used == 0.0  # the same code on the same numbers
    assert 0 < max(run.budget_used.values()) <= 1
    assert torch.isfinite(torch.tensor(list(run.budget_used.values()))).all()
