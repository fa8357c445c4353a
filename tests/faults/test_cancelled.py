"""A loop that is cancelled ends, even where the client swallows the cancellation (asyncio.wait_for before Python 3.12).

``asyncio.run`` cancels what is left once, and waits for it for ever.
"""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from delayadapters import AsyncReleaser
from delayadapters.release import aio
from delaytests import wait_until_async


class Nowhere:
    async def publish(self, claims):
        return None


@pytest.mark.parametrize("after", [0, 0.02, 0.1])
async def test_a_swallowed_cancellation(async_queue, monkeypatch, after):
    real = aio.execute

    async def swallowing(client, request, *more):
        reply = await real(client, request, *more)
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0.05)
        return reply

    monkeypatch.setattr(aio, "execute", swallowing)
    releaser = AsyncReleaser(async_queue, Nowhere())
    await releaser.start()
    await asyncio.sleep(after)
    for task in releaser._tasks:
        task.cancel()
    _, pending = await asyncio.wait(releaser._tasks, timeout=30)
    assert not pending


async def test_a_listener_that_swallows_it(async_queue, monkeypatch):
    releaser = AsyncReleaser(async_queue, Nowhere())
    original = aio._Shard._listen

    async def listen(self):
        try:
            await original(self)
        except asyncio.CancelledError:
            await original(self)

    monkeypatch.setattr(aio._Shard, "_listen", listen)
    await releaser.start()
    await asyncio.sleep(0.05)
    assert await asyncio.wait_for(releaser.stop(), 30)


class Stuck:
    """Publishes until it is cancelled; says when it has begun."""

    def __init__(self):
        self.begun = asyncio.Event()
        self.times = 0

    async def publish(self, claims):
        self.times += 1
        self.begun.set()
        await asyncio.sleep(3600)


@pytest.mark.parametrize("first", ["publish", "loop"])
async def test_an_end_in_the_midst_of_a_publish(async_queue, monkeypatch, first):
    """``asyncio.run`` cancels both tasks when it ends: whichever is told first, it is no fault of the publisher."""
    publisher = Stuck()
    releaser = AsyncReleaser(async_queue, publisher)
    await async_queue.schedule(b"x", delay=0)
    before = asyncio.all_tasks()
    await releaser.start()
    await asyncio.wait_for(publisher.begun.wait(), 30)
    [loop] = releaser._tasks
    [publish] = [task for task in asyncio.all_tasks() - before if "Stuck.publish" in repr(task.get_coro())]
    for task in (publish, loop) if first == "publish" else (loop, publish):
        task.cancel()
    _, pending = await asyncio.wait({loop}, timeout=30)
    assert not pending
    assert loop.cancelled()
    assert publisher.times == 1


async def test_a_publisher_that_cancels_itself_is_at_fault(async_queue):
    class Giving:
        times = 0

        async def publish(self, claims):
            self.times += 1
            raise asyncio.CancelledError

    publisher = Giving()
    await async_queue.schedule(b"x", delay=0, id="a")
    async with AsyncReleaser(async_queue, publisher, max_attempts=1):

        async def dead():
            return [job.reason for job in (await async_queue.dead_jobs()).jobs]

        await wait_until_async(dead, timeout=30)
        assert "cancelled" in (await dead())[0]
