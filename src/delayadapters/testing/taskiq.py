"""taskiq's delayed tasks without Redis, worker or waiting.

::

    async def test_reminder(delayed_taskiq):
        delayed = delayed_taskiq(broker)
        await remind.kicker().with_labels(delay=60).kiq("drink")
        delayed.assert_scheduled(remind, delay=60, args=["drink"])
        await delayed.advance(60)    # remind has run

Without pytest: ``with DelayedTaskiq(broker) as delayed: …``.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Literal

from taskiq import AsyncBroker, BrokerMessage, InMemoryBroker, TaskiqMessage, TaskiqMiddleware, TaskiqResult
from taskiq.brokers.inmemory_broker import InmemoryResultBackend
from taskiq.receiver import Receiver

from ..clock import ManualClock
from ..due import Delay
from ..jobs import Claim, Job, State
from ..redis.aio import AsyncDelayQueue
from ..taskiq import DelayMiddleware
from ..taskiq.publisher import ID, message_of
from .delayed import Delayed
from .jobs import ScheduledJob
from .verbs import NAME, NoRedis

__all__ = ["DelayedTaskiq"]

_MISSING: Final[Any] = object()
_OF_THE_BROKER: Final = ("kick", "startup", "shutdown", "listen", "result_backend", "middlewares")
_OF_THE_MIDDLEWARE: Final = (
    "_url", "_queues", "_loopless", "_started", "_embed_in_client", "_native_kick", "release_here",
)  # fmt: skip
_AT_ONCE: Final = 100


class DelayedTaskiq(Delayed):
    """taskiq's delayed tasks in memory. A broker without a :class:`DelayMiddleware` has one meanwhile.

    With ``release="run"`` no broker is used at all: every task that is sent, delayed or not, runs on the test's event
    loop, concurrently, and its result is kept in memory. An ``InMemoryBroker`` does so by itself, others are made to:
    their ``startup()`` is not needed then, and neither are workers. ``advance`` waits until nothing runs any more, each
    time it has moved the clock. Both retry middlewares, ``DelayScheduleSource`` and ``DelayMiddleware.cancel`` do what
    they always do.

    With ``release="publish"`` due tasks go through the broker's own ``kick``, as do all others.

    Install it before ``broker.startup()``.

    Args:
        broker: the broker.
        clock: a ManualClock to share with others; default: a new one.
        release: what becomes of a task that is due.
        propagate: what a task raises for good (no retry of it follows), ``advance`` raises once the clock has arrived.
            False: it only is in the task's result.
        patience: real seconds after which a task that still runs is an error: it may wait for one that is not due yet.
    """

    def __init__(
        self,
        broker: AsyncBroker,
        *,
        clock: ManualClock | None = None,
        release: Literal["run", "publish"] = "run",
        propagate: bool = True,
        patience: float = 10.0,
    ) -> None:
        super().__init__(clock)
        if not isinstance(broker, AsyncBroker):
            raise TypeError(f"delayed_taskiq takes a taskiq broker, got {broker!r}")
        if release not in ("run", "publish"):
            raise ValueError(f'release must be "run" or "publish", got {release!r}')
        self.broker = broker
        self._propagate = propagate
        self._patience = patience
        self._runs = release == "run" and not isinstance(broker, InMemoryBroker)
        self._receiver: Receiver | None = None
        self._executor: ThreadPoolExecutor | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._errors: list[BaseException] = []
        self._undoing = contextlib.ExitStack()
        self.middleware = self._install()
        """The broker's DelayMiddleware: ``cancel``, ``queue``, …"""

    def _install(self) -> DelayMiddleware:
        broker, own = self.broker, vars(self.broker)
        found = [one for one in broker.middlewares if isinstance(one, DelayMiddleware)]
        if found and isinstance(found[0]._url, AsyncDelayQueue) and isinstance(found[0]._url.client, NoRedis):
            raise RuntimeError("this broker's delayed tasks are in memory already; undo() that first")
        if found and found[0]._releaser is not None:
            raise RuntimeError(
                "this broker was started, and its release loop runs: call delayed_taskiq(broker) before "
                "broker.startup(), or shut it down first"
            )
        self._undoing.callback(_restore, own, {name: own.get(name, _MISSING) for name in _OF_THE_BROKER})
        broker.middlewares = list(broker.middlewares)
        queue = AsyncDelayQueue(NoRedis(), name=NAME, max_payload=None)
        queue._verbs = self._verbs
        if found:
            middleware = found[0]
            theirs = vars(middleware)
            self._undoing.callback(_restore, theirs, {name: theirs.get(name, _MISSING) for name in _OF_THE_MIDDLEWARE})
            middleware._url, middleware._loopless = queue, None
            middleware._queues = weakref.WeakKeyDictionary()
        else:
            middleware = DelayMiddleware(queue)
            broker.add_middlewares(middleware)
        # This object releases, so neither a loop nor a started broker is needed for that.
        middleware.release_here, middleware._embed_in_client, middleware._started = False, False, True
        watch = _Watch(self._errors, self._waits)
        broker.add_middlewares(watch)
        if self._runs:
            middleware._native_kick = self._kick
            broker.result_backend = InmemoryResultBackend(max_stored_results=-1)
        self._kick_native = middleware._native_kick
        return middleware

    def _undo(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._executor is not None:
            self._executor.shutdown(wait=False)
        self._undoing.close()

    # ------------------------------------------------------------ the test's side

    async def advance(self, seconds: Delay) -> list[ScheduledJob]:
        """Moves the clock by ``seconds`` (or a timedelta), and releases each task at its due time, in due order: also
        those that are scheduled on the way. Answers what was released.

        Raises:
            ReleaseFailed: the broker did not take a task.
            TimeoutError: a task still runs after ``patience`` seconds.
            Exception: what a task raised, with ``propagate``; of several the first.
        """
        done: list[ScheduledJob] = []
        await self._settle()  # what was sent before may schedule something
        with contextlib.closing(self._falling_due(seconds)) as claims:
            for claim in claims:
                done.append(await self._release(claim))
                await self._settle()
        errors, self._errors[:] = list(self._errors), []
        if errors and self._propagate:
            raise errors[0]
        return done

    async def advance_to_next(self) -> list[ScheduledJob]:
        """:meth:`advance` to when the next task is due, and no further. [] when nothing waits."""
        await self._settle()
        span = self._span_to_next()
        return [] if span is None else await self.advance(span)

    async def _release(self, claim: Claim) -> ScheduledJob:
        try:
            await self._kick_native(message_of(claim))
        except Exception as error:
            raise self._failed(claim, f"{type(error).__name__}: {error}") from error
        return self._done(claim)

    async def _settle(self) -> None:
        """Waits until no task runs."""
        deadline = asyncio.get_running_loop().time() + self._patience
        while running := {*self._tasks, *getattr(self.broker, "_running_tasks", ())} - {asyncio.current_task()}:
            left = deadline - asyncio.get_running_loop().time()
            _, pending = await asyncio.wait(running, timeout=max(0.0, left))
            if pending and left <= 0:
                raise TimeoutError(
                    f"{len(pending)} tasks still run after patience={self._patience} s. Does one wait for a task that "
                    "is not due yet, or sleep? Time only passes for what is scheduled"
                )

    def _read(self, job: Job | Claim) -> tuple[str, Any, Any, str]:
        message = self.broker.formatter.loads(job.payload)
        return message.task_name, message.args, message.kwargs, job.meta.get(ID) or job.id

    def _waits(self, task_id: str) -> bool:
        return any(job.state is State.WAITING for job in self._verbs.live(task_id))

    # ------------------------------------------------------------ in place of a worker

    async def _kick(self, message: BrokerMessage) -> None:
        """In place of the broker's ``kick``: the task runs on this event loop, as an InMemoryBroker runs it."""
        if self.broker.find_task(message.task_name) is None:
            return  # another service's
        if self._receiver is None:
            self._executor = ThreadPoolExecutor(1)
            self._receiver = Receiver(self.broker, executor=self._executor, max_async_tasks=_AT_ONCE, run_startup=False)
        task = asyncio.get_running_loop().create_task(self._receiver.callback(message=message.message))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _Watch(TaskiqMiddleware):
    """Sees what fails for good. A retry that waits has the task's id."""

    def __init__(self, errors: list[BaseException], waits: Callable[[str], bool]) -> None:
        super().__init__()
        self._errors = errors
        self._waits = waits

    def post_save(self, message: TaskiqMessage, result: TaskiqResult[Any]) -> None:
        if result.is_err and not self._waits(message.task_id):
            self._errors.append(result.error or RuntimeError(f"task {message.task_name} failed"))


def _restore(attributes: dict[str, Any], before: dict[str, Any]) -> None:
    for name, value in before.items():
        if value is _MISSING:
            attributes.pop(name, None)
        else:
            attributes[name] = value
