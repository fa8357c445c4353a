"""Reading what Redis knows of a queue, from whatever thread asks."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ..jobs import Counters, Loop, Stats
from ..redis.aio import AsyncDelayQueue
from ..redis.sync import DelayQueue

__all__ = ["PATIENCE", "Snapshot", "reader_of"]

PATIENCE: Final = 4.0
"""Seconds a reading over an event loop may take. Prometheus gives a scrape ten."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A queue at one moment (three requests, so almost one)."""

    stats: Stats
    counters: Counters
    loops: tuple[Loop, ...]

    @property
    def alive(self) -> int:
        """Release loops heard of lately."""
        return sum(loop.alive for loop in self.loops)


def reader_of(
    queue: DelayQueue | AsyncDelayQueue, loop: asyncio.AbstractEventLoop | None = None
) -> Callable[[], Snapshot]:
    """A function that reads the queue, to be called from any thread but ``loop``'s own.

    Args:
        loop: where an AsyncDelayQueue lives; default the running one. A queue's connections belong to its event loop.

    Raises:
        TypeError: no queue.
        RuntimeError: an AsyncDelayQueue, no ``loop``, and none is running.
    """
    if isinstance(queue, DelayQueue):
        return lambda: Snapshot(queue.stats(), queue.counters(), tuple(queue.loops()))
    if not isinstance(queue, AsyncDelayQueue):
        raise TypeError(f"queue must be a DelayQueue or an AsyncDelayQueue, got {queue!r}")
    home = loop or asyncio.get_running_loop()

    async def read() -> Snapshot:
        return Snapshot(await queue.stats(), await queue.counters(), tuple(await queue.loops()))

    def ask() -> Snapshot:
        if home.is_closed():
            raise ConnectionError("the queue's event loop has ended")
        future = asyncio.run_coroutine_threadsafe(read(), home)
        try:
            return future.result(PATIENCE)
        except concurrent.futures.TimeoutError:
            future.cancel()
            raise ConnectionError(f"no answer within {PATIENCE} s") from None

    return ask
