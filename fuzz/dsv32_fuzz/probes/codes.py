"""Codes for what moves data: every row of a cache says which slot it is, in every byte of it.

A gather's output then shows where each row came from, and a writer's cache where each row went. Byte d of slot s is
byte d mod 4 of s, exclusive-or'd with 37 d + 11: the odd factor gives every column of 256 its own pattern, so that
exchanged columns show, too.

Legend: S slots, D bytes of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

NOBODY = -1


def _pattern(width: int) -> Tensor:
    return (37 * torch.arange(width) + 11) % 256


def slot_codes(slots_S: Tensor, width: int) -> Tensor:
    """uint8 [S, D] for numbers below 2^32.

    Raises:
        ValueError: fewer than 4 bytes, which cannot hold a number.
    """
    if width < 4:
        raise ValueError(f"width {width}: a code needs 4 bytes or more")
    shift_D = 8 * (torch.arange(width) % 4)
    digits_SD = (slots_S.long()[:, None] >> shift_D) & 255
    return (digits_SD ^ _pattern(width)).to(torch.uint8)


def read_codes(rows_SD: Tensor) -> Tensor:
    """int64 [S]: the slot that each row says it is, `NOBODY` where its bytes do not agree."""
    width = rows_SD.shape[-1]
    digits_SD = rows_SD.cpu().long() ^ _pattern(width)
    slots_S = (digits_SD[:, :4] << (8 * torch.arange(4))).sum(-1)
    agree_S = (slot_codes(slots_S, width).long() == rows_SD.cpu().long()).all(-1)
    return torch.where(agree_S, slots_S, NOBODY)
