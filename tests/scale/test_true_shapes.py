"""One decode step through all 61 layers at the true shapes, in a process whose memory is counted.

Weights are windows of one pool (`dsv32_fast.scale`), the vocabulary is cut to 1024, cached tokens are random. One
request is longer than topk, so that the indexer really selects.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from one_step import VOCABULARY

from dsv32_fast.kernels.mounted import EMULATION
from dsv32_fast.options import PRESETS
from dsv32_fast.packing import Moe
from dsv32_fast.path import STAGES, PathConfig
from dsv32_fast.scale import parameters, pooled_path, pooled_weights, stored_bytes, tensors
from dsv32_ref.config import Config
from dsv32_ref.weights import weight_shapes

MEMORY = 12 * 2**30
"""Little more than half of what the routed experts of one layer take in bf16 (22.5 GB): no layer was ever copied."""
ALLOCATOR = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(64 << 30)}
"""glibc keeps the large temporaries of fp32 weights instead of mapping each anew; it makes the step faster, no more."""
OF_MIXTURES = {"gate_logits", "gate_idx", "gate_w"}
ONCE = {"final_norm", "logits"}


def one_step(**case: Any) -> dict[str, Any]:
    script = Path(__file__).with_name("one_step.py")
    root = script.parents[2]
    environment = os.environ | ALLOCATOR | {"OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(root), str(root / "fuzz"), str(root / "reports")])
    command = [sys.executable, str(script), json.dumps(case)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    counted: dict[str, Any] = json.loads(done.stdout)
    return counted


def check(counted: dict[str, Any], case: dict[str, Any]) -> None:
    config = Config(vocab_size=VOCABULARY, n_heads=case["heads"], n_layers=case["layers"], n_dense_layers=case["dense"])
    mixtures = config.n_layers - config.n_dense_layers
    visits = {stage: mixtures if stage in OF_MIXTURES else 1 if stage in ONCE else config.n_layers for stage in STAGES}
    assert counted["wrong"] == []
    assert dict(zip(STAGES, counted["visits"], strict=True)) == visits
    assert counted["router_shapes"] == [[len(case["lengths"]), 256]]
    assert 0 < counted["budget"] <= 1
    assert counted["casts"] == (mixtures if PRESETS[case["options"]].logits == "fp32" else 0)
    assert counted["plan_launches"] == 1
    assert counted["parameters"] == sum(math.prod(shape) for shape in weight_shapes(config).values())
    assert counted["stored_bytes"] < counted["peak_bytes"] < MEMORY


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("options", "heads", "casts"), [("pr42982", 128, 0), ("baseline", 16, 58)])
def test_all_61_layers(options: str, heads: int, casts: int) -> None:
    """128 heads, or the 16 of one rank of eight; baseline has one request, since every row costs eight experts."""
    lengths = [2050, 5] if heads == 128 else [2050]
    case = {"options": options, "heads": heads, "layers": 61, "dense": 3, "fp8": False, "lengths": lengths}
    counted = one_step(**case)
    check(counted, case)
    assert counted["casts"] == casts
    assert counted["visits"][STAGES.index("gate_logits")] == 58
    assert counted["experts"] > 128, "the routers of 58 layers keep to few experts: the pool is degenerate"


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("options", ["baseline", "vllm026"])
def test_two_layers_in_block_fp8(options: str) -> None:
    """A dense layer and a mixture with the types of the published checkpoint."""
    case = {"options": options, "heads": 16, "layers": 2, "dense": 1, "fp8": True, "lengths": [2050, 5]}
    check(one_step(**case), case)


SMALL = Config(
    vocab_size=64,
    dim=256,
    inter_dim=256,
    moe_inter_dim=128,
    n_layers=3,
    n_dense_layers=1,
    n_heads=16,
    q_lora_rank=128,
    index_n_heads=4,
)


@pytest.mark.parametrize("fp8", [False, True])
def test_no_two_matrices_are_equal_and_almost_all_storage_is_shared(fp8: bool) -> None:
    packed = pooled_weights(SMALL, PRESETS["pr42982"], fp8=fp8)
    assert parameters(packed) == sum(math.prod(shape) for shape in weight_shapes(SMALL).values())
    starts = [value.data_ptr() for name, value in tensors(packed) if value.ndim > 1 and "scale" not in name]
    assert len(set(starts)) == len(starts)
    for layer in packed.layers[1:]:
        assert isinstance(layer.ffn, Moe)
        experts = layer.ffn.experts
        assert (experts.w1_scale is not None) == fp8
        for stack in (experts.w1, experts.w2):
            rows = stack.contiguous().view(torch.uint8).flatten(0, 1)
            assert len(torch.unique(rows, dim=0)) == len(rows), "two experts have a row in common"
        assert layer.ffn.gate.bias.dtype == torch.bfloat16
    whole = pooled_weights(SMALL.replace(n_layers=6), PRESETS["pr42982"], fp8=fp8)
    assert stored_bytes(whole) < stored_bytes(packed) + 2**20, "more layers must not need more pool"


def test_pooled_weights_stay_on_the_cpu() -> None:
    with pytest.raises(ValueError, match="on the cpu, not"):
        pooled_path(SMALL, PRESETS["baseline"], EMULATION, PathConfig(activations=torch.float32))


def test_too_many_experts_are_refused() -> None:
    with pytest.raises(ValueError, match="n_routed_experts 512 is above 256"):
        pooled_weights(SMALL.replace(n_routed_experts=512), PRESETS["baseline"])
