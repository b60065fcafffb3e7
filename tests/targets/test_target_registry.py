"""Targets by name, and the documented example as a target that another package registers."""

from __future__ import annotations

import importlib.util
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest

from dsv32_fuzz.checks import run_case
from dsv32_fuzz.checks.catalogue import STEP_CHECKS
from dsv32_fuzz.targets import registry
from dsv32_fuzz.targets.corpus import cases
from dsv32_fuzz.verdict import Status

EXAMPLE = Path(__file__).parents[2] / "docs" / "example_target.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("example_target", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules["example_target"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_documented_example_opens_by_its_entry_point_and_passes(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = metadata.EntryPoint("tiny", "example_target:open_tiny", registry.GROUP)
    monkeypatch.setattr(registry, "registered", lambda: [entry])
    assert registry.names() == ("in-tree", "vllm", "tiny")
    target = registry.open_target("tiny")
    statuses = {v.status for _, case in cases(target) for v in run_case(case, target, STEP_CHECKS)}
    assert statuses == {Status.PASSED, Status.SKIPPED, Status.MISTRUSTED}  # no cache; some runs never shrink
    with pytest.raises(ValueError, match="target tiny takes no path"):
        registry.open_target("tiny", path="x")
    with pytest.raises(ValueError, match="the options of tiny are what its code does"):
        registry.open_target("tiny", "pr42982")


def test_a_defect_of_the_example_is_seen(example: ModuleType) -> None:
    class Late(example.TinyEngine):  # type: ignore[name-defined, misc]
        def step(self, step):  # type: ignore[no-untyped-def]
            lens_T = super().step(step)
            self.indptr_N1[1] += 1
            return lens_T

    target = example.TinyTarget()
    session = example.TinySession(Late(cases(target)[0][1].dims, 0))
    object.__setattr__(target, "open", lambda _dims, **_: session)
    (verdict,) = run_case(cases(target)[0][1], target, [c for c in STEP_CHECKS if c.name == "step_metadata"])
    assert verdict.status is Status.FAILED
    assert "paged_kv_indptr[1]" in verdict.summary


def test_the_in_tree_path_takes_options() -> None:
    assert registry.open_target("in-tree", "pr42982", ("clear=full",)).options is not None
    with pytest.raises(ValueError, match="unknown options"):
        registry.open_target("in-tree", "pr1")
