"""The benchmark compares equal work and returns data; how fast it is, is for `dsv32 bench` to say."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", reason="needs the oracle extra")
from dsv32_fuzz.bench import ref

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore::FutureWarning")]


def test_small_world_times_equal_results() -> None:
    (timing,) = ref.bench_ref(small_contexts=(20,), contexts=(), repeats=2, batch=2)
    assert 0 < timing.largest_error <= 1
    assert (timing.batch, timing.cached_tokens, timing.matmul_s, timing.over_matmul) == (2, 20, None, None)
    assert timing.threads == torch.get_num_threads()
    assert timing.speedup == timing.transformers_s / timing.reference_s


def test_unequal_results_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the wrong RoPE layout in the reference the benchmark refuses instead of timing other work."""
    from dsv32_ref.rope import rope_half_split

    monkeypatch.setattr("dsv32_ref.mla.rope_interleaved", rope_half_split)
    with pytest.raises(ValueError, match="times of unequal work mean nothing"):
        ref.bench_ref(small_contexts=(20,), contexts=(), repeats=1)


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="must be positive"):
        ref.bench_ref(repeats=0)


@pytest.mark.nightly
def test_true_size_layer_equals_transformers() -> None:
    timings = ref.bench_ref(small_contexts=(), contexts=(256, 4096), repeats=1)
    assert [timing.cached_tokens for timing in timings] == [256, 4096]
    assert all(0 < timing.largest_error <= 1 for timing in timings)
