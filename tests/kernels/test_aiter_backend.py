"""The signature table, the reader of installed files, the mounted emulation and the adapter over it."""

from __future__ import annotations

import enum
import inspect
import sys
from types import ModuleType

import pytest
import torch
from kernel_worlds import attention

from dsv32_fast.kernels import aiter as backend
from dsv32_fast.kernels import installed, protocol
from dsv32_fast.kernels.emulated import api
from dsv32_fast.kernels.emulated.device import MI300X, emulated_device
from dsv32_fast.kernels.mounted import mounted
from dsv32_fast.kernels.signatures import (
    FUNCTIONS,
    HOMES,
    NEWEST_READ,
    OLDEST_READ,
    UnknownSignatureError,
    signature,
    version_key,
)

RELEASES = [None, OLDEST_READ, "0.1.14", "0.1.16.post2", "0.1.18", NEWEST_READ]


# ---- the table -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", FUNCTIONS)
def test_emulation_has_the_recorded_signature(function):
    """Names, order and which are required; the defaults as far as they are plain values."""
    ours = inspect.signature(getattr(api, function)).parameters
    recorded = signature(function)
    assert list(ours) == [p.name for p in recorded]
    for parameter in recorded:
        default = ours[parameter.name].default
        assert (default is inspect.Parameter.empty) == (parameter.default is None), parameter.name
        if default is None or isinstance(default, bool | int | float):
            assert installed._same_default(repr(default), parameter.default) or hasattr(default, "name"), parameter.name


@pytest.mark.parametrize("function", FUNCTIONS)
def test_protocol_names_only_recorded_parameters(function):
    method = inspect.signature(getattr(protocol.Kernels, function)).parameters
    names = [name for name in method if name != "self"]
    assert names == [p.name for p in signature(function)][: len(names)]


def names(function, release):
    return [p.name for p in signature(function, release)]


def test_history():
    assert "num_kv_splits" not in names("mla_reduce_v1", "0.1.15.post3")
    assert "num_kv_splits" in names("mla_reduce_v1", "0.1.16")
    assert "k" not in names("top_k_per_row_decode", "0.1.13.post1")
    assert "stable" not in names("top_k_per_row_prefill", "0.1.19.post2")
    assert "stable" in names("top_k_per_row_prefill", "0.1.20")
    assert "max_split_per_batch" in names("get_mla_metadata_info_v1", "0.1.16.post2")
    assert "max_split_per_batch" not in names("get_mla_metadata_info_v1", "0.1.14")


@pytest.mark.parametrize("release", ["0.1.12", "0.1.21", "0.1.26"])
def test_other_releases_are_refused_by_name(release):
    with pytest.raises(UnknownSignatureError, match=f"mla_reduce_v1 is recorded .* not {release}"):
        signature("mla_reduce_v1", release)
    with pytest.raises(UnknownSignatureError, match="asm_moe"):
        signature("asm_moe")


def test_order_of_releases():
    ordered = ["0.1.7.post2.dev18", "0.1.7.post2", "0.1.13rc1", "0.1.13", "0.1.13.post1+rocm7", "v0.1.14", "0.1.20"]
    assert sorted(ordered, key=version_key) == ordered
    with pytest.raises(ValueError, match="nightly"):
        version_key("nightly")


# ---- an installed AITER, read without importing it -------------------------------------------------------------------


def write_aiter(root, changes=()):
    """A package of stubs with the signatures of the commit; `changes` replaces text in them. Importing it fails."""
    sources: dict[str, str] = {"__init__": "raise RuntimeError('ROCm version file not found')\n"}
    for function in FUNCTIONS:
        home = HOMES.get(function, ("ops.attention",))[0]
        parameters = ", ".join(p.name if p.default is None else f"{p.name}={p.default}" for p in signature(function))
        sources[home] = sources.get(home, "") + f"@compile_ops('x')\ndef {function}({parameters}):\n    ...\n\n\n"
    for home, text in sources.items():
        for old, new in changes:
            text = text.replace(old, new)
        file = root.joinpath("aiter", *home.split(".")).with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return root / "aiter"


@pytest.fixture
def no_aiter(monkeypatch):
    """Nothing is imported as `aiter` yet; a package that the test puts first on the path is found before any other."""
    for name in [name for name in sys.modules if name == "aiter" or name.startswith("aiter.")]:
        monkeypatch.delitem(sys.modules, name)


def test_faithful_installation_has_no_differences(tmp_path, monkeypatch, no_aiter):
    root = write_aiter(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    found = installed.find_aiter()
    assert (found.kind, found.root) == ("aiter", root)
    assert "aiter" not in sys.modules, "it must not be imported"
    assert installed.differences(root) == ()


@pytest.mark.parametrize(
    ("change", "what", "function", "detail"),
    [
        (("num_kv_splits, final_output", "final_output"), "parameter missing", "mla_reduce_v1", "num_kv_splits"),
        (("k=2048, stable", "k=1024, stable"), "default differs", "top_k_per_row_decode", "k=1024, not 2048"),
        (("causal=True", "causal=True, new=1"), "parameter unknown", "mla_decode_fwd", "new"),
        (
            ("work_info_set, work_indptr, r", "work_indptr, work_info_set, r"),
            "parameter moved",
            "get_mla_metadata_v1",
            "",
        ),
        (("def moe_fused_gate", "def other"), "function missing", "moe_fused_gate", "no definition"),
        (("quant_type=No", "quant_type=QuantType.per_Token"), "default differs", "fused_moe", "quant_type"),
    ],
)
def test_differences_are_listed(tmp_path, change, what, function, detail):
    found = installed.differences(write_aiter(tmp_path, [change]))
    assert [d for d in found if d.function == function and d.what == what and detail in d.detail]
    assert {d.what for d in found} == {what}


def test_dotted_defaults_are_the_same(tmp_path):
    changes = [("=No,", "=QuantType.No,"), ("=V32", "=MlaVersion.V32.value"), ("=i8", "=dtypes.i8"), ("=0.0", "=0")]
    assert installed.differences(write_aiter(tmp_path, changes)) == ()


def test_absent_package(monkeypatch, no_aiter):
    monkeypatch.setattr(installed.importlib.util, "find_spec", lambda _: None)
    assert installed.find_aiter().kind == "absent"
    with pytest.raises(backend.AiterUnavailableError, match="not installed"):
        backend.load()


def test_unrelated_package(tmp_path, monkeypatch, no_aiter):
    (tmp_path / "aiter").mkdir()
    (tmp_path / "aiter" / "__init__.py").write_text("raise AssertionError('imported')", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    assert installed.find_aiter().kind == "unrelated"
    with pytest.raises(backend.AiterUnavailableError, match="unrelated async library"):
        backend.load()


def test_broken_installation(tmp_path, monkeypatch, no_aiter):
    write_aiter(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(backend.AiterUnavailableError, match="RuntimeError: ROCm version file not found"):
        backend.load()


# ---- the mounted emulation -------------------------------------------------------------------------------------------


def test_mounting_and_unmounting(monkeypatch, no_aiter):
    before = ModuleType("aiter")
    monkeypatch.setitem(sys.modules, "aiter", before)
    assert installed.find_aiter().kind == "unrelated"
    with mounted() as top:
        from aiter import dtypes, mla_reduce_v1
        from aiter.fused_moe import fused_moe
        from aiter.mla import mla_decode_fwd
        from aiter.ops.triton.attention.pa_mqa_logits import deepgemm_fp8_paged_mqa_logits

        assert (mla_decode_fwd, mla_reduce_v1, fused_moe) == (api.mla_decode_fwd, api.mla_reduce_v1, api.fused_moe)
        assert deepgemm_fp8_paged_mqa_logits is api.deepgemm_fp8_paged_mqa_logits
        assert dtypes.fp8 == dtypes.d_dtypes["fp8"] == torch.float8_e4m3fn
        assert sys.modules["aiter"] is top
        assert installed.find_aiter().kind == "emulated"
    assert sys.modules["aiter"] is before
    assert "aiter.mla" not in sys.modules
    with emulated_device(MI300X), mounted() as top:
        assert top.dtypes.fp8 == torch.float8_e4m3fnuz


def test_unmounted_after_an_error(no_aiter):
    def fail():
        with mounted():
            raise KeyError("x")

    with pytest.raises(KeyError):
        fail()
    assert "aiter" not in sys.modules


@pytest.mark.parametrize("release", RELEASES)
def test_mounted_signatures(release):
    with mounted(release) as top:
        for function in FUNCTIONS:
            home = sys.modules[f"aiter.{HOMES[function][0]}"] if function in HOMES else top
            assert list(inspect.signature(getattr(home, function)).parameters) == names(function, release)


def test_mounted_release_refuses_what_it_lacks():
    with mounted("0.1.13") as top, pytest.raises(TypeError, match="unexpected keyword argument 'k'"):
        top.top_k_per_row_decode(*decode_arguments(), k=2)
    with pytest.raises(UnknownSignatureError, match=r"0\.1\.26"), mounted("0.1.26"):
        pass


# ---- the adapter -----------------------------------------------------------------------------------------------------


def decode_arguments(k=2048):
    logits = torch.arange(4096.0).view(1, -1)
    return logits, 1, torch.tensor([4096]), torch.full((1, k), -7, dtype=torch.int32), 1, 4096, 1


@pytest.mark.parametrize("release", RELEASES)
def test_arguments_that_a_release_lacks(release):
    """Dropped where the release behaves so anyway, refused by name elsewhere."""
    with mounted(release):
        kernels = backend.load()
        arguments = decode_arguments()
        kernels.top_k_per_row_decode(*arguments, k=2048, stable=False)
        assert set(arguments[3][0].tolist()) == set(range(2048, 4096))
        if "k" in names("top_k_per_row_decode", release):
            arguments = decode_arguments(2)
            kernels.top_k_per_row_decode(*arguments, k=2)
            assert set(arguments[3][0].tolist()) == {4095, 4094}
        else:
            with pytest.raises(backend.UnsupportedByReleaseError, match=f"AITER {release}: top_k_per_row_decode .*'k'"):
                kernels.top_k_per_row_decode(*decode_arguments(2), k=2)


@pytest.mark.parametrize("release", RELEASES)
def test_reduce_with_and_without_split_count(release):
    """mla_reduce_v1 gained num_kv_splits in the middle of its positional arguments; its value has no effect."""
    outputs, lses = torch.tensor([1.0, 3.0]).view(2, 1, 1), torch.zeros(2, 1)
    maps = [torch.tensor(x, dtype=torch.int32) for x in ([0, 2], [[0, 1]], [0, 1])]
    final, lse = torch.zeros(1, 1, 1, dtype=torch.bfloat16), torch.zeros(1, 1)
    with mounted(release):
        backend.load().mla_reduce_v1(outputs, lses, *maps, 1, 16, final, lse)
    assert final.item() == 2.0
    assert lse.item() == pytest.approx(0.6931472)


@pytest.mark.parametrize("release", RELEASES)
def test_split_cap_of_the_sizes(release):
    arguments = (300, 1, 16, torch.bfloat16, torch.bfloat16, True)
    with mounted(release):
        kernels = backend.load()
        plain = kernels.get_mla_metadata_info_v1(*arguments, max_split_per_batch=-1)
        assert plain == api.get_mla_metadata_info_v1(*arguments)
        if "max_split_per_batch" in names("get_mla_metadata_info_v1", release):
            assert kernels.get_mla_metadata_info_v1(*arguments, max_split_per_batch=16) != plain
        else:
            with pytest.raises(backend.UnsupportedByReleaseError, match="max_split_per_batch"):
                kernels.get_mla_metadata_info_v1(*arguments, max_split_per_batch=16)


def plan_and_decode(kernels, info):
    """Plan a ragged step with the planner and attend it; returns output, LSE and the operands."""
    lengths = [10, 300, 17, 2]
    generator = torch.Generator().manual_seed(0)
    q, kv = torch.randn(4, 16, 24, generator=generator).bfloat16(), torch.randn(329, 1, 1, 24, generator=generator)
    kv = kv.bfloat16()
    indptr = torch.tensor([0, 10, 310, 327, 329], dtype=torch.int32)
    qo, last = torch.arange(5, dtype=torch.int32), torch.ones(4, dtype=torch.int32)
    meta, work_indptr, work_info, *maps = [torch.zeros(shape, dtype=dtype) for shape, dtype in info]
    kernels.get_mla_metadata_v1(
        qo, indptr, last, 16, 1, True, meta, work_info, work_indptr, *maps, page_size=1, kv_granularity=16,
        max_seqlen_qo=1, uni_seqlen_qo=1, fast_mode=True,
    )  # fmt: skip
    out = torch.full((4, 16, 16), 768.0, dtype=torch.bfloat16)
    indices = torch.randperm(329, generator=generator).int()
    _, lse = kernels.mla_decode_fwd(
        q, kv, out, qo, indptr, indices, last, 1, sm_scale=0.3, work_meta_data=meta, work_indptr=work_indptr,
        work_info_set=work_info, reduce_indptr=maps[0], reduce_final_map=maps[1], reduce_partial_map=maps[2],
        return_lse=True,
    )  # fmt: skip
    return out, lse, q, kv, indices, lengths


@pytest.mark.parametrize("release", RELEASES)
def test_planner_and_decode_through_the_adapter(release):
    """The whole chain with the planner's own plan, against fp64 attention and bit-equal to the emulation."""
    arguments = (4, 1, 16, torch.bfloat16, torch.bfloat16, True)
    info = api.get_mla_metadata_info_v1(*arguments)
    with mounted(release):
        out, lse, q, kv, indices, lengths = plan_and_decode(backend.load(), info)
    direct, direct_lse, *_ = plan_and_decode(api, info)
    assert torch.equal(out, direct)
    assert torch.equal(lse, direct_lse)
    start = 0
    for row, length in enumerate(lengths):
        keys = kv[indices[start : start + length].long(), 0, 0].float()
        start += length
        expected = attention(q[row].float(), keys, 16, 0.3, 64)
        assert ((out[row].double() - expected.output).abs() <= expected.bound).all()
        assert ((lse[row].double() - expected.lse).abs() <= expected.lse_bound).all()


def test_enumerations_are_translated_by_name():
    class QuantType(enum.Enum):
        No = 77

    seen = {}

    def fused_moe(hidden_states, w1, w2, topk_weight, topk_ids, quant_type=QuantType.No):
        seen.update(quant_type=quant_type)

    with mounted() as top:
        top.QuantType = QuantType
        sys.modules["aiter.fused_moe"].fused_moe = fused_moe
        backend.load().fused_moe(1, 2, 3, 4, 5, quant_type=api.QuantType.No)
    assert seen == {"quant_type": QuantType.No}


def with_layout(kv_c, k_pe, kv_cache, slot_mapping, kv_cache_dtype, scale, layout):
    """A function with a required parameter that no recorded release has."""


def test_adapter_refusals():
    with mounted() as top:
        kernels = backend.load()
        with pytest.raises(AttributeError, match="asm_moe"):
            _ = kernels.asm_moe
        with pytest.raises(TypeError, match="missing a required argument: 'final_output'"):
            kernels.mla_reduce_v1(1, 2, 3, 4, 5, 6, 7)
        del top.moe_fused_gate
        with pytest.raises(backend.UnsupportedByReleaseError, match="no moe_fused_gate in aiter"):
            _ = kernels.moe_fused_gate
        top.concat_and_cache_mla = with_layout
        with pytest.raises(backend.UnsupportedByReleaseError, match="requires layout"):
            _ = kernels.concat_and_cache_mla
