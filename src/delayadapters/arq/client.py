"""arq's client, with jobs that wait in a delay queue. ``create_pool`` and ``DelayArqRedis`` stand in for arq's own."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime, timedelta
from typing import Any, Final, Literal, TypeVar
from uuid import uuid4

from arq.connections import ArqRedis, RedisSettings
from arq.connections import create_pool as arq_create_pool
from arq.constants import default_queue_name as arq_queue_name
from arq.constants import expires_extra_ms as arq_expires_extra_ms
from arq.jobs import Deserializer, JobDef, Serializer, deserialize_job, serialize_job
from arq.utils import to_ms, to_unix_ms
from redis.asyncio import Redis, RedisCluster
from redis.asyncio.sentinel import Sentinel
from redis.exceptions import RedisError

from ..due import LATEST_DUE, seconds_to_micros, to_micros
from ..errors import JobExists, OutcomeUnknown
from ..jobs import Job as WaitingJob
from ..jobs import State
from ..redis import commands
from ..redis.aio import AsyncDelayQueue, execute
from ..redis.commands import Call, Extras
from ..redis.connect import client_options, try_seconds
from ..redis.verbs import Steps
from .job import DelayJob
from .releasing import Deferred, script
from .settings import (
    EXPIRES_PREFIX,
    DelaySettings,
    channel,
    in_progress_key_prefix,
    job_key_prefix,
    result_key_prefix,
    retry_key_prefix,
    same_redis,
)

__all__ = ["DelayArqRedis", "Wait", "create_pool", "native_enqueue", "refuse_cluster"]

T = TypeVar("T")
Seconds = int | float | timedelta
IfExists = Literal["keep", "replace"]
_CLOCK_AGE: Final = 30.0
_native: ContextVar[bool] = ContextVar("delayadapters_arq_native", default=False)


@contextmanager
def native_enqueue() -> Iterator[None]:
    """Inside it, ``enqueue_job`` is arq's own (cron, so that workers without us see the same ids)."""
    token = _native.set(True)
    try:
        yield
    finally:
        _native.reset(token)


class DelayArqRedis(ArqRedis):
    """arq's ``ArqRedis``; a job with ``_defer_by``/``_defer_until`` waits in a delay queue.

    Everything else is arq's. Arguments as for ``ArqRedis``, and:

    Args:
        delay_settings: :class:`DelaySettings`; default: wait on the same Redis.
    """

    def __init__(
        self,
        pool_or_conn: Any = None,
        job_serializer: Serializer | None = None,
        job_deserializer: Deserializer | None = None,
        default_queue_name: str = arq_queue_name,
        expires_extra_ms: int = arq_expires_extra_ms,
        *,
        delay_settings: DelaySettings | None = None,
        **kwargs: Any,
    ) -> None:
        if isinstance(pool_or_conn, RedisCluster):
            raise TypeError(_CLUSTER)
        if delay_settings is not None and not isinstance(delay_settings, DelaySettings):
            raise TypeError(f"delay_settings must be a DelaySettings, got {delay_settings!r}")
        super().__init__(
            pool_or_conn,
            job_serializer=job_serializer,
            job_deserializer=job_deserializer,
            default_queue_name=default_queue_name,
            expires_extra_ms=expires_extra_ms,
            **kwargs,
        )
        self.delay_settings = delay_settings or DelaySettings()
        self._delay_queue: AsyncDelayQueue | None = None
        self._delay_direct = True
        self._delay_checked = False
        self._clock_offset = (0.0, float("-inf"))

    @classmethod
    def of(cls, redis: ArqRedis, delay_settings: DelaySettings | None = None) -> DelayArqRedis:
        """One on the same connection pool as arq's, with the same serializers and defaults."""
        if isinstance(redis, DelayArqRedis):
            return redis
        if not isinstance(redis, ArqRedis):
            raise TypeError(f"redis must be arq's ArqRedis, got {redis!r}; create it with create_pool")
        made = cls(
            redis.connection_pool,
            job_serializer=redis.job_serializer,
            job_deserializer=redis.job_deserializer,
            default_queue_name=redis.default_queue_name,
            expires_extra_ms=redis.expires_extra_ms,
            delay_settings=delay_settings,
        )
        made.auto_close_connection_pool = redis.auto_close_connection_pool
        return made

    # ------------------------------------------------------------ the delay queue

    @property
    def delay_queue(self) -> AsyncDelayQueue:
        """The queue in which deferred jobs wait."""
        if self._delay_queue is None:
            settings = self.delay_settings
            client = _client_of(settings.redis, settings.timeout)
            if client is None or same_redis(client.connection_pool, self.connection_pool):
                client = Redis(connection_pool=self.connection_pool)
            else:
                self._delay_direct = False
            queue = AsyncDelayQueue(client, name=settings.name, shards=settings.shards, max_payload=None)
            queue._bound = settings.timeout
            self._delay_queue = queue
        return self._delay_queue

    @property
    def delay_direct(self) -> bool:
        """Whether jobs wait on arq's own Redis: then a release is one step, exactly once."""
        return self.delay_queue is not None and self._delay_direct

    async def delayed(self, steps: Steps[T]) -> T:
        """Runs a verb of the delay queue within ``DelaySettings.timeout`` seconds."""
        if not self._delay_checked:
            await refuse_cluster(self)
            self._delay_checked = True
        timeout = self.delay_settings.timeout
        try:
            return await _within(self.delay_queue._run(steps), timeout + 1)
        except asyncio.TimeoutError as error:
            raise OutcomeUnknown(
                f"no answer from the delay queue's Redis within timeout={timeout} s; it may have been carried out. "
                "Try again with the same _job_id"
            ) from error

    async def on_arq(self, call: Call[T]) -> T:
        """Runs one of our scripts on arq's Redis; raises redis-py's errors, as arq does."""
        reply: Any = await execute(self, call)
        return call.parse(reply)

    async def server_ms(self) -> float:
        """The Redis server's clock, milliseconds since the epoch: asked every 30 s."""
        offset, at = self._clock_offset
        now = time.time()
        if not 0 <= now - at < _CLOCK_AGE:
            seconds, micros = await self.time()
            after = time.time()
            offset = seconds + micros / 1e6 - (now + after) / 2
            self._clock_offset = (offset, after)
        return (time.time() + offset) * 1000

    def local_micros(self) -> int:
        """This machine's clock, microseconds since the epoch."""
        return time.time_ns() // 1000

    # ------------------------------------------------------------ enqueue

    async def enqueue_job(
        self,
        function: str,
        *args: Any,
        _job_id: str | None = None,
        _queue_name: str | None = None,
        _defer_until: datetime | None = None,
        _defer_by: Seconds | None = None,
        _expires: Seconds | None = None,
        _job_try: int | None = None,
        _if_exists: IfExists = "keep",
        **kwargs: Any,
    ) -> DelayJob | None:
        """Enqueue a job: arq's arguments, with arq's meaning for each, and one more.

        A deferred job's payload lives as long as it waits. From its release on, ``expires_extra_ms`` counts, unless
        ``_expires`` was given: that counts from this call, and a job due later is recorded as expired at its due time.

        Args:
            _if_exists: what becomes of a job with this ``_job_id``. ``"keep"`` (arq's rule): while it waits, is
                queued, runs, or its result is kept, the answer is None. ``"replace"`` (debounce): the new one takes the
                place of a waiting, queued or finished job, in one step; only while it runs is the answer None.

        Returns:
            The job; None when the id is taken.

        Raises:
            RuntimeError: both ``_defer_until`` and ``_defer_by``, or Redis Cluster.
            TypeError, ValueError: naming the argument.
            arq.jobs.SerializationError: the arguments cannot be serialized.
            RedisFault: a deferred job was not stored (:class:`~delayadapters.OutcomeUnknown`: perhaps).
        """
        if _native.get():
            native: Any = await super().enqueue_job(
                function,
                *args,
                _job_id=_job_id,
                _queue_name=_queue_name,
                _defer_until=_defer_until,
                _defer_by=_defer_by,
                _expires=_expires,
                _job_try=_job_try,
                **kwargs,
            )
            return native and self._job(native.job_id, native._queue_name)
        if _if_exists not in ("keep", "replace"):
            raise ValueError(f'_if_exists must be "keep" or "replace", got {_if_exists!r}')
        if _defer_until and _defer_by:
            raise RuntimeError("use either 'defer_until' or 'defer_by' or neither, not both")
        queue = self.default_queue_name if _queue_name is None else _queue_name
        job_id = _job_id or uuid4().hex
        expires = _expires_ms(_expires)
        micros = self.local_micros()
        now = micros // 1000
        wait = Wait.of(_defer_until, _defer_by, micros)
        payload = serialize_job(function, args, kwargs, _job_try, now, serializer=self.job_serializer)
        if wait is None and _if_exists == "keep":
            score = to_unix_ms(_defer_until) if _defer_until is not None else now + min(0, to_ms(_defer_by) or 0)
            if not await self._enqueue_now(job_id, queue, score, payload, expires, named=_job_id is not None):
                return None
        else:
            limit = None if expires is None else round(await self.server_ms() + expires)
            job = Deferred(function, queue, self._extra_ms(), limit)
            if not await self._defer(job_id, job, payload, wait or Wait(0, None), _if_exists):
                return None
        return self._job(job_id, queue)

    def _job(self, job_id: str, queue: str) -> DelayJob:
        return DelayJob(job_id, self, _queue_name=queue, _deserializer=self.job_deserializer)

    def _extra_ms(self) -> int:
        extra: int = self.expires_extra_ms
        if extra <= 0:
            raise ValueError(
                f"expires_extra_ms must be positive milliseconds, got {extra!r}: "
                "a job would expire the moment it is due"
            )
        return extra

    async def _enqueue_now(
        self, job_id: str, queue: str, score: int, payload: bytes, expires: int | None, *, named: bool
    ) -> bool:
        if named and not self.delay_direct and await self.waiting(job_id) is not None:
            return False
        one = script("enqueue")
        keys = self.delay_queue._verbs._of(job_id.encode())
        bound = one.bind(
            keys,
            now="",
            call=commands.token() if _repeats(self.connection_pool) else "",
            job=job_key_prefix + job_id,
            result=result_key_prefix + job_id,
            expires=EXPIRES_PREFIX + job_id,
            queue=queue,
            channel=channel(self.delay_settings.name, queue),
            id=job_id,
            score=score,
            payload=payload,
            ttl=self._extra_ms() if expires is None else expires,
            limit="" if expires is None else "1",
        )
        return await self.on_arq(Call(one, *bound, lambda reply: int(reply) == 1, keys))

    async def _defer(self, job_id: str, job: Deferred, payload: bytes, wait: Wait, if_exists: IfExists) -> bool:
        """Stores it, or answers False: the id is taken."""
        arq_keys = [prefix + job_id for prefix in (job_key_prefix, result_key_prefix)]
        in_progress = in_progress_key_prefix + job_id
        extras = Extras(unless=arq_keys)
        clear = _clearing(job_id, job.queue)
        if if_exists == "replace":
            extras = Extras(unless=[in_progress], alongside=clear)
        if not self.delay_direct:
            if await self.exists(*([in_progress] if if_exists == "replace" else arq_keys)):
                return False
            extras = Extras()
        mode: Literal["error", "replace"] = "replace" if if_exists == "replace" else "error"
        if not await self.store(job_id, job, payload, wait, mode, extras):
            return False
        if if_exists == "replace" and not self.delay_direct:
            # Two Redis, so two steps: in this order a crash between them leaves two jobs, never none.
            async with self.pipeline(transaction=True) as pipe:
                for command in clear:
                    pipe.execute_command(*command)
                await pipe.execute()
        return True

    async def store(
        self,
        job_id: str,
        job: Deferred,
        payload: bytes,
        wait: Wait,
        mode: Literal["error", "replace"],
        extras: Extras,
    ) -> bool:
        """Puts a job into the delay queue; False: ``mode`` or ``extras`` say no."""
        direct = self.delay_direct
        steps = self.delay_queue._verbs.schedule(
            payload,
            wait.delay,
            wait.at,
            job_id,
            job.meta if direct else job.full_meta,
            mode,
            job.commands(self.delay_settings.name) if direct else None,
            extras,
        )
        try:
            await self.delayed(steps)
        except JobExists:
            return False
        return True

    # ------------------------------------------------------------ looking

    async def waiting(self, job_id: str) -> WaitingJob | None:
        """The job while it waits or is being released, else None."""
        job = await self.delayed(self.delay_queue._verbs.get(job_id))
        return job if job is not None and job.state in (State.WAITING, State.LEASED) else None

    async def queued_jobs(self, *, queue_name: str | None = None) -> list[JobDef]:
        """The jobs of an arq queue, waiting ones included, by due time. One that goes meanwhile is left out."""
        name = self.default_queue_name if queue_name is None else queue_name
        found: dict[str, JobDef] = {}
        # Ours first: a job that is released meanwhile is then found in arq's queue.
        cursor: str | None = None
        while True:
            page = await self.delayed(self.delay_queue._verbs.page("due", None, 500, cursor))
            for job in page.jobs:
                if job.meta.get("queue", arq_queue_name) == name:
                    found[job.id] = self._job_def(job.id, job.payload, job.due // 1000)
            cursor = page.cursor
            if cursor is None:
                break
        rows = await self.zrange(name, 0, -1, withscores=True)
        for at in range(0, len(rows), 500):
            chunk = [(raw.decode(), int(score)) for raw, score in rows[at : at + 500]]
            values = await self.mget([job_key_prefix + job_id for job_id, _ in chunk])
            for (job_id, score), value in zip(chunk, values, strict=True):
                if value is not None:
                    found[job_id] = self._job_def(job_id, value, score)
        return sorted(found.values(), key=lambda job: job.score or 0)

    def _job_def(self, job_id: str, payload: bytes, score: int) -> JobDef:
        job: JobDef = deserialize_job(payload, deserializer=self.job_deserializer)
        job.score, job.job_id = score, job_id
        return job

    # ------------------------------------------------------------ life

    async def close_delay(self) -> None:
        """Closes what the delay queue has of its own; arq's pool stays open."""
        queue, self._delay_queue = self._delay_queue, None
        if queue is not None and queue.client.connection_pool is not self.connection_pool:
            await queue.client.aclose()
            # redis-py leaves a Sentinel's own connections to the garbage collector.
            for sentinel in getattr(getattr(queue.client.connection_pool, "sentinel_manager", None), "sentinels", ()):
                await sentinel.aclose()

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        await self.close_delay()
        await super().aclose(close_connection_pool)

    async def close(self, close_connection_pool: bool | None = None) -> None:
        """The same as ``aclose``."""
        await self.aclose(close_connection_pool)


async def create_pool(
    settings_: RedisSettings | None = None,
    *,
    retry: int = 0,
    job_serializer: Serializer | None = None,
    job_deserializer: Deserializer | None = None,
    default_queue_name: str = arq_queue_name,
    expires_extra_ms: int = arq_expires_extra_ms,
    delay_settings: DelaySettings | None = None,
) -> DelayArqRedis:
    """arq's ``create_pool`` (connecting with retries, as its settings say) for a :class:`DelayArqRedis`.

    Raises:
        RuntimeError: a Redis Cluster, which arq cannot use.
    """
    pool = await arq_create_pool(
        settings_,
        retry=retry,
        job_serializer=job_serializer,
        job_deserializer=job_deserializer,
        default_queue_name=default_queue_name,
        expires_extra_ms=expires_extra_ms,
    )
    made = DelayArqRedis.of(pool, delay_settings)
    try:
        await refuse_cluster(made)
    except RuntimeError:
        await made.aclose()
        raise
    made._delay_checked = True
    return made


_CLUSTER: Final = (
    "arq does not run on Redis Cluster (its keys have no common hash slot), so neither does this adapter: "
    "use a standalone Redis or Sentinel. The delay queue alone may live on a cluster only for other adapters"
)


async def refuse_cluster(redis: ArqRedis) -> None:
    """Raises RuntimeError when the server is part of a Redis Cluster."""
    try:
        info = await redis.info("server")
    except RedisError:
        return  # no permission for INFO: then nobody can tell
    if info.get("redis_mode") == "cluster":
        raise RuntimeError(_CLUSTER)


class Wait:
    """How long: ``delay`` from now on the server's clock, or ``at`` an instant."""

    __slots__ = ("at", "delay")

    def __init__(self, delay: Seconds | None, at: datetime | None) -> None:
        self.delay = delay
        self.at = at

    @classmethod
    def of(cls, until: datetime | None, by: Seconds | None, now: int) -> Wait | None:
        """None: not deferred (or due already, ``now`` being microseconds since the epoch). A naive ``until`` is local
        time, as in arq."""
        if until is not None:
            if not isinstance(until, datetime):
                raise TypeError(f"_defer_until must be a datetime, got {until!r}")
            until = until.astimezone() if until.utcoffset() is None else until
            micros = to_micros(until)
            if micros > LATEST_DUE:
                raise ValueError(f"_defer_until={until!r} is later than the year 2250")
            return cls(None, until) if micros > now else None
        if by is None:
            return None
        micros = seconds_to_micros(by, "_defer_by")
        if now + micros > LATEST_DUE:
            raise ValueError(f"_defer_by={by!r} would be due later than the year 2250")
        return cls(timedelta(microseconds=micros), None) if micros > 0 else None


if sys.version_info >= (3, 11):

    async def _within(work: Awaitable[T], seconds: float) -> T:
        async with asyncio.timeout(seconds):  # as wait_for, without a task for every call
            return await work

else:

    async def _within(work: Awaitable[T], seconds: float) -> T:
        return await asyncio.wait_for(work, seconds)


def _repeats(pool: Any) -> bool:
    """Whether the client itself sends a command again when its answer was lost (redis-py 5: when told to)."""
    options = pool.connection_kwargs
    return bool(options.get("retry") or options.get("retry_on_timeout") or options.get("retry_on_error"))


def _expires_ms(expires: Seconds | None) -> int | None:
    """Whole milliseconds; None and 0 are arq's "not given"."""
    if expires is None:
        return None
    millis = round(seconds_to_micros(expires, "_expires") / 1000)
    if millis < 0:
        raise ValueError(f"_expires must be a positive number of seconds or a timedelta, got {expires!r}")
    return millis or None


def _clearing(job_id: str, queue: str) -> Sequence[Sequence[str]]:
    """Commands that take a job out of arq's hands, unless it runs."""
    in_progress = in_progress_key_prefix + job_id
    return [
        ("DEL", *(p + job_id for p in (result_key_prefix, job_key_prefix, retry_key_prefix, EXPIRES_PREFIX))),
        # A worker that has just seen the id in the queue watches this key: touching it stops its transaction.
        ("SET", in_progress, "1"),
        ("DEL", in_progress),
        ("ZREM", queue, job_id),
    ]


def _client_of(redis: str | RedisSettings | None, timeout: float) -> Any:
    if redis is None:
        return None
    if isinstance(redis, str):
        return Redis.from_url(redis, **client_options(timeout, {}, asynchronous=True))
    if redis.sentinel:
        make: Any = Sentinel
        return make(sentinels=redis.host, ssl=redis.ssl, socket_timeout=try_seconds(timeout)).master_for(
            redis.sentinel_master,
            db=redis.database,
            username=redis.username,
            password=redis.password,
            **client_options(timeout, {}, asynchronous=True),
        )
    return Redis(
        host=redis.host,
        port=redis.port,
        db=redis.database,
        username=redis.username,
        password=redis.password,
        unix_socket_path=redis.unix_socket_path,
        socket_connect_timeout=redis.conn_timeout,
        ssl=redis.ssl,
        ssl_keyfile=redis.ssl_keyfile,
        ssl_certfile=redis.ssl_certfile,
        ssl_cert_reqs=redis.ssl_cert_reqs,
        ssl_ca_certs=redis.ssl_ca_certs,
        ssl_ca_data=redis.ssl_ca_data,
        ssl_check_hostname=redis.ssl_check_hostname,
        retry=redis.retry,
        retry_on_timeout=redis.retry_on_timeout,
        retry_on_error=redis.retry_on_error,
        max_connections=redis.max_connections,
    )
