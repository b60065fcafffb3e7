"""Recorded decodes of DeepSeek's own code agree with the reference; a recording with a known defect does not."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import dsv32_fuzz
from dsv32_fuzz.golden.components import replay_components
from dsv32_fuzz.golden.decodes import DecodeReplay, replay_decodes
from dsv32_fuzz.golden.recipe import recipe_weights
from dsv32_fuzz.golden.recording import load_manifest, load_recording
from dsv32_ref.bounds.step import DECISIONS
from dsv32_ref.config import FP32_Q
from dsv32_ref.decode import STAGES, Trace, decode, prefill
from dsv32_ref.state import Model, State
from dsv32_ref.weights import assemble

FOLDER = Path(dsv32_fuzz.__file__).parent / "data" / "decodes"


@pytest.fixture(scope="module")
def replay() -> DecodeReplay:
    return replay_decodes(FOLDER)


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A folder with the first five decode steps of the fp32 run of seed 0 alone."""
    manifest = json.loads((FOLDER / "manifest.json").read_text())
    manifest["runs"] = {"fp32_seed0": manifest["runs"]["fp32_seed0"]}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with np.load(FOLDER / "fp32_seed0.npz") as archive:
        arrays = {key: archive[key] for key in archive.files}
    np.savez(
        tmp_path / "fp32_seed0.npz", **arrays | {"tokens": arrays["tokens"][:, : int(arrays["prompt_len"].item()) + 5]}
    )
    return tmp_path


def edit(folder: Path, name: str, change: object) -> None:
    """Replaces one array of the run in `folder`; None drops it."""
    path = folder / "fp32_seed0.npz"
    with np.load(path) as archive:
        arrays = {key: archive[key] for key in archive.files}
    del arrays[name]
    np.savez(path, **arrays, **({} if change is None else {name: change}))


@pytest.mark.parametrize("name", ["fp32_seed0", "fp32_seed1"])
def test_fp32_agrees_end_to_end(replay: DecodeReplay, name: str) -> None:
    run = next(run for run in replay.runs if run.name == name)
    assert run.first is None, str(run)
    # 13 steps x 3 layers of top-k rows (2 x 40) and 2 layers of expert rows: all equal, none by a tie.
    assert (run.sets, run.ties, run.flips) == (3 * 80 + 2 * 80, 0, 0)
    assert run.values > 330_000


@pytest.mark.parametrize("name", ["fp32_seed0", "fp32_seed1", "fp32q_seed0", "bf16q_seed0"])
def test_every_recorded_value_lies_within_its_proven_bound(replay: DecodeReplay, name: str) -> None:
    """Layer by layer, with the recorded decisions; every set is a correct choice of its scores."""
    run = next(run for run in replay.runs if run.name == name)
    assert run.first is None, str(run)
    assert set(run.budget_used) == set(STAGES) - set(DECISIONS)
    assert all(0 <= used <= 1 for used in run.budget_used.values())
    assert (run.sets, run.ties) == (400, 0)
    assert run.values > 330_000


def test_a_wrong_indexer_rope_is_seen_where_it_first_matters(replay: DecodeReplay) -> None:
    run = next(run for run in replay.runs if run.negative)
    assert run.first is not None
    # The first row with more visible tokens than top-k slots comes at position 16 of the prefill.
    assert (run.first.step, run.first.layer, run.first.stage) == (0, 0, "index_topk")
    assert run.first.position >= 16
    assert replay.right


def test_component_vectors(replay: DecodeReplay) -> None:
    assert {str(part) for part in replay.components if not part.right} == set()
    exact = {part.name for part in replay.components if part.tolerance == 0}
    assert {"actq.ue8m0.y", "actq.fp32scale.y", "had.fp32", "had.bf16", "flashmla656.bytes", "gate.idx"} <= exact
    assert len(replay.components) == 18


def test_fp32q_agrees_end_to_end_in_fp64_with_decisions_forced() -> None:
    """No value is forced, only decisions; fp64 sums keep clear of the e4m3 boundaries that fp32 sums hit."""
    config, _, _ = load_manifest(FOLDER)
    run = load_recording(FOLDER, config, "fp32q_seed0", "fp32_q", 0)
    weights = assemble(config, recipe_weights(config, 0), torch.float64)
    model, state = Model(config=config, weights=weights, precision=FP32_Q), None
    state = State(model, 128)
    for step in range(run.steps):
        forced = {(s, i): run.stage(step, i, s) for i in range(3) for s in ("index_topk", "gate_idx")}
        trace = Trace(forced={key: value for key, value in forced.items() if value is not None})
        ids = {b: row[slice(*run.span(step))].tolist() for b, row in enumerate(run.tokens)}
        out = (decode if step else prefill)(model, state, ids, tap=trace)
        wanted = run.stage(step, -1, "logits")
        assert wanted is not None
        torch.testing.assert_close(out.logits, wanted.double(), rtol=1e-5, atol=2e-5)


def test_an_altered_value_is_located(copied: Path) -> None:
    with np.load(copied / "fp32_seed0.npz") as archive:
        altered = archive["s5.L1.attn_out"].copy()
    altered[1, 0, 7] += 1e-3
    edit(copied, "s5.L1.attn_out", altered)
    (run,) = replay_decodes(copied).runs
    assert run.first is not None
    assert not run.right
    first = run.first
    assert (first.step, first.layer, first.stage, first.request, first.position) == (5, 1, "attn_out", 1, 32)


def test_an_altered_set_is_no_tie(copied: Path) -> None:
    with np.load(copied / "fp32_seed0.npz") as archive:
        altered = archive["s3.L2.gate_idx"].copy()
    altered[1, 0] = next(e for e in range(16) if e not in altered[1])
    edit(copied, "s3.L2.gate_idx", altered)
    (run,) = replay_decodes(copied).runs
    assert run.first is not None
    assert (run.first.step, run.first.layer, run.first.stage, run.first.request) == (3, 2, "gate_idx", 1)


def test_nan_in_a_recording_never_passes(copied: Path) -> None:
    with np.load(copied / "fp32_seed0.npz") as archive:
        altered = archive["s1.logits"].copy()
    altered[0, 3] = np.nan
    edit(copied, "s1.logits", altered)
    (run,) = replay_decodes(copied).runs
    assert run.first is not None
    assert (run.first.step, run.first.stage) == (1, "logits")


def test_malformed_folders_say_what_to_do(copied: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no manifest\.json"):
        replay_decodes(tmp_path / "nowhere")
    edit(copied, "s4.logits", None)
    with pytest.raises(ValueError, match=r"s4\.logits is missing"):
        replay_decodes(copied)
    (copied / "fp32_seed0.npz").write_bytes((FOLDER / "fp32_seed0.npz").read_bytes()[:5000])
    with pytest.raises(ValueError, match=r"not a readable \.npz"):
        replay_decodes(copied)
    np.savez(copied / "fp32_seed0.npz", tokens=np.array([{"a": 1}], dtype=object))
    with pytest.raises(ValueError, match=r"not a readable \.npz of plain arrays"):
        replay_decodes(copied)
    (copied / "fp32_seed0.npz").unlink()
    with pytest.raises(ValueError, match="is missing; the manifest lists it"):
        replay_decodes(copied)
    (copied / "manifest.json").write_text('{"config": {"dims": 3}, "weights_sha256": {}, "runs": {}}')
    with pytest.raises(ValueError, match="unknown config field 'dims'"):
        replay_decodes(copied)


def test_misshapen_and_foreign_recordings_are_refused(copied: Path) -> None:
    edit(copied, "s2.L0.attn_out", np.zeros((2, 1, 17), np.float32))
    with pytest.raises(ValueError, match=r"s2\.L0\.attn_out has \(2, 17\); expected \(2, 256\)"):
        replay_decodes(copied)
    manifest = json.loads((copied / "manifest.json").read_text())
    manifest["weights_sha256"]["0"] = "0" * 64
    (copied / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="weights_sha256 of seed 0"):
        replay_decodes(copied)


def test_component_file_without_vectors(tmp_path: Path) -> None:
    np.savez(tmp_path / "components_x.npz", other=np.zeros(3))
    with pytest.raises(ValueError, match="no known vectors"):
        replay_components(tmp_path / "components_x.npz")
    np.savez(tmp_path / "components_x.npz", **{"gate.x": np.zeros((2, 64), np.float32)})
    with pytest.raises(ValueError, match=r"gate\.w is missing"):
        replay_components(tmp_path / "components_x.npz")
