"""The delayed tasks of one ``group``, stored some hundred at a time.

``group.apply_async`` holds one producer while it sends its tasks (celery/canvas.py, ``_apply_tasks``), and gets it from
``app.producer_or_acquire``. What is sent with that producer meanwhile is gathered and stored in batches, the last one
before the producer is given back: so before ``apply_async`` returns or raises. A delay counts from the task's own call.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from celery.utils.log import get_logger

from ..errors import RedisFault
from ..jobs import Command, NewJob
from ..redis.commands import NO_EXTRAS, Extras
from ..redis.verbs import CHUNK_JOBS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..redis.sync import DelayQueue

__all__ = ["Gathering", "current", "sends_a_group"]

logger = get_logger(__name__)

LONGEST: Final = 0.1
"""Seconds for which a task is held back while others of its group follow."""

_local = threading.local()


class Item(NamedTuple):
    """One task: ``schedule``'s arguments, and what to do once it is stored."""

    payload: bytes
    due: dict[str, Any]
    id: str
    meta: dict[str, str]
    release: Sequence[Command] | None
    extras: Extras | None
    stored: Callable[[], None]
    called: float


def sends_a_group(frame: FrameType) -> bool:
    """Whether this is ``group._apply_tasks`` at work."""
    return frame.f_code.co_name == "_apply_tasks" and frame.f_globals.get("__name__") == "celery.canvas"


def current(producer: Any) -> Gathering | None:
    """What gathers the tasks sent with this producer in this thread."""
    found: Gathering | None = getattr(_local, "gathering", None)
    return found if found is not None and producer is not None and found.producer is producer else None


class Gathering:
    """Around the context manager that gives the producer."""

    def __init__(self, queue: Callable[[], DelayQueue], context: Any) -> None:
        self.producer: Any = None
        self._queue = queue
        self._context = context
        self._items: list[Item] = []
        self._outer: Gathering | None = None

    def __enter__(self) -> Any:
        self.producer = self._context.__enter__()
        self._outer = getattr(_local, "gathering", None)
        _local.gathering = self
        return self.producer

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Any:
        _local.gathering = self._outer
        try:
            self._flush()
        except RedisFault as fault:
            if error is None:
                self._context.__exit__(*sys.exc_info())
                raise
            logger.warning("A group was cut short by %r, and its last tasks were not stored: %s", error, fault)
        except BaseException:
            self._context.__exit__(*sys.exc_info())
            raise
        return self._context.__exit__(kind, error, trace)

    def add(
        self,
        payload: bytes,
        due: dict[str, Any],
        id: str,
        meta: dict[str, str],
        release: Sequence[Command] | None,
        extras: Extras | None,
        stored: Callable[[], None],
    ) -> None:
        now = time.monotonic()
        self._items.append(Item(payload, due, id, meta, release, extras, stored, now))
        if len(self._items) >= CHUNK_JOBS or now - self._items[0].called > LONGEST:
            self._flush()

    def _flush(self) -> None:
        items, self._items = self._items, []
        if not items:
            return
        now = time.monotonic()
        alongside: dict[tuple[Any, ...], None] = {}
        for item in items:
            for command in item.extras.alongside if item.extras is not None else ():
                alongside[tuple(command)] = None
        jobs = [
            NewJob(item.payload, **_from_now(item.due, now - item.called), id=item.id, meta=item.meta,
                   release=item.release)
            for item in items
        ]  # fmt: skip
        queue = self._queue()
        extras = Extras(alongside=list(alongside)) if alongside else NO_EXTRAS
        try:
            queue._run(queue._verbs.schedule_many(jobs, "add", extras))
        except RedisFault as error:
            if sys.version_info >= (3, 11):
                error.add_note(f"{len(items)} tasks of a group, from {items[0].id} on, were not all scheduled")
            raise
        for item in items:
            item.stored()


def _from_now(due: dict[str, Any], passed: float) -> dict[str, Any]:
    delay = due.get("delay")
    if delay is None:
        return due
    seconds = delay.total_seconds() if hasattr(delay, "total_seconds") else float(delay)
    return {"delay": max(0.0, seconds - passed)}
