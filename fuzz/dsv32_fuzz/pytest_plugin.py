"""The pytest plugin: every check as part of a user's own CI.

    pytest --pyargs dsv32_fuzz --dsv32-options pr47766 --dsv32-profile ci

Nothing heavy is imported here, since pytest loads this module in every run.
"""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """The `--dsv32-*` options."""
    group = parser.getgroup("dsv32", "DeepSeek-V3.2 decode validation")
    group.addoption("--dsv32-options", default="pr47766", metavar="NAME", help="options preset of the path under test")
    group.addoption("--dsv32-set", action="append", default=[], metavar="FIELD=VALUE", help="set one field of them")
    group.addoption(
        "--dsv32-profile", default="ci", metavar="NAME", help="how long the checks run: ci, signoff, nightly"
    )
    group.addoption("--dsv32-seed", default=0, type=int, help="seed of everything that is drawn")
    group.addoption("--dsv32-cases", default="dsv32-cases", metavar="DIR", help="where counterexamples are saved")
