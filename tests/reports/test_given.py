"""Evidence that is handed in: judged from its raw numbers by the policy, and never passed by accident."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from report_worlds import given, make_bundle, router_study, trace_evidence, whole_run

from dsv32_fuzz.events import Event, EvidenceGiven
from dsv32_fuzz.latency.evidence import Compared, Evidence
from dsv32_fuzz.latency.evidence import judged as judged_times
from dsv32_fuzz.router_study.gates import Gate as StudiedGate
from dsv32_fuzz.router_study.study import study_layer
from dsv32_fuzz.verdict import Status
from dsv32_ref.config import Config
from dsv32_reports.bundle import JOURNAL
from dsv32_reports.fold import fold
from dsv32_reports.given import accuracy_given, check_limits, latency_given, limit_of, router_study_given
from dsv32_reports.model import Gate, Outcome, Report
from dsv32_reports.policy import DEFAULT, GateRule, Policy
from dsv32_reports.statistics import Statistic, controlled
from dsv32_reports.verify import verify

EVIDENCE = ("accuracy", "router_precision", "latency")
STRICT = DEFAULT.with_limit("router_precision", 0.05)


def counts(baseline: int, candidate: int, trials: int = 1319) -> dict[str, Any]:
    one = {"task": "gsm8k", "metric": "m", "baseline": baseline, "candidate": candidate, "both": None}
    return {"counts": [one | {"baseline_trials": trials, "candidate_trials": trials}]}


def latency(before_ms: float, after_ms: float, **changes: Any) -> EvidenceGiven:
    evidence = msgspec.structs.replace(trace_evidence(before_ms, after_ms), **changes)
    return given("latency", msgspec.to_builtins(evidence))


def run_with(*evidence: EvidenceGiven, policy: Policy = DEFAULT, **changes: Any) -> list[Event]:
    first, *rest = whole_run(policy=msgspec.to_builtins(policy), **changes)
    return [first, *evidence, *rest]


def judged(*evidence: EvidenceGiven, policy: Policy = DEFAULT, **changes: Any) -> tuple[Report, dict[str, Gate]]:
    report = fold(run_with(*evidence, policy=policy, **changes), "run")
    return report, {gate.name: gate for gate in report.gates}


def test_what_is_not_given_is_not_judged_and_shown() -> None:
    report, gates = judged()
    assert report.outcome is Outcome.GO
    for name in (*EVIDENCE, "corpus", "hardware"):
        gate = gates[name]
        assert (gate.status, gate.judged, gate.required) == (Status.SKIPPED, False, False), name
        assert f"not judged: {gate.title}" in report.reason or f", {gate.title}" in report.reason
        assert any(text.startswith(f"{gate.title.lower()}: ") for text in report.not_judged)


@pytest.mark.parametrize("name", [*EVIDENCE, "corpus", "sensitivity"])
def test_what_the_policy_requires_and_nobody_gave_is_inconclusive(name: str) -> None:
    policy = Policy(gates={name: GateRule(need="required")})
    report, gates = judged(policy=policy)
    assert report.outcome is Outcome.INCONCLUSIVE
    assert (gates[name].status, gates[name].required) == (Status.MISTRUSTED, True)


@pytest.mark.parametrize(
    ("flipped", "recorded", "status", "outcome"),
    [
        (5, True, Status.PASSED, Outcome.GO),
        (5, False, Status.MISTRUSTED, Outcome.INCONCLUSIVE),
        (24, True, Status.MISTRUSTED, Outcome.INCONCLUSIVE),
        (100, True, Status.FAILED, Outcome.NO_GO),
        (100, False, Status.FAILED, Outcome.NO_GO),
    ],
)
def test_router_precision(flipped: int, recorded: bool, status: Status, outcome: Outcome) -> None:
    document = router_study(flipped=flipped, recorded=recorded)
    report, gates = judged(given("router_precision", document), policy=STRICT)
    gate = gates["router_precision"]
    assert (gate.status, report.outcome) == (status, outcome)
    assert gate.limit == 0.05
    assert gate.value == pytest.approx(max(line.measured["flip_rate_at_most"] for line in gate.lines))  # type: ignore[type-var]
    told = gate.lines[-1].summary
    for text in (f"{flipped} of 500 tokens", "256 distinct bias values, 9 in bf16", "load moves", "MoE output"):
        assert text in told
    assert len(gate.lines) == 58


def test_a_study_of_some_routers_is_no_study_of_the_checkpoint() -> None:
    report, gates = judged(given("router_precision", router_study(layers=57)), policy=STRICT)
    assert (report.outcome, gates["router_precision"].status) == (Outcome.INCONCLUSIVE, Status.MISTRUSTED)
    assert "only 57 of the model's 58 routers were studied" in gates["router_precision"].lines[0].summary
    twice = router_study()
    twice["layers"][1] = twice["layers"][0]
    with pytest.raises(ValueError, match="a layer occurs twice"):
        judged(given("router_precision", twice), policy=STRICT)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"compared": ()}, "compares nothing"),
        ({"alpha": 0.0}, "alpha 0 and margin 0.01"),
        ({"alpha": 1.0}, "alpha 1 and"),
        ({"alpha": float("nan")}, "alpha"),
        ({"margin": 10.0}, "margin 10"),
    ],
)
def test_evidence_of_latency_that_could_pass_anything_is_refused(
    tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    evidence = msgspec.structs.replace(trace_evidence(41.0, 40.0), **changes)
    (tmp_path / "times.json").write_bytes(msgspec.json.encode(evidence))
    with pytest.raises(ValueError, match=told):
        latency_given(tmp_path / "times.json")


def timed(name: str, ratio: float, seed: int) -> Compared:
    rng = np.random.default_rng(seed)
    a, b = (tuple(map(tuple, rng.normal(mean, 0.005, (25, 3)).tolist())) for mean in (1.0, ratio))
    return Compared(name=name, verdict="cannot tell", ratio=1.0, low=None, high=None, p_value=None, a_s=a, b_s=b)


def test_every_batch_size_of_a_bench_is_judged() -> None:
    same = tuple(timed(f"batch {batch}, whole: A/A", 1.0, batch) for batch in (1, 64))
    steps = timed("batch 1, whole: all", 0.9, 2), timed("batch 64, whole: all", 1.1, 3)
    part = timed("batch 1, whole: bias last", 1.1, 4)
    bench = Evidence(kind="device", complete=True, measured="m", margin=0.01, null=same, compared=(*steps, part))
    report, gates = judged(given("latency", msgspec.to_builtins(judged_times(bench))))
    assert [line.status for line in gates["latency"].lines] == [Status.PASSED, Status.FAILED]
    assert report.outcome is Outcome.NO_GO
    with pytest.raises(ValueError, match="no whole step"):
        judged(given("latency", msgspec.to_builtins(msgspec.structs.replace(bench, compared=(part,)))))
    alone = msgspec.structs.replace(bench, null=same[1:], compared=steps[:1])
    _, gates = judged(given("latency", msgspec.to_builtins(alone)))
    assert "not timed twice" in gates["latency"].lines[0].summary
    (one,) = trace_evidence(41.0, 40.0).compared
    with pytest.raises(ValueError, match="the very same times"):
        judged(latency(41.0, 40.0, compared=(msgspec.structs.replace(one, b_s=one.a_s),)))


@pytest.mark.parametrize("time", ["0", "-1.0", "1e999", "NaN", "null"])
def test_a_time_that_is_none_is_refused(tmp_path: Path, time: str) -> None:
    text = msgspec.json.encode(trace_evidence(41.0, 40.0)).decode()
    first = text.index('"a_s":[[') + len('"a_s":[[')
    (tmp_path / "times.json").write_text(text[:first] + time + text[text.index(",", first) :])
    with pytest.raises(ValueError, match=r"times\.json: "):
        latency_given(tmp_path / "times.json")


def test_router_precision_without_a_limit_is_shown_and_decides_nothing() -> None:
    report, gates = judged(given("router_precision", router_study(flipped=400)))
    gate = gates["router_precision"]
    assert (report.outcome, gate.status, gate.required) == (Outcome.GO, Status.SKIPPED, False)
    assert "NOT JUDGED: the policy sets no limit" in gate.lines[-1].summary
    assert gate.value is not None
    assert gate.value > 0.7


@pytest.mark.parametrize(
    ("evidence", "status", "told"),
    [
        (latency(41.522, 40.234), Status.PASSED, "within 1 % slower"),
        (latency(40.0, 40.0), Status.PASSED, "within 1 % slower"),
        (latency(40.0, 41.0), Status.FAILED, "beyond 1 % slower"),
        (latency(40.0, 40.4), Status.MISTRUSTED, "too few to tell"),
        (latency(40.0, 39.0, complete=False), Status.MISTRUSTED, "incomplete"),
        (latency(40.0, 39.0, kind="emulated"), Status.MISTRUSTED, "say nothing of a GPU"),
        (latency(40.0, 39.0, kind="host trace"), Status.MISTRUSTED, "say nothing of a GPU"),
    ],
)
def test_latency(evidence: EvidenceGiven, status: Status, told: str) -> None:
    if evidence.document["kind"] == "emulated":
        one = evidence.document["compared"][0]
        one["a_s"], one["b_s"] = ([[x] for x in one[side][0]] for side in ("a_s", "b_s"))
    report, gates = judged(evidence)
    assert gates["latency"].status is status
    assert told in gates["latency"].lines[0].summary
    assert (report.outcome is Outcome.GO) == (status is Status.PASSED)


def test_no_ratio_is_believed_that_the_samples_do_not_give() -> None:
    event = latency(40.0, 44.0)
    (one,) = event.document["compared"]
    one |= {"ratio": 0.9, "low": 0.89, "high": 0.91, "verdict": "faster"}
    _, gates = judged(event)
    assert gates["latency"].status is Status.FAILED
    assert gates["latency"].lines[0].measured["ratio"] == pytest.approx(1.1, abs=0.01)


def question(p_within: float) -> Statistic:
    return Statistic(check="c", scope="s", told="t", limit="l", measured={}, p_within=p_within)


def test_many_questions_are_controlled_for() -> None:
    """One lone 4 % among twenty is expected by chance; twenty times 4 % is not."""
    alone = [question(0.96)] + [question(0.5)] * 19
    assert controlled([question(0.96)])[0].status is Status.FAILED
    assert controlled(alone)[0].status is Status.MISTRUSTED
    assert controlled([question(0.04)] + [question(0.5)] * 19)[0].status is Status.MISTRUSTED
    assert {verdict.status for verdict in controlled([question(0.04)] * 20)} == {Status.PASSED}
    assert controlled([]) == []


def test_gates_of_different_kinds_are_one_family() -> None:
    worse = given("accuracy", counts(1250, 1210))  # p = 3 % of being beyond: fails alone
    _, gates = judged(worse)
    assert gates["accuracy"].status is Status.FAILED
    many = given("router_precision", router_study(flipped=25, tokens=500))
    _, gates = judged(worse, many, policy=STRICT)
    assert gates["accuracy"].status is Status.MISTRUSTED


def test_the_policy_moves_the_limit() -> None:
    event = given("accuracy", counts(1250, 1235))
    assert limit_of("accuracy", DEFAULT) == 0.01
    for margin, status in ((0.01, Status.MISTRUSTED), (0.05, Status.PASSED), (0.001, Status.MISTRUSTED)):
        _, gates = judged(event, policy=DEFAULT.with_limit("accuracy", margin))
        assert (gates["accuracy"].status, gates["accuracy"].limit) == (status, margin)
        assert "cannot show in this score" in gates["accuracy"].lines[0].summary


@pytest.mark.parametrize(("gate", "limit"), [("accuracy", 0.0), ("router_precision", 1.0), ("latency", 1.5)])
def test_a_limit_that_is_no_share_is_one_line(gate: str, limit: float) -> None:
    check_limits(DEFAULT.with_limit("latency", 0.0))
    with pytest.raises(ValueError, match=f"the limit of {gate} is {limit:g}; it is a share"):
        check_limits(DEFAULT.with_limit(gate, limit))


EDITS = {
    "flips": ('"flipped":100', '"flipped":1'),
    "kind of inputs": ("synthetic: independent", "recorded: independent"),
    "a trace": ('"complete":false', '"complete":true'),
    "counts": ('"candidate":1100', '"candidate":1250'),
    "the limit": ('"limit":0.05', '"limit":0.9'),
    "source": ('"source":"latency.json"', '"source":"other.json"'),
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_of_raw_evidence_is_seen(tmp_path: Path, name: str) -> None:
    study = given("router_precision", router_study(flipped=100, recorded=False))
    evidence = (study, latency(41.0, 40.0, complete=False), given("accuracy", counts(1250, 1100)))
    make_bundle(tmp_path / "run", run_with(*evidence, policy=STRICT))
    assert verify(tmp_path / "run")[0] == []
    old, new = EDITS[name]
    journal = tmp_path / "run" / JOURNAL
    text = journal.read_text()
    assert old in text
    journal.write_text(text.replace(old, new))
    problems, _ = verify(tmp_path / "run")
    assert any(problem.startswith("report.json: ") for problem in problems), problems


def test_a_journal_with_evidence_of_another_form_does_not_verify(tmp_path: Path) -> None:
    make_bundle(tmp_path / "run", run_with(given("router_precision", router_study())))
    journal = tmp_path / "run" / JOURNAL
    journal.write_text(journal.read_text().replace('"worst_layer"', '"best_layer"'))
    assert any("worst_layer" in problem for problem in verify(tmp_path / "run")[0])


@pytest.mark.parametrize(
    ("changes", "status", "outcome"),
    [
        ({"evidence": "hardware", "fingerprint": {"gpu": "AMD Instinct MI355X"}}, Status.PASSED, Outcome.GO),
        ({"evidence": "hardware", "fingerprint": {"gpu": "none"}}, Status.MISTRUSTED, Outcome.INCONCLUSIVE),
        ({}, Status.MISTRUSTED, Outcome.INCONCLUSIVE),
    ],
)
def test_hardware_must_be_named_by_the_fingerprint(changes: Any, status: Status, outcome: Outcome) -> None:
    report, gates = judged(policy=Policy(evidence="hardware"), **changes)
    assert (gates["hardware"].status, report.outcome) == (status, outcome)
    assert (outcome is Outcome.GO) != report.reason.startswith("logic GO, hardware evidence missing")


def test_what_the_router_command_prints_is_a_study(tmp_path: Path) -> None:
    """A bias as narrow as those published, of which bf16 leaves some values: choices and weights move."""
    g = torch.Generator().manual_seed(0)
    weight_EM = torch.randn(256, 64, generator=g) / 8
    gate = StudiedGate(layer=3, weight_EM=weight_EM, bias_E=7 + 0.1 * torch.rand(256, generator=g))
    layer = study_layer(gate, torch.randn(400, 64, generator=g), Config(), seed=0)
    assert layer.weight_shift is not None
    assert 0 < layer.load_shift < 1
    assert 0 < layer.weight_shift < 1
    path = tmp_path / "study.json"
    path.write_bytes(msgspec.json.encode({"inputs": "recorded: x", "worst_layer": 3, "layers": [layer]}))
    _, gates = judged(router_study_given(path), policy=STRICT)
    (line,) = gates["router_precision"].lines
    assert line.measured["flipped"] == layer.flips["both"].flipped > 0


def test_a_release_that_nobody_knows_is_no_go_ahead() -> None:
    known = {"target vllm": "0.24.0", "target vllm known": "yes", "amd-aiter known": "yes"}
    assert judged(fingerprint=known)[0].outcome is Outcome.GO
    report, gates = judged(fingerprint=known | {"target vllm": "0.99.0", "target vllm known": "no"})
    assert report.outcome is Outcome.INCONCLUSIVE
    assert "target vllm 0.99.0" in gates["key"].lines[-1].summary
    touched = {name for name, gate in gates.items() if gate.status is Status.MISTRUSTED}
    assert {"key", "cache", "plan", "hygiene", "checks_attention"} <= touched
    assert not touched & {"planner", "reference", "accuracy"}


def test_a_corpus_that_was_promised_and_did_not_run_is_inconclusive() -> None:
    report, gates = judged(corpus="corpus")
    assert (report.outcome, gates["corpus"].status) == (Outcome.INCONCLUSIVE, Status.MISTRUSTED)
    assert [line.summary for line in gates["corpus"].lines] == ["corpus_cases did not run"]


def test_files_are_read_with_their_digest(tmp_path: Path) -> None:
    study, times = tmp_path / "study.json", tmp_path / "latency.json"
    study.write_text(json.dumps(router_study()))
    times.write_bytes(msgspec.json.encode(trace_evidence(41.0, 40.0)))
    assert (router_study_given(study).kind, router_study_given(study).source) == ("router_precision", "study.json")
    assert len(latency_given(times).sha256) == 64
    before, after = tmp_path / "a.json", tmp_path / "b.json"
    for path, score in ((before, 0.95), (after, 0.94)):
        scores = {"gsm8k": {"exact_match,strict-match": score}}
        path.write_text(json.dumps({"results": scores, "n-samples": {"gsm8k": {"effective": 1319}}}))
    (one,) = accuracy_given(before, after).document["counts"]
    assert (one["baseline"], one["candidate"]) == (1253, 1240)


@pytest.mark.parametrize(
    ("text", "told"),
    [("{", "no router study"), ('{"inputs": "x", "worst_layer": 3, "layers": []}', "it has no layer"), (None, "read")],
)
def test_a_bad_study_is_one_line(tmp_path: Path, text: str | None, told: str) -> None:
    path = tmp_path / "study.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match="give what dsv32 router --json prints") as error:
        router_study_given(path)
    assert told in str(error.value)
    assert "\n" not in str(error.value)


def test_emulated_times_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "latency.json"
    evidence = msgspec.structs.replace(trace_evidence(41.0, 40.0), kind="host trace")
    path.write_bytes(msgspec.json.encode(evidence))
    with pytest.raises(ValueError, match="host trace times say nothing of a GPU"):
        latency_given(path)
    with pytest.raises(ValueError, match="cannot be read"):
        latency_given(tmp_path / "none.json")
