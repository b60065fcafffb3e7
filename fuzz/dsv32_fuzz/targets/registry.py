"""Targets by name: the in-tree path, vLLM, and whatever another package registers.

A package adds a target through the entry-point group `dsv32.targets`: the entry's name is the target's, its value a
callable that takes the keyword arguments of `Request` that it knows and returns a `Target`. See docs/targets.md.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from dsv32_fast.options import resolve
from dsv32_fuzz.targets import Target

GROUP = "dsv32.targets"
IN_TREE, VLLM = "in-tree", "vllm"
DEFAULT_OPTIONS = "pr47766"
PREPARED_PYTHON = Path("env") / "bin" / "python"
"""Beside the releases that `dsv32 target install` prepared."""


def open_target(
    name: str = IN_TREE,
    options: str | None = None,
    assignments: tuple[str, ...] = (),
    *,
    path: str | None = None,
    python: str | None = None,
    aiter_release: str | None = None,
) -> Target:
    """The target called `name`.

    Args:
        name: `in-tree`, `vllm`, or a name of the entry-point group `dsv32.targets`.
        options: preset of the in-tree path (None: the default); no other target takes any.
        assignments: fields of the options set alone, `field=value`.
        path: folder that holds the package of the target.
        python: interpreter that has the target's dependencies.
        aiter_release: AITER release whose signatures the emulation shows to the target.

    Raises:
        ValueError: an unknown name, arguments that the target does not take, or a target that cannot be driven.
    """
    given = {"path": path, "python": python, "aiter_release": aiter_release}
    given = {key: value for key, value in given.items() if value is not None}
    if name == IN_TREE:
        if given:
            raise ValueError(f"the in-tree path takes no {', '.join(given)}; name another target with --target")
        from dsv32_fuzz.targets.intree import InTreeTarget

        return InTreeTarget(resolve(options or DEFAULT_OPTIONS, assignments))
    if options is not None or assignments:
        raise ValueError(f"--options and --set are of the in-tree path; the options of {name} are what its code does")
    factory = _factory(name)
    known = inspect.signature(factory).parameters
    unknown = [key for key in given if key not in known]
    if unknown:
        raise ValueError(f"target {name} takes no {', '.join(unknown)}; leave it out")
    return factory(**given)


def names() -> tuple[str, ...]:
    """Every target that can be named here."""
    return (IN_TREE, VLLM, *sorted(entry.name for entry in registered()))


def registered() -> list[metadata.EntryPoint]:
    """What other packages registered."""
    return list(metadata.entry_points(group=GROUP))


def _factory(name: str) -> Callable[..., Target]:
    if name == VLLM:
        return open_vllm
    for entry in registered():
        if entry.name == name:
            loaded: Any = entry.load()
            return loaded  # type: ignore[no-any-return]
    raise ValueError(f"unknown target {name!r}; choose one of {', '.join(names())}")


def open_vllm(path: str | None = None, python: str | None = None, aiter_release: str | None = None) -> Target:
    """vLLM as installed in `python`, or the one in the folder `path`; a prepared folder brings its interpreter.

    Raises:
        ValueError: it cannot be driven; the message says what is missing.
    """
    from dsv32_fuzz.targets.vllm import VllmTarget

    beside = Path(path).absolute().parent / PREPARED_PYTHON if path else None
    if python is None and beside is not None and beside.is_file():
        python = str(beside)
    return VllmTarget(path=path, python=python, aiter_release=aiter_release)
