"""The schedule: conservation laws, labels, row order and padding, each against a literal definition."""

import hashlib
import itertools
from collections import Counter

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import poisson

from dsv32_fuzz.workload import (
    DEFAULT_CAPTURE_SIZES,
    PR42982_WORKLOAD,
    ScheduledStep,
    Traffic,
    Workload,
    captured_rows,
    request_lengths,
    steps,
)
from dsv32_fuzz.workload.order import Row, reorder_decode_first

NOT_SERVED = (Traffic.CAPTURE, Traffic.IDLE)


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    concurrency = draw(st.integers(1, 6))
    return Workload(
        input_len=draw(st.integers(1, 40)),
        output_len=draw(st.integers(1, 8)),
        length_spread=draw(st.sampled_from((0.0, 0.1, 0.5))),
        concurrency=concurrency,
        num_requests=draw(st.integers(1, 10)),
        max_num_batched_tokens=concurrency + draw(st.integers(0, 40)),
        max_model_len=256,
        mtp_depth=draw(st.integers(0, 3)),
        acceptance=draw(st.sampled_from((0.0, 0.6, 1.0))),
        capture_sizes=draw(st.sampled_from(((), (1, 2, 4, 8, 16), (3, 5), DEFAULT_CAPTURE_SIZES))),
        decode_first=draw(st.booleans()),
        arrivals=draw(st.sampled_from(("closed", "staggered", "poisson"))),
        arrival_interval=draw(st.sampled_from((0.5, 1.0, 3.7))),
        preempt_rate=draw(st.sampled_from((0.0, 0.2, 1.0))),
        abort_rate=draw(st.sampled_from((0.0, 0.1))),
    )


def served(workload: Workload, seed: int) -> list[ScheduledStep]:
    return [step for step in steps(workload, seed) if step.traffic not in NOT_SERVED]


def live(step: ScheduledStep) -> list[tuple[int, int, int]]:
    """(request, query length, sequence length) of every live row group."""
    n = len(step.requests)
    return list(zip(step.requests, step.batch.query_lens[:n], step.batch.seq_lens[:n], strict=True))


class Replay:
    """Follows each request by the rules of the docstring alone, and asserts them on the way."""

    def __init__(self, workload: Workload, seed: int) -> None:
        self.w = workload
        lengths = request_lengths(workload, seed)
        self.prompt = dict(enumerate(i for i, _ in lengths))
        self.tokens = dict(self.prompt)
        self.left = dict(enumerate(o for _, o in lengths))
        self.context = dict.fromkeys(self.prompt, 0)
        self.reach = dict.fromkeys(self.prompt, 0)
        self.drafts = dict.fromkeys(self.prompt, 0)
        self.preemptions = 0

    def before(self, r: int, q: int, seq: int) -> None:
        if seq - q != self.context[r]:
            assert seq == q, f"request {r} jumped from context {self.context[r]} to {seq - q}"
            assert self.w.preempt_rate > 0
            self.preemptions += 1
            self.prompt[r], self.context[r], self.reach[r], self.drafts[r] = self.tokens[r], 0, 0, 0
        assert self.left[r] > 0, f"request {r} was scheduled after its last token"

    def wanted(self, r: int) -> int:
        return self.tokens[r] + self.drafts[r] - self.context[r]

    def after(self, r: int, q: int, new: int) -> None:
        end = self.context[r] + q
        self.reach[r] = end
        if end < self.tokens[r]:
            assert new == 0
            self.context[r] = end
            return
        drafts = end - self.tokens[r]
        assert 1 <= new <= min(drafts + 1, self.left[r])
        self.left[r] -= new
        self.context[r] = self.tokens[r] + new - 1
        self.tokens[r] += new
        self.drafts[r] = self.w.mtp_depth


def literal_label(rows: list[tuple[int, int, int]]) -> Traffic:
    """From (query length, context, prompt) of the live requests, word for word."""
    decoding = [q for q, ctx, prompt in rows if ctx >= prompt and ctx > 0]
    chunks = [ctx for _, ctx, prompt in rows if ctx < prompt]
    if not rows:
        return Traffic.IDLE
    if len(decoding) == len(rows):
        return Traffic.DECODE if all(q == 1 for q in decoding) else Traffic.MTP_DECODE
    if decoding:
        return Traffic.MIXED
    return Traffic.CHUNKED_PREFILL if any(ctx > 0 for ctx in chunks) else Traffic.PREFILL


@given(workloads(), st.integers(0, 2**32))
@settings(max_examples=250, deadline=None)
def test_conservation_laws_and_labels(workload: Workload, seed: int) -> None:
    replay = Replay(workload, seed)
    seen: set[int] = set()
    longest = workload.bounds(workload.input_len)[1] + workload.bounds(workload.output_len)[1] + 2 * workload.mtp_depth
    workload = msgspec.structs.replace(workload, max_model_len=longest)
    for step in served(workload, seed):
        rows = live(step)
        assert step.batch.max_seq_len <= workload.max_model_len
        assert 1 <= len(rows) <= workload.concurrency
        assert len({r for r, _, _ in rows}) == len(rows)
        used = sum(q for _, q, _ in rows)
        assert used <= workload.max_num_batched_tokens
        for r, q, seq in rows:
            assert q >= 1
            replay.before(r, q, seq)
            # A request gets less than it could use only where the budget ran out: this is what cuts prompts.
            assert q == replay.wanted(r) or (q < replay.wanted(r) and used == workload.max_num_batched_tokens)
        assert step.batch.max_seq_len == max(replay.reach[r] + q for r, q, _ in rows)
        assert step.traffic is literal_label([(q, seq - q, replay.prompt[r]) for r, q, seq in rows])
        seen |= {r for r, _, _ in rows}
        for (r, q, _), new in zip(rows, step.new_tokens, strict=True):
            replay.after(r, q, new)
    unfinished = [r for r, left in replay.left.items() if left]
    if workload.abort_rate == 0:
        assert seen == set(range(workload.num_requests))
        assert not unfinished


@given(workloads(), st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_padding_is_a_captured_size_and_only_for_uniform_steps(workload: Workload, seed: int) -> None:
    sizes, rows = captured_rows(workload), workload.mtp_depth + 1
    for step in served(workload, seed):
        n, batch = len(step.requests), step.batch
        assert set(batch.query_lens[n:]) | set(batch.seq_lens[n:]) <= {0}
        larger = [size for size in sizes if size >= batch.num_query_tokens]
        if set(batch.query_lens[:n]) == {rows} and larger:
            assert batch.num_tokens == min(larger)
            assert len(batch.query_lens) * rows == batch.num_tokens
        else:
            assert batch.num_tokens == batch.num_query_tokens
            assert len(batch.query_lens) == n


def test_a_short_prompt_beside_drafts_is_not_a_uniform_step() -> None:
    workload = Workload(
        input_len=2,
        output_len=9,
        concurrency=2,
        num_requests=2,
        mtp_depth=3,
        acceptance=0.0,
        arrivals="staggered",
        arrival_interval=2.0,
    )
    steps_ = served(workload, 0)
    assert [s.batch.query_lens for s in steps_[:4]] == [(2,), (4,), (4, 2), (4, 4)]
    assert [s.batch.num_tokens for s in steps_[:4]] == [2, 4, 6, 8]
    assert captured_rows(workload) == [4, 8]


def literal_order(previous: list[int], current: set[int], seen: set[int]) -> list[int]:
    """The hole rule on a list with holes: enter at the lowest hole, then close each hole with the last request."""
    slots: list[int | None] = [r if r in current else None for r in previous]
    entering = current - set(previous)
    for r in sorted(entering - seen) + sorted(entering & seen):
        if None in slots:
            slots[slots.index(None)] = r
        else:
            slots.append(r)
    while None in slots:
        last = slots.pop()
        if last is not None:
            slots[slots.index(None)] = last
    return [r for r in slots if r is not None]


@given(workloads(), st.integers(0, 2**32))
@settings(max_examples=250, deadline=None)
def test_rows_follow_the_hole_rule(workload: Workload, seed: int) -> None:
    # Without preemption, order of admission is the order of request numbers.
    workload = msgspec.structs.replace(workload, decode_first=False, preempt_rate=0.0)
    previous: list[int] = []
    seen: set[int] = set()
    for step in steps(workload, seed):
        if step.traffic is Traffic.CAPTURE:
            continue
        current = list(step.requests)
        assert current == literal_order(previous, set(current), seen)
        assert all(r < min(set(current) - seen, default=r + 1) for r in seen), "admission is first come, first served"
        previous, seen = current, seen | set(current)


@given(workloads(), st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_decode_first_sorts_by_kind_and_changes_nothing_else(workload: Workload, seed: int) -> None:
    # Drafts are drawn in row order, so only the certain ones make the two runs comparable.
    workload = msgspec.structs.replace(workload, decode_first=True, acceptance=1.0)
    plain = msgspec.structs.replace(workload, decode_first=False)
    replay = Replay(workload, seed)
    for ordered, unordered in zip(served(workload, seed), served(plain, seed), strict=True):
        assert sorted(live(ordered)) == sorted(live(unordered))
        kinds = []
        for r, q, seq in live(ordered):
            replay.before(r, q, seq)
            context, short = seq - q, q <= workload.mtp_depth + 1
            kinds.append(3 if context == 0 else 2 if not short else 1 if context < replay.prompt[r] else 0)
        assert kinds == sorted(kinds)
        for (r, q, _), new in zip(live(ordered), ordered.new_tokens, strict=True):
            replay.after(r, q, new)


KINDS = {  # (context, query length, prompt) with at most two rows per decode
    0: (9, 2, 9),
    1: (7, 2, 9),
    2: (6, 3, 9),
    3: (0, 1, 9),
}


def test_reordering_moves_only_rows_outside_their_region() -> None:
    for kinds in itertools.product(range(4), repeat=4):
        rows = [Row(i, 9, 1) for i in range(4)]
        for row, kind in zip(rows, kinds, strict=True):
            row.computed, row.query_len, row.prompt = KINDS[kind]
        result = reorder_decode_first(rows, 2)
        found = [kinds[r.number] for r in result]
        assert found == sorted(kinds)
        stay = [i for i in range(4) if kinds[i] == found[i]]
        assert [result[i].number for i in stay] == stay
        for kind in range(4):
            moved = [r.number for i, r in enumerate(result) if kinds[r.number] == kind and i not in stay]
            assert moved == sorted(moved)


def test_a_small_schedule_by_hand() -> None:
    workload = Workload(
        input_len=5, output_len=3, concurrency=2, num_requests=3, max_num_batched_tokens=4, capture_sizes=(1, 2)
    )
    expected = [
        ("capture", (), (1, 1), (1, 1), ()),
        ("capture", (), (1,), (1,), ()),
        ("prefill", (0,), (4,), (4,), (0,)),
        ("chunked_prefill", (0, 1), (1, 3), (5, 3), (1, 0)),  # the last chunk of 0 and the first chunk of 1
        ("mixed", (0, 1), (1, 2), (6, 5), (1, 1)),
        ("decode", (0, 1), (1, 1), (7, 6), (1, 1)),
        ("mixed", (1, 2), (1, 3), (7, 3), (1, 0)),  # 2 took row 0, decode-first puts it behind
        ("chunked_prefill", (2,), (2,), (5,), (1,)),
        ("decode", (2,), (1,), (6,), (1,)),
        ("decode", (2,), (1,), (7,), (1,)),
    ]
    found = [
        (s.traffic.value, s.requests, s.batch.query_lens, s.batch.seq_lens, s.new_tokens) for s in steps(workload, 0)
    ]
    assert found == expected
    assert next(iter(steps(workload, 0))).batch.max_seq_len == workload.max_model_len


def test_closed_loop_keeps_the_concurrency_until_requests_run_out() -> None:
    workload = Workload(input_len=3, output_len=20, concurrency=4, num_requests=12, max_num_batched_tokens=64)
    counts = [len(step.requests) for step in served(workload, 0)]
    assert counts == [4] * 60  # three waves of a prefill step and 19 decode steps each


@pytest.mark.parametrize(("acceptance", "per_step"), [(0.0, 1), (1.0, 4)])
def test_accepted_drafts_advance_the_sequence(acceptance: float, per_step: int) -> None:
    workload = Workload(
        input_len=8, output_len=21, concurrency=1, num_requests=1, mtp_depth=3, acceptance=acceptance, capture_sizes=()
    )
    first, *decodes = served(workload, 0)
    assert (first.batch.query_lens, first.new_tokens) == ((8,), (1,))
    assert [s.new_tokens for s in decodes] == [(per_step,)] * (20 // per_step)
    assert [s.batch.seq_lens for s in decodes] == [(8 + 4 + per_step * i,) for i in range(20 // per_step)]
    # One step late, the host still counts every draft of the last step: the sequence it assumes is too long.
    assert [s.batch.max_seq_len - s.batch.seq_lens[0] for s in decodes] == [0] + [4 - per_step] * (20 // per_step - 1)


def test_tokens_beyond_the_output_length_are_discarded() -> None:
    workload = Workload(input_len=8, output_len=4, concurrency=1, num_requests=1, mtp_depth=3, acceptance=1.0)
    assert [s.new_tokens for s in served(workload, 0)] == [(1,), (3,)]


def test_gaps_between_arrivals_are_idle() -> None:
    workload = Workload(
        input_len=4, output_len=2, concurrency=2, num_requests=3, arrivals="staggered", arrival_interval=5.0
    )
    labels = [s.traffic.value for s in steps(workload, 0) if s.traffic is not Traffic.CAPTURE]
    assert labels == (["prefill", "decode"] + ["idle"] * 3) * 2 + ["prefill", "decode"]


def test_poisson_arrivals_have_their_mean_and_their_spread() -> None:
    """Steps with k arrivals are binomial, but 1e-6 Poisson quantiles of the expected count are wider and simpler."""
    workload = Workload(
        input_len=1,
        output_len=1,
        concurrency=64,
        num_requests=2000,
        max_num_batched_tokens=64,
        capture_sizes=(),
        arrivals="poisson",
        arrival_interval=0.5,
    )
    counts = Counter(len(step.requests) for step in steps(workload, 1))  # each request takes one step: arrivals
    for k in range(7):
        expected = poisson.pmf(k, 2.0) * sum(counts.values())
        assert poisson.ppf(1e-6, expected) <= counts[k] <= poisson.ppf(1 - 1e-6, expected)


def test_preemption_recomputes_prompt_and_outputs_as_one_prompt() -> None:
    workload = Workload(
        input_len=30, output_len=20, concurrency=3, num_requests=9, max_num_batched_tokens=24, preempt_rate=0.2
    )
    replay = Replay(workload, 5)
    seen: set[int] = set()
    for step in served(workload, 5):
        if not set(step.requests) <= seen:
            assert all(r in step.requests or not replay.left[r] for r in seen), "a preempted request goes first"
        seen |= set(step.requests)
        for r, q, seq in live(step):
            replay.before(r, q, seq)
        for (r, q, _), new in zip(live(step), step.new_tokens, strict=True):
            replay.after(r, q, new)
    assert replay.preemptions > 3
    assert any(replay.prompt[r] > 30 for r in range(9))
    assert not any(replay.left.values())


def test_aborted_requests_leave_early_and_are_replaced() -> None:
    workload = Workload(input_len=10, output_len=30, concurrency=4, num_requests=20, abort_rate=0.1)
    tokens: Counter[int] = Counter()
    for step in served(workload, 3):
        tokens.update(dict(zip(step.requests, step.new_tokens, strict=True)))
    assert set(tokens) == set(range(20))
    assert 0 < sum(count < 30 for count in tokens.values()) < 20


def test_captured_rows_are_whole_requests_within_the_concurrency() -> None:
    assert captured_rows(Workload(concurrency=64)) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]
    assert captured_rows(Workload(concurrency=6, mtp_depth=2)) == [3, 6, 9, 18]  # 1, 2 -> 3; 4 -> 6; 8 -> 9; 16 -> 18
    assert captured_rows(Workload(capture_sizes=())) == []
    assert DEFAULT_CAPTURE_SIZES[-1] == 512


def test_lengths_fill_the_spread_and_do_not_depend_on_the_engine() -> None:
    workload = Workload(input_len=50, output_len=20, length_spread=0.1, num_requests=500)
    lengths = request_lengths(workload, 0)
    assert {i for i, _ in lengths} == set(range(45, 56))
    assert {o for _, o in lengths} == set(range(18, 23))
    assert lengths == request_lengths(msgspec.structs.replace(workload, mtp_depth=3, concurrency=8), 0)
    assert lengths != request_lengths(workload, 1)


def test_steps_are_the_same_on_every_python_version() -> None:
    """A recorded digest, so that every version in CI must reproduce what the first one produced."""
    workload = Workload(
        input_len=60,
        output_len=12,
        length_spread=0.3,
        concurrency=5,
        num_requests=40,
        max_num_batched_tokens=70,
        mtp_depth=2,
        acceptance=0.6,
        arrivals="poisson",
        preempt_rate=0.05,
        abort_rate=0.02,
    )
    digests = [hashlib.sha256(msgspec.json.encode(list(steps(workload, seed)))).hexdigest() for seed in (7, 7, 8)]
    assert digests[0] == digests[1] != digests[2]
    assert digests[0] == "f69c3aef3d2407e633aa97197be9e2fd9b2c7f818dc889975630a4066d06e2d4"


def test_a_workload_survives_json() -> None:
    for workload in (PR42982_WORKLOAD, Workload(arrivals="poisson", mtp_depth=1, capture_sizes=(4,))):
        assert msgspec.json.decode(msgspec.json.encode(workload), type=Workload) == workload
    w = PR42982_WORKLOAD
    assert (w.input_len, w.output_len, w.concurrency, w.num_requests) == (5000, 500, 64, 640)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"input_len": 0}, "workload input_len is 0; it must be an integer from 1"),
        ({"output_len": 2.5}, "output_len is 2.5; it must be an integer"),
        ({"concurrency": 0}, "concurrency is 0"),
        ({"num_requests": 0}, "num_requests is 0"),
        ({"mtp_depth": -1}, "mtp_depth is -1"),
        ({"acceptance": 1.5}, "acceptance is 1.5; it must be a probability"),
        ({"preempt_rate": -0.1}, "preempt_rate"),
        ({"abort_rate": float("nan")}, "abort_rate is nan"),
        ({"length_spread": 1.0}, "length_spread is 1.0; it must be a fraction"),
        ({"arrivals": "bursty"}, "arrivals is bursty; it must be one of closed, staggered, poisson"),
        ({"arrival_interval": 0.0}, "arrival_interval is 0.0"),
        ({"capture_sizes": (4, 2)}, "capture_sizes is .* positive and increasing"),
        ({"capture_sizes": (0, 2)}, "positive and increasing"),
        ({"max_num_batched_tokens": 63}, "max_num_batched_tokens is 63; it must be at least concurrency, 64"),
        ({"max_model_len": 5499}, "max_model_len is 5499; it must be at least the longest request with drafts, 5500"),
        ({"max_model_len": 5505, "mtp_depth": 3}, "the longest request with drafts, 5506"),
    ],
)
def test_bad_workloads_are_named(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        Workload(**fields)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
