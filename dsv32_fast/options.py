"""What can be switched on the optimised path: the three changes of vLLM PR #42982, one field each, and presets.

The names of the key policies are those of the vLLM pull requests that introduced them.
"""

from __future__ import annotations

from typing import Literal, get_args, get_type_hints

import msgspec

Precision = Literal["fp32", "bf16"]
KeyPolicy = Literal["none", "pr42982", "pr47766"]
SplitCap = Literal["unlimited", "max_seq_len"]
ClearPolicy = Literal["full", "tail"]


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The switches of the optimised path; the defaults are the baseline before PR #42982."""

    logits: Precision = "fp32"
    """Storage type of the MoE router's logits."""
    bias: Precision = "fp32"
    """Storage type of the router's e_score_correction_bias."""
    key: KeyPolicy = "none"
    """What the builder compares before it reuses the plan; `none` rebuilds it every step."""
    split_cap: SplitCap = "unlimited"
    """Where `max_split_per_batch` comes from: not passed, or from max_seq_len as vLLM 0.26 does."""
    clear: ClearPolicy = "full"
    """Whole index buffers each step, or only [new extent, previous extent)."""


PRESETS: dict[str, Options] = {
    "baseline": Options(),
    "pr42982": Options(logits="bf16", bias="bf16", key="pr42982", clear="tail"),
    "pr47766": Options(logits="bf16", bias="bf16", key="pr47766", clear="tail"),
    "vllm026": Options(logits="bf16", bias="bf16", key="pr47766", clear="tail", split_cap="max_seq_len"),
}


def resolve(preset: str, assignments: tuple[str, ...] = ()) -> Options:
    """The options of `preset` with fields replaced by `assignments` of the form `field=value`.

    Raises:
        ValueError: unknown preset, unknown field, or a value that the field does not take; the message lists what is.
    """
    if preset not in PRESETS:
        raise ValueError(f"unknown options {preset!r}; choose one of {', '.join(PRESETS)}")
    hints = get_type_hints(Options)
    changes: dict[str, str] = {}
    for assignment in assignments:
        field, sign, value = assignment.partition("=")
        if not sign or field not in hints:
            raise ValueError(f"cannot set {assignment!r}; write field=value with a field of {', '.join(hints)}")
        allowed = get_args(hints[field])
        if value not in allowed:
            raise ValueError(f"{field} cannot be {value!r}; choose one of {', '.join(allowed)}")
        changes[field] = value
    return msgspec.convert(msgspec.to_builtins(PRESETS[preset]) | changes, Options)


def describe(options: Options) -> str:
    """The preset's name if the options are one, else every field in the form that `resolve` takes."""
    for name, preset in PRESETS.items():
        if preset == options:
            return name
    return " ".join(f"{field}={value}" for field, value in msgspec.to_builtins(options).items())
