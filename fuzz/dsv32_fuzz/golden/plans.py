"""Replay of recorded plans: does the emulated planner give what AITER's planner gave, entry for entry?

A recording says of every entry what was written, or that nothing was. Each plan is made twice, in buffers poisoned
with two values, so that an entry that should stay unwritten is seen to keep both. Recordings of planners that the
emulation does not have count as skipped; of configurations that AITER leaves undefined, the refusal is the agreement.

The file is gzipped JSON, `{"meta": ..., "cases": [...]}`; `Case` is the schema (see data/plans/README.md).
"""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from dsv32_fast.kernels.emulated import (
    UndefinedInAiter,
    UnsupportedPlanner,
    get_mla_metadata_info_v1,
    get_mla_metadata_v1,
)
from dsv32_fast.kernels.emulated.device import DeviceProperties, emulated_device
from dsv32_fast.plan import PlanBuffers, allocate

RECORDINGS = Path(__file__).parents[1] / "data" / "plans"
DEFINED = RECORDINGS / "aiter_e404860_v1.json.gz"
UNDEFINED = RECORDINGS / "aiter_e404860_undefined.json.gz"

POISONS = (-0x5EAF00D, 0x5A5A5A5A)
_MAX_BYTES = 512 * 2**20
_MAX_ROWS = 2**24
_SWITCHES = ("AITER_ENABLE_EXPERIMENTAL", "AITER_MLA_META_USE_PARALLEL")
_FP8 = {"gfx950": torch.float8_e4m3fn, "gfx942": torch.float8_e4m3fnuz}

Progress = Callable[[int, int], None]
Int32 = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
Entry = Int32 | list[Int32 | None] | None


class Inputs(msgspec.Struct, frozen=True):
    """Arguments of `get_mla_metadata_v1` by name, the device, the environment, and what sized the buffers."""

    arch: Literal["gfx950", "gfx942"]
    multiProcessorCount: Int32  # noqa: N815 - the recording's names are AITER's
    lds_per_cu: Int32
    num_heads_per_head_k: Int32
    num_heads_k: Int32
    is_causal: bool
    page_size: Int32
    kv_granularity: Int32
    max_seqlen_qo: Int32
    uni_seqlen_qo: Int32
    topk: Int32
    max_split_per_batch: Int32
    fast_mode: bool
    intra_batch_mode: bool
    is_cp_round_robin: bool
    dtype_q: Literal["bf16", "fp8"]
    dtype_kv: Literal["bf16", "fp8"]
    env: dict[str, int | str]
    qo_indptr: list[Int32]
    kv_indptr: list[Int32]
    kv_last_page_lens: list[Int32]
    alloc_batch: Int32
    info_is_sparse: bool
    num_kv_splits: Int32
    info_max_split: Int32

    def device(self) -> DeviceProperties:
        """The device that the recording assumes."""
        return DeviceProperties(
            arch=self.arch,
            compute_units=self.multiProcessorCount,
            lds_bytes=self.lds_per_cu,
            fp8=_FP8[self.arch],
        )

    def dtype(self, name: str) -> torch.dtype:
        """The torch dtype of a recorded dtype name."""
        return torch.bfloat16 if name == "bf16" else _FP8[self.arch]


class Tail(msgspec.Struct, frozen=True):
    """The rest of reduce_indptr: `value` from index `first` to `size` - 1."""

    first: Int32
    value: Int32
    size: Int32


class Outputs(msgspec.Struct, frozen=True):
    """Written entries; null stands for an entry that was not written, and so does everything beyond a list's end."""

    work_indptr: list[Int32]
    work_info_set: list[Entry]
    reduce_indptr: list[Entry]
    reduce_indptr_tail: Tail
    reduce_final_map: list[Entry]
    reduce_partial_map: list[Entry]


class Case(msgspec.Struct, frozen=True):
    """One recorded call; without outputs and sizes where the call has no defined result."""

    id: str
    group: str
    inputs: Inputs
    buffer_sizes: dict[str, int] | None = None
    outputs: Outputs | None = None
    derived: dict[str, Any] = {}
    """The launch parameters that AITER chose."""
    check: dict[str, Any] = {}
    """What a coverage checker of the recorder said, `num_violations` among it."""

    @property
    def undefined(self) -> bool:
        """Whether AITER's result is undefined, so that a refusal is the right answer."""
        return self.group == "known_bad"


class _File(msgspec.Struct):
    meta: dict[str, Any]
    cases: list[Case]


class PlanReplay(msgspec.Struct, frozen=True, kw_only=True):
    """What a replay found; `passed` + `failed` + `skipped` is the number of cases in the file."""

    source: str
    """Where the recording comes from, in its own words."""
    passed: int
    failed: int
    skipped: int
    refused: int
    """Of the passed ones, those refused as undefined, as they should be."""
    first_difference: str = ""
    skip_reasons: dict[str, int] = {}

    @property
    def compared_nothing(self) -> bool:
        """Whether no case was decided: the replay says nothing about the planner."""
        return self.passed + self.failed == 0


def load_cases(path: Path | str) -> tuple[str, list[Case]]:
    """(source, cases) of a recording.

    Raises:
        ValueError: not a gzipped recording of plans, or cut short; one line that names the file and the remedy.
        OSError: the file cannot be opened.
    """
    try:
        with gzip.open(path) as stream:
            text = stream.read(_MAX_BYTES + 1)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is no complete gzip file ({error}); copy the recording again") from error
    if len(text) > _MAX_BYTES:
        raise ValueError(f"{path} holds more than {_MAX_BYTES >> 20} MiB; split the recording")
    try:
        file = msgspec.json.decode(text, type=_File)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no recording of plans ({error}); see data/plans/README.md") from error
    if not file.cases:
        raise ValueError(f"{path} holds no case; record at least one plan")
    return str(file.meta.get("source", "unknown")), file.cases


def replay_plans(path: Path | str, progress: Progress | None = None) -> PlanReplay:
    """Plan every case of a recording and compare; `progress(done, total)` is called after each case.

    Raises:
        ValueError: as `load_cases`, or a case whose buffers could not hold its own recording.
    """
    source, cases = load_cases(path)
    passed = failed = refused = 0
    first, skips = "", dict[str, int]()
    for done, case in enumerate(cases, 1):
        try:
            difference = replay_case(case)
        except UnsupportedPlanner as reason:
            skips[str(reason)] = skips.get(str(reason), 0) + 1
        else:
            failed += bool(difference)
            passed += not difference
            refused += case.undefined and not difference
            first = first or difference
        if progress is not None:
            progress(done, len(cases))
    return PlanReplay(
        source=source,
        passed=passed,
        failed=failed,
        skipped=sum(skips.values()),
        refused=refused,
        first_difference=first,
        skip_reasons=skips,
    )


def replay_case(case: Case) -> str:
    """The first difference between the planner and one recorded call, as one line; empty for none.

    Raises:
        UnsupportedPlanner: the emulation has no such planner.
        ValueError: the case is inconsistent in itself.
    """
    with emulated_device(case.inputs.device()), _environment(case.inputs.env):
        try:
            info = info_of(case.inputs)
        except ValueError as error:
            return f"{case.id}: get_mla_metadata_info_v1: {error}"
        sizes = _sizes(info)
        if case.buffer_sizes is not None and sizes != case.buffer_sizes:
            return f"{case.id}: get_mla_metadata_info_v1: expected {case.buffer_sizes}, found {sizes}"
        if max(sizes.values()) > _MAX_ROWS:
            raise ValueError(f"{case.id} needs buffers of {max(sizes.values())} rows; lower alloc_batch")
        for poison in POISONS:
            if difference := _replay_once(case, allocate(info, poison), poison):
                return difference
    return ""


def _replay_once(case: Case, plan: PlanBuffers, poison: int) -> str:
    try:
        plan_case(case.inputs, plan)
    except UndefinedInAiter as refusal:
        return "" if case.undefined else f"{case.id}: refused: {refusal}"
    except ValueError as error:
        return f"{case.id}: {error}"
    if case.undefined:
        return f"{case.id}: expected a refusal, since AITER's result is undefined; found a plan"
    return _difference(case, plan, poison)


def info_of(inputs: Inputs) -> tuple[Any, ...]:
    """`get_mla_metadata_info_v1` for the recorded buffers, on the current emulated device."""
    return get_mla_metadata_info_v1(
        inputs.alloc_batch,
        inputs.max_seqlen_qo,
        inputs.num_heads_per_head_k * inputs.num_heads_k,
        inputs.dtype(inputs.dtype_q),
        inputs.dtype(inputs.dtype_kv),
        inputs.info_is_sparse,
        inputs.fast_mode,
        inputs.num_kv_splits,
        inputs.intra_batch_mode,
        inputs.info_max_split,
    )


def plan_case(inputs: Inputs, plan: PlanBuffers) -> None:
    """Make the recorded call into `plan`, on the current emulated device."""
    get_mla_metadata_v1(
        torch.tensor(inputs.qo_indptr, dtype=torch.int32),
        torch.tensor(inputs.kv_indptr, dtype=torch.int32),
        torch.tensor(inputs.kv_last_page_lens, dtype=torch.int32),
        inputs.num_heads_per_head_k,
        inputs.num_heads_k,
        inputs.is_causal,
        *plan.call_order(),
        page_size=inputs.page_size,
        kv_granularity=inputs.kv_granularity,
        max_seqlen_qo=inputs.max_seqlen_qo,
        uni_seqlen_qo=inputs.uni_seqlen_qo,
        fast_mode=inputs.fast_mode,
        topk=inputs.topk,
        max_split_per_batch=inputs.max_split_per_batch,
        intra_batch_mode=inputs.intra_batch_mode,
        is_cp_round_robin=inputs.is_cp_round_robin,
        dtype_q=inputs.dtype(inputs.dtype_q),
        dtype_kv=inputs.dtype(inputs.dtype_kv),
    )


def _sizes(info: tuple[Any, ...]) -> dict[str, int]:
    shapes = [shape if isinstance(shape, int) else shape[0] for shape, _ in info]
    return dict(zip(("ptrs", *PlanBuffers._fields[1:]), shapes, strict=True))


def _difference(case: Case, plan: PlanBuffers, poison: int) -> str:
    if case.outputs is None:
        raise ValueError(f"{case.id} has no outputs and is not in the group known_bad; record it again")
    addresses = [plan.work_indptr.data_ptr(), plan.work_info_set.data_ptr()]
    if plan.work_metadata_ptrs.tolist() != addresses:
        return f"{case.id}: work_metadata_ptrs: expected {addresses}, found {plan.work_metadata_ptrs.tolist()}"
    for name in PlanBuffers._fields[1:]:
        found = getattr(plan, name).numpy()
        expected = _expected(case, name, found.shape, poison)
        if (expected != found).any():
            at = tuple(int(i) for i in np.argwhere(expected != found)[0])
            words = ["unwritten" if value == poison else str(value) for value in (expected[at], found[at])]
            index = ", ".join(map(str, at))
            return f"{case.id}: {name}[{index}]: expected {words[0]}, found {words[1]}"
    return ""


def _expected(case: Case, name: str, shape: tuple[int, ...], poison: int) -> npt.NDArray[np.int64]:
    outputs = case.outputs
    expected = np.full(shape, poison, np.int64)
    entries = getattr(outputs, name)
    if len(entries) > len(expected):
        raise ValueError(f"{case.id}: {name} records {len(entries)} rows in a buffer of {len(expected)}")
    if name == "reduce_indptr" and outputs is not None:
        expected[outputs.reduce_indptr_tail.first :] = outputs.reduce_indptr_tail.value
    for i, entry in enumerate(entries):
        if entry is not None:
            row = entry if isinstance(entry, list) else [entry]
            if len(row) * len(expected) != expected.size:
                raise ValueError(f"{case.id}: row {i} of {name} has {len(row)} entries; record the case again")
            expected[i] = np.reshape([poison if value is None else value for value in row], shape[1:])
    return expected


@contextmanager
def _environment(switches: dict[str, int | str]) -> Iterator[None]:
    """AITER's switches as recorded and no others; the process's own come back afterwards (not safe across threads)."""
    before = {name: os.environ.pop(name, None) for name in _SWITCHES}
    os.environ.update({name: str(switches[name]) for name in _SWITCHES if name in switches})
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
