"""What bf16 does to a checkpoint's routers: bias collapse, flip rates against brute force, and what is read."""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from dsv32_fuzz.router_study.gates import Gate, synthetic
from dsv32_fuzz.router_study.study import bf16_step, collapsed, margins, study_layer
from dsv32_ref.config import Config
from dsv32_ref.router import choose_experts
from dsv32_reports.cli import app

WIDTH = 64
CONFIG = Config()


def band() -> torch.Tensor:
    """256 values in the band that sglang #37133 reports, in the order of a permutation."""
    order = torch.randperm(256, generator=torch.Generator().manual_seed(1))
    return torch.linspace(6.817, 7.063, 256)[order]


def gate(bias_E: torch.Tensor, layer: int = 3) -> Gate:
    weight = torch.randn(256, WIDTH, generator=torch.Generator().manual_seed(layer)) / WIDTH**0.5
    return Gate(layer, weight.to(torch.bfloat16), bias_E)


def write_checkpoint(folder: Path, biases: dict[int, torch.Tensor]) -> None:
    tensors = {}
    for layer, bias_E in biases.items():
        tensors[f"model.layers.{layer}.mlp.gate.weight"] = gate(bias_E, layer).weight_EM
        tensors[f"model.layers.{layer}.mlp.gate.e_score_correction_bias"] = bias_E.contiguous()
    save_file(tensors, folder / "model.safetensors")


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["router", *arguments])
    return result.exit_code, result.output


def test_the_published_bias_band_collapses_and_choices_flip() -> None:
    report = study_layer(gate(band()), synthetic(3, WIDTH, 512, 0), CONFIG, seed=0)
    assert report.distinct == 256
    assert report.distinct_bf16 in (8, 9)  # a step of 2^-5 in a band of 0.246
    assert report.collapsed
    assert report.bf16_step == 2**-5
    both = report.flips["both"]
    assert both.low <= both.rate <= both.high
    # Adding a constant to every bias changes no choice, so what the same band costs near zero is the fair comparison.
    near_zero = study_layer(gate(band() - 6.817), synthetic(3, WIDTH, 512, 0), CONFIG, seed=0)
    assert not near_zero.collapsed
    assert report.flips["bias"].low > near_zero.flips["bias"].high


@pytest.mark.parametrize("shift", [0.0, 0.25])
def test_a_bias_that_bf16_holds_exactly_neither_collapses_nor_flips(shift: float) -> None:
    bias_E = torch.arange(256) % 64 / 128 + shift  # multiples of 2^-7 below 1
    assert torch.equal(bias_E, bias_E.bfloat16().float())
    report = study_layer(gate(bias_E), synthetic(3, WIDTH, 256, 0), CONFIG, seed=0)
    assert not report.collapsed
    assert report.flips["bias"].flipped == 0
    assert report.flips["bias"].high < 0.03  # 0 of 128: 1 - 0.025^(1/128) = 0.0284


def test_flips_are_those_of_the_reference_router_token_by_token() -> None:
    own, x_TM = gate(band()), synthetic(3, WIDTH, 64, 5)
    report = study_layer(own, x_TM, CONFIG, seed=0)
    logits_TE = (x_TM.float() @ own.weight_EM.float().T)[:32]
    rounded = {
        "logits": (logits_TE.bfloat16().float(), own.bias_E),
        "bias": (logits_TE, own.bias_E.bfloat16().float()),
        "both": (logits_TE.bfloat16().float(), own.bias_E.bfloat16().float()),
    }
    ideal = choose_experts(logits_TE, own.bias_E, CONFIG).tolist()
    for name, (logits, bias) in rounded.items():
        other = choose_experts(logits, bias, CONFIG).tolist()
        assert report.flips[name].flipped == sum(set(a) != set(b) for a, b in zip(ideal, other, strict=True))


def test_no_token_flips_that_moves_less_than_its_margin() -> None:
    own, x_TM = gate(band()), synthetic(3, WIDTH, 64, 6)
    logits_TE = x_TM.float() @ own.weight_EM.float().T
    margin_T = margins(logits_TE, own.bias_E, CONFIG)
    before = choose_experts(logits_TE, own.bias_E, CONFIG)
    generator = torch.Generator().manual_seed(0)
    for token in range(64):
        move_E = (torch.rand(256, generator=generator) * 2 - 1) * margin_T[token] * 0.9
        after = choose_experts(logits_TE[token : token + 1], own.bias_E + move_E, CONFIG)
        assert set(after[0].tolist()) == set(before[token].tolist())


def test_bf16_steps_and_collapse_of_simple_values() -> None:
    assert [bf16_step(v) for v in (1.0, 1.99, 2.0, 7.0, 0.5)] == [2**-7, 2**-7, 2**-6, 2**-5, 2**-8]
    assert not collapsed(torch.zeros(256))
    assert not collapsed(torch.tensor([1.0, 1.5]))
    assert not collapsed(torch.tensor([1.0, 1.001, 1.5, 1.75]))  # three of four are left
    assert collapsed(torch.tensor([7.0, 7.001, 7.002]))


def test_the_command_names_the_collapsed_layer_and_the_worst_one(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {3: torch.arange(256) % 64 / 128, 4: band()})
    code, output = run("--checkpoint", str(tmp_path), "--tokens", "64", "--json")
    told = json.loads(output)
    assert code == 1
    assert told["worst_layer"] == 4
    assert [layer["collapsed"] for layer in told["layers"]] == [False, True]
    code, output = run("--checkpoint", str(tmp_path), "--tokens", "64", "--layers", "3")
    assert code == 0
    assert "worst layer 3" in output
    assert "synthetic" in output


def test_recorded_activations_are_used(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {3: band()})
    recorded = tmp_path / "recorded" / "inputs.safetensors"
    recorded.parent.mkdir()
    one_token = synthetic(3, WIDTH, 1, 9).repeat(40, 1).contiguous()
    save_file({"layers.3.gate_input": one_token}, recorded)
    code, output = run("--checkpoint", str(tmp_path), "--activations", str(recorded), "--json")
    both = json.loads(output)["layers"][0]["flips"]["both"]
    assert code == 1
    assert both["tokens"] == 20
    assert both["flipped"] in (0, 20)  # every token is the same one


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--layers", "9"], "layers with a gate"),
        (["--activations", "absent.safetensors"], "not a readable safetensors file"),
    ],
)
def test_bad_input_is_told_in_one_line(tmp_path: Path, arguments: list[str], told: str) -> None:
    write_checkpoint(tmp_path, {3: band()})
    result = CliRunner().invoke(app, ["router", "--checkpoint", str(tmp_path), *arguments])
    assert result.exit_code == 2
    assert told in result.output
    assert result.output.strip().count("\n") == 0


def test_a_gate_with_nan_is_refused(tmp_path: Path) -> None:
    bias_E = band()
    bias_E[7] = torch.nan
    write_checkpoint(tmp_path, {3: bias_E})
    result = CliRunner().invoke(app, ["router", "--checkpoint", str(tmp_path)])
    assert result.exit_code == 2
    assert "layers.3.mlp.gate.e_score_correction_bias" in result.output


def write_huge(path: Path, gigabytes: int) -> None:
    """A valid safetensors file whose first tensor is a hole of the file system."""
    own, hole = gate(band()), gigabytes * 2**30
    parts = {
        "model.layers.3.mlp.gate.weight": ("BF16", own.weight_EM.view(torch.int16).numpy().tobytes(), [256, WIDTH]),
        "model.layers.3.mlp.gate.e_score_correction_bias": ("F32", own.bias_E.numpy().tobytes(), [256]),
    }
    header: dict[str, object] = {
        "model.embed_tokens.weight": {"dtype": "U8", "shape": [hole], "data_offsets": [0, hole]}
    }
    end = hole
    for name, (dtype, data, shape) in parts.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + len(data)]}
        end += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.seek(hole, 1)
        file.write(b"".join(data for _, data, _ in parts.values()))


def run_router(folder: Path, *options: str) -> tuple[subprocess.CompletedProcess[str], int]:
    """`dsv32 router` in a process of its own, and its peak memory in kB."""
    command = (
        "import atexit, sys\n"
        "peak = lambda: next(line for line in open('/proc/self/status') if line.startswith('VmHWM'))\n"
        "atexit.register(lambda: print(peak(), file=sys.stderr))\n"
        "from dsv32_reports.cli import app; app()"
    )
    arguments = [sys.executable, "-c", command, "router", "--checkpoint", str(folder), *options]
    environment = {**os.environ, "COLUMNS": "120"}
    done = subprocess.run(arguments, capture_output=True, text=True, check=False, env=environment)
    # Not ru_maxrss: that starts from what the parent held when it forked.
    peak = re.search(r"VmHWM:\s+(\d+) kB", done.stderr)
    assert peak is not None, done.stderr
    return done, int(peak[1])


def test_a_checkpoint_of_100_gigabytes_is_read_in_little_memory(tmp_path: Path) -> None:
    write_huge(tmp_path / "model.safetensors", 100)
    done, peak = run_router(tmp_path, "--tokens", "64", "--json")
    assert done.returncode == 1, done.stderr
    assert json.loads(done.stdout)["layers"][0]["collapsed"]
    assert peak < 2 * 2**20
