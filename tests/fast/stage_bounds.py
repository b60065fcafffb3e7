"""The bounds of the optimised path's stages, where the tests of this folder look for them."""

from dsv32_fuzz.stage_bounds import (
    ARITH,
    Recording,
    Values,
    attended,
    expert_choices,
    ideal_biased,
    index_pairs,
    index_scores,
    values,
)

__all__ = [
    "ARITH",
    "Recording",
    "Values",
    "attended",
    "expert_choices",
    "ideal_biased",
    "index_pairs",
    "index_scores",
    "values",
]
