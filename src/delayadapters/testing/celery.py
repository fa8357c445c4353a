"""Celery's delayed tasks without Redis, broker, worker or waiting.

::

    def test_reminder(delayed_celery):
        delayed = delayed_celery(app)
        remind.apply_async(("drink",), countdown=60)
        delayed.assert_scheduled("remind", delay=60, args=("drink",))
        delayed.advance(60)      # remind has run

Without pytest: ``with DelayedCelery(app) as delayed: …``.
"""

# mypy: disallow-untyped-calls=False
# (celery and kombu have no types of their own)

from __future__ import annotations

import contextlib
from collections import deque
from datetime import datetime
from typing import Any, Final, Literal, cast

from celery import Celery, states
from celery.app.trace import build_tracer
from celery.backends.base import DisabledBackend
from celery.backends.cache import CacheBackend
from celery.local import Proxy
from celery.result import denied_join_result
from celery.utils.functional import maybe_list
from celery.utils.time import maybe_iso8601
from celery.worker.request import Request
from celery.worker.strategy import proto1_to_proto2
from kombu.message import Message as KombuMessage
from kombu.serialization import prepare_accept_content
from kombu.utils.functional import LRUCache

from ..celery.cancelled import request_of
from ..celery.capture import Capture, capture_message
from ..celery.fixup import install, installed
from ..celery.message import Message, with_due
from ..celery.publisher import CeleryPublisher
from ..celery.queue import TaskQueue
from ..celery.signals import announce, task_released
from ..clock import ManualClock
from ..due import Delay, from_micros
from ..jobs import Claim, Job
from ..release.publisher import Batch
from .delayed import Delayed
from .errors import warn_if_passed
from .jobs import ScheduledJob
from .verbs import NAME, NoRedis

__all__ = ["DelayedCelery"]

_MISSING: Final[Any] = object()
_OF_THE_APP: Final = (
    "_backend_cache", "_delayadapters", "control", "control_cls", "delayadapters", "fixups", "now",
    "producer_or_acquire", "send_task",
)  # fmt: skip
"""What is changed on the app, all of it among its instance's attributes."""


class DelayedCelery(Delayed):
    """Celery's delayed tasks in memory. ``install(app)`` need not have been called; if it was, that is left in force.

    With ``release="run"`` no broker is used at all, and no worker: every task that is sent, delayed or not, runs in
    this thread. One that is not delayed runs before the call which sent it returns or, sent by a task, after that task:
    as with one worker that runs one task at a time. ``task_always_eager`` is off meanwhile, as it would run a delayed
    task at once. Retries, ``link``, ``link_error``, chains, groups, chords, ``expires`` and revokes do what they do in
    a worker. Time limits, events, rate limits and remote control other than revokes do not exist.

    With ``release="publish"`` due tasks are published to the app's own broker, and all others go there as always; so it
    is for a broker like ``memory://``. What then runs a task, and by whose clock it expires, is the worker's affair.

    Args:
        app: the app.
        clock: a ManualClock to share with others; default: a new one.
        release: what becomes of a task that is due.
        results: ``"memory"``: results are kept in memory instead of in the app's result backend (unless it has none).
            ``"app"``: in the app's own.
        propagate: what a task raises for good (no retry of it follows), ``advance`` raises, once the clock has arrived;
            for a task that was not delayed, the call that sent it. False: it only is in the task's result.

    Every delay waits, also one below ``delayadapters_min_delay``. ``app.delayadapters`` is the queue, as always.
    """

    def __init__(
        self,
        app: Celery,
        *,
        clock: ManualClock | None = None,
        release: Literal["run", "publish"] = "run",
        results: Literal["memory", "app"] = "memory",
        propagate: bool = True,
    ) -> None:
        super().__init__(clock)
        app = app._get_current_object() if isinstance(app, Proxy) else app
        if not isinstance(app, Celery):
            raise TypeError(f"delayed_celery takes a Celery app, got {app!r}")
        if release not in ("run", "publish"):
            raise ValueError(f'release must be "run" or "publish", got {release!r}')
        if results not in ("memory", "app"):
            raise ValueError(f'results must be "memory" or "app", got {results!r}')
        if release == "publish" and app.conf.task_always_eager:
            raise ValueError(
                'release="publish" with task_always_eager: tasks would run at once and never reach a broker. Switch it '
                'off, or use release="run", which runs tasks here, the delayed ones at their time'
            )
        if isinstance(_queue_of(app), TaskQueue) and isinstance(_queue_of(app).client, NoRedis):
            raise RuntimeError("this app's delayed tasks are in memory already; undo() that first")
        self.app = app
        self._runs = release == "run"
        self._propagate = propagate
        self._inbox: deque[tuple[Message, datetime | None]] = deque()
        self._running = False
        self._errors: list[BaseException] = []
        self._revoked: set[str] = set()
        self._publisher = CeleryPublisher(app)
        self._undoing = contextlib.ExitStack()
        try:
            self._install(results)
        except BaseException:
            self._undoing.close()
            raise

    def _install(self, results: str) -> None:
        app, own = self.app, vars(self.app)
        before = {name: own.get(name, _MISSING) for name in _OF_THE_APP}
        before["fixups"] = app.fixups
        known = installed(app)
        steps = set(app.steps["worker"])

        def restore() -> None:
            for name, value in before.items():
                if value is _MISSING:
                    own.pop(name, None)
                else:
                    own[name] = value
            app.steps["worker"] = steps
            if known is None:
                app._fixups[:] = [one for one in app._fixups if one is not fixup]

        install(app)
        fixup = installed(app)
        assert fixup is not None  # noqa: S101
        self._undoing.callback(restore)
        queue = TaskQueue(NoRedis(), name=NAME, max_payload=None)
        queue._verbs = self._verbs
        queue.app = app
        self._native_send = fixup._instance_send_task
        self._undoing.callback(fixup.stand_in, None, send_task=self._native_send)
        fixup.stand_in(queue, lambda: self.clock.micros, self._send if self._runs else self._native_send)
        own["now"] = lambda: self.clock.now().astimezone(app.timezone)
        self._configure(delayadapters_min_delay=0, delayadapters_embed=False, delayadapters_direct=False)
        if self._runs:
            self._configure(task_always_eager=False, task_send_sent_event=False)
            control = app.control
            control.broadcast = self._broadcast
            self._undoing.callback(vars(control).pop, "broadcast", None)
        if results == "memory" and not isinstance(app.backend, DisabledBackend):
            backend = CacheBackend(app=app, url="memory://")
            backend.client.cache = LRUCache()  # of its own
            own["_backend_cache"] = backend

    def _configure(self, **settings: Any) -> None:
        conf = self.app.conf
        _ = conf.task_always_eager  # a configuration is read when it is first asked for something
        changes = self.app.conf.changes
        for name, value in settings.items():
            for key in self.app.conf._to_keys(name):
                if key == name or key in changes:
                    before = changes.get(key, _MISSING)
                    changes[key] = value
                    self._undoing.callback(_put_back, changes, key, before)

    def _undo(self) -> None:
        self._publisher.close()
        self._undoing.close()

    # ------------------------------------------------------------ the test's side

    def advance(self, seconds: Delay) -> list[ScheduledJob]:
        """Moves the clock by ``seconds`` (or a timedelta), and releases each task at its due time, in due order: also
        those that are scheduled on the way. Answers what was released.

        Raises:
            ReleaseFailed: the broker did not take a task.
            Exception: what a task raised, with ``propagate``; of several the first.
        """
        done: list[ScheduledJob] = []
        with contextlib.closing(self._falling_due(seconds)) as claims:
            for claim in claims:
                done.append(self._release(claim))
        self._raise_errors()
        return done

    def advance_to_next(self) -> list[ScheduledJob]:
        """:meth:`advance` to when the next task is due, and no further. [] when nothing waits."""
        span = self._span_to_next()
        return [] if span is None else self.advance(span)

    def _release(self, claim: Claim) -> ScheduledJob:
        if not self._runs:
            published = self._publisher.publish(Batch([claim]))
            if published.failed or published.unpublished:
                raise self._failed(claim, published.broker_down or published.failed[claim.entry])
            return self._done(claim)
        try:
            message = Message.unpack(claim.payload)
        except Exception as error:
            raise self._failed(claim, error) from error
        view = self._done(claim)
        announce(task_released, claim.id, from_micros(claim.due), claim.meta)
        self._inbox.append((message, from_micros(claim.due)))
        self._run_inbox()
        return view

    def _read(self, job: Job | Claim) -> tuple[str, Any, Any, str]:
        stored = job if isinstance(job, Job) else Job(job.id, job.due, job.payload, job.meta)
        request = request_of(self.app, stored)
        return job.meta.get("task", "?"), request.args or (), request.kwargs or {}, job.id

    # ------------------------------------------------------------ the app's side

    def _send(self, name: str, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        """In place of ``Celery.send_task``: a task that is not delayed runs here."""
        if isinstance(options.get("producer"), Capture):  # a delayed one, on its way into the queue
            return self._celery_send_task(name, args, kwargs, options)
        with contextlib.suppress(TypeError, ValueError):
            warn_if_passed(maybe_iso8601(options.get("eta")), self.clock, name)

        def arrived(capture: Capture, body: Any, publish_options: dict[str, Any]) -> None:
            self._inbox.append((capture_message(self.app, body, publish_options), None))

        ours = {"countdown": None, "eta": None, "publisher": None, "connection": None}
        capture = Capture(self.app, None, None, arrived)
        result = self._celery_send_task(name, args, kwargs, {**options, **ours, "producer": capture})
        if not self._running:
            self._run_inbox()
            if not self._advancing:
                self._raise_errors()
        return result

    def _celery_send_task(self, name: str, args: Any, kwargs: Any, options: dict[str, Any]) -> Any:
        if self._native_send is not None:
            return self._native_send(name, args, kwargs, **options)
        return type(self.app).send_task(self.app, name, args, kwargs, **options)

    def _broadcast(self, command: str, arguments: Any = None, *_: Any, **options: Any) -> Any:
        """In place of ``app.control.broadcast``: there are no workers, but what waits can be revoked."""
        control, arguments = self.app.control, dict(arguments or {})
        if command in ("revoke", "terminate"):
            ids = arguments.get("task_id", options.get("task_id"))
            self._revoked.update(str(one) for one in maybe_list(ids) or ())
            control._cancel(ids)
        elif command == "revoke_by_stamped_headers":
            control._cancel_stamped(arguments)
        return [] if options.get("reply") else None

    # ------------------------------------------------------------ in place of a worker

    def _run_inbox(self) -> None:
        if self._running:
            return
        self._running = True
        try:
            while self._inbox:
                self._run(*self._inbox.popleft())
        finally:
            self._running = False

    def _run(self, message: Message, due: datetime | None) -> None:
        """celery/worker/strategy.py and request.py, less the pool: what a worker does with a message."""
        app = self.app
        headers = dict(message.headers) if due is None else with_due(message.headers, due.isoformat())
        received = KombuMessage(
            body=message.body,
            content_type=message.content_type,
            content_encoding=message.content_encoding,
            headers=headers,
            properties=dict(message.properties),
            delivery_info={"exchange": message.exchange, "routing_key": message.routing_key},
            accept=prepare_accept_content(app.conf.accept_content),
        )
        options: dict[str, Any] = {"body": received.body, "headers": headers, "decoded": False}
        if "task" not in headers:
            options["body"], options["headers"], options["decoded"], options["utc"] = proto1_to_proto2(
                received, received.payload
            )
        task = app.tasks.get(options["headers"]["task"])
        if task is None:  # another service's: it is in `released`, and nothing here can run it
            return
        request = _Request(received, app=app, task=task, hostname="delayadapters.testing", **options)
        request.clock, request.revoked_ids = self.clock, self._revoked
        if request.revoked():
            return
        _, _, embed = request._payload
        fields = request.request_dict
        fields.update({"loglevel": None, "logfile": None, "is_eager": False}, **embed or {})
        tracer = build_tracer(task.name, task, loader=app.loader, hostname=request.hostname, app=app)
        with denied_join_result():
            done = tracer(request.id, request.args, request.kwargs, fields)
        if self._propagate and done.info is not None and done.info.state == states.FAILURE:
            self._errors.append(cast("BaseException", done.info.retval))

    def _raise_errors(self) -> None:
        errors, self._errors = self._errors, []
        if errors:
            raise errors[0]


class _Request(Request):  # type: ignore[misc]  # celery has no types
    """A worker's request which looks at the test's clock."""

    clock: ManualClock
    revoked_ids: set[str]

    def maybe_expire(self) -> bool:
        return bool(self.expires) and self.clock.now() > self.expires

    def revoked(self) -> bool:
        if self.id in self.revoked_ids:
            self._announce_revoked("revoked", False, None, False)
            return True
        return bool(super().revoked())


def _queue_of(app: Celery) -> Any:
    known = installed(app)
    return None if known is None else known._queue


def _put_back(mapping: dict[str, Any], key: str, value: Any) -> None:
    if value is _MISSING:
        mapping.pop(key, None)
    else:
        mapping[key] = value
