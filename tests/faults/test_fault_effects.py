"""No fault is dead: each changes its seam as its story says, and leaves nothing behind."""

from __future__ import annotations

from typing import Any

import effects_of_caches
import effects_of_graphs
import effects_of_indexer
import effects_of_kernels
import effects_of_layers
import effects_of_plans
import pytest
from effect_table import EFFECTS, Observe

from dsv32_fast.options import PRESETS
from dsv32_fuzz.faults import AREAS, CATALOGUE, FAULTS, Fault, of_area
from dsv32_fuzz.faults.base import _resolve
from dsv32_fuzz.faults.selftest import PROBES, complaints

MODULES = (
    effects_of_caches,
    effects_of_graphs,
    effects_of_indexer,
    effects_of_kernels,
    effects_of_layers,
    effects_of_plans,
)
PRODUCT = [fault for fault in CATALOGUE if fault.area != "harness"]
_clean: dict[tuple[Observe, str], Any] = {}


def clean(fault: Fault) -> Any:
    """What the control shows, observed once for all faults that look at the same."""
    key = EFFECTS[fault.name].observe, fault.options
    if key not in _clean:
        _clean[key] = EFFECTS[fault.name].observe(fault.control())
    return _clean[key]


@pytest.mark.parametrize("fault", PRODUCT, ids=lambda fault: fault.name)
def test_a_fault_shows_at_its_seam(fault: Fault) -> None:
    before = clean(fault)
    with fault.inject() as target:
        faulty = EFFECTS[fault.name].observe(target)
    assert EFFECTS[fault.name].shows(before, faulty), (before, faulty)
    assert not EFFECTS[fault.name].shows(before, before)


@pytest.mark.parametrize("fault", of_area("harness"), ids=lambda fault: fault.name)
def test_a_fault_of_the_harness_makes_the_self_test_complain(fault: Fault) -> None:
    with fault.inject():
        told = [probe.name for probe, _ in complaints()]
    assert told
    assert set(told) <= {probe.name for probe in PROBES}


def test_without_a_fault_the_self_test_is_quiet() -> None:
    assert list(complaints()) == []


def test_every_effect_belongs_to_a_fault() -> None:
    assert set(EFFECTS) == {fault.name for fault in PRODUCT}


def test_names_areas_and_options_are_known() -> None:
    assert len(FAULTS) == len(CATALOGUE) >= 70
    assert {fault.area for fault in CATALOGUE} == set(AREAS)
    for fault in CATALOGUE:
        assert fault.seams, f"{fault.name} alters nothing"
        assert fault.options in PRESETS
        assert fault.story
        assert fault.reference


def test_every_patch_is_taken_back() -> None:
    patches = [patch for fault in CATALOGUE for patch in fault.patches]
    assert patches
    for patch in patches:
        before = vars(_resolve(patch.where))[patch.name]
        with patch.open():
            assert vars(_resolve(patch.where))[patch.name] is not before
        assert vars(_resolve(patch.where))[patch.name] is before


def test_a_patch_is_taken_back_after_an_error() -> None:
    fault = FAULTS["router_group_max"]
    (patch,) = fault.patches
    before = vars(_resolve(patch.where))[patch.name]
    with pytest.raises(RuntimeError, match="inside"), fault.inject():
        raise RuntimeError("inside")
    assert vars(_resolve(patch.where))[patch.name] is before


def test_an_unknown_area_is_named() -> None:
    with pytest.raises(ValueError, match="unknown area 'nowhere'"):
        of_area("nowhere")
