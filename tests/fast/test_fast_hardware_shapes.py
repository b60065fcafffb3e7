"""The decode step at shapes that real kernels admit: 16 heads of 512 + 64, topk 128, pages of 64, the real router.

Runs on the emulation anywhere, and on the installed AITER where there is one, with the same bounds.
"""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest
import torch
from fast_worlds import ADMITTED, Event, path, record, run_reference
from test_fast_stages import assert_choices_legal, assert_within_bounds

from dsv32_fast.kernels.aiter import AiterUnavailableError, load
from dsv32_fast.kernels.mounted import EMULATION
from dsv32_fast.kernels.protocol import Kernels
from dsv32_fast.kernels.selection import current
from dsv32_fast.options import PRESETS
from dsv32_fast.path import PathConfig

SIZES = PathConfig(max_num_batched_tokens=256)


def events() -> list[Event]:
    """One request crosses topk with four tokens at a time, one is long, one short; 24 rows, so the plan is used."""
    generator = torch.Generator().manual_seed(0)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, ADMITTED.vocab_size, (count,), generator=generator).tolist())

    prompts = Event(tokens={0: ids(120), 1: ids(130), 2: ids(3)})
    steps = [Event(tokens={0: ids(4), 1: ids(4), 2: ids(1)}, padded_rows=24) for _ in range(5)]
    return [prompts, *steps]


def _kernels(name: str) -> tuple[Kernels, PathConfig]:
    if name == "emulated":
        return EMULATION, SIZES
    if current().title.startswith("aiter (the mounted"):
        pytest.skip("left out by the kernels: asks for the installed AITER")
    try:
        kernels = load()
    except AiterUnavailableError as error:
        pytest.skip(str(error))
    shuffle = importlib.import_module("aiter.ops.shuffle").shuffle_weight
    return kernels, replace(SIZES, device="cuda", shuffle=shuffle)


@pytest.mark.nightly
@pytest.mark.parametrize("options", ["baseline", "pr47766", "vllm026"])
@pytest.mark.parametrize("name", ["emulated", "installed"])
def test_every_stage_is_within_its_bound(name: str, options: str) -> None:
    kernels, sizes = _kernels(name)
    steps = events()
    rec = record(path(PRESETS[options], kernels, ADMITTED, sizes), steps, run_reference(steps, ADMITTED))
    assert_within_bounds(rec)
    assert_choices_legal(rec)
