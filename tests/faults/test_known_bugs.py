"""Every public report has a fault, or a reason why it has none."""

from __future__ import annotations

from dsv32_fuzz.faults import CATALOGUE
from dsv32_fuzz.faults.known_bugs import KNOWN_BUGS

ANSWERED = {number for fault in CATALOGUE for number in fault.bugs}


def test_numbers_are_unique_and_in_order() -> None:
    numbers = [bug.number for bug in KNOWN_BUGS]
    assert numbers == sorted(set(numbers))
    assert (len(numbers), numbers[0], numbers[-1]) == (63, "Z01", "Z73")


def test_every_number_has_a_fault_or_a_reason_and_never_both() -> None:
    for bug in KNOWN_BUGS:
        assert (bug.number in ANSWERED) != bool(bug.reason), bug
        assert bug.reports
        assert bug.title


def test_no_fault_names_an_unknown_number() -> None:
    assert not ANSWERED - {bug.number for bug in KNOWN_BUGS}
