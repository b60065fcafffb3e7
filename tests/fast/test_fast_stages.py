"""Whole decode steps of the optimised path: every stage within its proven bound, every decision a legal one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from fast_worlds import (
    FP8_KV,
    KERNELS,
    PATH,
    SMALL,
    Event,
    Recorded,
    Values,
    path,
    record,
    run_reference,
    schedule,
    stale_rows,
)

from dsv32_fast.kernels.protocol import Kernels
from dsv32_fast.kernels.selection import Admits
from dsv32_fast.options import PRESETS, Options
from dsv32_fuzz.stages.bounds import Recording, expert_choices, values
from dsv32_ref.bounds import certify_topk, judge
from dsv32_ref.config import GOLDEN
from dsv32_ref.indexer import select_topk

OPTIONS = {
    "off": Options(),
    "logits": Options(logits="bf16"),
    "bias": Options(bias="bf16"),
    "pr42982 key": Options(key="pr42982"),
    "pr47766 key": Options(key="pr47766"),
    "split cap": Options(split_cap="max_seq_len"),
    "tail clears": Options(clear="tail"),
    "on": PRESETS["vllm026"],
}
MOE_LAYER = 1
BOTH = pytest.mark.parametrize(
    "kernels", ["emulated", pytest.param("mounted", marks=pytest.mark.nightly)], indirect=True
)


def assert_within_bounds(rec: Recording, misled: list[list[bool]] | None = None) -> None:
    """Every stage within its bound; attention where the plan misleads a row: beyond it, in exactly these rows."""
    for part in parts(rec):
        _assert_part(replace(rec, steps=rec.steps[part]), misled and misled[part])


def parts(rec: Recording, rows: int = 400) -> Iterator[slice]:
    """Consecutive steps of at most so many rows together, at least one: what is judged at once fits into memory."""
    first, held = 0, 0
    for number, step in enumerate(rec.steps):
        count = len(step["positions", -1])
        if number > first and held + count > rows:
            yield slice(first, number)
            first, held = number, 0
        held += count
    yield slice(first, len(rec.steps))


def _assert_part(rec: Recording, misled: list[list[bool]] | None) -> None:
    stale_T = torch.tensor([flag for step in misled or [] for flag in step] or [False] * len(rec.of("positions", -1)))
    for stage, computed, bound in values(rec):
        if stage.startswith("attn_z"):
            error = (computed.double() - bound.value).abs()
            wrong_T = ~(error <= bound.err).flatten(1).all(1)
            assert torch.equal(wrong_T, stale_T), f"{stage}: rows {(wrong_T != stale_T).nonzero().flatten().tolist()}"
            computed, bound = computed[~stale_T], bound.apply(lambda t: t[~stale_T])
        budget = judge(computed, bound)
        assert budget.passed, budget.describe(stage)


def assert_choices_legal(rec: Recording) -> None:
    """The kernels choose what their own scores call for: exactly in the top-k, within the router's own arithmetic."""
    lengths_T = rec.of("positions", -1) + 1
    for layer in range(rec.config.n_layers):
        scores_TS = rec.of("index_score", layer)
        best = select_topk(scores_TS, lengths_T, rec.config.index_topk)
        inside = torch.arange(scores_TS.shape[1]) < lengths_T[:, None]
        chosen = rec.of("index_topk", layer).long()
        certificate = certify_topk(scores_TS, torch.zeros_like(scores_TS), best, chosen, valid=inside)
        assert certificate.passed, certificate.describe(f"index_topk {layer}")
    certificate = expert_choices(rec, MOE_LAYER)
    assert certificate.passed, certificate.describe("gate_idx")


EQUAL_TO_OFF = ("pr47766 key", "tail clears")
"""Options that change no bit of a run: judged by equality, and by the bounds at night."""


@pytest.mark.parametrize(
    ("kernels", "name"),
    [pytest.param("emulated", n, marks=pytest.mark.nightly if n in EQUAL_TO_OFF else ()) for n in OPTIONS]
    + [pytest.param("mounted", n, marks=() if n == "on" else pytest.mark.nightly) for n in OPTIONS],
    indirect=["kernels"],
)
def test_every_stage_of_50_steps_is_within_its_bound(
    kernels: Kernels, name: str, recorded: Recorded, events: list[Event]
) -> None:
    options = OPTIONS[name]
    rec, counts = recorded(kernels, options)
    assert_within_bounds(rec, stale_rows(events, SMALL.index_topk) if options.key == "pr42982" else None)
    assert_choices_legal(rec)
    assert counts.builds == len(events)
    assert counts.plan_launches == counts.builds if options.key == "none" else 0 < counts.plan_launches < counts.builds


@pytest.mark.parametrize(
    ("kernels", "name"),
    [("emulated", "on"), pytest.param("emulated", "off", marks=pytest.mark.nightly)]
    + [pytest.param("mounted", name, marks=pytest.mark.nightly) for name in ("off", "pr42982 key", "on")],
    indirect=["kernels"],
)
def test_every_stage_of_50_steps_with_an_fp8_cache(
    kernels: Kernels, name: str, recorded: Recorded, events: list[Event]
) -> None:
    """Latents, queries and P in e4m3: the same matrix, the same decisions, bounds of e4m3 where the kernel has it."""
    rec, counts = recorded(kernels, OPTIONS[name], FP8_KV)
    misled = stale_rows(events, SMALL.index_topk) if OPTIONS[name].key == "pr42982" else None
    assert_within_bounds(rec, misled)
    assert_choices_legal(rec)
    assert counts.plan_launches == counts.builds if OPTIONS[name].key == "none" else counts.plan_launches > 0


def test_an_fp8_cache_saturates(events: list[Event], reference: list[Values]) -> None:
    """With a cache scale of 2^-9 whatever lies beyond 0.875 is stored as that, and every stage keeps to its bound."""
    sizes = replace(FP8_KV, kv_scale=2.0**-9)
    rec = record(path(Options(), KERNELS, sizes=sizes), events[:8], reference[:8])
    latent_TD, cached_TD = rec.of("latent", MOE_LAYER).double(), rec.of("cached", MOE_LAYER)
    beyond = latent_TD.abs() > 0.875
    assert 0.05 < float(beyond.double().mean()) < 0.95
    assert torch.equal(cached_TD[beyond], 0.875 * latent_TD[beyond].sign())
    assert_within_bounds(rec)


@pytest.mark.admits(Admits(topk=16))
def test_the_schedule_reaches_every_case(events: list[Event], reference: list[Values]) -> None:
    topk, rows = SMALL.index_topk, [len(ids) for event in events for ids in event.tokens.values()]
    lengths = torch.cat([(step["index_topk", 0] >= 0).sum(1) for step in reference])
    assert {0, 1, 2, 3, 4} <= set(rows), "query lengths of plain decode and drafts"
    assert max(rows) > PATH.longest_paged, "chunks of prompts"
    assert bool((lengths < topk).any())
    assert bool((lengths == topk).any())
    assert any(event.truncate for event in events)
    assert any(event.release for event in events)
    assert any(event.padded_rows > event.rows for event in events)
    longest = max(step["index_score", 0].shape[1] for step in reference)
    assert longest > 2 * topk, "sparse rows"


@pytest.mark.parametrize("name", EQUAL_TO_OFF)
def test_a_sound_cache_and_tail_clears_change_no_bit(name: str, recorded: Recorded) -> None:
    (plain, _), (changed, counts) = recorded(KERNELS, Options()), recorded(KERNELS, OPTIONS[name])
    assert (counts.plan_launches < counts.builds) == (OPTIONS[name].key != "none")
    for step, (one, other) in enumerate(zip(plain.steps, changed.steps, strict=True)):
        for key in one:
            assert torch.equal(_bits(one[key]), _bits(other[key])), f"step {step}: {key}"


def _bits(value: torch.Tensor) -> torch.Tensor:
    return value.nan_to_num(nan=1.5e30) if value.is_floating_point() else value


@BOTH
def test_fp32_activations_leave_only_the_roundings_of_kernels_and_caches(
    kernels: Kernels, events: list[Event], reference: list[Values]
) -> None:
    sizes = replace(PATH, activations=torch.float32)
    rec = record(path(Options(), kernels, sizes=sizes), events[:15], reference[:15])
    assert_within_bounds(rec)


@pytest.mark.admits(Admits(latent=GOLDEN.kv_lora_rank, topk=GOLDEN.index_topk))
@BOTH
def test_fp8_weights(kernels: Kernels) -> None:
    """The world of the recorded decodes in block fp8: linears in whole blocks of 128, and the generic router kernel."""
    events = schedule(8, config=GOLDEN)
    run = path(PRESETS["vllm026"], kernels, GOLDEN, fp8=True)
    rec = record(run, events, run_reference(events, GOLDEN, fp8=True))
    assert rec.precision.linear_fp8
    assert_within_bounds(rec)
    assert_choices_legal(rec)


def test_the_gate_may_store_bf16_and_widen_it(events: list[Event], reference: list[Values]) -> None:
    sizes = replace(PATH, gate_gemm="bf16")
    rec = record(path(Options(), KERNELS, sizes=sizes), events[:15], reference[:15])
    logits_TE = rec.of("gate_logits", MOE_LAYER)
    assert logits_TE.dtype == torch.float32
    assert torch.equal(logits_TE, logits_TE.bfloat16().float())
    assert_within_bounds(replace(rec, gate_store=torch.bfloat16))


@pytest.mark.parametrize(
    "stage", ["latent", "index_q", "attn_q", "attn_z", "attn_out", "gate_logits", "ffn_out", "residual"]
)
def test_a_wrong_stage_is_seen(stage: str, recorded: Recorded) -> None:
    """The comparison itself: one element off by a sixteenth of the stage's largest value, or by four times its bound.

    The latter where it is more. A bound is a worst case, so it grows with the width where the typical error grows with
    its root: of `attn_q`, two products in a row, it admits a sixteenth at the widths of real kernels.
    """
    whole, _ = recorded(KERNELS, Options())
    rec = replace(whole, steps=[dict(whole.steps[3])])  # within its bounds, see above
    value = rec.steps[0][stage, MOE_LAYER]
    bound = next(each for name, _, each in values(rec) if name == f"{stage} {MOE_LAYER}")
    spoilt = value.clone().float()
    spoilt[0].view(-1)[0] += max(float(value.float().abs().max()) / 16, 4 * float(bound.err[0].view(-1)[0]))
    if stage == "index_q":  # stays e4m3 and so must move by more
        spoilt[0].view(-1)[0] = -448.0 if value[0].view(-1)[0] > 0 else 448.0
    rec.steps[0][stage, MOE_LAYER] = spoilt.to(value.dtype)
    with pytest.raises(AssertionError, match=stage):
        assert_within_bounds(rec)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(1, 6))
@pytest.mark.parametrize("name", ["off", "pr42982 key", "on"])
def test_other_schedules(kernels: Kernels, name: str, seed: int) -> None:
    events = schedule(50, seed)
    rec = record(path(OPTIONS[name], kernels), events, run_reference(events))
    misled = stale_rows(events, SMALL.index_topk) if OPTIONS[name].key == "pr42982" else None
    assert_within_bounds(rec, misled)
    assert_choices_legal(rec)
