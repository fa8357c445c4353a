"""The thread shell of the release loop: one thread a shard, one that listens for wake-ups, one that renews leases."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from types import TracebackType
from typing import Any, Final

from redis.exceptions import RedisError

from ..checks import QUESTIONS, look
from ..redis.commands import Asker, Call, Plain
from ..redis.connect import is_cluster, loop_client
from ..redis.keys import ShardKeys
from ..redis.sync import DelayQueue, execute
from .base import BaseReleaser, clock
from .loop import Done, Publish, ReleaseLoop, Send, Sleep, backoff
from .observing import Observers
from .publisher import Publisher, checked
from .settings import ReleaserStats, ReleaseSettings
from .telling import short

__all__ = ["Releaser"]

log: Final = logging.getLogger("delayadapters.release")
_SUBSCRIPTION_CHECK: Final = 0.5
_MOST_MESSAGES: Final = 1000


class Releaser(BaseReleaser[DelayQueue, Publisher, "_Shard"]):
    """Releases due jobs of a queue through a publisher, from threads of its own.

    Any number may run on one queue, in any number of processes. It rides out every Redis fault and every broker outage;
    while nothing is due it costs Redis about two and a half commands a second (half a one for each further releaser).

    Args:
        queue: whose jobs. Its client's connection settings are used for connections of the releaser's own.
        publisher: hands jobs to the broker; called from one thread at a time.
        lease: seconds; what a job is late at most when a process dies releasing it. Renewed while a publish goes on.
        patience: seconds after which a publisher without progress counts as hanging.
        batch: most jobs a claim.
        max_attempts, backoff, backoff_cap: failed releases that are a job's own fault: retried after ``backoff``
            seconds, doubling up to ``backoff_cap``, and dead at ``max_attempts``.
        name: shown to operators.

    Raises:
        TypeError, ValueError: a bad argument.
    """

    def _prepare(self) -> None:
        self._publishing = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._state = threading.Lock()

    def start(self) -> None:
        """Starts the threads and returns; after :meth:`stop` it does nothing. A releaser starts once.

        Raises:
            RuntimeError: it was started before.
        """
        with self._state:
            if self._threads:
                raise RuntimeError("this Releaser was started before; make a new one")
            if self._was_stopped():
                return
            for number, keys in enumerate(self._queue._verbs.shards):
                shard = _Shard(
                    self._queue,
                    keys,
                    self._publisher,
                    self._publishing,
                    self._settings,
                    self.stats,
                    self._observers,
                    self._name,
                    first=number == 0,
                )
                thread = threading.Thread(target=shard.run, name=f"delayadapters-{number}", daemon=True)
                self._shards.append(shard)
                self._threads.append(thread)
            for shard in self._shards:
                shard.connect()
            for thread in self._threads:
                thread.start()
            if self._was_stopped():  # by a signal handler, meanwhile
                for shard in self._shards:
                    shard.stop()

    def _was_stopped(self) -> bool:
        return self._stopped

    def run(self) -> None:
        """Starts, and blocks until :meth:`stop` is called (from another thread or a signal handler)."""
        self.start()
        self.join()

    def join(self) -> None:
        """Blocks until a started releaser has ended: :meth:`stop` was called."""
        while any(thread.is_alive() for thread in self._threads):
            for thread in self._threads:
                thread.join(0.2)  # short, so that signal handlers get their turn

    def stop(self, timeout: float | None = None) -> bool:
        """Finishes or gives back what is held and hands the watch over. Answers whether all has ended.

        Args:
            timeout: seconds to wait; None: as long as the current publish takes; 0: only ask.
        """
        self._stopped = True  # not under the lock: a signal handler may have interrupted start()
        for shard in self._shards:
            shard.stop()
        end = None if timeout is None else time.monotonic() + timeout
        for thread in self._threads:
            if thread is not threading.current_thread() and thread.ident is not None:
                thread.join(None if end is None else max(0.0, end - time.monotonic()))
        return not self.running

    @property
    def running(self) -> bool:
        """Whether any thread of it still runs."""
        return any(thread.is_alive() for thread in self._threads)

    def __enter__(self) -> Releaser:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


class _Shard:
    """Drives one :class:`ReleaseLoop`."""

    def __init__(
        self,
        queue: DelayQueue,
        keys: ShardKeys,
        publisher: Publisher,
        publishing: threading.Lock,
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
        self._one_publish = publishing
        self._settings = settings
        self._wake = threading.Event()
        self._messages: deque[bytes | None] = deque()
        self._ended = threading.Event()
        self._renewing = threading.Lock()
        self._in_publish = False
        self._resubscribe = False
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

    def run(self) -> None:
        for work in (self._listen, self._renew):
            threading.Thread(target=work, name=f"delayadapters{work.__name__}", daemon=True).start()
        try:
            self._drive()
        except BaseException:
            log.exception("the release loop of %s has ended", self._keys.due.decode())
            raise
        finally:
            self._ended.set()
            self._wake.set()

    def _check(self) -> None:
        """Logs what is wrong with the server, once. Not being able to ask is no reason not to start."""
        replies: list[Any] = []
        for question in QUESTIONS:
            try:
                replies.append(self._client.execute_command(*question))
            except Exception as error:
                log.debug("cannot ask Redis for %s: %s", question[0], error)
                replies.append(None)
        for finding in look((replies[0], replies[1], replies[2]), time.time()):
            log.warning("%s", finding.text)

    def _drive(self) -> None:
        loop = self.loop
        while True:
            while self._messages:
                loop.woken(self._messages.popleft(), clock())
            action = loop.next(clock())
            if isinstance(action, Sleep):
                self._wait(action)
            elif isinstance(action, Send):
                self._send(action.request)
            elif isinstance(action, Publish):
                self._publish(action)
            elif isinstance(action, Done):
                return

    def _wait(self, action: Sleep) -> None:
        if self.loop.missed_wakes >= 3:
            self._resubscribe, self.loop.missed_wakes = True, 0
        left = action.until - clock()
        if left > 0:
            self._wake.wait(min(left, 3600.0))
        self._wake.clear()

    def _send(self, request: Call[Any] | Plain[Any]) -> None:
        sent = clock()
        try:
            answer = request.parse(execute(self._client, request))
        except (RedisError, OSError, EOFError) as error:
            self.loop.fault(error, clock())
        except Exception as error:
            # An answer we cannot read must not end the loop.
            log.exception("unreadable answer in the release loop")
            self.loop.fault(error, clock())
        else:
            self.loop.answered(answer, sent, clock())

    def _publish(self, action: Publish) -> None:
        self._in_publish = True
        try:
            with self._one_publish:
                action.batch.ensure_held()  # another shard's publish may have taken long
                result = checked(self._publisher.publish(action.batch))
        except Exception as error:
            with self._renewing:
                self._in_publish = False
                self.loop.publish_failed(error, clock())
        else:
            with self._renewing:
                self._in_publish = False
                self.loop.published(result, clock())

    def _renew(self) -> None:
        """A thread: extends the leases of a publish that takes long. It looks by itself, so a fast one pays nothing."""
        while not self._ended.wait(self._settings.lease / 6):
            with self._renewing:
                now = clock()
                if not self._in_publish or now < self.loop.renew_at:
                    continue
                request = self.loop.renewal(now)
                if request is None:
                    continue
                try:
                    answer = request.parse(execute(self._client, request))
                except Exception as error:  # whatever it is, this thread goes on: nobody else renews
                    log.warning("a lease could not be renewed, will retry: error=%s", short(error))
                else:
                    self.loop.renewed(answer, now, clock())

    def _listen(self) -> None:
        """A thread: the wake channel. Losing it costs lateness up to the safety poll, nothing else."""
        faults = 0
        while not self._ended.is_set():
            subscription = None
            try:
                subscription = self._client.pubsub()
                subscription.subscribe(self._keys.wake)
                self._tell(None)
                self._resubscribe = False
                if self._first:
                    self._first = False
                    self._check()
                while not self._ended.is_set() and not self._resubscribe:
                    message = subscription.get_message(timeout=_SUBSCRIPTION_CHECK)
                    if message is not None and message["type"] == "message":
                        self._tell(message["data"])
                    if message is not None:
                        faults = 0
            except Exception as error:
                # The queue's own client (Sentinel, Cluster), closed under us, raises anything: redis-py 8 a TypeError.
                faults += 1
                if faults == 1 and not self._ended.is_set():
                    log.info("wake-up subscription lost, will subscribe again: error=%s", short(error))
                self._ended.wait(backoff(faults, 0.1, 2.0))
            finally:
                if subscription is not None:
                    with contextlib.suppress(Exception):  # the connection is broken already
                        subscription.close()
        # Here, not where the loop ends: a socket must not be closed while another thread reads from it.
        if self._client is not self._queue.client:
            self._client.close()

    def _tell(self, message: bytes | str | None) -> None:
        if len(self._messages) > _MOST_MESSAGES:
            # A publish that takes long: rather look at Redis than keep what it said meanwhile.
            self._messages.clear()
            message = None
        self._messages.append(message.encode() if isinstance(message, str) else message)
        self._wake.set()
