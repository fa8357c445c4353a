"""What Redis was asked to do, and what was said on its channels; without MONITOR, which would slow the server."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import redis

__all__ = ["Commands", "Messages", "count_commands", "count_messages"]


def _commandstats(client: redis.Redis) -> Counter[str]:
    stats: dict[str, Any] = client.info("commandstats")  # type: ignore[assignment]
    return Counter(
        {name.removeprefix("cmdstat_").replace("|", " ").lower(): int(s["calls"]) for name, s in stats.items()}
    )


class Commands:
    """Commands carried out since the start, by lower-case name (``client setinfo`` for a subcommand).

    The counter's own INFO is left out. Commands that a script runs are counted beside its ``evalsha``, as Redis does;
    :class:`~delaytests.CuttableProxy` counts what clients send.
    """

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self._before = _commandstats(client)
        self._asked = 1
        self._final: Counter[str] | None = None

    def now(self) -> Counter[str]:
        """So far; after the ``with`` block: within it."""
        if self._final is not None:
            return self._final
        counts = _commandstats(self._client)
        counts.subtract(self._before)
        counts["info"] -= self._asked
        self._asked += 1
        return +counts

    def stop(self) -> None:
        self._final = self.now()

    def __getitem__(self, name: str) -> int:
        return self.now()[name.lower()]

    @property
    def total(self) -> int:
        return sum(self.now().values())


@contextlib.contextmanager
def count_commands(client: redis.Redis) -> Iterator[Commands]:
    """``with count_commands(client) as counted:`` then ``counted["evalsha"]``, ``counted.total``, ``counted.now()``."""
    counted = Commands(client)
    yield counted
    counted.stop()


class Messages:
    """Messages heard on the channels, as ``(channel, data)`` in order."""

    def __init__(self, pubsub: Any) -> None:
        self._pubsub = pubsub
        self._heard: list[tuple[bytes, bytes]] = []

    def all(self) -> list[tuple[bytes, bytes]]:
        """Everything published until now: a ping on the subscriber's connection comes back after all of it."""
        token = f"{time.monotonic_ns()}".encode()
        self._pubsub.ping(token)
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            message = self._pubsub.get_message(timeout=0.1)
            if message is None:
                continue
            if message["type"] == "pong" and message["data"] == token:
                return list(self._heard)
            if message["type"] in ("message", "pmessage"):
                self._heard.append((message["channel"], message["data"]))
        raise AssertionError("no answer on the subscriber's connection within 30 s")

    def __len__(self) -> int:
        return len(self.all())


@contextlib.contextmanager
def count_messages(client: redis.Redis, *patterns: str) -> Iterator[Messages]:
    """``with count_messages(client, "*wake*") as heard: …; assert len(heard) == 1``. Patterns are globs; none: all.

    Ask within the block. ``client`` must not decode responses.
    """
    pubsub = client.pubsub()
    try:
        pubsub.psubscribe(*(patterns or ("*",)))
        for _ in patterns or ("*",):
            assert pubsub.get_message(timeout=10) is not None
        yield Messages(pubsub)
    finally:
        pubsub.close()
