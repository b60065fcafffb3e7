"""The harness tested by itself: defects are planted, and a probe complains when one is not reported.

Probes need no check that draws its own input; they bring small ones of their own. A step check is probed with planted
faults of the catalogue: each must kill one of them, and none may complain about the faultless target.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec
import torch
from hypothesis import strategies as st

from dsv32_fast.batch import StepBatch
from dsv32_fast.metadata import MetadataBuilder, SparseMlaMetadata
from dsv32_fast.options import PRESETS
from dsv32_fuzz import checks
from dsv32_fuzz.case import Case, Dims, InputCase
from dsv32_fuzz.checks.catalogue import STEP_CHECKS
from dsv32_fuzz.checks.own_input import InputCheck
from dsv32_fuzz.events import CounterexampleFound
from dsv32_fuzz.faults import buffers, key, planner
from dsv32_fuzz.search.explore import explore
from dsv32_fuzz.search.properties import OwnInput, StepTraffic
from dsv32_fuzz.targets import Target
from dsv32_fuzz.targets.intree import InTreeTarget
from dsv32_fuzz.verdict import Status, Verdict
from dsv32_ref.bounds import Approx, Budget, certify_topk
from dsv32_ref.bounds import budget as comparison

ROWS, COLUMNS = 64, 16


@dataclass(frozen=True, kw_only=True)
class Probe:
    """One demand on the harness; `run` tells what is wrong, empty if nothing is."""

    name: str
    meaning: str
    run: Callable[[], str]


class _Planted(msgspec.Struct, frozen=True):
    kind: str


class _PlantedCheck(InputCheck[_Planted]):
    """Fails, raises, or tests nothing, as its input says."""

    name = "planted"
    meaning = "a check of the self-test"
    family = "selftest"
    input_type = _Planted

    def inputs(self) -> st.SearchStrategy[_Planted]:
        return st.just(_Planted("fails"))

    def run(self, drawn: _Planted, target: Target) -> Verdict:
        del target
        if drawn.kind == "raises":
            raise RuntimeError("planted")
        return self.verdict("planted" if drawn.kind == "fails" else "", {}, untested="nothing to compare")


class _Raises(MetadataBuilder):
    def build(self, step: StepBatch) -> SparseMlaMetadata:
        raise RuntimeError(f"planted at {step.num_tokens} rows")


def _compare(change: Callable[[torch.Tensor], object], bound: float = 1e-3) -> Budget:
    """Ones within a bound against ones that `change` spoils in place."""
    right = torch.ones(ROWS, COLUMNS, dtype=torch.float64)
    computed = right.clone()
    change(computed)
    return comparison.judge(computed, Approx(right, torch.full_like(right, bound)))


def _put(row: int, column: int, new: float) -> Callable[[torch.Tensor], object]:
    return lambda x_RC: x_RC[row, column].fill_(new)


def _nan() -> str:
    return "" if not _compare(_put(1, 2, torch.nan)).passed else "a NaN passed"


def _unbounded() -> str:
    return "" if not _compare(_put(0, 0, 1.0), torch.inf).passed else "an infinite bound passed"


def _tight() -> str:
    """Twice the bound fails, half of it passes, in the first row and in the last one."""
    for row in (0, ROWS - 1):
        if _compare(_put(row, 0, 1.002)).passed:
            return f"an error of twice the bound passed in row {row}"
        if not _compare(_put(row, 0, 1.0005)).passed:
            return f"an error of half the bound failed in row {row}"
    return ""


def _choice(other: list[list[int]]) -> bool:
    """Whether a top-2 of the scores 4, 3, 2, 1 in each of two rows is legal."""
    scores = torch.tensor([[4.0, 3.0, 2.0, 1.0]] * 2)
    certificate = certify_topk(scores, torch.zeros_like(scores), torch.tensor([[0, 1]] * 2), torch.tensor(other))
    return certificate.passed


def _illegal_choice() -> str:
    if not _choice([[1, 0], [0, 1]]):
        return "a right choice in another order is called illegal"
    return "" if not _choice([[0, 1], [0, 2]]) else "an illegal choice in the second row passed"


def _malformed_choice() -> str:
    for wrong in ([0, 0], [0, -1]):
        if _choice([[0, 1], wrong]):
            return f"the choice {wrong} passed"
    return ""


def _own_input(kind: str, wanted: Status) -> str:
    case = InputCase(check="planted", input={"kind": kind})
    (verdict,) = OwnInput(InTreeTarget(PRESETS["pr47766"]), _PlantedCheck).judge(case, ["planted"])
    return "" if verdict.status is wanted else f"a check that {kind} is {verdict.status.value}, not {wanted.value}"


def _input_checks() -> str:
    wanted = {"fails": Status.FAILED, "raises": Status.FAILED, "idles": Status.MISTRUSTED}
    return next((told for told in (_own_input(kind, status) for kind, status in wanted.items()) if told), "")


def _search() -> str:
    """A check that always fails is found and shrunk."""
    events = explore(OwnInput(InTreeTarget(PRESETS["pr47766"]), _PlantedCheck), run_seed=0, seconds=1e-3, examples=2)
    return "" if any(isinstance(event, CounterexampleFound) for event in events) else "a search found nothing"


def _decode(*seqs: int, rows: int = 0) -> StepBatch:
    return StepBatch(query_lens=(1,) * len(seqs), seq_lens=seqs, num_tokens=rows)


_STEPS = (
    _decode(*[5000] * 6, rows=8),
    _decode(*[5001] * 6, rows=8),
    _decode(700, 2500, rows=4),
    _decode(2500, 700, rows=4),
    StepBatch(query_lens=(4, 2), seq_lens=(2048, 40)),
    StepBatch(query_lens=(4, 2), seq_lens=(2050, 42)),
)
"""Hits, misses, splits, a shrink, an exchange, drafts across topk."""


def _watch(target: Target, steps: tuple[StepBatch, ...] = _STEPS) -> dict[str, Verdict]:
    case = Case(check="", scope="mixed", options=target.options, dims=Dims(max_num_batched_tokens=64), steps=steps)
    names = [check.name for check in STEP_CHECKS]
    return {verdict.check: verdict for verdict in StepTraffic(target, "mixed").judge(case, names)}


def _control() -> str:
    wrong = [v for v in _watch(InTreeTarget(PRESETS["pr47766"])).values() if v.status is not Status.PASSED]
    return f"{wrong[0].check} is {wrong[0].status.value} on the faultless target" if wrong else ""


def _reported(verdict: Verdict) -> bool:
    """A violation that the check found; a target that raises fails every check, whatever it looks at."""
    return verdict.status is Status.FAILED and "the target raised" not in verdict.summary


def _planted_faults() -> str:
    """Every step check kills one of the key, planner and buffer faults."""
    alive = {check.name for check in STEP_CHECKS}
    for fault in (*key.FAULTS, *planner.FAULTS, *buffers.FAULTS):
        if not alive:
            break
        with fault.inject() as target:
            alive -= {name for name, verdict in _watch(target).items() if _reported(verdict)}
    return f"{', '.join(sorted(alive))}: no planted fault is reported" if alive else ""


def _crash() -> str:
    verdicts = _watch(InTreeTarget(PRESETS["pr47766"], builder=_Raises)).values()
    passed = [verdict.check for verdict in verdicts if verdict.status is not Status.FAILED]
    return f"{passed[0]} does not fail on a target that raises" if passed else ""


def _idle_run() -> str:
    """A run without a single step tests nothing."""
    passed = [v.check for v in _watch(InTreeTarget(PRESETS["pr47766"]), ()).values() if v.status is Status.PASSED]
    return f"{passed[0]} passes a run without steps" if passed else ""


def _merge() -> str:
    """A failure is not outvoted, wherever it stands."""
    good, bad = (Verdict(check="planted", status=status, summary="") for status in (Status.PASSED, Status.FAILED))
    merged = [checks.merge(verdicts).status for verdicts in ([good, bad], [bad, good], [good, good, bad, good])]
    return "" if set(merged) == {Status.FAILED} else "a failure was lost among other verdicts"


PROBES: tuple[Probe, ...] = (
    Probe(name="selftest_nan", meaning="NaN never passes a comparison", run=_nan),
    Probe(name="selftest_unbounded", meaning="an infinite bound never passes", run=_unbounded),
    Probe(name="selftest_tight", meaning="one element beyond its bound fails, in any row", run=_tight),
    Probe(name="selftest_choice", meaning="an illegal choice fails, in any row", run=_illegal_choice),
    Probe(name="selftest_malformed", meaning="a choice with a duplicate or a gap fails", run=_malformed_choice),
    Probe(name="selftest_merge", meaning="a failure is never outvoted", run=_merge),
    Probe(name="selftest_input_checks", meaning="checks that fail, raise or idle are told as such", run=_input_checks),
    Probe(name="selftest_search", meaning="a search finds what always fails", run=_search),
    Probe(name="selftest_crash", meaning="a target that raises fails every step check", run=_crash),
    Probe(name="selftest_idle", meaning="a run without steps passes nothing", run=_idle_run),
    Probe(name="selftest_control", meaning="the faultless target passes every step check", run=_control),
    Probe(name="selftest_planted", meaning="every step check reports a planted fault", run=_planted_faults),
)


def complaints() -> Iterator[tuple[Probe, str]]:
    """Every probe that complains, and what it says; an exception is a complaint."""
    for probe in PROBES:
        try:
            told = probe.run()
        except Exception as error:
            told = checks.told(error)
        if told:
            yield probe, told
