"""The policy of a sign-off: what traffic must be safe, on which evidence, and what each gate may measure.

`signoff.toml` states it, checked against this form; docs/policy.md explains every field. Without a file the default
holds: all traffic, emulated evidence, every gate required.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

MAX_POLICY_BYTES = 1 << 20


class Scope(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The traffic that the deployment will see. What is outside is still checked and shown, but decides nothing."""

    mtp_depth: int = 7
    """Drafts per step; 0 takes MTP decode and mixed traffic out of scope."""
    chunked_prefill: bool = True
    """False takes chunked prefill and mixed traffic out of scope."""

    def __post_init__(self) -> None:
        if not 0 <= self.mtp_depth <= 7:
            raise ValueError(f"mtp_depth is {self.mtp_depth}, must be in 0..7")

    def outside(self) -> frozenset[str]:
        """Traffic classes that are not in scope."""
        gone = set()
        if not self.mtp_depth:
            gone |= {"mtp_decode", "mixed", "serving", "batch_mixes", "any_query_length"}
        if not self.chunked_prefill:
            gone |= {"chunked_prefill", "mixed", "serving", "batch_mixes", "any_query_length"}
        return frozenset(gone)


class GateRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the policy asks of one gate."""

    need: Literal["required", "optional"] | None = None
    """None keeps the gate's own: required if there is anything to judge, else NOT JUDGED.

    An optional gate is shown, and a failure of it is named beside the outcome, but decides nothing.
    """
    limit: float | None = None
    """The largest figure that passes, for gates that measure one; None keeps the gate's own."""


class Policy(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="format", tag="dsv32-policy/1"
):
    """Everything that a sign-off is decided by."""

    name: str = "default"
    evidence: Literal["emulated", "hardware"] = "emulated"
    """Evidence level that a GO needs; emulated evidence never gives the GO of a policy that asks for hardware."""
    max_failing_runs: float | None = None
    """Largest upper bound (95 %, Clopper-Pearson) on the share of serving runs that fail; None asks for none."""
    scope: Scope = Scope()
    gates: dict[str, GateRule] = {}

    def __post_init__(self) -> None:
        if self.max_failing_runs is not None and not 0 < self.max_failing_runs <= 1:
            raise ValueError(f"max_failing_runs is {self.max_failing_runs}, must be above 0 and at most 1")
        if any(rule.limit is not None and not 0 <= rule.limit < math.inf for rule in self.gates.values()):
            raise ValueError("a limit must be a finite number that is not negative")

    def rule(self, gate: str) -> GateRule:
        """What is asked of a gate."""
        return self.gates.get(gate, GateRule())

    def with_limit(self, gate: str, limit: float) -> Policy:
        """The same policy with another limit of one gate."""
        rule = msgspec.structs.replace(self.rule(gate), limit=limit)
        return msgspec.structs.replace(self, gates={**self.gates, gate: rule})


DEFAULT = Policy()


def load_policy(path: Path, known_gates: Sequence[str], measuring: Collection[str] = ()) -> Policy:
    """Read a policy; only the gates in `measuring` measure a figure that a limit can be set for.

    Raises:
        ValueError: no policy; the message is one line that names the file, the place and the remedy.
    """
    try:
        if path.stat().st_size > MAX_POLICY_BYTES:
            raise ValueError(f"larger than {MAX_POLICY_BYTES} bytes")
        policy = msgspec.toml.decode(path.read_bytes(), type=Policy)
        unknown = sorted(set(policy.gates) - set(known_gates))
        if unknown:
            raise ValueError(f"unknown gate {unknown[0]!r}; known are {', '.join(known_gates)}")
        blind = sorted(name for name, rule in policy.gates.items() if rule.limit is not None and name not in measuring)
        if blind:
            raise ValueError(f"gate {blind[0]} takes no limit; those that do are {', '.join(measuring)}")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); give a signoff.toml") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: no policy ({' '.join(str(error).split())}); see docs/policy.md") from error
    return policy


def policy_of(fields: Mapping[str, object]) -> Policy:
    """The policy that a run was started with, from its plain form."""
    return msgspec.convert(fields, Policy) if fields else DEFAULT
