"""Where a request's tokens lie must not matter, also beyond 2^31 elements; one kernel with int32 offsets is found.

The same step runs with pages at the start of small caches and with pages around and beyond the wraps of a 32-bit offset
(`dsv32_fast.offsets`), in caches of 9.4e9 latent elements and 2.1e9 index bytes. Every stage must have the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from far_world import CACHE_KERNELS, addressed, far_array
from torch import Tensor

from dsv32_fast import attention
from dsv32_fast.kernels.mounted import EMULATION
from dsv32_fast.kernels.protocol import Kernels
from dsv32_fast.metadata import SparseMlaMetadata
from dsv32_fast.offsets import INT32_MAX, layouts
from dsv32_fast.options import PRESETS
from dsv32_fast.path import DecodePath, PathConfig
from dsv32_fast.plan import PlanBuffers
from dsv32_fast.state import CacheState
from dsv32_ref.config import Config
from dsv32_ref.weights import assemble, synthetic

CONFIG = Config(
    vocab_size=64,
    dim=128,
    inter_dim=128,
    n_layers=1,
    n_dense_layers=1,
    n_heads=16,
    q_lora_rank=64,
    qk_nope_head_dim=32,
    v_head_dim=32,
    index_n_heads=4,
    index_topk=128,
)
"""Latents of 512 + 64 and index keys of 128, hence the true strides; the rest is small."""
PAGE = 64
LATENT, INDEX = 58254, 254200
"""The pages in which latent elements and index bytes pass 2^31."""
FAR = [LATENT - 1, LATENT, LATENT + 1, INDEX, INDEX + 1, INDEX + 2]
Stages = list[tuple[str, Tensor]]


def path(kernels: Kernels) -> DecodePath:
    weights = assemble(CONFIG, synthetic(CONFIG, 0))
    sizes = PathConfig(max_num_batched_tokens=320, page_size=PAGE)
    return DecodePath(CONFIG, weights, PRESETS["pr47766"], kernels, sizes)


def run(made: DecodePath, state: CacheState) -> Stages:
    """Two prompts of 150 tokens, three pages each; then one token and four; every stage of both steps."""
    seen: Stages = []

    def tap(stage: str, _layer: int, value: Tensor) -> Tensor:
        seen.append((stage, value.clone()))
        return value

    for tokens in ({0: [r % 61 for r in range(150)], 1: [r % 59 for r in range(150)]}, {0: [1], 1: [2, 3, 4, 5]}):
        made.decode(state, tokens, tap=tap, all_logits=True)
    return seen


def near(made: DecodePath) -> CacheState:
    state = made.new_state(PAGE * len(FAR))
    state.free = list(reversed(range(len(FAR))))
    return state


@pytest.fixture
def far(tmp_path: Path) -> Iterator[CacheState]:
    """Caches up to page FAR[-1]; request 0 gets the first three pages of FAR, request 1 the others."""
    state = path(EMULATION).new_state(PAGE)
    shape = (FAR[-1] + 1, PAGE)
    state.latent = [far_array(tmp_path, "latent", (*shape, CONFIG.latent_dim), torch.bfloat16)]
    state.index = [far_array(tmp_path, "index", (*shape, CONFIG.index_head_dim + 4), torch.uint8)]
    state.free = list(reversed(FAR))
    yield state
    for name in ("latent", "index"):
        (tmp_path / name).unlink()


def first_difference(a: Stages, b: Stages) -> str | None:
    assert [stage for stage, _ in a] == [stage for stage, _ in b]
    pairs = ((stage, x, y) for (stage, x), (_, y) in zip(a, b, strict=True))
    return next((stage for stage, x, y in pairs if not torch.equal(x, y)), None)


@pytest.fixture(scope="module")
def expected() -> Stages:
    made = path(EMULATION)
    stages = run(made, near(made))
    assert all(value.isfinite().all() for stage, value in stages if stage != "index_score")
    return stages


def test_the_pages_lie_around_the_wraps() -> None:
    latent, page = (next(x for x in layouts(CONFIG) if x.name == name) for name in ("latent bf16", "indexer page"))
    assert FAR[0] * PAGE < latent.first_touched[0] // PAGE * PAGE == LATENT * PAGE
    assert page.first_touched[0] == INDEX


def test_far_pages_change_no_bit(far: CacheState, expected: Stages) -> None:
    assert first_difference(run(path(EMULATION), far), expected) is None
    assert sorted(far.pages[0] + far.pages[1]) == FAR


@pytest.mark.parametrize("name", CACHE_KERNELS)
def test_a_kernel_that_addresses_in_int64_changes_no_bit(name: str, far: CacheState, expected: Stages) -> None:
    assert first_difference(run(path(addressed(name, torch.int64)), far), expected) is None


@pytest.mark.parametrize("name", CACHE_KERNELS)
def test_int32_offsets_pass_near_and_are_found_far(name: str, far: CacheState, expected: Stages) -> None:
    made = path(addressed(name, torch.int32))
    assert first_difference(run(made, near(made)), expected) is None, "a small cache cannot show the defect"
    assert first_difference(run(path(addressed(name, torch.int32)), far), expected) is not None


WIDTH, ROWS, SHOWN = 1 << 20, 2051, 300
K = 128


def selected(kernels: Kernels, logits: Tensor) -> Tensor:
    found = torch.full((ROWS, K), -2, dtype=torch.int32)
    lengths = torch.full((ROWS,), SHOWN, dtype=torch.int32)
    kernels.top_k_per_row_decode(logits, 1, lengths, found, ROWS, logits.stride(0), 1, k=K)
    return found


def test_logits_of_a_million_columns(tmp_path: Path) -> None:
    """Row 2048 starts at element 2^31."""
    near_RS = torch.randn(ROWS, SHOWN, generator=torch.Generator().manual_seed(0))
    far_RS = far_array(tmp_path, "logits", (ROWS, WIDTH), torch.float32)
    far_RS[:, :SHOWN] = near_RS
    wanted = selected(EMULATION, near_RS)
    assert torch.equal(selected(EMULATION, far_RS), wanted)
    assert torch.equal(selected(addressed("top_k_per_row_decode", torch.int64), far_RS), wanted)
    wrong = (selected(addressed("top_k_per_row_decode", torch.int32), far_RS) != wanted).any(1)
    assert wrong.nonzero().flatten().tolist() == [2048, 2049, 2050]
    (tmp_path / "logits").unlink()


def test_a_gather_list_up_to_the_last_int32_entry(tmp_path: Path) -> None:
    """Entries just below 2^31, which name slots just below 2^31; the list ends where a row pointer can still say so."""
    page = INT32_MAX // PAGE
    indptr = torch.tensor([INT32_MAX - 192, INT32_MAX - 64, INT32_MAX], dtype=torch.int32)
    indices = far_array(tmp_path, "indices", (INT32_MAX + 1,), torch.int32)
    metadata = SparseMlaMetadata(
        num_tokens=2,
        max_query_len=1,
        req_id_per_token_T=torch.tensor([0, 1], dtype=torch.int32),
        qo_indptr_T1=torch.arange(3, dtype=torch.int32),
        paged_kv_indptr_T1=indptr,
        paged_kv_last_page_len_T=torch.ones(2, dtype=torch.int32),
        paged_kv_indices=indices,
        plan=PlanBuffers(*[torch.empty(0)] * 6),
    )
    topk_TK = torch.stack([torch.arange(K), torch.arange(K)]).int()
    table = torch.tensor([[page - 1, page], [page, page - 1]], dtype=torch.int32)
    attention.fill_gather_list(topk_TK, metadata, table, PAGE)
    first, last = (page - 1) * PAGE, page * PAGE
    assert indices[-193:-65].tolist() == list(range(first, first + 128))
    assert indices[-65:-1].tolist() == list(range(last, last + 64))
    assert not indices[-4096:-193].any()
    assert int(indices[-1]) == 0
    (tmp_path / "indices").unlink()
