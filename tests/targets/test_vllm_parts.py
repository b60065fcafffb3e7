"""Parts of the vLLM target without a worker: messages, shared memory, the row-length stand-in, the comparison."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch

from dsv32_fast.batch import StepBatch
from dsv32_fuzz.oracle import planner_lens
from dsv32_fuzz.targets.corpus import PURPOSES
from dsv32_fuzz.targets.survey import Behaviour, compare
from dsv32_fuzz.targets.vllm.arena import Arena, MappedArena
from dsv32_fuzz.targets.vllm.kernels import EVERY, FIRST, SampledRowLengths, row_lengths
from dsv32_fuzz.targets.vllm.wire import pack, receive, send, unpack


def test_messages_survive_and_cut_ones_are_refused() -> None:
    stream = io.BytesIO()
    array = np.arange(6, dtype=np.int32).reshape(2, 3)
    send(stream, {"op": "x", "array": pack(array)})
    whole = stream.getvalue()
    got = receive(io.BytesIO(whole))
    assert got is not None
    assert np.array_equal(unpack(got["array"]), array)
    assert receive(io.BytesIO(b"")) is None
    for broken in (whole[:-1], whole[:5], b"Traceback (most recent call last)"):
        with pytest.raises(ValueError, match="worker's"):
            receive(io.BytesIO(broken))


def test_an_arena_shares_what_a_holder_of_the_tensor_writes() -> None:
    tensors = {"a": torch.arange(5, dtype=torch.int32), "b": torch.zeros(3, 4, dtype=torch.int64)}
    held = tensors["b"]
    arena = Arena.adopt(tensors)
    mapped = MappedArena.map(arena.describe())
    assert mapped.array("a").tolist() == [0, 1, 2, 3, 4]
    held[1, 2] = 9
    assert mapped.array("b")[1, 2] == 9
    mapped.array("a")[0] = 7
    assert tensors["a"][0] == 7
    assert arena.locate(held[1].data_ptr()) == "b"
    assert arena.locate(torch.zeros(1).data_ptr()) is None
    assert mapped.here(held.data_ptr()) == mapped.array("b").ctypes.data
    arena.close()
    with pytest.raises(ValueError, match="c is no contiguous CPU tensor"):
        Arena.adopt({"c": torch.zeros(4, 4, dtype=torch.int32).T})


def arguments(step: StepBatch, topk: int) -> tuple[Any, ...]:
    starts = torch.zeros(len(step.query_lens) + 1, dtype=torch.int32)
    torch.cumsum(torch.tensor(step.query_lens, dtype=torch.int32), 0, out=starts[1:])
    out = torch.zeros(step.num_tokens, dtype=torch.int32)
    return torch.tensor(step.seq_lens, dtype=torch.int32), starts, out, topk, 64


@pytest.mark.parametrize("purpose", PURPOSES, ids=lambda purpose: purpose.name)
def test_the_stand_in_computes_the_oracle_rows(purpose: Any) -> None:
    for step in purpose.steps:
        own = arguments(step, 2048)
        row_lengths(*own[:4])
        assert np.array_equal(own[2].numpy(), planner_lens(step, 2048))


class Kernel:
    """In a Triton kernel's place: right, or off by one from launch `wrong_from` on."""

    def __init__(self, wrong_from: int) -> None:
        self.launches, self.wrong_from = 0, wrong_from

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(seqs: torch.Tensor, starts: torch.Tensor, out: torch.Tensor, topk: int, block: int) -> None:
            self.launches += 1
            row_lengths(seqs, starts, out, topk)
            out += self.launches >= self.wrong_from

        return launch


def test_the_kernel_runs_beside_its_stand_in_and_takes_over_at_a_difference() -> None:
    step = StepBatch(query_lens=(2, 1), seq_lens=(9, 5))
    sound = SampledRowLengths(Kernel(wrong_from=10**9))
    for _ in range(2 * EVERY):
        sound[(2, 1)](*arguments(step, 16))
    assert sound.compared == sound.kernel.launches == FIRST + 2
    assert not sound.disagreement
    wrong = SampledRowLengths(Kernel(wrong_from=3))
    seen = []
    for _ in range(6):
        own = arguments(step, 16)
        wrong[(2, 1)](*own)
        seen.append(own[2].tolist())
    assert seen == [[8, 9, 5]] * 2 + [[9, 10, 6]] * 4  # what the kernel wrote, never the stand-in's rows
    assert wrong.disagreement == "row 0: the kernel writes 9, min(seq - q + j + 1, topk) is 8"
    assert wrong.kernel.launches == 6


def test_comparison_names_each_change_once_with_its_steps() -> None:
    def seen(launched: bool, cap: str) -> Behaviour:
        return Behaviour(
            launched=launched, persistent=True, rows=2, scalars={"cap": cap}, kv_len_total=7, events=("sync",)
        )

    ours = {"x": [seen(True, "1"), seen(True, "1")], "y": [seen(True, "1")]}
    theirs = {"x": [seen(True, "1"), seen(False, "1")], "y": [seen(False, "2")]}
    assert compare(ours, ours) == []
    assert compare(ours, theirs) == [
        ("cap 1 -> 2", ["y, step 0"]),
        ("launched True -> False", ["x, step 1", "y, step 0"]),
    ]
