"""``DelayMiddleware``: delayed tasks wait in Redis, and are released into the same broker.

A taskiq middleware cannot stop a send (kicker.py: ``pre_send``, ``broker.kick``, ``post_send``). So ``set_broker`` puts
itself before ``broker.kick`` on the instance: ``kiq``, both retry middlewares, ``Context.requeue`` and schedulers all
end there, and the send hooks of every middleware run once, as for any other task.

``startup``, ``shutdown`` and ``listen`` are wrapped too: a middleware's own ``startup`` runs before the broker is
connected, and what is released into a fresh stream then is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from taskiq import AsyncBroker, AsyncTaskiqTask, BrokerMessage, TaskiqMessage, TaskiqMiddleware, TaskiqResult
from taskiq.middlewares import SmartRetryMiddleware
from taskiq.scheduler.created_schedule import CreatedSchedule

from ..jobs import Command, IfExists, NewJob, Outcome
from ..metrics.address import DEFAULT_HOST, check_address
from ..redis.aio import AsyncDelayQueue
from ..redis.commands import NO_EXTRAS, Extras
from ..release.aio import AsyncReleaser
from ..release.settings import ReleaserStats, ReleaseSettings
from . import brokers
from .errors import BrokerNotStarted, TaskCancelled
from .gather import Gatherer
from .labels import DELAY, DELAY_LABELS, RETRIES, DecoratorDelay, Request, read_request, retry_delay
from .publisher import ID, LABELS, TaskiqPublisher

if TYPE_CHECKING:
    from ..metrics.serving import MetricsServer

__all__ = ["DelayMiddleware"]

log: Final = logging.getLogger("delayadapters.taskiq")

STOP_TIMEOUT: Final = 2.5
"""Seconds of taskiq's shutdown budget (5 in all) for the batch in hand; what it has not finished comes back by its
lease."""
ATTEMPT: Final = "attempt"
"""Meta: which attempt of which call a retry is, whatever else is in its bytes."""
_POLICIES: Final = ("auto", "send", "retry")


@dataclass(frozen=True, slots=True)
class Override:
    """How the message of ``task_id`` is to be stored: DelayScheduleSource's word to the wrapper of ``kick``."""

    task_id: str
    job_id: str
    if_exists: IfExists
    extras: Extras = NO_EXTRAS


override: ContextVar[Override | None] = ContextVar("delayadapters_taskiq_override", default=None)


class DelayMiddleware(TaskiqMiddleware):
    """Lets tasks with a delay wait in Redis, exactly and durably, whatever the broker.

    ::

        broker = ListQueueBroker("redis://localhost").with_middlewares(DelayMiddleware("redis://localhost"))
        await task.kicker().with_labels(delay=30).kiq()

    Due tasks are released by loops in the workers, in the scheduler's process, and by ``taskiq delay-release``; any
    number may run. Where the broker is a list or stream in the same Redis database, a task is moved there by the step
    that removes it from the queue: exactly once. Into any other broker it is released at least once: a duplicate, with
    the same task id, needs a crash between the broker's confirmation and the ack.

    Args:
        url: Redis URL, or an :class:`~delayadapters.AsyncDelayQueue`. None: the broker's own Redis.
        name: of the queue. Default: made from the broker's kind, database or virtual host, and queue name.
        shards: see :class:`~delayadapters.DelayQueue`.
        embed: run the release loop in workers, in ``taskiq scheduler``, and with ``InMemoryBroker``.
        embed_in_client: run it in every other process too, between ``broker.startup()`` and ``broker.shutdown()``.
        direct: False: always release through the broker's ``kick``.
        decorator_delay: what ``@broker.task(delay=…)`` means where SmartRetryMiddleware would read it as the delay of
            the task's retries. ``"auto"``: of the retries when the task has ``retry_on_error`` set, else of every
            send. ``"send"``, ``"retry"``: always so. ``x_delay`` is always of the send.
        lease: seconds; what a task is late at most when the process dies that was releasing it.
        max_attempts: failed releases that are a task's own fault before it is dead.
        broker_down: exceptions of the broker's ``kick`` which say that the broker is down, beside the usual ones.
        timeout: seconds; bound on storing a task, retries included.
        metrics_port: where a process that releases serves /metrics, /healthz and /readyz (extra ``metrics``). Workers
            of one host may have the same: one of them gets it, and tells what they all would.
        metrics_host: the address to listen on; in a container ``0.0.0.0``.
        options: anything else for redis-py's ``from_url``.

    Raises:
        TypeError, ValueError: a bad argument; ``set_broker`` also for a broker that cannot work.
    """

    def __init__(
        self,
        url: str | AsyncDelayQueue | None = None,
        *,
        name: str | None = None,
        shards: int = 1,
        embed: bool = True,
        embed_in_client: bool = False,
        direct: bool = True,
        decorator_delay: DecoratorDelay = "auto",
        lease: float = 10.0,
        max_attempts: int = 8,
        broker_down: tuple[type[BaseException], ...] = (),
        timeout: float = 10.0,
        metrics_port: int | None = None,
        metrics_host: str = DEFAULT_HOST,
        **options: Any,
    ) -> None:
        super().__init__()
        if decorator_delay not in _POLICIES:
            raise ValueError(f"decorator_delay must be one of {_POLICIES}, got {decorator_delay!r}")
        if url is not None and not isinstance(url, (str, AsyncDelayQueue)):
            raise TypeError(
                f"DelayMiddleware takes a Redis URL or an AsyncDelayQueue, got {url!r}; for a client of your own: "
                "DelayMiddleware(AsyncDelayQueue(client, name=..., max_payload=None))"
            )
        if isinstance(url, AsyncDelayQueue) and (name is not None or shards != 1 or options):
            given = ", ".join(["name"] * (name is not None) + ["shards"] * (shards != 1) + list(options))
            raise TypeError(f"an AsyncDelayQueue has its own settings; DelayMiddleware got {given} as well")
        self._url = url
        self._name = name
        self._shards = shards
        self._timeout = timeout
        self._options = options
        self._embed = embed
        self._embed_in_client = embed_in_client
        self._direct = direct
        self._policy: DecoratorDelay = decorator_delay
        self._releaser_options: dict[str, Any] = {"lease": lease, "max_attempts": max_attempts}
        ReleaseSettings(**self._releaser_options)
        self._down = broker_down
        check_address(metrics_port, metrics_host)
        self.metrics_port, self.metrics_host = metrics_port, metrics_host
        self.metrics: MetricsServer | None = None
        """What serves metrics in this process."""
        self._native_kick: Callable[[BrokerMessage], Awaitable[None]]
        self._queues: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Gatherer] = weakref.WeakKeyDictionary()
        self._loopless: Gatherer | None = None
        self._releaser: AsyncReleaser | None = None
        self._starting: asyncio.Task[None] | None = None
        self._started = False
        self._warned: set[str] = set()
        self.release_here: bool | None = None
        """True, False: run the release loop in this process or not, whatever kind of process it is. Set it before
        ``broker.startup()``."""

    # ------------------------------------------------------------------------------------------------ the broker

    def set_broker(self, broker: AsyncBroker) -> None:
        """Takes the broker's ``kick``, ``startup``, ``shutdown`` and ``listen`` over.

        Raises:
            TypeError: a broker that delayed tasks cannot be released into.
            RuntimeError: this middleware has a broker, or the broker another DelayMiddleware.
        """
        if getattr(self, "broker", None) is broker:
            return
        if getattr(self, "broker", None) is not None:
            raise RuntimeError("this DelayMiddleware has a broker already; make one for each broker")
        if any(isinstance(other, DelayMiddleware) for other in broker.middlewares):
            raise RuntimeError(f"{type(broker).__name__} has a DelayMiddleware already; one is enough")
        brokers.refuse(broker, embed_in_client=self._embed_in_client)
        super().set_broker(broker)
        self._make_queue()  # a bad argument shows itself here, not at the first delayed task
        self._native_kick = broker.kick
        startup, shutdown, listen = broker.startup, broker.shutdown, broker.listen

        async def started() -> None:
            await startup()
            self._started = True
            if self._releases_here():
                await self._start()

        async def stopped() -> None:
            self._started = False
            await self._stop()
            await shutdown()

        def listening() -> AsyncGenerator[Any, None]:
            # run_receiver_task makes a worker of a process whose broker was started as a client's.
            if self._works and self.release_here is not False and self._releaser is None:
                self._starting = asyncio.get_running_loop().create_task(self._start())
            return listen()

        broker.kick = self._kick  # type: ignore[method-assign]
        broker.startup = started  # type: ignore[method-assign]
        broker.shutdown = stopped  # type: ignore[method-assign]
        broker.listen = listening  # type: ignore[method-assign]

    async def shutdown(self) -> None:
        """Part of ``broker.shutdown()``; stops the release loop, within taskiq's budget."""
        await self._stop()

    # ------------------------------------------------------------------------------------------------ the queue

    @property
    def name(self) -> str:
        """The queue's name."""
        if isinstance(self._url, AsyncDelayQueue):
            return self._url.name
        if self._name is None:
            self._need_broker()
            return brokers.default_name(self.broker)
        return self._name

    @property
    def queue(self) -> AsyncDelayQueue:
        """The queue the tasks wait in: ``jobs()``, ``get(task_id)``, ``reschedule``, ``stats``, … Each job's ``meta``
        has the task's name (``task``) and queue (``queue``). Every event loop gets a client of its own."""
        return self._gatherer().queue

    @property
    def releaser_stats(self) -> ReleaserStats | None:
        """The counters of the release loop in this process; None: there is none."""
        return self._releaser.stats if self._releaser is not None else None

    def _gatherer(self) -> Gatherer:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            if self._loopless is None:
                self._loopless = Gatherer(self._make_queue())
            return self._loopless
        found = self._queues.get(loop)
        if found is None:
            found, self._loopless = self._loopless or Gatherer(self._make_queue()), None
            self._queues[loop] = found
        return found

    def _make_queue(self) -> AsyncDelayQueue:
        if isinstance(self._url, AsyncDelayQueue):
            return self._url
        if self._url is None:
            self._need_broker()
            return brokers.own_queue(self.broker, self.name, self._shards, self._timeout, self._options)
        return AsyncDelayQueue.from_url(
            self._url,
            name=self.name,
            shards=self._shards,
            timeout=self._timeout,
            **{"max_payload": None, **self._options},
        )

    def _need_broker(self) -> None:
        if getattr(self, "broker", None) is None:
            raise RuntimeError("this DelayMiddleware has no broker yet: broker.with_middlewares(DelayMiddleware(...))")

    # ------------------------------------------------------------------------------------------------ sending

    def pre_send(self, message: TaskiqMessage) -> TaskiqMessage:
        """Raises DelayLabelError, naming the label, before anything is sent."""
        self._read(message.labels, message.task_name)
        return message

    def pre_execute(self, message: TaskiqMessage) -> TaskiqMessage:
        """Its delay is over: what the task and the retry middlewares see has none."""
        for name in DELAY_LABELS:
            message.labels.pop(name, None)
            if message.labels_types:
                message.labels_types.pop(name, None)
        again = retry_delay(message.labels, self._own_labels(message.task_name), self._policy, self._retries_by_default)
        if again is not None:
            message.labels[DELAY] = again
        return message

    def _own_labels(self, task_name: str) -> Mapping[str, Any]:
        task = self.broker.find_task(task_name)
        return task.labels if task is not None else {}

    @property
    def _retries_by_default(self) -> bool:
        return any(isinstance(m, SmartRetryMiddleware) and m.default_retry_label for m in self.broker.middlewares)

    def _read(self, labels: Mapping[str, Any], task_name: str) -> Request:
        if not any(name in labels for name in DELAY_LABELS):
            return Request(untouched=True)
        request = read_request(labels, self._own_labels(task_name), self._policy, self._retries_by_default)
        if request.kept and self._policy == "auto" and task_name not in self._warned:
            self._warned.add(task_name)
            log.warning(
                "task %s: its decorator's delay=%s is taken for the delay of its retries, not of every send, as "
                "SmartRetryMiddleware does. Say so with DelayMiddleware(decorator_delay='retry'), or delay sends with "
                "the label x_delay, or with decorator_delay='send'",
                task_name,
                labels.get(DELAY),
            )
        return request

    async def _kick(self, message: BrokerMessage) -> None:
        """Stands before ``broker.kick``."""
        request = self._read(message.labels, message.task_name)
        if request.untouched:
            await self._native_kick(message)
            return
        # kept: SmartRetryMiddleware is to find the label in the message; brokers must not (taskiq-aio-pika).
        message = self._without_delay(message, keep=request.kept)
        if not request.waits:
            await self._native_kick(message)
            return
        if not self._started and (self._embed_in_client or brokers.needs_startup(self.broker)):
            raise BrokerNotStarted(
                reason=f"{type(self.broker).__name__} was not started, so the delayed task {message.task_name} would "
                "never be released here; call `await broker.startup()` first"
            )
        try:
            await self._store(message, request)
        except Exception as error:
            if RETRIES in message.labels:
                # Nobody else says so: taskiq leaves the error to a task that nobody awaits (receiver.py, run_task).
                log.error(
                    "retry %s of task %s (%s) could not be stored; the attempt is not acknowledged, and runs again if "
                    "its broker delivers it again, else the task is lost: %s: %s",
                    message.labels[RETRIES],
                    message.task_id,
                    message.task_name,
                    type(error).__name__,
                    error,
                )
            raise

    def _without_delay(self, message: BrokerMessage, *, keep: bool) -> BrokerMessage:
        labels = {key: value for key, value in message.labels.items() if key not in DELAY_LABELS}
        gone = [name for name in DELAY_LABELS if name in message.labels and not (keep and name == DELAY)]
        data = message.message
        if gone:
            formatter = self.broker.formatter
            try:
                parsed = formatter.loads(data)
            except Exception as error:
                # A formatter that only workers can read back. pre_execute takes the labels out there.
                if "formatter" not in self._warned:
                    self._warned.add("formatter")
                    log.warning("%s cannot read its own messages, so they keep their delay: %r", formatter, error)
            else:
                for name in gone:
                    parsed.labels.pop(name, None)
                    if parsed.labels_types:
                        parsed.labels_types.pop(name, None)
                data = formatter.dumps(parsed).message
        return BrokerMessage(task_id=message.task_id, task_name=message.task_name, message=data, labels=labels)

    async def _store(self, message: BrokerMessage, request: Request) -> None:
        gatherer = self._gatherer()
        special = override.get()
        if special is not None and special.task_id != message.task_id:
            special = None  # a task that a hook sends meanwhile
        job_id = special.job_id if special is not None else message.task_id
        meta = {"task": message.task_name}
        queue_name = brokers.queue_of(self.broker, message.labels)
        if queue_name is not None:
            meta["queue"] = queue_name
        if job_id != message.task_id:
            meta[ID] = message.task_id
        release = self._moves_directly(gatherer.queue, message.labels)
        if release is None:
            meta[LABELS] = json.dumps(message.labels, default=str)
        extras = special.extras if special is not None else NO_EXTRAS
        if RETRIES in message.labels:
            # A redelivered attempt fails again, and schedules the retry that already waits.
            meta[ATTEMPT] = f"{message.labels[RETRIES]}:{self._call_of(message)}"
            extras = replace(extras, distinct=ATTEMPT)
        job = NewJob(
            message.message,
            delay=request.delay,
            at=request.at,
            id=job_id,
            meta=meta,
            release=release,
        )
        await gatherer.schedule(job, special.if_exists if special is not None else "add", extras)

    def _moves_directly(self, queue: AsyncDelayQueue, labels: Mapping[str, Any]) -> Sequence[Command] | None:
        """The commands of a direct release; None: it must be a leased one."""
        if not self._direct or not brokers.same_server(self.broker, queue):
            return None
        return brokers.direct_commands(self.broker, labels)

    def _call_of(self, message: BrokerMessage) -> str:
        """The same for the same task with the same arguments; trace headers and the like do not count."""
        data = message.message
        with contextlib.suppress(Exception):
            parsed = self.broker.formatter.loads(data)
            data = repr((parsed.task_name, parsed.args, parsed.kwargs)).encode()
        return hashlib.blake2b(data, digest_size=8).hexdigest()

    # ------------------------------------------------------------------------------------------------ cancelling

    async def cancel(self, task: AsyncTaskiqTask[Any] | CreatedSchedule[Any] | str) -> Outcome:
        """Cancels a task that waits (its retry included), by the task, its id, or its schedule.

        CANCELLED is final, and ``wait_result`` answers at once with an error result (:class:`TaskCancelled`). Else
        IN_FLIGHT, RELEASED or NOT_FOUND; nothing was changed then.

        Raises:
            RedisFault: Redis did not do what was asked.
        """
        if isinstance(task, CreatedSchedule):
            return await self.cancel_job(task.schedule_id)
        if isinstance(task, (str, AsyncTaskiqTask)):
            return await self.cancel_job(task if isinstance(task, str) else task.task_id)
        raise TypeError(f"cancel takes a task, its id or a schedule, got {task!r}")

    async def cancel_job(self, job_id: str) -> Outcome:
        """:meth:`cancel` by the job's id: the task's, or the schedule's."""
        queue = self.queue
        job = await queue.get(job_id)
        outcome = await queue.cancel(job_id)
        if outcome is Outcome.CANCELLED:
            meta = job.meta if job is not None else {}
            task_id = meta.get(ID) or job_id
            shown = f" ({meta['task']})" if "task" in meta else ""
            result: TaskiqResult[Any] = TaskiqResult(
                is_err=True,
                return_value=None,
                execution_time=0.0,
                error=TaskCancelled(f"delayed task {task_id}{shown} was cancelled before it was due"),
            )
            try:
                await self.broker.result_backend.set_result(task_id, result)
            except Exception:
                log.exception("delayed task %s is cancelled, but its waiters were not told", task_id)
        return outcome

    # ------------------------------------------------------------------------------------------------ releasing

    def _releases_here(self) -> bool:
        if self.release_here is not None:
            return self.release_here
        broker = self.broker
        if broker.is_worker_process or broker.is_scheduler_process or brokers.is_in_memory(broker):
            return self._works
        return self._embed_in_client

    @property
    def _works(self) -> bool:
        """Whether a worker or scheduler releases."""
        return self._embed and brokers.workers_send(self.broker)

    async def release_ended(self) -> None:
        """Returns when the release loop of this process has ended by itself, which it never should."""
        releaser = self._releaser
        if releaser is not None and releaser._tasks:
            await asyncio.wait(releaser._tasks, return_when=asyncio.FIRST_COMPLETED)

    async def _start(self) -> None:
        if self._releaser is not None:
            return
        queue = self.queue
        publisher = TaskiqPublisher(self.broker, self._native_kick, self._down)
        options = dict(self._releaser_options)
        if not self._moves_directly(queue, {}):
            options["batch"] = publisher.batch
        self._releaser = AsyncReleaser(queue, publisher, **options)
        await self._releaser.start()
        if self.metrics_port is not None:
            from ..metrics.serving import serve_beside

            self.metrics = serve_beside(queue, self._releaser, port=self.metrics_port, host=self.metrics_host)
        log.info("delay release: queue %r, %s", queue.name, type(self.broker).__name__)

    async def _stop(self) -> None:
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.wait([self._starting])
            self._starting = None
        metrics, self.metrics = self.metrics, None
        if metrics is not None:
            await asyncio.to_thread(metrics.stop)
        releaser, self._releaser = self._releaser, None
        if releaser is not None and not await releaser.stop(STOP_TIMEOUT):
            log.warning("delay release: not ended within %s s; what it held comes back by its lease", STOP_TIMEOUT)
        found = self._queues.pop(asyncio.get_running_loop(), None)
        if found is not None and found.queue is not self._url:
            await found.queue.aclose()
