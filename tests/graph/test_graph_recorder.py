"""The model captures any torch body and refuses what no graph can hold."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv32_fast.graph.arena import Arena
from dsv32_fast.graph.cuda import CudaGraphRunner
from dsv32_fast.graph.faults import FaultLog, GraphFaultError, span_of
from dsv32_fast.graph.model import ModelGraphRunner
from dsv32_fast.graph.recorder import WRITTEN, CaptureError
from dsv32_fast.graph.runner import StepCall
from dsv32_fast.kernels.mounted import EMULATION
from dsv32_fast.kernels.protocol import Kernels
from dsv32_fast.kernels.signatures import signature


def captured(body, rows: int = 4, **tensors: torch.Tensor):
    runner = ModelGraphRunner((rows,))
    call = StepCall(rows=rows, tensors=tensors)
    runner.capture(rows, body, call)
    return lambda: runner.replay(rows, call)


def network(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> None:
    """Views, in-place operations, temporaries and a constant."""
    hidden = torch.nn.functional.silu(x @ w.T)
    hidden[:, ::2] *= 2
    hidden[1:3].add_(torch.arange(hidden.shape[1]))
    best = hidden.topk(3, dim=1)
    out.copy_(best.values.softmax(1) + best.indices + torch.tensor([0.5, 1.0, 2.0]))


def test_replay_computes_on_current_contents():
    generator = torch.Generator().manual_seed(0)
    x, w, out = torch.zeros(4, 8), torch.zeros(6, 8), torch.zeros(4, 3)
    replay = captured(lambda: network(x, w, out), x=x, w=w, out=out)
    for _ in range(3):
        x.copy_(torch.randn(4, 8, generator=generator))
        w.copy_(torch.randn(6, 8, generator=generator))
        expected = torch.empty(4, 3)
        network(x, w, expected)
        replay()
        assert torch.equal(out, expected)


def test_the_body_runs_only_once():
    calls, x = [], torch.ones(4)

    def body() -> None:
        calls.append(1)
        x.mul_(2)

    replay = captured(body, x=x)
    replay()
    replay()
    assert (len(calls), x.tolist()) == (1, [4.0] * 4)


def test_memory_of_the_graph_is_uninitialised_until_the_replay():
    x, out, inner = torch.ones(4), torch.zeros(4), []

    def body() -> None:
        inner.append(x + 1)
        out.copy_(inner[0])

    replay = captured(body, x=x, out=out)
    assert inner[0].isnan().all()
    assert not out.any()
    replay()
    assert inner[0].tolist() == out.tolist() == [2.0] * 4


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x.any()),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x.__setitem__(x > 0, torch.ones(4)),
        lambda x: torch.repeat_interleave(x, x.long()),
    ],
)
def test_a_body_that_needs_a_value_on_the_host_is_refused(read):
    x = torch.ones(4)
    with pytest.raises(CaptureError, match="needs a value on the host"):
        captured(lambda: read(x), x=x)


def test_what_resembles_a_host_read_is_captured():
    x, out = torch.ones(4), torch.zeros(4)
    index = torch.tensor([3, 2, 1, 0])
    replay = captured(
        lambda: out.copy_(x[index] + torch.repeat_interleave(x[:2], index[:2] * 0 + 2, output_size=4)), out=out
    )
    x.copy_(torch.arange(4))
    replay()
    assert out.tolist() == [3.0, 2.0, 2.0, 1.0]


def test_filling_a_mask_with_one_value_is_captured():
    x = torch.zeros(4)
    replay = captured(lambda: x.__setitem__(x > 1, 9.0), x=x)
    x.copy_(torch.arange(4))
    replay()
    assert x.tolist() == [0.0, 1.0, 9.0, 9.0]


def test_a_write_to_an_unnamed_tensor_is_refused():
    x, forgotten = torch.ones(4), torch.zeros(4)
    with pytest.raises(CaptureError, match=r"writes a \[4\] tensor that the call does not name"):
        captured(lambda: forgotten.copy_(x), x=x)


def test_every_kernel_of_the_protocol_says_what_it_writes():
    kernels = {name for name in dir(Kernels) if not name.startswith("_")} - {"get_mla_metadata_info_v1"}
    assert set(WRITTEN) == kernels
    for name, written in WRITTEN.items():
        assert set(written) <= {parameter.name for parameter in signature(name)}, name


def test_a_kernel_is_one_operation():
    logits, bias = torch.zeros(4, 16), torch.arange(16.0)
    weights, ids = torch.zeros(4, 4), torch.zeros(4, 4, dtype=torch.int32)
    runner = ModelGraphRunner((4,))
    kernels = runner.recording(EMULATION)
    call = StepCall(rows=4, tensors={"weights": weights, "ids": ids})
    runner.capture(4, lambda: kernels.biased_grouped_topk(logits, bias, weights, ids, 4, 2, True), call)
    assert not ids.any()
    runner.replay(4, call)
    assert sorted(ids[0].tolist()) == [12, 13, 14, 15]
    bias.copy_(-torch.arange(16.0))
    runner.replay(4, call)
    assert sorted(ids[0].tolist()) == [0, 1, 2, 3]


def test_real_graphs_need_a_gpu():
    if torch.cuda.is_available():
        x, out = torch.ones(4, device="cuda"), torch.zeros(4, device="cuda")
        runner = CudaGraphRunner((4,))
        call = StepCall(rows=4, tensors={"x": x, "out": out})
        runner.capture(4, lambda: torch.mul(x, 2, out=out), call)
        x.fill_(5)
        runner.replay(4, call)
        assert out.tolist() == [10.0] * 4
    else:
        with pytest.raises(RuntimeError, match="torch sees no GPU"):
            CudaGraphRunner((4,))


@pytest.mark.parametrize("sizes", [(), (0, 4)])
def test_sizes_are_positive(sizes):
    with pytest.raises(ValueError, match="give at least one, all positive"):
        ModelGraphRunner(sizes)


def test_bad_calls():
    x = torch.ones(4)
    with pytest.raises(ValueError, match="'y' is not among the tensors"):
        StepCall(rows=4, tensors={"x": x}, outputs=("y",))
    with torch.inference_mode():
        born_inferring = torch.ones(4)
    with pytest.raises(ValueError, match="x was made in inference mode"):
        StepCall(rows=4, tensors={"x": born_inferring}, renewed=("x",))
    with pytest.raises(ValueError, match="size 3 is not one of the sizes"):
        ModelGraphRunner((4,)).capture(3, lambda: None, StepCall(rows=3, tensors={}))
    with pytest.raises(GraphFaultError, match="row count"):
        ModelGraphRunner((4,)).capture(4, lambda: None, StepCall(rows=3, tensors={}))


def test_span_covers_the_gaps_of_strides():
    x = torch.zeros(5, 8)
    assert span_of(x[1:3, 2:4]).start == x.data_ptr() + 4 * 10
    assert span_of(x[1:3, 2:4]).stop == x.data_ptr() + 4 * 20
    assert span_of(x[:0]).start == span_of(x[:0]).stop
    assert not span_of(x[:2]).overlaps(span_of(x[2:]))
    assert span_of(x[:3]).overlaps(span_of(x[2:]))


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 700)), max_size=30))
def test_arena_never_hands_live_memory_out(commands):
    arena, live = Arena(1 << 12), []
    for number, (allocates, value) in enumerate(commands):
        if allocates:
            try:
                tensor = arena.allocate((value,), torch.int32)
            except MemoryError:
                continue
            tensor.fill_(number)
            live.append((tensor, number))
        elif live:
            arena.free(live.pop(value % len(live))[0])
        for tensor, written in live:
            assert (tensor == written).all()
            assert arena.owner(tensor.data_ptr()) is not None


def test_arena_recycles_and_refuses():
    arena = Arena(1 << 10)
    first = arena.allocate((8,), torch.float32)
    address, owner = first.data_ptr(), arena.owner(first.data_ptr())
    arena.free(first)
    assert arena.owner(address) is None
    second = arena.allocate((4,), torch.int64)
    assert second.data_ptr() == address
    assert arena.owner(address) != owner
    arena.free(second)
    with pytest.raises(ValueError, match="no live allocation"):
        arena.free(second)
    with pytest.raises(MemoryError, match="no gap of 1280 bytes"):
        arena.allocate((1 << 10 | 1,), torch.uint8)
    with pytest.raises(ValueError, match=r"shape \[0, 3\] is empty"):
        arena.allocate((0, 3), torch.uint8)
    with pytest.raises(ValueError, match="nbytes is 0"):
        Arena(0)


def test_a_lenient_log_collects():
    log = FaultLog(strict=False)
    log.report("moved", "x", "somewhere")
    assert (log.kinds, str(log.faults[0])) == (("moved",), "moved: x: somewhere")
