"""The examples of docs/reference.md run."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs" / "reference.md"


def test_examples_run() -> None:
    blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.S)
    assert len(blocks) == 2
    for block in blocks:
        exec(compile(block, str(DOCS), "exec"), {})


def test_every_stage_is_documented() -> None:
    from dsv32_ref.decode import STAGES

    text = DOCS.read_text(encoding="utf-8")
    assert [stage for stage in STAGES if f"`{stage}`" not in text] == []
