"""Replays of recorded outputs as verdicts, and as phases of a campaign: is the suite's own truth true?"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from dsv32_fuzz.events import Event, PhaseStarted, VerdictReached
from dsv32_fuzz.golden.components import ComponentReplay
from dsv32_fuzz.golden.decodes import RunReplay, replay_decodes
from dsv32_fuzz.golden.plans import DEFINED, RECORDINGS, UNDEFINED, replay_plans
from dsv32_fuzz.verdict import Status, Verdict

DECODES = RECORDINGS.parent / "decodes"
SHORT_RUNS = ("fp32_seed0", "NEGATIVE_sep30rope_fp32_seed0")
"""What is replayed where time is short: one honest run, one recorded with a defect, and every component vector."""


def reference_self_check(runs: Collection[str] | None = SHORT_RUNS) -> Iterator[Event]:
    """Whether the reference still gives the recorded decodes of another implementation; `runs`: by name, None all."""
    yield PhaseStarted(phase="reference", title="hold the reference against recorded decodes")
    yield VerdictReached(phase="reference", scope="recorded", verdict=decodes_verdict(DECODES, runs=runs))


def recorded_plans() -> Iterator[Event]:
    """Whether the emulated planner still gives AITER's recorded plans."""
    phase = "recordings"
    yield PhaseStarted(phase=phase, title="replay AITER's recorded plans")
    for path in (DEFINED, UNDEFINED):
        yield VerdictReached(phase=phase, scope=path.name.removesuffix(".json.gz"), verdict=plans_verdict(path))


def plans_verdict(path: Path) -> Verdict:
    """The replay of one file of recorded plans, as a verdict.

    Raises:
        ValueError: not a recording.
    """
    replay = replay_plans(path)
    counts = {"passed": replay.passed, "failed": replay.failed, "skipped": replay.skipped, "refused": replay.refused}
    told = f"{replay.passed - replay.refused} plans equal"
    told += f", {replay.refused} calls refused as undefined in AITER" if replay.refused else ""
    told += f", {replay.skipped} skipped: {'; '.join(replay.skip_reasons)}" if replay.skipped else ""
    if replay.failed:
        status, summary = Status.FAILED, f"{replay.failed} plans differ, first {replay.first_difference}"
    elif replay.compared_nothing:
        status, summary = Status.MISTRUSTED, f"every plan was skipped: {', '.join(replay.skip_reasons)}"
    else:
        status, summary = Status.PASSED, told
    return Verdict(check="recorded_plans", status=status, summary=summary, measured={**counts})


def decodes_verdict(
    folder: Path, progress: Callable[[str], None] | None = None, *, runs: Collection[str] | None = None
) -> Verdict:
    """The replay of a folder of recorded decodes, as a verdict; `progress` gets one line per run.

    `runs`: those to replay, by name; None for all.

    Raises:
        ValueError: not such a folder.
    """
    replay = replay_decodes(folder, progress, runs)
    parts: list[RunReplay | ComponentReplay] = [*replay.runs, *replay.components]
    wrong = [part for part in parts if not part.right]
    counts = {
        "runs": len(replay.runs),
        "components": len(replay.components),
        "values": sum(run.values for run in replay.runs),
        "sets": sum(run.sets for run in replay.runs),
        "certified_ties": sum(run.ties for run in replay.runs),
        "wrong": len(wrong),
    }
    if wrong:
        status, summary = Status.FAILED, str(wrong[0])
    elif not replay.runs:
        status, summary = Status.MISTRUSTED, "no recorded run was replayed, so nothing was compared"
    else:
        status = Status.PASSED
        summary = f"{len(replay.runs)} runs and {len(replay.components)} component vectors are as they should be"
    return Verdict(check="recorded_decodes", status=status, summary=summary, measured={**counts})
