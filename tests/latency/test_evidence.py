"""The file that a sign-off reads: kinds, what may feed a gate, and verdicts that follow from the samples alone."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from dsv32_fuzz.latency.evidence import ADMISSIBLE, Compared, Evidence, Kind, judged, read_evidence


def compared(name: str, effect: float, seed: int = 0) -> Compared:
    """25 blocks of 3 pairs around an effect; what the file says of them is for `judged` to fill in."""
    rng = np.random.default_rng(seed)
    a_s = tuple(map(tuple, rng.normal(1.0, 0.01, (25, 3)).tolist()))
    b_s = tuple(map(tuple, rng.normal(1.0 + effect, 0.01, (25, 3)).tolist()))
    return Compared(name=name, verdict="cannot tell", ratio=1.0, low=None, high=None, p_value=None, a_s=a_s, b_s=b_s)


def evidence(kind: Kind = "device", null: float = 0.0, complete: bool = True) -> Evidence:
    return judged(
        Evidence(
            kind=kind,
            complete=complete,
            measured="a test",
            margin=0.01,
            null=(compared("batch 1, whole: A/A", null),),
            compared=(compared("batch 1, whole: all", -0.1, 1), compared("batch 16, whole: all", 0.1, 2)),
        )
    )


def test_verdicts_are_those_of_the_samples() -> None:
    found = evidence()
    assert [c.verdict for c in (*found.null, *found.compared)] == ["no difference", "faster", "slower"]
    assert judged(found) == found
    assert found.compared[0].ratio == pytest.approx(0.9, abs=0.01)
    odd = evidence(null=0.2)
    assert [c.verdict for c in odd.compared] == ["cannot tell", "slower"]  # batch 16 has its own A/A run


def test_only_complete_evidence_of_a_device_is_admissible() -> None:
    kinds: tuple[Kind, ...] = ("emulated", "device", "trace", "host trace")
    assert sorted(ADMISSIBLE) == ["device", "trace"]
    assert [evidence(kind).admissible for kind in ("emulated", "device")] == [False, True]
    assert not evidence(complete=False).admissible
    assert [msgspec.structs.replace(evidence(), kind=kind).admissible for kind in kinds] == [False, True, True, False]


def test_an_edited_file_is_refused(tmp_path: Path) -> None:
    path, found = tmp_path / "evidence.json", evidence()
    path.write_bytes(msgspec.json.encode(found))
    assert read_evidence(path) == found
    first = found.compared[0]
    for change in (
        {"verdict": "no difference"},
        {"ratio": 0.5},
        {"low": None},
        {"p_value": 1.0},
        {"b_s": found.compared[1].b_s},
    ):
        edited = msgspec.structs.replace(first, **change)
        path.write_bytes(msgspec.json.encode(msgspec.structs.replace(found, compared=(edited,))))
        with pytest.raises(ValueError, match="batch 1, whole: all is not what its samples give"):
            read_evidence(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"{}", "no evidence of `dsv32 bench step --out`"),
        (b"", "no evidence of"),
        (b'{"format": "dsv32-latency/2"}', "no evidence of"),
    ],
)
def test_another_file_is_refused(text: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "evidence.json"
    path.write_bytes(text)
    with pytest.raises(ValueError, match=message):
        read_evidence(path)


def test_samples_that_give_no_ratio_are_refused() -> None:
    short = msgspec.structs.replace(compared("x", 0.0), a_s=((1.0,),), b_s=((0.0,),))
    with pytest.raises(ValueError, match="all of a positive time"):
        judged(msgspec.structs.replace(evidence(), compared=(short,)))
    for a_s in ((), ((1.0,), (1.0,)), ((-1.0,) * 30,)):
        bad = msgspec.structs.replace(compared("decode step", 0.0), a_s=a_s, b_s=((1.0,) * 30,))
        with pytest.raises(ValueError, match="one block of positive, finite step times"):
            judged(Evidence(kind="trace", complete=True, measured="a test", margin=0.01, compared=(bad,)))
