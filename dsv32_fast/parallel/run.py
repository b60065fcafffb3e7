"""`run_tp`: all ranks of a world, as processes or as threads, and what follows from their reports.

Processes are watched: a rank that dies or does not answer in time is named, and the others are stopped, so that a run
ends within its time limit whatever happens. Nothing here has run on GPUs.
"""

from __future__ import annotations

import datetime
import multiprocessing.connection
import os
import tempfile
import threading
import time
from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Literal

import msgspec
import torch
import torch.distributed as dist
import torch.multiprocessing

from dsv32_fast.parallel.communicator import PeerLostError, ProcessCommunicator, ThreadCommunicator, Threads
from dsv32_fast.parallel.rank import RankReport, TpSpec, run_rank, whole_model

Status = Literal["PASSED", "FAILED", "MISTRUSTED", "SKIPPED"]
PEER_LOST = 75
"""Exit code of a rank that ends because an exchange failed; the cause is another rank."""
_SEVERITY: tuple[Status, ...] = ("SKIPPED", "PASSED", "MISTRUSTED", "FAILED")


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One statement about a run, and whether the run bears it out."""

    name: str
    status: Status
    summary: str


@dataclass(frozen=True, kw_only=True)
class TpResult:
    """The outcome of one tensor-parallel run."""

    world: int
    rows: int
    heads: int
    """Heads on each rank, as padded for the decode kernel."""
    claims: tuple[Claim, ...]
    lost: tuple[str, ...]
    """Ranks that died or did not answer, each with the reason."""
    budget_used: dict[str, float]
    """Largest share of the error bound between TP N and TP 1, by stage."""

    @property
    def status(self) -> Status:
        """The most severe status of the claims."""
        return max((claim.status for claim in self.claims), key=_SEVERITY.index)


def run_tp(spec: TpSpec, *, threads: bool = False) -> TpResult:
    """Run all ranks of `spec.world` and judge.

    Args:
        spec: model, steps and limits.
        threads: ranks are threads of this process: as exact, without process start, and without torch.distributed.

    Returns:
        Three claims: all ranks choose the same experts and the same top-k in the same order; TP N equals TP 1 within
        the bound; the cached plan gives the bits of a rebuilt one. The last is SKIPPED where AITER ignores the plan
        (bf16, 16 heads, 32 rows or more). If a rank is lost, one claim says so and is MISTRUSTED.
    """
    reports, lost = _in_threads(spec) if threads else _in_processes(spec)
    claims: tuple[Claim, ...]
    if lost:
        claims = (Claim(name="all ranks finish", status="MISTRUSTED", summary="lost " + "; ".join(lost)),)
    else:
        claims = (_agreement(spec, reports[0]), _equality(spec, reports[0]), _cache(spec, reports))
    return TpResult(
        world=spec.world,
        rows=spec.rows,
        heads=spec.heads,
        claims=claims,
        lost=tuple(lost),
        budget_used=reports[0].budget_used if not lost else {},
    )


def _agreement(spec: TpSpec, report: RankReport) -> Claim:
    name = "ranks choose the same experts and the same top-k order"
    if spec.world == 1:
        return Claim(name=name, status="SKIPPED", summary="one rank has nobody to agree with")
    if report.disagreements:
        first = report.disagreements[0]
        where = f"rank {first.rank} differs from rank 0 in {first.stage} of layer {first.layer}, step {first.step}"
        return Claim(name=name, status="FAILED", summary=f"{where}; {len(report.disagreements)} differences")
    status: Status = "PASSED" if report.choices else "MISTRUSTED"
    return Claim(name=name, status=status, summary=f"{report.choices} rows of choices compared over {spec.world} ranks")


def _equality(spec: TpSpec, report: RankReport) -> Claim:
    name = f"TP {spec.world} equals TP 1 within the bound"
    if spec.world == 1:
        return Claim(name=name, status="SKIPPED", summary="TP 1 is what the others are compared with")
    if report.unequal:
        stages = ", ".join(f"{stage} ({count} elements)" for stage, count in report.unequal.items())
        return Claim(name=name, status="FAILED", summary=f"stages that are not divided differ: {stages}")
    stage, used = max(report.budget_used.items(), key=lambda item: item[1], default=("no stage", 0.0))
    summary = f"{report.compared} elements, at most {used:.3g} of the bound ({stage})"
    if used > 1:
        return Claim(name=name, status="FAILED", summary=summary)
    return Claim(name=name, status="PASSED" if report.compared else "MISTRUSTED", summary=summary)


def _cache(spec: TpSpec, reports: list[RankReport]) -> Claim:
    name = "a cached plan gives the bits of a rebuilt one"
    unequal = [rank for rank, report in enumerate(reports) if report.cache_unequal]
    if unequal:
        summary = f"{reports[unequal[0]].cache_unequal} steps differ on rank {unequal[0]}"
        return Claim(name=name, status="FAILED", summary=summary)
    if reports[0].reused:
        return Claim(name=name, status="PASSED", summary=f"{reports[0].reused} steps used a cached plan")
    if reports[0].reused_ignored:
        why = f"AITER ignores the plan with bf16, {spec.heads} heads and {spec.rows} rows"
        return Claim(name=name, status="SKIPPED", summary=f"{why}; {reports[0].reused_ignored} steps kept one")
    return Claim(name=name, status="MISTRUSTED", summary="no step used a cached plan; use a key policy and more steps")


def _in_threads(spec: TpSpec) -> tuple[list[RankReport], list[str]]:
    meeting = Threads(spec.world, spec.timeout_s)
    reports: dict[int, RankReport] = {}
    failures: dict[int, str] = {}

    def work(rank: int) -> None:
        try:
            reports[rank] = run_rank(ThreadCommunicator(rank, meeting), spec)
        except threading.BrokenBarrierError:
            failures.setdefault(rank, "")  # another rank failed, or all waited too long for one
        except Exception as error:
            failures[rank] = _reason(error)
            meeting.barrier.abort()

    whole_model(spec.config, spec.seed)  # once, before all ranks want it
    ranks = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(spec.world)]
    deadline = time.monotonic() + spec.timeout_s
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join(max(0.0, deadline - time.monotonic()))
    meeting.barrier.abort()  # nobody waits any longer
    lost = [f"rank {r}: {reason}" for r, reason in sorted(failures.items()) if reason]
    if not lost:
        lost = _silent([r for r in range(spec.world) if r not in reports], meeting.progress, spec.timeout_s)
    return [reports[r] for r in sorted(reports)], lost


def _in_processes(spec: TpSpec) -> tuple[list[RankReport], list[str]]:
    with tempfile.TemporaryDirectory(prefix="dsv32-tp-") as folder:
        context = torch.multiprocessing.get_context("spawn")
        progress = context.Array("q", spec.world, lock=False)
        arguments = [(rank, spec, folder, progress) for rank in range(spec.world)]
        ranks = [context.Process(target=_process, args=given, daemon=True) for given in arguments]
        try:
            for process in ranks:
                process.start()
            lost = _watch(ranks, spec.timeout_s, Path(folder), progress)
        finally:
            _stop(ranks)
        if lost:
            return [], lost
        files = [Path(folder, f"rank-{r}.json").read_bytes() for r in range(spec.world)]
        return [msgspec.json.decode(text, type=RankReport) for text in files], []


def _watch(ranks: Sequence[BaseProcess], timeout_s: float, folder: Path, progress: Sequence[int]) -> list[str]:
    """Wait for all ranks; the first that fails, or those that are silent at the end of the time, by name."""
    deadline, followers = time.monotonic() + timeout_s, list[int]()
    running = {process.sentinel: number for number, process in enumerate(ranks)}
    while running:
        ended = multiprocessing.connection.wait(list(running), max(0.0, deadline - time.monotonic()))
        if not ended:
            return _silent(sorted(running.values()), progress, timeout_s)
        numbers = [running.pop(sentinel) for sentinel in ended if isinstance(sentinel, int)]
        for r in numbers:
            ranks[r].join()
        followers += [r for r in numbers if ranks[r].exitcode == PEER_LOST]
        lost = [text for r in numbers if (text := _lost(r, ranks[r], folder))]
        if lost:
            return lost
    return [f"rank {r}: lost its connection to the others" for r in followers]


def _silent(unfinished: list[int], progress: Sequence[int], timeout_s: float) -> list[str]:
    """Of the ranks without an answer those that are behind; the others only wait for them."""
    least = min((progress[r] for r in unfinished), default=0)
    return [f"rank {r}: no answer within {timeout_s:g} s" for r in unfinished if progress[r] == least]


def _lost(rank: int, process: BaseProcess, folder: Path) -> str:
    """Why an ended rank is lost; empty if it did its work, or ended only since another one was lost."""
    failure = folder / f"rank-{rank}.error"
    if failure.exists():
        return f"rank {rank}: {failure.read_text(encoding='utf-8')}"
    if process.exitcode == PEER_LOST:
        return ""
    if process.exitcode:
        how = f"killed by signal {-process.exitcode}" if process.exitcode < 0 else f"exit code {process.exitcode}"
        return f"rank {rank}: {how}"
    return "" if (folder / f"rank-{rank}.json").exists() else f"rank {rank}: ended without a report"


def _stop(ranks: Sequence[BaseProcess]) -> None:
    for process in ranks:
        if process.is_alive():
            process.terminate()
    for process in ranks:
        if process.pid is not None:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()


def _process(rank: int, spec: TpSpec, folder: str, progress: MutableSequence[int]) -> None:
    """One rank as a process of its own."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this machine
    torch.set_num_threads(1)
    try:
        if spec.backend == "nccl":
            torch.cuda.set_device(rank)
        dist.init_process_group(
            spec.backend,
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=spec.world,
            timeout=datetime.timedelta(seconds=spec.timeout_s),
        )
        report = run_rank(ProcessCommunicator(rank, spec.world, progress), spec)
        Path(folder, f"rank-{rank}.json").write_bytes(msgspec.json.encode(report))
        dist.destroy_process_group()
    except PeerLostError:
        os._exit(PEER_LOST)
    except Exception as error:
        _write_failure(Path(folder), rank, error)
        os._exit(1)


def _write_failure(folder: Path, rank: int, error: Exception) -> None:
    """The reason, written whole or not at all: the others fail soon after, and the first one counts."""
    text = folder / f"rank-{rank}.error.part"
    text.write_text(_reason(error), encoding="utf-8")
    text.rename(folder / f"rank-{rank}.error")


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
