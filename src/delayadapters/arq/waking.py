"""Starting a worker's poll at once: a subscriber to the channel on which releases and enqueues are told."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any, Final

from redis.asyncio import Redis
from redis.exceptions import RedisError

from ..redis.connect import loop_client
from ..release.loop import backoff

__all__ = ["Listener"]

log: Final = logging.getLogger("delayadapters.arq")


class Listener:
    """Calls ``wake`` for each message on ``channel`` and after each new subscription, from its own connection.

    Losing it costs lateness up to the worker's ``poll_delay``, nothing else.
    """

    def __init__(self, pool: Any, channel: str, wake: Callable[[], None]) -> None:
        shared = Redis(connection_pool=pool)
        self._client = loop_client(shared)
        self._owned = self._client is not shared
        self._channel = channel
        self._wake = wake
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._listen(), name="delayadapters-arq-wake")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        if self._owned:
            with contextlib.suppress(RedisError, OSError):
                await self._client.aclose(close_connection_pool=True)

    async def _listen(self) -> None:
        faults = 0
        while True:
            subscription = None
            try:
                subscription = self._client.pubsub()
                await subscription.subscribe(self._channel)
                self._wake()
                while True:
                    message = await subscription.get_message(timeout=30.0)
                    if message is not None:
                        faults = 0
                        if message["type"] == "message":
                            self._wake()
            except (RedisError, OSError, EOFError) as error:
                faults += 1
                if faults == 1:
                    log.info("the worker's wake-up subscription was lost, will subscribe again: %s", error)
                await asyncio.sleep(backoff(faults, 0.1, 2.0))
            finally:
                if subscription is not None:
                    with contextlib.suppress(RedisError, OSError, EOFError):
                        await subscription.aclose()
