"""A property whose cases are written down: what will run before it runs, what became of it after."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from hypothesis import strategies as st

from dsv32_fuzz.campaigns.causes import case_digest
from dsv32_fuzz.campaigns.journal import Journal
from dsv32_fuzz.case import AnyCase, Case
from dsv32_fuzz.checks import told
from dsv32_fuzz.search.coverage import Coverage
from dsv32_fuzz.search.properties import Property, properties
from dsv32_fuzz.targets import Target
from dsv32_fuzz.verdict import Status, Verdict

EVENT = "event: "
SEEN = "drawn before on this shard, with this outcome"


class StopRequested(BaseException):  # no error; not an Exception, so that Hypothesis lets it through
    """Raised before a case, never inside one, when the shard was told to stop."""


@dataclass
class Recorded:
    """A property that keeps a journal, runs no case twice unless it failed, and runs nothing that is in quarantine."""

    searched: Property
    journal: Journal
    quarantine: Mapping[str, str]
    """Digests of cases, or names of checks, and the reason why they are not run."""
    _seen: dict[tuple[str, tuple[str, ...]], tuple[Status, ...]] = field(default_factory=dict)
    _stop: ClassVar[bool] = False

    @classmethod
    def stop(cls) -> None:
        """Ask for the end of the process' work before its next case."""
        cls._stop = True

    @property
    def scope(self) -> str:
        """The property's."""
        return self.searched.scope

    @property
    def checks(self) -> tuple[str, ...]:
        """The property's."""
        return self.searched.checks

    def cases(self) -> st.SearchStrategy[AnyCase]:
        """The property's."""
        return self.searched.cases()

    def remember(self, digest: str, verdicts: Sequence[Verdict]) -> None:
        """A case that an earlier session finished; one that failed will run again, so that it can be shrunk."""
        if all(verdict.status is not Status.FAILED for verdict in verdicts):
            self._seen[digest, tuple(v.check for v in verdicts)] = tuple(v.status for v in verdicts)

    def judge(self, case: AnyCase, checks: Sequence[str], attempt: int = 1) -> list[Verdict]:
        """The property's verdicts, recorded."""
        if Recorded._stop:
            raise StopRequested
        digest = case_digest(case)
        reason = self.quarantine.get(digest, "")
        allowed = [name for name in checks if not reason and name not in self.quarantine]
        known = self._seen.get((digest, tuple(allowed)))
        if known is not None:
            outcome = zip(allowed, known, strict=True)
            verdicts = [Verdict(check=name, status=status, summary=SEEN) for name, status in outcome]
        else:
            verdicts = self._run(case, allowed, attempt) if allowed else []
            self.remember(digest, verdicts)
        judged = {verdict.check: verdict for verdict in verdicts}
        return [judged.get(name) or self._skipped(name, reason) for name in checks]

    def _run(self, case: AnyCase, checks: Sequence[str], attempt: int) -> list[Verdict]:
        self.journal.begin(case, attempt)
        try:
            verdicts = self.searched.judge(case, checks)
        except OSError:  # a full disk is no finding
            raise
        except Exception as error:  # what the target raises is judged further down: this is the check's own
            summary = f"the check itself {told(error).removeprefix('the target ')}"
            verdicts = [Verdict(check=name, status=Status.FAILED, summary=summary) for name in checks]
        self.journal.finish(case, verdicts, cells_of(case))
        return verdicts

    def _skipped(self, name: str, reason: str) -> Verdict:
        why = f"quarantined: {reason or self.quarantine.get(name, '')}"
        return Verdict(check=name, status=Status.SKIPPED, summary=why)

    def smaller(self, case: AnyCase, fails: Callable[[AnyCase], bool]) -> AnyCase:
        """The property's."""
        return self.searched.smaller(case, fails)


def cells_of(case: AnyCase) -> list[str]:
    """Cells of the input space that a step sequence lies in, and `event: NAME` for each rare event in it."""
    if not isinstance(case, Case):
        return []
    coverage = Coverage()
    coverage.add(case)
    return [*coverage.cells, *(f"{EVENT}{name}" for name in coverage.events)]


@dataclass(frozen=True)
class Narrowed:
    """A property judged by some of its checks."""

    searched: Property
    checks: tuple[str, ...]

    @property
    def scope(self) -> str:
        """The property's."""
        return self.searched.scope

    def cases(self) -> st.SearchStrategy[AnyCase]:
        """The property's."""
        return self.searched.cases()

    def judge(self, case: AnyCase, checks: Sequence[str]) -> list[Verdict]:
        """The property's."""
        return self.searched.judge(case, checks)

    def smaller(self, case: AnyCase, fails: Callable[[AnyCase], bool]) -> AnyCase:
        """The property's."""
        return self.searched.smaller(case, fails)


def choose(target: Target, names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Scopes and checks that the names stand for: a traffic class, a check, or a family of checks; all if none.

    Raises:
        ValueError: a name that is none of these.
    """
    everything = {searched.scope: searched.checks for searched in properties(target)}
    if not names:
        return everything
    known = {*everything, *(check for checks in everything.values() for check in checks)}
    for name in names:
        if name not in known:
            raise ValueError(f"unknown check {name!r}; choose of {', '.join(sorted(known))}")
    chosen = {
        scope: checks if scope in names else tuple(check for check in checks if check in names)
        for scope, checks in everything.items()
    }
    return {scope: checks for scope, checks in chosen.items() if checks}


def selected(target: Target, scopes: Mapping[str, Sequence[str]]) -> list[Property]:
    """The properties of a target that a campaign searches."""
    found = [searched for searched in properties(target) if searched.scope in scopes]
    return [
        searched
        if searched.checks == tuple(scopes[searched.scope])
        else Narrowed(searched, tuple(scopes[searched.scope]))
        for searched in found
    ]
