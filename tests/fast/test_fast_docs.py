"""The example in docs/fast.md runs as written."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "fast.md"


def test_the_example_runs() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    names: dict[str, object] = {}
    exec(code, names)
    assert names["out"].logits.shape == (2, 512)  # type: ignore[attr-defined]
    assert ("gate_idx", 2) in names["seen"]  # type: ignore[operator]
