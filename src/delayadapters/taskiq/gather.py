"""Storing the jobs of concurrent ``kiq`` calls together: one round trip, one connection, their own order."""

from __future__ import annotations

import asyncio
from typing import Final

from ..jobs import IfExists, Job, NewJob
from ..redis.aio import AsyncDelayQueue
from ..redis.commands import NO_EXTRAS, Extras

__all__ = ["Gatherer"]

_MOST: Final = 500


class Gatherer:
    """One event loop's way into a queue. A call alone is sent at once; those that come meanwhile go with the next."""

    def __init__(self, queue: AsyncDelayQueue) -> None:
        self.queue = queue
        self._waiting: list[tuple[NewJob, asyncio.Future[Job]]] = []
        self._busy = False
        self._task: asyncio.Task[None] | None = None

    async def schedule(self, job: NewJob, if_exists: IfExists, extras: Extras = NO_EXTRAS) -> Job:
        """Stores one job; raises what the queue raises."""
        if if_exists != "add" or extras is not NO_EXTRAS:
            # The script compares with what is stored, not with others of its own call.
            return (await self._store([job], if_exists, extras))[0]
        if self._busy:
            future: asyncio.Future[Job] = asyncio.get_running_loop().create_future()
            self._waiting.append((job, future))
            return await future
        self._busy = True
        try:
            return (await self._store([job], "add"))[0]
        finally:
            if self._waiting:
                self._task = asyncio.get_running_loop().create_task(self._send())
            else:
                self._busy = False

    async def _store(self, jobs: list[NewJob], if_exists: IfExists, extras: Extras = NO_EXTRAS) -> list[Job]:
        return await self.queue._run(self.queue._verbs.schedule_many(jobs, if_exists, extras))

    async def _send(self) -> None:
        try:
            while self._waiting:
                some, self._waiting = self._waiting[:_MOST], self._waiting[_MOST:]
                try:
                    stored = await self._store([job for job, _ in some], "add")
                except (TypeError, ValueError) as error:
                    await self._one_by_one(some, error)
                except Exception as error:
                    for _, future in some:
                        if not future.done():
                            future.set_exception(error)
                else:
                    for (_, future), job in zip(some, stored, strict=True):
                        if not future.done():
                            future.set_result(job)
        finally:
            self._busy = False
            for _, future in self._waiting:
                future.cancel()

    async def _one_by_one(self, some: list[tuple[NewJob, asyncio.Future[Job]]], error: Exception) -> None:
        """An argument of one of them is bad: nothing was sent (a queue's ``max_payload``, for example)."""
        for job, future in some:
            if future.done():
                continue
            try:
                if len(some) == 1:
                    raise error
                future.set_result((await self._store([job], "add"))[0])
            except Exception as one:
                future.set_exception(one)
