"""The router of the optimised path: gate logits and bias in the types of the options, choice by AITER's kernel.

Precision points (vLLM's deepseek_v2 and its AITER wrapper):
- logits fp32: the bf16 activations are cast to fp32 once per layer and multiplied in fp32. `gate_gemm="bf16"` is what
  vLLM does on ROCm where it has no GEMM with fp32 output: the GEMM stores bf16, and that is cast to fp32.
- logits bf16: the GEMM stores bf16 and nothing is cast (vLLM #42982).
- bias: held in the type of the options since the weights were packed; the wrapper casts it to the type of the logits,
  because the kernel re-reads its bytes in that type. So bf16 logits always meet a bf16 bias, and an fp32 copy of a
  bf16 bias has only bf16's values.

Legend: T tokens, M model width, E experts, K chosen experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dsv32_fast.kernels.protocol import RouterKernels
from dsv32_fast.layers import product
from dsv32_fast.options import Precision
from dsv32_fast.packing import Gate
from dsv32_ref.config import Config

GateGemm = Literal["fp32", "bf16"]


@dataclass
class Casts:
    """Casts of a tensor between bf16 and fp32 around the router since the path was made."""

    bf16_to_fp32: int = 0

    def widen(self, x: Tensor) -> Tensor:
        """`x` in fp32; counts where that launches a cast kernel."""
        self.bf16_to_fp32 += x.dtype == torch.bfloat16
        return x.float()


def gate_logits(x_TM: Tensor, gate: Gate, logits: Precision, gate_gemm: GateGemm, casts: Casts) -> Tensor:
    """x W^T [T, E] in the type that `logits` names."""
    if logits == "fp32" and gate_gemm == "fp32":
        return casts.widen(x_TM) @ gate.weight.float().T
    stored_TE = product(x_TM, gate.weight).to(torch.bfloat16)
    return stored_TE if logits == "bf16" else casts.widen(stored_TE)


def choose_experts(logits_TE: Tensor, bias_E: Tensor, config: Config, kernels: RouterKernels) -> tuple[Tensor, Tensor]:
    """Ids [T, K] int32 and fp32 weights [T, K] of the chosen experts, in the kernel's order.

    The kernel for DeepSeek-V3's shape (256, 8, 4, 8) takes its weights as (score + bias) - bias, which cancels for a
    large bias; other shapes run the generic kernel, with other tie rules.
    """
    shape = (len(logits_TE), config.n_activated_experts)
    weights_TK = torch.empty(shape, device=logits_TE.device)
    ids_TK = torch.empty(shape, dtype=torch.int32, device=logits_TE.device)
    kernels.biased_grouped_topk(
        logits_TE,
        bias_E.to(logits_TE.dtype),
        weights_TK,
        ids_TK,
        config.n_expert_groups,
        config.n_limited_groups,
        True,
        config.route_scale,
    )
    return ids_TK, weights_TK


def weights_for(chosen_TK: Tensor, ids_TK: Tensor, weights_TK: Tensor, logits_TE: Tensor, config: Config) -> Tensor:
    """The fp32 weights [T, K] of a choice that was put in the place of the kernel's `ids_TK`.

    A row that names the kernel's own experts keeps the kernel's weights, in its order; any other row gets them from the
    unbiased scores, renormalised.
    """
    same_TKK = chosen_TK[:, :, None].long() == ids_TK[:, None, :].long()
    scores_TK = logits_TE.float().sigmoid().gather(1, chosen_TK.long())
    fresh_TK = scores_TK / scores_TK.sum(1, keepdim=True) * config.route_scale
    kept_T1 = same_TKK.any(-1).all(-1, keepdim=True)
    return torch.where(kept_T1, weights_TK.gather(1, same_TKK.int().argmax(-1)), fresh_TK)
