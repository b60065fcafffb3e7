"""The corpus and the ledger of the project itself: every case fails with its own options and is fixed by the repair."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsv32_fast.options import PRESETS
from dsv32_fuzz.campaigns.corpus import Corpus
from dsv32_fuzz.campaigns.ledger import read_ledger, witnesses
from dsv32_fuzz.case import load_case
from dsv32_fuzz.search.replay import replay_case
from dsv32_fuzz.verdict import Status

FUZZ = Path(__file__).parents[2] / "fuzz"
CASES = Corpus(FUZZ / "corpus").files()


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_a_case_fails_as_it_was_saved_and_passes_when_repaired(path: Path) -> None:
    case = load_case(path)
    verdict, _ = replay_case(case)
    assert verdict.status is Status.FAILED
    assert verdict.check == case.check
    assert replay_case(case, PRESETS["pr47766"])[0].status is Status.PASSED


def test_there_is_a_corpus_and_a_ledger_that_holds() -> None:
    assert len(CASES) >= 4
    ledger = read_ledger(FUZZ / "ledger.toml")
    assert len(witnesses(ledger, FUZZ)) >= len(ledger.failure)
