"""Traces recorded by torch.profiler from the decode path, with known counts inside; synthetic ones; damaged ones."""

from __future__ import annotations

import dataclasses
import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from dsv32_fast.options import PRESETS
from dsv32_fast.path import PathConfig
from dsv32_fuzz.latency.counting import NARROW, path_of
from dsv32_fuzz.latency.evidence import read_evidence
from dsv32_fuzz.latency.seam import HollowKernels, Seam
from dsv32_fuzz.traces.compare import compare
from dsv32_fuzz.traces.kineto import TraceError, read_trace
from dsv32_fuzz.traces.steps import step_table
from dsv32_reports.cli import app

CAST = "void at::native::vectorized_elementwise_kernel<4, at::native::bfloat16tofloat32_copy_kernel_cuda(x)>"
PLAN = "void kn_get_mla_metadata_v1_2<MlaMetadataV12Traits<128, false, 1, true, false> >(Parameter)"
FILL = "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<int> >"
LAYERS = 4  # one of them dense
STEPS = 6


def record(preset: str, path: Path) -> Seam:
    """A trace of six marked steps, the batch of the last two smaller, and what the seam counted."""
    config = dataclasses.replace(NARROW, n_layers=LAYERS, n_dense_layers=1, index_topk=16)
    seam = Seam(HollowKernels(), annotate=True)
    run = path_of(PRESETS[preset], seam, config, PathConfig(max_num_batched_tokens=64, gate_gemm="bf16"))
    state = run.new_state(512)
    state.append({0: [0] * 30, 1: [0] * 30})
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for number in range(STEPS):
            tokens = {0: [1], 1: [2]} if number < 4 else {0: [1]}
            with torch.profiler.record_function(f"execute_context_0(0)_generation_{len(tokens)}({len(tokens)})"):
                run.decode(state, tokens)
    profiler.export_chrome_trace(str(path))
    return seam


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Seam]]:
    folder = tmp_path_factory.mktemp("traces")
    paths = {"baseline": folder / "before.json", "pr47766": folder / "after.json.gz"}
    return {preset: (path, record(preset, path)) for preset, path in paths.items()}


def test_recorded_counts_are_found(recorded: dict[str, tuple[Path, Seam]]) -> None:
    before, after = (step_table(read_trace(path)) for path, _ in recorded.values())
    assert before.steps == after.steps == STEPS
    assert before.decode == (True,) * STEPS
    assert before.level == "host"
    assert before.counts["plan launches"] == (1,) * STEPS
    assert after.counts["plan launches"] == (1, 0, 0, 0, 1, 0)
    assert sum(after.counts["plan launches"]) == recorded["pr47766"][1].calls["get_mla_metadata_v1"]
    # One router cast per mixture layer and step; every other conversion is the same on both sides.
    casts = np.subtract(before.counts["casts"], after.counts["casts"])
    assert casts.tolist() == [LAYERS - 1] * STEPS
    # Full clears zero three buffers, tail clears two (empty ones included).
    assert set(np.subtract(before.counts["fills"], after.counts["fills"]).tolist()) == {1}


def test_every_kernel_at_the_seam_is_found(recorded: dict[str, tuple[Path, Seam]]) -> None:
    path, seam = recorded["baseline"]
    trace = read_trace(path)
    for name, calls in seam.calls.items():
        table = step_table(trace, patterns={name: f"^{name}$"})
        assert sum(table.counts[name]) == calls > 0


def test_gzip_and_plain_give_the_same(recorded: dict[str, tuple[Path, Seam]], tmp_path: Path) -> None:
    path, _ = recorded["baseline"]
    packed = tmp_path / "packed.json.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    plain, unpacked = step_table(read_trace(path)), step_table(read_trace(packed))
    assert dataclasses_without_path(plain) == dataclasses_without_path(unpacked)


def dataclasses_without_path(table: Any) -> dict[str, Any]:
    return {field: getattr(table, field) for field in table.__struct_fields__ if field != "path"}


class Writer:
    """A device trace: `steps` marked steps of `period` us, with runtime calls and the kernels that they launch."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.correlation = 0

    def add(self, cat: str, name: str, ts: float, dur: float, **args: Any) -> None:
        self.events.append(
            {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": 1, "ts": ts, "dur": dur, "args": args}
        )

    def launch(self, name: str, at: float, runs_at: float, dur: float = 2.0) -> None:
        self.correlation += 1
        self.add("cuda_runtime", "hipLaunchKernel", at, 1.0, correlation=self.correlation)
        self.add("kernel", name, runs_at, dur, correlation=self.correlation)

    def write(self, path: Path) -> Path:
        path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": self.events}))
        return path


def device_trace(
    path: Path, casts: int, plans: set[int], steps: int = 60, period: float = 41_522.0, lag: float = 0
) -> Path:
    """Kernels run `lag` us after their launch; periods wander by 0.1 %."""
    writer, rng, now = Writer(), np.random.default_rng(len(plans)), 1000.0
    for step in range(steps):
        writer.add("user_annotation", "execute_context_0(0)_generation_64(64)", now, 100.0)
        for k in range(casts):
            writer.launch(CAST, now + k, now + k + lag)
        for _ in range(int(step in plans)):
            writer.launch(PLAN, now + 70, now + 70 + lag)
        writer.launch(FILL, now + 80, now + 80 + lag, dur=10.0)
        writer.add("cuda_runtime", "hipStreamSynchronize", now + 90, 1.0, correlation=0)
        now += period * (1 + 0.001 * rng.standard_normal())
    return writer.write(path)


@pytest.mark.parametrize("lag", [0.0, 50_000.0])
def test_device_work_belongs_to_the_step_that_launched_it(lag: float, tmp_path: Path) -> None:
    table = step_table(read_trace(device_trace(tmp_path / "a.json", 58, {0, 7}, lag=lag)))
    assert table.level == "device"
    assert table.counts["casts"] == (58,) * 60
    assert np.flatnonzero(table.counts["plan launches"]).tolist() == [0, 7]
    assert table.counts["fills"] == table.counts["synchronisations"] == (1,) * 60


def test_idle_time_is_the_complement_of_the_union(tmp_path: Path) -> None:
    writer = Writer()
    for start in (0.0, 100.0, 200.0):
        writer.add("user_annotation", "step", start, 90.0)
    for begin, dur in ((10.0, 20.0), (20.0, 20.0), (12.0, 3.0), (90.0, 25.0), (250.0, 10.0)):
        writer.add("kernel", "k", begin, dur)
    table = step_table(read_trace(writer.write(tmp_path / "a.json")), "step$")
    # Busy: 10 to 40 and 90 to 100; 100 to 115; 250 to 260 of a last step that ends at 290.
    assert np.allclose(table.idle_ms, [0.060, 0.085, 0.080])


def test_the_claims_on_a_trace_that_fulfils_them(tmp_path: Path) -> None:
    before = device_trace(tmp_path / "before.json", 58, set(range(100)), steps=100)
    after = device_trace(tmp_path / "after.json", 0, set(range(0, 96, 16)), steps=100, period=40_234.0)
    found = compare(step_table(read_trace(before)), step_table(read_trace(after)))
    assert found.verdict == "faster"
    assert {claim.name: claim.status for claim in found.claims} == {
        "ms per step, before": "confirmed",
        "ms per step, after": "confirmed",
        "change of the step": "confirmed",
        "casts removed per step": "confirmed",
        "plan launches skipped, after": "confirmed",
    }
    out = tmp_path / "evidence.json"
    done = CliRunner().invoke(app, ["trace", str(before), str(after), "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("faster: after / before = 0.96")
    evidence = read_evidence(out)
    assert (evidence.kind, evidence.admissible, evidence.compared[0].verdict) == ("trace", True, "faster")
    assert evidence.compared[0].ratio == pytest.approx(found.ratio)
    assert evidence.claims == found.claims
    assert evidence.sources == (str(before), str(after))


def test_few_steps_give_evidence_without_an_interval(tmp_path: Path) -> None:
    traces = [device_trace(tmp_path / f"{period}.json", 1, set(), steps=10, period=period) for period in (4e4, 4.1e4)]
    out = tmp_path / "evidence.json"
    done = CliRunner().invoke(app, ["trace", *map(str, traces), "--out", str(out)])
    assert done.exit_code != 0
    step = read_evidence(out).compared[0]
    assert (step.verdict, step.low, step.p_value, len(step.a_s[0])) == ("cannot tell", None, None, 9)


def test_a_trace_that_refutes_them(tmp_path: Path) -> None:
    before = device_trace(tmp_path / "before.json", 58, set(range(60)))
    after = device_trace(tmp_path / "after.json", 1, set(range(30)))
    done = CliRunner().invoke(app, ["trace", str(before), str(after), "--json"])
    assert done.exit_code == 1, done.output
    document = json.loads(done.stdout)
    assert document["verdict"] == "no difference"
    refuted = {claim["name"] for claim in document["claims"] if claim["status"] == "refuted"}
    assert refuted == {"change of the step", "casts removed per step", "plan launches skipped, after"}
    slower = CliRunner().invoke(
        app, ["trace", str(after), str(device_trace(tmp_path / "c.json", 1, set(), period=43e3))]
    )
    assert slower.exit_code == 1
    assert slower.stdout.startswith("slower")


def test_a_host_trace_confirms_nothing(recorded: dict[str, tuple[Path, Seam]], tmp_path: Path) -> None:
    out = tmp_path / "evidence.json"
    done = CliRunner().invoke(app, ["trace", *(str(path) for path, _ in recorded.values()), "--out", str(out)])
    assert done.exit_code == 3, done.output
    assert (read_evidence(out).kind, read_evidence(out).admissible) == ("host trace", False)
    assert done.stdout.startswith("cannot tell")
    assert "confirm arithmetic only" in done.stdout
    assert "confirmed" not in done.stdout


@pytest.mark.parametrize("name", ["before.json", "before.json.gz"])
def test_truncated_traces(recorded: dict[str, tuple[Path, Seam]], name: str, tmp_path: Path) -> None:
    whole = recorded["baseline"][0].read_bytes()
    data = whole[: len(whole) // 2] if name.endswith("json") else gzip.compress(whole)[: len(gzip.compress(whole)) // 2]
    cut = tmp_path / name
    cut.write_bytes(data)
    done = CliRunner().invoke(app, ["trace", str(cut), str(cut)])
    assert done.exit_code == 2
    assert len(done.stderr.splitlines()) == 1
    assert "ends early" in done.stderr or "end early" in done.stderr
    assert "--partial" in done.stderr
    partial = CliRunner().invoke(app, ["trace", str(cut), str(cut), "--partial"])
    assert partial.exit_code == 3, partial.output
    assert "PARTIAL" in partial.stdout


DAMAGED = {
    "empty": (b"", "it is no JSON"),
    "text": (b"hello", "it is no JSON"),
    "no events": (b'{"traceEvents": []}', "it holds no traceEvents"),
    "another document": (b'{"a": 1}', "it holds no traceEvents"),
    "broken": (b'{"traceEvents": [{"ph": "X", }]}', "its JSON is damaged"),
    "bad gzip": (b"\x1f\x8b" + bytes(20), "its gzip data are damaged"),
    "no time": (b'[{"ph": "X", "cat": "kernel", "name": "k", "ts": 1}]', "event 1 has no name, or no time"),
    "bad time": (b'[{"ph": "X", "cat": "kernel", "name": "k", "ts": "1", "dur": 1}]', "event 1 has no name"),
    "negative": (b'[{"ph": "X", "cat": "kernel", "name": "k", "ts": 1, "dur": -1}]', "event 1 has no name"),
    "no steps": (b'[{"ph": "X", "cat": "kernel", "name": "k", "ts": 1, "dur": 1}]', "fewer than two steps"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_traces_are_one_clear_line(name: str, tmp_path: Path) -> None:
    data, message = DAMAGED[name]
    path = tmp_path / "trace.json"
    path.write_bytes(data)
    done = CliRunner().invoke(app, ["trace", str(path), str(path)])
    assert done.exit_code == 2, done.output
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert str(path) in done.stderr


def test_markers(tmp_path: Path) -> None:
    def table(names: list[str], **options: Any) -> Any:
        writer = Writer()
        for i, name in enumerate(names):
            writer.add("user_annotation", name, 100.0 * i, 50.0)
        return step_table(read_trace(writer.write(tmp_path / "a.json")), **options)

    new = ["execute_context_1(512)_generation_3(3)", "execute_context_0(0)_generation_4(4)", "ProfilerStep#1"] * 2
    assert table(new).decode == (False, True, False, True)
    assert table(new[:2] * 2, decode_only=True).steps == 2
    assert table(["execute_new_0_cached_4"] * 3).decode == (True,) * 3
    assert table(["ProfilerStep#1", "ProfilerStep#2"]).decode is None
    assert table(["mine", "other", "mine"], marker="mine").steps == 2
    with pytest.raises(TraceError, match="name the annotation by --step-marker"):
        table(["mine", "mine"])
    with pytest.raises(TraceError, match="does not say which steps are decode"):
        table(["ProfilerStep#1", "ProfilerStep#2"], decode_only=True)
    with pytest.raises(TraceError, match="is no regular expression"):
        table(["mine"] * 2, marker="(")


def test_overlapping_steps_and_impossible_times(tmp_path: Path) -> None:
    writer = Writer()
    for start in (0.0, 10.0, 20.0):
        writer.add("user_annotation", "ProfilerStep#1", start, 50.0)
    with pytest.raises(TraceError, match="overlap; give the trace of one rank"):
        step_table(read_trace(writer.write(tmp_path / "a.json")))
    fast = step_table(read_trace(device_trace(tmp_path / "b.json", 1, set(), period=300.0)))
    with pytest.raises(TraceError, match="another model"):
        compare(fast, fast)


GENERATE = """
import json, sys
name = "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<int>, std::array<char*, 1ul> >(int)"
args = {"External id": 1, "device": 0, "stream": 7, "registers": 16, "grid": [1024, 1, 1], "block": [128, 1, 1]}
head = json.dumps({"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 7, "args": args})[:-1]
size = i = 0
with open(sys.argv[1], "w") as file:
    file.write('{"schemaVersion": 1, "traceEvents": [\\n')
    while size < int(sys.argv[2]):
        lines = [f'{head}, "ts": {2 * k}.125, "dur": 1.5}}' for k in range(i, i + 1000)]
        lines.append(f'{{"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#{i}", "ts": {2 * i}, "dur": 1999}}')
        size += file.write(",\\n".join(lines) + ",\\n")
        i += 1000
    file.write('{"ph": "M", "name": "end"}]}')
"""
READ = """
import os, re, resource, sys, time
from pathlib import Path
from dsv32_fuzz.traces.kineto import read_trace
from dsv32_fuzz.traces.steps import step_table
begin = time.process_time()
table = step_table(read_trace(Path(sys.argv[1])))
seconds = time.process_time() - begin
unit = 1 if sys.platform == "darwin" else 1024
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
if os.path.exists("/proc/self/status"):  # on Linux ru_maxrss holds that of the process that started this one
    peak = 1024 * int(re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())[1])
print(sum(table.counts["fills"]), table.steps, seconds, peak)
"""


@pytest.mark.nightly
def test_a_trace_of_300_mb_is_read_in_bounded_memory(tmp_path: Path) -> None:
    path = tmp_path / "large.json"
    subprocess.run([sys.executable, "-c", GENERATE, str(path), str(300_000_000)], check=True)
    done = subprocess.run([sys.executable, "-c", READ, str(path)], check=True, capture_output=True, text=True)
    fills, steps, seconds, peak = (float(word) for word in done.stdout.split())
    peak_mb = peak / 1e6
    print(
        f"{path.stat().st_size / 1e6:.0f} MB, {path.stat().st_size / 1e6 / seconds:.0f} MB/s, {peak_mb:.0f} MB resident"
    )
    assert fills == 1000 * steps
    assert peak_mb < 500
