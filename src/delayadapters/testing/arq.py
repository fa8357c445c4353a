"""arq's deferred jobs without Redis, worker process or waiting.

::

    async def test_reminder(delayed_arq):
        delayed = delayed_arq(WorkerSettings)
        await delayed.redis.enqueue_job("remind", "drink", _defer_by=60)
        delayed.assert_scheduled("remind", delay=60, args=["drink"])
        await delayed.advance(60)    # remind has run

Without pytest: ``async with DelayedArq(WorkerSettings) as delayed: …``.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from datetime import datetime
from functools import wraps
from types import TracebackType
from typing import Any, Final, NoReturn, TypeVar

from arq.constants import abort_jobs_ss, default_queue_name, in_progress_key_prefix, job_key_prefix, result_key_prefix
from arq.jobs import deserialize_job, deserialize_job_raw, deserialize_result
from arq.worker import JobExecutionFailed, Retry
from redis.asyncio import ConnectionPool
from redis.asyncio.client import Pipeline

from ..arq.client import DelayArqRedis
from ..arq.job import DelayJob
from ..arq.worker import HOSTED, DelayWorker, get_kwargs
from ..clock import ManualClock
from ..due import Delay
from ..jobs import Claim, Job, State
from ..redis.aio import AsyncDelayQueue
from ..redis.commands import Call
from .delayed import Delayed
from .errors import warn_if_passed
from .jobs import ScheduledJob, span
from .keys import Keyspace, NotSimulated
from .verbs import NAME, NoRedis, at_once

__all__ = ["DelayedArq", "MemoryArqRedis"]

T = TypeVar("T")
_NOT_OURS: Final = ("redis_settings", "redis_pool", "cron_jobs", "handle_signals", "ctx", "delay_settings", "burst")


class DelayedArq(Delayed):
    """arq's deferred jobs in memory, and the worker that runs them.

    arq's broker is Redis, so there is a stand-in for its pool: :attr:`redis`. Hand it to the code under test, as what
    ``create_pool`` would have made (or put :meth:`create_pool` in place of that). The jobs run here, on the test's
    event loop, one after another, by arq's own worker code: ``ctx`` with ``job_id``, ``job_try`` and so on, the job
    hooks, ``Retry``, ``max_tries``, time-outs, results and how long they are kept (on the test's clock), unique job
    ids, ``abort``. A job that is not deferred runs before ``enqueue_job`` returns or, enqueued by a job, after that.

    Not simulated: cron jobs, concurrency, other queues than the worker's (their jobs are released, and stay there),
    and any use of Redis but arq's own: it raises NotSimulated.

    ``async with`` runs the settings' ``on_startup`` and ``on_shutdown``; otherwise they are not run.

    Args:
        settings: a ``WorkerSettings`` class or dict, decorated with ``@delayed`` or not; or a list of functions.
        clock: a ManualClock to share with others; default: a new one.
        ctx: what else jobs find in their ``ctx``.
        release_to: run nothing. Every job is enqueued in this pool (arq's, or a mock of it) when it is due, with its
            id; one that is not deferred, at once.
        propagate: what a job raises for good (no retry of it follows), ``advance`` raises once the clock has arrived;
            for a job that was not deferred, ``enqueue_job``. False: it only is in the job's result.
    """

    def __init__(
        self,
        settings: Any,
        *,
        clock: ManualClock | None = None,
        ctx: Mapping[Any, Any] | None = None,
        release_to: Any = None,
        propagate: bool = True,
    ) -> None:
        if isinstance(settings, (list, tuple)):
            settings = {"functions": settings}
        if not isinstance(settings, (type, dict)):
            raise TypeError(
                f"delayed_arq takes a WorkerSettings class or dict or a list of functions, got {settings!r}"
            )
        if release_to is not None and not callable(getattr(release_to, "enqueue_job", None)):
            raise TypeError(f"release_to must be an arq pool (something with enqueue_job), got {release_to!r}")
        clock = clock or ManualClock()
        self._keys = Keyspace(clock)
        super().__init__(clock, self._keys)
        self._settings = {key: value for key, value in get_kwargs(settings).items() if key not in _NOT_OURS}
        self._queue_name: str = self._settings.get("queue_name") or default_queue_name
        self.redis = MemoryArqRedis(self, self._keys, self._settings)
        """Stands in for arq's pool."""
        self.ctx: dict[Any, Any] = {**(ctx or {}), "redis": self.redis, HOSTED: True}
        """What jobs find in their ``ctx``."""
        self._release_to = release_to
        self._propagate = propagate
        self._worker: _Worker | None = None
        self._running = False
        self._errors: list[BaseException] = []

    # ------------------------------------------------------------ the test's side

    async def create_pool(self, *_: Any, **__: Any) -> MemoryArqRedis:
        """In place of ``create_pool``, whatever its arguments: answers :attr:`redis`."""
        return self.redis

    async def advance(self, seconds: Delay) -> list[ScheduledJob]:
        """Moves the clock by ``seconds`` (or a timedelta), and releases each job at its due time, in due order: also
        those that are scheduled on the way. Answers what was released.

        Raises:
            Exception: what a job raised, with ``propagate``; of several the first.
        """
        done: list[ScheduledJob] = []
        with contextlib.closing(self._falling_due(seconds)) as claims:
            for claim in claims:
                self._verbs.release(claim)
                done.append(self._done(claim))
                await self._drain()
        self._raise_errors()
        return done

    async def advance_to_next(self) -> list[ScheduledJob]:
        """:meth:`advance` to when the next job is due, and no further. [] when nothing waits."""
        left = self._span_to_next()
        return [] if left is None else await self.advance(left)

    def _read(self, job: Job | Claim) -> tuple[str, Any, Any, str]:
        found = deserialize_job(job.payload, deserializer=self.redis.job_deserializer)
        return found.function, found.args, found.kwargs, job.id

    def _undo(self) -> None:
        """Nothing was changed: whoever has :attr:`redis` still has it, and can look at results."""

    async def __aenter__(self) -> DelayedArq:
        if (startup := self._settings.get("on_startup")) is not None:
            await startup(self.ctx)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if (shutdown := self._settings.get("on_shutdown")) is not None:
            await shutdown(self.ctx)
        self.undo()

    # ------------------------------------------------------------ in place of a worker

    async def arrived(self) -> None:
        """A job was enqueued."""
        if self._over:
            raise RuntimeError("this helper was undone; it runs no more jobs")
        if not self._running:
            await self._drain()
            if not self._advancing:
                self._raise_errors()

    async def _drain(self) -> None:
        """Runs what arq's queue holds, until there is nothing."""
        if self._running:
            return
        self._running = True
        try:
            if self._release_to is not None:
                await self._hand_over()
                return
            while rows := self._keys.ready(self._queue_name):
                await self._run(*rows[0])
        finally:
            self._running = False

    async def _run(self, job_id: str, score: int) -> None:
        if self._worker is None:
            self._worker = _Worker(redis_pool=self.redis, ctx=self.ctx, handle_signals=False, **self._settings)
        worker = self._worker
        self._keys.run(("PSETEX", in_progress_key_prefix + job_id, int(worker.in_progress_timeout_s * 1000), b"1"))
        failed = worker.jobs_failed
        task = asyncio.ensure_future(worker.run_job(job_id, score))
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            task.cancel()  # the test's own: arq would only have the job run again
            await asyncio.wait({task})
            raise
        if worker.jobs_failed > failed and self._propagate:
            self._errors.append(worker.raised.pop(job_id) if job_id in worker.raised else self._kept_error(job_id))

    def _kept_error(self, job_id: str) -> Any:
        """Why arq itself failed a job: too many tries, no such function, …"""
        kept = self._keys.run(("GET", result_key_prefix + job_id))
        if kept is not None:
            result = deserialize_result(kept, deserializer=self.redis.job_deserializer).result
            if isinstance(result, Exception):
                return result
        return JobExecutionFailed(f"job {job_id} failed; arq's log says why")

    async def _hand_over(self) -> None:
        for queue in self._keys.sorted_sets():
            for job_id, _ in self._keys.ready(queue) if queue != abort_jobs_ss else ():
                payload = self._keys.run(("GET", job_key_prefix + job_id))
                self._keys.run(("ZREM", queue, job_id))
                self._keys.run(("DEL", job_key_prefix + job_id))
                if payload is None:
                    continue  # expired
                function, args, kwargs, tries, _ = deserialize_job_raw(
                    payload, deserializer=self.redis.job_deserializer
                )
                options = {"_job_id": job_id, "_queue_name": queue, "_job_try": tries}
                await self._release_to.enqueue_job(function, *args, **options, **kwargs)

    def _raise_errors(self) -> None:
        errors, self._errors = self._errors, []
        if errors:
            raise errors[0]


class MemoryArqRedis(DelayArqRedis):
    """Stands in for a :class:`DelayArqRedis`: same calls, no Redis."""

    def __init__(self, delayed: DelayedArq, keys: Keyspace, settings: Mapping[str, Any]) -> None:
        super().__init__(
            _NoPool(),
            job_serializer=settings.get("job_serializer"),
            job_deserializer=settings.get("job_deserializer"),
            default_queue_name=settings.get("queue_name") or default_queue_name,
            **({"expires_extra_ms": settings["expires_extra_ms"]} if settings.get("expires_extra_ms") else {}),
        )
        self._delayed = delayed
        self._keys = keys
        queue = AsyncDelayQueue(NoRedis(), name=NAME, max_payload=None)
        queue._verbs = delayed._verbs
        self._delay_queue = queue

    async def enqueue_job(self, function: str, *args: Any, **kwargs: Any) -> DelayJob | None:
        until = kwargs.get("_defer_until")
        if isinstance(until, datetime):
            warn_if_passed(until.astimezone() if until.utcoffset() is None else until, self._delayed.clock, function)
        job = await super().enqueue_job(function, *args, **kwargs)
        await self._delayed.arrived()
        return job

    def _job(self, job_id: str, queue: str) -> DelayJob:
        return _Job(job_id, self, _queue_name=queue, _deserializer=self.job_deserializer)

    def local_micros(self) -> int:
        return self._delayed.clock.micros

    async def server_ms(self) -> float:
        return self._delayed.clock.micros / 1000

    async def close_delay(self) -> None:
        """Nothing to close; what waits is still there for the test."""

    # ------------------------------------------------------------ Redis

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        return self._keys.run(args)

    def pipeline(self, transaction: bool = True, shard_hint: str | None = None) -> Any:
        return _Pipeline(self.connection_pool, self._keys)

    async def on_arq(self, call: Call[T]) -> T:
        """The adapter's own scripts on arq's Redis."""
        known: dict[str, Callable[[dict[str, str], dict[str, bytes]], bytes]] = {
            "enqueue": self._enqueue,
            "abort": self._abort,
        }
        raw = dict(zip(call.script.arg_names, call.args, strict=True))
        words = {name: value.decode() for name, value in raw.items() if name not in ("payload", "outcome", "call")}
        if call.script.name not in known:
            raise NotSimulated(f"{call.script.name}.lua: the Redis of this test is simulated")
        return call.parse(known[call.script.name](words, raw))

    def _enqueue(self, words: dict[str, str], raw: dict[str, bytes]) -> bytes:
        """lua/enqueue.lua"""
        run = self._keys.run
        if run(("EXISTS", words["job"], words["result"])) or self._entries(words["id"]):
            return b"0"
        run(("PSETEX", words["job"], words["ttl"], raw["payload"]))
        run(("ZADD", words["queue"], words["score"], words["id"]))
        if words["limit"] == "1":
            run(("SET", words["expires"], self._keys.now_ms + int(words["ttl"]), "PX", words["ttl"]))
        return b"1"

    def _abort(self, words: dict[str, str], raw: dict[str, bytes]) -> bytes:
        """lua/abort.lua"""
        run, id = self._keys.run, words["id"]
        if run(("EXISTS", words["result"])):
            return b"finished"
        states = self._entries(id)
        running = bool(run(("EXISTS", words["in_progress"])))
        queued = run(("ZSCORE", words["queue"], id)) is not None
        if State.WAITING not in states and (running or not queued):
            return b"running" if running else b"in_flight" if states else b"not_found"
        at_once(self._delayed._verbs.memory.cancel(id))
        if running:
            return b"running"
        run(("ZREM", words["queue"], id))
        run(("DEL", words["job"], words["expires"], words["retry"]))
        if raw["outcome"]:
            run(("SET", words["result"], raw["outcome"], "PX", words["ttl"]))
        return b"aborted"

    def _entries(self, id: str) -> list[State]:
        return [job.state for job in self._delayed._verbs.live(id)]


class _NoPool(ConnectionPool):
    async def get_connection(self, *_: Any, **__: Any) -> NoReturn:
        raise NotSimulated("the Redis of this test is simulated, for what arq itself does; there is no connection")


class _Pipeline(Pipeline):
    def __init__(self, pool: ConnectionPool, keys: Keyspace) -> None:
        super().__init__(pool, {}, transaction=True, shard_hint=None)
        self._keys = keys

    async def immediate_execute_command(self, *args: Any, **options: Any) -> Any:
        if args[0] == "WATCH":
            self.watching = True
            return True
        return self._keys.run(args)

    async def execute(self, raise_on_error: bool = True) -> list[Any]:
        commands = [args for args, _ in self.command_stack]
        await self.reset()
        return [self._keys.run(command) for command in commands]

    async def reset(self) -> None:  # type: ignore[override]  # as redis-py's own Pipeline has it
        self.command_stack = []
        self.watching = self.explicit_transaction = False


class _Job(DelayJob):
    __slots__ = ()

    async def result(self, timeout: float | None = None, **options: Any) -> Any:
        """arq's, but nobody waits for a job that only the clock can start.

        Raises:
            asyncio.TimeoutError: it has not run.
        """
        if await self.result_info() is None and await self._look():
            waiting = await self._redis.waiting(self.job_id)
            when = ""
            if waiting is not None:
                when = f"; it is due in {span((waiting.due - self._redis.local_micros()) / 1e6)}, advance() to that"
            raise asyncio.TimeoutError(f"job {self.job_id} has not run yet{when}")
        return await super().result(timeout, **options)


class _Worker(DelayWorker):
    """Its functions note what they raise: for how long a retry is put off, or why a job has failed."""

    def __init__(self, functions: Any = (), **kwargs: Any) -> None:
        super().__init__(functions, **kwargs)
        self.raised: dict[str, BaseException] = {}
        for name, function in self.functions.items():
            self.functions[name] = replace(function, coroutine=self._noting(function.coroutine))

    def _noting(self, coroutine: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        @wraps(coroutine)
        async def noting(ctx: dict[Any, Any], *args: Any, **kwargs: Any) -> Any:
            self.raised.pop(ctx["job_id"], None)
            try:
                return await coroutine(ctx, *args, **kwargs)
            except BaseException as error:
                self.raised[ctx["job_id"]] = error
                raise

        return noting

    def _left(self, job_id: str, due_ms: int) -> int:
        """A retry's delay as it was asked for: the test's clock has not moved while the job ran."""
        error = self.raised.pop(job_id, None)
        left: int = error.defer_score if isinstance(error, Retry) else super()._left(job_id, due_ms)
        return left
