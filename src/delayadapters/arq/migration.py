"""Taking over jobs that were deferred by arq itself, before it was replaced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from arq.jobs import SerializationError, deserialize_job_raw
from arq.utils import timestamp_ms

from ..due import EPOCH
from ..redis.commands import Extras
from .client import DelayArqRedis, Wait
from .releasing import Deferred
from .settings import in_progress_key_prefix, job_key_prefix, retry_key_prefix

__all__ = ["MigrationReport", "migrate"]

_CHUNK = 200
_TOLERANCE_MS = 2000


@dataclass
class MigrationReport:
    """What :func:`migrate` found, and did unless it was a dry run. Counts of jobs."""

    dry_run: bool
    found: int = 0
    """Deferred natively: in arq's queue, due later than ``margin`` from now."""
    moved: int = 0
    """Taken over (dry run: that would be)."""
    gone: int = 0
    """Started, ended, changed or taken over by somebody else while we looked: left alone."""
    lost: list[str] = field(default_factory=list)
    """Ids whose payload had died by its TTL: arq will record that they expired. Left alone."""
    unreadable: list[str] = field(default_factory=list)
    """Ids whose payload these settings' deserializer cannot read. Left alone."""
    first_due: datetime | None = None
    last_due: datetime | None = None


async def migrate(
    redis: DelayArqRedis,
    *,
    queue_name: str | None = None,
    dry_run: bool = True,
    margin: float = 5.0,
    progress: Callable[[int, int], None] | None = None,
) -> MigrationReport:
    """Moves the jobs that wait natively in an arq queue into the delay queue, each at most once.

    Each job moves in one step, and only if it is still there, unchanged and not running; workers and clients need not
    stop. A second run, or two at once, move nothing twice. On a delay queue of another Redis a crash between storing
    and removing leaves a job in both, under one id: stop the clients meanwhile.

    Args:
        queue_name: arq's queue; default: the client's.
        dry_run: only look.
        margin: seconds; jobs due sooner are left to arq.
        progress: called with (jobs looked at, jobs there are) after each few hundred.
    """
    queue = redis.default_queue_name if queue_name is None else queue_name
    report = MigrationReport(dry_run)
    first = timestamp_ms() + round(margin * 1000)
    rows = await redis.zrangebyscore(queue, first, "+inf", withscores=True)
    report.found = len(rows)
    for at in range(0, len(rows), _CHUNK):
        chunk = [(raw.decode(), score) for raw, score in rows[at : at + _CHUNK]]
        async with redis.pipeline(transaction=True) as pipe:
            for job_id, _ in chunk:
                pipe.get(job_key_prefix + job_id)
                pipe.pttl(job_key_prefix + job_id)
                pipe.get(retry_key_prefix + job_id)
            values = await pipe.execute()
        now = timestamp_ms()
        for (job_id, score), payload, ttl, tries in zip(chunk, values[::3], values[1::3], values[2::3], strict=True):
            native = _Native(
                job_id, score, payload, now + ttl if ttl > 0 else None, None if tries is None else int(tries)
            )
            await _one(redis, report, queue, native)
        if progress is not None:
            progress(min(at + _CHUNK, len(rows)), len(rows))
    return report


@dataclass(frozen=True)
class _Native:
    """A job as arq deferred it. ``ends``: when its payload dies, milliseconds since the epoch."""

    job_id: str
    score: float
    payload: bytes | None
    ends: int | None
    tries: int | None


async def _one(redis: DelayArqRedis, report: MigrationReport, queue: str, native: _Native) -> None:
    if native.payload is None:
        report.lost.append(native.job_id)
        return
    try:
        function = deserialize_job_raw(native.payload, deserializer=redis.job_deserializer)[0]
    except SerializationError:
        report.unreadable.append(native.job_id)
        return
    due_ms = int(native.score)
    due = EPOCH + timedelta(milliseconds=due_ms)
    # arq's payload lives until due + expires_extra_ms, unless _expires said otherwise: then that still holds. Of a
    # retry nobody can tell, as arq does not move its end.
    usual = native.tries is not None or native.ends is None
    usual = usual or abs((native.ends or 0) - due_ms - redis.expires_extra_ms) < _TOLERANCE_MS
    job = Deferred(function, queue, redis.expires_extra_ms, None if usual else native.ends, native.tries)
    if not report.dry_run and not await _take_over(redis, native, job, native.payload, due):
        report.gone += 1
        return
    report.moved += 1
    report.first_due = min(report.first_due or due, due)
    report.last_due = max(report.last_due or due, due)


async def _take_over(redis: DelayArqRedis, native: _Native, job: Deferred, payload: bytes, due: datetime) -> bool:
    job_key, in_progress = job_key_prefix + native.job_id, in_progress_key_prefix + native.job_id
    score = (("ZSCORE", job.queue, native.job_id), f"{native.score:.17g}")
    # A worker that has just seen the id in the queue watches in_progress: touching it stops its transaction.
    clear = [("DEL", job_key), ("SET", in_progress, "1"), ("DEL", in_progress), ("ZREM", job.queue, native.job_id)]
    extras = Extras(unless=[in_progress], expect=[score, (("GET", job_key), payload)], alongside=clear)
    if redis.delay_direct:
        return await redis.store(native.job_id, job, payload, Wait(None, due), "error", extras)
    if not await redis.store(native.job_id, job, payload, Wait(None, due), "error", Extras()):
        return False
    async with redis.pipeline(transaction=True) as pipe:
        for command in clear:
            pipe.execute_command(*command)
        await pipe.execute()
    return True
