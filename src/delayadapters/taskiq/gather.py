"""Storing the jobs of concurrent ``kiq`` calls together: one round trip, one connection, their own order."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ..errors import OutcomeUnknown, RedisUnavailable
from ..jobs import IfExists, Job, NewJob
from ..redis.aio import AsyncDelayQueue
from ..redis.commands import NO_EXTRAS, Extras

__all__ = ["Gatherer"]

_MOST: Final = 500


@dataclass(frozen=True)
class _Caller:
    """Somebody who waits for his job to be stored; at ``until``, on the event loop's clock, he must have heard."""

    job: NewJob
    future: asyncio.Future[Job]
    until: float


class Gatherer:
    """One event loop's way into a queue. A call alone is sent at once; those that come meanwhile go with the next."""

    def __init__(self, queue: AsyncDelayQueue) -> None:
        self.queue = queue
        self._waiting: list[_Caller] = []
        self._busy = False
        self._task: asyncio.Task[None] | None = None

    async def schedule(self, job: NewJob, if_exists: IfExists, extras: Extras = NO_EXTRAS) -> Job:
        """Stores one job; raises what the queue raises, within its ``timeout``."""
        if if_exists != "add" or extras is not NO_EXTRAS:
            # The script compares with what is stored, not with others of its own call.
            return (await self._store([job], if_exists, extras))[0]
        if self._busy:
            loop = asyncio.get_running_loop()
            bound = self.queue._bound
            caller = _Caller(job, loop.create_future(), float("inf") if bound is None else loop.time() + bound)
            self._waiting.append(caller)
            return await caller.future
        self._busy = True
        try:
            return (await self._store([job], "add"))[0]
        finally:
            if self._waiting:
                self._task = asyncio.get_running_loop().create_task(self._send())
            else:
                self._busy = False

    async def _store(
        self,
        jobs: list[NewJob],
        if_exists: IfExists,
        extras: Extras = NO_EXTRAS,
        out: list[Job | None] | None = None,
    ) -> list[Job]:
        return await self.queue._run(self.queue._verbs.schedule_many(jobs, if_exists, extras, out))

    async def _send(self) -> None:
        try:
            while self._waiting:
                some, self._waiting = self._waiting[:_MOST], self._waiting[_MOST:]
                await self._round(self._in_time(some))
        finally:
            self._busy = False
            for caller in self._waiting:
                caller.future.cancel()

    def _in_time(self, some: Sequence[_Caller]) -> list[_Caller]:
        """Those who still wait. Whose time is over hears so, and nothing is stored."""
        now = asyncio.get_running_loop().time()
        for caller in some:
            if caller.until <= now and not caller.future.done():
                caller.future.set_exception(
                    RedisUnavailable(
                        "schedule: not sent, for Redis did not answer the calls before this one within "
                        f"timeout={self.queue._bound} s; check the server and the network"
                    )
                )
        return [caller for caller in some if not caller.future.done()]

    async def _round(self, some: list[_Caller]) -> None:
        """Stores what they brought, in as many script calls as it takes. Each hears of his own job."""
        if not some:
            return
        left = min(caller.until for caller in some) - asyncio.get_running_loop().time()
        stored: list[Job | None] = []
        sending = asyncio.ensure_future(self._store([caller.job for caller in some], "add", out=stored))
        try:
            await asyncio.wait({sending}, timeout=None if left == float("inf") else left)
            late = sending.cancel()
            await asyncio.wait({sending})
        except asyncio.CancelledError:  # the program ends
            sending.cancel()
            for caller in some:
                caller.future.cancel()
            raise
        error: BaseException | None
        if sending.cancelled():
            error = OutcomeUnknown(
                f"schedule: no answer from Redis within timeout={self.queue._bound} s; it may have been carried out. "
                'If you try again, use the same id and if_exists="keep"'
            )
        else:
            error = sending.exception()
        if isinstance(error, (TypeError, ValueError)) and not late:
            await self._one_by_one(some, error)
            return
        for caller, job in zip(some, stored or [None] * len(some), strict=True):
            if caller.future.done():
                continue
            if job is not None:
                caller.future.set_result(job)
            elif error is not None:
                caller.future.set_exception(error)

    async def _one_by_one(self, some: list[_Caller], error: Exception) -> None:
        """An argument of one of them is bad: nothing was sent (a queue's ``max_payload``, for example)."""
        for caller in some:
            if caller.future.done():
                continue
            try:
                if len(some) == 1:
                    raise error
                caller.future.set_result((await self._store([caller.job], "add"))[0])
            except Exception as one:
                caller.future.set_exception(one)
