"""Worker side: vLLM's row-length kernel, run by Triton's interpreter often enough, and by numpy in between.

The interpreter needs milliseconds for each program of a launch, and a chunk of 8192 tokens has hundreds. So launches go
to a stand-in that computes what the kernel is said to compute, while the kernel itself runs beside it on a sample: the
first launches, and one in `EVERY` after that. One disagreement, and the stand-in is never used again: then the checks
judge what the kernel writes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

NAME = "generate_sparse_seqlen_kernel"
FIRST, EVERY = 8, 200
LARGEST_SAMPLE = 300


@dataclass
class SampledRowLengths:
    """Takes the kernel's place in its module; launched as `kernel[grid](seq_lens, starts, out, topk, block)`."""

    kernel: Any
    launches: int = 0
    compared: int = 0
    disagreement: str = ""

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **kwargs: Any) -> None:
            self.launches += 1
            if self.disagreement or not self._known(args, kwargs):
                self.kernel[grid](*args, **kwargs)
            elif self._sampled(grid):
                self._compare(grid, args)
            else:
                row_lengths(*args[:4])

        return launch

    @staticmethod
    def _known(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        tensors = [isinstance(argument, torch.Tensor) for argument in args]
        return not kwargs and tensors == [True, True, True, False, False]

    def _sampled(self, grid: tuple[int, ...]) -> bool:
        programs = grid[0] * grid[1] if len(grid) > 1 else grid[0]
        often = self.compared < FIRST or self.launches % EVERY == 0
        return often and programs <= LARGEST_SAMPLE

    def _compare(self, grid: tuple[int, ...], args: tuple[Any, ...]) -> None:
        ours = args[2].clone()
        row_lengths(args[0], args[1], ours, args[3])
        self.kernel[grid](*args)
        self.compared += 1
        if not torch.equal(ours, args[2]):
            row = int((ours != args[2]).nonzero()[0])
            self.disagreement = (
                f"row {row}: the kernel writes {int(args[2][row])}, min(seq - q + j + 1, topk) is {int(ours[row])}"
            )


def row_lengths(seqs_B: torch.Tensor, starts_B1: torch.Tensor, out_T: torch.Tensor, topk: int) -> None:
    """min(seq - q + j + 1, topk) for row j of each request with a sequence; other rows keep what they hold. int32."""
    query_B = starts_B1[1:] - starts_B1[:-1]
    requests = torch.repeat_interleave(torch.arange(len(query_B)), query_B.long())
    rows = torch.arange(len(requests), dtype=torch.int32)
    lens = (seqs_B[: len(query_B)] - query_B - starts_B1[:-1])[requests] + rows + 1
    lens = lens.clamp_max(topk).to(torch.int32)
    live = seqs_B[requests] != 0
    out_T[: len(requests)][live] = lens[live]


def install(module: Any) -> SampledRowLengths | None:
    """Put the stand-in before the kernel of `module`; None where there is no such kernel, so nothing was replaced."""
    kernel = vars(module).get(NAME)
    if kernel is None:
        return None
    sampled = SampledRowLengths(kernel)
    setattr(module, NAME, sampled)
    return sampled
