"""The bounds of `dsv32_ref`'s own stages: what each function of mla, indexer, router and moe may return.

Contract: as in `arith`; shapes and names as in those modules. `precision` names the rounding points. Two references:
against the ideal value (simulated=False) every rounding point costs half a step; against the simulated-quantised value
(simulated=True) it costs nothing but where an earlier error may carry a number across a rounding boundary.
Legend: T tokens, M width, L query latent, H heads, N nope, R rope, V value width, C latent, D = C + R, J indexer heads,
I indexer width, S cached tokens, K selected tokens or chosen experts, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from dsv32_ref.bounds import indexer, linear, moe, norm, quant, rope, router
from dsv32_ref.bounds.arith import BF16, Approx, Arithmetic, exact, hull, round_like, round_to, with_slack
from dsv32_ref.bounds.attention import SoftmaxForm, attend, attend_like, shares
from dsv32_ref.bounds.elementary import add, mul, scale_by, silu
from dsv32_ref.config import FP32, Config, Precision
from dsv32_ref.indexer import IndexerWeights
from dsv32_ref.mla import MlaWeights
from dsv32_ref.moe import MlpWeights, MoeWeights
from dsv32_ref.quant import BlockFp8, Matrix
from dsv32_ref.rope import frequencies
from dsv32_ref.router import GateWeights


@dataclass(frozen=True, kw_only=True)
class StageBounds:
    """Bounds of every stage of one model under one precision and one model of arithmetic."""

    config: Config
    precision: Precision = FP32
    arith: Arithmetic = field(default_factory=Arithmetic)
    simulated: bool = False

    def stored(self, x: Approx) -> Approx:
        """A rounding point."""
        if not self.precision.bf16:
            return x
        return round_like(x, BF16) if self.simulated else round_to(x, BF16)

    def quantised(self, x: Approx) -> Approx:
        """An fp8 round trip in blocks of 128, or of the whole row where it is shorter."""
        rule = self._rule(x.value.shape[-1])
        return (quant.fake_quant_like if self.simulated else quant.fake_quant)(x, rule, self.arith)

    def _rule(self, width: int) -> quant.ScaleRule:
        block = min(quant.ACT_QUANT.block, width)
        return quant.ScaleRule(ue8m0=self.precision.scale_format == "ue8m0", block=block)

    def linear(self, x_TN: Approx, weight: Matrix) -> Approx:
        """x W^T [T, O]; a block-fp8 weight costs one more rounding per term, fp8 activations two and their own step."""
        if not isinstance(weight, BlockFp8):
            return self.stored(linear.linear(x_TN, exact(weight), self.arith))
        x_TN = self.quantised(x_TN) if self.precision.linear_fp8 else x_TN
        dense = exact(weight.dequantise(torch.float64))
        return self.stored(linear.linear(x_TN, dense, self.arith, roundings=2))

    def rms_norm(self, x: Approx, gain: Tensor) -> Approx:
        """RMSNorm, rounded once."""
        return self.stored(norm.rms_norm(x, exact(gain), self.config.norm_eps, self.arith))

    def add_rms_norm(self, x: Approx, residual: Approx, gain: Tensor) -> tuple[Approx, Approx]:
        """The norm of the unrounded sum, and the stored sum."""
        together = add(x, residual, self.arith)
        return self.rms_norm(together, gain), self.stored(together)

    def turned(self, x: Approx, positions_T: Tensor, layout: rope.Layout) -> Approx:
        """RoPE of x [T, ..., R] at the angles as the model runs them."""
        table = rope.cos_sin(rope.angles(positions_T, exact(frequencies(self.config)), self.arith), self.arith)
        ones = [1] * (x.value.dim() - 2)
        cos, sin = (part.apply(lambda t: t.reshape(len(t), *ones, -1)) for part in table)
        return self.stored(rope.rotate(x, cos, sin, layout, self.arith))

    def query_latent(self, x_TM: Approx, w: MlaWeights) -> Approx:
        """[T, L]."""
        return self.rms_norm(self.linear(x_TM, w.wq_a), w.q_norm)

    def queries(self, qr_TL: Approx, w: MlaWeights, positions_T: Tensor) -> tuple[Approx, Approx]:
        """Nope part [T, H, N] and turned rope part [T, H, R]."""
        nope, heads = self.config.qk_nope_head_dim, self.config.n_heads
        q_THX = self.linear(qr_TL, w.wq_b).apply(lambda t: t.reshape(len(t), heads, -1))
        turned = self.turned(q_THX.apply(lambda t: t[..., nope:]), positions_T, "interleaved")
        return q_THX.apply(lambda t: t[..., :nope]), turned

    def latents(self, x_TM: Approx, w: MlaWeights, positions_T: Tensor) -> Approx:
        """What is cached of each token [T, D]."""
        rank = self.config.kv_lora_rank
        both = self.linear(x_TM, w.wkv_a)
        c_TC = self.rms_norm(both.apply(lambda t: t[..., :rank]), w.kv_norm)
        c_TC = self.quantised(c_TC) if self.precision.latent_fp8 else c_TC
        return _join(c_TC, self.turned(both.apply(lambda t: t[..., rank:]), positions_T, "interleaved"))

    def attend(self, qa_THC: Approx, q_pe_THR: Approx, kv_TKD: Approx, valid_TK: Tensor) -> tuple[Approx, Approx]:
        """Output z [T, H, C] and LSE [T, H] of absorbed queries over the gathered tokens."""
        rank = qa_THC.value.shape[-1]
        c_TKC, pe_TKR = kv_TKD.apply(lambda t: t[..., :rank]), kv_TKD.apply(lambda t: t[..., rank:])
        nope = self.stored(linear.matmul(qa_THC, c_TKC.transposed(), self.arith))
        turned = self.stored(linear.matmul(q_pe_THR, pe_TKR.transposed(), self.arith))
        plain = self.stored(add(nope, turned, self.arith))
        return self._softmax(plain, c_TKC, valid_TK[:, None, :])

    def _softmax(self, plain: Approx, v: Approx, valid: Tensor) -> tuple[Approx, Approx]:
        """Softmax of scaled, masked scores [..., K] times v [..., K, C], and the LSE; weights are stored normalised."""
        scores = self.stored(scale_by(plain, self.config.softmax_scale, self.arith))
        outside = ~valid.expand(scores.value.shape)
        scores = Approx(scores.value.masked_fill(outside, -torch.inf), scores.err.masked_fill(outside, 0.0))
        p_format = BF16 if self.precision.bf16 else None
        form = SoftmaxForm(p_format=p_format, normalise_first=True)
        out, lse = attend(scores, v, self.arith, form)
        if self.simulated and p_format is not None:
            return self.stored(attend_like(scores, v, self.arith, p_format, normalise_first=True)), lse
        # Two proofs for the same value: the first is sharper for small errors of the scores, the second always finite.
        other = linear.matmul(self.stored(shares(scores, self.arith)), v, self.arith)
        err = torch.fmin(out.err, other.err + (out.value - other.value).abs())  # NaN in a row without keys
        return self.stored(Approx(out.value, err)), lse

    def absorbed(self, q_nope_THN: Approx, q_pe_THR: Approx, kv_TKD: Approx, valid_TK: Tensor, w: MlaWeights) -> Approx:
        """Head outputs [T, H, V] of a decode."""
        uk_HNC, uv_HVC = self._up_matrices(w)
        qa_HTC = linear.matmul(q_nope_THN.apply(lambda t: t.transpose(0, 1)), uk_HNC, self.arith)
        qa_THC = self.stored(qa_HTC).apply(lambda t: t.transpose(0, 1))
        z_THC, _ = self.attend(qa_THC, q_pe_THR, kv_TKD, valid_TK)
        o_HTV = linear.matmul(z_THC.apply(lambda t: t.transpose(0, 1)), uv_HVC.transposed(), self.arith)
        return self.stored(o_HTV).apply(lambda t: t.transpose(0, 1))

    def unabsorbed(
        self, q_nope_THN: Approx, q_pe_THR: Approx, kv_SD: Approx, allowed_TS: Tensor, w: MlaWeights
    ) -> Approx:
        """Head outputs [T, H, V] of a prefill over one request's S cached tokens."""
        rank, nope, heads = self.config.kv_lora_rank, self.config.qk_nope_head_dim, self.config.n_heads
        kv_SHX = self.linear(kv_SD.apply(lambda t: t[:, :rank]), w.wkv_b).apply(lambda t: t.reshape(len(t), heads, -1))
        pe_SHR = kv_SD.apply(lambda t: t[:, None, rank:].expand(-1, heads, -1))
        k_HSX = _join(kv_SHX.apply(lambda t: t[..., :nope]), pe_SHR).apply(lambda t: t.transpose(0, 1))
        q_HTX = _join(q_nope_THN, q_pe_THR).apply(lambda t: t.transpose(0, 1))
        plain_HTS = self.stored(linear.matmul(q_HTX, k_HSX.transposed(), self.arith))
        v_HSV = kv_SHX.apply(lambda t: t[..., nope:].transpose(0, 1))
        return self._softmax(plain_HTS, v_HSV, allowed_TS[None])[0].apply(lambda t: t.transpose(0, 1))

    def _up_matrices(self, w: MlaWeights) -> tuple[Approx, Approx]:
        """UK [H, N, C] and UV [H, V, C]; dequantised block-fp8 weights are products rounded once, then stored."""
        plain = exact(w.wkv_b) if isinstance(w.wkv_b, Tensor) else self._dequantised(w.wkv_b)
        nope = self.config.qk_nope_head_dim
        per_head = plain.apply(lambda t: t.reshape(self.config.n_heads, -1, t.shape[-1]))
        return per_head.apply(lambda t: t[:, :nope]), per_head.apply(lambda t: t[:, nope:])

    def _dequantised(self, weight: BlockFp8) -> Approx:
        dense = weight.dequantise(torch.float64)
        return self.stored(with_slack(dense, self.arith.rounding(dense.abs())))

    def output(self, o_THV: Approx, w: MlaWeights) -> Approx:
        """The output projection [T, M]."""
        return self.linear(o_THV.apply(lambda t: t.flatten(-2)), w.wo)

    def _rotated(self, x: Approx, positions_T: Tensor) -> Approx:
        """RoPE on the first part of each head, then Hadamard: x [T, ..., I]."""
        width = self.config.qk_rope_head_dim
        turned = self.turned(x.apply(lambda t: t[..., :width]), positions_T, "half-split")
        return self.stored(linear.hadamard(_join(turned, x.apply(lambda t: t[..., width:])), self.arith))

    def _index_fp8(self, x: Approx) -> Approx:
        return self.quantised(x) if self.precision.index_fp8 else x

    def index_queries(self, qr_TL: Approx, w: IndexerWeights, positions_T: Tensor) -> Approx:
        """Values times scale, [T, J, I]."""
        heads = self.config.index_n_heads
        q_TJI = self.linear(qr_TL, w.wq_b).apply(lambda t: t.reshape(len(t), heads, -1))
        return self._index_fp8(self._rotated(q_TJI, positions_T))

    def _rotated_keys(self, x_TM: Approx, w: IndexerWeights, positions_T: Tensor) -> Approx:
        gain, bias = exact(w.k_norm_weight), exact(w.k_norm_bias)
        normed = norm.layer_norm(self.linear(x_TM, w.wk), gain, bias, self.config.norm_eps, self.arith)
        return self._rotated(self.stored(normed), positions_T)

    def index_keys(self, x_TM: Approx, w: IndexerWeights, positions_T: Tensor) -> Approx:
        """Values times scale, [T, I]."""
        return self._index_fp8(self._rotated_keys(x_TM, w, positions_T))

    def index_key_scales(self, x_TM: Approx, w: IndexerWeights, positions_T: Tensor) -> Approx:
        """The scale of each key [T]: exact, unless amax may cross a power of two (1 without fp8)."""
        if not self.precision.index_fp8:
            return exact(torch.ones(len(x_TM.value)))
        keys_TI = self._rotated_keys(x_TM, w, positions_T)
        around = quant.scale_range(keys_TI, self._rule(keys_TI.value.shape[-1]), self.arith)
        return hull(around.nominal, around.low, around.high).reshape(-1)

    def index_scores(
        self, x_TM: Approx, qr_TL: Approx, keys_SI: Approx, scale_S: Approx, w: IndexerWeights, positions_T: Tensor
    ) -> Approx:
        """I(t, s) [T, S] from the layer's input, the query latent and the cached keys with their scales.

        The query scale multiplies the head weights in the implementation and the queries here: one rounding either way.
        """
        q_TJI = self.index_queries(qr_TL, w, positions_T)
        ones = exact(torch.ones(q_TJI.value.shape[:-1]))
        w_TJ = indexer.head_weights(x_TM, exact(w.weights_proj), ones, self.config.index_head_dim, self.arith)
        return indexer.index_scores(q_TJI, w_TJ, keys_SI, scale_S, self.arith)

    def gate_logits(self, x_TM: Approx, w: GateWeights) -> Approx:
        """[T, E], never rounded."""
        return router.logits(x_TM, exact(w.weight), self.arith)

    def biased_scores(self, logits_TE: Approx, w: GateWeights) -> Approx:
        """What the choice is made by [T, E]; feed it to `margins.certify_router`."""
        return router.router_scores(logits_TE, exact(w.bias), self.arith)[1]

    def expert_weights(self, logits_TE: Approx, chosen_TK: Tensor) -> Approx:
        """[T, K] for a given choice."""
        scores_TE = router.router_scores(logits_TE, exact(torch.zeros(logits_TE.value.shape[-1])), self.arith)[0]
        return router.expert_weights(scores_TE, chosen_TK, self.config.route_scale, self.arith)

    def mlp(self, x_TM: Approx, w: MlpWeights) -> Approx:
        """W2 (silu(W1 x) * W3 x) [T, M]."""
        gate, up = self.linear(x_TM, w.w1), self.linear(x_TM, w.w3)
        return self.linear(self.stored(mul(silu(gate, self.arith), up, self.arith)), w.w2)

    def mixture(self, x_TM: Approx, chosen_TK: Tensor, weights_TK: Approx, w: MoeWeights) -> Approx:
        """Weighted experts plus the shared one, [T, M], for a given choice; every token meets every expert chosen."""
        ids = sorted(set(chosen_TK.flatten().tolist()))
        outs = [self.mlp(x_TM, w.experts[expert]) for expert in ids]
        place = torch.searchsorted(torch.tensor(ids), chosen_TK.contiguous())
        rows = torch.arange(len(chosen_TK)).unsqueeze(-1)
        values, errs = torch.stack([o.value for o in outs], 1), torch.stack([o.err for o in outs], 1)
        shared = None if w.shared is None else self.mlp(x_TM, w.shared)
        return self.stored(moe.combine(Approx(values[rows, place], errs[rows, place]), weights_TK, shared, self.arith))

    def head(self, x_TM: Approx, weight_VM: Tensor) -> Approx:
        """Logits [T, V] in the arithmetic's format."""
        return linear.linear(x_TM, exact(weight_VM), self.arith)


def _join(a: Approx, b: Approx) -> Approx:
    return Approx(torch.cat([a.value, b.value], -1), torch.cat([a.err, b.err], -1))
