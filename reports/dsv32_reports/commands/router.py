"""What bf16 does to the routers of a user's checkpoint."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated

import msgspec
import torch
import typer
from rich.table import Table

from dsv32_fuzz.router_study.gates import Activations, Gate, gate_layers, gates, synthetic
from dsv32_fuzz.router_study.ranges import tensor_files
from dsv32_fuzz.router_study.study import LayerReport, Rate, study_layer
from dsv32_ref.config import Config
from dsv32_reports.commands.common import Json, command, show

SYNTHETIC = "synthetic: independent standard normal channels in bf16; record real ones with docs/record_gate_inputs.py"


@command
def router(
    checkpoint: Annotated[Path, typer.Option(help="Folder of the safetensors checkpoint.", show_default=False)],
    activations: Annotated[
        Path | None, typer.Option(help="Recorded gate inputs, layers.N.gate_input [T, M]; see docs/targets.md.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=4, help="Tokens per layer: half measure, half predict.")] = 1024,
    layers: Annotated[str | None, typer.Option(help="Layers, separated by commas; default all with a gate.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of synthetic inputs and of the prediction.")] = 0,
    json: Json = False,
) -> int:
    """Measure what rounding router logits and bias to bf16 changes on a checkpoint, layer by layer.

    Reads only gate weights and correction biases. A flip is a token whose set of experts changes. Exit 1 if the bias of
    a layer collapses: bf16 leaves at most half of its distinct values.
    """
    torch.set_num_threads(1)
    files = tensor_files(checkpoint)
    chosen = _chosen(layers, gate_layers(files))
    config = _config(checkpoint)
    recorded = Activations(activations) if activations else None
    reports: list[LayerReport] = []
    for gate in gates(files, chosen):
        x_TM = _inputs(gate, recorded, tokens, seed)
        reports.append(study_layer(gate, x_TM, config, seed=seed))
    inputs = f"recorded: {activations}" if activations else SYNTHETIC
    worst = max(reports, key=lambda report: report.flips["both"].rate)
    if json:
        print(msgspec.json.encode({"inputs": inputs, "worst_layer": worst.layer, "layers": reports}).decode())
    else:
        _show(reports, worst, inputs)
    return int(any(report.collapsed for report in reports))


def _chosen(text: str | None, available: list[int]) -> list[int]:
    if text is None:
        return available
    wanted = [int(part) if part.strip().isdecimal() else -1 for part in text.split(",")]
    if not set(wanted) <= set(available):
        raise ValueError(f"--layers is {text!r}; layers with a gate are {available[0]} to {available[-1]}")
    return wanted


def _inputs(gate: Gate, recorded: Activations | None, tokens: int, seed: int) -> torch.Tensor:
    width = gate.weight_EM.shape[1]
    if recorded is None:
        return synthetic(gate.layer, width, tokens, seed)
    return recorded.of(gate.layer, width, tokens)


def _config(folder: Path) -> Config:
    """The routing rule of config.json, or DeepSeek-V3.2's where the folder has none."""
    path = folder / "config.json"
    if not path.is_file():
        return Config()
    try:
        return Config.from_hf(json_module.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no config of the model ({error}); download it again") from None


def _show(reports: list[LayerReport], worst: LayerReport, inputs: str) -> None:
    table = Table("layer", "bias", "distinct", "in bf16", "flips: logits", "bias", "both", "margin", "load shift")
    for report in reports:
        band = f"{report.bias_low:.4g} .. {report.bias_high:.4g}"
        rates = [_rate(report.flips[name]) for name in ("logits", "bias", "both")]
        distinct = (str(report.distinct), f"{report.distinct_bf16}{' COLLAPSED' if report.collapsed else ''}")
        table.add_row(
            str(report.layer), band, *distinct, *rates, f"{report.margin_median:.2g}", f"{report.load_shift:.2%}"
        )
    show(table)
    print(f"inputs {inputs}")
    print("flips: measured share of tokens [95 % interval], then what rounding that acted like noise would give")
    both = worst.flips["both"]
    print(f"worst layer {worst.layer}: {both.flipped} of {both.tokens} tokens change experts, {_rate(both)}")
    collapsed = [str(report.layer) for report in reports if report.collapsed]
    if collapsed:
        print(f"bias collapsed in layers {', '.join(collapsed)}: keep it in fp32")


def _rate(rate: Rate) -> str:
    return f"{rate.rate:.2%} [{rate.low:.2%}, {rate.high:.2%}], noise {rate.predicted:.2%}"
