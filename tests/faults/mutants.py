"""A mutation run over planner, metadata builder, router and bounds: score and survivors of each.

    pip install cosmic-ray
    python tests/faults/mutants.py [--sample N] [--seed S] [AREA...]

A mutant is one changed operator, comparison, constant, branch or loop of one module, by the operators of cosmic-ray;
what does not compile, or differs in annotations alone, is none. It is killed when a test of the module fails, ends the
process, or takes too long. Nothing is written: each mutant is imported in a process of its own, forked when the
libraries are loaded. The compiled scheduler runs interpreted here, so that no machine code of another mutant is used.
"""

from __future__ import annotations

import argparse
import ast
import ctypes
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import random
import resource
import sys
import tempfile
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LIBRARIES = (
    "torch",
    "numpy",
    "scipy.stats",
    "hypothesis.strategies",
    "hypothesis.stateful",
    "pytest",
    "_pytest.python",
)
LIMIT_S = 60
"""CPU time of a mutant's tests; one that loops forever ends here and counts as killed."""
_CALLS = "test_planner_arguments", "test_planner_examples"
_BOUNDS = "test_bounds_arith", "test_bounds_attention_terms", "test_bounds_tight", "test_bounds_budget"


def _tests(folder: str, *names: str) -> tuple[str, ...]:
    return tuple(f"tests/{folder}/{name}.py" for name in names)


AREAS: dict[str, dict[str, tuple[str, ...]]] = {
    "planner": {
        "dsv32_fast.kernels.emulated.launch": _tests("planner", "test_launch_rules", *_CALLS),
        "dsv32_fast.kernels.emulated._scheduler": _tests("planner", *_CALLS, "test_recorded_plans"),
        "dsv32_fast.kernels.emulated.metadata": _tests("planner", *_CALLS),
    },
    "builder": {"dsv32_fast.metadata": ("tests/metadata",)},
    "router": {
        "dsv32_fast.router": _tests("fast", "test_fast_router"),
        "dsv32_fast.kernels.emulated.router": _tests("kernels", "test_emulated_router"),
    },
    "bounds": {
        f"dsv32_ref.bounds.{name}": _tests("bounds", *_BOUNDS, *more)
        for name, more in {
            "arith": (),
            "attention": ("test_bounds_reference", "test_bounds_probabilistic"),
            "budget": (),
            "elementary": (),
            "linear": ("test_bounds_gates",),
            "margins": ("test_bounds_margins",),
            "norm": ("test_bounds_gates",),
            "quant": ("test_bounds_gates",),
            "rope": ("test_bounds_gates",),
            "router": ("test_bounds_margins",),
        }.items()
    },
}
"""Modules of each area, and the tests that stand for them, the quickest first."""


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One changed place of one module."""

    module: str
    line: int
    operator: str
    source: str

    def change(self, original: str) -> str:
        """The changed line before and after."""
        pairs = zip(original.splitlines(), self.source.splitlines(), strict=False)
        return next((f"{old.strip()} -> {new.strip()}" for old, new in pairs if old != new), self.operator)


def path_of(module: str) -> Path:
    """The file of a module of this checkout."""
    return ROOT.joinpath(*module.split(".")).with_suffix(".py")


def places(module: str) -> list[tuple[str, str, int, int]]:
    """Module, operator, number among the operator's places, and line, of every place that an operator may change."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.plugins import get_operator, operator_names

    nodes = list(ast_nodes(get_ast(path_of(module).read_text())))
    kinds = [name for name in sorted(operator_names()) if not get_operator(name).arguments()]
    return [
        (module, name, number, start[0])
        for name in kinds
        for number, (start, _) in enumerate(
            place for node in nodes for place in get_operator(name)().mutation_positions(node)
        )
    ]


def mutant(module: str, operator: str, number: int, line: int) -> Mutant | None:
    """The module with one place changed; None where nothing that is evaluated changes, or where it does not compile."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    original = path_of(module).read_text()
    source = mutate_code(original, get_operator(operator)(), number)
    if source is None or _without_annotations(source) in ("", _without_annotations(original)):
        return None
    return Mutant(module=module, line=line, operator=operator.removeprefix("core/"), source=source)


def _without_annotations(source: str) -> str:
    """The syntax tree of a source as text, less what is never evaluated; empty if it does not compile."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return ""
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.FunctionDef):
            node.returns = None
        elif isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(value=None)
    return ast.dump(tree)


class _Mutated(importlib.abc.MetaPathFinder):
    """Imports one module from another source than its file's."""

    def __init__(self, module: str, source: str) -> None:
        self.module, self.source = module, source

    def find_spec(self, fullname: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.module:
            return None
        file, source = str(path_of(self.module)), self.source

        class Loader(importlib.machinery.SourceFileLoader):
            def get_code(self, _: str) -> types.CodeType:
                return compile(source, file, "exec", dont_inherit=True)

        return importlib.util.spec_from_file_location(fullname, file, loader=Loader(fullname, file))


def _interpreted() -> types.ModuleType:
    """Stands for `dsv32_fast.compiled`: nothing is compiled."""
    import numpy as np

    def array(kind: Any, address: int, shape: tuple[int, ...]) -> Any:
        size = int(np.prod(shape))
        pointer = ctypes.cast(int(address) or None, ctypes.POINTER(kind))
        return np.ctypeslib.as_array(pointer, (size,)).reshape(shape) if size else np.zeros(shape, kind)

    module = types.ModuleType("dsv32_fast.compiled")
    vars(module).update(
        njit=lambda function: function,
        int32_array=lambda address, shape: array(ctypes.c_int32, address, shape),
        int64_array=lambda address, shape: array(ctypes.c_int64, address, shape),
    )
    return module


def survives(module: str, source: str, tests: Sequence[str]) -> bool:
    """Whether all `tests` pass with this source of the module, in a process of its own."""
    child = os.fork()
    if child == 0:
        _child(module, source, tests)
    return os.waitpid(child, 0)[1] == 0


def _child(module: str, source: str, tests: Sequence[str]) -> None:
    code = 1
    try:
        resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_S, LIMIT_S))
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        import pytest

        sys.meta_path.insert(0, _Mutated(module, source))
        sys.modules["dsv32_fast.compiled"] = _interpreted()
        code = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "--hypothesis-seed=0", "--tb=no", *tests]))
    finally:
        os._exit(code)


def draw(found: list[tuple[str, str, int, int]], sample: int, seed: int) -> Iterator[Mutant]:
    """`sample` different mutants at random places; all in their order for 0."""
    if sample:
        random.Random(seed).shuffle(found)
    sources: set[str] = set()
    for place in found:
        made = mutant(*place)
        if made is not None and made.source not in sources:
            sources.add(made.source)
            yield made
        if len(sources) == sample > 0:
            return


def run(area: str, sample: int, seed: int) -> int:
    """Number of survivors of one area; prints each, and the score.

    Raises:
        RuntimeError: the tests of the area fail without any mutant.
    """
    modules = AREAS[area]
    tests = tuple(dict.fromkeys(test for found in modules.values() for test in found))
    first = next(iter(modules))
    if not survives(first, path_of(first).read_text(), tests):
        raise RuntimeError(f"{area}: tests fail without a mutant, or take {LIMIT_S} s: pytest {' '.join(tests)}")
    found = [place for module in modules for place in places(module)]
    counts = {module: [0, 0] for module in modules}
    for number, drawn in enumerate(draw(list(found), sample, seed), 1):
        print(f"{area}: mutant {number} of {sample or len(found)}", end="\r", file=sys.stderr, flush=True)
        alive = survives(drawn.module, drawn.source, modules[drawn.module])
        counts[drawn.module][0] += not alive
        counts[drawn.module][1] += 1
        if alive:
            change = drawn.change(path_of(drawn.module).read_text())
            print(f"  survived: {drawn.module}:{drawn.line}, {drawn.operator}: {change}", flush=True)
    killed, tried = (sum(numbers) for numbers in zip(*counts.values(), strict=True))
    print(f"{area}: {killed} of {tried} mutants killed, at {len(found)} places, seed {seed}")
    for module, (dead, of_all) in counts.items():
        print(f"  {module}: {dead} of {of_all}", flush=True)
    return tried - killed


def main() -> int:
    """Exit code 1 if a mutant survives."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("areas", nargs="*", metavar="AREA", help=f"of {', '.join(AREAS)}; all by default")
    parser.add_argument("--sample", type=int, default=0, help="mutants per area; 0 for all")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    unknown = set(asked.areas) - set(AREAS)
    if unknown:
        parser.error(f"unknown area {sorted(unknown)[0]}; choose of {', '.join(AREAS)}")
    os.chdir(ROOT)
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.path[:0] = [str(ROOT / part) for part in ("", "fuzz", "reports")]
    for library in LIBRARIES:
        importlib.import_module(library)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = folder
        survivors = [run(area, asked.sample, asked.seed) for area in asked.areas or AREAS]
    return int(any(survivors))


if __name__ == "__main__":
    sys.exit(main())
