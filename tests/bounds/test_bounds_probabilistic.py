"""The square-root-of-n form fails no more often than it says (Clopper-Pearson), and half of it would fail more often.

The rounding errors are drawn as the model states: each operation errs by +u or -u with equal chance, whatever came
before, the largest mean-independent errors there are. Inputs are those for which the bound is nearly attained: one
large term first.
"""

from __future__ import annotations

import pytest
import torch
from bounds_inputs import every_kind, generator, summation_orders
from bounds_stages import FP
from scipy.stats import beta
from torch import Tensor

from dsv32_ref.bounds import BF16, Arithmetic, Format, SoftmaxForm, attend, exact, judge, linear

TRIALS, N = 20_000, 128
COARSE = Format("16 bits", 16, -126, 3e38)  # coarse enough for a float64 simulation to be exact beside it
DELTAS = (0.1, 0.01)


def upper(failures: int, trials: int, confidence: float = 0.999) -> float:
    """Clopper-Pearson upper limit of a failure probability."""
    return 1.0 if failures == trials else float(beta.ppf(confidence, failures + 1, trials - failures))


def lower(failures: int, trials: int, confidence: float = 0.999) -> float:
    return 0.0 if failures == 0 else float(beta.ppf(1 - confidence, failures, trials - failures + 1))


def _sign(shape: tuple[int, ...], gen: torch.Generator) -> Tensor:
    return 1 + COARSE.u * (2 * torch.randint(0, 2, shape, generator=gen).double() - 1)


def _random_dot(terms: Tensor, gen: torch.Generator) -> Tensor:
    """Terms [n] multiplied and added one after the other with random roundings, [TRIALS]."""
    acc = torch.zeros(TRIALS, dtype=torch.float64)
    for term in terms.tolist():
        acc = (acc + term * _sign((TRIALS,), gen)) * _sign((TRIALS,), gen)
    return acc


def _failures(computed: Tensor, value: Tensor, err: Tensor) -> int:
    return int(((computed - value).abs() > err).sum())


@pytest.mark.parametrize("delta", DELTAS)
def test_dot_products_fail_no_more_often_than_delta(delta: float) -> None:
    gen = generator(21)
    terms = torch.cat([torch.ones(1), torch.full((N - 1,), 1e-3)]).double()
    bound = linear.dot(exact(terms), exact(torch.ones(N)), Arithmetic(acc=COARSE, delta=delta))
    computed = _random_dot(terms, gen)
    assert upper(_failures(computed, bound.value, bound.err), TRIALS) <= delta
    assert lower(_failures(computed, bound.value, bound.err / 2), TRIALS) > delta


@pytest.mark.parametrize("delta", DELTAS)
def test_stored_weights_fail_no_more_often_than_delta(delta: float) -> None:
    """P rounded to bf16 with random errors, 2048 equal weights: the errors add up in quadrature."""
    gen = generator(22)
    v = torch.randn(2048, 1, generator=gen).double()
    unit = BF16.u / (1 + BF16.u)
    bound = attend(exact(torch.zeros(1, 2048)), exact(v), Arithmetic(delta=delta), SoftmaxForm(p_format=BF16))[0]
    signs = 2 * torch.randint(0, 2, (TRIALS, 2048), generator=gen, dtype=torch.int8).double() - 1
    computed = ((1 + unit * signs) @ v / 2048).squeeze(1)
    failures = _failures(computed, bound.value.squeeze(), bound.err.squeeze())
    assert upper(failures, TRIALS) <= delta
    assert lower(_failures(computed, bound.value.squeeze(), bound.err.squeeze() / 2), TRIALS) > delta


def test_honest_roundings_of_random_data_stay_within_it() -> None:
    """Rounding to nearest is not random; on these inputs (no constructed ties) 56 000 sums stay within delta = 1e-6."""
    gen = generator(23)
    x = torch.randn(8000, 256, generator=gen)
    bound = linear.total(exact(x), Arithmetic(delta=1e-6))
    assert all(judge(order, bound).passed for order in summation_orders(x, gen))


def test_it_is_an_alarm_not_a_limit() -> None:
    """Adversarial ties break mean independence and exceed it, while the deterministic bound holds."""
    x = torch.full((4096,), 2.0**-24)
    x[0] = 1.0
    lost = torch.ones(())
    assert judge(lost, linear.total(exact(x), Arithmetic(delta=1e-6))).worst > 5
    assert judge(lost, linear.total(exact(x), FP)).passed


def test_it_is_never_looser_than_the_deterministic_bound() -> None:
    x, y = every_kind(20, 96, generator(24)), every_kind(20, 96, generator(25))
    hard = linear.dot(exact(x), exact(y), FP)
    alarm = linear.dot(exact(x), exact(y), Arithmetic(delta=1e-6))
    assert bool((alarm.err <= hard.err).all())
    few, v = exact(torch.zeros(1, 16)), exact(torch.randn(16, 4, generator=generator(27)))
    form = SoftmaxForm(p_format=BF16)
    soft, firm = (attend(few, v, a, form)[0].err for a in (Arithmetic(delta=1e-9), FP))
    assert bool((soft <= firm * (1 + 1e-12)).all())  # the same sum in another order
    wide = exact(torch.rand(1, 7168, generator=generator(26)))
    ratio = linear.dot(wide, wide, Arithmetic(delta=1e-6)).err / linear.dot(wide, wide, FP).err
    # lambda(1e-6) sqrt(7168) / 7168
    assert float(ratio) == pytest.approx(5.387 / 7168**0.5, rel=0.01)
