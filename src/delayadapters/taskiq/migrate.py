"""Moving schedules from taskiq-redis's ``ListRedisScheduleSource`` to the delay queue."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

import redis.asyncio
from redis.asyncio.connection import ConnectionPool
from redis.exceptions import ResponseError
from taskiq import ScheduledTask
from taskiq.exceptions import SendTaskError

from ..errors import JobExists
from ..redis.aio import AsyncDelayQueue
from ..redis.commands import Extras
from .brokers import same_address
from .source import DelayScheduleSource

__all__ = ["Migrated", "migrate_schedules"]


@dataclass(slots=True)
class Migrated:
    """Schedule ids. ``moved``: they wait in the delay queue now. ``taken``: gone meanwhile (sent, unscheduled, or moved
    by another). ``unclear``: a move between two servers was interrupted, or is under way; see
    :func:`migrate_schedules`."""

    moved: list[str] = field(default_factory=list)
    taken: list[str] = field(default_factory=list)
    unclear: list[str] = field(default_factory=list)


async def migrate_schedules(old: Any, new: DelayScheduleSource) -> Migrated:
    """Moves the pending time-schedules of a ``ListRedisScheduleSource``, each at most once; cron and interval stay.

    Stop ``taskiq scheduler`` first: what it has read already, it sends. Any number of moves may run, and an interrupted
    one is simply run again.

    In one Redis database a schedule leaves the old source in the very step that stores it. Between two servers it is
    set aside first, as ``<prefix>:moving:<schedule id>``; a crash right then leaves it there, and the next run reports
    it as ``unclear`` unless the queue still has it: rename it to ``<prefix>:data:<schedule id>`` to have it moved.

    Raises:
        TypeError: not a ``ListRedisScheduleSource``.
        SendTaskError: a schedule could not be stored; those before it are moved.
    """
    if not all(hasattr(old, name) for name in ("_connection_pool", "_prefix", "_serializer", "_get_time_key")):
        raise TypeError(f"migrate_schedules takes a taskiq_redis.ListRedisScheduleSource, got {old!r}")
    if not isinstance(new, DelayScheduleSource):
        raise TypeError(f"migrate_schedules moves to a DelayScheduleSource, got {new!r}")
    queue = new.middleware.queue
    together = same_address(old._connection_pool, getattr(queue.client, "connection_pool", None))
    pool = old._connection_pool
    kwargs = {key: value for key, value in pool.connection_kwargs.items() if key not in ("max_connections", "timeout")}
    # Connections of our own: a source has no way to close its.
    own = ConnectionPool(connection_class=pool.connection_class, **kwargs)
    try:
        return await _move(redis.asyncio.Redis(connection_pool=own), old, new, queue, together)
    finally:
        await own.disconnect()


async def _move(client: Any, old: Any, new: DelayScheduleSource, queue: AsyncDelayQueue, together: bool) -> Migrated:
    out = Migrated()
    if not together:
        async for key, id in _keys(client, f"{old._prefix}:moving:"):
            if await queue.get(id) is not None:
                if await client.delete(key):
                    out.moved.append(id)
            else:
                out.unclear.append(id)
    async for key, id in _keys(client, f"{old._prefix}:data:"):
        raw: Any = await client.get(key)
        if raw is None:
            out.taken.append(id)
            continue
        schedule = ScheduledTask.model_validate(old._serializer.loadb(raw))
        if schedule.time is None or schedule.cron is not None or schedule.interval is not None:
            continue
        move = _within if together else _across
        done = await move(client, old, new, schedule, key, raw)
        (out.moved if done else out.taken).append(id)
    return out


async def _keys(client: Any, prefix: str) -> AsyncIterator[tuple[str, str]]:
    """The keys and the ids in them. All at once: they change while they are gone through."""
    pattern = "".join(f"[{c}]" if c in "*?[" else c for c in prefix.replace("\\", "\\\\")) + "*"
    for raw in sorted({key async for key in client.scan_iter(pattern, count=1000)}):
        key = raw.decode() if isinstance(raw, bytes) else raw
        yield key, key[len(prefix) :]


def _time(schedule: ScheduledTask) -> datetime:
    assert schedule.time is not None  # noqa: S101
    return schedule.time if schedule.time.utcoffset() is not None else schedule.time.replace(tzinfo=timezone.utc)


async def _within(
    client: Any, old: Any, new: DelayScheduleSource, schedule: ScheduledTask, key: str, raw: bytes
) -> bool:
    extras = Extras(
        expect=[(("GET", key), raw)],
        alongside=[("DEL", key), ("LREM", old._get_time_key(schedule.time), "0", schedule.schedule_id)],
    )
    try:
        await new.store(schedule, _time(schedule), "keep", extras)
    except SendTaskError as error:
        if isinstance(error.__cause__, JobExists):
            return False
        raise
    return True


async def _across(
    client: Any, old: Any, new: DelayScheduleSource, schedule: ScheduledTask, key: str, raw: bytes
) -> bool:
    aside = f"{old._prefix}:moving:{schedule.schedule_id}"
    try:
        await client.rename(key, aside)
    except ResponseError:
        return False  # no such key: somebody else was first
    await client.lrem(old._get_time_key(schedule.time), 0, schedule.schedule_id)
    try:
        await new.store(schedule, _time(schedule), "keep")
    except SendTaskError:
        await client.renamenx(aside, key)
        await client.rpush(old._get_time_key(schedule.time), schedule.schedule_id)
        raise
    return bool(await client.delete(aside))
