"""`dsv32 doctor` on fake installations, found as real ones are: by their files and metadata on the path."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dsv32_fast.doctor import Gpu, examine
from dsv32_fast.kernels.installed import Installation, commit_of, find_aiter, find_vllm
from dsv32_fast.kernels.signatures import FUNCTIONS, HOMES, signature
from dsv32_reports.diagnosis import WRONG_AITER, doctor_exit_code, doctor_json, doctor_text

MI355X = Gpu(name="AMD Instinct MI355X", arch="gfx950", compute_units=256)


@pytest.fixture
def site(tmp_path, monkeypatch):
    """An empty folder first on the path, with no other aiter or vllm behind it."""
    clean = [p for p in sys.path if not ((Path(p) / "aiter").exists() or (Path(p) / "vllm").exists())]
    monkeypatch.setattr(sys, "path", [str(tmp_path), *clean])
    assert "aiter" not in sys.modules
    importlib.invalidate_caches()
    return tmp_path


def distribution(site: Path, name: str, version: str) -> None:
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    importlib.invalidate_caches()


def async_library(site: Path) -> None:
    (site / "aiter").mkdir()
    (site / "aiter" / "__init__.py").write_text("async def anext_(it): ...\n")
    distribution(site, "aiter", "0.13.20191203")


def amd_aiter(site: Path, without: tuple[str, ...] = (), version: str = "0.1.20") -> None:
    """A package with AITER's files and signatures; importing it fails, as it does without ROCm."""
    root = site / "aiter"
    texts: dict[Path, str] = {root / "__init__.py": "raise RuntimeError('no ROCm')\n", root / "mla.py": ""}
    for name in FUNCTIONS:
        home = HOMES.get(name, ("ops.all",))[0]
        parameters = [p.name if p.default is None else f"{p.name}={p.default}" for p in signature(name)]
        file = root.joinpath(*home.split(".")).with_suffix(".py")
        if name not in without:
            texts[file] = texts.get(file, "") + f"def {name}({', '.join(parameters)}): ...\n"
    for file, text in texts.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    distribution(site, "amd-aiter", version)


def on_mi355x():
    """What is found on the path, on a machine with the GPU."""
    return replace(examine(), hip="7.0", gpu=MI355X)


def test_nothing_installed_is_no_finding(site):
    found = examine()
    text = doctor_text(found)
    assert "AITER   not installed" in text
    assert "can run     emulated kernels" in text
    assert "cannot run  AITER kernels: AITER is not installed" in text
    assert "cannot run  installed vLLM: not installed" in text
    assert doctor_exit_code(found) == 0
    assert WRONG_AITER not in text


def test_the_unrelated_package_is_named(site):
    async_library(site)
    found = on_mi355x()
    text = doctor_text(found)
    assert find_aiter().kind == "unrelated"
    assert "AITER   another package of that name, 0.13.20191203 in " in text
    assert WRONG_AITER in text.splitlines()
    for word in ("async library", "`amd-aiter`", "ROCm images", "uninstall"):
        assert word in WRONG_AITER
    assert doctor_exit_code(found) == 1


def test_amds_package_on_the_right_gpu(site):
    amd_aiter(site)
    distribution(site, "vllm", "0.33.0")
    found = on_mi355x()
    text = doctor_text(found)
    assert "HIP 7.0" in text
    assert "GPU     AMD Instinct MI355X, gfx950, 256 compute units" in text
    assert f"AITER   amd-aiter 0.1.20 in {site / 'aiter'}" in text
    assert "can run     AITER kernels: AITER 0.1.20" in text
    assert "can run     installed vLLM: version 0.33.0" in text
    assert "differences" not in text
    assert doctor_exit_code(found) == 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hip": None}, "torch is not a ROCm build"),
        ({"gpu": None}, "no ROCm device is visible"),
        ({"gpu": replace(MI355X, arch="gfx942")}, "the device is gfx942"),
    ],
)
def test_amds_package_that_cannot_run_is_a_finding(site, change, reason):
    amd_aiter(site)
    found = replace(on_mi355x(), **change)
    assert f"cannot run  AITER kernels: {reason}" in doctor_text(found)
    assert doctor_exit_code(found) == 1


def test_missing_functions_are_listed(site):
    amd_aiter(site, without=FUNCTIONS[:7])
    text = doctor_text(on_mi355x())
    assert "7 differences from the signatures" in text
    assert f"  {FUNCTIONS[0]}: function missing: no definition found" in text
    assert text.endswith("  and 2 more (--json has them all)")
    assert doctor_exit_code(on_mi355x()) == 1


def test_json_says_the_same(site):
    amd_aiter(site, without=FUNCTIONS[:1])
    found = on_mi355x()
    document = json.loads(doctor_json(found))
    assert document["aiter"] == {"kind": "aiter", "root": str(site / "aiter"), "release": "0.1.20", "commit": None}
    assert document["gpu"]["compute_units"] == 256
    assert [d["function"] for d in document["aiter_differences"]] == [FUNCTIONS[0]]
    assert [(c["name"], c["available"]) for c in document["capabilities"]] == [
        (c.name, c.available) for c in found.capabilities
    ]
    assert document["exit_code"] == doctor_exit_code(found) == 1


def test_examining_imports_nothing(site):
    amd_aiter(site)
    examine()
    assert "aiter" not in sys.modules


def test_vllm_is_found_without_importing_it(site):
    assert find_vllm().kind == "absent"
    (site / "vllm").mkdir()
    (site / "vllm" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    distribution(site, "vllm", "0.33.0+rocm700.gabc1234")
    assert find_vllm() == Installation(
        kind="vllm", root=site / "vllm", release="0.33.0+rocm700.gabc1234", commit="abc1234"
    )


def test_a_commit_is_read_from_wherever_it_is_recorded(site):
    root = site / "vllm"
    root.mkdir()
    (root / "__init__.py").write_text("")
    assert commit_of("vllm", root) is None
    (root / "_version.py").write_text("__commit_id__ = commit_id = 'g1111111'\n")
    assert commit_of("vllm", root) == "1111111"
    distribution(site, "vllm", "0.33.0")
    (site / "vllm-0.33.0.dist-info" / "direct_url.json").write_text('{"vcs_info": {"commit_id": "2222222"}}')
    assert commit_of("vllm", root) == "2222222"
    git = ["git", "-C", str(root), "-c", "user.name=n", "-c", "user.email=e"]
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "m"]):
        subprocess.run([*git, *arguments], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    assert commit_of("vllm", root) == head
    (root / "__init__.py").write_text("edited = True\n")
    assert commit_of("vllm", root) == f"{head}-dirty"
