"""A campaign: a time-boxed run of every check over one target, told as a stream of events.

The phases, in order: the recorded plans (is the emulated planner AITER's?), recorded decodes (is the reference right?),
cases of a corpus that are known, the proof by exhaustion (is the key exact
in a small world?), independently seeded workload sequences (how often does a real schedule fail?), a search per traffic
class (what is the smallest case that fails?), a search per family of checks that draw their own input, faults
injected on purpose (would the checks see them?), a long decode beside the reference, and the skip-rate table.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Collection, Generator, Iterator
from functools import partial
from typing import Any, Literal

import msgspec

from dsv32_fuzz.case import Case, Dims
from dsv32_fuzz.checks import merge, run_case
from dsv32_fuzz.checks.catalogue import INPUT_CHECKS, STEP_CHECKS, STEP_CHECKS_BY_NAME
from dsv32_fuzz.checks.exhaustive import WORLDS_ANY_Q, WORLDS_Q1, prove_key
from dsv32_fuzz.checks.own_input import InputCheck
from dsv32_fuzz.events import (
    Event,
    PhaseFinished,
    PhaseStarted,
    Progress,
    RunFinished,
    SequencesChecked,
    TableMade,
    VerdictReached,
)
from dsv32_fuzz.faults.sensitivity import one_per_area, sensitivity, whole_catalogue
from dsv32_fuzz.golden.verdicts import SHORT_RUNS, recorded_plans, reference_self_check
from dsv32_fuzz.search.explore import counterexample, explore
from dsv32_fuzz.search.known_cases import KnownCases, known_cases
from dsv32_fuzz.search.properties import OwnInput, StepTraffic
from dsv32_fuzz.stages.drift import decode_drift
from dsv32_fuzz.strategies import WORLDS, World
from dsv32_fuzz.strategies.traffic import TRAFFIC
from dsv32_fuzz.targets import Target
from dsv32_fuzz.targets.intree import InTreeTarget
from dsv32_fuzz.verdict import Status, Verdict, worst
from dsv32_fuzz.workload import PR42982_WORKLOAD, Workload, steps
from dsv32_fuzz.workload.skip_rate import SkipCount, explain_misses, skip_rate, skip_table


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """How long the phases of a campaign take, in seconds."""

    workload_seconds: float
    fuzz_seconds: float
    """Per traffic class."""
    fuzz_examples: int
    """Per traffic class at least, whatever the time: a slow machine must not search less."""
    check_seconds: float
    """Per check that draws its own input; those of a family share the time of the family."""
    check_examples: int
    """Per such check at least, whatever the time."""
    shrink_seconds: float
    """Per failing check, for Hypothesis and as much again for dropping steps and requests."""
    reference_runs: tuple[str, ...] | None = SHORT_RUNS
    """Recorded decodes that the reference is held against; None: all."""
    drift_steps: int
    """Of the long decode, for each of its schedules."""
    drift_judged: int
    """Steps of it whose stages are held against their bounds."""
    faults: Literal["none", "one per area", "all"] = "none"
    """Faults injected to see whether the checks see them."""
    table_requests: tuple[int, ...]
    """Requests served per row of the skip-rate table: ten waves, and about the 956 steps of the PR's trace."""


PROFILES: dict[str, Profile] = {
    "ci": Profile(
        workload_seconds=3,
        fuzz_seconds=1,
        fuzz_examples=60,
        check_seconds=0.3,
        check_examples=5,
        shrink_seconds=1.5,
        drift_steps=20,
        drift_judged=2,
        table_requests=(128,),
    ),
    "signoff": Profile(
        workload_seconds=40,
        fuzz_seconds=8,
        fuzz_examples=100,
        check_seconds=1.0,
        check_examples=10,
        shrink_seconds=4,
        faults="one per area",
        drift_steps=200,
        drift_judged=8,
        table_requests=(640, 128),
    ),
    "release": Profile(
        workload_seconds=120,
        fuzz_seconds=30,
        fuzz_examples=100,
        check_seconds=3.0,
        check_examples=30,
        shrink_seconds=8,
        faults="all",
        reference_runs=None,
        drift_steps=400,
        drift_judged=20,
        table_requests=(640, 128),
    ),
    "nightly": Profile(
        workload_seconds=600,
        fuzz_seconds=300,
        fuzz_examples=100,
        check_seconds=30,
        check_examples=100,
        shrink_seconds=15,
        faults="all",
        reference_runs=None,
        drift_steps=1000,
        drift_judged=50,
        table_requests=(640, 128),
    ),
}

SHORT_INPUT = 1000


OWN_WORKLOAD = msgspec.structs.replace(PR42982_WORKLOAD, num_requests=128)
"""The PR's own, of about as many steps as its trace; exact lengths leave nothing to a seed, so it is no trial."""


def trial_workload(run_seed: int, number: int) -> tuple[Workload, int, World]:
    """The workload of trial `number`, its seed and its world: the PR's own with every axis drawn, lengths never equal.

    Trials are independent draws from one distribution, as the quoted bound assumes.
    """
    rng = random.Random(f"{run_seed}/{number}")
    concurrency = rng.choice((64, 64, 64, 16, 1))
    workload = msgspec.structs.replace(
        PR42982_WORKLOAD,
        num_requests=concurrency + concurrency // 2 + 1,
        length_spread=rng.choice((0.02, 0.1)),
        max_num_batched_tokens=rng.choice((2048, 4096, 8192)),
        concurrency=concurrency,
        mtp_depth=rng.choice((0, 0, 1, 3)),
        preempt_rate=rng.choice((0.0, 0.002)),
        output_len=rng.choice((50, 100, 100, 500)),
    )
    return workload, rng.getrandbits(32), rng.choice(WORLDS)


def phases(
    target: Target, profile: Profile, run_seed: int, known: KnownCases | None = None
) -> dict[str, Callable[[], Iterator[Event]]]:
    """Every phase of a campaign by name, in order."""
    found: dict[str, Callable[[], Iterator[Event]]] = {
        "recordings": recorded_plans,
        "reference": partial(reference_self_check, profile.reference_runs),
    }
    if known is not None:
        found["corpus"] = partial(known_cases, target, known)
    found |= {
        "proof": partial(proof, target),
        "workload": partial(workload_runs, target, profile.workload_seconds, run_seed),
    }
    found.update({f"fuzz:{scope}": partial(search, target, scope, profile, run_seed) for scope in TRAFFIC})
    found.update({f"check:{name}": partial(search_family, target, name, profile, run_seed) for name in families()})
    found["drift"] = partial(decode_drift, target, profile.drift_steps, profile.drift_judged, run_seed)
    if profile.faults != "none":
        names = one_per_area(run_seed) if profile.faults == "one per area" else whole_catalogue()
        found["sensitivity"] = partial(sensitivity, names, run_seed)
    if isinstance(target, InTreeTarget) and target.caches:
        found["skip_rate"] = partial(skip_rates, target, profile.table_requests, run_seed)
    return found


def campaign(
    target: Target,
    profile: Profile,
    *,
    run_seed: int,
    done: Collection[str] = (),
    known: KnownCases | None = None,
) -> Generator[Event, None, None]:
    """Run every phase but those that are `done`; the last event is `RunFinished`.

    Ctrl-C ends it early, with what is finished told.
    """
    started, interrupted = time.monotonic(), False
    try:
        for name, phase in phases(target, profile, run_seed, known).items():
            if name not in done:
                began = time.monotonic()
                yield from phase()
                yield PhaseFinished(phase=name, seconds=time.monotonic() - began)
    except KeyboardInterrupt:
        interrupted = True
    yield RunFinished(seconds=time.monotonic() - started, interrupted=interrupted)


def search(target: Target, scope: str, profile: Profile, run_seed: int) -> Iterator[Event]:
    """Search one traffic class for a failing step sequence."""
    title = f"search {scope.replace('_', ' ')} traffic"
    seconds, examples = profile.fuzz_seconds, profile.fuzz_examples
    yield PhaseStarted(phase=f"fuzz:{scope}", title=title, seconds=seconds)
    yield from explore(
        StepTraffic(target, scope),
        run_seed=run_seed,
        seconds=seconds,
        examples=examples,
        shrink_seconds=profile.shrink_seconds,
    )


def families() -> dict[str, tuple[type[InputCheck[Any]], ...]]:
    """The checks that draw their own input, by what they look at."""
    found: dict[str, tuple[type[InputCheck[Any]], ...]] = {}
    for check in INPUT_CHECKS:
        found[check.family] = (*found.get(check.family, ()), check)
    return found


def search_family(target: Target, family: str, profile: Profile, run_seed: int) -> Iterator[Event]:
    """Search for a failing input of each check of a family; the verdict's scope is the check."""
    checks = families()[family]
    phase = f"check:{family}"
    yield PhaseStarted(
        phase=phase, title=f"search the {family} checks' own inputs", seconds=profile.check_seconds * len(checks)
    )
    for done, check in enumerate(checks):
        for event in explore(
            OwnInput(target, check),
            run_seed=run_seed,
            seconds=profile.check_seconds,
            examples=profile.check_examples,
            shrink_seconds=profile.shrink_seconds,
        ):
            if isinstance(event, VerdictReached):
                event = msgspec.structs.replace(event, phase=phase)
            elif isinstance(event, Progress):
                event = Progress(
                    phase=phase, done=(done + event.done) / len(checks), text=f"{check.name}, {event.text}"
                )
            yield event


def skip_rates(target: InTreeTarget, requests: tuple[int, ...], run_seed: int) -> Iterator[Event]:
    """The skip-rate table of the PR's workload, and what a workload below topk does."""
    phase = "skip_rate"
    yield PhaseStarted(phase=phase, title="count how often the plan is reused")
    rows = []
    for done, count_of_requests in enumerate(requests, 1):
        workload = msgspec.structs.replace(PR42982_WORKLOAD, num_requests=count_of_requests)
        counts = skip_table(target.key_of, workload=workload, seed=run_seed, scalars=target.scalars_of)
        rows += [_skip_row(count) for count in counts]
        yield Progress(phase=phase, done=done / len(requests), text=f"{len(rows)} serving runs")
    yield TableMade(name="skip_rate", rows=rows)
    short = msgspec.structs.replace(PR42982_WORKLOAD, input_len=SHORT_INPUT)
    count = skip_rate(short, target.key_of, seed=run_seed, scalars=target.scalars_of)
    causes = explain_misses(short, seed=run_seed, scalars=target.scalars_of)
    text = (
        f"Contexts below topk: with {SHORT_INPUT} tokens in, {count.skipped} of {count.steps} steps are skipped. A row "
        f"below topk grows by a token each step, so the planner input changes: {causes.below_topk} of {causes.steps} "
        f"steps have such a row, and in {causes.unchanged} the input is that of the step before."
    )
    yield TableMade(name="short_contexts", rows=[_skip_row(count) | {"text": text}])


def _skip_row(count: SkipCount) -> dict[str, object]:
    workload = count.workload
    return {
        "budget": workload.max_num_batched_tokens,
        "input_len": workload.input_len,
        "spread": workload.length_spread,
        "requests": workload.num_requests,
        "arrivals": "closed loop" if workload.arrivals == "closed" else workload.arrivals,
        "steps": count.steps,
        "decode_steps": count.decode_steps,
        "skip_rate": count.rate,
        "decode_skip_rate": count.rate_decode,
        "rightful": count.skipped - count.wrongful,
        "wrongful": count.wrongful,
        "wrongful_by_class": count.wrongful_by_class,
        "claimed": count.claimed,
    }


def proof(target: Target) -> Iterator[Event]:
    """Key sufficiency by exhaustion, for q = 1 and for any query lengths."""
    yield PhaseStarted(phase="proof", title="prove the key by exhaustion in a small world")
    for scope, worlds in (("decode", WORLDS_Q1), ("any_query_length", WORLDS_ANY_Q)):
        verdict, _ = prove_key(target, worlds)
        yield VerdictReached(phase="proof", scope=scope, verdict=verdict)
        yield Progress(phase="proof", done=0.5 if scope == "decode" else 1.0, text=verdict.summary)


def workload_runs(target: Target, seconds: float, run_seed: int) -> Iterator[Event]:
    """Whole serving runs, checked step by step: the PR's own, then independent trials until the time is up.

    A run in which some check tested nothing is no trial: it could not have failed.
    """
    phase = "workload"
    yield PhaseStarted(phase=phase, title="check whole serving runs of the PR's workload", seconds=seconds)
    totals: dict[str, Verdict] = {}
    told: set[str] = set()  # checks that a counterexample was already shown for
    started, trials, failed, batches = time.monotonic(), 0, 0, 0
    for number in itertools.count(-1):
        if trials and time.monotonic() >= started + seconds:
            break
        if number < 0:
            case = _serving_case(target, OWN_WORKLOAD, run_seed, WORLDS[0])
        else:
            case = _serving_case(target, *trial_workload(run_seed, number))
        verdicts = run_case(case, target, STEP_CHECKS)
        for verdict in verdicts:
            if verdict.status is Status.FAILED and verdict.check not in told:
                found = counterexample(StepTraffic(target, case.scope), _window(case, target, verdict))
                told |= {other.check for other in found.verdicts if other.status is Status.FAILED}
                yield found
            totals[verdict.check] = merge([totals[verdict.check], verdict]) if verdict.check in totals else verdict
        status = worst([verdict.status for verdict in verdicts])
        batches += len(case.steps)
        trials += number >= 0 and status is not Status.MISTRUSTED
        failed += number >= 0 and status is Status.FAILED
        done = min(1.0, (time.monotonic() - started) / seconds) if seconds else 1.0
        yield Progress(phase=phase, done=done, text=f"{trials} trials, {batches} step batches, {failed} failed")
    for verdict in totals.values():
        yield VerdictReached(phase=phase, scope=phase, verdict=verdict)
    yield SequencesChecked(sequences=trials, failed=failed, step_batches=batches)


def _serving_case(target: Target, workload: Workload, seed: int, world: World) -> Case:
    return Case(
        check="",
        scope="workload",
        target=target.name,
        options=target.options,
        dims=Dims(max_num_batched_tokens=workload.max_num_batched_tokens, num_heads=world[0], kv_dtype=world[1]),
        steps=tuple(scheduled.batch for scheduled in steps(workload, seed) if scheduled.batch.num_tokens),
        note=f"serving run of seed {seed}: {msgspec.json.encode(workload).decode()}",
    )


def _window(case: Case, target: Target, verdict: Verdict) -> Case:
    """The shortest end of the run up to the first violation that still fails, most often two steps."""
    check = STEP_CHECKS_BY_NAME[verdict.check]
    last = verdict.step
    length = 2
    while length <= last:
        window = msgspec.structs.replace(case, check=check.name, steps=case.steps[last + 1 - length : last + 1])
        if run_case(window, target, [check])[0].status is Status.FAILED:
            return window
        length *= 2
    return msgspec.structs.replace(case, check=check.name, steps=case.steps[: last + 1])
