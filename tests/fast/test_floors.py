"""An import goes down only: read from the source of every module, whatever is executed."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OURS = ("dsv32_ref", "dsv32_fast", "dsv32_fuzz", "dsv32_reports")
FLOORS = {"dsv32_ref": ROOT, "dsv32_fast": ROOT, "dsv32_fuzz": ROOT / "fuzz", "dsv32_reports": ROOT / "reports"}
SHARED_WITH_THE_FAST_PATH = ("dsv32_ref.config", "dsv32_ref.weights")


def imported(source: str) -> set[str]:
    """Full names of our modules that a source text imports, wherever in it; relative imports stay in their package."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                found.add(node.args[0].value)
    return {name for name in found if name.split(".")[0] in OURS}


def allowed(package: str, name: str) -> bool:
    """Whether a module of `package` may import `name`."""
    floor = name.split(".")[0]
    if floor == package:
        return True
    if package == "dsv32_fast" and floor == "dsv32_ref":
        return any(name == module or name.startswith(module + ".") for module in SHARED_WITH_THE_FAST_PATH)
    return OURS.index(floor) < OURS.index(package)


@pytest.mark.parametrize("package", OURS)
def test_imports_go_down(package: str) -> None:
    files = sorted((FLOORS[package] / package).rglob("*.py"))
    assert files, f"no source of {package} found"
    up = {
        f"{file.relative_to(ROOT)}: {name}"
        for file in files
        for name in imported(file.read_text("utf-8"))
        if not allowed(package, name)
    }
    assert not up, sorted(up)


@pytest.mark.parametrize(
    ("package", "source", "fine"),
    [
        ("dsv32_ref", "from dsv32_fast.options import Options", False),
        ("dsv32_ref", "def f():\n    import dsv32_fuzz.case", False),
        ("dsv32_fast", "from dsv32_ref.weights import LayerWeights", True),
        ("dsv32_fast", "from dsv32_ref import config", True),
        ("dsv32_fast", "from dsv32_ref import rope", False),
        ("dsv32_fast", "from dsv32_ref.weights_of_mine import x", False),
        ("dsv32_fast", "importlib.import_module('dsv32_ref.mla')", False),
        ("dsv32_fuzz", "from dsv32_reports.model import x", False),
        ("dsv32_fuzz", "from dsv32_fast.plan import PlanBuffers", True),
        ("dsv32_reports", "import dsv32_fuzz", True),
    ],
)
def test_the_rule_itself(package: str, source: str, fine: bool) -> None:
    names = imported(source)
    assert names
    assert all(allowed(package, name) for name in names) == fine
