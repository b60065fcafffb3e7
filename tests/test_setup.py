"""What `make` does to set up: the CPU torch is pinned, unless the interpreter already has a ROCm torch."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def interpreter(tmp_path: Path) -> Path:
    """An environment without packages."""
    venv.create(tmp_path / "python", with_pip=False)
    return tmp_path / "python"


def give_torch(interpreter: Path, hip: str | None) -> Path:
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    torch = interpreter / "lib" / version / "site-packages" / "torch"
    torch.mkdir()
    (torch / "__init__.py").write_text(f"class version:\n    hip = {hip!r}\n")
    return torch.parent


def commands(interpreter: Path, *flags: str) -> str:
    """What make would run for a fresh checkout."""
    checkout = interpreter.parent / "checkout"
    checkout.mkdir(exist_ok=True)
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, checkout)
    command = ["make", *flags, f"PYTHON={interpreter / 'bin' / 'python'}", ".venv/ready"]
    # A make that runs these tests must not be seen by the make under test.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=True, env=environment)
    return done.stdout


@pytest.mark.parametrize("torch", ["none", "cpu"])
def test_the_cpu_torch_is_pinned(interpreter: Path, torch: str) -> None:
    if torch == "cpu":
        give_torch(interpreter, None)
    text = commands(interpreter, "-n")
    assert "-c constraints.txt" in text
    assert "--system-site-packages" not in text


def test_a_rocm_torch_is_used_as_it_is(interpreter: Path) -> None:
    site = give_torch(interpreter, "7.0")
    text = commands(interpreter, "-n")
    assert "constraints.txt" not in text
    assert "--system-site-packages" in text
    assert f"addsitedir('{site}')" in text


def test_the_packages_of_a_nested_environment_are_seen(interpreter: Path) -> None:
    """The recipe's own lines up to the installation, run for real."""
    give_torch(interpreter, "7.0")
    checkout = interpreter.parent / "checkout"
    commands(interpreter, "-n")
    lines = [
        line for line in commands(interpreter, "-n").splitlines() if "pip install" not in line and "touch" not in line
    ]
    subprocess.run(["sh", "-c", "\n".join(lines)], cwd=checkout, check=True)
    code = "import torch; print(torch.version.hip)"
    done = subprocess.run(
        [checkout / ".venv" / "bin" / "python", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "7.0"


def test_constraints_pin_a_torch_that_the_package_admits() -> None:
    from packaging.requirements import Requirement

    if sys.version_info < (3, 11):
        pytest.skip("reads pyproject.toml with tomllib")
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (pinned,) = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch")]
    (admitted,) = [Requirement(d) for d in project["dependencies"] if Requirement(d).name == "torch"]
    assert admitted.specifier.contains(pinned.partition("==")[2])
    assert not any(s.operator in ("==", "<", "<=", "~=") for s in admitted.specifier)  # a ROCm torch may be newer
