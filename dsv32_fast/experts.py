"""Feed-forward networks of the optimised path: the gated MLP, and AITER's fused experts plus the shared expert.

Precision points (vLLM's DeepseekV2MoE): the product silu(gate) * up is rounded once to the activation type; the routed
sum, the shared expert and their sum are each rounded to it. Route weights arrive scaled, as `biased_grouped_topk`
writes them.

Legend: T tokens, M model width, I inner width, K chosen experts.
"""

from __future__ import annotations

from torch import Tensor

from dsv32_fast.kernels.emulated.quant import QuantType
from dsv32_fast.kernels.protocol import CacheKernels, Kernels, MoeKernels
from dsv32_fast.layers import linear
from dsv32_fast.packing import Mlp, Moe


def mlp(x_TM: Tensor, w: Mlp, kernels: CacheKernels) -> Tensor:
    """W2 (silu(W1 x) * W3 x), [T, M]."""
    gate_TI, up_TI = (linear(x_TM, part, kernels).float() for part in w.gate_up)
    return linear((gate_TI.sigmoid() * gate_TI * up_TI).to(x_TM.dtype), w.down, kernels)


def routed(x_TM: Tensor, weights_TK: Tensor, ids_TK: Tensor, w: Moe, kernels: MoeKernels) -> Tensor:
    """sum_k weight_k expert_k(x), [T, M]."""
    e = w.experts
    quant_type = QuantType.No if e.w1_scale is None else QuantType.per_1x128
    return kernels.fused_moe(
        x_TM, e.w1, e.w2, weights_TK, ids_TK, quant_type=quant_type, w1_scale=e.w1_scale, w2_scale=e.w2_scale
    )


def mixture(x_TM: Tensor, weights_TK: Tensor, ids_TK: Tensor, w: Moe, kernels: Kernels) -> Tensor:
    """The routed experts plus the shared one, [T, M]."""
    routed_TM = routed(x_TM, weights_TK, ids_TK, w, kernels)
    return routed_TM if w.shared is None else routed_TM + mlp(x_TM, w.shared, kernels)
