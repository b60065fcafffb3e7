"""Worker side: vLLM's ROCm sparse-MLA module, imported on a machine that need not have a GPU, with an emulated AITER.

What makes it importable: Triton in its interpreter, no visible device, `aiter` mounted from the emulation before
anything of vLLM is loaded, pinned memory off, and a current stream that can be synchronised. Nothing of vLLM's own
logic is replaced. A missing package is told by name, so that an installer can add it.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from dsv32_fast.kernels import mounted
from dsv32_fast.kernels.installed import Installation, find_aiter
from dsv32_fuzz.targets.intree import RecordingKernels
from dsv32_fuzz.targets.vllm.kernels import SampledRowLengths, install

BACKEND = "vllm.v1.attention.backends.mla.rocm_aiter_mla_sparse"
COMMON = "vllm.v1.attention.backend"
OLD_COMMON = "vllm.v1.attention.backends.utils"


_MOUNTS = ExitStack()
"""Never closed: vLLM imports from aiter at call time too."""


@dataclass
class Loaded:
    """The modules of one vLLM, and what was done so that they load."""

    backend: ModuleType
    recorder: RecordingKernels
    version: str
    installed_aiter: Installation
    """What the emulation hides."""
    row_lengths: SampledRowLengths | None = None
    compute_units: int = 256
    stream_events: list[str] = field(default_factory=list)
    """Since the last build: `schedule` for a planner call, `sync` for a synchronised stream, in order."""

    @property
    def common_metadata(self) -> Any:
        """vLLM's `CommonAttentionMetadata`."""
        return importlib.import_module(COMMON).CommonAttentionMetadata

    def backend_class(self) -> Any:
        """The attention backend, from which vLLM gets the classes of its builder and its layers."""
        for value in vars(self.backend).values():
            if isinstance(value, type) and value.__module__ == BACKEND and hasattr(value, "get_builder_cls"):
                return value
        raise LookupError(f"{BACKEND} defines no attention backend class")

    def builder_class(self) -> Any:
        """The metadata builder."""
        return self.backend_class().get_builder_cls()


def load(path: str | None, aiter_release: str | None) -> Loaded:
    """Import vLLM from `path` (a folder that holds the package `vllm`; None: what is installed).

    Raises:
        ImportError: a package is missing; `name` of the error names its module.
        LookupError: this vLLM has no ROCm sparse-MLA backend.
    """
    if path is not None:
        _put_first(Path(path))
    installed = find_aiter()
    module = _MOUNTS.enter_context(mounted.mounted(aiter_release))
    recorder = RecordingKernels(_kernels(module))
    module.__dict__["get_mla_metadata_v1"] = recorder.get_mla_metadata_v1
    try:
        backend = importlib.import_module(BACKEND)
    except ModuleNotFoundError as error:
        if error.name and BACKEND.startswith(error.name) and error.name != "vllm":
            raise LookupError(
                f"this vLLM has no module {error.name}; the ROCm sparse-MLA backend came later"
            ) from error
        raise
    loaded = Loaded(backend, recorder, _version(), installed, install(backend))
    _tame(loaded)
    return loaded


def _kernels(module: ModuleType) -> Any:
    """The mounted functions as they are now, since `get_mla_metadata_v1` is about to be replaced."""
    return SimpleNamespace(
        get_mla_metadata_v1=module.get_mla_metadata_v1, get_mla_metadata_info_v1=module.get_mla_metadata_info_v1
    )


def _put_first(folder: Path) -> None:
    sys.path.insert(0, str(folder))
    if not list(folder.glob("vllm-*.dist-info")) and not list(folder.glob("vllm.egg-info")):
        # vLLM asks for the version of its own distribution, and without one it leaves Triton out.
        finder = _SourceTree(folder)
        sys.meta_path.insert(0, finder)


class _SourceTree:
    """Gives a bare source tree the metadata of a distribution."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find_spec(self, *_: Any, **__: Any) -> None:
        """Finds no module: only distributions."""

    def find_distributions(self, context: Any) -> Iterator[Any]:
        """The distribution vllm."""
        import importlib.metadata

        folder = self.folder

        class Tree(importlib.metadata.Distribution):
            def read_text(self, filename: str) -> str | None:
                version = _source_version(folder)
                return f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n" if filename == "METADATA" else None

            def locate_file(self, path: Any) -> Any:
                return folder / path

        if context.name in (None, "vllm"):
            yield Tree()


def _source_version(folder: Path) -> str:
    for line in (folder / "PKG-INFO").read_text().splitlines() if (folder / "PKG-INFO").is_file() else ():
        if line.startswith("Version:"):
            return line.partition(":")[2].strip()
    return "0+source"


def _version() -> str:
    import importlib.metadata

    try:
        return importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return str(getattr(sys.modules["vllm"], "__version__", "unknown"))


def _tame(loaded: Loaded) -> None:
    """Stand-ins for what only a GPU has: its stream, its compute units, pinned memory."""

    def synchronize() -> None:
        loaded.stream_events.append("sync")

    torch.cuda.current_stream = lambda *_: SimpleNamespace(synchronize=synchronize)  # type: ignore[assignment]
    platform = type(importlib.import_module("vllm.platforms").current_platform)
    platform.num_compute_units = classmethod(lambda _cls, *_: loaded.compute_units)
    torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign]
    for name, module in list(sys.modules.items()):
        if name.startswith("vllm") and isinstance(module, types.ModuleType) and "PIN_MEMORY" in vars(module):
            module.__dict__["PIN_MEMORY"] = False
