"""The table of offsets: its figures, and that the path's own tensors and address functions agree with it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dsv32_fast.kernels.emulated.cache import _planes
from dsv32_fast.offsets import INT32_MAX, Layout, as_int32, layouts, table
from dsv32_fast.state import CacheState
from dsv32_ref.cache import CacheFormat, Planes
from dsv32_ref.config import Config

CONFIG = Config()
PAGE = 64
FOUND = layouts(CONFIG, page_size=PAGE)
PROBES = (0, 1, 3_273_603, 3_273_604, 3_728_270, 3_728_271, 16_268_816, 2**31 - 1)
"""Slots: small ones, both sides of each wrap, and the last one that an int32 list can name."""


def named(name: str, unit: str = "element") -> Layout:
    (layout,) = [x for x in FOUND if (x.name, x.unit) == (name, unit)]
    return layout


def test_first_wraps() -> None:
    """Arithmetic of the public reports: 3277 blocks of 1280 x 512 wrap and 3276 do not; 2048 rows of 2^20 logits."""
    assert [(x.name, x.unit, x.first_wrap) for x in FOUND] == [
        ("latent bf16", "element", 3_728_271),
        ("latent bf16", "byte", 1_864_136),
        ("latent fp8 record", "byte", 3_273_604),
        ("indexer key record", "byte", 16_268_816),
        ("indexer page", "byte", 254_201),
        ("kv block", "element", 3277),
        ("paged_kv_indices", "element", 1_048_576),
        ("indexer logits", "element", 2048),
    ]


@pytest.mark.parametrize("layout", FOUND, ids=lambda x: f"{x.name} {x.unit}")
def test_numpy_wraps_where_the_table_says(layout: Layout) -> None:
    with np.errstate(over="ignore"):
        for index in (layout.first_wrap - 1, layout.first_wrap):
            product = int((np.array([index], np.int32) * np.int32(layout.stride))[0])
            assert product == as_int32(layout.offset(index))
            assert (product == layout.offset(index)) == (index < layout.first_wrap)
    record, lane = layout.first_touched
    assert layout.offset(record, lane) == INT32_MAX + 1
    assert as_int32(layout.offset(record, lane)) == -(2**31)
    assert 0 <= lane < layout.stride


def test_an_empty_record_is_refused() -> None:
    with pytest.raises(ValueError, match="stride 0 of logits must be positive"):
        Layout(name="logits", index="row", stride=0)


def test_the_table_has_a_line_per_layout() -> None:
    assert len(table(FOUND).splitlines()) == len(FOUND)
    assert "slot 3728271 wraps; first element: slot 3728270 + 128" in table(FOUND)


def test_cache_tensors_of_all_layers_lie_as_the_table_says() -> None:
    """17 million slots in 61 layers, on the meta device: shapes and strides without memory."""
    state = CacheState(CONFIG, 17_000_000, PAGE, torch.device("meta"))
    assert (len(state.latent), len(state.index)) == (CONFIG.n_layers, CONFIG.n_layers)
    keys = PAGE * CONFIG.index_head_dim
    for latent, index in zip(state.latent, state.index, strict=True):
        keys_PX, scales_PSQ = _planes(index, CONFIG.index_head_dim, 1)
        for slot in PROBES[:-1]:
            page, within = divmod(slot, PAGE)
            assert latent[page, within].storage_offset() == named("latent bf16").offset(slot)
            kernel_view = latent.view(-1, 1, 1, CONFIG.latent_dim)  # what the decode kernel is given
            assert kernel_view[slot].storage_offset() == named("latent bf16").offset(slot)
            start = named("indexer page", "byte").offset(page)
            assert keys_PX[page].storage_offset() == start
            assert 4 * scales_PSQ[page, within].storage_offset() == start + keys + 4 * within


@pytest.mark.parametrize(("widths", "name"), [((512, 16, 128), "latent fp8 record"), ((128, 4), "indexer key record")])
@pytest.mark.parametrize("planar", [False, True])
def test_the_reference_addresses_bytes_in_64_bits(widths: tuple[int, ...], name: str, planar: bool) -> None:
    planes = Planes(PAGE, widths, CacheFormat(page_size=PAGE), planar=planar)
    layout = named(name, "byte")
    before = 0
    for part, width in enumerate(widths):
        found = planes._addresses(torch.tensor(PROBES), part)
        for row, slot in zip(found.tolist(), PROBES, strict=True):
            page, within = divmod(slot, PAGE)
            start = layout.offset(slot, before)
            if planar:
                start = layout.offset(page * PAGE) + PAGE * before + within * width
            assert row == list(range(start, start + width))
        before += width


def test_slots_of_a_request_on_far_pages() -> None:
    state = CacheState(CONFIG.replace(n_layers=1), 1, PAGE, torch.device("meta"))
    pages = [slot // PAGE for slot in PROBES] + [2**31]
    state.pages[0], state.tokens[0] = pages, [0] * (PAGE * len(pages))
    assert state.slots(0).tolist() == [page * PAGE + within for page in pages for within in range(PAGE)]
