"""When two failures have one cause, as far as can be told from outside: one check, and the same words but for numbers.

A shrunk case says where it fails with numbers of its own (step, row, head, slot, value); two searches that meet the
same defect differ in these alone. So the cause is the summary with every number replaced by a sign.
"""

from __future__ import annotations

import hashlib
import re

import msgspec

from dsv32_fuzz.case import AnyCase

_NUMBER = re.compile(r"(?<![A-Za-z_])[-+]?(?:0x[0-9a-fA-F]+|inf\b|nan\b|\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)")
_LIST = re.compile(r"[\[(]#(?:,? #)*,?[\])]")
_SLUG = re.compile(r"[^a-z0-9]+")
LONGEST_SLUG = 48


def cause_of(summary: str) -> str:
    """The summary of a failure without its numbers; a list of numbers counts as one."""
    return _LIST.sub("#", _NUMBER.sub("#", " ".join(summary.split())))


def case_digest(case: AnyCase) -> str:
    """16 hexadecimal digits of what a case runs: neither the check it was saved for nor target, options and note.

    The scope is part of it, which for a check that draws its own input is the check.
    """
    plain = msgspec.structs.replace(case, check=case.scope, target="", options=None, note="")
    return hashlib.blake2b(msgspec.json.encode(plain), digest_size=8).hexdigest()


def purpose(case: AnyCase, summary: str) -> str:
    """A file name that says what the case is for: check, traffic class and cause in words, and a few digits."""
    words = _SLUG.sub("-", cause_of(summary).lower()).strip("-")[:LONGEST_SLUG].strip("-")
    scope = "" if case.scope == case.check else f"-{case.scope}"
    return f"{case.check}{scope}-{words or 'case'}-{case_digest(case)[:6]}.json"
