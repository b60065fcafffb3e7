"""Options: presets, single fields, and errors that name the remedy."""

import pytest

from dsv32_fast.batch import StepBatch
from dsv32_fast.options import PRESETS, Options, describe, resolve


def test_presets_are_the_published_combinations() -> None:
    assert PRESETS["baseline"] == Options(logits="fp32", bias="fp32", key="none", split_cap="unlimited", clear="full")
    assert resolve("pr42982") == Options(logits="bf16", bias="bf16", key="pr42982", clear="tail")
    assert resolve("pr47766") == Options(logits="bf16", bias="bf16", key="pr47766", clear="tail")
    assert resolve("vllm026") == Options(
        logits="bf16", bias="bf16", key="pr47766", clear="tail", split_cap="max_seq_len"
    )


def test_each_field_can_be_set_alone() -> None:
    options = resolve("pr42982", ("bias=fp32",))
    assert (options.logits, options.bias, options.key) == ("bf16", "fp32", "pr42982")
    assert describe(options) == "logits=bf16 bias=fp32 key=pr42982 split_cap=unlimited clear=tail"
    assert describe(resolve("pr47766")) == "pr47766"


@pytest.mark.parametrize(
    ("preset", "assignments", "remedy"),
    [
        ("pr1", (), "choose one of baseline, pr42982"),
        ("baseline", ("bias",), "write field=value"),
        ("baseline", ("cache=yes",), "a field of logits, bias, key, split_cap, clear"),
        ("baseline", ("bias=fp8",), "choose one of fp32, bf16"),
    ],
)
def test_errors_name_the_remedy(preset: str, assignments: tuple[str, ...], remedy: str) -> None:
    with pytest.raises(ValueError, match=remedy):
        resolve(preset, assignments)


def test_step_batch_derives_what_is_left_out() -> None:
    step = StepBatch(query_lens=(4, 1), seq_lens=(2048, 7))
    assert (step.num_tokens, step.max_seq_len, step.max_query_len) == (5, 2048, 4)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"query_lens": (1,), "seq_lens": ()}, "1 query lengths but 0"),
        ({"query_lens": (2,), "seq_lens": (1,)}, "request 0"),
        ({"query_lens": (-1,), "seq_lens": (1,)}, "request 0"),
        ({"query_lens": (2,), "seq_lens": (2,), "num_tokens": 1}, "below the 2 query tokens"),
        ({"query_lens": (2,), "seq_lens": (9,), "max_seq_len": 8}, "below the longest sequence"),
    ],
)
def test_step_batch_refuses_the_impossible(fields: dict[str, object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        StepBatch(**fields)  # type: ignore[arg-type]
