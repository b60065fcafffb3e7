"""TP N held against TP 1, stage by stage: TP 1 runs the same steps, and after each stage goes on with TP N's value.

So no difference reaches the next stage. Stages that every rank computes as TP 1 does, from the same inputs, must have
the same bits. `attn_q`, `attn_z`, `attn_out` and `ffn_out` are cut: two evaluations of one function, each within its
bound (`bounded`) of the real value.

Legend: T rows, M model width, H heads, C latent, N nope, X nope + rope, K chosen experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dsv32_fast import attention
from dsv32_fast.layers import rope_table
from dsv32_fast.packing import Layer, Mlp, Moe
from dsv32_fast.parallel.bounded import Bounded, attended, exact, gated, summed, total, turned, weighted
from dsv32_fast.path import DecodePath
from dsv32_fast.state import CacheState, Tokens

Values = Mapping[tuple[str, int], Tensor]
"""What TP N had at (stage, layer): live rows, all heads."""
CUT = ("attn_q", "attn_z", "attn_out", "ffn_out")
ROWS_AT_ONCE = 32


@dataclass(kw_only=True)
class Difference:
    """What comparing found."""

    budget_used: dict[str, float] = field(default_factory=dict)
    """Largest |TP N - TP 1| / (sum of both bounds), by stage; above 1 is a bug."""
    unequal: dict[str, int] = field(default_factory=dict)
    """Elements whose bits differ, by stage, of the stages that are not cut."""
    compared: int = 0
    """Elements compared with a bound."""


@dataclass(kw_only=True)
class Comparison:
    """The TP-1 path, its caches, and what was found so far. Weights must be plain (no block fp8)."""

    path: DecodePath
    state: CacheState
    world: int
    found: Difference = field(default_factory=Difference)

    def step(self, tokens: Tokens, theirs: Values, *, bounds: bool) -> None:
        """Compare one step; without `bounds` the stages that are cut are only taken over."""
        positions: list[int] = []
        for request, ids in tokens.items():
            start = len(self.state.tokens.get(request, ()))
            positions += range(start, start + len(ids))
        table = rope_table(self.path.config, torch.tensor(positions, device=self.path.device))

        def tap(stage: str, layer: int, ours: Tensor) -> Tensor:
            if stage in CUT:
                if bounds:
                    self._measure(stage, ours, theirs[stage, layer], self._bound(stage, layer, theirs, table))
            elif not _same_bits(ours, theirs[stage, layer]):
                count = int((ours != theirs[stage, layer]).sum())
                self.found.unequal[stage] = self.found.unequal.get(stage, 0) + count
            else:
                return ours
            return theirs[stage, layer]

        self.path.decode(self.state, tokens, tap=tap)

    def _measure(self, stage: str, ours: Tensor, theirs: Tensor, bound: Tensor) -> None:
        difference = (ours.double() - theirs.double()).abs()
        used = torch.where(difference == 0, 0.0, difference / bound).nan_to_num(nan=torch.inf)
        self.found.budget_used[stage] = max(self.found.budget_used.get(stage, 0.0), float(used.max()))
        self.found.compared += used.numel()

    def _bound(self, stage: str, layer: int, theirs: Values, table: tuple[Tensor, Tensor]) -> Tensor:
        """The sum of both bounds, on TP N's inputs of the stage."""
        w = self.path.weights.layers[layer]
        if stage == "attn_q":
            return 2 * self._query(theirs["attn_in", layer], w, table).err
        if stage == "attn_z":
            return 2 * self._attended(theirs["attn_q", layer], layer).err
        if stage == "attn_out":
            o_TW = _values(theirs["attn_z", layer], w)
            return sum_of_bounds([_row_parallel(o_TW, w.attn.o.weight, n) for n in (1, self.world)])
        x_TM = theirs["ffn_in", layer]
        if isinstance(w.ffn, Mlp):
            h_TI = _inner(x_TM, w.ffn)
            return sum_of_bounds([_row_parallel(h_TI, w.ffn.down.weight, n) for n in (1, self.world)])
        ids_TK, weights_TK = theirs["gate_idx", layer].long(), theirs["gate_w", layer]
        at_once = [slice(i, i + ROWS_AT_ONCE) for i in range(0, len(x_TM), ROWS_AT_ONCE)]
        rows = [_mixture(x_TM[part], ids_TK[part], weights_TK[part], w.ffn, (1, self.world)) for part in at_once]
        return torch.cat([sum_of_bounds(part) for part in rows])

    def _query(self, a_TM: Tensor, w: Layer, table: tuple[Tensor, Tensor]) -> Bounded:
        config = self.path.config
        # The query latent is on every rank and so has the same bits everywhere.
        qr_TL = attention.query_latent(a_TM, w.attn, config, self.path.kernels)
        q = exact(qr_TL).linear(w.attn.q_b.weight).stored()
        q_THX = Bounded(*(part.view(len(a_TM), config.n_heads, config.qk_head_dim) for part in (q.value, q.err)))
        N = config.qk_nope_head_dim
        nope_HTN = Bounded(q_THX.value[..., :N].transpose(0, 1), q_THX.err[..., :N].transpose(0, 1))
        qa_HTC = nope_HTN.linear(w.attn.uk.transpose(1, 2)).stored()
        cos, sin = (part[:, None] for part in table)
        pe_THR = turned(Bounded(q_THX.value[..., N:], q_THX.err[..., N:]), cos, sin)
        joined = ((qa_HTC.value, pe_THR.value), (qa_HTC.err, pe_THR.err))
        q_THD = Bounded(*(torch.cat([qa.transpose(0, 1), pe], -1) for qa, pe in joined))
        scales = self.path.scales
        return q_THD if scales is None else q_THD.quantised(scales.q.item())

    def _attended(self, q_THD: Tensor, layer: int) -> Bounded:
        """What each row's gather list, just filled for this layer, gives."""
        builder, config, scales = self.path.builder, self.path.config, self.path.scales
        cache = self.state.latent[layer].view(-1, config.latent_dim)
        kv = cache.view(torch.uint8) if scales is not None else cache  # torch indexes no fp8
        ends = builder.paged_kv_indptr_N1.tolist()
        rows = []
        for t, q_HD in enumerate(q_THD):
            kv_KD = kv[builder.paged_kv_indices_NK[ends[t] : ends[t + 1]].long()].view(cache.dtype).double()
            kv_KD = kv_KD if scales is None else kv_KD * scales.kv.double()
            rows.append(attended(q_HD, kv_KD, config.kv_lora_rank, config.softmax_scale, fp8=scales is not None))
        return _stack(rows)


def sum_of_bounds(worlds: list[list[Bounded]]) -> Tensor:
    """For every world, from its ranks' summands, the bound of the sum; all added up."""
    return torch.stack([summed(ranks).err for ranks in worlds]).sum(0)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def _stack(rows: list[Bounded]) -> Bounded:
    return Bounded(torch.stack([row.value for row in rows]), torch.stack([row.err for row in rows]))


def _values(z_THC: Tensor, w: Layer) -> Bounded:
    """Head outputs UV z, stored, [T, heads x values]."""
    o_HTV = exact(z_THC.transpose(0, 1)).linear(w.attn.uv).stored()
    return Bounded(*(part.transpose(0, 1).flatten(1) for part in (o_HTV.value, o_HTV.err)))


def _inner(x_TM: Tensor, w: Mlp) -> Bounded:
    """silu(gate) up of an MLP whose gate and up are stored."""
    gate, up = (exact(x_TM).linear(part.weight).stored() for part in w.gate_up)
    return gated(gate, up)


def _row_parallel(x: Bounded, weight_ON: Tensor, world: int) -> list[Bounded]:
    """Each rank's product of its columns, stored."""
    return [x.columns(r, world).linear(weight_ON.chunk(world, -1)[r]).stored() for r in range(world)]


def _mixture(x_TM: Tensor, ids_TK: Tensor, weights_TK: Tensor, w: Moe, worlds: tuple[int, ...]) -> list[list[Bounded]]:
    """Each rank's summand in each world: weighted experts, stored, plus the shared expert, stored, their sum stored."""
    x_TK1M = exact(x_TM[:, None, None].expand(-1, ids_TK.shape[1], -1, -1))
    inner = x_TK1M.linear(w.experts.w1[ids_TK])
    gate, up = (Bounded(v, e) for v, e in zip(inner.value.chunk(2, -1), inner.err.chunk(2, -1), strict=True))
    h_TK1I, down_TKMI = gated(gate, up), w.experts.w2[ids_TK]
    shared = None if w.shared is None else (_inner(x_TM, w.shared), w.shared.down.weight)
    found = []
    for world in worlds:
        parts = [h_TK1I.columns(r, world).linear(down_TKMI.chunk(world, -1)[r]) for r in range(world)]
        ranks = [weighted(Bounded(y.value.squeeze(2), y.err.squeeze(2)), weights_TK).stored() for y in parts]
        if shared is not None:
            ranks = [total([a, b]).stored() for a, b in zip(ranks, _row_parallel(*shared, world), strict=True)]
        found.append(ranks)
    return found
