"""Hypothesis' own example databases, shared by the shards of a campaign: a folder, or Redis for several machines.

A shard that falsifies a property saves the choices that led to it; the other shards try them first in their next
round. What is shared is only a head start: every shard judges for itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from hypothesis.database import DirectoryBasedExampleDatabase, ExampleDatabase


class _OfProperty(ExampleDatabase):
    """One property's part of a database: Hypothesis' own keys know the test function, which all properties share."""

    def __init__(self, database: ExampleDatabase, scope: str) -> None:
        super().__init__()
        self._database, self._prefix = database, f"dsv32/{scope}/".encode()

    def fetch(self, key: bytes) -> Iterable[bytes]:
        """Examples under a key."""
        return self._database.fetch(self._prefix + key)

    def save(self, key: bytes, value: bytes) -> None:
        """Add an example."""
        self._database.save(self._prefix + key, value)

    def delete(self, key: bytes, value: bytes) -> None:
        """Remove an example that no longer fails."""
        self._database.delete(self._prefix + key, value)


def check_place(place: str) -> None:
    """Refuse a place that no database can be opened at.

    Raises:
        ValueError: neither a folder nor a Redis address, or the redis package is missing.
    """
    open_examples(place, "")


def open_examples(place: str, scope: str) -> ExampleDatabase | None:
    """The database of one property at `place`: a folder, or redis://HOST:PORT/NUMBER; None for an empty place.

    Raises:
        ValueError: another scheme, or the redis package is missing.
    """
    if not place:
        return None
    scheme, sign, _ = place.partition("://")
    if not sign:
        return _OfProperty(DirectoryBasedExampleDatabase(Path(place)), scope)
    if scheme not in ("redis", "rediss", "unix"):
        raise ValueError(f"examples cannot be shared at {place!r}; give a folder or redis://HOST:PORT/NUMBER")
    try:
        import redis  # an extra
        from hypothesis.extra.redis import RedisExampleDatabase
    except ImportError as error:
        raise ValueError(
            "sharing examples by Redis needs the package redis; install dsv32-validation[redis]"
        ) from error
    return _OfProperty(RedisExampleDatabase(redis.Redis.from_url(place)), scope)
