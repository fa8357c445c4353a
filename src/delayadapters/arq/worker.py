"""arq's ``Worker`` with jobs on time: it releases what is due, wakes at once, and defers its retries with us."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

from arq.connections import log_redis_info
from arq.utils import timestamp_ms
from arq.worker import Worker
from redis.asyncio import Redis
from redis.exceptions import RedisError

from ..errors import OutcomeUnknown, RedisFault
from ..redis.commands import Call, Extras
from ..redis.connect import loop_client
from ..release.aio import AsyncReleaser
from .client import DelayArqRedis, Wait, create_pool, native_enqueue, refuse_cluster
from .releasing import ArqPublisher, Deferred, script
from .running import CURRENT, Run, ending, starting
from .settings import (
    EXPIRES_PREFIX,
    RETRY_TTL_MS,
    DelaySettings,
    channel,
    in_progress_key_prefix,
    job_key_prefix,
    retry_key_prefix,
)
from .waking import Listener

if TYPE_CHECKING:
    from ..metrics.serving import MetricsServer

__all__ = ["DelayWorker", "create_worker", "get_kwargs", "make_releaser", "release_jobs", "run_worker"]

log: Final = logging.getLogger("arq.worker")
HOSTED: Final = "delayadapters"
"""In ``ctx``: somebody runs a release loop in this worker."""
STOP_TIMEOUT: Final = 5.0
"""Seconds a stopping release loop has for the batch in its hands."""
_SPACING: Final = 0.002
"""Seconds between two polls that only a freed place called for."""
_SKEW: Final = 2000
"""Milliseconds by which a worker's clock may be behind the server's for a released job to be met exactly."""


class DelayWorker(Worker):
    """arq's worker; its arguments, and:

    Args:
        delay_settings: :class:`DelaySettings`; default: jobs wait on the same Redis.
        burst_deferred: in burst mode, wait for this queue's deferred jobs too, as arq does for its own. False: end as
            soon as arq's queue is empty.

    What it does otherwise than ``Worker``: it runs the release loop (unless ``DelaySettings.embed`` is False); it polls
    when jobs come or a place becomes free, besides every ``poll_delay``; a ``Retry(defer=…)`` waits in the delay queue.
    """

    _pool: Any
    on_job_start: Any
    on_job_end: Any
    tasks: dict[str, asyncio.Task[Any]]

    def __init__(
        self,
        functions: Sequence[Any] = (),
        *,
        delay_settings: DelaySettings | None = None,
        burst_deferred: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(functions, **kwargs)
        if delay_settings is not None and not isinstance(delay_settings, DelaySettings):
            raise TypeError(f"delay_settings must be a DelaySettings, got {delay_settings!r}")
        self.delay_settings = delay_settings
        self.burst_deferred = burst_deferred
        self.releaser: AsyncReleaser | None = None
        self.metrics: MetricsServer | None = None
        self._listener: Listener | None = None
        self._wake = asyncio.Event()
        self._told = self._started = False
        self._full = False
        self._unbegun: set[str] = set()
        self._taking_back: asyncio.Task[None] | None = None
        self.on_job_start = starting(self.on_job_start)
        self.on_job_end = ending(self.on_job_end)
        self._stopping: asyncio.Future[None] | None = None

    @property
    def pool(self) -> DelayArqRedis:
        pool: DelayArqRedis = self._pool
        return pool

    # ------------------------------------------------------------ the main loop

    async def main(self) -> None:
        """arq/worker.py, ``Worker.main``, with another way to wait between polls."""
        if self._pool is None:
            self._pool = await create_pool(
                self.redis_settings,
                job_deserializer=self.job_deserializer,
                job_serializer=self.job_serializer,
                default_queue_name=self.queue_name,
                expires_extra_ms=self.expires_extra_ms,
                delay_settings=self.delay_settings,
            )
        else:
            self._pool = DelayArqRedis.of(self._pool, self.delay_settings)
            await refuse_cluster(self._pool)
        log.info("Starting worker for %d functions: %s", len(self.functions), ", ".join(self.functions))
        await log_redis_info(self.pool, log.info)
        self.ctx["redis"] = self.pool
        self.ctx[HOSTED] = True
        if self.on_startup:
            await self.on_startup(self.ctx)
        try:
            await self._start_delay()
            await self._poll_until_done()
        finally:
            await self._stop_delay()

    async def _poll_until_done(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            began = clock()
            self._wake.clear()
            told, self._told, self._started = self._told, False, False
            await self._poll_iteration()
            if told and not self._started:
                await self._meet_the_next()
            if self.burst and await self._burst_is_over():
                await asyncio.gather(*self.tasks.values())
                return
            await self._sleep(max(0.0, self.poll_delay_s - (clock() - began)))

    async def _burst_is_over(self) -> bool:
        if 0 <= self.max_burst_jobs <= self._jobs_started():
            return True
        if await self.pool.zcard(self.queue_name) > 0:
            return False
        return not (self.burst_deferred and await self._deferred_ones_wait())

    async def _deferred_ones_wait(self) -> bool:
        """Whether a job of this worker's queue waits, or came into arq's queue just now."""
        verbs, cursor = self.pool.delay_queue._verbs, None
        while True:
            page = await self.pool.delayed(verbs.page("due", None, 500, cursor))
            if any(job.meta.get("queue") == self.queue_name for job in page.jobs):
                return True
            if page.cursor is None:
                break
            cursor = page.cursor
        if not self.pool.delay_direct and (await self.pool.delayed(verbs.stats())).leased:
            return True
        return bool(await self.pool.zcard(self.queue_name))

    async def _sleep(self, seconds: float) -> None:
        """Until the next poll is due, or something wakes us. Always lets other tasks run."""
        if seconds <= 0 or self._wake.is_set():
            await asyncio.sleep(0)
            return
        timer = asyncio.get_running_loop().call_later(seconds, self._wake.set)
        try:
            await self._wake.wait()
        finally:
            timer.cancel()

    def _be_told(self) -> None:
        self._told = True
        self._wake.set()

    async def _meet_the_next(self) -> None:
        """A job whose score lies just ahead of this machine's clock (the server's is the one that counts for its
        release) would wait for a whole poll: come back at its time."""
        now = timestamp_ms()
        rows = await self.pool.zrangebyscore(self.queue_name, now + 1, now + _SKEW, 0, 1, withscores=True)
        if rows:
            asyncio.get_running_loop().call_later((rows[0][1] - now) / 1000, self._wake.set)

    # ------------------------------------------------------------ polling

    async def _poll_iteration(self) -> None:
        # Decided now, not after the poll: what runs may end while the poll still waits for Redis, and nobody would come
        # back for what was left behind.
        self._full = self.job_counter >= self.max_jobs
        await super()._poll_iteration()

    async def start_jobs(self, job_ids: list[bytes]) -> None:
        """arq/worker.py, ``Worker.start_jobs``, in one round trip instead of four a job.

        The ids that run here stay in arq's queue meanwhile, and need no question.
        """
        ids = [job_id for job_id in job_ids if job_id.decode() not in self.job_tasks]
        free = self.max_jobs - self.job_counter
        if not ids:
            return
        if free <= 0:
            self._full = True
            return
        for job_id, score in await self._mark(ids, free):
            await self.sem.acquire()
            self.job_counter += 1
            self._unbegun.add(job_id)
            task = self.loop.create_task(self.run_job(job_id, score))
            task.add_done_callback(lambda _: self._release_sem_dec_counter_on_complete())
            self.tasks[job_id] = task
            self._started = True
            free -= 1
        if free == 0:
            # There may be more, left for want of a place; one may have become free meanwhile.
            if self.job_counter < self.max_jobs:
                self._wake.set()
            else:
                self._full = True

    async def _mark(self, ids: list[bytes], free: int) -> list[tuple[str, int]]:
        """The jobs to start, marked as in progress. The end of a worker leaves no mark on one that it did not start:
        nobody else could run it until the mark has passed."""
        asked = asyncio.ensure_future(self.pool.on_arq(self._start_call(ids, free)))
        try:
            return await asyncio.shield(asked)
        except asyncio.CancelledError:
            self._taking_back = self.loop.create_task(self._take_back(asked))  # close() waits for it
            raise

    async def _take_back(self, asked: asyncio.Future[list[tuple[str, int]]]) -> None:
        with contextlib.suppress(RedisError, OSError):
            await self._unmark(*(job_id for job_id, _ in await asked))

    async def _unmark(self, *job_ids: str) -> None:
        if job_ids:
            await self.pool.delete(*(in_progress_key_prefix + job_id for job_id in job_ids))

    def _start_call(self, ids: list[bytes], free: int) -> Call[list[tuple[str, int]]]:
        def parse(reply: list[bytes]) -> list[tuple[str, int]]:
            return [(reply[i].decode(), int(float(reply[i + 1]))) for i in range(0, len(reply), 2)]

        one = script("start")
        keys = self.pool.delay_queue._verbs.shards[0]
        bound = one.bind(
            keys,
            ids,
            queue=self.queue_name,
            prefix=in_progress_key_prefix,
            now=timestamp_ms(),
            ttl=int(self.in_progress_timeout_s * 1000),
            free=free,
        )
        return Call(one, *bound, parse, keys)

    def _release_sem_dec_counter_on_complete(self) -> None:
        super()._release_sem_dec_counter_on_complete()
        if self._full:
            # The last poll may have left jobs behind for want of a place.
            self._full = False
            asyncio.get_running_loop().call_later(_SPACING, self._wake.set)

    async def run_cron(self, *args: Any, **kwargs: Any) -> None:
        """Cron stays arq's own: a stock worker on this queue must find the same ids."""
        soon = [job.next_run for job in self.cron_jobs]
        with native_enqueue():
            await super().run_cron(*args, **kwargs)
        for before, job in zip(soon, self.cron_jobs, strict=True):
            if before is not None and job.next_run != before:
                seconds = before.timestamp() - timestamp_ms() / 1000
                if 0 < seconds < 5:
                    asyncio.get_running_loop().call_later(seconds + 0.001, self._wake.set)

    # ------------------------------------------------------------ retries

    async def run_job(self, job_id: str, score: int) -> None:
        """arq's, which the worker's end ends well: see :mod:`~delayadapters.arq.running`."""
        self._unbegun.discard(job_id)
        run = Run(job_id, score)
        task = self.loop.create_task(self._run(run))
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            await run.end(task)
            error = "cancelled" if task.cancelled() else task.exception()
            if error is not None:
                log.warning("the end of job %s could not be written, it may run again: %s", job_id, error)

    async def _run(self, run: Run) -> None:
        CURRENT.set(run)
        try:
            await super().run_job(run.job_id, run.score)
        except asyncio.CancelledError:
            if run.begun:
                raise
            with contextlib.suppress(RedisError, OSError):
                await self._give_back(run.job_id)

    async def _give_back(self, job_id: str) -> None:
        """A job that has not begun: its try is not used, and whoever comes next may run it."""
        tries = await self.pool.incrby(retry_key_prefix + job_id, -1)
        keys = [retry_key_prefix + job_id] if tries <= 0 else []
        await self.pool.delete(*keys, in_progress_key_prefix + job_id)

    async def finish_job(
        self,
        job_id: str,
        finish: bool,
        result_data: bytes | None,
        result_timeout_s: float | None,
        keep_result_forever: bool,
        incr_score: int | None,
        keep_in_progress: float | None,
    ) -> None:
        run, moved = CURRENT.get(), False
        if incr_score and not finish and keep_in_progress is None and run is not None:
            try:
                moved = await self._defer_retry(job_id, run.score + incr_score)
            except RedisFault as error:
                if isinstance(error, OutcomeUnknown) and self.pool.delay_direct:
                    raise  # perhaps moved; what is left in arq's queue runs again when its in-progress key has passed
                log.warning("the retry of job %s is left to arq: %s", job_id, error)
        if not moved:
            await super().finish_job(
                job_id, finish, result_data, result_timeout_s, keep_result_forever, incr_score, keep_in_progress
            )

    async def _defer_retry(self, job_id: str, due_ms: int) -> bool:
        """Moves a running job from arq's queue into ours, in one step on one Redis. False: leave it to arq.

        arq computed ``due_ms`` as raise + defer, on this machine's clock; what is left of it counts from now on the
        server's. The payload's life begins anew at release, unless ``_expires`` set its end.
        """
        pool = self.pool
        async with pool.pipeline(transaction=True) as pipe:
            pipe.mget(job_key_prefix + job_id, retry_key_prefix + job_id, EXPIRES_PREFIX + job_id)
            pipe.zscore(self.queue_name, job_id)
            (payload, tries, limit), score = await pipe.execute()
        if payload is None or score is None or pool.expires_extra_ms <= 0:
            return False  # expired while it ran, or ended elsewhere: arq records it
        left = self._left(job_id, due_ms)
        job = Deferred(
            self._function_of(payload),
            self.queue_name,
            pool.expires_extra_ms,
            None if limit is None else int(limit),
            None if tries is None else int(tries),
        )
        job_key, in_progress = job_key_prefix + job_id, in_progress_key_prefix + job_id
        # The removal from the queue comes last: should one of these be refused, the job is still there.
        keep = [("PEXPIRE", retry_key_prefix + job_id, str(left + RETRY_TTL_MS))]
        if limit is None:
            keep.append(("PEXPIRE", job_key, str(left + pool.expires_extra_ms)))
        remove = [("DEL", in_progress), ("ZREM", self.queue_name, job_id)]
        extras = Extras(expect=[(("ZSCORE", self.queue_name, job_id), f"{score:.17g}")], alongside=[*keep, *remove])
        if pool.delay_direct:
            return await pool.store(job_id, job, payload, Wait(left / 1000, None), "replace", extras)
        # Two Redis, so two steps: in this order a crash between them leaves two jobs under one id, never none.
        await pool.store(job_id, job, payload, Wait(left / 1000, None), "replace", Extras())
        async with pool.pipeline(transaction=True) as pipe:
            for command in (*keep, *remove):
                pipe.execute_command(*command)
            await pipe.execute()
        return True

    def _left(self, job_id: str, due_ms: int) -> int:
        """How many milliseconds a retry waits from now on, by this machine's clock; never too few."""
        left: int = max(0, due_ms - timestamp_ms() + 1)
        return left

    def _function_of(self, payload: bytes) -> str:
        from arq.jobs import deserialize_job_raw

        function: str = deserialize_job_raw(payload, deserializer=self.job_deserializer)[0]
        return function

    # ------------------------------------------------------------ the release loop

    async def close(self) -> None:
        """arq's ``close``, after the main loop and the release loop have ended."""
        if not self._handle_signals and self.main_task is not None and not self.main_task.done():
            self.main_task.cancel()
            await asyncio.wait({self.main_task})
        await self._stop_delay()
        if self._pool is not None:
            await self._end_jobs()
        await super().close()

    async def _end_jobs(self) -> None:
        if self._taking_back is not None:
            await self._taking_back
            self._taking_back = None
        if not self._handle_signals:  # else the signal's handler has cancelled them, or lets them be
            for task in self.tasks.values():
                task.cancel()
        if self.tasks:
            await asyncio.wait(self.tasks.values())
        # Cancelled before their first step.
        self.tasks = {job_id: task for job_id, task in self.tasks.items() if not task.cancelled()}
        unbegun, self._unbegun = self._unbegun, set()
        await self._unmark(*unbegun)

    async def _start_delay(self) -> None:
        self._stopping = None
        settings = self.pool.delay_settings
        self._listener = Listener(self.pool.connection_pool, channel(settings.name, self.queue_name), self._be_told)
        self._listener.start()
        if settings.embed:
            self.releaser = make_releaser(self.pool)
            await self.releaser.start()
        if (port := settings.metrics_port) is not None:
            from ..metrics.serving import serve_beside

            self.metrics = serve_beside(self.pool.delay_queue, self.releaser, port=port, host=settings.metrics_host)

    async def _stop_delay(self) -> None:
        """Once, however many wait for it (``main`` ends, and ``close`` is called)."""
        if self._stopping is None:
            self._stopping = asyncio.ensure_future(self._stop_now())
        await asyncio.shield(self._stopping)

    async def _stop_now(self) -> None:
        if self.metrics is not None:
            await asyncio.to_thread(self.metrics.stop)
            self.metrics = None
        if self.releaser is not None:
            await stop_releaser(self.releaser)
        if self._listener is not None:
            await self._listener.stop()
        self.releaser = self._listener = None


_clients: WeakKeyDictionary[AsyncReleaser, Any] = WeakKeyDictionary()


def make_releaser(redis: DelayArqRedis) -> AsyncReleaser:
    """The release loop of a client's delay queue, not started; on connections of its own."""
    client = loop_client(Redis(connection_pool=redis.connection_pool))
    publisher = ArqPublisher(
        client, redis.delay_settings.name, queue=redis.default_queue_name, expires_ms=redis.expires_extra_ms
    )
    releaser = AsyncReleaser(redis.delay_queue, publisher, lease=redis.delay_settings.lease)
    if client.connection_pool is not redis.connection_pool:
        _clients[releaser] = client
    return releaser


async def stop_releaser(releaser: AsyncReleaser) -> None:
    """Stops what :func:`make_releaser` made, and closes its connections."""
    await releaser.stop(STOP_TIMEOUT)
    client = _clients.pop(releaser, None)
    if client is not None:
        await client.aclose(close_connection_pool=True)


async def release_jobs(redis: DelayArqRedis) -> None:
    """Runs the release loop until cancelled: for a process of your own, where workers do not (``embed=False``)."""
    releaser = make_releaser(redis)
    metrics = serve_metrics(redis, releaser)
    try:
        await releaser.run()
    finally:
        if metrics is not None:
            await asyncio.to_thread(metrics.stop)
        await stop_releaser(releaser)


def serve_metrics(redis: DelayArqRedis, releaser: AsyncReleaser | None) -> MetricsServer | None:
    """Serves metrics where the client's settings name a port."""
    settings = redis.delay_settings
    if settings.metrics_port is None:
        return None
    from ..metrics.serving import serve

    return serve(redis.delay_queue, releaser, port=settings.metrics_port, host=settings.metrics_host)


# ---------------------------------------------------------------- from WorkerSettings


def get_kwargs(settings_cls: Any) -> dict[str, Any]:
    """What a ``WorkerSettings`` class (its own attributes, as arq has it) or a dict says about a worker."""
    own = settings_cls if isinstance(settings_cls, dict) else settings_cls.__dict__
    known = {*inspect.signature(Worker).parameters, *inspect.signature(DelayWorker).parameters} - {"kwargs"}
    return {key: value for key, value in own.items() if key in known}


def create_worker(settings_cls: Any, **kwargs: Any) -> DelayWorker:
    """A :class:`DelayWorker` as a ``WorkerSettings`` says; ``kwargs`` win."""
    return DelayWorker(**{**get_kwargs(settings_cls), **kwargs})


def run_worker(settings_cls: Any, **kwargs: Any) -> DelayWorker:
    """arq's ``run_worker`` for a :class:`DelayWorker`: blocks until it has ended."""
    worker = create_worker(settings_cls, **kwargs)
    worker.run()
    return worker
