"""Shards share Hypothesis' examples: what one falsified, another tries first."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from campaign_world import Numbers

from dsv32_fuzz.campaigns.shared_examples import open_examples
from dsv32_fuzz.search.explore import Search
from dsv32_fuzz.verdict import Status

PORT = 16399


def search(place: str, scope: str, seed: int) -> Numbers:
    """A search that stops at its first failure; the numbers that it ran."""
    numbers = Numbers(scope, lambda n: f"{n} lies in the middle" if 10**6 <= n < 10**9 else "", enough=10**6)
    found = Search(numbers, lambda number: seed + number, database=open_examples(place, scope))
    list(found.slice(60.0))
    assert found.totals[scope].status is Status.FAILED
    return numbers


def first_failure(numbers: Numbers) -> int:
    return next(place for place, n in enumerate(numbers.ran) if 10**6 <= n < 10**9)


@pytest.fixture
def redis_place() -> Iterator[str]:
    """A Redis server of our own."""
    redis = pytest.importorskip("redis")
    server = shutil.which("redis-server")
    if server is None:
        pytest.skip("redis-server is not installed")
    words = [server, "--port", str(PORT), "--save", "", "--bind", "127.0.0.1"]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    try:
        place = f"redis://127.0.0.1:{PORT}/0"
        client = redis.Redis.from_url(place)
        until = time.monotonic() + 30
        while time.monotonic() < until:
            try:
                client.ping()
                break
            except redis.ConnectionError:
                time.sleep(0.05)
        yield place
    finally:
        process.terminate()
        process.wait()


def shares(place: str) -> None:
    first = search(place, "even", seed=1)
    second = search(place, "even", seed=1000)
    assert first_failure(second) == 0  # the smallest failing example of the first, before anything is drawn
    assert second.ran[0] == 10**6
    assert first.ran[0] != 10**6
    assert search(place, "odd", seed=1).ran[0] != 10**6 + 1  # another property has examples of its own


def test_a_folder_is_shared(tmp_path: Path) -> None:
    shares(str(tmp_path / "examples"))


def test_redis_is_shared(redis_place: str) -> None:
    shares(redis_place)


def test_without_a_place_there_is_no_database() -> None:
    assert open_examples("", "even") is None
    with pytest.raises(ValueError, match="cannot be shared at"):
        open_examples("ftp://host", "even")
