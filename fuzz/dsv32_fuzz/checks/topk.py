"""Checks of the top-k kernels, and of what becomes of their -1 entries.

Truth: the rows themselves, sorted on the host; for the gather list, the block table that the check made up. Nothing is
compared by tolerance.

Legend: M rows, K entries per row, N columns of the widest row.
"""

from __future__ import annotations

import inspect
from typing import Any

import msgspec
import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from dsv32_fast import attention as subject
from dsv32_fast.batch import StepBatch
from dsv32_fast.kernels.emulated.topk import arrival_order
from dsv32_fuzz.case import Dims
from dsv32_fuzz.checks.findings import Findings, device_of, same_bits
from dsv32_fuzz.checks.own_input import InputCheck
from dsv32_fuzz.strategies.scores import ScoreBatch, score_batches
from dsv32_fuzz.strategies.steps import integers, sampled_from
from dsv32_fuzz.targets import Target
from dsv32_fuzz.verdict import Verdict

UNWRITTEN = -77
OUTSIDE = (torch.inf, 3.0e38, torch.nan)
"""What lies in the columns that belong to no row: anything that a kernel would like to select."""
Ints = NDArray[np.int64]


def admitted_k(k: int, target: Target) -> int:
    """The real kernels take multiples of 128."""
    return k if target.evidence == "emulated" else -(-k // 128) * 128


class _Rows:
    """The rows of a batch in one storage with gaps, and the windows that a kernel may look at."""

    def __init__(self, drawn: ScoreBatch, target: Target) -> None:
        self.k, self.next_n = admitted_k(drawn.k, target), drawn.next_n
        parts = [part for part in drawn.values(self.k) for _ in range(self.next_n)]
        starts = [row.start for row in drawn.rows for _ in range(self.next_n)]
        self.width = max(start + len(part) for start, part in zip(starts, parts, strict=True)) + drawn.gap
        storage_MN = torch.empty(len(parts), max(1, self.width) + drawn.pitch)
        for row, (start, part) in enumerate(zip(starts, parts, strict=True)):
            storage_MN[row] = OUTSIDE[row % len(OUTSIDE)]
            storage_MN[row, start : start + len(part)] = part
        self.logits_MN = storage_MN.to(device_of(target))[:, : max(1, self.width)]
        self.starts = starts
        # Row n of a request sees one column more than row n - 1, and the last one all of them.
        later = [self.next_n - 1 - row % self.next_n for row in range(len(parts))]
        self.lengths = [max(0, len(part) - n) for part, n in zip(parts, later, strict=True)]
        self.seq_lens = [len(part) for part in parts[:: self.next_n]]
        self.seen = [part[:length] for part, length in zip(parts, self.lengths, strict=True)]

    def call(self, target: Target, prefill: bool, *, stable: bool, values: Tensor | None = None) -> Tensor:
        """Indices [M + 1, K]; the last row is none of the kernel's."""
        device, rows = self.logits_MN.device, len(self.lengths)
        found = torch.full((rows + 1, self.k), UNWRITTEN, dtype=torch.int32, device=device)
        kernels, strides = target.kernels, (self.logits_MN.stride(0), self.logits_MN.stride(1))
        assert kernels is not None
        options: dict[str, Any] = {"k": self.k, "stable": True} if stable else {"k": self.k}
        if prefill:
            ends = [start + length for start, length in zip(self.starts, self.lengths, strict=True)]
            first, last = (torch.tensor(edge, dtype=torch.int32, device=device) for edge in (self.starts, ends))
            kernels.top_k_per_row_prefill(self.logits_MN, first, last, found[:-1], values, rows, *strides, **options)
        else:
            lens = torch.tensor(self.seq_lens, dtype=torch.int32, device=device)
            kernels.top_k_per_row_decode(self.logits_MN, self.next_n, lens, found[:-1], rows, *strides, **options)
        return found


def keys(values: Tensor) -> Ints:
    """int64 in the order of the fp32 bit patterns, the order of the kernels: -0 lies below 0."""
    bits = values.contiguous().view(torch.int32).numpy().astype(np.int64)
    return np.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def contract_broken(chosen_K: Ints, seen_N: Tensor, start: int) -> str:
    """What is wrong with the entries of one row, empty if nothing: count, range, uniqueness, values."""
    expected = min(len(seen_N), len(chosen_K))
    entries, rest = chosen_K[:expected], chosen_K[expected:]
    if (rest != -1).any():
        return f"entry {expected + int((rest != -1).argmax())} is {rest[rest != -1][0]}, not -1, in a row of {expected}"
    outside = (entries < start) | (entries >= start + len(seen_N))
    if outside.any():
        at = int(outside.argmax())
        return f"entry {at} is {entries[at]}, outside of columns {start} to {start + len(seen_N) - 1}"
    if len(np.unique(entries)) != expected:
        return f"only {len(np.unique(entries))} of {expected} entries are distinct"
    # By value, not by bits: which of -0 and 0 is taken is a tie.
    picked, best = seen_N.numpy()[entries - start], -np.sort(-seen_N.numpy())[:expected]
    wrong = -np.sort(-picked) != best
    if wrong.any():
        at = int(wrong.argmax())
        return f"its {at + 1}. best value is {-np.sort(-picked)[at]:.9g}, and the row has {best[at]:.9g}"
    return ""


class TopkContract(InputCheck[ScoreBatch]):
    """Any set of k best columns in any order, by either kernel, whatever lies beside the rows."""

    name = "topk_contract"
    meaning = "every row gives the k best of its own columns, each once, then -1, and nothing else is written"
    family = "indexer"
    input_type = ScoreBatch

    def inputs(self) -> st.SearchStrategy[ScoreBatch]:
        """Ties, zeros, -inf, and lengths around k."""
        return score_batches()

    def run(self, drawn: ScoreBatch, target: Target) -> Verdict:
        """One call; the prefill kernel also hands out values."""
        found, rows = Findings(), _Rows(drawn, target)
        before_MN = rows.logits_MN.clone()
        values = torch.full((len(rows.lengths), rows.k), torch.nan, device=before_MN.device) if drawn.prefill else None
        indices = rows.call(target, drawn.prefill, stable=False, values=values)
        found.require("calls", same_bits(before_MN, rows.logits_MN), "the kernel changed its logits")
        found.require("canaries", bool((indices[-1] == UNWRITTEN).all()), "a row behind the last one was written")
        chosen_MK = indices[:-1].cpu().numpy().astype(np.int64)
        for row, seen_N in enumerate(rows.seen):
            wrong = contract_broken(chosen_MK[row], seen_N, rows.starts[row])
            found.require("rows", not wrong, f"row {row} of length {len(seen_N)}, k {rows.k}: {wrong}")
            found.counts["rows_longer_than_k"] += len(seen_N) > rows.k
            found.counts["rows_tied_at_the_cut"] += _tied(seen_N, rows.k)
        if values is not None and not found.violation:
            self._values(found, indices[:-1].cpu().long(), values.cpu(), rows.logits_MN.cpu())
        untested = "" if any(rows.lengths) else "every row is empty"
        return self.verdict(found.violation, found.measured(), untested=untested)

    def _values(self, found: Findings, chosen_MK: Tensor, values_MK: Tensor, logits_MN: Tensor) -> None:
        expected_MK = logits_MN.gather(1, chosen_MK.clamp_min(0)).masked_fill(chosen_MK < 0, 0.0)
        text = "values: not the logits at the indices, 0 where the index is -1"
        found.require("rows_with_values", same_bits(expected_MK, values_MK), text, times=len(values_MK))


def _tied(seen_N: Tensor, k: int) -> bool:
    if len(seen_N) <= k:
        return False
    best = seen_N.sort(descending=True).values
    return bool(best[k - 1] == best[k])


class TopkOrder(InputCheck[ScoreBatch]):
    """The stable variant, which every rank runs by itself: set and order are a function of the row (aiter #4415)."""

    name = "topk_order"
    meaning = "the stable top-k is in ascending order, the lower column wins a tie, whichever thread arrives first"
    family = "indexer"
    input_type = ScoreBatch

    def inapplicable(self, target: Target) -> str:
        """AITER has the stable variant from 0.1.20 on."""
        reason = super().inapplicable(target)
        if reason or target.kernels is None:
            return reason
        known = inspect.signature(target.kernels.top_k_per_row_decode).parameters
        variadic = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
        return "" if "stable" in known or variadic else "these kernels have no stable top-k (AITER has from 0.1.20 on)"

    def inputs(self) -> st.SearchStrategy[ScoreBatch]:
        """The same rows as for the contract."""
        return score_batches()

    def run(self, drawn: ScoreBatch, target: Target) -> Verdict:
        """Three ranks with different arrival, and both variants where the rows admit both."""
        found, rows = Findings(), _Rows(drawn, target)
        ranks = [self._rank(rows, target, drawn.prefill, rank) for rank in range(3)]
        for rank, other in enumerate(ranks[1:], 1):
            row = int((other != ranks[0]).any(1).argmax())
            text = f"row {row}: rank {rank} has {other[row].tolist()[:8]}, rank 0 {ranks[0][row].tolist()[:8]}"
            found.require("rows_across_ranks", np.array_equal(other, ranks[0]), text, times=len(other))
        for row, seen_N in enumerate(rows.seen):
            self._order(found, row, ranks[0][row], seen_N, rows.starts[row])
        racing = [self._rank(rows, target, drawn.prefill, rank, stable=False) for rank in range(2)]
        differ = (np.sort(racing[0], 1) != np.sort(racing[1], 1)).any(1)
        found.counts["unstable_rows_that_differ"] += int(differ.sum())
        untested = "" if found.counts["rows_longer_than_k"] else "no row is longer than k"
        return self.verdict(found.violation, found.measured(), untested=untested)

    def _rank(self, rows: _Rows, target: Target, prefill: bool, rank: int, *, stable: bool = True) -> Ints:
        with arrival_order(rank):
            return rows.call(target, prefill, stable=stable)[:-1].cpu().numpy().astype(np.int64)

    def _order(self, found: Findings, row: int, chosen_K: Ints, seen_N: Tensor, start: int) -> None:
        k = len(chosen_K)
        best = np.sort(np.argsort(-keys(seen_N), kind="stable")[:k]) + start
        expected_K = np.concatenate([best, np.full(k - len(best), -1)])
        found.counts["rows_longer_than_k"] += len(seen_N) > k
        at = int((chosen_K != expected_K).argmax())
        text = f"row {row}: entry {at} is {chosen_K[at]}, where the stable order has {expected_K[at]}"
        found.require("rows", np.array_equal(chosen_K, expected_K), text)


class GatherInput(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A step of requests with made-up block tables and top-k rows, some entries of which name no cached token."""

    contexts: tuple[int, ...] = (5,)
    """Tokens cached before the step."""
    queries: tuple[int, ...] = (1,)
    padding: int = 0
    topk: int = 8
    page_size: int = 16
    unnamed: int = 0
    """How many entries of the first rows become -1, or a position without a page, although their row counts them."""
    seed: int = 0


@st.composite
def gather_inputs(draw: st.DrawFn) -> GatherInput:
    """One to four requests around topk."""
    topk = draw(sampled_from((8, 2, 16)))
    pairs = draw(
        st.lists(
            st.tuples(sampled_from((topk, 0, 1, topk - 1, topk + 1, 3 * topk, 40)), sampled_from((1, 2, 4))),
            min_size=1,
            max_size=4,
        )
    )
    return GatherInput(
        contexts=tuple(context for context, _ in pairs),
        queries=tuple(query for _, query in pairs),
        padding=draw(sampled_from((0, 1, 3))),
        topk=topk,
        page_size=draw(sampled_from((16, 1, 64, 4))),
        unnamed=draw(sampled_from((0, 1, 3))),
        seed=draw(integers(0, 1 << 16)),
    )


class TopkSentinel(InputCheck[GatherInput]):
    """From the top-k of each row to physical slots, through `attention.fill_gather_list`."""

    name = "topk_sentinel"
    meaning = "each row's range of the gather list holds exactly its chosen slots; what names no token becomes -1"
    family = "indexer"
    input_type = GatherInput

    def inputs(self) -> st.SearchStrategy[GatherInput]:
        """Short and long rows, padding, entries that name nothing."""
        return gather_inputs()

    def run(self, drawn: GatherInput, target: Target) -> Verdict:
        """Fill the list of a poisoned buffer and compare every word of it."""
        found, rng = Findings(), np.random.default_rng(drawn.seed)
        seqs = tuple(c + q for c, q in zip(drawn.contexts, drawn.queries, strict=True))
        rows = sum(drawn.queries) + drawn.padding
        step = StepBatch(query_lens=drawn.queries, seq_lens=seqs, num_tokens=rows)
        session = target.open(Dims(topk=drawn.topk, max_num_batched_tokens=64, num_heads=16))
        record = session.build(step)
        table_BP = self._block_table(seqs, drawn.page_size, rng)
        topk_TK, owner = self._topk(drawn, seqs, table_BP.shape[1], rng)
        record.metadata.paged_kv_indices.fill_(UNWRITTEN)
        device = record.metadata.paged_kv_indices.device
        topk, table = (torch.from_numpy(part.astype(np.int32)).to(device) for part in (topk_TK, table_BP))
        subject.fill_gather_list(topk, record.metadata, table, drawn.page_size)
        expected = self._expected(drawn, topk_TK, owner, table_BP)
        filled = record.kv_indices_NK.astype(np.int64)
        self._compare(found, filled, expected, drawn.topk)
        return self.verdict(found.violation, found.measured())

    def _block_table(self, seqs: tuple[int, ...], page_size: int, rng: np.random.Generator) -> Ints:
        """Pages in no order, none twice; page 0 belongs to no one, so slot 0 is always foreign."""
        needed = [-(-seq // page_size) for seq in seqs]
        pages = 1 + rng.permutation(sum(needed) + 3)
        table_BP = np.full((len(seqs), max(needed)), -1, dtype=np.int64)
        for row, count in enumerate(needed):
            table_BP[row, :count], pages = pages[:count], pages[count:]
        return table_BP

    def _topk(
        self, drawn: GatherInput, seqs: tuple[int, ...], pages: int, rng: np.random.Generator
    ) -> tuple[Ints, list[int]]:
        """min(length, topk) distinct positions per row, then -1; and the request of each row, -1 for padding."""
        owner = [r for r, q in enumerate(drawn.queries) for _ in range(q)]
        topk_TK = np.full((len(owner) + drawn.padding, drawn.topk), -1, dtype=np.int64)
        for row, request in enumerate(owner):
            length = seqs[request] - drawn.queries[request] + 1 + row - owner.index(request)
            chosen = rng.permutation(length)[: drawn.topk]
            topk_TK[row, : len(chosen)] = chosen
        for number in range(drawn.unnamed):
            row = number % len(owner)
            counted = int((topk_TK[row] >= 0).sum())
            topk_TK[row, int(rng.integers(counted)) if counted else 0] = (-1, pages * drawn.page_size)[number % 2]
        return topk_TK, owner + [-1] * drawn.padding

    def _expected(self, drawn: GatherInput, topk_TK: Ints, owner: list[int], table_BP: Ints) -> list[Ints]:
        """The slots of each row, in order."""
        expected, size = [], drawn.page_size
        for row, request in enumerate(owner):
            if request < 0:
                expected.append(np.empty(0, dtype=np.int64))
                continue
            first = owner.index(request)
            length = min(drawn.contexts[request] + 1 + row - first, drawn.topk)
            slots = []
            for position in topk_TK[row, :length].tolist():
                page = table_BP[request, position // size] if 0 <= position < table_BP.shape[1] * size else -1
                slots.append(page * size + position % size if page >= 0 else -1)
            expected.append(np.array(slots, dtype=np.int64))
        return expected

    def _compare(self, found: Findings, filled: Ints, expected: list[Ints], topk: int) -> None:
        start = 0
        for row, slots in enumerate(expected):
            got = filled[start : start + len(slots)]
            at = int((got != slots).argmax()) if len(slots) else 0
            shown = f"{got[at]}, not {slots[at]}" if len(slots) else ""
            same = np.array_equal(got, slots)
            found.require("rows", same, f"paged_kv_indices: row {row}, entry {at}: slot {shown}")
            found.counts["entries"] += len(slots)
            found.counts["entries_that_name_nothing"] += int((slots < 0).sum())
            found.counts["rows_of_topk"] += len(slots) == topk
            start += len(slots)
        untouched = bool((filled[start : len(expected) * topk] == UNWRITTEN).all())
        found.require("canaries", untouched, "paged_kv_indices: written behind the last row's range")


CHECKS: tuple[type[InputCheck[Any]], ...] = (TopkContract, TopkOrder, TopkSentinel)
