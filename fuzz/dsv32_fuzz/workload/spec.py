"""What is served: a frozen, JSON-serialisable description of a request stream and of the engine's settings.

A workload and a seed determine every step (`steps` in schedule.py) on every Python version: the only source of
randomness is `random.Random.random()`, whose sequence for a given seed Python guarantees.
"""

from __future__ import annotations

import enum
import math
import random
from typing import Literal, get_args

import msgspec

from dsv32_fast.batch import MAX_TOKENS

DEFAULT_CAPTURE_SIZES = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))
"""Row counts that vLLM captures as full decode graphs when it is not told otherwise, up to 512."""


class Traffic(str, enum.Enum):
    """The class of a step, judged on its live requests with context = sequence length - query length."""

    DECODE = "decode"
    """Every request is past its prompt and has one row."""
    MTP_DECODE = "mtp_decode"
    """Every request is past its prompt, and some have draft rows."""
    PREFILL = "prefill"
    """Only first (or whole) chunks of prompts: context 0."""
    CHUNKED_PREFILL = "chunked_prefill"
    """Only prompt chunks, and some continue an earlier chunk."""
    MIXED = "mixed"
    """Prompt chunks and requests past their prompt."""
    CAPTURE = "capture"
    """A dummy build before serving, one for each captured graph."""
    IDLE = "idle"
    """No request is scheduled; nothing is built."""


PURE_DECODE = frozenset({Traffic.DECODE, Traffic.MTP_DECODE})


Arrivals = Literal["closed", "staggered", "poisson"]


class Workload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request stream and the engine that serves it; the defaults are the workload of vLLM PR #42982.

    Lengths are in tokens. The PR states input, output and concurrency; the other values are vLLM's defaults, or ours:
    640 requests are ten waves of the concurrency.

    Raises:
        ValueError: a field outside its range, or fields that contradict each other; the message names them.
    """

    input_len: int = 5000
    output_len: int = 500
    length_spread: float = 0.0
    """Each request's input and output length is uniform over the integers within +-spread of the value above."""
    concurrency: int = 64
    """`max_num_seqs`: requests that run at the same time, at most."""
    num_requests: int = 640
    """Requests served (or aborted) in all."""
    max_num_batched_tokens: int = 8192
    """The token budget of one step."""
    max_model_len: int = 163_840
    mtp_depth: int = 0
    """Draft tokens per decode step: a decode step has `mtp_depth + 1` rows per request."""
    acceptance: float = 0.85
    """Probability that a draft is accepted given that those before it were; the DeepSeek-V3 report (section 5.4.3)
    measures 85 to 90 % for the first draft."""
    capture_sizes: tuple[int, ...] = DEFAULT_CAPTURE_SIZES
    """Rows of the captured graphs; empty means eager: no padding and no capture builds."""
    decode_first: bool = True
    """Whether the batch is reordered so that decodes come first, as the indexer's backend asks of vLLM."""
    arrivals: Arrivals = "closed"
    """`closed`: `concurrency` requests at the start, and the next one as soon as one leaves; `staggered`: one request
    every `arrival_interval` steps, the first at step 0; `poisson`: a Poisson count per step, mean 1 / interval."""
    arrival_interval: float = 1.0
    """Mean number of steps between arrivals; not used by a closed loop."""
    preempt_rate: float = 0.0
    """Probability per step that the running request admitted last is preempted, to be recomputed later."""
    abort_rate: float = 0.0
    """Probability per step that one running request is aborted."""

    def __post_init__(self) -> None:
        """Validate every field, then how they fit together."""
        for field in ("input_len", "output_len", "concurrency", "num_requests", "max_num_batched_tokens"):
            _require(_is_int(self, field, 1, MAX_TOKENS), self, field, f"an integer from 1 to {MAX_TOKENS}")
        _require(_is_int(self, "mtp_depth", 0, 64), self, "mtp_depth", "an integer from 0 to 64")
        for field in ("acceptance", "preempt_rate", "abort_rate"):
            _require(0 <= getattr(self, field) <= 1, self, field, "a probability, from 0 to 1")
        _require(0 <= self.length_spread < 1, self, "length_spread", "a fraction, from 0 to below 1")
        _require(self.arrivals in get_args(Arrivals), self, "arrivals", f"one of {', '.join(get_args(Arrivals))}")
        _require(0.01 <= self.arrival_interval <= 1e6, self, "arrival_interval", "from 0.01 to 1e6 steps")
        increasing = all(a < b for a, b in zip((0, *self.capture_sizes), self.capture_sizes, strict=False))
        _require(increasing, self, "capture_sizes", "positive and increasing")
        fits = self.max_num_batched_tokens >= self.concurrency
        _require(fits, self, "max_num_batched_tokens", f"at least concurrency, {self.concurrency}")
        longest = self.bounds(self.input_len)[1] + self.bounds(self.output_len)[1] + 2 * self.mtp_depth
        fits = _is_int(self, "max_model_len", longest, MAX_TOKENS)
        _require(fits, self, "max_model_len", f"at least the longest request with drafts, {longest}")

    def bounds(self, length: int) -> tuple[int, int]:
        """Smallest and largest length that the spread makes of `length`."""
        slack = math.floor(length * self.length_spread)
        return length - slack, length + slack


def _is_int(workload: Workload, field: str, low: int, high: int) -> bool:
    value = getattr(workload, field)
    return isinstance(value, int) and low <= value <= high


def _require(holds: bool, workload: Workload, field: str, remedy: str) -> None:
    if not holds:
        raise ValueError(f"workload {field} is {getattr(workload, field)}; it must be {remedy}")


PR42982_WORKLOAD = Workload()
"""5000 tokens in, 500 out, concurrency 64, closed loop, 640 requests."""


def stream(seed: int, purpose: str) -> random.Random:
    """An independent random stream per purpose, so that one setting does not change the draws of another."""
    return random.Random(f"{seed}/{purpose}")


def below(rng: random.Random, count: int) -> int:
    """A uniform integer in [0, count), from `random()` alone (what `randrange` draws may change with Python)."""
    return min(int(rng.random() * count), count - 1)


def request_lengths(workload: Workload, seed: int) -> list[tuple[int, int]]:
    """(input length, output length) of request 0, 1, ...; the same for every budget, concurrency and MTP depth."""
    rng = stream(seed, "lengths")

    def draw(length: int) -> int:
        low, high = workload.bounds(length)
        return low + below(rng, high - low + 1)

    return [(draw(workload.input_len), draw(workload.output_len)) for _ in range(workload.num_requests)]


def captured_rows(workload: Workload) -> list[int]:
    """Rows of the captured graphs, ascending: capture sizes rounded up to whole requests, up to `concurrency` of them.

    As in vLLM a size above `concurrency` requests is not captured, even if the largest batch then fits no graph.
    """
    rows = workload.mtp_depth + 1
    rounded = {-(-size // rows) * rows for size in workload.capture_sizes}
    return sorted(size for size in rounded if size <= workload.concurrency * rows)
