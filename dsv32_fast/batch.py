"""One scheduler step as the metadata builder sees it.

A step batch holds, per request, a query length and a sequence length (context + query), plus the number of rows after
graph padding. vLLM calls the same things `query_start_loc`, `seq_lens` and `num_actual_tokens` of its
`CommonAttentionMetadata`.
"""

from __future__ import annotations

import msgspec

MAX_TOKENS = 2**31 - 1  # every length is an int32 on the device


class StepBatch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One step: `query_lens[r]` new tokens for request r, whose sequence then has `seq_lens[r]` tokens.

    `num_tokens` is the number of rows after graph padding (0 means no padding: sum of the query lengths).
    `max_seq_len` is the upper bound that the model runner passes on (0 means exact: the largest sequence length); it is
    larger in a graph capture, and in asynchronous speculative decoding, where it assumes every draft was accepted.
    A padding request has query length 0 and sequence length 0.

    Raises:
        ValueError: lengths of different count, a negative length, a sequence shorter than its query, fewer rows than
            query tokens, or a bound below the largest sequence.
    """

    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    num_tokens: int = 0
    max_seq_len: int = 0

    def __post_init__(self) -> None:
        """Validate, and replace the two zeros that mean "derive it"."""
        if len(self.query_lens) != len(self.seq_lens):
            raise ValueError(f"{len(self.query_lens)} query lengths but {len(self.seq_lens)} sequence lengths")
        for r, (q, s) in enumerate(zip(self.query_lens, self.seq_lens, strict=True)):
            if q < 0 or s < q or s > MAX_TOKENS:
                raise ValueError(f"request {r}: query length {q} and sequence length {s} need 0 <= query <= sequence")
        live, longest = sum(self.query_lens), max(self.seq_lens, default=0)
        if self.num_tokens == 0:
            msgspec.structs.force_setattr(self, "num_tokens", live)
        if self.max_seq_len == 0:
            msgspec.structs.force_setattr(self, "max_seq_len", longest)
        if not live <= self.num_tokens <= MAX_TOKENS:
            raise ValueError(f"num_tokens {self.num_tokens} is below the {live} query tokens of the step")
        if not longest <= self.max_seq_len <= MAX_TOKENS:
            raise ValueError(f"max_seq_len {self.max_seq_len} is below the longest sequence, {longest}")

    @property
    def num_query_tokens(self) -> int:
        """Rows that belong to a request; the rest, up to `num_tokens`, is padding."""
        return sum(self.query_lens)

    @property
    def max_query_len(self) -> int:
        """Largest query length, 0 for an empty step."""
        return max(self.query_lens, default=0)
