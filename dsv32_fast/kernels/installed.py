"""An installed AITER, looked up and read without importing it, since importing it needs ROCm.

`find_aiter` tells AITER from the unrelated package of the same name; `differences` parses its files and compares them
with the signatures that the suite was written for. `commit_of` tells from which commit a package was made.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dsv32_fast.kernels.signatures import FUNCTIONS, HOMES, Parameter, parameters_of, signature

Kind = Literal["function missing", "parameter missing", "parameter unknown", "parameter moved", "default differs"]


@dataclass(frozen=True, kw_only=True)
class Installation:
    """What `import aiter`, or `import vllm`, would find."""

    kind: Literal["absent", "unrelated", "emulated", "aiter", "vllm"]
    root: Path | None = None
    """Folder of the package."""
    release: str | None = None
    """Version of the distribution, if there is one."""
    commit: str | None = None
    """From which it was made, where that is recorded."""


def find_aiter() -> Installation:
    """Look AITER up without importing it; the async library that is plainly called `aiter` is told apart."""
    imported = sys.modules.get("aiter")
    if imported is not None and getattr(imported, "__emulated__", False):
        return Installation(kind="emulated", release=imported.__version__)
    if imported is not None and imported.__spec__ is None:
        return Installation(kind="unrelated")  # a stand-in that some other test put there
    spec = importlib.util.find_spec("aiter")
    if spec is None:
        return Installation(kind="absent")
    locations = [Path(place) for place in spec.submodule_search_locations or ()]
    for root in locations:
        if (root / "mla.py").is_file():
            name = "amd-aiter" if version("amd-aiter") else "aiter"
            return Installation(kind="aiter", root=root, release=version(name), commit=commit_of(name, root))
    root = locations[0] if locations else Path(spec.origin or ".").parent
    return Installation(kind="unrelated", root=root, release=version("aiter"))


def find_vllm() -> Installation:
    """Look vLLM up without importing it."""
    spec = importlib.util.find_spec("vllm")
    root = Path(spec.origin).parent if spec is not None and spec.origin else None
    if root is None and version("vllm") is None:
        return Installation(kind="absent")
    return Installation(kind="vllm", root=root, release=version("vllm"), commit=commit_of("vllm", root))


def signatures(root: Path) -> dict[str, tuple[Parameter, ...]]:
    """Parameters of every recorded function that the package at `root` defines, parsed from its files."""
    return {name: found for name in FUNCTIONS if (found := _definition(root, name)) is not None}


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One disagreement between an installed function and the table at the commit."""

    function: str
    what: Kind
    detail: str


def differences(root: Path) -> tuple[Difference, ...]:
    """Every disagreement between the package at `root` and the table at the commit."""
    installed = signatures(root)
    found: list[Difference] = []
    for function in FUNCTIONS:
        if function in installed:
            found += compare(function, installed[function])
        else:
            found.append(_difference(function, "function missing", "no definition found"))
    return tuple(found)


def compare(function: str, installed: tuple[Parameter, ...]) -> list[Difference]:
    """Disagreements of one function's parameters with the table at the commit."""
    recorded = signature(function)
    have, want = [p.name for p in installed], [p.name for p in recorded]
    found = [_difference(function, "parameter missing", name) for name in want if name not in have]
    found += [_difference(function, "parameter unknown", name) for name in have if name not in want]
    common = [name for name in want if name in have]
    if [name for name in have if name in want] != common:
        found.append(_difference(function, "parameter moved", f"the order is {', '.join(have)}"))
    defaults = {p.name: p.default for p in installed}
    for parameter in recorded:
        if parameter.name in defaults and not _same_default(defaults[parameter.name], parameter.default):
            detail = f"{parameter.name}={defaults[parameter.name]}, not {parameter.default}"
            found.append(_difference(function, "default differs", detail))
    return found


def _difference(function: str, what: Kind, detail: str) -> Difference:
    return Difference(function=function, what=what, detail=detail)


def _same_default(installed: str | None, recorded: str | None) -> bool:
    """Equal texts, numbers of equal value, or a dotted name such as QuantType.No that ends in the recorded one."""
    if installed is None or recorded is None:
        return installed == recorded
    try:
        return bool(ast.literal_eval(installed) == ast.literal_eval(recorded))
    except (ValueError, SyntaxError):
        tail = re.split(r"[.(]", installed.replace(".value", "").rstrip(")"))[-1]
        return tail == recorded


def _definition(root: Path, function: str) -> tuple[Parameter, ...] | None:
    if function in HOMES:
        files = [root.joinpath(*module.split(".")).with_suffix(".py") for module in HOMES[function]]
    else:
        files = sorted((root / "ops").glob("*.py"))
    for file in files:
        text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
        if f"def {function}(" in text and (found := parameters_of(text, function)) is not None:
            return found
    return None


def version(distribution: str) -> str | None:
    """Version of an installed distribution, None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit_of(distribution: str, root: Path | None) -> str | None:
    """The commit that a package was made from, None where nothing says it.

    Read from the git work tree that tracks the folder `root` ("-dirty" if it was edited), from the record of an install
    from a repository (PEP 610), from the local part of the version ("+g1a2b3c4"), or from the `_version.py` that
    setuptools-scm writes.
    """
    return (root and _git_commit(root)) or _recorded_commit(distribution) or (root and _written_commit(root)) or None


def _git_commit(root: Path) -> str | None:
    git = ["git", "-C", str(root)]
    try:
        # A package inside another project's tree is not tracked by it.
        tracked = subprocess.run([*git, "ls-files", "--error-unmatch", "__init__.py"], capture_output=True, check=False)
        if tracked.returncode:
            return None
        told = [*git, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        return subprocess.run(told, capture_output=True, text=True, check=False).stdout.strip() or None
    except OSError:
        return None  # no git


def _recorded_commit(distribution: str) -> str | None:
    try:
        found = importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
    try:
        commit = json.loads(found.read_text("direct_url.json") or "{}").get("vcs_info", {}).get("commit_id")
    except (ValueError, AttributeError):
        commit = None
    in_version = re.search(r"\+(?:.*\.)?g([0-9a-f]{7,40})\b", found.version)
    return commit or (in_version[1] if in_version else None)


def _written_commit(root: Path) -> str | None:
    file = root / "_version.py"
    text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    match = re.search(r"""commit_id = ["']g?([0-9a-f]{7,40})["']""", text)
    return match[1] if match else None
