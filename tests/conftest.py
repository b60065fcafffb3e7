"""The choice of kernels: `pytest tests/kernels tests/fast --kernels aiter`.

With `aiter` the tests of kernels and of the decode step run on the installed AITER, or on its adapter over the mounted
emulation where there is none, at shapes that real kernels take. A test declares what it fixes by
`@pytest.mark.admits(Admits(...))`; what the kernels do not take is skipped, and counted by reason in the summary.
"""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from dsv32_fast.kernels.selection import Admits, current, selected, skipped

PREFIX = "left out by the kernels: "
SELECTION = pytest.StashKey[ExitStack]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--kernels",
        choices=("emulated", "aiter"),
        default="emulated",
        help="what tests/kernels and tests/fast run: the emulation, or AITER (mounted emulation where not installed)",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "admits(Admits): shapes that a test fixes; others follow the kernels")
    config.stash[SELECTION] = ExitStack()
    config.stash[SELECTION].enter_context(selected(config.getoption("--kernels")))


def pytest_unconfigure(config: pytest.Config) -> None:
    if SELECTION in config.stash:
        config.stash[SELECTION].close()


def pytest_report_header() -> str:
    return f"kernels: {current().title}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that would run the same kernels twice are dropped: `emulated` where there is the same test as `mounted`."""
    if not current().limits.defined:
        return
    names = {item.nodeid for item in items}
    twins = [i for i in items if "[emulated" in i.name and i.nodeid.replace("[emulated", "[mounted") in names]
    config.hook.pytest_deselected(items=twins)
    items[:] = [item for item in items if item not in twins]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leaves out what the kernels do not take."""
    for mark in item.iter_markers("admits"):
        admits = mark.args[0]
        assert isinstance(admits, Admits), f"admits takes an Admits, not {admits!r}"
        if reason := current().limits.why_not(admits):
            pytest.skip(PREFIX + reason)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Counts here and not where it is skipped: with xdist that is another process."""
    if report.skipped and isinstance(report.longrepr, tuple):
        _, found, reason = report.longrepr[2].partition(PREFIX)
        current().left_out.update([reason] if found else [])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if counts := skipped():
        terminalreporter.section(PREFIX + current().title)
        for reason, count in sorted(counts.items()):
            terminalreporter.line(f"{count:5d}  {reason}")
