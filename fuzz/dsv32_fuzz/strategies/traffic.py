"""Every traffic class by name: the four of `strategies`, runs of the serving engine, and the batch mixes."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import strategies as st

from dsv32_fuzz.serving.traffic import serving_steps
from dsv32_fuzz.strategies import SCOPES, Steps
from dsv32_fuzz.strategies.batch_mixes import batch_mix_steps

TRAFFIC: dict[str, Callable[[], st.SearchStrategy[Steps]]] = {
    **SCOPES,
    "serving": serving_steps,
    "batch_mixes": batch_mix_steps,
}
