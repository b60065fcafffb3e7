"""A fault: one defect that really happened somewhere, small, named, switched on at a seam of the code under test.

A fault alters the target at one of three seams while its context is open: AITER functions behind `InTreeTarget`'s
kernels, a `MetadataBuilder` subclass, or attributes of modules and classes. Nothing is copied and nothing stays: when
the context closes every attribute is as it was. Its control is the same target without it.

    with fault.inject() as target:
        ...  # some check fails on target, else the fault survives
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from dsv32_fast.kernels.mounted import EMULATION
from dsv32_fast.kernels.protocol import Kernels
from dsv32_fast.metadata import MetadataBuilder
from dsv32_fast.options import PRESETS, Options
from dsv32_fuzz.targets.intree import InTreeTarget

Call = dict[str, Any]
"""Arguments of one call by name, defaults included."""
Make = Callable[[Any], Any]
"""From the faultless function (or value), the faulty one; called when the fault is switched on, so that a closure's
state begins anew."""


@dataclass(frozen=True, kw_only=True)
class Area:
    """A part of the system that faults are counted by."""

    title: str
    families: tuple[str, ...]
    """Families of checks that are tried first; `traffic` stands for the checks of step sequences."""


AREAS: dict[str, Area] = {
    "key": Area(title="metadata key", families=("traffic", "serving")),
    "planner": Area(title="planner", families=("traffic", "attention", "step")),
    "reduce": Area(title="split and reduce", families=("attention",)),
    "attention": Area(title="gather and attention", families=("attention", "step")),
    "buffers": Area(title="persistent buffers", families=("traffic", "serving", "graph")),
    "graph": Area(title="graph replay", families=("graph", "traffic")),
    "router": Area(title="router", families=("router", "moe")),
    "topk": Area(title="indexer top-k", families=("indexer",)),
    "indexer": Area(title="indexer scores", families=("indexer",)),
    "cache": Area(title="cache and fp8", families=("cache", "indexer", "attention", "step")),
    "rope": Area(title="RoPE and scale", families=("indexer", "step")),
    "moe": Area(title="experts", families=("moe", "router")),
    "mtp": Area(title="drafts (MTP)", families=("traffic", "step", "serving")),
    "latency": Area(title="cost of a step", families=("serving", "step", "graph")),
    "interface": Area(title="kernel interface", families=("interface",)),
    "harness": Area(title="the harness itself", families=()),
}


@dataclass(frozen=True, kw_only=True)
class Patch:
    """One attribute of a module, or of a class in a module, that is replaced."""

    where: str
    """Dotted path of the module or class."""
    name: str
    make: Make

    @contextmanager
    def open(self) -> Iterator[None]:
        """The attribute is replaced inside the block, and put back behind it."""
        owner = _resolve(self.where)
        # The dictionary and not getattr: a property or a static method must be put back as what it was.
        original = inspect.getattr_static(owner, self.name)
        setattr(owner, self.name, self.make(original))
        try:
            yield
        finally:
            setattr(owner, self.name, original)


def _resolve(path: str) -> Any:
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        module, _, name = path.rpartition(".")
        return getattr(importlib.import_module(module), name)


class FaultyKernels:
    """The emulated kernels with some functions replaced."""

    def __init__(self, replaced: Mapping[str, Make]) -> None:
        for name, make in replaced.items():
            setattr(self, name, make(getattr(EMULATION, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(EMULATION, name)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A named defect.

    Attributes:
        name: identifier, unique in the catalogue.
        area: one of `AREAS`.
        story: what is wrong, in one line.
        reference: where it was reported in public, or the specification that it violates.
        bugs: numbers of `known_bugs.KNOWN_BUGS` that it stands for.
        options: preset of the optimised path under which it shows.
        kernels: AITER functions that are replaced, by name.
        builder: takes the place of the metadata builder.
        patches: attributes that are replaced.
    """

    name: str
    area: str
    story: str
    reference: str
    bugs: tuple[str, ...] = ()
    options: str = "pr47766"
    kernels: Mapping[str, Make] = field(default_factory=dict)
    builder: type[MetadataBuilder] = MetadataBuilder
    patches: tuple[Patch, ...] = ()

    @property
    def seams(self) -> tuple[str, ...]:
        """What is altered, in words."""
        builder = () if self.builder is MetadataBuilder else ("the metadata builder",)
        patched = (f"{patch.where}.{patch.name}" for patch in self.patches)
        return (*(f"kernel {name}" for name in self.kernels), *builder, *patched)

    @contextmanager
    def inject(self, options: Options | None = None) -> Iterator[InTreeTarget]:
        """The target with this fault; the fault is gone when the block is left."""
        with ExitStack() as stack:
            for patch in self.patches:
                stack.enter_context(patch.open())
            kernels = cast(Kernels, FaultyKernels(self.kernels)) if self.kernels else EMULATION
            yield InTreeTarget(options or PRESETS[self.options], builder=self.builder, kernels=kernels)

    def control(self, options: Options | None = None) -> InTreeTarget:
        """The same target without the fault."""
        return InTreeTarget(options or PRESETS[self.options])


def around(change: Callable[[Callable[[Call], Any], Call], Any]) -> Make:
    """A function that is replaced by `change(run, call)`; `run(call)` runs the faultless one."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        def run(call: Call) -> Any:
            bound = inspect.BoundArguments(signature, call)
            return original(*bound.args, **bound.kwargs)

        @functools.wraps(original)
        def faulty(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            return change(run, dict(bound.arguments))

        return faulty

    return make


def before(change: Callable[[Call], None]) -> Make:
    """A function whose arguments are changed before it runs; tensors of the caller must be copied, not written."""

    def changed(run: Callable[[Call], Any], call: Call) -> Any:
        change(call)
        return run(call)

    return around(changed)


def after(change: Callable[[Call, Any], Any]) -> Make:
    """A function whose result is replaced by `change(call, result)`."""
    return around(lambda run, call: change(call, run(call)))


def writes(change: Callable[[Call], None]) -> Make:
    """A function whose in-place results are changed after it ran; it still returns what it returned."""

    def changed(run: Callable[[Call], Any], call: Call) -> Any:
        result = run(call)
        change(call)
        return result

    return around(changed)


def returns(change: Callable[[Any], Any]) -> Make:
    """A function whose result goes through `change`."""
    return around(lambda run, call: change(run(call)))


def value(new: Any) -> Make:
    """An attribute that becomes `new`, whatever it was."""
    return lambda _original: new
