"""How emulated kernels address memory beyond the views that they are given."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kernel_worlds import RULE, admits

from dsv32_fast.kernels.emulated.memory import OutOfBoundsError, beyond_view, ranges, require_inside

pytestmark = admits(emulation=RULE)


def test_beyond_a_view_lies_the_rest_of_the_allocation():
    storage = torch.arange(24.0).view(6, 4)
    assert torch.equal(beyond_view(storage[1:3]), storage[1:])
    assert torch.equal(beyond_view(storage[1:3, :2]), storage[1:, :2])
    assert torch.equal(beyond_view(storage.flatten()[5:7]), torch.arange(5.0, 24.0))
    assert torch.equal(beyond_view(storage[0:0]), storage)
    assert beyond_view(storage).shape == (6, 4)


def test_rows_that_do_not_fit_whole_are_not_there():
    storage = torch.arange(23.0)
    view = storage[1:9].view(2, 4)
    assert torch.equal(beyond_view(view), storage[1:21].view(5, 4))


def test_writes_reach_the_allocation():
    storage = torch.zeros(4, 2)
    beyond_view(storage[:1])[3] = 1
    assert storage.tolist() == [[0, 0], [0, 0], [0, 0], [1, 1]]


def test_views_without_extent_stay_as_they_are():
    for view in (torch.zeros(3, 0), torch.zeros(1, 4).expand(5, 4)):
        assert beyond_view(view).shape == view.shape


def test_bounds():
    require_inside("x", np.array([0, 4]), 5)
    require_inside("x", np.array([], dtype=np.int64), 0)
    for bad in (-1, 5):
        with pytest.raises(OutOfBoundsError, match=f"x: access to row {bad} of 5"):
            require_inside("x", np.array([[0, bad]]), 5)


def test_ranges():
    starts, stops = np.array([5, 3, 9, 0]), np.array([7, 3, 8, 2])
    assert ranges(starts, stops).tolist() == [5, 6, 0, 1]
    assert ranges(np.array([], dtype=np.int64), np.array([], dtype=np.int64)).tolist() == []
