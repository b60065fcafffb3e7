"""The echo probe: whose query answered, at which scale, and with which parts of the score.

A few keys of every row are probes. A probe key is 1 in one dimension and 0 elsewhere, so its score is what the query
holds there, and the softmax turns scores into ratios that V shows: output(probe) / output(reference) = exp(score). The
queries hold small whole numbers times ln 2 / scale, so the logarithm to base 2 of each ratio is a digit, and the output
spells out the numbers of the row and of the head whose query was used. One set of probes lies in the nope part, whose
digits are d, and one in the RoPE part, whose digits are 3 - d: a missing, moved or exchanged part does not spell the
same. A factor on all digits is a wrong scale.

Precision: a ratio has two outputs rounded to bf16 and two weights P rounded to bf16, each by at most 2^-8 of itself, so
a digit is off by at most 4 * 2^-8 * log2(e) = 0.0226, plus what fp32 adds (below 2^-12); `TOLERANCE` is that. With an
fp8 P the scores must be whole powers of two, which `scale` = ln 2 / k gives: then P is not rounded at all.

Legend: T query rows, H heads, C latent columns, D = C + RoPE width, S slots, N digits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BASE = 4
TOLERANCE = 4 * 2.0**-8 * math.log2(math.e) + 2.0**-12


@dataclass(frozen=True, kw_only=True)
class Echo:
    """Places of the probes: which dimension of q each reads, and in which column of V it shows.

    Args:
        rows, heads: how many numbers must be told apart.
        latent, rope: widths.
        seed: the dimensions are drawn, so that many runs see every one.

    Raises:
        ValueError: too narrow for that many digits.
    """

    rows: int
    heads: int
    latent: int
    rope: int
    seed: int = 0

    def __post_init__(self) -> None:
        if self.digits > self.rope or 2 * self.digits + 1 > self.latent:
            raise ValueError(f"latent {self.latent} and rope {self.rope} are too narrow for {self.digits} digits each")

    @property
    def row_digits(self) -> int:
        """Digits of a row's number."""
        return _length(self.rows)

    @property
    def digits(self) -> int:
        """Digits of a row and a head."""
        return self.row_digits + _length(self.heads)

    @property
    def probes(self) -> int:
        """Keys of a row that are probes: the reference, one per digit in nope, one per digit in RoPE."""
        return 2 * self.digits + 1

    def _places(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        columns = torch.randperm(self.latent, generator=generator)[: self.probes]
        return columns, torch.randperm(self.rope, generator=generator)[: self.digits] + self.latent

    def numbers(self) -> Tensor:
        """int64 [T, H, N]: the digits of each row, then of each head."""
        row_T1, head_1H = torch.arange(self.rows)[:, None], torch.arange(self.heads)[None]
        digits = [row_T1 // BASE**k % BASE + 0 * head_1H for k in range(self.row_digits)]
        digits += [head_1H // BASE**k % BASE + 0 * row_T1 for k in range(self.digits - self.row_digits)]
        return torch.stack(digits, -1)

    def queries(self, unit: float) -> Tensor:
        """fp32 [T, H, D]: digits times `unit` = ln 2 / scale in the nope probes' dimensions, 3 - digit in RoPE's."""
        columns, rope = self._places()
        q_THD = torch.zeros(self.rows, self.heads, self.latent + self.rope)
        q_THD[..., columns[1 : self.digits + 1]] = self.numbers() * unit
        q_THD[..., rope] = (BASE - 1 - self.numbers()) * unit
        return q_THD

    def keys(self, role_S: Tensor) -> Tensor:
        """fp32 [S, D] from the role of each slot: 0 reference, then the probes; anything from `probes` on is blank.

        A nope probe shows in the column that it reads; reference and RoPE probes show in columns where q is 0.
        """
        columns, rope = self._places()
        kv_SD = torch.zeros(len(role_S), self.latent + self.rope)
        known = (role_S >= 0) & (role_S < self.probes)
        kv_SD[known.nonzero()[:, 0], columns[role_S[known]]] = 1.0
        turned = known & (role_S > self.digits)
        kv_SD[turned.nonzero()[:, 0], rope[role_S[turned] - self.digits - 1]] = 1.0
        return kv_SD

    def spelt(self, q_THD: Tensor, scale: float) -> Tensor:
        """fp64 [T, H, 2 N]: the digits as stored queries hold them, at the softmax scale that the kernel was asked for.

        Args:
            q_THD: after rounding to the type of the queries.
            scale: with the scales of fp8 operands.
        """
        columns, rope = self._places()
        places = torch.cat([columns[1 : self.digits + 1], rope])
        return q_THD.double()[..., places] * (scale / math.log(2.0))

    def read(self, out_THC: Tensor) -> Tensor:
        """fp64 [T, H, 2 N]: digits as the output shows them, nope then RoPE; NaN or infinite where it shows none."""
        columns, _ = self._places()
        shown = out_THC.double().cpu()[..., columns]
        return torch.log2(shown[..., 1:] / shown[..., :1])


def difference(echo: Echo, read_THN: Tensor, spelt_THN: Tensor, keys_T: Tensor, names_T: Sequence[str]) -> str:
    """The first row and head that another query answered, or at another scale, in words; empty if there is none.

    Args:
        echo: the probe.
        read_THN: what the output shows, from `read`.
        spelt_THN: what the queries hold, from `spelt`.
        keys_T: keys of each row; a digit counts where its probe is among them.
        names_T: what a row is called.
    """
    seen_TN = torch.arange(1, echo.probes)[None] < keys_T[:, None]
    wrong_THN = ~((read_THN - spelt_THN).abs() <= TOLERANCE) & seen_TN[:, None]
    if not bool(wrong_THN.any()):
        return ""
    row, head, digit = (int(i) for i in wrong_THN.nonzero()[0])
    others = ((read_THN[row, head] - spelt_THN).abs() <= TOLERANCE) | ~seen_TN[row]
    answering = others.all(-1).nonzero()
    if len(answering):
        what = f"the query of {names_T[int(answering[0, 0])]}, head {int(answering[0, 1])} answered"
    else:
        score, asked = float(read_THN[row, head, digit]), float(spelt_THN[row, head, digit])
        part = "RoPE" if digit >= echo.digits else "nope"
        what = (
            f"a score of the {part} part is {score:.4g} ln 2 instead of {asked:.4g} ln 2, and no query has such scores"
        )
    return f"{names_T[row]}, head {head}: {what}"


def _length(count: int) -> int:
    """Base-4 digits of the numbers below `count`."""
    length = 1
    while BASE**length < count:
        length += 1
    return length
