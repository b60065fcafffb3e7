"""The planner input of a step batch, from its definition alone: the oracle against which keys and builders are judged.

Independent on purpose of `dsv32_fast`'s builder: it shares nothing with it but the step batch.
Legend: R requests, T rows (query tokens and padding).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dsv32_fast.batch import StepBatch

TOPK = 2048
"""`index_topk` of DeepSeek-V3.2: the tokens that one query attends to, at most."""


def planner_lens(step: StepBatch, topk: int = TOPK) -> npt.NDArray[np.int32]:
    """Per-row KV lengths, int32 [T]: L(r, j) = min(seq_r - q_r + j + 1, topk) for row j of request r, 0 for padding.

    A padding request (query and sequence length 0) has no rows.

    Raises:
        ValueError: topk below 1.
    """
    if topk < 1:
        raise ValueError(f"topk is {topk}; it must be at least 1")
    q_R = np.asarray(step.query_lens, dtype=np.int64)
    seq_R = np.asarray(step.seq_lens, dtype=np.int64)
    lens_T = np.zeros(step.num_tokens, dtype=np.int32)
    live = int(q_R.sum())
    before_R = np.cumsum(q_R) - q_R  # rows of the requests before r
    # Row t of the batch is row j = t - before_r of its request: its length is (seq_r - q_r - before_r) + t + 1.
    lens_T[:live] = np.minimum(np.repeat(seq_R - q_R - before_R, q_R) + np.arange(1, live + 1), topk)
    return lens_T


def split_cap(step: StepBatch, topk: int = TOPK, compute_units: int = 256) -> int:
    """`max_split_per_batch` as vLLM 0.26 and later derive it from the bound `max_seq_len`.

    The power of two at or above min(max_seq_len, topk) // 128, at least 1 and at most the number of compute units: a
    scalar of the planner input that no published key holds.
    """
    wanted = max(1, min(step.max_seq_len, topk) // 128)
    return int(min(1 << (wanted - 1).bit_length(), compute_units))
