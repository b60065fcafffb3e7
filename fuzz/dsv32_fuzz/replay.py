"""Replay of a saved case: on the in-tree path, with its own options or with others, or on another target."""

from __future__ import annotations

from dsv32_fast.options import Options, describe
from dsv32_fuzz.campaign import CHECKS, CHECKS_BY_NAME
from dsv32_fuzz.case import Case
from dsv32_fuzz.checks import run_case
from dsv32_fuzz.targets import Target
from dsv32_fuzz.targets.intree import InTreeTarget
from dsv32_fuzz.verdict import Status, Verdict


def replay_case(case: Case, options: Options | None = None, target: Target | None = None) -> tuple[Verdict, str]:
    """The verdict of the check that the case was saved for, and what it ran on, in words.

    Every check runs, and any failure is a failure. With other options the plan may no longer be reused on this case;
    the cache checks then have nothing to look at, and the case passes if the rebuilt plans are right.

    Raises:
        ValueError: the case names an unknown check, or has no options and none are given.
    """
    if case.check not in CHECKS_BY_NAME:
        raise ValueError(f"the case names the unknown check {case.check!r}; known are {', '.join(CHECKS_BY_NAME)}")
    if target is None:
        target = InTreeTarget(_options(case, options))
    text = describe(target.options) if target.options else target.name
    verdicts = {verdict.check: verdict for verdict in run_case(case, target, CHECKS)}
    own = verdicts[case.check]
    other = next((verdict for verdict in verdicts.values() if verdict.status is Status.FAILED), own)
    if own.status is not Status.FAILED and other.status is Status.FAILED:
        return other, text
    rebuilt = CHECKS_BY_NAME[case.check].needs_cache and own.status in (Status.MISTRUSTED, Status.SKIPPED)
    elsewhere = options is not None or target.options is None
    if elsewhere and rebuilt and verdicts["plan_coverage"].status is Status.PASSED:
        summary = f"the plan is rebuilt at each of the {len(case.steps)} steps, and covers every row exactly once"
        own = Verdict(check=case.check, status=Status.PASSED, summary=summary, measured=own.measured)
    return own, text


def _options(case: Case, options: Options | None) -> Options:
    if options is None and case.target != "in-tree":
        raise ValueError(f"the case is for target {case.target}; give --target, or --options for the in-tree path")
    used = options or case.options
    if used is None:
        raise ValueError("the case has no options of the in-tree path; give --options")
    return used
