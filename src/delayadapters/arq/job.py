"""arq's ``Job``, also for jobs that wait in the delay queue."""

from __future__ import annotations

import asyncio
import warnings
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from arq.constants import abort_jobs_ss
from arq.constants import default_queue_name as arq_queue_name
from arq.jobs import (
    DeserializationError,
    Deserializer,
    Job,
    JobDef,
    JobStatus,
    ResultNotFound,
    SerializationError,
    deserialize_job,
    serialize_result,
)
from arq.utils import poll, timestamp_ms

from ..jobs import Job as WaitingJob
from ..jobs import Outcome
from ..redis import commands
from ..redis.commands import Call
from .releasing import script
from .settings import (
    EXPIRES_PREFIX,
    channel,
    in_progress_key_prefix,
    job_key_prefix,
    result_key_prefix,
    retry_key_prefix,
)

if TYPE_CHECKING:
    from .client import DelayArqRedis

__all__ = ["DelayJob"]


class DelayJob(Job):
    """A job, wherever it is: waiting with us, in arq's queue, running or finished.

    A job moves from the delay queue to arq's and, on a retry, back. So what is in neither is looked for once more.

    Args:
        redis: a :class:`DelayArqRedis`.
    """

    __slots__ = ()

    def __init__(
        self,
        job_id: str,
        redis: DelayArqRedis,
        _queue_name: str = arq_queue_name,
        _deserializer: Deserializer | None = None,
    ) -> None:
        if not hasattr(redis, "delay_queue"):
            raise TypeError(f"redis must be a DelayArqRedis (see delayadapters.arq.create_pool), got {redis!r}")
        super().__init__(job_id, redis, _queue_name, _deserializer)

    # ------------------------------------------------------------ looking

    async def status(self) -> JobStatus:
        """``deferred`` while it waits, ``queued`` from its due time on; the rest as in arq."""
        for _ in range(2):
            waiting = await self._redis.waiting(self.job_id)
            native = await super().status()
            if native is not JobStatus.not_found:
                return native
            if waiting is not None:
                return JobStatus.deferred if waiting.due > self._redis.local_micros() else JobStatus.queued
        return JobStatus.not_found

    async def info(self) -> JobDef | None:
        """All information on a job, its result if there is one; ``score`` is the due time while it waits."""
        for _ in range(2):
            waiting = await self._redis.waiting(self.job_id)
            info: JobDef | None = await super().info()
            if waiting is not None and (info is None or info.score is None) and not hasattr(info, "success"):
                info = self._definition(waiting)
            if info is not None:
                return info
        return None

    def _definition(self, waiting: WaitingJob) -> JobDef:
        info: JobDef = deserialize_job(waiting.payload, deserializer=self._deserializer)
        info.score = waiting.due // 1000
        return info

    async def result(
        self, timeout: float | None = None, *, poll_delay: float = 0.5, pole_delay: float | None = None
    ) -> Any:
        """The result, waited for; raises the job's exception. Also waits while the job is deferred.

        Args:
            timeout: seconds before ``asyncio.TimeoutError``; None: for ever.
            poll_delay: seconds between looks.

        Raises:
            ResultNotFound: the job is nowhere, or it left no result.
        """
        if pole_delay is not None:
            warnings.warn(
                '"pole_delay" is deprecated, use the correct spelling "poll_delay" instead',
                DeprecationWarning,
                stacklevel=2,
            )
            poll_delay = pole_delay
        async for passed in poll(poll_delay):
            if not await self._look():
                raise ResultNotFound(
                    "Not waiting for job result because the job is neither waiting nor in queue. "
                    "Is the worker function configured to keep result?"
                )
            info = await self.result_info()
            if info is not None:
                if info.success:
                    return info.result
                if isinstance(info.result, (Exception, asyncio.CancelledError)):
                    raise info.result
                raise SerializationError(info.result)
            if timeout is not None and passed > timeout:
                raise asyncio.TimeoutError
        raise AssertionError("poll() does not end")

    async def _look(self) -> bool:
        """Whether there is a result, or the job is on its way to one."""
        for _ in range(2):
            async with self._redis.pipeline(transaction=True) as tr:
                tr.exists(result_key_prefix + self.job_id)
                tr.zscore(self._queue_name, self.job_id)
                finished, score = await tr.execute()
            if finished or score is not None:
                return True
            if await self._redis.waiting(self.job_id) is not None:
                return True
        return False

    # ------------------------------------------------------------ changing

    async def abort(self, *, timeout: float | None = None, poll_delay: float = 0.5) -> bool:
        """Abort the job: True when it was aborted, False when it was not (it had finished, or is nowhere).

        A job that no worker has started (waiting, or in arq's queue) is removed at once and never runs. Its result is
        a CancelledError, kept for ``DelaySettings.keep_aborted`` seconds. A running one is cancelled by its worker,
        when that has ``allow_abort_jobs``; this is waited for as arq does.
        """
        verdict = await self._abort_unstarted()
        if verdict == "aborted":
            return True
        if verdict in ("finished", "not_found"):
            info = await self.result_info()
            return info is not None and isinstance(info.result, asyncio.CancelledError)
        await self._redis.zadd(abort_jobs_ss, {self.job_id: timestamp_ms()})
        await self._redis.publish(self._channel, "abort")
        # A task of its own tells the job's CancelledError from our caller's.
        ended = asyncio.ensure_future(self.result(timeout=timeout, poll_delay=poll_delay))
        try:
            await asyncio.wait({ended})
        except asyncio.CancelledError:
            ended.cancel()
            raise  # the request stands
        try:
            await ended
        except asyncio.CancelledError:
            aborted = True
        except asyncio.TimeoutError:
            raise  # the request stands: the worker may still see it
        except ResultNotFound:
            aborted = False  # we do not know if the job was cancelled or not
        except Exception:
            aborted = False  # it failed by itself
        else:
            aborted = False
        # Workers without allow_abort_jobs never take it out, and arq itself never does.
        await self._redis.zrem(abort_jobs_ss, self.job_id)
        return aborted

    @property
    def _channel(self) -> str:
        return channel(self._redis.delay_settings.name, self._queue_name)

    async def _abort_unstarted(self) -> str:
        redis = self._redis
        outcome, ttl = await self._cancelled_result()
        keys = redis.delay_queue._verbs._of(self.job_id.encode())
        if not redis.delay_direct:
            cancelled = await redis.delayed(redis.delay_queue._verbs.cancel(self.job_id))
            if cancelled is Outcome.CANCELLED:
                await self._write(outcome, ttl)
                return "aborted"
        one = script("abort")
        bound = one.bind(
            keys,
            now="",
            call=commands.token(),
            job=job_key_prefix + self.job_id,
            result=result_key_prefix + self.job_id,
            expires=EXPIRES_PREFIX + self.job_id,
            retry=retry_key_prefix + self.job_id,
            in_progress=in_progress_key_prefix + self.job_id,
            queue=self._queue_name,
            id=self.job_id,
            outcome=outcome,
            ttl=ttl,
        )
        verdict = await redis.on_arq(Call(one, *bound, lambda reply: reply.decode(), keys))
        if verdict == "not_found" and not redis.delay_direct and cancelled is Outcome.IN_FLIGHT:
            return "in_flight"
        return str(verdict)

    async def _write(self, outcome: bytes, ttl: int) -> None:
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.delete(*(p + self.job_id for p in (job_key_prefix, retry_key_prefix, EXPIRES_PREFIX)))
            if outcome:
                pipe.set(result_key_prefix + self.job_id, outcome, px=ttl)
            await pipe.execute()

    async def _cancelled_result(self) -> tuple[bytes, int]:
        """arq's result of an aborted job, and for how many milliseconds it is kept; b"": not at all."""
        ttl = round(self._redis.delay_settings.keep_aborted * 1000)
        if ttl <= 0:
            return b"", 0
        try:
            info = await self.info()
        except DeserializationError:
            info = None
        now = timestamp_ms()
        data = serialize_result(
            function=info.function if info else "<unknown>",
            args=info.args if info else (),
            kwargs=info.kwargs if info else {},
            job_try=(info.job_try if info else None) or 1,
            enqueue_time_ms=round(info.enqueue_time.timestamp() * 1000) if info else now,
            success=False,
            result=asyncio.CancelledError(),
            start_ms=now,
            finished_ms=now,
            ref=f"{self.job_id}:{info.function if info else '<unknown>'}",
            queue_name=self._queue_name,
            job_id=self.job_id,
            serializer=self._redis.job_serializer,
        )
        return data or b"", ttl

    async def reschedule(self, *, delay: float | timedelta | None = None, at: datetime | None = None) -> Outcome:
        """Gives a waiting job a new due time: RESCHEDULED, IN_FLIGHT (being released right now), RELEASED (it is in
        arq's queue, runs or has finished) or NOT_FOUND.

        Args:
            delay: seconds from now, or a timedelta.
            at: the instant; a naive datetime is local time, as in arq.
        """
        if isinstance(at, datetime) and at.utcoffset() is None:
            at = at.astimezone()
        redis = self._redis
        outcome: Outcome = await redis.delayed(redis.delay_queue._verbs.reschedule(self.job_id, delay, at))
        if outcome is Outcome.NOT_FOUND and await super().status() is not JobStatus.not_found:
            return Outcome.RELEASED
        return outcome

    async def release_now(self) -> Outcome:
        """Makes a waiting job due now; answers as :meth:`reschedule`."""
        return await self.reschedule(delay=0)
