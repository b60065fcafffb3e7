"""Prepares a vLLM release for CI on a machine without a GPU: its Python files, and what importing them needs.

`install("0.24.0", into)` makes `into/0.24.0` (the package, from its sdist, without compiled parts) and `into/env`, one
virtual environment that all releases in `into` share. That environment sees the suite's own packages (torch among them)
and adds Triton and the requirements that the import chain asks for, found by importing; nothing enters the suite's own
environment. A package is only ever added if it is on the short list below or a requirement of that very release.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path

from dsv32_fuzz.targets.registry import PREPARED_PYTHON
from dsv32_fuzz.targets.vllm.process import MissingModuleError, TargetError, Worker

Progress = Callable[[str], None]
BUILD_TOOLS = ("setuptools", "setuptools_scm", "wheel", "packaging", "jinja2", "setuptools-rust", "grpcio-tools")
FIRST = ("triton", "regex", "psutil", "pyzmq", "cbor2", "transformers", "gguf", "aiohttp", "openai", "openai-harmony")
"""What every release so far needed, installed in one go; the rest is found by importing."""
DISTRIBUTIONS = {
    "zmq": "pyzmq",
    "PIL": "pillow",
    "cpuinfo": "py-cpuinfo",
    "yaml": "pyyaml",
    "cv2": "opencv-python-headless",
    "openai_harmony": "openai-harmony",
    "opentelemetry": "opentelemetry-api",
    "google": "protobuf",
}
"""Modules whose distribution has another name."""
BROUGHT_BY = {"uvloop": "fastapi"}
"""Distributions that a release imports as a part of one of its requirements (here `fastapi[standard]`)."""
MAX_MISSING = 60
_SPEC = re.compile(r"vllm==([0-9][0-9A-Za-z.]*)")


def release_of(spec: str) -> str:
    """The release in `vllm==X`.

    Raises:
        ValueError: not of that form.
    """
    match = _SPEC.fullmatch(spec)
    if match is None:
        raise ValueError(f"{spec!r} names no release; write it like vllm==0.24.0")
    return match[1]


def install(spec: str, into: Path, progress: Progress) -> Path:
    """Prepare a release; returns its folder. What is there already is kept.

    Raises:
        ValueError: no such release, a build or import that fails; the message has the last line of what failed.
    """
    release = release_of(spec)
    into.mkdir(parents=True, exist_ok=True)
    python = _environment(into, progress)
    folder = into / release
    if not folder.is_dir():
        progress(f"install {spec} without compiled parts")
        _install_release(python, release, folder)
    _complete(python, folder, progress)
    return folder


def prepared(into: Path) -> list[Path]:
    """Folders of the releases that `into` holds, newest first."""
    found = [folder.parent.parent for folder in into.glob("*/vllm/__init__.py")]
    return sorted(found, key=lambda folder: _order(folder.name), reverse=True)


def _order(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", release))


def _environment(into: Path, progress: Progress) -> str:
    python = into / PREPARED_PYTHON
    if not python.is_file():
        progress("make a virtual environment that sees the suite's packages")
        _run([sys.executable, "-m", "venv", str(into / "env")])
        own = sysconfig.get_path("purelib")
        (site,) = (into / "env").glob("lib/python3*/site-packages")
        (site / "suite.pth").write_text(f"import site; site.addsitedir({own!r})\n")
        progress(f"install {', '.join((*BUILD_TOOLS, *FIRST))}")
        _pip(str(python), *BUILD_TOOLS, *FIRST)
    return str(python)


def _install_release(python: str, release: str, folder: Path) -> None:
    """Into a folder beside, renamed when complete: a broken-off install leaves nothing that looks prepared."""
    scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".installing-"))
    environment = {"VLLM_TARGET_DEVICE": "empty", "VLLM_VERSION_OVERRIDE": release}
    flags = ("--no-deps", "--no-binary", "vllm", "--no-build-isolation", "--target", str(scratch / "release"))
    try:
        _pip(python, *flags, f"vllm=={release}", environment=environment)
        (scratch / "release").rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _complete(python: str, folder: Path, progress: Progress) -> None:
    """Import, and add the module that is missing, until nothing is."""
    asked: set[str] = set()
    for _ in range(MAX_MISSING):
        worker = Worker(python)
        try:
            worker.ask(op="load", path=str(folder), aiter_release=None)
            return
        except MissingModuleError as error:
            distribution = distribution_of(error.module, requirements(folder))
            if distribution in asked:
                raise ValueError(f"{distribution} was installed, yet {error}") from error
            asked.add(distribution)
            progress(f"install {distribution}, which the release imports")
            _pip(python, distribution)
        except TargetError as error:
            raise ValueError(f"{folder.name} cannot be imported: {error}") from error
        finally:
            worker.close()
    raise ValueError(f"{folder.name} still misses packages after {MAX_MISSING} installs; last {sorted(asked)[-1]}")


def requirements(folder: Path) -> set[str]:
    """Normalised names of the distributions that the release requires, from its own metadata."""
    names: set[str] = set()
    for metadata in folder.glob("vllm-*.dist-info/METADATA"):
        for line in metadata.read_text(encoding="utf-8", errors="replace").splitlines():
            match = re.match(r"Requires-Dist: ([A-Za-z0-9._-]+)", line)
            if match:
                names.add(_normal(match[1]))
    return names


def distribution_of(module: str, required: set[str]) -> str:
    """The distribution to install for a missing module.

    Raises:
        ValueError: the release does not require it, so it is not installed.
    """
    top = module.partition(".")[0]
    name = DISTRIBUTIONS.get(top, _normal(top))
    if name in required or name in FIRST or BROUGHT_BY.get(name) in required:
        return name
    raise ValueError(f"the release imports {module}, which is no requirement of it; install it into env by hand")


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _pip(python: str, *arguments: str, environment: dict[str, str] | None = None) -> None:
    _run(
        [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments],
        {**os.environ, **(environment or {})},
    )


def _run(command: list[str], environment: dict[str, str] | None = None) -> None:
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        telling = [line for line in lines if "rror" in line and not line.startswith(("note", "hint"))] or lines
        raise ValueError(f"{' '.join(command[2:6])} ... failed: {telling[-1] if telling else 'it printed nothing'}")
