"""The asyncio shell of the release loop: one task a shard, and one that listens for wake-ups."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable
from types import TracebackType
from typing import Any, Final

from redis.exceptions import RedisError

from ..checks import QUESTIONS, look
from ..redis.aio import AsyncDelayQueue, execute
from ..redis.commands import Asker, Call, Plain
from ..redis.connect import is_cluster, loop_client
from ..redis.keys import ShardKeys
from .base import BaseReleaser, clock
from .loop import Done, Publish, ReleaseLoop, Send, Sleep, backoff
from .observing import Observers
from .publisher import AsyncPublisher, checked
from .settings import ReleaserStats, ReleaseSettings
from .telling import short

__all__ = ["AsyncReleaser"]

log: Final = logging.getLogger("delayadapters.release")
_MOST_MESSAGES: Final = 1000
_TIMER_GRAIN: Final = 0.0011
"""asyncio's selectors round a time-out up to the next millisecond; the last one is waited out by turns of the loop."""


class AsyncReleaser(BaseReleaser[AsyncDelayQueue, AsyncPublisher, "_Shard"]):
    """Releases due jobs of a queue through an async publisher, on the running event loop.

    The same as :class:`~delayadapters.Releaser` otherwise; see there for the arguments and what they promise.
    """

    def _prepare(self) -> None:
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Starts the tasks and returns; after :meth:`stop` it does nothing. A releaser starts once.

        Raises:
            RuntimeError: it was started before.
        """
        if self._tasks:
            raise RuntimeError("this AsyncReleaser was started before; make a new one")
        if self._stopped:
            return
        for number, keys in enumerate(self._queue._verbs.shards):
            shard = _Shard(
                self._queue,
                keys,
                self._publisher,
                self._settings,
                self.stats,
                self._observers,
                self._name,
                first=number == 0,
            )
            shard.connect()
            self._shards.append(shard)
            self._tasks.append(asyncio.create_task(shard.run(), name=f"delayadapters-{number}"))

    async def run(self) -> None:
        """Starts, and returns when :meth:`stop` was called. Cancelling it stops the releaser gracefully first."""
        await self.start()
        try:
            if self._tasks:
                await asyncio.wait(self._tasks)
        except asyncio.CancelledError:
            await self.stop()
            raise
        for task in self._tasks:
            if not task.cancelled():
                task.result()

    async def stop(self, timeout: float | None = None) -> bool:
        """Finishes or gives back what is held and hands the watch over. Answers whether all has ended.

        Args:
            timeout: seconds to wait; None: as long as the current publish takes. What has not ended by then is
                cancelled: its leases pass, and another loop takes over.
        """
        self._stopped = True
        for shard in self._shards:
            shard.stop()
        if not self._tasks:
            return True
        _, late = await asyncio.wait(self._tasks, timeout=timeout)
        for task in late:
            task.cancel()
        for task in late:
            await _end(task)
        return not late

    @property
    def running(self) -> bool:
        """Whether any task of it still runs."""
        return any(not task.done() for task in self._tasks)

    async def __aenter__(self) -> AsyncReleaser:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()


class _Shard:
    """Drives one :class:`ReleaseLoop`."""

    def __init__(
        self,
        queue: AsyncDelayQueue,
        keys: ShardKeys,
        publisher: AsyncPublisher,
        settings: ReleaseSettings,
        stats: ReleaserStats,
        observers: Observers,
        name: str,
        *,
        first: bool,
    ) -> None:
        self._first = first
        self._queue = queue
        self._keys = keys
        self._publisher = publisher
        self._settings = settings
        self._wake = asyncio.Event()
        self._messages: list[bytes | None] = []
        self._client: Any = None
        self._listener: asyncio.Task[None] | None = None
        self.loop = ReleaseLoop(
            keys,
            Asker.new(name),
            settings,
            clock=clock,
            server_now=queue._verbs.now,
            stats=stats,
            observers=observers,
            times=not is_cluster(queue.client),
        )

    def stop(self) -> None:
        self.loop.stop()
        self._wake.set()

    def connect(self) -> None:
        """Makes the client (no connection yet)."""
        self._client = loop_client(self._queue.client)

    async def run(self) -> None:
        self._listener = asyncio.create_task(self._listen())
        try:
            await self._drive()
        except Exception:
            log.exception("the release loop of %s has ended", self._keys.due.decode())
            raise
        finally:
            await _end(self._listener)
            if self._client is not self._queue.client:
                await self._client.aclose()

    async def _check(self) -> None:
        """Logs what is wrong with the server, once. Not being able to ask is no reason not to start."""
        replies: list[Any] = []
        for question in QUESTIONS:
            try:
                replies.append(await _unswallowed(self._client.execute_command(*question)))
            except Exception as error:
                log.debug("cannot ask Redis for %s: %s", question[0], error)
                replies.append(None)
        for finding in look((replies[0], replies[1], replies[2]), time.time()):
            log.warning("%s", finding.text)

    async def _drive(self) -> None:
        loop = self.loop
        while True:
            if self._messages:
                messages, self._messages = self._messages, []
                for message in messages:
                    loop.woken(message, clock())
            action = loop.next(clock())
            if isinstance(action, Sleep):
                await self._wait(action)
            elif isinstance(action, Send):
                await self._send(action.request)
            elif isinstance(action, Publish):
                await self._publish(action)
            elif isinstance(action, Done):
                return

    async def _wait(self, action: Sleep) -> None:
        if self.loop.missed_wakes >= 3:
            self.loop.missed_wakes = 0
            await self._subscribe_again()
        left = min(action.until - clock(), 3600.0)
        coarse = left - _TIMER_GRAIN if action.precise else left
        if coarse > 0 and not self._wake.is_set():
            timer = asyncio.get_running_loop().call_later(coarse, self._wake.set)
            await self._wake.wait()
            timer.cancel()
        elif action.precise:
            # For less than a timer's grain.
            while clock() < action.until and not self._wake.is_set():  # noqa: ASYNC110
                await asyncio.sleep(0)
        self._wake.clear()

    async def _send(self, request: Call[Any] | Plain[Any]) -> None:
        sent = clock()
        try:
            answer = request.parse(await _unswallowed(execute(self._client, request)))
        except (RedisError, OSError, EOFError) as error:
            self.loop.fault(error, clock())
        except Exception as error:
            # An answer we cannot read must not end the loop.
            log.exception("unreadable answer in the release loop")
            self.loop.fault(error, clock())
        else:
            self.loop.answered(answer, sent, clock())

    async def _publish(self, action: Publish) -> None:
        task = asyncio.ensure_future(self._publisher.publish(action.batch))
        try:
            pause = max(0.0, self.loop.renew_at - clock())
            while not task.done():
                await asyncio.wait({task}, timeout=pause)
                if not task.done():
                    await self._renew()
                    pause = max(self._settings.lease / 6, self.loop.renew_at - clock())
        except asyncio.CancelledError:
            # Ours, whatever has become of the publish: asyncio.run() cancels both when it ends.
            task.cancel()
            raise
        if task.cancelled():
            self.loop.publish_failed(RuntimeError("the publisher was cancelled"), clock())
            return
        try:
            result = checked(task.result())
        except asyncio.TimeoutError as error:
            # An OSError only from Python 3.11 on.
            self.loop.publish_failed(TimeoutError(str(error)), clock())
        except Exception as error:
            self.loop.publish_failed(error, clock())
        else:
            self.loop.published(result, clock())

    async def _renew(self) -> None:
        now = clock()
        request = self.loop.renewal(now)
        if request is None:
            return
        try:
            answer = request.parse(await _unswallowed(execute(self._client, request)))
        except Exception as error:  # whatever it is, the publish goes on
            log.warning("a lease could not be renewed, will retry: error=%s", short(error))
        else:
            self.loop.renewed(answer, now, clock())

    async def _subscribe_again(self) -> None:
        if self._listener is not None:
            await _end(self._listener)
            self._listener = asyncio.create_task(self._listen())

    async def _listen(self) -> None:
        """The wake channel. Losing it costs lateness up to the safety poll, nothing else."""
        faults = 0
        while True:
            subscription = None
            try:
                subscription = self._client.pubsub()
                await subscription.subscribe(self._keys.wake)
                self._tell(None)
                if self._first:
                    self._first = False
                    await self._check()
                while True:
                    message = await subscription.get_message(timeout=30.0)
                    if message is not None:
                        faults = 0
                        if message["type"] == "message":
                            self._tell(message["data"])
            except Exception as error:
                # Listening must not end: redis-py 5, for one, has no pubsub() on its asyncio RedisCluster.
                faults += 1
                if faults == 1:
                    log.info("wake-up subscription lost, will subscribe again: error=%s", short(error))
                await asyncio.sleep(backoff(faults, 0.1, 2.0))
            finally:
                if subscription is not None:
                    with contextlib.suppress(RedisError, OSError, EOFError):
                        await subscription.aclose()

    def _tell(self, message: bytes | str | None) -> None:
        if len(self._messages) > _MOST_MESSAGES:
            # A publish that takes long: rather look at Redis than keep what it said meanwhile.
            self._messages.clear()
            message = None
        self._messages.append(message.encode() if isinstance(message, str) else message)
        self._wake.set()


async def _unswallowed(request: Awaitable[Any]) -> Any:
    """Awaits a request so that a cancellation always arrives.

    Until Python 3.12 ``asyncio.wait_for``, which redis-py waits with, may swallow one. ``asyncio.run`` cancels what is
    left only once, and a loop that goes on would keep it, and the process, for ever.
    """
    task = asyncio.ensure_future(request)
    try:
        await asyncio.wait({task})
    except asyncio.CancelledError:
        task.cancel()
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        raise
    return task.result()


async def _end(task: asyncio.Task[None]) -> None:
    """Cancels a task until it has ended: see :func:`_unswallowed`."""
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=0.5)
