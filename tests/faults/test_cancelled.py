"""A loop that is cancelled ends, even where the client swallows the cancellation (asyncio.wait_for before Python 3.12).

``asyncio.run`` cancels what is left once, and waits for it for ever.
"""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from delayadapters import AsyncReleaser
from delayadapters.release import aio


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
