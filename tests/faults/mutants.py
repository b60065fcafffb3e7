"""A mutation run over planner, metadata builder, router and bounds, with cosmic-ray: score and survivors per module.

    pip install cosmic-ray
    python tests/faults/mutants.py [--sample N] [--seed S] [MODULE...]

It works on a copy of the checkout. Each mutant is one changed operator, comparison or number of one module, killed when
the module's tests fail or hang. `--sample` draws N mutants per module, since each costs one run of its tests.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS: dict[str, tuple[str, ...]] = {
    "dsv32_fast/kernels/emulated/launch.py": (
        "tests/planner/test_launch_rules.py",
        "tests/planner/test_planner_examples.py",
    ),
    "dsv32_fast/kernels/emulated/_scheduler.py": (
        "tests/planner/test_planner_examples.py",
        "tests/planner/test_recorded_plans.py",
    ),
    "dsv32_fast/metadata.py": ("tests/metadata",),
    "dsv32_fast/router.py": ("tests/fast/test_fast_router.py",),
    "dsv32_fast/kernels/emulated/router.py": ("tests/kernels/test_emulated_router.py",),
    "dsv32_ref/bounds/budget.py": ("tests/bounds/test_bounds_budget.py",),
    "dsv32_ref/bounds/margins.py": ("tests/bounds/test_bounds_margins.py",),
    "dsv32_ref/bounds/arith.py": ("tests/bounds/test_bounds_arith.py",),
}
"""Module, and the tests that stand for it."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", help="of the modules below; all by default")
    parser.add_argument("--sample", type=int, default=0, help="mutants per module; 0 for all")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    unknown = set(asked.modules) - set(TESTS)
    if unknown:
        parser.error(f"unknown module {sorted(unknown)[0]}; choose of {', '.join(TESTS)}")
    survivors = 0
    for module in asked.modules or TESTS:
        with tempfile.TemporaryDirectory() as folder:
            survivors += run(module, Path(folder), asked.sample, asked.seed)
    return int(survivors > 0)


def run(module: str, folder: Path, sample: int, seed: int) -> int:
    """Mutate one module in a copy; prints its score and survivors, returns their number."""
    copy = folder / "suite"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache"))
    # Through the shell: a test session that hangs is ended by cosmic-ray, and counts as killed.
    command = f"{sys.executable} -m pytest -x -q -p no:cacheprovider {' '.join(TESTS[module])}"
    (copy / "mutants.toml").write_text(
        f'[cosmic-ray]\nmodule-path = "{module}"\ntimeout = 120.0\nexcluded-modules = []\n'
        f'test-command = "{command}"\n[cosmic-ray.distributor]\nname = "local"\n'
    )
    paths = os.pathsep.join(str(copy / part) for part in ("", "fuzz", "reports"))
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "NUMBA_CACHE_DIR": str(folder / "numba")}

    def cosmic_ray(*arguments: str) -> None:
        subprocess.run(["cosmic-ray", *arguments], cwd=copy, env=environment, check=True)

    cosmic_ray("init", "mutants.toml", "mutants.sqlite")
    cosmic_ray("baseline", "mutants.toml")
    total = draw(copy / "mutants.sqlite", sample, seed)
    cosmic_ray("exec", "mutants.toml", "mutants.sqlite")
    return tell(module, copy / "mutants.sqlite", total)


def draw(session: Path, sample: int, seed: int) -> int:
    """Keep `sample` of the session's mutants; returns how many there were."""
    with sqlite3.connect(session) as database:
        jobs = sorted(row[0] for row in database.execute("SELECT job_id FROM work_items"))
        if 0 < sample < len(jobs):
            dropped = random.Random(seed).sample(jobs, len(jobs) - sample)
            for table in ("mutation_specs", "work_items"):
                database.executemany(f"DELETE FROM {table} WHERE job_id = ?", [(job,) for job in dropped])
    return len(jobs)


def tell(module: str, session: Path, total: int) -> int:
    """Print the score and the survivors of a finished session."""
    query = (
        "SELECT r.test_outcome, m.operator_name, m.start_pos_row, r.diff FROM work_results r "
        "JOIN mutation_specs m ON m.job_id = r.job_id"
    )
    with sqlite3.connect(session) as database:
        rows = list(database.execute(query))
    alive = [row for row in rows if "SURVIVED" in str(row[0]).upper()]
    print(f"{module}: {len(rows) - len(alive)} of {len(rows)} mutants killed ({total} possible)")
    for _, operator, line, diff in alive:
        changed = [text for text in (diff or "").splitlines() if text[:1] in "+-" and text[:3] not in ("+++", "---")]
        print(f"  survived: line {line}, {operator}: {' -> '.join(changed)}")
    return len(alive)


if __name__ == "__main__":
    sys.exit(main())
