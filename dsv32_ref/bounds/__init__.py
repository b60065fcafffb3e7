"""Error bounds that are proofs: per-element running bounds for every stage of the decode, and certificates for its
choices.

Contract: each function takes and returns `Approx(value, err)`; see `arith` for the model and docs/bounds.md for the
proofs.
"""

from dsv32_ref.bounds.arith import (
    BF16,
    E4M3FN,
    E4M3FNUZ,
    FP16,
    FP32,
    Approx,
    Arithmetic,
    Format,
    approx,
    exact,
    round_like,
    round_to,
)
from dsv32_ref.bounds.attention import SoftmaxForm, attend, attend_like, scores
from dsv32_ref.bounds.budget import EDGES, Budget, binned, budget_used, judge
from dsv32_ref.bounds.margins import Certificate, certify_router, certify_topk

__all__ = [
    "BF16",
    "E4M3FN",
    "E4M3FNUZ",
    "EDGES",
    "FP16",
    "FP32",
    "Approx",
    "Arithmetic",
    "Budget",
    "Certificate",
    "Format",
    "SoftmaxForm",
    "approx",
    "attend",
    "attend_like",
    "binned",
    "budget_used",
    "certify_router",
    "certify_topk",
    "exact",
    "judge",
    "round_like",
    "round_to",
    "scores",
]
