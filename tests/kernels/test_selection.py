"""Which kernels run, what they take, what is left out, and kernels on a device for tensors on the host."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from kernel_worlds import RULE, admits

from dsv32_fast.kernels.mounted import EMULATION
from dsv32_fast.kernels.selection import ANY, HARDWARE, Admits, FromHost, Limits, current, selected, skipped

pytestmark = admits(emulation=RULE)


@pytest.mark.parametrize(
    ("admits", "reason"),
    [
        (Admits(), None),
        (Admits(heads=16, latent=512, rope=64, query_rows=1, page=1, router=(256, 8, 4, 8), topk=2048), None),
        (Admits(heads=8), "heads 8: real kernels take 16, 32, ..., 128"),
        (Admits(latent=64), "latent 64: real kernels take 512"),
        (Admits(topk=100), "topk 100: real kernels take 128, 256, ..., 2048"),
        (Admits(router=(64, 4, 2, 6)), "router (64, 4, 2, 6): real kernels take (256, 8, 4, 8)"),
        (Admits(emulation="no GPU says so"), "only the emulation: no GPU says so"),
    ],
)
def test_what_real_kernels_take(admits: Admits, reason: str | None) -> None:
    assert HARDWARE.why_not(admits) == reason
    assert ANY.why_not(admits) is None


def test_small_worlds_become_the_smallest_admitted() -> None:
    assert [HARDWARE.smallest("heads", n) for n in (1, 16, 17, 128)] == [16, 16, 32, 128]
    assert (HARDWARE.smallest("latent", 16), HARDWARE.smallest("topk", 16)) == (512, 128)
    assert ANY.smallest("heads", 3) == 3
    with pytest.raises(ValueError, match="heads 129: these kernels take at most 128"):
        HARDWARE.smallest("heads", 129)


def test_the_selection_is_put_back() -> None:
    before = current()
    with selected("aiter") as inside:
        assert current() is inside
        assert (inside.limits, inside.title) == (HARDWARE, "aiter (the mounted emulation)")
        assert skipped() == {}
        inside.left_out.update(["a reason"])
        assert skipped() == {"a reason": 1}
    assert current() is before
    with pytest.raises(ValueError, match="kernels 'cuda': choose emulated or aiter"), selected("cuda"):  # type: ignore[arg-type]
        pass


def test_views_go_there_and_come_back() -> None:
    """Strided inputs and outputs; what lies beside a view stays as it is; a returned argument is the caller's own."""
    logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(0))[:, :256]
    outputs = [(torch.full((3, 9), 7.0), torch.full((3, 9), 7, dtype=torch.int32)) for _ in range(2)]
    for kernels, (weights, ids) in zip((EMULATION, FromHost(EMULATION, "cpu")), outputs, strict=True):
        kernels.biased_grouped_topk(logits, torch.zeros(256), weights[:, :8], ids[:, :8], 8, 4, True, 2.5)
    for expected, found in zip(*outputs, strict=True):
        assert torch.equal(expected, found)
        assert (found[:, 8] == 7).all()
    weights, ids = torch.zeros(3, 8), torch.zeros(3, 8, dtype=torch.int32)
    arguments = (logits.contiguous(), torch.zeros(256), weights, ids, 8, 4, 8, 0)
    returned = FromHost(EMULATION, "cpu").moe_fused_gate(*arguments)
    assert returned[0] is weights
    assert returned[1] is ids
    assert bool(weights.any())


def test_the_plan_points_to_the_copies() -> None:
    """`work_metadata_ptrs` holds addresses, so those of the copies that a kernel gets."""
    seen: dict[str, torch.Tensor] = {}
    kernels = SimpleNamespace(mla_decode_fwd=lambda **given: seen.update(given))
    q = torch.zeros(1, 16, 576)
    plan = {name: torch.zeros(2, dtype=torch.int32) for name in ("work_indptr", "work_info_set")}
    pointers = torch.zeros(2, dtype=torch.uint64)
    FromHost(kernels, "cpu").mla_decode_fwd(q, q, q, *[q] * 4, 1, work_meta_data=pointers, **plan)  # type: ignore[arg-type]
    there = [seen[name].data_ptr() for name in ("work_indptr", "work_info_set")]
    assert seen["work_meta_data"].tolist() == there
    assert there[0] != plan["work_indptr"].data_ptr()
    assert pointers.tolist() == [0, 0]


def test_a_session_counts_what_it_leaves_out() -> None:
    """Two files on the mounted emulation; what fixes another topk is left out, and counted by reason."""
    root = Path(__file__).resolve().parents[2]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (root, root / "fuzz", root / "reports")))}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--kernels", "aiter"]
    command += ["tests/kernels/test_emulated_topk.py", "tests/kernels/test_emulated_indexer.py"]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "left out by the kernels: aiter (the mounted emulation)" in done.stdout
    assert "    4  topk 4: real kernels take 128, 256, ..., 2048" in done.stdout
    assert "    2  only the emulation: bad arguments, which a GPU need not refuse" in done.stdout


def test_limits_name_their_fields() -> None:
    """Else a typo would admit everything."""
    named = set(Admits.__dataclass_fields__) - {"emulation"}
    assert named == set(Limits.__dataclass_fields__) - {"defined"}
