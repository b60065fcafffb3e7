"""The echo probe names whose query answered; codes name where a row came from."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dsv32_fuzz.probes import codes, echo

ROWS, HEADS, LATENT, ROPE = 5, 16, 64, 16
PROBE = echo.Echo(rows=ROWS, heads=HEADS, latent=LATENT, rope=ROPE, seed=4)
NAMES = [f"row {row}" for row in range(ROWS)]
SCALE = math.log(2.0)


def answer(q_THD: Tensor, scale: float = SCALE, keys: int = 40) -> Tensor:
    """Attention of every row over the probes and blanks, rounded as a kernel does."""
    kv_SD = PROBE.keys(torch.arange(keys))
    p = (q_THD @ kv_SD.T * scale).softmax(-1)
    p = (p / p.amax(-1, keepdim=True)).bfloat16().float()
    return (p @ kv_SD[:, :LATENT] / p.sum(-1, keepdim=True)).bfloat16()


def difference(out_THC: Tensor, keys: int = 40) -> str:
    q_THD = PROBE.queries(1.0)
    return echo.difference(PROBE, PROBE.read(out_THC), PROBE.spelt(q_THD, SCALE), torch.full((ROWS,), keys), NAMES)


@pytest.mark.parametrize("keys", [1, 2, 7, PROBE.probes, 40])
def test_an_honest_answer_spells_its_query(keys: int) -> None:
    assert difference(answer(PROBE.queries(1.0), keys=keys), keys) == ""


def test_exchanged_rows_and_heads_are_named() -> None:
    q_THD = PROBE.queries(1.0)
    rows = difference(answer(q_THD[[0, 1, 3, 2, 4]]))
    assert rows == "row 2, head 0: the query of row 3, head 0 answered"
    swapped = q_THD.clone()
    swapped[3, [5, 6]] = swapped[3, [6, 5]]
    assert difference(answer(swapped)) == "row 3, head 5: the query of row 3, head 6 answered"
    out = answer(q_THD)
    out[4, 9] = out[1, 2]
    assert difference(out) == "row 4, head 9: the query of row 1, head 2 answered"


@pytest.mark.parametrize("factor", [0.98, 1.02, 0.5, 192**-0.5])
def test_a_wrong_scale_is_seen(factor: float) -> None:
    assert "and no query has such scores" in difference(answer(PROBE.queries(1.0), SCALE * factor))


@pytest.mark.parametrize("part", ["RoPE", "nope"])
def test_a_missing_part_is_named(part: str) -> None:
    q_THD = PROBE.queries(1.0)
    if part == "RoPE":
        q_THD[..., LATENT:] = 0
    else:
        q_THD[..., :LATENT] = 0
    assert f"a score of the {part} part is" in difference(answer(q_THD))


def test_a_rope_part_read_elsewhere_is_seen() -> None:
    """Interleaved and half-split pairs exchanged, and one dimension too far."""
    q_THD, rope = PROBE.queries(1.0), torch.arange(ROPE)
    for order in (rope.view(2, -1).T.flatten(), rope.roll(1)):
        moved = torch.cat([q_THD[..., :LATENT], q_THD[..., LATENT + order]], -1)
        assert "RoPE part" in difference(answer(moved)), order


def test_seeds_see_every_dimension() -> None:
    used = set()
    for seed in range(400):
        probe = echo.Echo(rows=ROWS, heads=HEADS, latent=LATENT, rope=ROPE, seed=seed)
        used |= set(probe.queries(1.0).flatten(0, 1).any(0).nonzero()[:, 0].tolist())
    assert used == set(range(LATENT + ROPE))


def test_numbers_differ() -> None:
    numbers = echo.Echo(rows=70, heads=128, latent=512, rope=64).numbers().flatten(0, 1)
    assert len(numbers.unique(dim=0)) == 70 * 128
    with pytest.raises(ValueError, match="too narrow for 5 digits"):
        echo.Echo(rows=ROWS, heads=64, latent=64, rope=4)


def test_codes_name_their_slot_and_nothing_else() -> None:
    slots = torch.tensor([0, 1, 255, 256, 65535, 2**24 + 5, 2**31 + 7])
    rows = codes.slot_codes(slots, 128)
    assert codes.read_codes(rows).tolist() == slots.tolist()
    assert len({row.tobytes() for row in rows.numpy()}) == len(slots)
    broken = rows.clone()
    broken[2, 77] ^= 1
    broken[3] = torch.cat([rows[3, :64], rows[4, 64:]])
    broken[4] = rows[4].roll(1)
    assert codes.read_codes(broken).tolist() == [0, 1, codes.NOBODY, codes.NOBODY, codes.NOBODY, 2**24 + 5, 2**31 + 7]
    with pytest.raises(ValueError, match="4 bytes or more"):
        codes.slot_codes(slots, 3)
