"""The check of the lightning indexer's two logits kernels.

Truth: `dsv32_ref.bounds` on the operands that the kernels received. Keys lie in caches that this project's checks lay
out themselves; every slot that no request owns holds NaN.

Legend: B requests, R rows, T tokens, M model width, L query latent, J heads, I index width, S positions, K top-k.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from hypothesis import strategies as st
from torch import Tensor

from dsv32_fuzz.checks.cache import key_places, scale_places
from dsv32_fuzz.checks.findings import Findings, device_of
from dsv32_fuzz.checks.own_input import InputCheck
from dsv32_fuzz.strategies.steps import booleans, integers, sampled_from
from dsv32_fuzz.targets import Target
from dsv32_fuzz.verdict import Verdict
from dsv32_ref.bounds import Arithmetic, exact
from dsv32_ref.bounds import indexer as bounds

ARITH = Arithmetic()
FP8 = torch.float8_e4m3fn
UNWRITTEN = 12345.0


class LogitsInput(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Queries and cached keys of a few requests."""

    contexts: tuple[int, ...] = (5,)
    """Cached tokens of each request, the new ones included; 0 is a padded request."""
    next_n: int = 1
    page_size: int = 16
    preshuffle: bool = False
    chunk: int = 256
    """Keys per step of the paged kernel."""
    gathered: bool = False
    """By `cp_gather_indexer_k_quant_cache` and `fp8_mqa_logits`, as a prefill chunk."""
    hits: float = 0.5
    """Share of the positions with a positive product: the others are zeros of the ReLU."""
    seed: int = 0


@st.composite
def logits_inputs(draw: st.DrawFn) -> LogitsInput:
    """Contexts around pages and chunks, and some beyond topk = 2048."""
    page_size, next_n = draw(sampled_from((16, 64, 1, 32))), draw(sampled_from((1, 1, 2, 4)))
    chunk = draw(sampled_from((256, 16, 64)))
    lengths = sampled_from((5, next_n, 0, 15, 16, 17, 63, 64, 65, 100, 2100, 2060, 2100, 2049))
    return LogitsInput(
        contexts=tuple(draw(st.lists(lengths.map(lambda n: n if n == 0 else max(n, next_n)), min_size=1, max_size=4))),
        next_n=next_n,
        page_size=page_size,
        preshuffle=page_size % 16 == 0 and draw(booleans()),
        chunk=chunk,
        gathered=draw(booleans()),
        hits=draw(sampled_from((0.5, 0.05, 1.0))),
        seed=draw(integers(0, 1 << 16)),
    )


@dataclass(frozen=True)
class _Keys:
    """fp8 keys [S, I] and fp32 scales [S] of every request, and the cache that holds them."""

    keys: list[Tensor]
    scales: list[Tensor]
    cache: Tensor
    table: Tensor


def _keys(drawn: LogitsInput, width: int, q_1I: Tensor, g: torch.Generator) -> _Keys:
    """Keys along or against the one direction of the queries, in pages of no order; page 0 is nobody's."""
    size = drawn.page_size
    pages = [-(-context // size) for context in drawn.contexts]
    cache = torch.full((sum(pages) + 2, size, width + 4), 0xFF, dtype=torch.uint8)
    order = 1 + torch.randperm(sum(pages) + 1, generator=g)
    table = torch.full((len(pages), max(1, *pages)), -1, dtype=torch.int32)
    keys, scales = [], []
    for request, (context, count) in enumerate(zip(drawn.contexts, pages, strict=True)):
        table[request, :count], order = order[:count], order[count:]
        sign_S1 = torch.where(torch.rand(context, 1, generator=g) < drawn.hits, 1.0, -1.0)
        keys.append((sign_S1 * q_1I + 0.3 * torch.randn(context, width, generator=g)).to(FP8))
        scales.append(0.01 + torch.rand(context, generator=g))  # no powers of two (FlashMLA #184)
        position = torch.arange(context)
        slots = table[request].long()[position // size] * size + position % size
        flat = cache.view(-1)
        flat[key_places(slots, size, width, drawn.preshuffle)] = keys[-1].view(torch.uint8)
        flat[scale_places(slots, size, width)] = scales[-1][:, None].contiguous().view(torch.uint8)
    return _Keys(keys, scales, cache, table)


class IndexLogits(InputCheck[LogitsInput]):
    """sum over heads of weight * relu(q . k) * scale, for every position that a row may see and for no other."""

    name = "index_logits"
    meaning = "every visible position has its score within the bound, every other is -inf or untouched"
    family = "indexer"
    input_type = LogitsInput

    def inputs(self) -> st.SearchStrategy[LogitsInput]:
        """Both kernels."""
        return logits_inputs()

    def run(self, drawn: LogitsInput, target: Target) -> Verdict:
        """Score every row of every request."""
        found, g = Findings(), torch.Generator().manual_seed(drawn.seed)
        heads, width = (64, 128) if target.evidence == "hardware" else (4, 32)
        base_1I = torch.randn(1, width, generator=g)
        rows = len(drawn.contexts) * drawn.next_n
        q_RJI = (base_1I + 0.5 * torch.randn(rows, heads, width, generator=g)).to(FP8)
        w_RJ = torch.randn(rows, heads, generator=g)  # negative weights too
        made = _keys(drawn, width, base_1I, g)
        if not any(drawn.contexts):
            return self.verdict("", found.measured(), untested="no request has a token")
        call = self._gathered if drawn.gathered else self._paged
        scores_RS = call(drawn, q_RJI, w_RJ, made, target).cpu()
        for row in range(rows):
            self._row(found, drawn, row, (q_RJI, w_RJ), made, scores_RS[row])
        return self.verdict(found.violation, found.measured())

    def _paged(self, drawn: LogitsInput, q_RJI: Tensor, w_RJ: Tensor, made: _Keys, target: Target) -> Tensor:
        device, longest = device_of(target), max(drawn.contexts)
        out_RS = torch.full((len(w_RJ), longest + 9), UNWRITTEN, device=device)
        assert target.kernels is not None
        target.kernels.deepgemm_fp8_paged_mqa_logits(
            q_RJI.view(len(drawn.contexts), drawn.next_n, *q_RJI.shape[1:]).to(device),
            made.cache.to(device)[:, :, None],
            w_RJ.to(device),
            out_RS,
            torch.tensor(drawn.contexts, dtype=torch.int32, device=device),
            made.table.clamp_min(0).to(device),
            longest,
            Preshuffle=drawn.preshuffle,
            KVBlockSize=drawn.page_size,
            ChunkK=drawn.chunk,
        )
        return out_RS

    def _gathered(self, drawn: LogitsInput, q_RJI: Tensor, w_RJ: Tensor, made: _Keys, target: Target) -> Tensor:
        """One call over the keys of all requests, each row with its own window; columns move to the front."""
        device, total = device_of(target), sum(drawn.contexts)
        ends = torch.tensor([0, *drawn.contexts], dtype=torch.int32).cumsum(0).int()
        keys = torch.empty(total, q_RJI.shape[2], dtype=torch.uint8, device=device)
        scales = torch.empty(total, 1, device=device)
        assert target.kernels is not None
        target.kernels.cp_gather_indexer_k_quant_cache(
            made.cache.to(device), keys, scales, made.table.to(device), ends.to(device), preshuffle=drawn.preshuffle
        )
        starts_R = ends[:-1].repeat_interleave(drawn.next_n)
        lengths_R = torch.tensor([self._seen(drawn, row) for row in range(len(w_RJ))])
        window = starts_R.to(device), (starts_R + lengths_R).int().to(device)
        logits = target.kernels.fp8_mqa_logits(q_RJI.to(device), keys.view(FP8), scales, w_RJ.to(device), *window)
        out_RS = torch.full((len(w_RJ), max(drawn.contexts) + 9), UNWRITTEN, device=device)
        for row in range(len(w_RJ)):
            request = row // drawn.next_n
            out_RS[row, : drawn.contexts[request]] = logits[row, ends[request] : ends[request + 1]]
            others = torch.cat([logits[row, : ends[request]], logits[row, ends[request + 1] :]])
            out_RS[row, -1] = others.amax() if len(others) else -torch.inf  # must be -inf: foreign keys
        return out_RS

    def _seen(self, drawn: LogitsInput, row: int) -> int:
        """How many positions a row may look at."""
        return max(0, drawn.contexts[row // drawn.next_n] - drawn.next_n + 1 + row % drawn.next_n)

    def _row(
        self,
        found: Findings,
        drawn: LogitsInput,
        row: int,
        query: tuple[Tensor, Tensor],
        made: _Keys,
        scores_S: Tensor,
    ) -> None:
        request, seen = row // drawn.next_n, self._seen(drawn, row)
        context = drawn.contexts[request]
        if seen:
            q, w = (exact(part[row : row + 1].float()) for part in query)
            keys, scales = exact(made.keys[request][:seen].float()), exact(made.scales[request][:seen])
            stage = f"index_score of request {request}, row {row % drawn.next_n}"
            found.within(stage, scores_S[None, :seen], bounds.index_scores(q, w, keys, scales, ARITH))
        # Behind its own positions a row is masked up to the end of the chunk, and nothing is written from there on.
        rest = scores_S[seen:]
        silent = (rest == -torch.inf) | (rest == UNWRITTEN)
        silent[: context - seen] &= rest[: context - seen] == -torch.inf
        at = seen + int((~silent).int().argmax()) if len(rest) else seen
        text = f"row {row} sees {seen} positions and shows {float(scores_S[at]):.4g} at {at}"
        found.require("positions_hidden", bool(silent.all()), text, times=len(rest))


CHECKS: tuple[type[InputCheck[Any]], ...] = (IndexLogits,)
