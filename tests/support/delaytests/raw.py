"""Below the verbs: a shard's keys, what they hold, and requests sent by hand."""

from __future__ import annotations

from typing import Any

import redis

from delayadapters.redis.commands import Call, Plain
from delayadapters.redis.keys import ShardKeys
from delayadapters.redis.sync import execute

__all__ = ["content", "keys_of", "send", "snapshot"]


def keys_of(queue: Any, shard: int = 0) -> ShardKeys:
    """The keys of a queue (or of a face of one)."""
    keys: ShardKeys = getattr(queue, "wrapped", queue)._verbs.shards[shard]
    return keys


def send(client: redis.Redis, request: Call[Any] | Plain[Any]) -> Any:
    """One request, its parsed answer."""
    return request.parse(execute(client, request))


def content(client: redis.Redis, key: bytes | str) -> Any:
    """All that a key holds, in a form to compare; None when it does not exist."""
    kind = client.type(key)
    if kind == b"zset":
        return [(member, int(score)) for member, score in client.zrange(key, 0, -1, withscores=True)]
    if kind == b"hash":
        return dict(sorted(client.hgetall(key).items()))
    if kind == b"set":
        return sorted(client.smembers(key))
    if kind == b"list":
        return client.lrange(key, 0, -1)
    if kind == b"string":
        return client.get(key)
    assert kind == b"none", kind
    return None


def snapshot(client: redis.Redis, pattern: str = "*") -> dict[bytes, Any]:
    """Every key of the server that matches, and what it holds."""
    return {key: content(client, key) for key in sorted(client.scan_iter(match=pattern, count=1000))}
