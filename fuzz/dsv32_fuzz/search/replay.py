"""Replay of a saved case: on the in-tree path, with its own options or with others, or on another target."""

from __future__ import annotations

from collections.abc import Callable

from dsv32_fast.options import Options, describe
from dsv32_fuzz.case import AnyCase, Case
from dsv32_fuzz.checks.catalogue import STEP_CHECKS_BY_NAME
from dsv32_fuzz.search.properties import Property, property_of
from dsv32_fuzz.targets import Target
from dsv32_fuzz.targets.intree import InTreeTarget
from dsv32_fuzz.verdict import Status, Verdict


def replay_case(case: AnyCase, options: Options | None = None, target: Target | None = None) -> tuple[Verdict, str]:
    """The verdict of the check that the case was saved for, and what it ran on, in words.

    On the in-tree path with the case's own options or with others; on `target`, if one is given.

    Raises:
        ValueError: the case names an unknown check, or has no options and none are given.
    """
    if target is None:
        target = InTreeTarget(_options(case, options))
    return replay_on(case, target), describe(target.options) if target.options else target.name


def _options(case: AnyCase, options: Options | None) -> Options:
    if options is None and case.target != "in-tree":
        raise ValueError(f"the case is for target {case.target}; give --target, or --options for the in-tree path")
    used = options or case.options
    if used is None:
        raise ValueError("the case has no options of the in-tree path; give --options")
    return used


def _unchanged(judged: Property) -> Property:
    return judged


def replay_on(case: AnyCase, target: Target, wrap: Callable[[Property], Property] = _unchanged) -> Verdict:
    """The verdict of the check that the case was saved for; `wrap` may put something around the property.

    Every check of the case's property runs, and any failure is a failure. With other options than its own the plan may
    no longer be reused on this case; the cache checks then have nothing to look at, and the case passes if the rebuilt
    plans are right.

    Raises:
        ValueError: the case names an unknown check.
    """
    judged = wrap(property_of(case, target))
    verdicts = {verdict.check: verdict for verdict in judged.judge(case, judged.checks)}
    own = verdicts[case.check]
    if own.status is Status.FAILED:
        return own
    other = next((verdict for verdict in verdicts.values() if verdict.status is Status.FAILED), None)
    if other is not None:
        return other
    if isinstance(case, Case) and target.options != case.options and _rebuilt(own, verdicts):
        summary = f"the plan is rebuilt at each of the {len(case.steps)} steps, and covers every row exactly once"
        return Verdict(check=case.check, status=Status.PASSED, summary=summary, measured=own.measured)
    return own


def _rebuilt(own: Verdict, verdicts: dict[str, Verdict]) -> bool:
    """Whether the check only had nothing to look at, because no plan was reused, and every plan is right."""
    nothing_reused = STEP_CHECKS_BY_NAME[own.check].needs_cache and own.status in (Status.MISTRUSTED, Status.SKIPPED)
    return nothing_reused and verdicts["plan_coverage"].status is Status.PASSED
