"""What a serving workload should gain: skipped plan launches, casts, cleared bytes, and with costs given, milliseconds.

The schedule comes from `dsv32_fuzz.workload`, the key from the builder. Counts follow from the schedule alone; times
are counts x costs per launch and so no better than the costs. The default costs are ranges seen in public threads:
37 to 100 us for a launch of get_mla_metadata_v1 (aiter #3465), 0.1 to 0.25 ms for 58 small casts, 15 to 20 us for
clearing 64 MiB. Costs of one machine can be taken from a trace of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

import msgspec
import numpy as np

from dsv32_fast.metadata import metadata_key
from dsv32_fast.options import KeyPolicy
from dsv32_fuzz.latency.counting import NARROW
from dsv32_fuzz.oracle import TOPK
from dsv32_fuzz.traces.compare import CLAIMED_AFTER_MS, CLAIMED_BEFORE_MS, CLAIMED_CASTS
from dsv32_fuzz.traces.kineto import DEVICE, Trace
from dsv32_fuzz.traces.steps import DEVICE_PATTERNS, matching
from dsv32_fuzz.workload import PR42982_WORKLOAD, Traffic, Workload, steps
from dsv32_fuzz.workload.skip_rate import CLAIMED_RATE, Key, outcomes

MOE_LAYERS = sum(NARROW.kind(layer) == "moe" for layer in range(NARROW.n_layers))
HEADS = 32
"""Of one rank of four; the key holds them, but they never change."""
Range = tuple[float, float]


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """Microseconds as (low, high): per plan launch, per cast, per MB (10^6 bytes) cleared."""

    plan_us: Range = (37.0, 100.0)
    cast_us: Range = (100 / 58, 250 / 58)
    clear_us_per_mb: Range = (15 / 67.108864, 20 / 67.108864)

    def __post_init__(self) -> None:
        """Check that each range is one."""
        for name in self.__struct_fields__:
            low, high = getattr(self, name)
            if not 0 <= low <= high:
                raise ValueError(f"{name} is {low}:{high}; give a range from 0 upwards, low:high")


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """Counts over the served steps of one workload, before and after, and the time saved per step."""

    workload: Workload
    key: str
    seed: int
    steps: int
    plan_launches: int
    wrongful: int
    """Skips that reuse a plan for other rows."""
    casts_before: int
    bytes_full: int
    bytes_tail: int
    saved_us: dict[str, Range]
    """Per step: of the router's casts, of the plan cache, of the clears."""

    @property
    def skip_rate(self) -> float:
        """Share of the served steps without a plan launch."""
        return 1 - self.plan_launches / self.steps

    @property
    def saved_ms(self) -> Range:
        """Per step, all changes together."""
        low, high = (sum(part[i] for part in self.saved_us.values()) / 1e3 for i in (0, 1))
        return low, high


def key_of(policy: KeyPolicy) -> Key:
    """The builder's metadata key as an argument of `skip_rate`."""
    return lambda step: metadata_key(step, policy, TOPK, HEADS)


def predict(workload: Workload, policy: KeyPolicy = "pr47766", costs: Costs | None = None, seed: int = 0) -> Prediction:
    """Counts and savings of `workload` under the key `policy` and tail clears, against the baseline.

    Raises:
        ValueError: a workload that serves no step.
    """
    costs, rows = costs or Costs(), workload.max_num_batched_tokens
    served = launches = wrongful = full = tail = 0
    live_before = padded_before = 0
    for step, reused, rightful in outcomes(steps(workload, seed), key_of(policy)):
        live, padded = step.batch.num_query_tokens, step.batch.num_tokens
        if step.traffic is not Traffic.CAPTURE:
            indptr = 4 * (rows - padded)
            served += 1
            launches += reused is None
            wrongful += not rightful
            full += 4 * (rows + TOPK * rows + rows + 1) + indptr
            tail += 4 * (max(0, live_before - live) + TOPK * max(0, padded_before - padded)) + indptr
        live_before, padded_before = live, padded
    if not served:
        raise ValueError("workload: it serves no step, so nothing can be predicted")
    return Prediction(
        workload=workload,
        key=policy,
        seed=seed,
        steps=served,
        plan_launches=launches,
        wrongful=wrongful,
        casts_before=MOE_LAYERS * served,
        bytes_full=full,
        bytes_tail=tail,
        saved_us={
            "router": _times(costs.cast_us, MOE_LAYERS),
            "cache": _times(costs.plan_us, 1 - launches / served),
            "clear": _times(costs.clear_us_per_mb, (full - tail) / served / 1e6),
        },
    )


def _times(cost: Range, count: float) -> Range:
    return cost[0] * count, cost[1] * count


def sweep(
    input_lens: Iterable[int],
    concurrencies: Iterable[int],
    mtp_depths: Iterable[int],
    *,
    workload: Workload = PR42982_WORKLOAD,
    policy: KeyPolicy = "pr47766",
    costs: Costs | None = None,
    waves: int = 2,
    seed: int = 0,
) -> list[Prediction]:
    """Predictions over input length x concurrency x MTP depth, the last one fastest; `waves` x concurrency requests.

    Raises:
        ValueError: a value that no workload can have.
    """
    return [
        predict(
            msgspec.structs.replace(workload, input_len=i, concurrency=c, mtp_depth=m, num_requests=max(1, waves * c)),
            policy,
            costs,
            seed,
        )
        for i, c, m in product(tuple(input_lens), tuple(concurrencies), tuple(mtp_depths))
    ]


def costs_of(trace: Trace) -> Costs:
    """The median duration of the plan kernel and of the cast kernel in a device trace; the clears keep their default.

    Kernel time only: what the host spends on a launch is not in it, and a trace does not say how much a fill writes.

    Raises:
        ValueError: the trace has none of the two kernels.
    """
    found = {name: _median_us(trace, name) for name in ("plan launches", "casts")}
    if missing := [name for name, value in found.items() if value is None]:
        raise ValueError(f"{trace.path}: no device work for {' or '.join(missing)}; give the trace of a baseline run")
    plan, cast = found["plan launches"] or 0.0, found["casts"] or 0.0
    return Costs(plan_us=(plan, plan), cast_us=(cast, cast))


def _median_us(trace: Trace, name: str) -> float | None:
    chosen = matching(trace, DEVICE_PATTERNS[name])[trace.name] & (trace.kind == DEVICE)
    return float(np.median(trace.dur[chosen])) if chosen.any() else None


class ClaimRow(msgspec.Struct, frozen=True, kw_only=True):
    """A published number, what can be said of it here, and how sure."""

    claim: str
    claimed: str
    found: str
    status: str


def _rate_status(predictions: list[Prediction]) -> str:
    """Under which budgets the claimed skip rate is reached, and whether rightfully."""
    reached = [
        f"{p.workload.max_num_batched_tokens}" + (f" ({p.wrongful} of them wrongful)" if p.wrongful else "")
        for p in predictions
        if p.skip_rate >= CLAIMED_RATE
    ]
    where = f"confirmed at {', '.join(reached)}" if reached else "not reached under these budgets"
    return f"{where}, for equal lengths; how it was counted is not published"


def claim_rows(predictions: list[Prediction]) -> list[ClaimRow]:
    """PR #42982's claims beside predictions of its workload under several budgets."""
    saved = CLAIMED_BEFORE_MS - CLAIMED_AFTER_MS
    low, high = min(p.saved_ms[0] for p in predictions), max(p.saved_ms[1] for p in predictions)
    share = f"not explained: {100 * low / saved:.0f} to {100 * high / saved:.0f} % of it"
    share = "explained by the costs given" if high >= saved else share
    rates = ", ".join(f"{100 * p.skip_rate:.0f} % at {p.workload.max_num_batched_tokens}" for p in predictions)
    return [
        ClaimRow(
            claim="casts removed per step",
            claimed=str(CLAIMED_CASTS),
            found=f"{MOE_LAYERS} mixture layers of {NARROW.n_layers}, one cast each",
            status="arithmetic confirmed; the launches only by a trace (dsv32 trace)",
        ),
        ClaimRow(
            claim="plan launches skipped",
            claimed=f"{100 * CLAIMED_RATE:.0f} %",
            found=rates,
            status=_rate_status(predictions),
        ),
        ClaimRow(
            claim="ms per step",
            claimed=f"{CLAIMED_BEFORE_MS} to {CLAIMED_AFTER_MS}",
            found="not measurable without an MI355X",
            status="not confirmed",
        ),
        ClaimRow(
            claim="attribution of the difference",
            claimed=f"{saved:.3f} ms, split not published",
            found=f"{low:.2f} to {high:.2f} ms by published launch costs",
            status=share,
        ),
    ]
