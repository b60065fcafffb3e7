"""The built wheel holds everything a user needs, and the plugin runs from it in an empty folder."""

from __future__ import annotations

import os
import site
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from dsv32_fuzz.signoff_run import families
from dsv32_fuzz.strategies.traffic import TRAFFIC

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", str(out), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment with the wheel, and the dependencies of this one by path: its editable install stays out."""
    folder = tmp_path_factory.mktemp("env")
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    extra = folder / "lib" / version / "site-packages" / "dependencies.pth"
    extra.write_text("\n".join([*site.getsitepackages()]))  # a nested .pth file is not followed
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", wheel], check=True, capture_output=True)
    return folder


def run(installed: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {
        k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTEST_XDIST_WORKER", "PYTEST_ADDOPTS")
    }
    return subprocess.run(
        [installed / "bin" / arguments[0], *arguments[1:]],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )


def test_wheel_holds_the_four_packages_and_their_data(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name.partition("/")[0] for name in names if ".dist-info" not in name} == {
        "dsv32_ref",
        "dsv32_fast",
        "dsv32_fuzz",
        "dsv32_reports",
    }
    for package in ("dsv32_ref", "dsv32_fast", "dsv32_fuzz", "dsv32_reports"):
        assert f"{package}/py.typed" in names
    assert "dsv32_fuzz/data/plans/aiter_e404860_v1.json.gz" in names
    assert "dsv32_reports/templates/report.html.j2" in names


def test_wheel_is_the_one_that_is_imported(installed: Path, tmp_path: Path) -> None:
    done = run(installed, "python", "-c", "import dsv32_fuzz; print(dsv32_fuzz.__file__)", cwd=tmp_path)
    assert Path(done.stdout.strip()).is_relative_to(installed), done.stderr


def test_installed_command_replays_its_recordings(installed: Path, tmp_path: Path) -> None:
    code = "from dsv32_fuzz.golden.plans import DEFINED; print(DEFINED)"
    recording = run(installed, "python", "-c", code, cwd=tmp_path).stdout.strip()
    done = run(installed, "dsv32", "golden", recording, cwd=tmp_path)
    assert (done.returncode, done.stdout.split()[0]) == (0, "PASSED"), done.stderr


def test_plugin_passes_the_repaired_key(installed: Path, tmp_path: Path) -> None:
    arguments = ("-q", "--pyargs", "dsv32_fuzz", "--dsv32-options", "pr47766", "--dsv32-profile", "ci")
    done = run(installed, "python", "-m", "pytest", *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    passed = int(done.stdout.split(" passed")[0].split()[-1])
    assert passed == 3 + len(TRAFFIC) + len(families()), done.stdout


def test_plugin_fails_the_defective_key_and_saves_the_case(installed: Path, tmp_path: Path) -> None:
    arguments = ("-q", "--pyargs", "dsv32_fuzz", "--dsv32-options", "pr42982", "-k", "decode or plans")
    done = run(installed, "python", "-m", "pytest", *arguments, cwd=tmp_path)
    assert done.returncode == 1, done.stdout
    assert "FAILED key_sufficiency" in done.stdout
    assert "1 failed, 2 passed" in done.stdout
    assert (
        run(installed, "dsv32", "replay", "dsv32-cases/mtp_decode-key_sufficiency.json", cwd=tmp_path).returncode == 1
    )


def test_without_transformers_the_benchmark_says_what_to_install(installed: Path, tmp_path: Path) -> None:
    code = "import sys; sys.modules['transformers'] = None; from dsv32_reports.cli import main; main()"
    done = run(installed, "python", "-c", code, "bench", "ref", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "install dsv32-validation[oracle]" in done.stderr
    assert done.stderr.count("\n") == 1


def test_plugin_refuses_unknown_options(installed: Path, tmp_path: Path) -> None:
    done = run(installed, "python", "-m", "pytest", "--pyargs", "dsv32_fuzz", "--dsv32-options", "x", cwd=tmp_path)
    assert done.returncode != 0
    assert "choose one of baseline" in done.stdout + done.stderr
