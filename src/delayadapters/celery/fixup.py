"""``install(app)``: a fixup which wraps ``Celery.send_task``, the one way of every task message.

A fixup (``app.fixups``) is remade wherever the app is: it survives pickling to a spawn pool. ``send_task`` is called
late-bound on the app's class, so that a patch of ``Celery.send_task`` (Sentry, tracing) still sees every call.
"""

from __future__ import annotations

import inspect
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from celery import Celery
from celery import uuid as new_id
from celery.local import Proxy
from celery.utils.log import get_logger
from celery.utils.time import maybe_iso8601

from ..due import from_micros, resolve
from ..errors import OutcomeUnknown, RedisFault
from ..redis.commands import NO_EXTRAS
from .capture import Capture, capture_message, show_eta, without_due_header
from .control import install_control
from .direct import DirectRelease
from .gathering import Gathering, current, sends_a_group
from .settings import Settings, make_queue, uses_quorum_queues
from .signals import announce, task_delayed

if TYPE_CHECKING:
    from ..jobs import Command
    from ..redis.commands import Extras
    from .queue import TaskQueue

__all__ = ["DelayFixup", "fixup", "install", "installed"]

logger = get_logger(__name__)

FIXUP: Final = "delayadapters.celery.fixup:fixup"
RELEASE_STEP: Final = "delayadapters.celery.hosting:ReleaseStep"
NATIVE_TASKS: Final = frozenset({"celery.chord_unlock"})
"""Celery's own polls, a second apart: a round through Redis gains nothing."""


def wall_clock() -> int:
    """Microseconds since the epoch."""
    return time.time_ns() // 1_000


def install(app: Celery) -> None:
    """Let every delayed message of this app wait in Redis. Call it once, after making the app; again does nothing."""
    app = app._get_current_object() if isinstance(app, Proxy) else app
    if installed(app) is not None:
        return
    if FIXUP not in app.fixups:
        app.fixups = [*app.fixups, FIXUP]
    app._fixups.append(fixup(app))


def fixup(app: Celery) -> DelayFixup:
    """What Celery calls for our entry in ``app.fixups``."""
    return installed(app) or DelayFixup(app)


def installed(app: Celery) -> DelayFixup | None:
    """The app's fixup, None when :func:`install` was not called."""
    found = vars(app).get("_delayadapters")
    return found if isinstance(found, DelayFixup) else None


class _Due(NamedTuple):
    """When a task is due: ``arguments`` for ``schedule``, and the same instant as Celery would put it in a message."""

    arguments: dict[str, Any]
    eta: str


class _PassNatively(Exception):
    """Leaves ``send_task`` to call it again without us."""


class DelayFixup:
    """What :func:`install` adds to one app. ``fallbacks``: tasks passed on because the delay Redis refused them."""

    def __init__(self, app: Celery) -> None:
        self.app = app
        self.settings = Settings(app)
        self.fallbacks = 0
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._queue: TaskQueue | None = None
        self._direct = DirectRelease(app)
        self._uris: tuple[Any, frozenset[str]] | None = None
        self._known: tuple[frozenset[str], Any, bool] | None = None
        self._clock = wall_clock
        self._stands_in = False
        self._instance_send_task: Callable[..., Any] | None = vars(app).get("send_task")
        app._delayadapters = self
        app.send_task = self.send_task
        app.producer_or_acquire = self.producer_or_acquire
        app.delayadapters = Proxy(self.queue)
        app.steps["worker"].add(RELEASE_STEP)
        install_control(app)

    # ------------------------------------------------------------------------------------------------ the queue

    def queue(self) -> TaskQueue:
        """The app's queue, made when first needed; after a fork a new one, so that no two processes share a socket."""
        self._own_process()
        queue = self._queue
        if queue is None:
            with self._lock:
                queue = self._queue
                if queue is None:
                    queue = self._queue = make_queue(self.app)
        return queue

    def _own_process(self) -> None:
        """In a forked child, what was the parent's is made anew. Safe in several threads of the child at once."""
        if self._pid != os.getpid():
            self._lock, self._queue = threading.Lock(), None
            self._direct = DirectRelease(self.app)
            self._pid = os.getpid()  # the last: whoever sees it sees the rest

    def stand_in(
        self,
        queue: TaskQueue | None,
        clock: Callable[[], int] = wall_clock,
        send_task: Callable[..., Any] | None = None,
    ) -> None:
        """Lets every delayed task wait in ``queue``, one by one; None: in Redis again. For delayadapters.testing.

        ``clock``: whose time it is, microseconds since the epoch. ``send_task``: in place of Celery's own.
        """
        self._queue, self._clock, self._pid = queue, clock, os.getpid()
        self._stands_in, self._instance_send_task = queue is not None, send_task
        self._direct = DirectRelease(self.app)

    @property
    def direct(self) -> DirectRelease:
        """Which messages are released inside Redis."""
        self._own_process()
        return self._direct

    # ------------------------------------------------------------------------------------------------ scheduling

    def send_task(self, name: str, args: Any = None, kwargs: Any = None, *positional: Any, **options: Any) -> Any:
        """``Celery.send_task``; a delayed message is stored instead of sent. Returns what Celery's own returns.

        Raises:
            RedisFault: the delay Redis did not take the task (with ``delayadapters_on_unavailable="raise"``).
            ValueError, TypeError: a countdown or eta that is no time.
        """
        if positional:
            options.update(zip(_positional_names(), positional, strict=False))
        if options.get("headers"):
            options["headers"] = without_due_header(options["headers"])
        due = self._due(name, options)
        if due is None:
            return self._celery_send_task(name, args, kwargs, options)
        # The id is made here, as send_task would: a fallback must not make another one.
        options["task_id"] = options.get("task_id") or new_id()
        producer = options.get("producer") or options.get("publisher")
        capture = Capture(self.app, producer, due.eta, self._storing(name, due, options))
        ours = {**options, "countdown": None, "eta": None, "producer": capture, "publisher": None, "connection": None}
        try:
            return self._celery_send_task(name, args, kwargs, ours)
        except _PassNatively:
            return self._celery_send_task(name, args, kwargs, options)
        finally:
            capture.release()

    def producer_or_acquire(self, producer: Any = None) -> Any:
        """``Celery.producer_or_acquire``; around the sending of a group, its delayed tasks are stored in batches."""
        context = type(self.app).producer_or_acquire(self.app, producer)
        if self._stands_in or not sends_a_group(sys._getframe(1)) or current(producer) is not None:
            return context
        # The way back to Celery's own countdown is each task's own, and so is its error.
        return context if self.settings.native_when_unavailable else Gathering(self.queue, context)

    def _celery_send_task(self, name: str, args: Any, kwargs: Any, options: dict[str, Any]) -> Any:
        if self._instance_send_task is not None:
            return self._instance_send_task(name, args, kwargs, **options)
        return type(self.app).send_task(self.app, name, args, kwargs, **options)

    def _due(self, name: str, options: dict[str, Any]) -> _Due | None:
        """When the task is due; None when its message is Celery's own business.

        Celery's rules (celery/app/amqp.py, celery/worker/request.py): a countdown wins over an eta; 0 and None are
        none; an eta may be an ISO 8601 string; a naive one is UTC.
        """
        countdown, eta = options.get("countdown"), options.get("eta")
        if not (countdown or eta) or (name in NATIVE_TASKS and not self._stands_in):
            return None
        now = self._clock()
        if countdown:
            if isinstance(countdown, bool):
                countdown = int(countdown)
            wait = resolve(countdown, None, now=now).micros
            due = _Due({"delay": countdown}, from_micros(now + wait).isoformat())
        else:
            at = maybe_iso8601(eta)
            if isinstance(at, datetime) and at.utcoffset() is None:
                at = at.replace(tzinfo=timezone.utc)
            wait = resolve(None, at, now=now).micros - now
            due = _Due({"at": at}, at.isoformat())
        if self.settings.passes_natively(wait / 1_000_000) or self._foreign(options):
            return None
        return due

    def _foreign(self, options: dict[str, Any]) -> bool:
        """Whether the caller hands in a connection to another broker: what waits with us goes to the app's own."""
        connection = options.get("connection")
        if connection is None:
            producer = options.get("producer") or options.get("publisher")
            connection = getattr(producer, "connection", None)
        if connection is None:
            return False
        own = self._own_uris()
        # as_uri costs as much as a whole publish, and these are what it is made of
        key = (
            connection.hostname, connection.port, connection.virtual_host, connection.userid, connection.password,
            connection.transport_cls, connection.uri_prefix,
        )  # fmt: skip
        if self._known is None or self._known[:2] != (own, key):
            self._known = (own, key, connection.as_uri(include_password=True) not in own)
        return self._known[2]

    def _own_uris(self) -> frozenset[str]:
        """The app's broker and its failover addresses; asking kombu costs as much as a whole publish, so remember."""
        url = self.app.conf.broker_write_url
        if self._uris is None or self._uris[0] != url:
            own = self.app.connection_for_write()
            uris = {own.as_uri(include_password=True)}
            for other in own.alt or ():
                uris.add(self.app.connection_for_write(other).as_uri(include_password=True))
            self._uris = (url, frozenset(uris))
        return self._uris[1]

    def _storing(self, name: str, due: _Due, options: dict[str, Any]) -> Any:
        def store(capture: Capture, body: Any, publish_options: dict[str, Any]) -> None:
            message = capture_message(self.app, body, publish_options)
            declared = publish_options.get("declare")
            queue = declared[0].name if declared else message.routing_key
            task_id = str(options["task_id"])
            meta = {"task": name, "queue": queue}
            direct = self.direct.plan(message, declared or ())

            def stored() -> None:
                if direct is not None and direct.extras is not None:
                    self.direct.stored(message)
                announce(task_delayed, task_id, datetime.fromisoformat(due.eta), meta)

            payload, release, extras = direct or (message.pack(), None, None)
            together = current(options.get("producer"))
            if together is not None:
                together.add(payload, due.arguments, task_id, meta, release, extras, stored)
                return
            try:
                self._schedule(payload, due.arguments, task_id, meta, release, extras)
            except RedisFault as error:
                self._refused(error, name, task_id)
                if uses_quorum_queues(self.app):  # their native delay is chosen before publish: start again
                    raise _PassNatively from error
                show_eta(body, publish_options, due.eta)
                producer = capture.real()
                with producer.connection._reraise_as_library_errors():
                    producer.publish(body, **publish_options)
            else:
                stored()

        return store

    def _schedule(
        self,
        payload: bytes,
        due: dict[str, Any],
        task_id: str,
        meta: dict[str, str],
        release: Sequence[Command] | None,
        extras: Extras | None,
    ) -> None:
        queue = self.queue()
        queue._run(
            queue._verbs.schedule(
                payload, due.get("delay"), due.get("at"), task_id, meta, "add", release, extras or NO_EXTRAS
            )
        )

    def _refused(self, error: RedisFault, name: str, task_id: str) -> None:
        """Raises the error, unless delayed tasks are to go to Celery's own countdown then."""
        unknown = isinstance(error, OutcomeUnknown)
        if not self.settings.native_when_unavailable:
            if sys.version_info >= (3, 11):
                error.add_note(
                    f"task {name}[{task_id}] was not scheduled"
                    + (", as far as is known" if unknown else "")
                    + '; delayadapters_on_unavailable="native" would pass it to Celery\'s own countdown'
                )
            raise error
        self.fallbacks += 1
        logger.warning(
            "Task %s[%s] goes to Celery's own countdown, held in worker memory: the delay Redis did not take it%s: %s",
            name,
            task_id,
            " (or did, and only its answer was lost: then the task runs twice)" if unknown else "",
            error,
        )


@lru_cache(maxsize=1)
def _positional_names() -> tuple[str, ...]:
    """What follows ``name, args, kwargs`` in ``Celery.send_task``, read from its signature: it grows at times."""
    parameters = inspect.signature(inspect.unwrap(Celery.send_task)).parameters.values()
    return tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)[4:]
