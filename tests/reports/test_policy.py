"""The policy: schema-checked, and each of its fields changes what it says it changes."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from report_worlds import reached, whole_run

from dsv32_fuzz.verdict import Status
from dsv32_reports.fold import fold
from dsv32_reports.gates import FIGURES, GATES, gate_names
from dsv32_reports.model import Outcome, Report
from dsv32_reports.policy import DEFAULT, Policy, Scope, load_policy


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "signoff.toml"
    path.write_text('format = "dsv32-policy/1"\n' + text)
    return path


def under(policy: Policy, *extra: object) -> Report:
    run = whole_run(policy=msgspec.to_builtins(policy))
    return fold([*run[:-1], *extra, run[-1]], "run")  # type: ignore[list-item]


def test_a_file_with_every_field(tmp_path: Path) -> None:
    text = """
name = "staging"
evidence = "hardware"
max_failing_runs = 0.05
[scope]
mtp_depth = 0
chunked_prefill = false
[gates.latency]
need = "optional"
limit = 0.5
"""
    policy = load_policy(written(tmp_path, text), tuple(GATES), tuple(FIGURES))
    assert policy.scope.outside() >= {"mtp_decode", "chunked_prefill", "mixed"}
    assert (policy.evidence, policy.max_failing_runs, policy.rule("latency").limit) == ("hardware", 0.05, 0.5)
    assert load_policy(written(tmp_path, ""), tuple(GATES)) == DEFAULT


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("colour = 1", "unknown field `colour`"),
        ("[gates.speed]", "unknown gate 'speed'"),
        ("[gates.key]\nneed = 'maybe'", "Invalid enum value 'maybe'"),
        ("[gates.key]\nlimit = 1.0", "gate key takes no limit; those that do are checks_attention"),
        ("[gates.key]\nlimit = -1.0", "not negative"),
        ("[gates.key]\nlimit = nan", "not negative"),
        ("[gates.drift]\nlimit = inf", "a finite number"),
        ("max_failing_runs = 0.0", "above 0"),
        ("[scope]\nmtp_depth = 9", "must be in 0..7"),
        ("evidence = 'hearsay'", "hearsay"),
        ("x = = 1", "no policy"),
    ],
)
def test_a_bad_file_is_one_line(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(ValueError, match="see docs/policy") as error:
        load_policy(written(tmp_path, text), tuple(GATES), tuple(FIGURES))
    assert told in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        load_policy(tmp_path / "none.toml", ())


def test_hardware_policy_is_never_a_go_on_emulation() -> None:
    report = under(Policy(evidence="hardware"))
    assert report.outcome is Outcome.INCONCLUSIVE
    assert report.reason.startswith("logic GO, hardware evidence missing")


def test_a_failure_outside_the_scope_is_shown_and_decides_nothing() -> None:
    failure = reached("key_sufficiency", "mtp_decode", Status.FAILED)
    assert under(Policy(), failure).outcome is Outcome.NO_GO
    report = under(Policy(scope=Scope(mtp_depth=0)), failure)
    assert report.outcome is Outcome.GO
    (line,) = [line for line in report.traffic if line.scope.startswith("pure MTP")]
    assert (line.status, line.in_scope) == (Status.FAILED, False)
    assert under(Policy(scope=Scope(chunked_prefill=False)), failure).outcome is Outcome.NO_GO


def test_an_optional_gate_is_named_beside_the_go() -> None:
    failure = reached("buffer_hygiene", "mixed", Status.FAILED)
    rules = msgspec.convert({"format": "dsv32-policy/1", "gates": {"hygiene": {"need": "optional"}}}, Policy)
    report = under(rules, failure)
    assert report.outcome is Outcome.GO
    assert "not required and not passed: Buffer hygiene" in report.reason


def test_accuracy_is_judged_when_given_and_required_when_asked_for() -> None:
    assert any(text.startswith("accuracy:") for text in under(Policy()).not_judged)
    worse = reached("accuracy", "gsm8k", Status.FAILED)
    assert under(Policy(), worse).outcome is Outcome.NO_GO
    aside = msgspec.convert({"format": "dsv32-policy/1", "gates": {"accuracy": {"need": "optional"}}}, Policy)
    report = under(aside, worse)
    assert (report.outcome, "not required and not passed: Accuracy" in report.reason) == (Outcome.GO, True)
    needed = msgspec.convert({"format": "dsv32-policy/1", "gates": {"accuracy": {"need": "required"}}}, Policy)
    assert under(needed).outcome is Outcome.INCONCLUSIVE
    assert under(needed, worse).outcome is Outcome.NO_GO
    assert under(needed, reached("accuracy", "gsm8k")).outcome is Outcome.GO


def test_every_gate_optional_is_no_go() -> None:
    rules = {"format": "dsv32-policy/1", "gates": {name: {"need": "optional"} for name in gate_names()}}
    assert under(msgspec.convert(rules, Policy)).outcome is Outcome.INCONCLUSIVE


def test_too_few_serving_runs_are_inconclusive() -> None:
    # 40 runs without a failure bound the share by 1 - 0.05^(1/40) = 7.2 %.
    assert under(Policy(max_failing_runs=0.08)).outcome is Outcome.GO
    report = under(Policy(max_failing_runs=0.05))
    assert report.outcome is Outcome.INCONCLUSIVE
    assert "the bound reached is 7.2 %" in report.reason


def test_the_documented_default_is_the_default(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "policy.md").read_text()
    block = text.split("```toml\n")[1].split("```")[0]
    (tmp_path / "signoff.toml").write_text(block)
    assert load_policy(tmp_path / "signoff.toml", tuple(GATES)) == DEFAULT
